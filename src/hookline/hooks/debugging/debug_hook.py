"""DebugHook: finds the first NaN or Inf of a training run."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import PositiveInt

from hookline.context import NO_LOSS, LazyFloat
from hookline.dispatch.calling_hook import find_calling_hook
from hookline.errors import ConfigError
from hookline.hook import HookGroup
from hookline.hooks.debugging.repeated_forward import (
    CannotRepeatError,
    ModelCall,
    find_nonfinite_call,
    running_call,
)
from hookline.hooks.metric_lookup import log_or_print
from hookline.hooks.monitoring.monitor_bases import parameters_of
from hookline.options import BuiltIn
from hookline.printable import printable_message
from hookline.tensors.finiteness import all_finite, first_nonfinite, nonfinite_names
from hookline.tensors.nested import describe_structure, named_tensors

log = logging.getLogger("hookline")

Check = Literal["loss", "gradients", "parameters"]
DEFAULT_CHECKS: tuple[Check, ...] = ("loss", "gradients")


@dataclass(frozen=True)
class _Finding:
    """A value that is not finite, and the module that it comes from, if that is known."""

    of: Literal["loss", "gradient", "parameter"]
    message: str
    module: str | None = None


class DebugHook(BuiltIn):
    """Checks loss, gradients and parameters for NaN and Inf, and says where they come from.

    For a loss or gradient that is not finite, it names the first parameter or buffer, or tensor of
    the batch or of the model's inputs, that is not. If all of them are finite, it repeats the last
    forward, on a copy of the model that shares the parameters, and names the first module whose
    output is not finite, or the module whose own code computed such an input for another. This
    changes nothing in training. The message says what was looked at, and what could not be.

    It is logged once, and again only if everything was finite for a step in between. In a run it is
    also an event, `debug_finding`. Gradients are not checked under a `GradScaler`, which lets them
    overflow by design. A bare loop that does not run backward through its session has its loss
    checked at the end of the step.

    Args:
        break_on_nan: break into a debugger, as `action="break"` does; False: stop training.
        log_shapes: log the structure of each loader's first batch, and again when it changes.
        action: overrides `break_on_nan`: `stop` training with the message, skipping the current
            step; `warn` and go on; or `break` into the debugger that `breakpoint()` starts, and
            stop if there is no terminal.
        check: what to check in every step. Nonfinite parameters make the next loss nonfinite, and
            are named then; with `"parameters"` they are found in the step that caused them.
        every: check only every N steps.
    """

    every_name = "every_n_steps"
    cost = (
        "Waits for the device once per batch for the loss, and once per step for each of gradients "
        "and parameters, whose norms it computes. Keeps the model's inputs until the step ends. "
        "When something is not finite, one more forward without gradients."
    )
    hookline_group = HookGroup.MONITOR
    hookline_optional_events = frozenset(
        {"on_before_backward", "on_train_batch_start", "on_after_forward"}
    )

    def __init__(
        self,
        break_on_nan: bool = False,
        log_shapes: bool = False,
        action: Literal["warn", "stop", "break"] | None = None,
        check: list[Check] | tuple[Check, ...] = DEFAULT_CHECKS,
        every: PositiveInt = 1,
    ) -> None:
        if not check and not log_shapes:
            raise ConfigError(
                "DebugHook has nothing to do: 'check' is empty and 'log_shapes' is off."
            )
        self._action = action or ("break" if break_on_nan else "stop")
        self._log_shapes = log_shapes
        self.every = every
        self._structures: dict[str, str] = {}
        self._check = frozenset(check)
        self._reset()
        if log_shapes:  # it is pointless without batches
            optional = self.hookline_optional_events - {"on_train_batch_start"}
            self.hookline_optional_events = optional  # type: ignore[misc]
        # Unused events are turned off: they cost nothing, and a bare loop need not provide them.
        explains = bool({"loss", "gradients"} & self._check)
        needed = {
            "on_before_backward": "loss" in check,
            "on_gradients_ready": "gradients" in check,
            "on_step_end": bool(check),
            "on_train_batch_start": explains or log_shapes,
            "on_after_forward": explains,
        }
        self.__dict__.update((event, None) for event, used in needed.items() if not used)

    def _reset(self) -> None:
        self._batch: Any = None
        self._call: ModelCall | None = None  # the last one of the step
        self._forwards = 0  # of the step
        self._counts: dict[Check, int] = {}
        self._has_failed = self._is_reported = False  # in this step; since it was finite
        self._has_backward = self._warned_no_loss = False

    def on_train_batch_start(self, batch: Any, dataloader_name: str) -> None:
        """Keep the batch, to check it if its loss is not finite."""
        self._batch = batch
        if self._log_shapes:
            structure = describe_structure(batch)
            if self._structures.get(dataloader_name) != structure:
                changed = "now " if dataloader_name in self._structures else ""
                self._structures[dataloader_name] = structure
                log_or_print(f"A batch of '{dataloader_name}' is {changed}{structure}")

    def on_after_forward(self, step: int) -> None:
        if (step + 1) % self.every == 0 and not torch._C._are_functorch_transforms_active():
            self._call = running_call()
            self._forwards += 1

    def on_before_backward(self, trainer: Any, step: int, loss: torch.Tensor) -> None:
        self._has_backward = True
        if (step + 1) % self.every == 0:
            self._check_loss(trainer, step + 1, loss.item(), after_step=False)

    def _check_loss(self, trainer: Any, step: int, value: float, *, after_step: bool) -> None:
        if self._is_new("loss", math.isfinite(value), trainer, skip=not after_step):
            cause, module = self._explain(trainer.model, after_step=after_step)
            finding = _Finding("loss", f"The loss is {value}. {cause}", module)
            self._act(trainer, step, finding)

    def on_gradients_ready(self, trainer: Any, step: int, optimizer_idx: int) -> None:
        """Check the gradients before they are clipped or changed."""
        if (step + 1) % self.every or _scales_loss(trainer):
            return
        gradients = [p.grad for p in parameters_of([trainer.optimizers[optimizer_idx]])]
        is_finite = all_finite(g for g in gradients if g is not None)
        if self._is_new("gradients", is_finite, trainer, skip=True):
            named = [(n, p.grad) for n, p in _named_parameters(trainer) if p.grad is not None]
            cause, module = self._explain(trainer.model)
            finding = _Finding("gradient", f"{_describe_gradients(named)} {cause}", module)
            self._act(trainer, step + 1, finding)

    def on_step_end(self, trainer: Any, step: int, loss: LazyFloat | None = None) -> None:
        if step % self.every == 0:
            self._check_step(trainer, step, loss)
            self._is_reported &= self._has_failed
            self._has_failed = False
        self._call, self._forwards = None, 0

    def _check_step(self, trainer: Any, step: int, loss: LazyFloat | None) -> None:
        if "loss" in self._check and not self._has_backward:
            if loss is not None and loss is not NO_LOSS:
                self._check_loss(trainer, step, float(loss), after_step=True)
            elif loss is None and not self._warned_no_loss:
                self._warned_no_loss = True
                log.warning(
                    "DebugHook cannot check the loss, because this loop does not provide it. Let "
                    "the session run backward: `session.backward(loss)`."
                )
        if "parameters" not in self._check:
            return
        if self._is_new("parameters", all_finite(parameters_of(trainer.optimizers)), trainer):
            found = first_nonfinite(_named_parameters(trainer))
            finding = _Finding("parameter", f"The parameter {found} is not finite.")
            self._act(trainer, step, finding)

    def on_train_end(self) -> None:
        for check, count in self._counts.items():
            checks = "1 check" if count == 1 else f"{count} checks"
            log.warning("In this run the %s had NaN or Inf in %s.", check, checks)
        self._reset()

    def _is_new(self, check: Check, finite: bool, trainer: Any, *, skip: bool = False) -> bool:
        """Count a failed check; return whether to report it: the first since all was finite.

        `skip`: if training is to stop, this step must not be applied, also if the loop goes on.
        """
        if finite:
            return False
        if skip and self._stops and hasattr(trainer, "skip_optimizer_step"):  # not every loop can
            trainer.skip_optimizer_step(None, "NaN or Inf was found")
        self._counts[check] = self._counts.get(check, 0) + 1
        is_new, self._has_failed, self._is_reported = not self._is_reported, True, True
        return is_new

    def _explain(
        self, model: torch.nn.Module, *, after_step: bool = False
    ) -> tuple[str, str | None]:
        """Return where a value that is not finite may come from, and the module if it is known."""
        call, last = self._call, "last " if self._forwards > 1 else ""
        looked_at = ["parameters", "buffers"]
        places: list[tuple[str, Any]] = [
            ("parameter", model.named_parameters()),
            ("buffer", model.named_buffers()),
        ]
        if self._batch is not None:
            looked_at.append(f"the {last}batch")
            places.append(("part of the batch", named_tensors(self._batch, "batch")))
        if call is not None:
            looked_at.append(f"the model's {last}inputs")
            inputs = [*named_tensors(call.args, "args"), *named_tensors(call.kwargs, "kwargs")]
            places.append(("input of the model", inputs))
        for kind, named in places:
            named = list(named)
            found = first_nonfinite(named)
            if found is not None:
                when = " after the step, which may have made it so," if after_step else ""
                return f"{_describe_place(kind, named, when)} is {found}.", None
        finite = f"{', '.join(looked_at[:-1])} and {looked_at[-1]} are finite".capitalize()
        if call is None:
            return f"{finite}. The forward was not seen, so it was not repeated.", None
        try:
            found_call = find_nonfinite_call(call)
        except CannotRepeatError as error:
            return f"{finite}. The model's forward could not be repeated: {error}.", None
        if found_call is None:
            earlier = f"at the step's {self._forwards - 1} earlier forwards, " if last else ""
            return (
                f"{finite}, and so are the outputs of all modules in a repeated forward: look "
                f"{earlier}at the loss function (a log or a division by 0?), at what differs "
                "between two forwards (dropout, edits), and at backward."
            ), None
        seen = f"{finite}. In a repeated forward, the first output that is not finite is that of"
        if found_call.received_by is not None and found_call.caller is not None:
            is_same = found_call.received_by == found_call.module
            whose = "its input" if is_same else f"the input of {_quote(found_call.received_by)}"
            return (
                f"{seen} {_quote(found_call.module)}, and {whose} was not finite already: look "
                f"at the code of {_quote(found_call.caller)} before that call."
            ), None
        return f"{seen} {_quote(found_call.module)}.", found_call.module

    @property
    def _stops(self) -> bool:
        has_terminal = all(s is not None and s.isatty() for s in (sys.stdin, sys.stdout))
        return self._action == "stop" or (self._action == "break" and not has_terminal)

    def _act(self, trainer: Any, step: int, finding: _Finding) -> None:
        log.warning("Step %d: %s", step, finding.message)
        run = getattr(trainer, "run", None)
        if run is not None and hasattr(run, "event"):
            where = finding.of if finding.module is None else "output"
            run.event(
                "debug_finding",
                step=step,
                probe=find_calling_hook() or "debug",
                module=finding.module,
                condition="nonfinite",
                where=where,
                message=finding.message,
            )
        if self._stops:
            trainer.stop(f"DebugHook: {finding.message}")
        elif self._action == "break":
            _break(trainer, trainer.model, self._batch, finding.message)


def _break(trainer: Any, model: torch.nn.Module, batch: Any, problem: str) -> None:
    print(printable_message(problem))
    print("Available: trainer, model, batch. `c` continues, `q` ends training.")
    breakpoint()


def _describe_gradients(named: Sequence[tuple[str, torch.Tensor]]) -> str:
    """Return which gradients are not finite, the one that backward computes first before all."""
    names = nonfinite_names(named)
    last = first_nonfinite((name, gradient) for name, gradient in named if name in names[-1:])
    if len(names) < 2:
        return f"The gradient of {last} is not finite."
    return (
        f"The gradients of {len(names)} of {len(named)} parameters are not finite. In the model's "
        f"order, which backward usually follows from the end, the last of them is {last}."
    )


def _describe_place(kind: str, named: list[tuple[str, torch.Tensor]], when: str) -> str:
    """Return the beginning of a sentence that names the first tensor that is not finite."""
    count = len(nonfinite_names(named)) if kind == "parameter" else 1
    if count < 2:
        return f"The first {kind} that is not finite{when}"
    when = when.replace("made it so,", "made them so")
    return (
        f"{count} of {len(named)} parameters are not finite{when}; the first in the model's order"
    )


def _quote(module: str) -> str:
    return f"'{module}'" if module else "the model"


def _scales_loss(trainer: Any) -> bool:
    """Return whether the loop scales losses, and so skips steps whose gradients overflow."""
    precision = getattr(getattr(trainer, "config", None), "precision", None)
    scaler = getattr(trainer, "scaler", None)
    return precision == "fp16" or (scaler is not None and scaler.is_enabled())


def _named_parameters(trainer: Any) -> list[tuple[str, torch.Tensor]]:
    """Return all parameters by name: the model's, then those that only optimizers hold."""
    named = list(trainer.model.named_parameters())
    known = {id(parameter) for _, parameter in named}
    others = [p for p in parameters_of(trainer.optimizers) if id(p) not in known]
    return named + [(f"parameter {i} outside the model", p) for i, p in enumerate(others)]
