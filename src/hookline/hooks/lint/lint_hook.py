"""Lint: a hook that finds silent training bugs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from hookline.errors import HookConfigError, listed, nearest
from hookline.events import EVENTS
from hookline.hook import HookGroup
from hookline.hooks.debugging.repeated_forward import CannotRepeatError, ModelCall, running_call
from hookline.hooks.lint.catalogue import CHECKS
from hookline.hooks.lint.finding import POINTS, Check, Finding, describe_left_out
from hookline.hooks.lint.repeated_call import RepeatableCall
from hookline.hooks.lint.step_samples import StepSample, sample_step
from hookline.hooks.lint.torch_watch import LossCall, TorchWatch
from hookline.hooks.lint.training_view import FIRST_STEPS, TrainingView
from hookline.loop.loop import loop_of, processes_of
from hookline.options import BuiltIn
from hookline.printable import message_lines

log = logging.getLogger("hookline")

_Call = tuple[Check, Callable[..., Any]]

_REPEATED_STEP = 2  # whose forward active checks make again
_MAX_TARGETS = 8

_IN_DUE_STEPS = frozenset({"on_module_call", "on_step_sampled", "on_repeat"})
_LOADING = frozenset({"on_state_loaded", "on_weights_loaded", "on_file_loaded"})

_OPTIONAL = frozenset(EVENTS) - {"on_train_start", "on_step_end", "on_train_end"}


class Lint(BuiltIn):
    """Finds silent training bugs: those that raise nothing and cost weeks.

    Each check is a rule that a correct training run satisfies: a parameter with a gradient changes
    in a step, gradients start from zero, replicas agree. What breaks one is a finding: it is
    printed when it is found, kept in `findings`, and shown at the top of the report. Training is
    the same with and without this hook.

    Args:
        only: the ids of the checks to make; None: all.
        ignore: the ids of checks to leave out.
        active: make active checks, too, which call a copy of the model again.
    """

    hookline_group = HookGroup.MONITOR
    hookline_optional_events = _OPTIONAL
    cost = (
        "In the first ten steps, a few more and each hundredth, a copy of up to 64 elements of "
        "each parameter and gradient, and one wait for the device at the end of the step. Active "
        "checks make a few forwards, once. In other steps less than 0.1 ms, however large the "
        "model."
    )

    def __init__(
        self, only: list[str] | None = None, ignore: Sequence[str] = (), active: bool = True
    ) -> None:
        known = {check.id for check in CHECKS}
        for name in (*(only or ()), *ignore):
            if name not in known:
                raise HookConfigError(
                    f"Lint has no check '{name}'.{nearest(name, known)} The checks are: "
                    f"{listed(sorted(known))}."
                )
        self.only, self.ignore, self.active = only, tuple(ignore), active
        self.findings: list[Finding] = []
        self._checks: list[Check] = []
        self._methods: dict[str, list[_Call]] = {}  # by point: checks, and their methods
        self._calls: dict[str, list[_Call]] = {}  # those of the step in progress
        self._loaded_until = 0  # the last step that counts as one after loading
        self._view: TrainingView | None = None
        self._watch = TorchWatch()
        self._watch.attach()
        self._call: ModelCall | None = None
        self._targets: list[Tensor] = []
        self._unsent: list[Finding] = []
        self._samples: list[StepSample] = []

    # -- starting and ending -----------------------------------------------------------------------

    def on_train_start(self, trainer: Any, model: nn.Module, optimizers: list[Any]) -> None:
        if self._view is not None:
            self._end()
        self._view = view = TrainingView(trainer, model, optimizers)
        loop = loop_of(trainer)
        view.begin_step((0 if loop is None else loop.context.step) + 1)
        chosen = [
            check
            for check in CHECKS
            if (self.only is None or check.id in self.only) and check.id not in self.ignore
        ]
        self._checks = [check(view, self._add) for check in chosen]
        for check in self._checks:
            if check.is_active and not self.active:
                check.left_out = "active checks are switched off"
            if check.needs_ranks and view.ranks == 1:
                check.left_out = "there is one process"
        self._methods = {
            point: [(c, getattr(c, point)) for c in self._checks if hasattr(c, point)]
            for point in POINTS
        }
        self._loaded_until = 0
        self._choose_calls(view)
        self._tell("on_train_start")
        self._watch.start(self._tell, sees_losses=not view.is_compiled)
        if self._methods["on_model_call"] and not view.is_compiled:
            self._watch.hook_models(view.models)
        self._choose_calls(view)

    def on_train_end(self, trainer: Any) -> None:
        view = self._view
        if view is None:
            return
        self._tell("on_train_end")
        self._share_findings(view)
        view.is_due = True
        view.settle(self._judge)
        view.finish(self._judge)
        self._end()
        self._summarize(trainer, view.steps_seen - 1)

    def _end(self) -> None:
        self._watch.detach()
        self._view = self._call = None
        self._methods, self._calls, self._targets = {}, {}, []

    # -- calling the checks ------------------------------------------------------------------------

    def _choose_calls(self, view: TrainingView) -> None:
        """Choose the methods that the step in progress calls, and see no more than they need."""
        self._calls = {
            point: chosen
            for point, calls in self._methods.items()
            if view.is_due or point not in _IN_DUE_STEPS
            if (chosen := [call for call in calls if _is_due(*call, is_due=view.is_due)])
        }
        # Targets of losses are kept for active checks.
        self._watch.wanted = {*self._calls, "on_loss_call"} if view.is_due else set(self._calls)
        # Hooks on modules would compile a compiled model again.
        if "on_module_call" in self._calls and not view.is_compiled:
            self._watch.hook_modules(view.models, view.module_names)
        else:
            self._watch.leave_modules()

    def _tell(self, point: str, *args: Any) -> None:
        """Call the checks that look at a point; one that fails is left out from then on."""
        if self._call is not None and point == "on_loss_call":
            self._keep_target(args[0])
        if self._view is not None and point in _LOADING:
            self._loaded_until = self._view.steps_seen + FIRST_STEPS
        for check, function in self._calls.get(point, ()):
            if check.left_out is None and not check.has_found:
                try:
                    function(*args)
                except Exception as error:
                    self._leave_out(check, error)

    def _leave_out(self, check: Check, error: Exception) -> None:
        if isinstance(error, CannotRepeatError):
            check.left_out = f"the model cannot be called again: {error}"
            return
        check.left_out = f"it failed ({type(error).__name__}: {error})"
        log.warning("The check '%s' of Lint %s.", check.id, check.left_out, exc_info=error)

    def _judge(self, judge: Callable[..., Any], args: Any) -> None:
        """Call a check's function with what was read."""
        check = getattr(judge, "__self__", None)
        if not isinstance(check, Check):
            judge(*args)
        elif check.left_out is None and not check.has_found:
            try:
                judge(*args)
            except Exception as error:
                self._leave_out(check, error)

    # -- events ------------------------------------------------------------------------------------

    def on_before_forward(self) -> None:
        view = self._view
        if view is None or not self.active or view.steps_seen != _REPEATED_STEP:
            return
        if self._call is None and "on_repeat" in self._calls:
            self._call = running_call()

    def on_after_forward(self, outputs: Any) -> None:
        self._tell("on_after_forward", outputs)

    def on_before_optimizer_step(self, optimizers: list[Any], optimizer_idx: int) -> None:
        optimizer, view = optimizers[optimizer_idx], self._view
        if view is None:
            return
        view.optimizers = optimizers  # some come later
        self._tell("on_before_optimizer_step", optimizer)
        if view.steps_seen <= self._loaded_until:
            self._tell("on_step_after_loading", optimizer)
        self._samples = sample_step(view, optimizer) if "on_step_sampled" in self._calls else []

    def on_after_optimizer_step(self, optimizers: list[Any], optimizer_idx: int) -> None:
        optimizer = optimizers[optimizer_idx]
        self._tell("on_after_optimizer_step", optimizer)
        samples, self._samples = self._samples, []
        if samples and self._view is not None:
            for each in samples:
                each.after = self._view.sample(each.parameter)
            self._tell("on_step_sampled", optimizer, samples)

    def on_checkpoint_load(self) -> None:
        if self._view is not None:
            self._view.look_closely()
            self._choose_calls(self._view)
        self._tell("on_checkpoint_load")

    def on_step_end(self, step: int) -> None:
        view = self._view
        if view is None:
            return
        view.step = max(step, 1)
        if self._call is not None:
            self._repeat(self._call)
        self._tell("on_step_end")
        was_due = view.is_due
        if was_due:
            self._share_findings(view)
        view.settle(self._judge)
        view.end_step()
        if was_due != view.is_due:
            self._choose_calls(view)

    # -- active checks -----------------------------------------------------------------------------

    def _keep_target(self, call: LossCall) -> None:
        if call.has_gradients and len(self._targets) < _MAX_TARGETS:
            self._targets.append(call.target)

    def _repeat(self, call: ModelCall) -> None:
        targets = self._targets
        self._call, self._targets = None, []
        self._watch.is_paused = True
        try:
            self._tell("on_repeat", RepeatableCall(call, targets))
        finally:
            self._watch.is_paused = False

    # -- findings ----------------------------------------------------------------------------------

    def _add(self, finding: Finding) -> None:
        """Keep a finding, and print it once, in the process that has it first."""
        if any((f.check, f.subject) == (finding.check, finding.subject) for f in self.findings):
            return
        self.findings.append(finding)
        view = self._view
        if view is None:
            return
        if view.rank:
            self._unsent.append(finding)
            return
        level = logging.ERROR if finding.severity == "error" else logging.WARNING
        log.log(level, "%s", message_lines(*f"Lint: {finding}".splitlines()))
        run = getattr(view.trainer, "run", None)
        if run is not None:
            page = next((check.page() for check in CHECKS if check.id == finding.check), "")
            run.event("finding", **finding.as_dict(), page=page)

    def _share_findings(self, view: TrainingView) -> None:
        if view.ranks > 1:
            unsent, self._unsent = self._unsent, []
            view.compare_ranks("findings", [f.as_dict() for f in unsent], self._merge)

    def _merge(self, shared: list[list[dict[str, Any]]]) -> None:
        """Take over what other ranks have found, in rank 0."""
        if self._view is not None and not self._view.rank:
            for finding in (each for others in shared[1:] for each in others):
                self._add(Finding(**finding))

    @property
    def left_out(self) -> dict[str, str]:
        """The checks that could not look, with the reasons; those in `ignore` included."""
        reasons = dict.fromkeys(self.ignore, "ignored")
        return reasons | {c.id: c.left_out for c in self._checks if c.left_out is not None}

    def _summarize(self, trainer: Any, steps: int) -> None:
        errors = sum(finding.severity == "error" for finding in self.findings)
        left_out = self.left_out
        count = len([check for check in self._checks if check.left_out is None])
        run = getattr(trainer, "run", None)
        if run is not None:
            fields = {
                "steps": steps,
                "checks": count,
                "errors": errors,
                "findings": len(self.findings),
            }
            run.event("lint", **fields, left_out=left_out)
        if processes_of(trainer).rank:
            return
        found = f"{len(self.findings)} finding{'s' * (len(self.findings) != 1)}"
        lines = [f"Lint: {count} checks, {found}{f', {errors} of them errors' if errors else ''}."]
        lines += [f"    {line}" for line in describe_left_out(left_out)]
        log.info("%s", message_lines(*lines))


def _is_due(check: Check, method: Callable[..., Any], *, is_due: bool) -> bool:
    """Return whether a method is called in a step."""
    has_ended = check.left_out is not None or check.has_found
    return not has_ended and (is_due or not hasattr(method, "is_for_due_steps"))
