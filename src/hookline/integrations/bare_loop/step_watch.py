"""From what PyTorch's hooks tell to the events of a step.

    backward begins   whose loss it is
    backward ends     on_after_backward
    unscale_          on_gradients_ready      (a loop with a GradScaler)
    step, before      on_gradients_ready, unless told before · on_before_optimizer_step
    step, after       on_after_optimizer_step, or on_step_skipped
    the last optimizer's turn     on_train_batch_end · on_step_end

What cannot be followed without guessing is refused before the first step is taken. After it,
nothing here stops a run any more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from hookline.context import LazyFloat
from hookline.errors import LoopError, NotSuppliedError
from hookline.events import EVENTS
from hookline.integrations.bare_loop.backward_frame import is_being_called
from hookline.integrations.bare_loop.bare_loop_context import BareLoopEventContext
from hookline.integrations.bare_loop.loss_tracker import LossTracker
from hookline.integrations.bare_loop.requirements import CALLS
from hookline.integrations.bare_loop.scaler_watch import ScalerWatch
from hookline.loop.model_watch import ModelCallback, ModelWatch
from hookline.tensors.observation import Observation

if TYPE_CHECKING:
    from hookline.integrations.bare_loop.session import Session

__all__ = ["StepWatch"]

log = logging.getLogger("hookline")

_OVERFLOW = "the scaler found non-finite gradients"

Versions = tuple[tuple[int, int], ...]
"""Of each gradient which tensor it is, and how often that was changed in place."""

_SCALER_STEP = torch.amp.GradScaler.step.__code__


class StepWatch:
    """Watches model, optimizers and scaler of one session, and fires the events of a step."""

    def __init__(
        self, session: Session, context: BareLoopEventContext, scaler: torch.amp.GradScaler | None
    ) -> None:
        self.session = session
        self.context = context
        self.dispatchers = session.hooks.dispatchers
        self.scaler = scaler
        self.optimizers = context.optimizers
        self._index = {id(optimizer): i for i, optimizer in enumerate(self.optimizers)}
        self._losses = LossTracker(context, scaler)
        self._turns: dict[int, bool] = {}
        self._ready: set[int] = set()
        self._versions: dict[int, Versions] = {}
        self._stale: dict[int, Versions] = {}  # of what was ready when another backward began
        self._tells_ready = False
        self._left_out: dict[int, str] = {}  # steps, by optimizer, with the reason; -1 for all
        self._found_inf: torch.Tensor | None = None
        self._in_scaler_step = False
        self._unchecked = True
        self._verified = False
        self._ordinary = False
        self._warned: set[str] = set()
        self._model = ModelWatch(
            context.model,
            self._before_forward,
            self._after_forward,
            self._backward_begins,
            self._backward_ends,
        )
        self._handles: list[RemovableHandle] = []
        try:
            self._put_on()
        except BaseException:
            self.take_off()
            raise

    def _put_on(self) -> None:
        self.hooks_changed()
        for optimizer in self.optimizers:
            self._handles.append(optimizer.register_step_pre_hook(ModelCallback(self._before_step)))
            self._handles.append(optimizer.register_step_post_hook(ModelCallback(self._after_step)))
        if self.scaler is not None:
            ScalerWatch.listen(self.scaler, self)

    def take_off(self) -> None:
        """Leave model, optimizers and scaler as they were."""
        self._model.take_off()
        for handle in self._handles:
            handle.remove()
        ScalerWatch.leave(self.scaler, self)

    def hooks_changed(self) -> None:
        """Watch of the model what the hooks need now, and no more."""
        hooks = self.session.hooks
        wanted = {event: hooks.required_arguments(event, optional=True) for event in EVENTS}
        told = (wanted["on_step_end"], wanted["on_train_batch_end"], wanted["on_epoch_end"])
        self._losses.wanted = any({"loss", "ctx", "metrics"} & asked.keys() for asked in told)
        self._losses.wanted |= any("state" in asked for asked in wanted.values())
        self._asks_for_loss = [
            label
            for event in ("on_step_end", "on_train_batch_end")
            for label in hooks.required_arguments(event).get("loss", ())
        ]
        fire = self.dispatchers
        backward = (
            self._losses.wanted
            or fire.on_after_backward is not None
            or fire.on_gradients_ready is not None
            or (fire.update is not None and self._tells_ready)
        )
        watching = (fire.on_before_forward, fire.on_after_forward, fire.forward)
        calls = any(one is not None for one in watching)
        in_place = getattr(self.context.model, "_compiled_call_impl", None) is not None
        if in_place and (backward or calls):
            raise LoopError(
                "This model was compiled in place (model.compile()), so hooks on its call would "
                "be compiled too. Use `compiled = torch.compile(model)`, call `compiled` in the "
                "loop and attach it."
            )
        # on_train_start comes before the first forward, also without `with`.
        starts = fire.on_train_start is not None and not self.session.started and not in_place
        self._model.watch(calls=calls or starts, backward=backward)
        self._unchecked = True
        self._ordinary = False  # what has changed is looked at in the next step

    # -- forward and backward ---------------------------------------------------------------------

    def _before_forward(self) -> None:
        self.session.begin()
        if self.dispatchers.on_before_forward is not None:
            self.dispatchers.on_before_forward(self.context)

    def _after_forward(self, outputs: Any) -> None:
        if self.dispatchers.forward is not None:
            self.context.observation = Observation(outputs, "the model's outputs")
            self.dispatchers.forward(self.context)
            self.context.observation = None
        if self.dispatchers.on_after_forward is not None:
            self.context.outputs = outputs
            self.dispatchers.on_after_forward(self.context)
            self.context.outputs = None  # or it would keep the graph alive

    def _backward_begins(self) -> None:
        if self._losses.wanted:
            self._losses.backward_begins(self._first_parameter())
        if (
            self._ready
        ):  # the loop has left out a step, or its optimizers have backwards of their own
            self._stale = {i: self._version_of(i) for i in self._ready}

    def _backward_ends(self) -> None:
        if self._stale:
            for i, versions in self._stale.items():
                if self._version_of(i) != versions:
                    self._new_gradients(i)
            self._stale = {}
        if self.dispatchers.on_gradients_ready is not None:
            self._note_versions()
        if self.dispatchers.on_after_backward is not None:
            self.dispatchers.on_after_backward(self.context)

    def _first_parameter(self) -> torch.Tensor:
        parameters = self.optimizers[0].param_groups[0]["params"]
        first: torch.Tensor = next((p for p in parameters if p.requires_grad), parameters[0])
        return first

    def run_backward(self, loss: torch.Tensor, backward: Callable[[], None]) -> None:
        """Run backward for a loop that tells its loss."""
        self._losses.told(loss, self._first_parameter())
        seen = self._model.backwards_seen
        try:
            backward()
        finally:
            self._losses.told(None, self._first_parameter())
        if self._model.on and self._model.backwards_seen == seen:
            self._model.backwards_seen += 1  # not through what the model returned, but it ran
            self._backward_ends()

    def batch_begins(self) -> None:
        """A batch was drawn."""
        self._losses.batch_begins()

    def batch_loss(self) -> LazyFloat | None:
        """The loss of the batch that ends now, if it is known; the context has it too."""
        loss = self._losses.tell_batch()
        if loss is None and self._asks_for_loss and not self._verified:
            raise self._unknown_loss()
        return loss

    def _unknown_loss(self) -> NotSuppliedError:
        who = ", ".join(self._asks_for_loss)
        return NotSuppliedError(f"{who} asks for 'loss'{self.context.why_no_loss}")

    # -- gradients --------------------------------------------------------------------------------

    def _new_gradients(self, i: int) -> None:
        """Forget what was said of gradients that were never used."""
        self._ready.discard(i)
        self._left_out.pop(i, None)
        self._left_out.pop(-1, None)

    def leave_out(self, i: int, reason: str) -> None:
        """Let an optimizer's next step change nothing; -1 stands for all."""
        self._left_out[i] = reason

    def gradients_ready(self, which: torch.optim.Optimizer | None) -> None:
        """The loop says so itself."""
        if which is not None and not self.watches(which):
            raise LoopError(
                f"updates() was given {type(which).__name__}, which is none of the optimizers that "
                "were attached. Give one of these, or nothing for all of them."
            )
        if not self._tells_ready:
            self._tells_ready = True
            watched = self._model.on
            self.hooks_changed()
            if not watched:
                self._model.calls_seen += 1  # it was called, before it was watched
        for i, optimizer in enumerate(self.optimizers):
            if i in self._ready or i in self._turns or which not in (None, optimizer):
                continue  # the loop has said so before, or does not mean it
            if self.scaler is not None and self.scaler.is_enabled():
                self.scaler.unscale_(optimizer)  # tells us through `unscaled`
            else:
                self._gradients_ready(i)

    def _gradients_ready(self, i: int) -> None:
        if i in self._ready:
            return
        self._check(i)
        self._ready.add(i)
        if self.dispatchers.on_gradients_ready is not None:
            self.context.optimizer_idx = i
            self.dispatchers.on_gradients_ready(self.context)
        if self.dispatchers.update is not None:
            self.context.optimizer_idx = i
            self.dispatchers.update(self.context)
            self.context.made_gradients = None  # or it would keep them alive

    def _note_versions(self) -> None:
        self._versions = {i: self._version_of(i) for i in range(len(self.optimizers))}

    def _version_of(self, i: int) -> Versions:
        """Changes whenever somebody changes a gradient in place or puts another there."""
        return tuple(
            (id(parameter.grad), parameter.grad._version)
            for group in self.optimizers[i].param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        )

    # -- a scaler tells ---------------------------------------------------------------------------

    def watches(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this optimizer is one of the session's."""
        return id(optimizer) in self._index

    def unscaled(self, optimizer: torch.optim.Optimizer) -> None:
        """Gradients have just been unscaled: this is what hooks are to see."""
        i = self._index[id(optimizer)]
        if i in self._versions:
            self._versions[i] = self._version_of(i)
        if i in self._ready:  # from a step that was left out: a scaler unscales once
            self._new_gradients(i)
        self._gradients_ready(i)

    def scaler_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """The scaler is about to call the optimizer, or not."""
        self._in_scaler_step = True

    def scaler_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """The scaler is done; without a turn of the optimizer's, it has skipped the step."""
        i = self._index[id(optimizer)]
        if self._in_scaler_step:
            self._in_scaler_step = False
            self._skipped(i, _OVERFLOW)

    # -- the optimizer's turn ---------------------------------------------------------------------

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        fire, context = self.dispatchers, self.context
        if self._ordinary and len(args) == 1 and not kwargs:
            if fire.on_gradients_ready is not None or fire.update is not None:
                self._gradients_ready(0)
            if fire.on_before_optimizer_step is not None:
                fire.on_before_optimizer_step(context)
            if self._left_out:
                self._let_go(0)
            return None
        return self._before_any_step(optimizer, args, kwargs)

    def _before_any_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        self.session.begin()
        i = self._index[id(optimizer)]
        self._refuse_a_second_turn(i)
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if closure is not None:
            self._refuse_many_evaluations(optimizer)
            return self._with_closure(i, closure, args, kwargs)
        self._refuse_going_around_the_scaler()
        self._found_inf = getattr(optimizer, "found_inf", None)
        self._turn_begins(i)
        return None

    def _turn_begins(self, i: int) -> None:
        self._gradients_ready(i)
        if self.dispatchers.on_before_optimizer_step is not None:
            self.context.optimizer_idx = i
            self.dispatchers.on_before_optimizer_step(self.context)
        if self._left_out:
            self._let_go(i)

    def _let_go(self, i: int) -> None:
        """Take the gradients away from a step that is to be left out: it changes nothing then."""
        if i in self._left_out or -1 in self._left_out:
            for group in self.optimizers[i].param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def _with_closure(self, i: int, closure: Any, args: Any, kwargs: Any) -> Any:
        """Wrap the closure: gradients are there after it has run, not before the step."""
        evaluated = False

        def evaluate() -> Any:
            nonlocal evaluated
            result = closure()
            if not evaluated:
                evaluated = True
                self._losses.keep_first()
                self._turn_begins(i)
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": evaluate}
        return (args[0], evaluate, *args[2:]), kwargs

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._ordinary and not self._left_out:
            if self.dispatchers.on_after_optimizer_step is not None:
                self.dispatchers.on_after_optimizer_step(self.context)
            self._end_step(skipped=False)
        else:
            self._after_any_step(optimizer)

    def _after_any_step(self, optimizer: torch.optim.Optimizer) -> None:
        i = self._index[id(optimizer)]
        self._in_scaler_step = False
        if self._found_inf is not None and self._found_inf.item():
            # A fused optimizer skips inside its kernel. Reading this waits for the device, as a
            # scaler does for every other optimizer.
            self._skipped(i, _OVERFLOW)
            return
        reason = self._left_out.get(i) or self._left_out.get(-1)
        if reason is not None:
            self._skipped(i, reason)
            return
        if self.dispatchers.on_after_optimizer_step is not None:
            self.context.optimizer_idx = i
            self.dispatchers.on_after_optimizer_step(self.context)
        self._turn(i, stepped=True)

    def _skipped(self, i: int, reason: str) -> None:
        if self.dispatchers.on_step_skipped is not None:
            self.context.optimizer_idx = i
            self.context.reason = reason
            self.dispatchers.on_step_skipped(self.context)
        self._turn(i, stepped=False)

    def _turn(self, i: int, *, stepped: bool) -> None:
        self._turns[i] = stepped
        if len(self._turns) == len(self.optimizers):
            self._end_step(skipped=not any(self._turns.values()))
            self._turns.clear()
            # From here on the ordinary case takes the short way.
            self._ordinary = self._verified and self.scaler is None and len(self.optimizers) == 1

    def _end_step(self, *, skipped: bool) -> None:
        context, losses = self.context, self._losses
        context.skipped = skipped
        if self._left_out:
            self._left_out.clear()  # what on_step_end asks for is for the next step
        if not skipped:
            context.step += 1
        if losses.wanted:
            losses.step_ends()
        if context.known_batch is not None:
            self.session.end_batch()
        if self.dispatchers.on_step_end is not None:
            if losses.wanted:
                losses.tell_step()
            self.dispatchers.on_step_end(context)
        if losses.wanted:
            losses.forget()
        if self._ready:
            self._ready.clear()
            self._versions.clear()
        if self.session.has_probes:
            self.session.end_step()
        context.skipped = False
        context.step_in_progress = context.step + 1
        context.clipped_norm = None

    # -- what cannot be followed ------------------------------------------------------------------

    def _check(self, i: int) -> None:
        """Before the first step: refuse what this loop cannot tell. Later: only say so."""
        if self._unchecked:
            self._unchecked = False
            problems = self.session.refusals()
            if not self._verified:
                problems += self._what_was_not_seen()
            if problems and not self._verified:
                raise NotSuppliedError(
                    "Hooks ask for what this loop does not tell:\n"
                    + "\n".join(f"  - {problem}" for problem in problems)
                )
            for problem in problems:
                self._warn_once(problem, problem)
            self._verified = True
            self.session.hooks.raise_on_missing_args = False
            self.session.say_what_waits()
        changed = self.dispatchers.on_gradients_ready is not None and (
            i in self._versions and self._versions[i] != self._version_of(i)
        )
        if changed:
            self._gradients_were_changed()

    def _what_was_not_seen(self) -> list[str]:
        if self.scaler is None and is_being_called(_SCALER_STEP):
            return ["The loop steps through a GradScaler. Name it: `attach(…, scaler=scaler)`."]
        if self._model.on and not self._model.calls_seen:
            return [
                "The optimizer steps, but the attached model was not called. Attach what the loop "
                "calls: the compiled or wrapped model, not the one inside; and call it as "
                "`model(x)`, not `model.forward(x)`."
            ]
        if self._model.on and not self._model.backwards_seen and self._needs_backward():
            return [f"Backward did not pass through what the model returned. {CALLS['backward']}"]
        if self.dispatchers.update is not None and (shared := self._shared_parameter()):
            return [
                f"Two of the optimizers share the parameter '{shared}', so updates would transform "
                "its gradient twice. Give each parameter to one of them."
            ]
        self._losses.tell_step()
        if self._asks_for_loss and self.context.known_loss is None:
            return [str(self._unknown_loss())]
        return []

    def _shared_parameter(self) -> str | None:
        seen: set[int] = set()
        for i in range(len(self.optimizers)):
            named = self.context.named[i]
            for name, parameter in named.items():
                if id(parameter) in seen:
                    return name
            seen.update(map(id, named.values()))
        return None

    def _needs_backward(self) -> bool:
        fire = self.dispatchers
        return bool(fire.on_after_backward or fire.on_gradients_ready or self._asks_for_loss)

    def _gradients_were_changed(self) -> None:
        listeners = ", ".join(self.session.hooks.listeners("on_gradients_ready"))
        message = (
            f"{listeners} reads gradients before anything has changed them, but this loop changes "
            "them between backward and optimizer.step (clipping?). Call `session.updates()` before "
            "that, or let the session clip: `session.clip(max_norm)`."
        )
        if self.context.step == 0:
            raise LoopError(message)
        self._warn_once("changed", message)

    def _refuse_a_second_turn(self, i: int) -> None:
        if i not in self._turns:
            return
        message = (
            f"Optimizer {i} steps again before the others have stepped, so steps cannot be "
            "counted. Attach each optimizer with a session of its own."
        )
        if self.context.step == 0:
            raise LoopError(message)
        self._warn_once("turns", message)
        self._end_step(skipped=not any(self._turns.values()))
        self._turns.clear()

    def _refuse_going_around_the_scaler(self) -> None:
        scaler = self.scaler
        if scaler is not None and scaler.is_enabled() and not self._in_scaler_step:
            message = (
                "attach was given a scaler, but the loop calls optimizer.step() itself, on scaled "
                "gradients. Call scaler.step(optimizer), or do not name the scaler."
            )
            if self.context.step == 0:
                raise LoopError(message)
            self._warn_once("scaler", message)

    def _refuse_many_evaluations(self, optimizer: torch.optim.Optimizer) -> None:
        asked = [
            label
            for event in ("on_gradients_ready", "on_before_optimizer_step")
            for label in self.session.hooks.listeners(event)
        ]
        asked += self.session.hooks.required_arguments("on_step_end").get("grad_norm", [])
        asked += self.session.hooks.listeners("update")
        if isinstance(optimizer, torch.optim.LBFGS) and asked:
            raise LoopError(
                f"{', '.join(asked)} asks for the gradients that the optimizer uses, but LBFGS "
                "evaluates its closure many times in a step. Drop the hook, or use "
                "on_after_backward."
            )

    def _warn_once(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            log.warning("%s", message)
