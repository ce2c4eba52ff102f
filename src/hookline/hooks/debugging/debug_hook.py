"""DebugHook: finds the first NaN or Inf of a training run."""

from __future__ import annotations

import logging
import math
import sys
from typing import Any, Literal

import torch
from pydantic import PositiveInt

from hookline.context import LazyFloat
from hookline.errors import ConfigError
from hookline.hook import HookGroup
from hookline.hooks.metric_lookup import log_or_print
from hookline.options import BuiltIn
from hookline.printable import printable_message
from hookline.tensors.finiteness import all_finite, first_nonfinite
from hookline.tensors.nested import describe_structure, named_tensors

__all__ = ["DebugHook"]

log = logging.getLogger("hookline")

Check = Literal["loss", "gradients", "parameters"]
DEFAULT_CHECKS: tuple[Check, ...] = ("loss", "gradients")


class DebugHook(BuiltIn):
    """Checks loss, gradients and parameters for NaN and Inf, and names the first tensor with one.

    The first gradient or parameter in the model's order is named; for a loss, also the first
    parameter, buffer or tensor of the batch that is not finite. The message is logged once, and
    again only if the values were finite in between. Gradients are not checked under a `GradScaler`,
    which lets them overflow by design. A bare loop that does not run backward through its session
    has its loss checked at the end of the step.

    Args:
        break_on_nan: break into a debugger; False: only warn.
        log_shapes: log the structure of each loader's first batch, and again when it changes.
        action: overrides `break_on_nan`: `warn`; `stop` training, skipping the current step; or
            `break` into the debugger that `breakpoint()` starts, and stop if there is no terminal.
        check: what to check in every step. Nonfinite parameters make the next loss nonfinite, and
            are named then; with `"parameters"` they are found in the step that caused them.
        every_n_steps: check only every N steps.
    """

    cost = (
        "Waits for the device once per batch for the loss, and once per step for each of gradients "
        "and parameters, whose norms it computes."
    )
    hookline_group = HookGroup.MONITOR
    hookline_optional_events = frozenset({"on_before_backward", "on_train_batch_start"})

    def __init__(
        self,
        break_on_nan: bool = True,
        log_shapes: bool = False,
        action: Literal["warn", "stop", "break"] | None = None,
        check: list[Check] | tuple[Check, ...] = DEFAULT_CHECKS,
        every_n_steps: PositiveInt = 1,
    ) -> None:
        if not check and not log_shapes:
            raise ConfigError(
                "DebugHook has nothing to do: 'check' is empty and 'log_shapes' is off."
            )
        self._action = action or ("break" if break_on_nan else "warn")
        self._log_shapes = log_shapes
        self._every = every_n_steps
        self._batch: Any = None
        self._structures: dict[str, str] = {}
        self._failed_in_a_row: dict[Check, int] = {}
        self._counts: dict[Check, int] = {}
        self._check = frozenset(check)
        self._has_backward = self._warned_no_loss = False
        if log_shapes:  # it is pointless without batches
            self.hookline_optional_events = frozenset({"on_before_backward"})  # type: ignore[misc]
        # Unused events are turned off: they cost nothing, and a bare loop need not provide them.
        needed = {
            "on_before_backward": "loss" in check,
            "on_gradients_ready": "gradients" in check,
            "on_step_end": "loss" in check or "parameters" in check,
            "on_train_batch_start": "loss" in check or log_shapes,
        }
        self.__dict__.update((event, None) for event, used in needed.items() if not used)

    def on_train_batch_start(self, batch: Any, dataloader_name: str) -> None:
        """Keep the batch, to check it if its loss is not finite."""
        self._batch = batch
        if self._log_shapes:
            structure = describe_structure(batch)
            if self._structures.get(dataloader_name) != structure:
                changed = "now " if dataloader_name in self._structures else ""
                self._structures[dataloader_name] = structure
                log_or_print(f"A batch of '{dataloader_name}' is {changed}{structure}")

    def on_before_backward(self, trainer: Any, step: int, loss: torch.Tensor) -> None:
        """Check the loss before backward."""
        self._has_backward = True
        if (step + 1) % self._every == 0:
            self._check_loss(trainer, step + 1, loss.item(), skip=True)

    def _check_loss(self, trainer: Any, step: int, value: float, *, skip: bool = False) -> None:
        if self._is_new("loss", math.isfinite(value)):
            problem = f"The loss is {value}. {self._explain_loss(trainer.model)}"
            self._act(trainer, step, problem, skip=skip)

    def on_gradients_ready(self, trainer: Any, step: int, optimizer_idx: int) -> None:
        """Check the gradients before they are clipped or changed."""
        if (step + 1) % self._every or _scales_loss(trainer):
            return
        gradients = [p.grad for p in _parameters([trainer.optimizers[optimizer_idx]])]
        if self._is_new("gradients", all_finite(g for g in gradients if g is not None)):
            named = [(n, p.grad) for n, p in _named_parameters(trainer) if p.grad is not None]
            problem = f"The gradient of {first_nonfinite(named)} is not finite."
            self._act(trainer, step + 1, problem, skip=True)

    def on_step_end(self, trainer: Any, step: int, loss: LazyFloat | None = None) -> None:
        """Check the parameters, and the loss if `on_before_backward` is not provided."""
        if step % self._every:
            return
        if "loss" in self._check and not self._has_backward:
            if loss is not None:
                self._check_loss(trainer, step, float(loss))
            elif not self._warned_no_loss:
                self._warned_no_loss = True
                log.warning(
                    "DebugHook cannot check the loss, because this loop does not provide it. Let "
                    "the session run backward: `session.backward(loss)`."
                )
        if "parameters" not in self._check:
            return
        if self._is_new("parameters", all_finite(_parameters(trainer.optimizers))):
            found = first_nonfinite(_named_parameters(trainer))
            self._act(trainer, step, f"The parameter {found} is not finite.")

    def on_train_end(self) -> None:
        """Log how many checks failed."""
        self._batch = None
        self._has_backward = self._warned_no_loss = False
        for check, count in self._counts.items():
            log.warning("In this run the %s had NaN or Inf in %d checks.", check, count)
        self._counts.clear()
        self._failed_in_a_row.clear()

    def _is_new(self, check: Check, finite: bool) -> bool:
        """Count a failed check; return whether to report it: the first in a row, or not `warn`."""
        if finite:
            self._failed_in_a_row[check] = 0
            return False
        self._failed_in_a_row[check] = self._failed_in_a_row.get(check, 0) + 1
        self._counts[check] = self._counts.get(check, 0) + 1
        return self._failed_in_a_row[check] == 1 or self._action != "warn"

    def _explain_loss(self, model: torch.nn.Module) -> str:
        """Return what may have caused a loss that is not finite."""
        for kind, named in (
            ("parameter", model.named_parameters()),
            ("buffer", model.named_buffers()),
            ("part of the batch", named_tensors(self._batch, "batch")),
        ):
            found = first_nonfinite(named)
            if found is not None:
                return f"The first {kind} that is not finite is {found}."
        return (
            "Parameters, buffers and the batch are finite, so it comes from the computation: an "
            "overflow in the model, or the loss function (a log or a division by 0?)."
        )

    def _act(self, trainer: Any, step: int, problem: str, *, skip: bool = False) -> None:
        """Warn, break or stop; `skip`: the current optimizer step must not be applied."""
        log.warning("Step %d: %s", step, problem)
        has_terminal = all(s is not None and s.isatty() for s in (sys.stdin, sys.stdout))
        if self._action == "break" and has_terminal:
            _break(trainer, trainer.model, self._batch, problem)
        elif self._action != "warn":
            if skip and hasattr(trainer, "skip_optimizer_step"):  # not every loop can
                trainer.skip_optimizer_step(None, "NaN or Inf was found")
            trainer.stop(f"DebugHook: {problem}")


def _break(trainer: Any, model: torch.nn.Module, batch: Any, problem: str) -> None:
    print(printable_message(problem))
    print("Available: trainer, model, batch. `c` continues, `q` ends training.")
    breakpoint()


def _scales_loss(trainer: Any) -> bool:
    """Return whether the loop scales losses, and so skips steps whose gradients overflow."""
    precision = getattr(getattr(trainer, "config", None), "precision", None)
    return precision == "fp16" or getattr(trainer, "scaler", None) is not None


def _parameters(optimizers: list[torch.optim.Optimizer]) -> list[torch.Tensor]:
    return [p for o in optimizers for group in o.param_groups for p in group["params"]]


def _named_parameters(trainer: Any) -> list[tuple[str, torch.Tensor]]:
    """Return all parameters by name: the model's, then those that only optimizers hold."""
    named = list(trainer.model.named_parameters())
    known = {id(parameter) for _, parameter in named}
    others = [p for p in _parameters(trainer.optimizers) if id(p) not in known]
    return named + [(f"parameter {i} outside the model", p) for i, p in enumerate(others)]
