"""Debug: finds the first module whose output or gradient meets a condition, such as NaN."""

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

from hookline.errors import HookFailedError, ProbeError
from hookline.hook import Rank
from hookline.options import BuiltIn
from hookline.probes.call import Call
from hookline.probes.captured_state import CapturedState
from hookline.probes.conditions import Condition, Conditions, read_conditions
from hookline.probes.output_gradient import on_gradient
from hookline.probes.probe import Probe
from hookline.probes.recomputation import recall_call, remember_call
from hookline.tensors.finiteness import extremes
from hookline.tensors.nested import map_tensors, tensors_in
from hookline.tensors.reading import read_tensors

__all__ = ["Debug", "DebugProbe", "Finding"]

log = logging.getLogger("hookline")

_MAX_UNREAD = 4096  # calls that are measured before they are read, if no step or forward ends


@dataclass(eq=False)
class Finding:
    """The first call in which a condition held.

    Args:
        module: The name of the module or tap.
        condition: The condition.
        of: Whether it held for the output or for the gradient of the output.
        step: The number of optimizer steps completed before; None outside of training.
        epoch: The epoch; None outside of training.
        call: The number of the module's call in its forward, from 0.
        low: The smallest value; NaN if there was one.
        high: The largest value; with a NaN and a condition on magnitude, that of the others.
        others: The modules after it for which the condition held before it was checked.
        states: With `keep`, the last states up to this one.
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
        subject = "output" if self.of == "output" else "gradient of the output"
        step = "" if self.step is None else f" in step {self.step + 1}"
        call = f", call {self.call}" if self.call else ""
        values = "" if self.low is None else f" (from {self.low:g} to {self.high:g})"
        others = f"; then {len(self.others)} more" if self.others else ""
        return f"{self.condition}: the {subject} of '{self.module}'{call}{values}{step}{others}"


@dataclass(slots=True, eq=False)
class _Measured:
    """The measurements of one call, not read yet."""

    finding: Finding
    extremes: list[tuple[torch.Tensor, torch.Tensor]]
    answers: list[tuple[Condition, torch.Tensor | bool]]
    state: CapturedState | None


class _FindingError(ProbeError, HookFailedError):
    """A finding that is raised; a `HookFailedError`, so that it is not isolated as a failure."""


class DebugProbe(BuiltIn, Probe):
    """Checks the outputs of modules and reports the first one for which a condition holds.

    Outputs are measured on the device and read once per step, or outside of training at the end of
    the model's forward or backward, so no module waits for the device. `findings` has the results.

    Args:
        modules: Which modules to check, as for every probe; None for none, only taps.
        conditions: What to check: `"nonfinite"`, `{"magnitude": 1e4}` (an absolute value above it),
            `"dead"` (all zero), a function of a tensor that returns whether it holds, or a list of
            these. None stands for `"nonfinite"`.
        action: `warn`; `record` it in `findings` only; `stop` training, or outside of training
            raise `ProbeError`; `break` into the debugger that `breakpoint()` starts if there is a
            terminal, else stop.
        gradients: Check the gradients of the outputs, too; not in compiled models, and not where a
            module returns a parameter itself. With a `GradScaler` they are scaled.
        keep: How many states up to a finding to keep, copied. All inputs and outputs of the modules
            in a step are held until its end.
        once: Report each module and condition only once.
        limit: The number of findings after which they are only counted; None for no limit.
        taps: Which of the values that `hookline.tap` names to check, too.
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
        self._functions = [c for c in self._conditions if c.function is not None]
        self._action = action
        self._gradients = gradients
        self._keep = keep
        self._once = once
        self._limit = limit
        self._reset()

    def _reset(self) -> None:
        self.findings: list[Finding] = []
        self.count = 0
        """The number of findings, also those over the limit."""
        self._reported: set[tuple[str, str, str]] = set()
        self._measured: list[_Measured] = []
        self._recent: list[CapturedState] = []
        self._lock = threading.Lock()
        self._check_queued = False
        self._warned_compiled = False

    # -- measuring --------------------------------------------------------------------------------

    def before(self, call: Call) -> None:
        """With `keep`: copy the arguments before the module runs and may change them."""
        if not call.recomputed:
            call.saved = _copy_inputs(call)

    def after(self, call: Call) -> None:
        """Measure the output of a module."""
        if self._gradients:
            self._expect_gradients(call)
        if not call.recomputed:
            state = self._state(call) if self._keep else None
            self._measure(_finding(call, "output"), call.output, state)

    def _measure(self, finding: Finding, value: Any, state: CapturedState | None) -> None:
        measured = _Measured(finding, [], [], state)
        for tensor in tensors_in(value):
            if self._by_value:
                pair = extremes(tensor, beside_nan=self._beside_nan)
                measured.extremes += [] if pair is None else [pair]
            for condition in self._functions:
                subject = f"the {finding.of} of '{finding.module}'"
                measured.answers.append((condition, condition.ask(tensor, subject)))
        with self._lock:
            if state is not None:
                self._recent.append(state)
            if measured.extremes or measured.answers:
                self._measured.append(measured)
        if len(self._measured) >= _MAX_UNREAD:
            self.check()

    def _expect_gradients(self, call: Call) -> None:
        """Have the gradients of an output measured in backward."""
        if call.compiled:
            if not self._warned_compiled:
                self._warned_compiled = True
                log.warning(
                    "The probe '%s' cannot see gradients in a compiled model, only outputs.",
                    self.probe_name,
                )
            return
        key = (id(self), call.name)
        if not torch.is_grad_enabled():
            remember_call(key, call.index)  # the first pass of a reentrant checkpoint
            return
        if call.recomputed:
            call.index = recall_call(key) or 0
            self._check_after_backward()  # the outer one: the segment has a backward of its own
        for tensor in tensors_in(call.output):
            on_gradient(tensor, partial(self._on_gradient, _finding(call, "gradient")))

    def _on_gradient(self, finding: Finding, gradient: torch.Tensor) -> None:
        attachment = self.attachment
        if attachment is not None and attachment.enabled:
            attachment.guard(self._measure_gradient, (finding, gradient))

    def _measure_gradient(self, finding_and_gradient: tuple[Finding, torch.Tensor]) -> None:
        finding, gradient = finding_and_gradient
        state = None
        if self._keep:
            place = (finding.module, self.probe_name, finding.step, finding.epoch, finding.call)
            state = CapturedState(*place, gradient=_copy(gradient))
        self._measure(finding, gradient, state)
        self._check_after_backward()

    def _check_after_backward(self) -> None:
        outside = self.attachment is not None and self.attachment.context is None
        if outside and not self._check_queued:
            self._check_queued = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self.check)

    def _state(self, call: Call) -> CapturedState:
        place = (call.name, self.probe_name, call.step, call.epoch, call.index)
        saved = None if call.input_replaced else call.saved
        args, kwargs = saved or _copy_inputs(call)
        output = map_tensors(call.output, _copy)
        return CapturedState(*place, input=args, kwargs=kwargs, output=output)

    # -- checking ---------------------------------------------------------------------------------

    def forward_end(self) -> None:
        """Check at the end of a forward, except in training, where the step has an end."""
        in_training = self.attachment is not None and self.attachment.context is not None
        if not (in_training and torch.is_grad_enabled()):
            self.check()

    def on_step_end(self, trainer: Any) -> None:
        """Check at the end of a step."""
        self.check(trainer)

    def on_train_end(self) -> None:
        """Drop what was not checked."""
        with self._lock:
            self._measured, self._recent = [], []
        if self._limit is not None and self.count > self._limit:
            log.warning("The probe '%s' has %d findings in total.", self.probe_name, self.count)

    def check(self, trainer: Any = None) -> list[Finding]:
        """Check what was measured since the last check, and take the action.

        This waits for the device, once.

        Returns:
            The new findings.
        """
        self._check_queued = False
        with self._lock:
            measured, self._measured = self._measured, []
            recent = self._recent
            self._recent = recent[len(recent) - self._keep :] if self._keep else []
        found = [self._add_states(first, recent) for first in self._first(measured)]
        new = [finding for finding in found if self._should_report(finding)]
        for finding in new:
            self.findings.append(finding)
            log.log(
                logging.INFO if self._action == "record" else logging.WARNING,
                "The probe '%s' found %s.",
                self.probe_name,
                finding,
            )
        if new and self._action in ("stop", "break"):
            self._act(new[0], trainer)
        return new

    def _first(self, measured: list[_Measured]) -> Iterator[_Measured]:
        """Yield, for each condition, the first call in which it holds."""
        unread = (one for each in measured for pair in each.extremes for one in pair)
        values = iter(read_tensors(unread))
        ranges = [[(next(values), next(values)) for _ in each.extremes] for each in measured]
        told = [a for each in measured for _, a in each.answers if isinstance(a, torch.Tensor)]
        answers = iter(read_tensors(told))
        first: dict[tuple[str, str], _Measured] = {}
        for each, pairs in zip(measured, ranges, strict=True):
            answered = [
                (condition, bool(next(answers)) if isinstance(a, torch.Tensor) else a)
                for condition, a in each.answers
            ]
            for condition in self._conditions:
                found = self._find(condition, each, pairs, answered)
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

    def _find(
        self,
        condition: Condition,
        each: _Measured,
        pairs: list[tuple[float, float]],
        answered: list[tuple[Condition, bool]],
    ) -> _Measured | None:
        """Return the finding of a condition, with the values, if it holds."""
        place = each.finding
        position = (place.step, place.epoch, place.call)
        if condition.holds is None:
            if not any(answer for asked, answer in answered if asked is condition):
                return None
            finding = Finding(place.module, condition.name, place.of, *position)
            return _Measured(finding, [], [], each.state)
        for low, high in pairs:
            if condition.holds(low, high):
                finding = Finding(place.module, condition.name, place.of, *position, low, high)
                return _Measured(finding, [], [], each.state)
        return None

    def _add_states(self, measured: _Measured, recent: list[CapturedState]) -> Finding:
        if measured.state is not None:
            at = next(i for i, state in enumerate(recent) if state is measured.state) + 1
            measured.finding.states = recent[max(0, at - self._keep) : at]
        return measured.finding

    def _should_report(self, finding: Finding) -> bool:
        """Count a finding and return whether to report it."""
        key = (finding.module, finding.condition, finding.of)
        if self._once and key in self._reported:
            return False
        self._reported.add(key)
        self.count += 1
        if self._limit is None or self.count <= self._limit:
            return True
        if self.count == self._limit + 1:
            log.warning(
                "The probe '%s' has %d findings. From now on they are only counted.",
                self.probe_name,
                self._limit,
            )
        return False

    def _act(self, finding: Finding, trainer: Any) -> None:
        if self._action == "break" and _in_terminal():
            _break(self, finding)
            return
        context = None if self.attachment is None else self.attachment.context
        trainer = trainer if trainer is not None else getattr(context, "trainer", None)
        if trainer is None:
            raise _FindingError(f"The probe '{self.probe_name}' found {finding}.")
        trainer.stop(f"{self.probe_name}: {finding}")

    # -- copies -----------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Copy the options: a copy is on no model and has found nothing."""
        return {
            name: value for name, value in super().__getstate__().items() if name not in _OWN_STATE
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()


Debug = DebugProbe

_OWN_STATE = (
    *("findings", "count", "_reported", "_measured", "_recent", "_lock", "_check_queued"),
    "_warned_compiled",
)
"""The attributes that a copy does not get."""


def _copy_inputs(call: Call) -> Any:
    return map_tensors((call.args, dict(call.kwargs)), _copy)


def _finding(call: Call, of: Literal["output", "gradient"]) -> Finding:
    """Return a finding that has the place of a call, and no condition yet."""
    return Finding(call.name, "", of, call.step, call.epoch, call.index)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _in_terminal() -> bool:
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))


def _break(probe: DebugProbe, finding: Finding) -> None:
    print(f"{finding}\nVariables: probe, finding. `c` continues, `q` quits.", flush=True)
    breakpoint()
