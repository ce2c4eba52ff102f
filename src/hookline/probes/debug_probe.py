"""Debug: names the first module through which something bad flowed."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from pydantic import NonNegativeInt, PositiveInt

from hookline.errors import ProbeError
from hookline.hook import Rank
from hookline.options import BuiltIn
from hookline.probes.attachment import Call
from hookline.probes.captured_state import CapturedState
from hookline.probes.conditions import Condition, Conditions, extremes, read, read_conditions
from hookline.probes.output_gradient import on_gradient
from hookline.probes.probe import Probe
from hookline.probes.segments import note, noted
from hookline.tensors.nested import map_tensors, tensors_in

__all__ = ["Debug", "DebugProbe", "Finding"]

log = logging.getLogger("hookline")

_MOST = 4096  # calls that are measured before they are read, where no step or forward ends


@dataclass(eq=False)
class Finding:
    """Something bad: where it was first, in the order of the calls.

    Args:
        module: The module's name, or the tap's.
        condition: What holds.
        of: Whether for its output, or for the gradient of its output.
        step: Completed optimizer steps before; None outside of training.
        epoch: The epoch; None outside of training.
        call: Which call of the module in its forward, from 0.
        low: The smallest value; NaN if there was one.
        high: The largest value; beside a NaN, if a magnitude is looked for, that of the others.
        others: The modules after it where the condition held, too, until it was looked at.
        states: The last states up to this one, with `keep`.
    """

    module: str
    condition: str
    of: Literal["output", "gradient"]
    step: int | None
    epoch: int | None
    call: int
    low: float | None = None
    high: float | None = None
    others: list[str] = field(default_factory=list[str])
    states: list[CapturedState] = field(default_factory=list[CapturedState], repr=False)

    def __str__(self) -> str:
        what = "output" if self.of == "output" else "gradient of the output"
        when = "" if self.step is None else f" in step {self.step + 1}"
        which = f", call {self.call}" if self.call else ""
        values = "" if self.low is None else f" (from {self.low:g} to {self.high:g})"
        more = f"; then {len(self.others)} more" if self.others else ""
        return f"{self.condition}: the {what} of '{self.module}'{which}{values}{when}{more}"


@dataclass(slots=True, eq=False)
class _Measured:
    """One call, as it was measured: not read yet."""

    finding: Finding
    extremes: list[tuple[torch.Tensor, torch.Tensor]]
    answers: list[tuple[Condition, torch.Tensor | bool]]
    state: CapturedState | None


class DebugProbe(BuiltIn, Probe):
    """Checks what flows through modules, and names the first one that went bad.

    It is measured on the device and read once per step, or outside of training when the model's
    forward, or backward, is over: nothing waits for single modules. `findings` has what was found.

    Args:
        modules: Which modules to look at, as for every probe; None for none, only taps.
        conditions: What to look for: `"nonfinite"`, `{"magnitude": 1e4}` (an absolute value above
            it), `"dead"` (all zero), a function of a tensor that says whether it holds, or a list
            of these. None is for `"nonfinite"`.
        action: `warn`; `record` it in `findings` only; `stop` training, or outside of training
            raise `ProbeError`; `break` into the debugger that `breakpoint()` starts, where there is
            a terminal, and stop where there is none.
        gradients: Look at the gradients of the outputs, too; not in compiled models, and not where
            a module returns a parameter as it is. With a `GradScaler` they are the scaled ones.
        keep: How many states up to a finding it has, copied. All that flows through the modules in
            a step is held until its end.
        once: Tell of each module and condition only once.
        limit: After so many findings they are only counted; None for any number.
        taps: Which of the values that `hookline.tap` names to look at, too.
    """

    cost = "One pass over each output, and one transfer per step; with `keep` also copies."
    hookline_rank = Rank.MONITOR
    probe_name = "debug_probe"

    def __init__(
        self,
        modules: Any = "**",
        conditions: Conditions = None,
        action: Literal["warn", "record", "stop", "break"] = "warn",
        gradients: bool = False,
        keep: NonNegativeInt = 0,
        once: bool = False,
        limit: PositiveInt | None = 100,
        taps: str | list[str] | tuple[str, ...] = (),
    ) -> None:
        super().__init__(modules, (taps,) if isinstance(taps, str) else taps)
        self.wants_before = self.wants_input = keep > 0
        self.wants_recomputed = gradients
        self._conditions = read_conditions(conditions)
        self._by_value = any(condition.holds is not None for condition in self._conditions)
        self._beside_nan = any(condition.beside_nan for condition in self._conditions)
        self._functions = [one for one in self._conditions if one.function is not None]
        self._action = action
        self._gradients = gradients
        self._keep = keep
        self._once = once
        self._limit = limit
        self._begin()

    def _begin(self) -> None:
        self.findings: list[Finding] = []
        self.count = 0
        """How many findings there were, those over the limit too."""
        self._told: set[tuple[str, str, str]] = set()
        self._measured: list[_Measured] = []
        self._recent: list[CapturedState] = []
        self._lock = threading.Lock()
        self._here = _Here()
        self._queued = False
        self._said_compiled = False

    # -- measuring --------------------------------------------------------------------------------

    def began(self) -> None:
        """The model's forward begins: forget what a failed one has left."""
        self._here.came_in.clear()

    def before(self, call: Call) -> None:
        """A module is about to run; with `keep`. It may change in place what comes in."""
        if not call.recomputed:
            self._here.came_in.append((call.name, call.args, dict(call.kwargs), _came_in(call)))

    def after(self, call: Call) -> None:
        """A module has run."""
        if self._gradients:
            self._follow_gradients(call)
        if not call.recomputed:
            state = self._state(call) if self._keep else None
            self._measure(_finding(call, "output"), call.output, state)

    def _measure(self, finding: Finding, value: Any, state: CapturedState | None) -> None:
        found = _Measured(finding, [], [], state)
        for tensor in tensors_in(value):
            if self._by_value:
                measured = extremes(tensor, beside_nan=self._beside_nan)
                found.extremes += [] if measured is None else [measured]
            for condition in self._functions:
                what = f"the {finding.of} of '{finding.module}'"
                found.answers.append((condition, condition.ask(tensor, what)))
        with self._lock:
            if state is not None:
                self._recent.append(state)
            if found.extremes or found.answers:
                self._measured.append(found)
        if len(self._measured) >= _MOST:
            self.check()

    def _follow_gradients(self, call: Call) -> None:
        """Have the gradients of an output measured, when they come."""
        if call.compiled:
            if not self._said_compiled:
                self._said_compiled = True
                log.warning(
                    "The probe '%s' cannot look at gradients in a compiled model, only at outputs.",
                    self.probe_name,
                )
            return
        who = (id(self), call.name)
        if not torch.is_grad_enabled():
            note(who, call.index)  # the first pass of checkpointing's reentrant kind
            return
        if call.recomputed:
            call.index = noted(who) or 0
            self._check_after_backward()  # not after that of the segment, which is another one
        for tensor in tensors_in(call.output):
            on_gradient(tensor, partial(self._gradient_came, _finding(call, "gradient")))

    def _gradient_came(self, finding: Finding, gradient: torch.Tensor) -> None:
        attachment = self.attachment
        if attachment is not None and attachment.enabled:
            attachment.guard(self._saw_gradient, (finding, gradient))

    def _saw_gradient(self, what: tuple[Finding, torch.Tensor]) -> None:
        finding, gradient = what
        state = None
        if self._keep:
            place = (finding.module, self.probe_name, finding.step, finding.epoch, finding.call)
            state = CapturedState(*place, gradient=_copy(gradient))
        self._measure(finding, gradient, state)
        self._check_after_backward()

    def _check_after_backward(self) -> None:
        outside = self.attachment is not None and self.attachment.context is None
        if outside and not self._queued:
            self._queued = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self.check)

    def _state(self, call: Call) -> CapturedState:
        place = (call.name, self.probe_name, call.step, call.epoch, call.index)
        came_in = self._here.ended(call) or _came_in(call)
        output = map_tensors(call.output, _copy)
        return CapturedState(*place, input=came_in[0], kwargs=came_in[1], output=output)

    # -- looking ----------------------------------------------------------------------------------

    def ended(self) -> None:
        """The model's forward is over."""
        in_training = self.attachment is not None and self.attachment.context is not None
        if not (in_training and torch.is_grad_enabled()):
            self.check()

    def on_step_end(self, trainer: Any) -> None:
        """A step is done."""
        self.check(trainer)

    def on_train_end(self) -> None:
        """Training is over: forget what was not looked at."""
        with self._lock:
            self._measured, self._recent = [], []
        if self._limit is not None and self.count > self._limit:
            log.warning("The probe '%s' found %d in all.", self.probe_name, self.count)

    def check(self, trainer: Any = None) -> list[Finding]:
        """Look at what was measured since the last time. This waits for the device, once.

        Returns:
            What was found now; the action has been taken.
        """
        self._queued = False
        with self._lock:
            measured, self._measured = self._measured, []
            recent = self._recent
            self._recent = recent[len(recent) - self._keep :] if self._keep else []
        found = [self._with_states(one, recent) for one in self._first(measured)]
        news = [finding for finding in found if self._is_news(finding)]
        for finding in news:
            self.findings.append(finding)
            log.log(
                logging.INFO if self._action == "record" else logging.WARNING,
                "The probe '%s' found %s.",
                self.probe_name,
                finding,
            )
        if news and self._action in ("stop", "break"):
            self._act(news[0], trainer)
        return news

    def _first(self, measured: list[_Measured]) -> Iterator[_Measured]:
        """Yield the first of the calls where a condition holds, for each condition."""
        values = iter(read(one for each in measured for pair in each.extremes for one in pair))
        ranges = [[(next(values), next(values)) for _ in each.extremes] for each in measured]
        told = [a for each in measured for _, a in each.answers if isinstance(a, torch.Tensor)]
        answers = iter(read(told))
        first: dict[tuple[str, str], _Measured] = {}
        for each, pairs in zip(measured, ranges, strict=True):
            given = [
                (condition, bool(next(answers)) if isinstance(a, torch.Tensor) else a)
                for condition, a in each.answers
            ]
            for condition in self._conditions:
                found = self._holds(condition, each, pairs, given)
                if found is None:
                    continue
                key = (condition.name, found.finding.of)
                if key not in first:
                    first[key] = found
                elif (
                    found.finding.module not in (others := first[key].finding.others)
                    and found.finding.module != first[key].finding.module
                ):
                    others.append(found.finding.module)
        yield from first.values()

    def _holds(
        self,
        condition: Condition,
        each: _Measured,
        pairs: list[tuple[float, float]],
        given: list[tuple[Condition, bool]],
    ) -> _Measured | None:
        """Return what was measured, with the condition and the values, where it holds."""
        where = each.finding
        place = (where.step, where.epoch, where.call)
        if condition.holds is None:
            if not any(answer for asked, answer in given if asked is condition):
                return None
            finding = Finding(where.module, condition.name, where.of, *place)
            return _Measured(finding, [], [], each.state)
        for low, high in pairs:
            if condition.holds(low, high):
                finding = Finding(where.module, condition.name, where.of, *place, low, high)
                return _Measured(finding, [], [], each.state)
        return None

    def _with_states(self, measured: _Measured, recent: list[CapturedState]) -> Finding:
        if measured.state is not None:
            at = next(i for i, state in enumerate(recent) if state is measured.state) + 1
            measured.finding.states = recent[max(0, at - self._keep) : at]
        return measured.finding

    def _is_news(self, finding: Finding) -> bool:
        key = (finding.module, finding.condition, finding.of)
        if self._once and key in self._told:
            return False
        self._told.add(key)
        self.count += 1
        if self._limit is None or self.count <= self._limit:
            return True
        if self.count == self._limit + 1:
            log.warning(
                "The probe '%s' has found %d: from now on it only counts.",
                self.probe_name,
                self._limit,
            )
        return False

    def _act(self, finding: Finding, trainer: Any) -> None:
        if self._action == "break" and _in_terminal():
            _debugger(self, finding)
            return
        context = None if self.attachment is None else self.attachment.context
        trainer = trainer if trainer is not None else getattr(context, "trainer", None)
        if trainer is None:
            raise ProbeError(f"The probe '{self.probe_name}' found {finding}.")
        trainer.stop(f"{self.probe_name}: {finding}")

    # -- copies -----------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """A copy is on no model and has found nothing."""
        return {name: value for name, value in super().__getstate__().items() if name not in _BEGUN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()


Debug = DebugProbe

_BEGUN = (
    *("findings", "count", "_told", "_measured", "_recent", "_lock", "_here", "_queued"),
    "_said_compiled",
)
"""What belongs to one probe, on one model."""


class _Here(threading.local):
    """What came into the modules that are running in this thread, each within the one before it."""

    def __init__(self) -> None:
        self.came_in: list[tuple[str, tuple[Any, ...], dict[str, Any], Any]] = []

    def ended(self, call: Call) -> Any:
        """Return what came into a call; None if nobody knows, or another hook has replaced it."""
        for i in range(len(self.came_in) - 1, -1, -1):
            name, args, kwargs, came_in = self.came_in[i]
            if name == call.name:
                del self.came_in[i:]  # those within it have failed
                return came_in if call.came_with(args, kwargs) else None
        return None


def _came_in(call: Call) -> Any:
    return map_tensors((call.args, dict(call.kwargs)), _copy)


def _finding(call: Call, of: Literal["output", "gradient"]) -> Finding:
    """Where a call is, with nothing found yet."""
    return Finding(call.name, "", of, call.step, call.epoch, call.index)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _in_terminal() -> bool:
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))


def _debugger(probe: DebugProbe, finding: Finding) -> None:
    print(f"{finding}\nHere are: probe, finding. `c` goes on, `q` ends it.", flush=True)
    breakpoint()
