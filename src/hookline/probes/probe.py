"""Probe: the base of what captures, measures, checks or edits the inputs and outputs of modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hookline.errors import ConfigError, ProbeError
from hookline.hook import Hook
from hookline.probes.attachment import Attachment
from hookline.probes.call import Call
from hookline.probes.forward_schedule import ForwardSchedule
from hookline.probes.module_selection import Which, select
from hookline.probes.taps import check_taps

__all__ = ["Probe"]


class Probe(Hook):
    """Sees the calls of some modules. Subclass it and implement `after(call)` or `before(call)`.

    Args:
        modules: Which modules: names, globs, regular expressions, types, predicates, or modules
            themselves; None for none, only taps.
        taps: Which of the values that `hookline.tap` names in the model's code: names or globs.
    """

    hookline_kind = "probe"

    edits: bool = False
    """Whether what `after` returns replaces the module's output.

    This needs `enable_intervention`, and a failure stops training.
    """

    enable_intervention: bool = False
    """The permission to edit. `Edit` takes it as an option; other subclasses set it."""

    wants_before: bool = False
    """Whether `before(call)` is called, too."""

    wants_input: bool = True
    """Whether it reads `call.args` or `call.kwargs`; this has a cost in a compiled model."""

    wants_recomputed: bool = False
    """Whether it sees calls that are recomputed in backward, too (`call.recomputed`)."""

    modules: Which | None = ""
    taps: Sequence[str] = ()
    attachment: Attachment | None = None
    probe_name: str = "probe"

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.edits:  # training depends on it
            cls.critical = cls.intervenes = True

    def __init__(self, modules: Which | None, taps: Sequence[str] = ()) -> None:
        self.modules = modules
        self.taps = check_taps(taps)

    def before(self, call: Call) -> Any:
        """Called before a module runs. An edit may return new `(args, kwargs)`."""
        return None

    def after(self, call: Call) -> Any:
        """Called after a module has run. An edit may return what replaces `call.output`."""
        return None

    def forward_start(self) -> None:
        """Called when the model's outermost call begins, but not in a recomputation."""

    def forward_end(self) -> None:
        """Called when the model's outermost call has ended without an error."""

    @property
    def wants_forward_start(self) -> bool:
        """Whether the class implements `forward_start`."""
        return type(self).forward_start is not Probe.forward_start

    @property
    def wants_forward_end(self) -> bool:
        """Whether the class implements `forward_end`."""
        return type(self).forward_end is not Probe.forward_end

    @property
    def acts(self) -> bool:
        """Whether an enabled edit is applied; call `attachment.refresh()` after a change."""
        return True

    def compiled_edit(self, name: str) -> Callable[[Any, torch.Tensor], Any] | None:
        """Return the edit for compiled models: a function that can be compiled.

        It is called with the output and a tensor that says whether the edit is on, and returns
        `torch.where(on, edited, output)`.
        """
        return None

    # -- attaching --------------------------------------------------------------------------------

    def attach(
        self,
        model: torch.nn.Module,
        *,
        name: str | None = None,
        every: int | None = None,
        context: Any = None,
        guard: Callable[..., Any] | None = None,
    ) -> Attachment:
        """Attach the probe to a model: it sees the calls of its modules from now on.

        Args:
            model: The model.
            name: The probe's name in messages and captured states.
            every: See only the forwards N, 2N, 3N … of the model. During training the schedule
                counts steps and belongs to the registration: `trainer.add_hook(probe, every=N)`.
            context: Has `step` and `epoch` during training.
            guard: Calls the probe's methods; by default they are called directly.
        """
        self.check_permission()
        if self.attachment is None or self.attachment.root is not model:
            self.detach()
            self.probe_name = name or self.probe_name
            sites = self.choose(model)
            self.attachment = Attachment(self, sites, model, context, guard, self.taps)
        if every is not None:
            self.attachment.guard = ForwardSchedule(self, every)
        self.attachment.on()
        return self.attachment

    def check_permission(self) -> None:
        """Raise if it edits without the permission."""
        made_with = self.hookline_options.get("enable_intervention", False)
        if self.edits and not (self.enable_intervention or made_with):
            raise ProbeError(
                f"A {type(self).__name__} edits the outputs of modules, which is not allowed yet. "
                f"To allow it, set {type(self).__name__}.enable_intervention = True, or set it on "
                "this probe."
            )

    def choose(self, model: torch.nn.Module) -> dict[str, torch.nn.Module]:
        """Return the model's modules that the probe is for; raise if one does not exist."""
        if self.modules is not None:
            return select(model, self.modules)
        if not self.taps:
            raise ConfigError(f"The probe '{self.probe_name}' has neither modules nor taps.")
        return {}

    def detach(self) -> None:
        """Detach the probe from the model."""
        if self.attachment is not None:
            self.attachment.close()
            self.attachment = None

    def __getstate__(self) -> dict[str, Any]:
        """Copy the probe without its model."""
        return {name: value for name, value in self.__dict__.items() if name != "attachment"}
