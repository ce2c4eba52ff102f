"""DebugHook: finds out where numbers stop being finite."""

from __future__ import annotations

import logging
import math
import sys
from typing import Any, Literal

import torch
from pydantic import PositiveInt

from hookline.errors import ConfigError
from hookline.hook import Rank
from hookline.hooks.debugging.finite import all_finite, first_bad, tensors_in
from hookline.options import BuiltIn
from hookline.tensors.nested import describe_structure

__all__ = ["DebugHook"]

log = logging.getLogger("hookline")

What = Literal["loss", "gradients", "parameters"]
USUALLY: tuple[What, ...] = ("loss", "gradients")


class DebugHook(BuiltIn):
    """Looks for NaN and Inf in loss, gradients and parameters, and names where they are first.

    Of gradients and parameters the first one in the model's order is named; for a loss also
    whether parameters, buffers and the batch are finite. One message tells of it, and the next
    comes when it had become finite in between. Gradients under a `GradScaler` overflow by design,
    and are left to it.

    Args:
        break_on_nan: break into a debugger; False: only warn.
        log_shapes: log what each loader's first batch is made of, and again when that changes.
        action: instead of what `break_on_nan` says: `warn`; `stop` training, without the step in
            which it was found; or `break` into the debugger that `breakpoint()` starts, where
            there is a terminal, and stop where there is none.
        check: what to look at in every step. Parameters that went bad make the next loss bad, which
            names them; with `"parameters"` they are noticed in the step that did it.
        every_n_steps: look at each N-th step only.
    """

    cost = (
        "Waits for the device once per batch for the loss, and once per step for each of gradients "
        "and parameters, of which it computes the norms."
    )
    hookline_rank = Rank.MONITOR

    def __init__(
        self,
        break_on_nan: bool = True,
        log_shapes: bool = False,
        action: Literal["warn", "stop", "break"] | None = None,
        check: list[What] | tuple[What, ...] = USUALLY,
        every_n_steps: PositiveInt = 1,
    ) -> None:
        if not check and not log_shapes:
            raise ConfigError("DebugHook: 'check' is empty, and 'log_shapes' off: nothing to do.")
        self._action = action or ("break" if break_on_nan else "warn")
        self._log_shapes = log_shapes
        self._every = every_n_steps
        self._batch: Any = None
        self._shapes: dict[str, str] = {}
        self._bad: dict[What, int] = {}  # checks in a row that failed
        self._counts: dict[What, int] = {}
        # What is not needed is switched off: it costs nothing, and a bare loop need not tell it.
        needed = {
            "on_before_backward": "loss" in check,
            "on_gradients_ready": "gradients" in check,
            "on_step_end": "parameters" in check,
            # A bare loop that draws no batches through its session cannot be stopped.
            "on_train_batch_start": "loss" in check or log_shapes or self._action != "warn",
        }
        self.__dict__.update((event, None) for event, used in needed.items() if not used)

    def on_train_batch_start(self, batch: Any, dataloader_name: str) -> None:
        """Keep the batch, to look at when its loss is bad."""
        self._batch = batch
        if self._log_shapes:
            shape = describe_structure(batch)
            if self._shapes.get(dataloader_name) != shape:
                changed = "now " if dataloader_name in self._shapes else ""
                self._shapes[dataloader_name] = shape
                _say(f"A batch of '{dataloader_name}' is {changed}{shape}")

    def on_before_backward(self, trainer: Any, step: int, loss: torch.Tensor) -> None:
        """Look at the loss, before anything is computed from it."""
        if (step + 1) % self._every:
            return
        value = loss.item()
        if self._is_news("loss", math.isfinite(value)):
            problem = f"The loss is {value}. {self._why(trainer.model)}"
            self._found(trainer, step + 1, problem, skip=True)

    def on_gradients_ready(self, trainer: Any, step: int, optimizer_idx: int) -> None:
        """Look at the gradients, before anything has changed them."""
        if (step + 1) % self._every or _scales(trainer):
            return
        gradients = [p.grad for p in _parameters([trainer.optimizers[optimizer_idx]])]
        if self._is_news("gradients", all_finite(g for g in gradients if g is not None)):
            named = [(n, p.grad) for n, p in _named(trainer) if p.grad is not None]
            problem = f"The gradient of {first_bad(named)} is not finite."
            self._found(trainer, step + 1, problem, skip=True)

    def on_step_end(self, trainer: Any, step: int) -> None:
        """Look at the parameters, as the step has left them."""
        if step % self._every:
            return
        if self._is_news("parameters", all_finite(_parameters(trainer.optimizers))):
            self._found(trainer, step, f"The parameter {first_bad(_named(trainer))} is not finite.")

    def on_train_end(self) -> None:
        """Say how often something was found."""
        self._batch = None
        for what, count in self._counts.items():
            log.warning("In this run the %s had NaN or Inf in %d checks.", what, count)
        self._counts.clear()
        self._bad.clear()

    def _is_news(self, what: What, finite: bool) -> bool:
        """Count what was found; True when it is the first of its kind, or every time to break."""
        if finite:
            self._bad[what] = 0
            return False
        self._bad[what] = self._bad.get(what, 0) + 1
        self._counts[what] = self._counts.get(what, 0) + 1
        return self._bad[what] == 1 or self._action != "warn"

    def _why(self, model: torch.nn.Module) -> str:
        """What a bad loss may come from."""
        for kind, named in (
            ("parameter", model.named_parameters()),
            ("buffer", model.named_buffers()),
            ("part of the batch", tensors_in(self._batch)),
        ):
            bad = first_bad(named)
            if bad is not None:
                return f"The first {kind} that is not finite is {bad}."
        return (
            "Parameters, buffers and the batch are finite, so it comes from the computation in "
            "between: an overflow in the model, or the loss function (a log or a division by 0?)."
        )

    def _found(self, trainer: Any, step: int, problem: str, *, skip: bool = False) -> None:
        """Do what the user wants done; `skip`: there is a step to come, and it would do harm."""
        log.warning("Step %d: %s", step, problem)
        if self._action == "break" and _in_terminal():
            _debugger(trainer, trainer.model, self._batch, problem)
        elif self._action != "warn":
            if skip and hasattr(trainer, "skip_optimizer_step"):  # a host may not be able to
                trainer.skip_optimizer_step(None, "NaN or Inf was found")
            trainer.stop(f"DebugHook: {problem}")


