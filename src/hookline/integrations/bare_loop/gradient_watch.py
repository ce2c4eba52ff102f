"""Watches backward and the gradients of a loop, until an optimizer steps with them.

    backward begins   the loss is read
    backward ends     on_after_backward
    unscale_          on_gradients_ready      (a loop with a GradScaler)
    the first clip    on_gradients_ready, unless fired before · on_gradient_clip

A loop that cannot be followed without guessing raises an error before its first step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from hookline.context import LazyFloat
from hookline.integrations.bare_loop.backward_watch import running_backward
from hookline.integrations.bare_loop.clip_tracker import ClipTracker, Versions, gradient_versions
from hookline.integrations.bare_loop.hook_needs import HookNeeds
from hookline.integrations.bare_loop.indirect_backwards import IndirectBackwards
from hookline.integrations.bare_loop.loop_checks import LoopChecks, is_compiled_in_place
from hookline.integrations.bare_loop.loss_tracker import LossTracker
from hookline.integrations.bare_loop.requirements import Requirements
from hookline.integrations.bare_loop.step_skips import StepSkips
from hookline.loop.loop import Loop
from hookline.loop.model_watch import CalledModules, ModelWatch
from hookline.loop.phase_times import PhaseTimes

__all__ = ["GradientWatch"]

log = logging.getLogger("hookline")


class GradientWatch:
    """Watches a model's backward and its gradients, and fires their events.

    Args:
        loop: the loop, which knows model, optimizers and scaler.
        requirements: what hooks need, and what the loop provides.
        begin: starts training, if it has not started; called often.
        end_batch: ends the batch in progress: a step has ended.
        called: what the loop calls, where this is not the model itself.
        loss_divided: see `attach`.

    Attributes:
        model: watches the model.
        checks: finds what hooks would see wrong.
        needs: what the enabled hooks need to be seen.
        phases: the time of each phase, if there is a run.
        at_boundary: called before a step's first optimizer, where checkpoints are saved.
        after_step: called when a step has ended.
        has_new_gradients: whether backward has run since the last step.
        always_sees_calls: whether calls of model and backward are seen also if no hook needs them.
        ends_with_batch: whether a step ends with its batch, when not all optimizers have stepped
            and others have stepped several times.
    """

    def __init__(
        self,
        loop: Loop,
        requirements: Requirements,
        *,
        begin: Callable[[], None],
        end_batch: Callable[[], None],
        called: CalledModules | None = None,
        loss_divided: bool | None = None,
    ) -> None:
        self.loop, self.context, self.hooks = loop, loop.context, loop.hooks
        self.called = called or CalledModules()
        self._requirements, self._begin, self._end_batch = requirements, begin, end_batch
        context, hooks, scaler = loop.context, loop.hooks, loop.state.scaler
        self.dispatchers = hooks.dispatchers
        self.phases = PhaseTimes()
        self.at_boundary: Callable[[], None] | None = None
        self.after_step: Callable[[], None] | None = None
        self.scaler = scaler
        self.optimizers = context.optimizers
        self._index = {id(optimizer): i for i, optimizer in enumerate(self.optimizers)}
        self.losses = LossTracker(context, requirements, scaler, loss_divided)
        self.checks = LoopChecks(context, hooks, requirements, self.called, scaler)
        self._clips = ClipTracker(context, hooks, self._prepare_clip)
        self._stepped: dict[int, bool] = {}  # optimizers that had their turn, False if skipped
        self._ready: set[int] = set()
        self._versions: dict[int, Versions] = {}
        self._stale: dict[int, Versions] = {}  # of those ready when another backward began
        self.skips = StepSkips(loop.requests)
        self._unchecked = True
        self._verified = self._takes_short_path = self._starts_silently = False
        self._has_started = self._closure_evaluated = False
        self.has_new_gradients = self.ends_with_batch = self.always_sees_calls = False
        self._calls_before_step = self._calls_at_backward = 0
        self.model = ModelWatch(
            context.model,
            self._before_forward,
            self._after_forward,
            self._gradient_arrives,
            self._backward_ends,
            self.called,
        )
        self._indirect = IndirectBackwards(
            self.model, self.optimizers, self.losses, self._backward_begins, self._backward_ends
        )

    @property
    def is_between_steps(self) -> bool:
        """Whether a step has ended and the model has not been called since, as far as is seen."""
        calls = self.model.calls_seen
        return bool(calls) and calls == self._calls_before_step and not self.has_new_gradients

    def find_place(self) -> tuple[int, int]:
        """Return the batch in progress, counted by calls of the model, and its stage.

        Stages are those of `RankWatch`. A thread may call this.
        """
        calls = self.model.calls_seen
        if not self.model.is_running and calls <= self._calls_before_step:
            return calls + 1, 0
        has_run = calls == self._calls_at_backward or running_backward() is not None
        return calls, 2 if has_run else 1

    def start(self) -> None:
        """Training has started: the first call of the model need not be watched for it."""
        self._has_started = True
        self.hooks_changed()

    def hooks_changed(self) -> None:
        """Watch what the enabled hooks need, and no more; nothing before the first call."""
        fire = self.dispatchers
        self.needs = needs = HookNeeds.of(self.hooks, has_run=self.loop.record.is_wanted)
        self.checks.check_hooks(on_calls=needs.calls)
        self.losses.wanted = needs.loss
        self._clips.wants_norm = needs.grad_norm
        # on_train_start comes before the first forward, also without `with`.
        starts = fire.on_train_start is not None and not self._has_started
        compiled = is_compiled_in_place(self.context.model, self.called)
        backward = needs.backward or self.always_sees_calls
        self.model.watch(
            calls=(needs.calls or starts or self.always_sees_calls) and not compiled,
            backward=backward and not compiled,
        )
        self._clips.listen(needs.clips)
        self._indirect.listen(backward)
        self._unchecked = True
        self._takes_short_path = self._starts_silently = False

    # -- forward ----------------------------------------------------------------------------------

    def _before_forward(self) -> None:
        if not self.context.generating:
            self._begin()
            self.loop.before_forward()

    def _after_forward(self, outputs: Any) -> None:
        if not self.context.generating:
            self.loop.after_forward(outputs)

    # -- backward ---------------------------------------------------------------------------------

    def _gradient_arrives(self) -> bool:
        """Begin a backward; return False for `torch.autograd.grad`, which changes no gradients."""
        if running_backward() is None:
            return False
        self._backward_begins()
        return True

    def _backward_begins(self, before: list[Versions] | None = None) -> None:
        """Read the loss; `before` has the gradients as they were, if backward has ended."""
        if self.phases.timed:
            self.phases.lap("forward")
        if self.losses.wanted:
            self.losses.add_running(None if before is None else any(before))
        if self._ready:  # a step was skipped, or the optimizers have backwards of their own
            ready = self._ready - self._stepped.keys()
            self._stale = {
                i: gradient_versions(self.optimizers[i]) if before is None else before[i]
                for i in ready
            }

    def _backward_ends(self) -> None:
        self.has_new_gradients = True
        self._calls_at_backward = self.model.calls_seen
        if self._stale:
            for i, versions in self._stale.items():
                if gradient_versions(self.optimizers[i]) != versions:
                    if self._clips.was_clipped(i, versions) and not self._closure_evaluated:
                        self.checks.report_backward_after_clip()
                    self._new_gradients(i)
            self._stale = {}
        if self.dispatchers.on_gradients_ready is not None:
            self._versions = dict(enumerate(map(gradient_versions, self.optimizers)))
        if self.dispatchers.on_after_backward is not None:
            self.dispatchers.on_after_backward(self.context)
        if self.phases.timed:
            self.phases.lap("backward")

    def run_backward(self, loss: torch.Tensor, backward: Callable[[], None]) -> None:
        """Run backward for a loop that gives its loss."""
        self.losses.set_loss(loss)
        seen = self.model.backwards_seen
        try:
            backward()
        finally:
            self.losses.set_loss(None)
        if self.model.on and self.model.backwards_seen == seen:
            self.model.backwards_seen += 1  # not through what the model returned, but it ran
            self._backward_ends()

    def batch_loss(self) -> LazyFloat | None:
        """Return the loss of the batch that ends, None if it is not known."""
        loss = self.losses.set_batch_loss()
        if loss is None and self.needs.asks_for_loss and not self._verified:
            self.checks.raise_or_warn([*self._unmet(), *self._unknown_loss()])
        return loss

    def _unmet(self) -> list[str]:
        return list(self._requirements.unmet(self.hooks))

    def _unknown_loss(self) -> list[str]:
        who = ", ".join(self.needs.asks_for_loss)
        return [f"{who} asks for 'loss'{self._requirements.why_no_loss}"] if who else []

    # -- gradients --------------------------------------------------------------------------------

    def _new_gradients(self, i: int) -> None:
        """Forget about gradients that no step has used."""
        self._ready.discard(i)
        self._clips.forget(i)
        self.skips.forget(i)

    def gradients_ready(self, which: torch.optim.Optimizer | None) -> None:
        """Fire on_gradients_ready and run updates: the loop says that gradients are complete."""
        if which is not None:
            self.checks.check_attached(which)
        for i, optimizer in enumerate(self.optimizers):
            if i in self._ready or i in self._stepped or which not in (None, optimizer):
                continue
            if self.scaler is not None and self.scaler.is_enabled():
                self.scaler.unscale_(optimizer)  # calls `unscaled`
            else:
                self._gradients_ready(i)

    def _prepare_clip(self, i: int, function: str) -> bool:
        """Fire on_gradients_ready before a clip; return whether it belongs to this step."""
        if i in self._stepped and self.ends_with_batch:
            self._start_again(i)
        has_stepped = i in self._stepped or self._closure_evaluated
        if has_stepped or (self.model.backwards_seen and not self.has_new_gradients):
            return False
        if i not in self._ready and self.scaler is not None and self.scaler.is_enabled():
            if function != "get_total_norm":
                self.checks.report_scaled_clip(function)
            return False
        self._begin()
        self._gradients_ready(i)
        return True

    def _gradients_ready(self, i: int, problems: list[str] | None = None) -> None:
        if i in self._ready:
            self.checks.raise_or_warn(problems or [])
            return
        self._check(i, problems or [])
        self._ready.add(i)
        self.context.optimizer_idx = i
        if self.dispatchers.on_gradients_ready is not None:
            self.dispatchers.on_gradients_ready(self.context)
        if self.dispatchers.update is not None:
            self.dispatchers.update(self.context)
            self.context.made_gradients = None  # frees them

    def _start_again(self, i: int) -> None:
        """Let an optimizer have another turn in the step in progress."""
        del self._stepped[i]
        self._new_gradients(i)

    # -- before the first step --------------------------------------------------------------------

    def _check(self, i: int, problems: list[str]) -> None:
        """Raise before the first step if hooks would not get what they need; later, warn."""
        if not self._verified and not self.model.backwards_seen and self.skips.reason(i):
            return  # a batch without backward, whose step is skipped: a later one is checked
        if self._unchecked or problems:
            if self._unchecked:
                problems = [*self._unmet(), *problems]
                if not self._verified:
                    problems += self._unseen()
            self._unchecked = False
            self.checks.raise_or_warn(problems)
            self._verified = True
            self.hooks.raise_on_missing_args = False  # from now on, what is missing is a warning
            for line in self._requirements.pending(self.hooks):
                log.info("%s", line)
        if self.dispatchers.on_gradients_ready is not None and i in self._versions:
            self.checks.check_versions(self._versions[i], self.optimizers[i])

    def _problems_at_step(self) -> list[str]:
        """Return what is known only when an optimizer steps."""
        problems = self.checks.unnamed_scaler() if self.checks.is_first_step else []
        if self.dispatchers.on_gradient_clip is not None and not self._clips.seen:
            is_last = len(self._stepped) == len(self.optimizers) - 1
            problems += self.checks.missing_clip() if is_last else []
        return problems

    def _unseen(self) -> list[str]:
        """Return what hooks need to have been seen before the first step, and was not."""
        problems = self.checks.unseen_calls(self.model, self.needs.asks_for_loss)
        self.losses.set_step_loss()
        if self.model.backwards_seen and self.context.known("loss") is None:
            problems += self._unknown_loss()
        return problems
