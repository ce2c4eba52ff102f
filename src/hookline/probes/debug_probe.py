"""Debug: finds the first module whose output or gradient meets a condition, such as NaN."""

from __future__ import annotations

import logging
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import torch

from hookline.arguments import check_number, read_attribute, show_value
from hookline.errors import ArgumentError, ConfigError, HookFailedError, ProbeError, nearest
from hookline.hook import HookGroup
from hookline.options import BuiltIn
from hookline.probes.call import Call
from hookline.probes.extractor import call_user_function, on_gradient
from hookline.probes.probe import Probe
from hookline.tensors.device_numbers import read_tensors
from hookline.tensors.nested import tensors_in
from hookline.tensors.norms import extremes
from hookline.tensors.sharded import nested_values

log = logging.getLogger("hookline")

_MAX_UNREAD = 4096  # calls that are measured before they are read, if no step or forward ends
_MAX_FINDINGS = 100  # above it they are only counted

Conditions: TypeAlias = Any
"""`"nonfinite"`, `"dead"`, `{"magnitude": 1e4}`, a function of a tensor, or a list of these."""


@dataclass(frozen=True)
class Condition:
    """A condition to check. It has either `holds` or `function`."""

    name: str
    holds: Callable[[float, float], bool] | None = None
    """Returns whether it holds, from the smallest and the largest value."""
    function: Callable[[torch.Tensor], Any] | None = None
    """A user's function of the tensor; returns a bool or a tensor."""

    def ask(self, tensor: torch.Tensor, what: str) -> torch.Tensor | bool:
        """Call the user's function with the detached tensor, which it must not change."""
        assert self.function is not None
        answer = call_user_function(self.function, tensor, what)
        if isinstance(answer, torch.Tensor):
            return answer.detach().bool().any()
        if isinstance(answer, bool | int | None) or type(answer).__name__ in ("bool", "bool_"):
            return bool(answer)
        raise ArgumentError(
            f"The condition '{self.name}' returned a {type(answer).__name__}. Return a bool or a "
            "tensor."
        )


