"""DebugHook: finds the first NaN or Inf of a training run."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterable
from typing import Any, Literal

import torch
from pydantic import PositiveInt

from hookline.context import NO_LOSS, LazyFloat
from hookline.dispatch.calling_hook import find_calling_hook
from hookline.errors import ConfigError, listed
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
from hookline.tensors.nested import describe_structure, named_tensors
from hookline.tensors.norms import all_finite, first_nonfinite, nonfinite_names

log = logging.getLogger("hookline")

Check = Literal["loss", "gradients", "parameters"]
DEFAULT_CHECKS: tuple[Check, ...] = ("loss", "gradients")


class DebugHook(BuiltIn):
    """Checks loss, gradients and parameters for NaN and Inf, and says where they come from.

    For a loss or gradient that is not finite, it names the first parameter or buffer, or tensor of
    the batch or of the model's inputs, that is not. If all of them are finite, it repeats the last
    forward, on a copy of the model that shares the parameters, and names the first module whose
    output is not finite, or the module whose own code computed such an input for another.

    If most parameters are not finite, or some are and the steps before were not looked at, no first
    one is named: the origin is older.

    It is logged once, and again only if everything was finite for a step in between. In a run it is
    also an event, `debug_finding`. Gradients are not checked under a `GradScaler`, which lets them
    overflow by design.

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
        "Waits for the device once per batch for the loss, and once per step for the norms of each "
        "of gradients and parameters. Keeps the model's inputs until the step ends."
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
        self._last_step = 0  # the last step that was looked at

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
            cause, module = self._explain(trainer.model, step, after_step=after_step)
            self._act(trainer, step, "loss", f"The loss is {value}. {cause}", module)

    def on_gradients_ready(self, trainer: Any, step: int, optimizer_idx: int) -> None:
        """Check the gradients before they are clipped or changed."""
        if (step + 1) % self.every or _scales_loss(trainer):
            return
        gradients = [p.grad for p in parameters_of([trainer.optimizers[optimizer_idx]])]
        is_finite = all_finite(g for g in gradients if g is not None)
        if self._is_new("gradients", is_finite, trainer, skip=True):
            named = [(n, p.grad) for n, p in _named_parameters(trainer) if p.grad is not None]
            names = nonfinite_names(named)
            message = f"The gradients of {len(names)} of {len(named)} parameters are not finite."
            cause, module = self._explain(trainer.model, step + 1)
            if not self._explain_older(
                trainer.model.named_parameters(), step + 1, after_step=False
            ):
                last = first_nonfinite((name, g) for name, g in named if name == names[-1])
                message += (
                    " In the model's order, which backward usually follows from the end, the last "
                    f"is {last}."
                )
            self._act(trainer, step + 1, "gradient", f"{message} {cause}", module)

    def on_step_end(self, trainer: Any, step: int, loss: LazyFloat | None = None) -> None:
        if step % self.every == 0:
            self._check_step(trainer, step, loss)
            self._is_reported &= self._has_failed
            self._has_failed, self._last_step = False, step
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
            named = _named_parameters(trainer)
            message = f"The parameter {first_nonfinite(named)} is not finite."
            if self._first_unseen(step) is not None:
                message = self._explain_older(named, step, after_step=True)
            self._act(trainer, step, "parameter", message)

    def on_train_end(self) -> None:
        for check, count in self._counts.items():
            log.warning("In this run the %s had NaN or Inf in %s check(s).", check, count)
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

    def _first_unseen(self, step: int) -> int | None:
        """Return the first step since the last look, if it is not this one."""
        return self._last_step + 1 if self._last_step + 1 < step else None

    def _explain_older(
        self, named: Iterable[tuple[str, torch.Tensor]], step: int, *, after_step: bool
    ) -> str:
        """Return what is known of nonfinite parameters if none can be called the first; else "".

        That is if they may be older than the step, or if most of them are not finite.
        """
        named = list(named)
        names, unseen = nonfinite_names(named), self._first_unseen(step)
        is_most = 2 * len(names) > len(named)
        if not names or (unseen is None and not is_most):
            return ""
        counts = f"{len(names)} of {len(named)} parameters are not finite"
        counts += "" if is_most else f" ({listed(names)})"
        if unseen is not None:
            others = (
                f"steps {unseen} to {step - 1} were" if unseen < step - 1 else f"step {unseen} was"
            )
            origin = f"the origin may be older, as {others} not looked at"
        elif after_step:
            origin = "this step may have made them so"
        else:
            origin = "the origin is older than this step"
        return (
            f"{counts}, so none is named as the first: {origin}. To find it, look at the loss and "
            "the gradients of every step: DebugHook(every=1, action='stop'), or `hookline run "
            "--hook debug:action=stop -- …`."
        )

    def _explain(
        self, model: torch.nn.Module, step: int, *, after_step: bool = False
    ) -> tuple[str, str | None]:
        """Return where a value that is not finite may come from, and the module if it is known."""
        call = self._call
        places: dict[str, Any] = {
            "parameter": model.named_parameters(),
            "buffer": model.named_buffers(),
        }
        if self._batch is not None:
            places["part of the batch"] = named_tensors(self._batch, "batch")
        if call is not None:
            arguments = {"args": call.args, "kwargs": call.kwargs}
            places["input of the model"] = [
                pair for name, value in arguments.items() for pair in named_tensors(value, name)
            ]
        older = self._explain_older(model.named_parameters(), step, after_step=after_step)
        if older:
            return older, None
        for kind, named in places.items():
            if (found := first_nonfinite(named)) is not None:
                when = " after the step, which may have made it so," if after_step else ""
                return f"The first {kind} that is not finite{when} is {found}.", None
        finite = f"Each {', '.join(places)} is finite"
        if call is None:
            return f"{finite}. The forward was not seen, so it was not repeated.", None
        if self._forwards > 1:
            finite += f" in the last of the step's {self._forwards} forwards"
        try:
            found_call = find_nonfinite_call(call)
        except CannotRepeatError as error:
            return f"{finite}. The model's forward could not be repeated: {error}.", None
        if found_call is None:
            return (
                f"{finite}, and so are the outputs of all modules in a repeated forward: look at "
                "the loss function (a log or a division by 0?), at what differs between two "
                "forwards (dropout, edits), and at backward. The probe DebugProbe('**') looks at "
                "the forwards of training themselves."
            ), None
        module, caller = found_call
        seen = f"{finite}. In a repeated forward, the first output that is not finite is that of"
        if caller is None:
            return f"{seen} {_quote(module)}.", module
        return (
            f"{seen} {_quote(module)}, and its input was not finite already: look at the code of "
            f"{_quote(caller)}."
        ), None

    @property
    def _stops(self) -> bool:
        has_terminal = all(s is not None and s.isatty() for s in (sys.stdin, sys.stdout))
        return self._action == "stop" or (self._action == "break" and not has_terminal)

    def _act(
        self, trainer: Any, step: int, where: str, message: str, module: str | None = None
    ) -> None:
        log.warning("Step %d: %s", step, message)
        run = getattr(trainer, "run", None)
        if run is not None and hasattr(run, "event"):
            run.event(
                "debug_finding",
                step=step,
                probe=find_calling_hook() or "debug",
                module=module,
                condition="nonfinite",
                where=where if module is None else "output",
                message=message,
            )
        if self._stops:
            trainer.stop(f"DebugHook: {message}")
        elif self._action == "break":
            _break(trainer, trainer.model, self._batch, message)


def _break(trainer: Any, model: torch.nn.Module, batch: Any, problem: str) -> None:
    print(printable_message(problem))
    print("Available: trainer, model, batch. `c` continues, `q` ends training.")
    breakpoint()


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
