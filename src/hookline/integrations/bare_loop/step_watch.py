"""Turns PyTorch's hooks, and calls of backward, clipping and scaler, into the events of a step.

    forward                on_before_forward · on_after_forward
    backward has ended     the loss is noted · on_after_backward
    unscale_               on_gradients_ready      (a loop with a GradScaler)
    the first clip         on_gradients_ready, unless fired before · on_gradient_clip
    step, before           on_gradients_ready, unless fired before · on_before_optimizer_step
    step, after            on_after_optimizer_step, or on_step_skipped
    the step has ended     on_train_batch_end · on_step_end      (see `StepRule`)

A loop that cannot be followed without guessing raises an error before its first step; after that,
nothing here stops a run. The file is long because it is one step, from top to bottom.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback as active_dynamo

from hookline.context import LazyFloat
from hookline.integrations.bare_loop.loop_checks import (
    HookNeeds,
    LoopChecks,
    Requirements,
)
from hookline.integrations.bare_loop.optimizer_watch import (
    AwaitedOptimizer,
    OptimizerWatch,
    StepRule,
    hold_all,
    holds_any,
)
from hookline.integrations.bare_loop.patched_calls import backward_patch, scaler_patch
from hookline.integrations.bare_loop.step_losses import Backward, StepLosses
from hookline.loop.clip_watch import ClipCall, clip_patch
from hookline.loop.event_context import (
    Versions,
    gradient_versions,
    gradients_of,
    have_gradients_changed,
    norm_or_nan,
    parameters_of,
)
from hookline.loop.model_watch import (
    ForwardTargets,
    ModelWatch,
    is_compiled_in_place,
    keep_out_of_graphs,
    models_in,
)
from hookline.loop.patches import WrappedMethods
from hookline.loop.phase_times import PhaseTimes
from hookline.tensors.norms import global_norm
from hookline.tensors.sharded import whole

if TYPE_CHECKING:
    from hookline.integrations.bare_loop.data_watch import DataWatch
    from hookline.integrations.bare_loop.loop_phases import LoopPhases
    from hookline.integrations.bare_loop.session import Session

log = logging.getLogger("hookline")

_uncompiled: Any = torch.compiler.disable  # which loses the types of methods
_OVERFLOW = "the scaler found non-finite gradients"


class StepWatch:
    """Watches model, optimizers and scaler of a loop, and fires the events of a step.

    Args:
        session: starts training with the first call that is seen, and acts at step boundaries.
        requirements: what hooks need, and what the loop provides.
        phases: ends the batch in progress when a step has ended.
        called: what the loop calls, where this is not the model itself.
        loss_divided: see `attach`.
        accumulated_batches: the number by which losses are divided also in steps with fewer
            batches; 0 if it is not known.
        step_of: the number of the optimizer whose step ends a step; None if the user has not said.
        data: finds the batches of the loop; None where another library's trainer has them.

    Attributes:
        rule: says when a step has ended.
        times: the time of each phase, if there is a run.
        has_boundary_work: whether the session acts before and after each step.
        backwards_seen: how many backwards have changed gradients.
        has_new_gradients: whether backward has run since the last step.
        always_sees_calls: whether calls of model and backward are seen also if no hook needs them.
        always_counts_calls: whether calls of the model are counted also after the first step.
    """

    def __init__(
        self,
        session: Session,
        requirements: Requirements,
        phases: LoopPhases,
        *,
        called: ForwardTargets | None = None,
        loss_divided: bool | None = None,
        accumulated_batches: int = 0,
        step_of: int | None = None,
        data: DataWatch | None = None,
    ) -> None:
        loop = session.loop
        self.loop, self.context, self.hooks = loop, loop.context, loop.hooks
        self.called = called or ForwardTargets()
        self._session, self._requirements, self._phases = session, requirements, phases
        self._data = data
        context, scaler = loop.context, loop.state.scaler
        self.dispatchers = loop.hooks.dispatchers
        self.times = PhaseTimes()
        self.has_boundary_work = False
        self.scaler: torch.amp.GradScaler | None = scaler
        self._scaled: tuple[weakref.ref[Any], Any] | None = None  # the latest loss, and its scaler
        self.optimizers = context.optimizers
        self.rule = StepRule(self.optimizers, step_of)
        self._index = {id(optimizer): i for i, optimizer in enumerate(self.optimizers)}
        self._steps = OptimizerWatch(self._before_step, self._after_step)
        self._compiled = WrappedMethods()  # calls of models that were compiled in place
        self._awaited: tuple[Versions, bool] | None = None  # gradients, and whether they were ready
        self.losses = StepLosses(context, requirements, loss_divided, accumulated_batches)
        self.checks = LoopChecks(session, requirements)
        self.model = ModelWatch(context.model, self, self.called)
        self.model.leaves_compiled = True
        self._stepped: dict[int, bool] = {}  # optimizers that have stepped, False if skipped
        self._has_more: set[int] = set()  # of these, the ones that got gradients since
        self._ready: set[int] = set()
        self._versions: dict[int, Versions] = {}
        self._clipped: dict[int, Versions] = {}  # by optimizer, after the step's latest clip
        self._clip: tuple[ClipCall, list[int]] | None = None  # in progress, and its optimizers
        self._has_clipped = False
        self._requests = loop.requests
        self._looks_at_skips = False  # an attribute, because it is read three times in each step
        self._unscaled: set[int] = set()
        self._in_scaler_step = False
        self._found_inf: torch.Tensor | None = None
        self._given_loss: torch.Tensor | None = None
        self._unchecked = True
        self._verified = self._takes_short_path = False
        self._has_started = self._closure_evaluated = False
        self._backward: Backward | None = None  # that runs, and has not been counted yet
        self.has_new_gradients = self.always_sees_calls = self.always_counts_calls = False
        self._other_threads: set[int] = set()  # that train other models
        self.backwards_seen = self._calls_before_step = 0
        self._thread = get_ident()  # that trains, as far as is seen

    # -- attaching --------------------------------------------------------------------------------

    def attach(self) -> None:
        """Add hooks to model, optimizers and scaler; `detach` removes them, also after an error."""
        self.hooks_changed()
        keep_out_of_graphs(StepWatch._before_step)
        keep_out_of_graphs(StepWatch._after_step)
        scaler_patch.add(self)
        self._watch_compiled_calls()
        if self.awaits_optimizer:
            self.rule.may_grow = True
            self._steps.search(self._look_at_optimizer)
            return
        for optimizer in self.optimizers:
            self._steps.watch(optimizer)

    def detach(self) -> None:
        """Remove all hooks from model, optimizers and scaler."""
        self.model.detach()
        if self._data is not None:
            self._data.detach()
        self._compiled.restore()
        self._steps.detach()
        self._index = {}
        scaler_patch.remove(self)
        clip_patch.remove(self)
        backward_patch.remove(self)
        self.losses.wanted = False

    def leave_cycles(self) -> None:
        """Keep nobody alive who has this watch: it was detached."""
        self._session = self.checks.session = weakref.proxy(self._session)
        self._phases = weakref.proxy(self._phases)
        self._data = None
        self.model.listener = weakref.proxy(self)

    def leave(self) -> None:
        """Remove all hooks, and do nothing at the end of a step: this process was forked."""
        self.detach()
        self.times = PhaseTimes()
        self.has_boundary_work = False

    def start(self) -> None:
        """Training has started: the first call of the model need not be watched for it."""
        self._has_started = True
        self.hooks_changed()

    def hooks_changed(self) -> None:
        """Watch what the enabled hooks need, and no more; nothing before the first call."""
        self.needs = needs = HookNeeds.of(self.hooks, has_run=self.loop.record.is_wanted)
        self.checks.check_hooks()
        self.losses.wanted = needs.loss
        backward = needs.backward or self.always_sees_calls
        self.watch_model()
        if self._data is not None:
            wanted = needs.batches or self._requirements.counts_batches
            self._data.watch(batches=wanted, is_compiled=self._is_compiled())
        (clip_patch.add if needs.clips else clip_patch.remove)(self)
        (backward_patch.add if backward else backward_patch.remove)(self)
        self._unchecked = True
        self._takes_short_path = False

    def watch_model(self) -> None:
        """Watch calls of the model if hooks need them; or count them, as far as they matter."""
        needs, always = self.needs, self.always_sees_calls
        # on_train_start comes before the first forward, also without `with`.
        starts = self.dispatchers.on_train_start is not None and not self._has_started
        returns = always or needs.counts_calls or self.always_counts_calls
        self.model.watch(calls=needs.calls or starts or always, returns=returns)

    def _is_compiled(self) -> bool:
        """Return whether hooks on parts of the model would be compiled."""
        models = models_in(self.context.model)
        return any(hasattr(each, "_orig_mod") or is_compiled_in_place(each) for each in models)

    def _watch_compiled_calls(self) -> None:
        """See the calls of models that were compiled in place, outside of what is compiled."""

        def watch(model: torch.nn.Module) -> None:
            def call_with_hooks(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
                return self._call_compiled(model, call, args, kwargs)

            self._compiled.wrap(model, "_compiled_call_impl", call_with_hooks)

        for model in (*models_in(self.context.model), *self.called.submodules):
            if is_compiled_in_place(model):
                watch(model)

    def _call_compiled(
        self, model: torch.nn.Module, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Call such a model, and do what hooks on it do for others."""
        if active_dynamo() is not None:
            return call(*args, **kwargs)
        if self.has_boundary_work and not self.has_new_gradients and not self._stepped:
            self._session.reach_boundary()
        if self._data is not None:
            self._data.before_call(model, args, kwargs)
        self.model.before_call(model, args)
        outputs = None
        try:
            outputs = call(*args, **kwargs)
            return outputs
        finally:
            self.model.after_call(model, args, outputs)

    # -- optimizers that attach was not given -----------------------------------------------------

    @property
    def awaits_optimizer(self) -> bool:
        """Whether no optimizer has stepped parameters of the model."""
        return isinstance(self.optimizers[0], AwaitedOptimizer)

    def _look_at_optimizer(self, optimizer: Any) -> None:
        """Watch an optimizer from now on, if it has parameters of the model."""
        model = self.context.model
        if id(optimizer) in self._index or not holds_any(optimizer, {*map(id, model.parameters())}):
            return
        if self.awaits_optimizer:
            self._awaited = self._versions.get(0, ()), 0 in self._ready
            self.optimizers[0] = optimizer
        else:
            self.optimizers.append(optimizer)
        i = len(self.optimizers) - 1
        self._index[id(optimizer)] = i
        self.context.connect(model, self.optimizers)
        if self._awaited is not None:
            self._take_gradients(i, *self._awaited)
        self.rule.may_grow = not hold_all(self.optimizers, model)
        self.checks.check_hooks()
        self._steps.watch(optimizer)
        log.info("Optimizer %d is %s, which steps now.", i, type(optimizer).__name__)
        self.checks.report_late_state(self.loop.state.connect_optimizer(optimizer))

    def _take_gradients(self, i: int, awaited: Versions, were_ready: bool) -> None:
        """Note what was known about gradients before it was known which optimizer has them."""
        versions = dict(awaited)
        if self.dispatchers.on_gradients_ready is not None:
            gradients = gradients_of(self.optimizers[i])
            self._versions[i] = tuple((id(g), versions.get(id(g), -1)) for g in gradients)
        if were_ready and i > 0:
            self._ready.add(i)
            self.context.norms[i] = torch.zeros(())  # the first has the norm of all

    # -- where the loop stands --------------------------------------------------------------------

    @property
    def is_between_steps(self) -> bool:
        """Whether a step has ended and the model has not been called since, as far as is seen."""
        calls = self.model.calls_seen
        return bool(calls) and calls == self._calls_before_step and not self.has_new_gradients

    # -- forward ----------------------------------------------------------------------------------

    def before_forward(self) -> None:
        """Fire `on_before_forward`; the first call of the model starts training."""
        if not self.context.generating:
            self._thread = get_ident()
            if not self._has_started:
                self._session.begin()
            self.loop.before_forward()

    def after_forward(self, outputs: Any) -> None:
        """Call forward hooks, and fire `on_after_forward`."""
        if not self.context.generating:
            self.loop.after_forward(outputs)

    # -- backward ---------------------------------------------------------------------------------

    def before_backward(self, loss: torch.Tensor | None, outputs: Any = ()) -> Backward | None:
        """Return the loss and the gradients; None for a thread that does not train the model."""
        given = self._given_loss
        if (
            given is None
            and get_ident() != self._thread
            and not self._is_in_training_thread(outputs)
        ):
            return None
        if self.times.timed:
            self.times.lap("forward")
        scaler = self.scaler
        if self._scaled is not None and self._scaled[0]() is loss:
            scaler = self._scaled[1]
        versions = list(map(gradient_versions, self.optimizers))
        backward = self._backward = Backward(loss, versions, scaler)
        if given is not None:
            backward.loss, backward.given = given, True
        elif self.losses.wanted and (
            scaler is not None or loss is None or type(loss.grad_fn) is not self.losses.plain_kind
        ):
            self.losses.look_at(backward)
        if self._steps.searches and self._dropped_gradients(versions):
            what = "Gradients were dropped, and no optimizer has stepped"
            self.checks.warn_of_no_optimizer(what)
        return backward

    def _is_in_training_thread(self, outputs: Any) -> bool:
        """Return whether the thread that runs backward, and has ended no step, trains the model."""
        thread = get_ident()
        is_other = thread in self._other_threads and not self.checks.is_first_step
        if is_other or not any(map(self._trains, outputs)):
            self._other_threads.add(thread)
            return False
        self._thread = thread
        return True

    def _dropped_gradients(self, versions: list[Versions]) -> bool:
        """Return whether the loop had gradients that no optimizer has used."""
        return self.awaits_optimizer and bool(self.backwards_seen) and not any(versions)

    def after_backward(self, before: Backward | None) -> None:
        """Note the loss and fire on_after_backward, if gradients have changed."""
        if before is None:
            return
        has_stepped, self._backward = self._backward is not before, None
        changed = before.given or any(map(have_gradients_changed, before.versions, self.optimizers))
        if not changed and not has_stepped:
            return
        self.has_new_gradients = changed
        if not has_stepped:
            self._count_backward(before)
        if self._ready:  # a step was skipped, or the optimizers have backwards of their own
            self._forget_changed(before.versions)
        if self.dispatchers.on_gradients_ready is not None:
            self._versions = dict(enumerate(map(gradient_versions, self.optimizers)))
        if self.dispatchers.on_after_backward is not None:
            self.dispatchers.on_after_backward(self.context)
        if self.times.timed:
            self.times.lap("backward")

    def backward_failed(self) -> None:
        """Forget a backward that has ended with an exception, and its graph."""
        self._backward = None

    def _count_backward(self, before: Backward) -> None:
        """Note the loss of a backward, which has ended; or an optimizer steps within it."""
        self._backward = None
        self.backwards_seen += 1
        if before.scaler is not None and before.scaler is not self.scaler:
            self._use_scaler(before.scaler)
        if self.losses.wanted:
            self.losses.add(before)

    def _forget_changed(self, before: list[Versions]) -> None:
        # An optimizer that steps less often than another has gradients of several steps.
        takes_part = not self._stepped and self.rule.ends_with is None
        for i in tuple(self._ready):
            if not have_gradients_changed(before[i], self.optimizers[i]):
                continue
            if i in self._stepped:
                self._has_more.add(i)
                continue
            is_clipped = bool(before[i]) and self._clipped.get(i) == before[i]
            is_clipped = is_clipped and takes_part and not self._closure_evaluated
            if is_clipped and self._needs_clipped_gradients():
                self.checks.report("backward after clip")
            self._new_gradients(i)

    def run_backward(self, loss: torch.Tensor, backward: Callable[[], None]) -> None:
        """Run backward for a loop that gives its loss."""
        self._given_loss = loss.detach()
        try:
            backward()
        finally:
            self._given_loss = None

    def batch_loss(self) -> LazyFloat | None:
        """Return the loss of the batch that ends, None if it is not known."""
        loss = self.losses.set_batch_loss()
        if loss is None and self.needs.asks_for_loss and not self._verified:
            unmet = self._requirements.unmet(self.hooks)
            self.checks.raise_or_warn([*unmet, *self._unknown_loss()])
        return loss

    # -- gradients --------------------------------------------------------------------------------

    def _new_gradients(self, i: int) -> None:
        """Forget about gradients that no step has used, and requests for them."""
        self._ready.discard(i)
        self._clipped.pop(i, None)
        self.context.norms.pop(i, None)
        self._requests.skips.pop(i, None)
        self._requests.skips.pop(-1, None)
        self._looks_at_skips = bool(self._requests.skips) or self.loop.ranks.is_distributed

    def gradients_ready(self, which: torch.optim.Optimizer | None) -> None:
        """Fire on_gradients_ready and run updates: the loop says that gradients are complete."""
        for i, optimizer in enumerate(self.optimizers):
            if i in self._ready or i in self._stepped or (which or optimizer) is not optimizer:
                continue
            if self.scaler is not None and self.scaler.is_enabled():
                self.scaler.unscale_(optimizer)  # calls `scaler_unscale`
            else:
                self._gradients_ready(i)

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

    def _check(self, i: int, problems: list[str]) -> None:
        """Raise before the first step if hooks would not get what they need; later, warn."""
        if not self._verified and not self.backwards_seen and self._requests.why_skipped(i):
            return  # a batch without backward, whose step is skipped: a later one is checked
        if self._unchecked or problems:
            if self._unchecked:
                problems = [*self._requirements.unmet(self.hooks), *problems]
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

    def _unknown_loss(self) -> list[str]:
        who = ", ".join(self.needs.asks_for_loss)
        return [f"{who} asks for 'loss'{self._requirements.why_no_loss}"] if who else []

    def _unseen(self) -> list[str]:
        """Return what hooks need to have been seen before the first step, and was not."""
        problems = self.checks.unseen_calls(
            called=bool(self.model.calls_seen),
            had_backward=bool(self.backwards_seen),
            asks_for_loss=self.needs.asks_for_loss,
        )
        self.losses.set_step_loss()
        if self.backwards_seen and self.context.known("loss") is None:
            problems += self._unknown_loss()
        return problems

    # -- clipping ---------------------------------------------------------------------------------

    def before_clip(self, call: ClipCall) -> None:
        """Fire on_gradients_ready before the step's first clip, and keep the norm."""
        if call.function == "get_total_norm":
            if self.dispatchers.update is not None:
                self._update_gradients(call)
            return
        given = self._optimizers_of(set(map(id, call.tensors)))
        for i in self._has_more.intersection(given):
            self._step_again(i)
        concerned = [i for i in given if self._prepare_clip(i, call.function)]
        if not concerned:
            return
        self._has_clipped = True
        self._clip = call, concerned
        for i in concerned if self._norm_is_wanted() else ():
            gradients = gradients_of(self.optimizers[i])
            if i not in self._clipped and not call.has_norm_of(gradients):
                self.context.norms[i] = norm_or_nan(partial(global_norm, gradients))

    def _prepare_clip(self, i: int, function: str) -> bool:
        """Fire on_gradients_ready before a clip; return whether it belongs to this step."""
        has_stepped = i in self._stepped or self._closure_evaluated
        if has_stepped or (self.backwards_seen and not self.has_new_gradients):
            return False
        if i not in self._ready and self.scaler is not None and self.scaler.is_enabled():
            if function != "get_total_norm" and self._needs_clipped_gradients():
                self.checks.report("scaled clip", function=function)
            return False
        self._session.begin()
        self._gradients_ready(i)
        return True

    def _needs_clipped_gradients(self) -> bool:
        """Return whether a hook depends on gradients that are clipped in the usual order."""
        events = ("on_gradients_ready", "on_gradient_clip", "update")
        return self.needs.grad_norm or any(self.hooks.listeners(e, needed=True) for e in events)

    def _norm_is_wanted(self) -> bool:
        """Return whether a hook asks for the norm; one of any rank, if gradients are sharded."""
        is_agreed = self.context.norm_is_agreed
        return self.needs.grad_norm if is_agreed is None else is_agreed

    def _optimizers_of(self, given: set[int]) -> list[int]:
        """Return the numbers of the optimizers that have one of these parameters, given by id."""
        return [i for i, optimizer in enumerate(self.optimizers) if holds_any(optimizer, given)]

    def _update_gradients(self, call: ClipCall) -> None:
        """Run updates before the loop computes a norm, of the updated gradients then."""
        owners = {
            id(parameter.grad): parameter
            for optimizer in self.optimizers
            for parameter in parameters_of(optimizer)
            if parameter.grad is not None
        }
        given = {id(owners[id(tensor)]) for tensor in call.tensors if id(tensor) in owners}
        for i in self._optimizers_of(given):
            self._prepare_clip(i, call.function)
        updated = [owners[id(t)].grad if id(t) in owners else t for t in call.tensors]
        call.tensors = [gradient for gradient in updated if gradient is not None]

    def after_clip(self, call: ClipCall) -> None:
        """Fire on_gradient_clip after the step's first clip."""
        if self._clip is None or call is not self._clip[0]:
            return
        concerned, self._clip = self._clip[1], None
        context = self.context
        for i in concerned:
            is_first = i not in self._clipped
            self._clipped[i] = gradient_versions(self.optimizers[i])
            if not is_first:
                continue
            if call.result is not None and self._norm_is_wanted():
                context.norms.setdefault(i, whole(call.result))  # all ranks clip together
            if self.dispatchers.on_gradient_clip is not None:
                context.optimizer_idx = i
                context.clipped_norm = context.norms.get(i)
                self.dispatchers.on_gradient_clip(context)
                context.clipped_norm = None

    # -- the scaler -------------------------------------------------------------------------------

    # Gradients are unscaled before the optimizer is called, fused or not, so that hooks see those
    # it uses; the result is the same, bit for bit.

    def _use_scaler(self, scaler: torch.amp.GradScaler, *, has_scaled: bool = True) -> None:
        """Use a scaler that `attach` was not given, and that steps an attached optimizer."""
        if self.scaler is not None:
            self.checks.report("second scaler")
            return
        self.scaler = self._session.scaler = scaler
        self._takes_short_path = False
        log.info("The loop steps through a %s, which is used from now on.", type(scaler).__name__)
        problems = self.loop.state.connect_scaler(scaler, has_scaled=has_scaled)
        self.checks.report_late_state(problems)

    def _find_optimizer(self, scaler: torch.amp.GradScaler, optimizer: Any) -> int | None:
        """Return the number of an optimizer that a scaler handles; None if it is not attached."""
        if self._steps.searches:
            self._look_at_optimizer(optimizer)
        i = self._index.get(id(optimizer))
        if i is not None and scaler is not self.scaler:
            self._use_scaler(scaler)
            self.losses.unscale(scaler)
        return i

    def scaler_scale(self, scale: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        """Scale as the scaler does; it is noted which loss this was."""
        if self.loop.state.late.scaler is not None and self._trains(outputs):
            self._use_scaler(scaler, has_scaled=False)  # its state has to be there before it scales
        scaled = scale(outputs)
        if isinstance(scaled, torch.Tensor):
            self._scaled = weakref.ref(scaled), scaler
        return scaled

    def _trains(self, loss: Any) -> bool:
        """Return whether a loss was computed from parameters of the model."""
        parameters = {id(parameter) for parameter in self.context.model.parameters()}
        return isinstance(loss, torch.Tensor) and any(
            id(getattr(node, "variable", None)) in parameters for node in _nodes_of(loss)
        )

    def scaler_unscale(self, unscale: Callable[..., Any], scaler: Any, optimizer: Any) -> None:
        """Unscale as the scaler does, and fire on_gradients_ready."""
        i = self._find_optimizer(scaler, optimizer)
        unscale(optimizer)
        self._unscaled.add(id(optimizer))
        if i is None:
            return
        if i in self._versions:
            self._versions[i] = gradient_versions(optimizer)
        if i in self._ready:  # of a step that the loop skipped: a scaler unscales once
            self._new_gradients(i)
        self._gradients_ready(i)

    def scaler_step(
        self, step: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Step as the scaler does; fire on_step_skipped if it has not called the optimizer."""
        i = self._find_optimizer(scaler, optimizer)
        if i is None:
            return step(optimizer, *args, **kwargs)
        if id(optimizer) not in self._unscaled:
            scaler.unscale_(optimizer)
        self._in_scaler_step = True
        result = step(optimizer, *args, **kwargs)
        self._unscaled.discard(id(optimizer))
        if self._in_scaler_step:
            self._in_scaler_step = False
            self._skip_optimizer_step(i, _OVERFLOW)
        return result

    # -- optimizer.step ---------------------------------------------------------------------------

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Do what comes before a step; where there is nothing to do, in as few reads as can be."""
        if active_dynamo() is not None:  # the loop calls a compiled `step`
            return _uncompiled(self._before_step)(optimizer, args, kwargs)
        has_closure = kwargs or (len(args) > 1 and args[1] is not None)
        if self.has_boundary_work and not self._stepped and self._begins_step(optimizer):
            self._session.reach_boundary()
        if not self._takes_short_path or has_closure:
            return self._before_any_step(optimizer, args, kwargs)
        fire = self.dispatchers
        if fire.on_gradients_ready is not None or fire.update is not None:
            self._gradients_ready(0)
        if fire.on_before_optimizer_step is not None:
            fire.on_before_optimizer_step(self.context)
        if self._looks_at_skips:
            self._apply_skip(0)
        return None

    def _begins_step(self, optimizer: Any) -> bool:
        """Return whether the step of an optimizer belongs to a new step of the loop.

        One that does not end steps may step right after the one that does.
        """
        return self.rule.ends_with in (None, self._index.get(id(optimizer)))

    def _before_any_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        self._session.begin()
        if self._backward is not None:  # gradients are used as soon as they are there
            self._count_backward(self._backward)
        i = self._index[id(optimizer)]
        if i in self._stepped:
            self._step_again(i)
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if closure is not None:
            evaluate = self._watch_closure(i, closure)
            if "closure" in kwargs:
                return args, {**kwargs, "closure": evaluate}
            return (args[0], evaluate, *args[2:]), kwargs
        if self.scaler is not None and self.scaler.is_enabled() and not self._in_scaler_step:
            self.checks.report("unused scaler")
        self._found_inf = getattr(optimizer, "found_inf", None)
        self._begin_optimizer_step(i)
        return None

    def _step_again(self, i: int) -> None:
        """Let an optimizer step again, in the step in progress or in a new one."""
        if not self.rule.repeat(i, self._stepped):
            del self._stepped[i]
            self._has_more.discard(i)
            self._new_gradients(i)
            return
        # The step has ended before the latest backward, whose loss and gradients are of the next.
        later, versions = self.losses.take_latest(), dict(self._versions)
        had_new = self.has_new_gradients
        self._end_optimizer_steps(is_late=True)
        self.losses.put_back(later)
        self._versions, self.has_new_gradients = versions, had_new

    def _begin_optimizer_step(self, i: int) -> None:
        problems: list[str] = []
        if self.dispatchers.on_gradient_clip is not None and not self._has_clipped:
            is_last = self.rule.is_complete({*self._stepped, i})
            problems = self.checks.missing_clip() if is_last else []
        self._gradients_ready(i, problems)
        if self.dispatchers.on_before_optimizer_step is not None:
            self.context.optimizer_idx = i
            self.dispatchers.on_before_optimizer_step(self.context)
        if self._looks_at_skips:
            self._apply_skip(i)
        if self._norm_is_wanted():
            self.context.keep_norm(i)

    def _watch_closure(self, i: int, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that begins the step: gradients exist after it has run once."""
        is_first = True

        def evaluate() -> Any:
            nonlocal is_first
            result = closure()
            if is_first:
                is_first = False
                self._closure_evaluated = True
                self.losses.keep_first()
                self._begin_optimizer_step(i)
            return result

        return evaluate

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if active_dynamo() is not None:
            return _uncompiled(self._after_step)(optimizer, args, kwargs)
        if self.times.timed:
            self.times.lap("optimizer")
        if self._takes_short_path and not (self._looks_at_skips and self._requests.why_skipped(0)):
            if self.dispatchers.on_after_optimizer_step is not None:
                self.dispatchers.on_after_optimizer_step(self.context)
            self._end_step(skipped=False)
        else:
            self._after_any_step(optimizer)
        return None

    def _after_any_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._steps.searches and not self.rule.may_grow:
            self._steps.end_search()
        i = self._index[id(optimizer)]
        self._in_scaler_step = False
        if self._found_inf is not None and self._found_inf.item():
            # A fused optimizer skips inside its kernel. Reading this waits for the device, as a
            # scaler does for every other optimizer.
            self._skip_optimizer_step(i, _OVERFLOW)
            return
        if reason := self._requests.why_skipped(i):
            self._skip_optimizer_step(i, reason)
            return
        self.context.note_step(i)
        if self.dispatchers.on_after_optimizer_step is not None:
            self.context.optimizer_idx = i
            self.dispatchers.on_after_optimizer_step(self.context)
        self._end_optimizer_step(i, stepped=True)

    # -- steps that are skipped -------------------------------------------------------------------

    def look_at_skips(self) -> None:
        """Look before each step whether it is to be skipped: a hook, or another rank, may ask."""
        self._looks_at_skips = True

    def _apply_skip(self, i: int) -> None:
        """Remove the gradients of a step that is to be skipped, in all processes together."""
        skips, ranks = bool(self._requests.why_skipped(i)), self.loop.ranks
        if ranks.is_distributed and ranks.processes.any(skips)[0] and not skips:
            self._requests.skips[i] = "another process asked"
            skips = True
        if skips:
            for parameter in parameters_of(self.optimizers[i]):
                parameter.grad = None

    def _skip_optimizer_step(self, i: int, reason: str) -> None:
        self.loop.record.step_skipped(self.context.step, reason, i)
        if self.dispatchers.on_step_skipped is not None:
            self.context.optimizer_idx = i
            self.context.reason = reason
            self.dispatchers.on_step_skipped(self.context)
        self._end_optimizer_step(i, stepped=False)

    # -- the end of a step ------------------------------------------------------------------------

    def end_open_step(self) -> None:
        """End a step in which some of the optimizers have not stepped."""
        if self._stepped:
            self._end_optimizer_steps()

    def _end_optimizer_step(self, i: int, *, stepped: bool) -> None:
        self._stepped[i] = stepped
        self._closure_evaluated = False
        self.losses.stepped.append(i)
        if self.rule.is_complete(self._stepped):
            self._end_optimizer_steps()
            single = self.scaler is None and len(self.optimizers) == 1
            has_norm = not self._norm_is_wanted() or self.context.leaves_gradients.get(i, False)
            self._takes_short_path = self._verified and single and has_norm
        elif i not in self.context.norms and self._norm_is_wanted():
            gradients = gradients_of(self.optimizers[i])  # later backwards may change them
            self.context.norms[i] = norm_or_nan(partial(global_norm, gradients))

    def _end_optimizer_steps(self, *, is_late: bool = False) -> None:
        skipped = not any(self._stepped.values())
        self.context.stepped = tuple(self._stepped)
        self._stepped.clear()
        self._has_more.clear()
        self._awaited = None
        self._end_step(skipped=skipped, is_late=is_late)
        self.context.stepped = ()
        if self.checks.is_first_step:
            self.checks.is_first_step = False
            self.checks.warn_of_waiting_states()

    def _forget_gradients(self, stepped: tuple[int, ...]) -> None:
        """Forget about gradients that steps have used; others wait for their optimizer."""
        for i in stepped or tuple(self._ready):
            self._ready.discard(i)
            self._versions.pop(i, None)
            self._clipped.pop(i, None)
            self.context.norms.pop(i, None)

    def _end_step(self, *, skipped: bool, is_late: bool = False) -> None:
        context, losses, record = self.context, self.losses, self.loop.record
        latest_loss = context.latest_loss
        context.skipped = skipped
        if self._looks_at_skips:
            self._requests.skips.clear()  # on_step_end requests for the next step
            self._looks_at_skips = self.loop.ranks.is_distributed
        if not skipped:
            context.step += 1
        if losses.wanted:
            if self._backward is not None:
                self._count_backward(self._backward)
            losses.end_step()
        has_batch = self._phases.batch is not None
        if has_batch and not is_late:
            self._phases.end_batch()
        if context.norm_is_agreed:
            context.prepare_norm()
        if self.dispatchers.on_step_end is not None:
            if losses.wanted and has_batch:
                losses.set_step_loss()  # that of its last batch may be there
            self.dispatchers.on_step_end(context)
        context.agreed_norm = None
        named = losses.named
        if losses.wanted:
            losses.forget()
        if self._ready:
            self._forget_gradients(context.stepped)
        self.has_new_gradients = self._closure_evaluated = False
        self._calls_before_step = self.model.calls_seen
        self._thread = get_ident()
        if self.loop.probes is not None:
            self.loop.end_step_of_probes(self.loop.probes)
        context.skipped = False
        context.step_in_progress = context.step + 1
        if record.is_wanted:
            loss = context.latest_loss if context.latest_loss is not latest_loss else None
            if context.optimizer_names:
                loss = self._record_names(named, loss)
            ranks = self.loop.ranks
            records = ranks.records if ranks.is_distributed else None
            record.end_step(context.step, context.known("epoch"), loss, records)
            self.times.end_batch()
        if self.has_boundary_work:
            self._session.after_step()

    def _record_names(self, losses: list[tuple[str, torch.Tensor]], loss: Any) -> Any:
        """Record losses and learning rates by optimizer; return the loss of all, if it is one."""
        context, record = self.context, self.loop.record
        for name, own in losses:
            record.add_to_step(name, own)
        for i in () if self.needs.logs_rates else context.stepped or (0,):
            if (lr := context.read_lr(i)) is not None:
                record.add_to_step(f"lr/{context.optimizer_names[i]}", lr)
        return None if losses else loss


def _nodes_of(loss: torch.Tensor) -> Iterator[Any]:
    """Yield the nodes of a loss's graph, each once."""
    waiting, seen = [loss.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions]
