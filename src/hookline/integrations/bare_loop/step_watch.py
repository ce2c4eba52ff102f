"""Turns PyTorch's hooks on optimizers and scaler into the events of a step.

    step, before      on_gradients_ready, unless fired before · on_before_optimizer_step
    step, after       on_after_optimizer_step, or on_step_skipped
    after the last optimizer      on_train_batch_end · on_step_end

What comes before is in `gradient_watch`. After the first step, nothing here stops a run.
"""

from __future__ import annotations

from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hookline.integrations.bare_loop.clip_tracker import gradient_versions
from hookline.integrations.bare_loop.gradient_watch import GradientWatch
from hookline.integrations.bare_loop.nested_steps import for_outer_steps
from hookline.integrations.bare_loop.scaler_watch import ScalerWatch
from hookline.integrations.bare_loop.step_closure import find_closure, notify_first_call
from hookline.loop.model_watch import active_dynamo, keep_out_of_graphs
from hookline.loop.phase_times import PhaseTimes
from hookline.loop.weak_methods import weaken_methods

__all__ = ["StepWatch"]

_uncompiled: Any = torch.compiler.disable  # which loses the types of methods
_OVERFLOW = "the scaler found non-finite gradients"


class StepWatch(GradientWatch):
    """Watches model, optimizers and scaler of a loop, and fires the events of a step."""

    _found_inf: torch.Tensor | None = None
    _in_scaler_step = False
    _handles: tuple[RemovableHandle, ...] = ()

    def attach(self) -> None:
        """Add hooks to model, optimizers and scaler; `detach` removes them, also after an error."""
        self.hooks_changed()
        for optimizer in self.optimizers:
            before = for_outer_steps(optimizer, self._before_step)
            self._handles += (optimizer.register_step_pre_hook(before),)
            after = for_outer_steps(optimizer, self._after_step)
            self._handles += (optimizer.register_step_post_hook(after),)
        keep_out_of_graphs(StepWatch._before_step)
        keep_out_of_graphs(StepWatch._after_step)
        if self.scaler is not None:
            ScalerWatch.listen(self.scaler, self)

    def detach(self) -> None:
        """Remove all hooks from model, optimizers and scaler."""
        self.model.detach()
        for handle in self._handles:
            handle.remove()
        ScalerWatch.leave(self.scaler, self)
        self._clips.listen(False)
        self._indirect.listen(False)
        self.losses.wanted = False
        weaken_methods(self, self.model, self._clips, self._indirect)  # else only gc frees them

    def leave(self) -> None:
        """Remove all hooks, and call nobody at the end of a step: this process was forked."""
        self.detach()
        self.phases = PhaseTimes()
        self.at_boundary = self.after_step = None

    # -- the scaler -------------------------------------------------------------------------------

    def watches(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether this optimizer was attached."""
        return id(optimizer) in self._index

    def unscaled(self, optimizer: torch.optim.Optimizer) -> None:
        """Fire on_gradients_ready: gradients have just been unscaled."""
        i = self._index[id(optimizer)]
        if i in self._versions:
            self._versions[i] = gradient_versions(optimizer)
        if i in self._ready:  # of a step that the loop skipped: a scaler unscales once
            self._new_gradients(i)
        self._gradients_ready(i)

    def scaler_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember that the scaler is about to step with the optimizer, or to skip it."""
        self._in_scaler_step = True

    def scaler_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Fire on_step_skipped if the scaler has not called the optimizer."""
        if self._in_scaler_step:
            self._in_scaler_step = False
            self._skip_turn(self._index[id(optimizer)], _OVERFLOW)

    # -- optimizer.step ---------------------------------------------------------------------------

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Do what comes before a step; where there is nothing to do, in as few reads as can be."""
        if active_dynamo() is not None:  # the loop calls a compiled `step`
            return _uncompiled(self._before_step)(optimizer, args, kwargs)
        has_closure = kwargs or (len(args) > 1 and args[1] is not None)
        if self.at_boundary is not None and not self._stepped:
            self.at_boundary()
        if not self._takes_short_path or has_closure:
            return self._before_any_step(optimizer, args, kwargs)
        if not self._starts_silently:
            fire = self.dispatchers
            if fire.on_gradients_ready is not None or fire.update is not None:
                self._gradients_ready(0)
            if fire.on_before_optimizer_step is not None:
                fire.on_before_optimizer_step(self.context)
        if self.skips.is_active:
            self.skips.apply(0, optimizer)
        return None

    def _before_any_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        self._begin()
        i = self._index[id(optimizer)]
        if i in self._stepped and self.ends_with_batch:
            self._start_again(i)
        elif i in self._stepped:
            self.checks.report_second_step(i)
            self._end_all_turns()
        if find_closure(args, kwargs) is not None:
            return notify_first_call(args, kwargs, partial(self._closure_ends, i))
        self.checks.check_scaler(in_scaler_step=self._in_scaler_step)
        self._found_inf = getattr(optimizer, "found_inf", None)
        self._start_turn(i)
        return None

    def _start_turn(self, i: int) -> None:
        self._gradients_ready(i, self._problems_at_step())
        if self.dispatchers.on_before_optimizer_step is not None:
            self.context.optimizer_idx = i
            self.dispatchers.on_before_optimizer_step(self.context)
        if self.skips.is_active:
            self.skips.apply(i, self.optimizers[i])

    def _closure_ends(self, i: int) -> None:
        """Start the turn: gradients exist after the closure has run, not before the step."""
        self._closure_evaluated = True
        self.losses.keep_first()
        self._start_turn(i)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if active_dynamo() is not None:
            return _uncompiled(self._after_step)(optimizer, args, kwargs)
        if self.phases.timed:
            self.phases.lap("optimizer")
        if self._takes_short_path and (not self.skips.is_active or self.skips.reason(0) is None):
            if self.dispatchers.on_after_optimizer_step is not None:
                self.dispatchers.on_after_optimizer_step(self.context)
            self._end_step(skipped=False)
        else:
            self._after_any_step(optimizer)
        return None

    def _after_any_step(self, optimizer: torch.optim.Optimizer) -> None:
        i = self._index[id(optimizer)]
        self._in_scaler_step = False
        if self._found_inf is not None and self._found_inf.item():
            # A fused optimizer skips inside its kernel. Reading this waits for the device, as a
            # scaler does for every other optimizer.
            self._skip_turn(i, _OVERFLOW)
            return
        if (reason := self.skips.reason(i)) is not None:
            self._skip_turn(i, reason)
            return
        if self.dispatchers.on_after_optimizer_step is not None:
            self.context.optimizer_idx = i
            self.dispatchers.on_after_optimizer_step(self.context)
        self._end_turn(i, stepped=True)

    def _skip_turn(self, i: int, reason: str) -> None:
        self.loop.record.step_skipped(self.context.step, reason, i)
        if self.dispatchers.on_step_skipped is not None:
            self.context.optimizer_idx = i
            self.context.reason = reason
            self.dispatchers.on_step_skipped(self.context)
        self._end_turn(i, stepped=False)

    def end_open_step(self) -> None:
        """End a step in which some of the optimizers have not stepped."""
        if self._stepped:
            self._end_all_turns()

    def _end_turn(self, i: int, *, stepped: bool) -> None:
        self._stepped[i] = stepped
        self._closure_evaluated = False
        self.losses.turns += 1
        if len(self._stepped) == len(self.optimizers):
            self._end_all_turns()
            single = self.scaler is None and len(self.optimizers) == 1
            self._takes_short_path = self._verified and single
            fire = self.dispatchers
            self._starts_silently = fire.on_before_optimizer_step is None and (
                fire.on_gradients_ready is None and fire.update is None
            )

    def _end_all_turns(self) -> None:
        skipped = not any(self._stepped.values())
        self._stepped.clear()
        self._end_step(skipped=skipped)
        self.checks.is_first_step = False

    def _end_step(self, *, skipped: bool) -> None:
        context, losses, record = self.context, self.losses, self.loop.record
        latest_loss = context.latest_loss
        context.skipped = skipped
        if self.skips.is_active:
            self.skips.clear()  # on_step_end requests for the next step
        if not skipped:
            context.step += 1
        if losses.wanted:
            losses.end_step()
        if context.known("current_batch") is not None:
            self._end_batch()
        if context.norm_schedule is not None:
            context.prepare_norm()
        if self.dispatchers.on_step_end is not None:
            if losses.wanted:
                losses.set_step_loss()
            self.dispatchers.on_step_end(context)
        context.agreed_norm = None
        if losses.wanted:
            losses.forget()
        if self._ready:
            self._ready.clear()
            self._versions.clear()
            self._clips.end_step()
        self.has_new_gradients = self._closure_evaluated = False
        self._calls_before_step = self.model.calls_seen
        self._indirect.thread = get_ident()
        self.loop.end_step_of_probes()
        context.skipped = False
        context.step_in_progress = context.step + 1
        if record.is_wanted:
            loss = context.latest_loss if context.latest_loss is not latest_loss else None
            ranks = self.loop.ranks
            records = None if ranks.is_alone else ranks.records
            record.end_step(context.step, context.known("epoch"), loss, records)
            self.phases.end_batch()
        if self.after_step is not None:
            self.after_step()
