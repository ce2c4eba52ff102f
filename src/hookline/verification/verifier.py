"""`hookline.verify`: compares short training runs with each other, bit for bit.

Two runs with the same seed. A run, and runs that are interrupted and resumed: within an epoch, at
its end, and within the second one. A run with all hooks, and one without those that only observe.
If two runs differ, further runs find out what makes the difference.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from hookline.arguments import check_function, check_instance, show_value
from hookline.errors import ArgumentError, ConfigError, TrainingError, listed
from hookline.text_tables import format_table
from hookline.verification.recording import (
    Difference,
    Recording,
    compare,
    find_hook_differences,
)
from hookline.verification.training_runs import TrainingRuns, Watch

_SHORT_EPOCH = 40  # an epoch of up to so many steps is run to its end by default
_DEFAULT_STEPS = 20
_SEED, _RESUME, _HOOKS = "the same seed twice", "resumed after step", "observing hooks on and off"

_NOT_AGAIN = "The difference did not occur again when it was looked for."

Pair = Callable[[Sequence[str], bool], tuple[Recording, Recording]]


# -- the result -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Culprit:
    """A cause for which two runs differ.

    Attributes:
        kind: "hook", "loader", "module", "parameter", or "unknown".
        name: Its name in the trainer; "" if it has none.
        reason: How it was found.
    """

    kind: Literal["hook", "loader", "module", "parameter", "unknown"]
    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.kind} '{self.name}': {self.reason}" if self.name else self.reason


@dataclass(frozen=True)
class Check:
    """One comparison of two runs.

    Attributes:
        name: What was checked.
        result: "ok", "failed", or "skipped".
        compared: What was compared, or why nothing was.
        difference: The first difference; "" if there is none.
        culprits: What makes the difference.
    """

    name: str
    result: Literal["ok", "failed", "skipped"]
    compared: str
    difference: str = ""
    culprits: tuple[Culprit, ...] = ()


@dataclass(frozen=True)
class Report:
    """The result of `hookline.verify`: each check, and notes about what was not checked."""

    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every check has passed. A check that was skipped has not."""
        return all(check.result == "ok" for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON types."""
        return {**asdict(self), "ok": self.ok}

    def __str__(self) -> str:
        rows = [(check.name, check.result, check.compared) for check in self.checks]
        lines = [format_table(("check", "result", "compared"), rows)]
        for check in self.checks:
            if check.difference:
                lines += ["", f"{check.name}: {check.difference}."]
                lines += [f"  {culprit}" for culprit in check.culprits]
        if self.notes:
            lines += ["", *(f"note: {note}" for note in self.notes)]
        return "\n".join(lines)


def verify(
    make_trainer: Callable[[], Any],
    steps: int | None = None,
    *,
    watch: Watch | None = None,
) -> Report:
    """Check that a training run is reproducible, resumes exactly, and that hooks only observe.

        report = hookline.verify(make_trainer)
        print(report)
        assert report.ok

    It trains several times for a few steps, in a temporary folder that is removed. What differs is
    reported with the hook, loader or module that makes the difference.

    Args:
        make_trainer: Creates the model, the optimizer, the data and the trainer, and returns the
            trainer with its data; or a tuple of the trainer, its loaders, and optionally its
            validation loaders. It is called for each run.
        steps: How many steps to train; by default one and a half epochs if an epoch has at most 40
            steps, else 20.
        watch: Called with what is being checked, the step, and the number of steps.
    """
    if isinstance(make_trainer, type):
        raise ArgumentError("verify(make_trainer) takes a function that returns a trainer.")
    check_function("make_trainer", make_trainer)
    if watch is not None:
        check_function("watch", watch, "what", "step", "steps")
    if steps is not None:
        check_instance("verify(…, steps=…)", steps, int, "a whole number of 2 or more")
        if steps < 2:
            raise ConfigError(
                f"steps is {show_value(steps)}; expected 2 or more, to resume in between."
            )
    with tempfile.TemporaryDirectory(prefix="hookline-verify-") as folder:
        runs = TrainingRuns(make_trainer, Path(folder), watch)
        return _Verification(runs, steps or _choose_steps(runs)).report()


def _choose_steps(runs: TrainingRuns) -> int:
    length = runs.epoch_steps
    if length is None or length > _SHORT_EPOCH:
        return _DEFAULT_STEPS
    return length + max(2, length // 2)


class _Verification:
    def __init__(self, runs: TrainingRuns, steps: int) -> None:
        self._runs, self._steps = runs, steps

    def _resume_steps(self, last: int) -> list[int]:
        """Return a step within the first epoch, its last one, and one within the second."""
        length = self._runs.epoch_steps
        end = last if length is None else min(length, last)
        middle = max(1, end // 2)
        if middle % 2 == 0 and middle + 1 < end:
            middle += 1  # between the steps of an optimizer that steps every second time
        steps = {middle}
        if length is not None and length < last:
            steps |= {length, length + (last - length) // 2}
        return sorted(steps)

    def report(self) -> Report:
        """Run all checks."""
        first = self._runs.run(_SEED, self._steps)
        if first.exception is not None:
            raise first.exception
        if first.last_step < 2:
            raise TrainingError(
                f"Training ended after step {first.last_step}; at least 2 steps are needed."
            )
        second = self._runs.run(_SEED, self._steps)
        checks = [self._check_seed(first, second)]
        unstable = find_hook_differences(first, second)  # such as measured times
        resumed = self._resume_steps(first.last_step)
        if checks[0].result == "ok":
            checks += [self._check_resume(first, step, unstable) for step in resumed]
            checks.append(self._check_hooks(first))
        else:
            why = "nothing: two runs with the same seed differ already"
            names = [*(f"{_RESUME} {step}" for step in resumed), _HOOKS]
            checks += [Check(name, "skipped", why) for name in names]
        return Report(tuple(checks), tuple(self._notes(first.last_step, unstable)))

    # -- checks -----------------------------------------------------------------------------------

    def _check_seed(self, first: Recording, second: Recording) -> Check:
        difference = compare(first, second)
        compared = _describe_steps(first, 0)
        if difference is None:
            return Check(_SEED, "ok", compared)
        last = difference.step or self._steps

        def pair(off: Sequence[str], traces: bool) -> tuple[Recording, Recording]:
            one, two = (self._runs.run(_SEED, last, removed=off, traces=traces) for _ in range(2))
            return one, two

        return Check(_SEED, "failed", compared, difference.text, self._find(difference, pair))

    def _check_resume(self, first: Recording, step: int, unstable: list[str]) -> Check:
        name = f"{_RESUME} {step}"
        if step == self._runs.epoch_steps:
            name += ", the end of an epoch"
        resumed = self._interrupt_and_resume(name, step, self._steps)
        compared = _describe_steps(resumed, step)
        difference = compare(first, resumed)
        if difference is None:
            found: dict[str, str] = {}
            for path in find_hook_differences(first, resumed):
                if path not in unstable:
                    found.setdefault(path.partition(".")[0], path)
            culprits = [
                Culprit("hook", hook, f"after resuming, '{path}' of its state differs")
                for hook, path in found.items()
            ]
            if not culprits:
                return Check(name, "ok", compared)
            return Check(name, "failed", compared, "the states of hooks differ", tuple(culprits))
        last = difference.step or self._steps

        def pair(off: Sequence[str], traces: bool) -> tuple[Recording, Recording]:
            options: dict[str, Any] = {"removed": off, "traces": traces}
            whole = self._runs.run(name, last, **options)
            return whole, self._interrupt_and_resume(name, step, last, **options)

        return Check(name, "failed", compared, difference.text, self._find(difference, pair))

    def _interrupt_and_resume(self, name: str, step: int, last: int, **options: Any) -> Recording:
        """Train until a step, save, and resume with new objects; return the second run."""
        first = self._runs.run(name, last, interrupt_at=step, **options)
        if first.checkpoint is None:
            first.error = first.error or f"no checkpoint was saved after step {step}"
            return first
        return self._runs.run(name, last, resume_from=first.checkpoint, **options)

    def _check_hooks(self, first: Recording) -> Check:
        observers = self._runs.observers
        if not observers:
            return Check(_HOOKS, "ok", "nothing: there is no hook that only observes")
        compared = f"{_describe_steps(first, 0)}, hooks {listed(observers)}"
        without = self._runs.run(_HOOKS, self._steps, disabled=observers)
        difference = compare(first, without)
        if difference is None:
            return Check(_HOOKS, "ok", compared)

        def differs(name: str) -> bool:
            off = [other for other in observers if other != name]
            return compare(self._runs.run(_HOOKS, self._steps, disabled=off), without) is not None

        reason = "training differs with it, and it does not say `intervenes = True`"
        culprits = [Culprit("hook", name, reason) for name in observers if differs(name)]
        unknown = Culprit("unknown", "", "No hook alone makes this difference.")
        return Check(_HOOKS, "failed", compared, difference.text, tuple(culprits) or (unknown,))

    # -- what makes a difference ------------------------------------------------------------------

    def _find(self, difference: Difference, pair: Pair) -> tuple[Culprit, ...]:
        """Return what makes two runs differ that should do the same.

        `pair` runs both again, without some hooks, and with traces if asked for.
        """
        if difference.fact is not None and difference.fact.kind == "batch":
            loader = difference.fact.name
            reason = "its batches differ: its dataset, sampler or workers have a state of their own"
            return (Culprit("loader", loader, reason),)
        hooks = self._runs.hooks
        if hooks and not _differ(pair(hooks, False)):
            reason = "without hooks, both runs are the same; with it alone, they are not"
            found = [
                Culprit("hook", name, reason)
                for name in hooks
                if _differ(pair([other for other in hooks if other != name], False))
            ]
            if found:
                return tuple(found)
        return (_find_in_model(compare(*pair((), True))),)

    def _notes(self, last: int, unstable: list[str]) -> list[str]:
        runs = self._runs
        notes = [
            "compared bit for bit: batches, losses, weights, buffers, optimizers, schedulers and "
            "random states; after resuming, also the states of hooks"
        ]
        length = runs.epoch_steps
        if length is None:
            notes.append("the length of an epoch is not known, so its end may not be covered")
        elif last <= length:
            notes.append(
                f"{last} steps do not go beyond the end of an epoch ({length} steps), so that was "
                "not covered. More steps give a stronger result"
            )
        if runs.not_run:
            text = "not run, because they send messages or write to a place of their own: "
            notes.append(text + listed(runs.not_run))
        if unstable:
            text = "not compared, because it differs between two equal runs: states of the hooks "
            notes.append(text + listed(unstable[:5]))
        return notes


def _find_in_model(difference: Difference | None) -> Culprit:
    """Return what differs first in two runs whose modules and gradients were traced."""
    if difference is None:
        return Culprit("unknown", "", _NOT_AGAIN)
    step, fact, other, text = difference
    if fact is None or other is None or fact.name != other.name:
        return Culprit("unknown", "", text)
    if fact.kind == "module":
        kind, inputs, _ = fact.value
        if other.value[:2] == (kind, inputs):
            reason = f"{kind} returns something else for the same input in step {step}"
            return Culprit("module", fact.name or kind, reason)
        owner = fact.name.rpartition(".")[0] or "the model's forward"
        reason = f"it calls '{fact.name or kind}' with another input in step {step}"
        return Culprit("module", owner, reason)
    if fact.kind == "gradient":
        moment = fact.value[0]
        reason = f"its gradient {moment} differs in step {step}, from the same outputs"
        return Culprit("parameter", fact.name, reason)
    if fact.kind == "weight":
        reason = f"it differs after step {step} with the same gradients"
        return Culprit("parameter", fact.name, reason)
    if fact.kind == "loss":
        return Culprit("unknown", "", "All modules return the same in both runs.")
    return Culprit("unknown", "", f"The first difference is in step {step}: {fact.kind}.")


def _describe_steps(recording: Recording, start: int) -> str:
    return f"steps {start + 1} to {recording.last_step}"


def _differ(pair: tuple[Recording, Recording]) -> bool:
    return compare(*pair) is not None