def _debugger(trainer: Any, model: torch.nn.Module, batch: Any, problem: str) -> None:
    print(
        f"{problem}\nHere are: trainer, model, batch. `c` goes on, `q` ends training.", flush=True
    )
    breakpoint()


def _say(text: str) -> None:
    if log.isEnabledFor(logging.INFO):
        log.info("%s", text)
    else:  # who asks for it wants to see it, with or without logging
        print(text, flush=True)


def _in_terminal() -> bool:
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))


def _scales(trainer: Any) -> bool:
    """Whether the loop scales losses, and so skips steps whose gradients overflow."""
    precision = getattr(getattr(trainer, "config", None), "precision", None)
    return precision == "fp16" or getattr(trainer, "scaler", None) is not None


def _parameters(optimizers: list[torch.optim.Optimizer]) -> list[torch.Tensor]:
    return [p for o in optimizers for group in o.param_groups for p in group["params"]]


def _named(trainer: Any) -> list[tuple[str, torch.Tensor]]:
    """All parameters by name, in the model's order; then those that only optimizers know."""
    named = list(trainer.model.named_parameters())
    known = {id(parameter) for _, parameter in named}
    others = [p for p in _parameters(trainer.optimizers) if id(p) not in known]
    return named + [(f"parameter {i} outside the model", p) for i, p in enumerate(others)]
