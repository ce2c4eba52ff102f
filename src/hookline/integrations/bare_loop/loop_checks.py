"""Checks for loops that a session cannot follow.

In the first step a problem raises `LoopError`. Later it is logged once: nothing here stops a run
that trains.
"""

from __future__ import annotations

import logging

import torch

from hookline.dispatch import HookManager
from hookline.errors import LoopError
from hookline.integrations.bare_loop.backward_frame import is_being_called
from hookline.integrations.bare_loop.bare_loop_context import BareLoopEventContext
from hookline.integrations.bare_loop.requirements import CALLS
from hookline.loop.model_watch import ModelWatch

__all__ = ["LoopChecks", "is_compiled_in_place"]

log = logging.getLogger("hookline")

_SCALER_STEP = torch.amp.GradScaler.step.__code__


def is_compiled_in_place(model: torch.nn.Module) -> bool:
    """Return whether `model.compile()` was called."""
    return getattr(model, "_compiled_call_impl", None) is not None


class LoopChecks:
    """Finds what a loop does that hooks would see wrong."""

    def __init__(
        self,
        context: BareLoopEventContext,
        hooks: HookManager,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self._context = context
        self._hooks = hooks
        self._scaler = scaler
        self._warned: set[str] = set()

    def warn_once(self, key: str, message: str) -> None:
        """Log a warning, the first time that it has this key."""
        if key not in self._warned:
            self._warned.add(key)
            log.warning("%s", message)

    def _report(self, key: str, message: str) -> None:
        if self._context.step == 0:
            raise LoopError(message)
        self.warn_once(key, message)

    def check_compiled(self) -> None:
        """Raise for a model that was compiled in place."""
        if is_compiled_in_place(self._context.model):
            raise LoopError(
                "This model was compiled in place (model.compile()), so hooks on its call would "
                "be compiled too. Use `compiled = torch.compile(model)`, call `compiled` in the "
                "loop and attach it."
            )

    def check_attached(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise for an optimizer that was not attached."""
        if not any(optimizer is attached for attached in self._context.optimizers):
            raise LoopError(
                f"updates() was given {type(optimizer).__name__}, which is not one of the "
                "optimizers that were attached. Give one of those, or nothing for all of them."
            )

    def report_second_step(self, idx: int) -> None:
        """Report an optimizer that steps twice before the others have stepped."""
        self._report(
            "second step",
            f"Optimizer {idx} steps again before the others have stepped, so steps cannot be "
            "counted. Attach each optimizer with a session of its own.",
        )

    def check_scaler(self, *, in_scaler_step: bool) -> None:
        """Report a loop that has a scaler and calls `optimizer.step()` itself."""
        if self._scaler is not None and self._scaler.is_enabled() and not in_scaler_step:
            self._report(
                "scaler",
                "attach was given a scaler, but the loop calls optimizer.step() itself, on scaled "
                "gradients. Call scaler.step(optimizer), or do not give attach the scaler.",
            )

    def check_closure(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise for hooks on the gradients of an optimizer that evaluates its closure often."""
        events = ("on_gradients_ready", "on_before_optimizer_step", "update")
        asking = [label for event in events for label in self._hooks.listeners(event)]
        asking += self._hooks.required_arguments("on_step_end").get("grad_norm", [])
        if isinstance(optimizer, torch.optim.LBFGS) and asking:
            raise LoopError(
                f"{', '.join(asking)} asks for the gradients that the optimizer uses, but LBFGS "
                "evaluates its closure many times in a step. Remove the hook, or use "
                "on_after_backward."
            )

    def report_changed_gradients(self) -> None:
        """Report gradients that the loop changed before on_gradients_ready could be fired."""
        listeners = ", ".join(self._hooks.listeners("on_gradients_ready"))
        self._report(
            "changed gradients",
            f"{listeners} reads gradients before anything has changed them, but this loop changes "
            "them between backward and optimizer.step (clipping?). Call `session.updates()` before "
            "that, or let the session clip: `session.clip(max_norm)`.",
        )

    def unseen_calls(self, model: ModelWatch, *, needs_backward: bool) -> list[str]:
        """Return what should have been seen before the first step, but was not."""
        if self._scaler is None and is_being_called(_SCALER_STEP):
            return ["The loop steps through a GradScaler. Name it: `attach(…, scaler=scaler)`."]
        if model.on and not model.calls_seen:
            return [
                "The optimizer steps, but the attached model was not called. Attach what the loop "
                "calls: the compiled or wrapped model, not the one inside; and call it as "
                "`model(x)`, not `model.forward(x)`."
            ]
        if model.on and not model.backwards_seen and needs_backward:
            return [f"Backward did not pass through what the model returned. {CALLS['backward']}"]
        if self._hooks.dispatchers.update is not None and (shared := self._shared_parameter()):
            return [
                f"Two of the optimizers share the parameter '{shared}', so updates would transform "
                "its gradient twice. Give each parameter to one of them."
            ]
        return []

    def _shared_parameter(self) -> str | None:
        seen: set[int] = set()
        for idx in range(len(self._context.optimizers)):
            named = self._context.named[idx]
            for name, parameter in named.items():
                if id(parameter) in seen:
                    return name
            seen.update(map(id, named.values()))
        return None
