"""Findings, and the base class of the checks that make them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from hookline.hooks.lint.training_view import TrainingView

Severity = Literal["error", "warning"]

_MAX_NAMED = 4  # subjects that a finding names


Method = TypeVar("Method", bound=Callable[..., Any])


def in_due_steps(method: Method) -> Method:
    """Mark a check's method as one that is called in due steps only.

    What is not marked is called in every step, and has to be cheap: it counts, or compares modes.
    """
    method.is_for_due_steps = True  # type: ignore[attr-defined]
    return method


@dataclass(frozen=True)
class Finding:
    """Something that a check has found.

    Attributes:
        check: the check's id.
        severity: `error`: training does not do what the code says; `warning`: very probably.
        step: the optimizer step in which it was found, from 1.
        rank: the process that has found it.
        subject: the parameter, module, loader or optimizer.
        message: what was seen, with numbers.
        fix: what to change.
    """

    check: str
    severity: Severity
    step: int
    rank: int
    subject: str
    message: str
    fix: str

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)

    def __str__(self) -> str:
        """Return the finding as a block of three lines."""
        head = f"{self.severity} {self.check} at step {self.step}: {self.subject}"
        return f"{head}\n    {self.message}\n    Fix: {self.fix}"


class Check:
    """Something that a correct training run satisfies, and how a violation is recognised.

    The class docstring is the check's page: what it means, then `Bug:`, `Fix:` and `Ignore:`.
    A subclass defines the methods of the points in training that it looks at (see `POINTS`). A
    check never changes anything, draws no random numbers, and never reads a tensor itself: `read`
    does, once, at the end of the step.

    Attributes:
        id: its name for users, which never changes: the class's name, with hyphens.
        rule: the number of its rule, set by the catalogue.
        severity: of its findings.
        is_active: whether it calls the model again.
        needs_ranks: whether it compares processes.
        view: where training stands.
    """

    id: ClassVar[str]
    rule: ClassVar[int]
    severity: ClassVar[Severity] = "error"
    is_active: ClassVar[bool] = False
    needs_ranks: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.id = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", cls.__name__).lower()

    def __init__(self, view: TrainingView, report: Callable[[Finding], None]) -> None:
        self.view, self._report = view, report
        self.has_found = False
        self.left_out: str | None = None  # why it cannot look
        self._counts: dict[Any, int] = {}
        self.setup()

    def setup(self) -> None:
        """Make what the check keeps."""

    def sample(self, tensor: Tensor) -> Tensor:
        """Return a copy of some elements of a tensor, always the same ones, on its device."""
        return self.view.sample(tensor)

    def read(self, tensors: Sequence[Tensor], judge: Callable[..., None], *args: Any) -> None:
        """Read tensors at the end of the step; then call `judge(numbers, *args)`.

        `numbers` is a list with a number for each scalar tensor, and a list for each vector.
        """
        self.view.read(tensors, judge, *args)

    def in_a_row(self, is_wrong: Any, key: Any = None) -> int:
        """Count how many times in a row something was wrong, by key, with this time."""
        self._counts[key] = self._counts.get(key, 0) + 1 if is_wrong else 0
        return self._counts[key]

    def find(
        self,
        subject: str | Sequence[str],
        message: str,
        fix: str | None = None,
        *,
        severity: Severity | None = None,
    ) -> None:
        """Report a finding in the step in progress; the fix is that of the page."""
        self.has_found = True
        names = [subject] if isinstance(subject, str) else list(subject)
        shown = ", ".join(names[:_MAX_NAMED])
        if len(names) > _MAX_NAMED:
            shown += f" and {len(names) - _MAX_NAMED} more"
        fix = fix or " ".join(self.sections()["Fix"].replace("`", "").split())
        kind, view = severity or self.severity, self.view
        self._report(Finding(self.id, kind, view.step, view.rank, shown, message, fix))

    @classmethod
    def page(cls) -> str:
        """Return the docstring, without indentation."""
        return inspect.cleandoc(cls.__doc__ or "")

    @classmethod
    def sections(cls) -> dict[str, str]:
        """Return the sections of the page: the text before them is that of ""."""
        text, *rest = re.split(r"^(Bug|Fix|Ignore):[ \n]", cls.page(), flags=re.MULTILINE)
        return {"": text, **dict(zip(rest[::2], rest[1::2], strict=True))}


def describe_left_out(left_out: Mapping[str, str]) -> list[str]:
    """Return a sentence for each reason why checks were left out."""
    reasons: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        reasons.setdefault(reason, []).append(name)
    return [f"Left out: {', '.join(names)} ({reason})." for reason, names in reasons.items()]


POINTS = {
    "on_train_start": "training begins; the model and its optimizers are known",
    "on_loader_start": "an iterator of a DataLoader is made (loader, iterator)",
    "on_batch_loaded": "a DataLoader has delivered a batch (LoadedBatch)",
    "on_module_call": "a module has returned, in a due step (ModuleCall); not in compiled models",
    "on_after_forward": "a training forward of the model has returned (outputs)",
    "on_model_call": "a whole model has returned, in training or evaluation (ModuleCall)",
    "on_loss_call": "a loss function of torch.nn.functional has returned (LossCall)",
    "on_before_backward": "backward begins (the loss; None if there are several)",
    "on_batch_trained": "backward begins, the first since a DataLoader has delivered a batch",
    "on_after_backward": "backward has run",
    "on_before_clip": "a clipping function of torch is called (ClipCall)",
    "on_clip_call": "a clipping function of torch has returned (ClipCall)",
    "on_loss_scaled": "a GradScaler has scaled a loss (scaler)",
    "on_before_optimizer_step": "the optimizer is about to step (optimizer)",
    "on_step_after_loading": "the same, in the ten steps after a state was loaded (optimizer)",
    "on_after_optimizer_step": "the optimizer has stepped (optimizer)",
    "on_step_sampled": "the optimizer has stepped, in a due step (optimizer, StepSamples)",
    "on_scheduler_step": "a learning rate scheduler was stepped (scheduler)",
    "on_optimizer_made": "an optimizer of torch was constructed (optimizer)",
    "on_state_loaded": "load_state_dict of a module, optimizer or scheduler (object, state)",
    "on_weights_loaded": "the same of a module (module, state, result, whether it was assigned)",
    "on_ties_emptied": "to_empty was called of a module with ties (pairs of places)",
    "on_file_loaded": "torch.load has returned (the object)",
    "on_step_end": "the step is done; what was read is judged after this",
    "on_checkpoint_load": "Hookline has restored a checkpoint",
    "on_repeat": "of active checks, once in an early step: call the model again (RepeatableCall)",
    "on_train_end": "training has ended",
}
"""The methods that a check may have, when they are called, and with what."""