@dataclass(eq=False)
class Finding:
    """The first call in which a condition held.

    `of` says whether it held for the output or for its gradient. `low` and `high` are the smallest
    and the largest value, NaN if there was one; `others` are the modules after it for which the
    condition held before it was checked. `step` and `epoch` are None outside of training.
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

    @property
    def lasting_key(self) -> tuple[str, ...]:
        """The key of a condition that lasts; NaN and infinity spread to other modules."""
        where = () if self.condition == "nonfinite" else (self.module,)
        return (self.condition, self.of, *where)

    def __str__(self) -> str:
        subject = "output" if self.of == "output" else "gradient of the output"
        step = "" if self.step is None else f" in step {self.step + 1}"
        call = f", call {self.call}" if self.call else ""
        values = "" if self.low is None else f" (from {self.low:g} to {self.high:g})"
        others = f"; then {len(self.others)} more" if self.others else ""
        return f"{self.condition}: the {subject} of '{self.module}'{call}{values}{step}{others}"


@dataclass(slots=True, eq=False)
class _Measured:
    """The measurements of one call, not read yet.

    Each value is a condition of a user with its answer, or None with the extremes of a tensor.
    """

    finding: Finding
    values: list[tuple[Any, ...]] = field(default_factory=list[Any])


class _FindingError(ProbeError, HookFailedError):
    """A finding that is raised; a `HookFailedError`, so that it is not isolated as a failure."""


class DebugProbe(BuiltIn, Probe):
    """Checks the outputs of modules and reports the first one for which a condition holds.

    Outputs are measured on the device and read once per step, or outside of training at the end of
    the model's forward or backward, so no module waits for the device. `findings` has the results.
    A condition that holds in one check after another is logged once: for NaN and infinity, which
    spread, with the module where it began. In a run, what is logged is also an event,
    `debug_finding`.

    Args:
        modules: Which modules to check, as for every probe; None for none, only taps.
        conditions: What to check: `"nonfinite"`, `{"magnitude": 1e4}` (an absolute value above it,
            if none is NaN), `"dead"` (all zero), a function of a tensor that returns whether it
            holds, or a list of these. None stands for `"nonfinite"`.
        action: `warn`; `record` it in `findings` only; `stop` training, or outside of training
            raise `ProbeError`; `break` into the debugger that `breakpoint()` starts if there is a
            terminal, else stop.
        gradients: Check the gradients of the outputs, too; not in compiled models and reentrant
            activation checkpointing, and not where a module returns a parameter itself. With a
            `GradScaler` they are scaled.
        taps: Which of the values that `hookline.tap` names to check, too.
    """

    cost = "One pass over each output, and one transfer per step."
    hookline_group = HookGroup.MONITOR
    probe_name = "debug_probe"
    wants_input = False
    _results = ("findings", "count", "_measured", "_lock", "_check_queued", "_lasting")

    def __init__(
        self,
        modules: Any = "**",
        conditions: Conditions = None,
        action: Literal["warn", "record", "stop", "break"] = "warn",
        gradients: bool = False,
        taps: str | list[str] | tuple[str, ...] = (),
    ) -> None:
        super().__init__(modules, taps)
        self._conditions = list(_read_conditions(conditions))
        if not self._conditions:
            raise ConfigError(f"{show_value(conditions)} contains no condition. Give at least one.")
        self._by_value = any(condition.holds is not None for condition in self._conditions)
        self._functions = [c for c in self._conditions if c.function is not None]
        self._action = action
        self._gradients = gradients
        self._reset_results()

    def _reset_results(self) -> None:
        self.findings: list[Finding] = []
        self.count = 0
        """The number of findings, also of those above 100, which are only counted."""
        self._measured: list[_Measured] = []
        self._lock = threading.Lock()
        self._check_queued = False
        self._lasting: set[tuple[str, ...]] = set()  # what held in the last check

    # -- measuring --------------------------------------------------------------------------------

    def after(self, call: Call) -> None:
        """Measure the output of a module."""
        if self._gradients:
            self._expect_gradients(call)
        self._measure(_finding(call, "output"), call.output)
        attachment = self.attachment
        if self._is_outside and attachment is not None and attachment.forward_number is None:
            self.check()  # no end of a forward will come

    @property
    def _is_outside(self) -> bool:
        """Whether this is outside of training, where no step has an end."""
        return self.attachment is None or self.attachment.context is None

    def _measure(self, finding: Finding, value: Any) -> None:
        measured = _Measured(finding)
        for tensor in tensors_in(value):
            if self._by_value:
                pair = extremes(tensor)
                measured.values += [] if pair is None else [(None, *pair)]
            if self._functions and tensor.is_nested:
                tensor = nested_values(tensor.detach())
            for condition in self._functions:
                subject = f"the {finding.of} of '{finding.module}'"
                measured.values.append((condition, condition.ask(tensor, subject)))
        with self._lock:
            if measured.values:
                self._measured.append(measured)
        if len(self._measured) >= _MAX_UNREAD:
            self.check()

    def _expect_gradients(self, call: Call) -> None:
        if not self.can_see_gradients(call):
            return
        for tensor in tensors_in(call.output):
            finding = _finding(call, "gradient")
            on_gradient(tensor, partial(self.call_guarded, self._measure_gradient, finding))

    def _measure_gradient(self, finding: Finding, gradient: torch.Tensor) -> None:
        self._measure(finding, gradient)
        if self._is_outside and not self._check_queued:
            self._check_queued = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self.check)

    # -- checking ---------------------------------------------------------------------------------

    def forward_end(self) -> None:
        """Check at the end of a forward, except in training, where the step has an end."""
        if self._is_outside or not torch.is_grad_enabled():
            self.check()

    def on_step_end(self, trainer: Any) -> None:
        """Check at the end of a step."""
        self.check(trainer)

    def on_train_end(self) -> None:
        """Drop what was not checked."""
        with self._lock:
            self._measured = []
        if self.count > len(self.findings):
            log.warning(
                "The probe '%s' has %d findings, of which it keeps the first %d.",
                self.probe_name,
                self.count,
                len(self.findings),
            )

    def check(self, trainer: Any = None) -> list[Finding]:
        """Check what was measured since the last check, and take the action.

        This waits for the device, once.

        Returns:
            The new findings.
        """
        self._check_queued = False
        with self._lock:
            measured, self._measured = self._measured, []
        held = self._first(measured)
        new = held[: _MAX_FINDINGS - len(self.findings)]
        self.count += len(held)
        context = None if self.attachment is None else self.attachment.context
        trainer = trainer if trainer is not None else getattr(context, "trainer", None)
        self.findings += new
        for finding in new:
            if finding.lasting_key not in self._lasting:
                self._tell(finding, trainer)
        if measured:
            self._lasting = {finding.lasting_key for finding in held}
        if new and self._action in ("stop", "break"):
            self._act(new[0], trainer)
        return new

    def _tell(self, finding: Finding, trainer: Any) -> None:
        level = logging.INFO if self._action == "record" else logging.WARNING
        log.log(level, "The probe '%s' found %s.", self.probe_name, finding)
        run = getattr(trainer, "run", None)
        if run is not None and hasattr(run, "event"):
            run.event(
                "debug_finding",
                step=None if finding.step is None else finding.step + 1,
                probe=self.probe_name,
                module=finding.module,
                call=finding.call,
                condition=finding.condition,
                where=finding.of,
                message=str(finding),
            )

    def _first(self, measured: list[_Measured]) -> list[Finding]:
        """Return, for each condition, the first call in which it holds."""
        unread = (value for call in measured for _, *several in call.values for value in several)
        read = iter(read_tensors(unread))
        first: dict[tuple[str, str], Finding] = {}
        for call in measured:
            values = [(asked, *(next(read) for _ in several)) for asked, *several in call.values]
            for condition in self._conditions:
                found = _find(condition, call.finding, values)
                if found is not None:
                    earlier = first.setdefault((condition.name, found.of), found)
                    if found.module not in (earlier.module, *earlier.others):
                        earlier.others.append(found.module)
        return list(first.values())

    def _act(self, finding: Finding, trainer: Any) -> None:
        streams = (sys.stdin, sys.stdout)
        in_terminal = all(stream is not None and stream.isatty() for stream in streams)
        if self._action == "break" and in_terminal:
            print(f"{finding}\nVariables: self, finding. `c` continues, `q` quits.", flush=True)
            breakpoint()
            return
        if trainer is None:
            raise _FindingError(f"The probe '{self.probe_name}' found {finding}.")
        trainer.stop(f"{self.probe_name}: {finding}")


Debug = DebugProbe


def _finding(call: Call, of: Literal["output", "gradient"]) -> Finding:
    """Return a finding with the place of a call and without a condition."""
    return Finding(call.name, "", of, call.step, call.epoch, call.index)


def _find(condition: Condition, found: Finding, values: list[Any]) -> Finding | None:
    """Return the finding of a condition if it holds for what was measured of a call."""
    for asked, *value in values:
        if asked is None and condition.holds is not None and condition.holds(*value):
            low, high = value
            return replace(found, condition=condition.name, low=low, high=high, others=[])
        if asked is condition and value[0]:
            return replace(found, condition=condition.name, others=[])
    return None


# -- conditions ------------------------------------------------------------------------------------


def _read_conditions(wanted: Conditions) -> Iterator[Condition]:
    """Yield the conditions that a user gave; None stands for `"nonfinite"`."""
    if isinstance(wanted, list | tuple):
        for condition in wanted:
            yield from _read_conditions(condition)
    elif wanted is None or wanted == "nonfinite":
        yield Condition("nonfinite", _is_nonfinite)
    elif wanted == "dead":
        yield Condition("dead", _is_dead)
    elif callable(wanted):
        name = read_attribute(wanted, "__qualname__") or type(wanted).__qualname__
        yield Condition(name.rpartition(".<locals>.")[2], function=wanted)
    elif isinstance(wanted, Mapping) and list(wanted) == ["magnitude"]:
        check_number("magnitude", value := wanted["magnitude"], 0, is_included=False)
        yield Condition(f"magnitude above {value:g}", partial(_is_above, value))
    else:
        hint = nearest(wanted, ("nonfinite", "dead")) if isinstance(wanted, str) else ""
        raise ConfigError(
            f"{show_value(wanted)} is not a condition.{hint} Give 'nonfinite', 'dead', "
            "{'magnitude': 1e4}, a function of a tensor, or a list of these."
        )


def _is_above(value: float, low: float, high: float) -> bool:
    return low < -value or high > value


def _is_dead(low: float, high: float) -> bool:
    return low == high == 0


def _is_nonfinite(low: float, high: float) -> bool:
    return not (math.isfinite(low) and math.isfinite(high))
