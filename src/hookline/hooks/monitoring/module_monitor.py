"""The base of hooks that measure what some modules compute in the first call of a step."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from hookline.errors import listed
from hookline.hook import HookGroup
from hookline.options import BuiltIn
from hookline.probes.call import Call
from hookline.probes.probe import Probe
from hookline.tensors.reading import read_tensors

__all__ = ["ModuleMonitor"]

log = logging.getLogger("hookline")


class ModuleMonitor(BuiltIn, Probe):
    """Measures a module's first call in a step, and logs the values when the step ends.

    A subclass measures in `before` or `after` the calls that are due (`is_due`), without waiting
    for the device, and stores the values in `_measured`, or the module's name in `_unseen`.
    """

    hookline_group = HookGroup.MONITOR
    hookline_records = True
    wants_input = False
    prefix: ClassVar[str] = ""
    log_frequency: int = 1
    _results: ClassVar[tuple[str, ...]] = ("_measured", "_step", "_unseen", "_warned")

    def _reset_results(self) -> None:
        self._measured: dict[str, Mapping[str, Tensor]] = {}
        self._step: int | None = None
        self._unseen: dict[str, None] = {}
        self._warned = False

    def is_due(self, call: Call) -> bool:
        """Return whether a call is measured; forget those of an earlier step."""
        if call.step is not None and (call.step + 1) % self.log_frequency:
            return False
        if call.step != self._step:
            self._measured, self._step = {}, call.step
        return call.name not in self._measured

    def on_train_start(self) -> None:
        """Forget what was measured before."""
        self._reset_results()

    def on_step_end(self, trainer: Any, step: int) -> None:
        """Read all measurements at once, and log them."""
        if self._unseen and not self._warned:
            self._warned = True
            log.warning("%s", self._describe_unseen(listed(self._unseen)))
        if self._step not in (step - 1, step):  # a skipped step does not count
            self._measured = {}
        for module, values in self.report().items():
            prefix = f"{self.prefix}/{module}" if module else self.prefix
            for measure, value in values.items():
                trainer.log(f"{prefix}/{measure}", value)

    def report(self) -> dict[str, dict[str, float]]:
        """Return what was measured since the last report, by module and measure."""
        if not self._measured:
            return {}
        measured, self._measured = self._measured, {}
        values = iter(read_tensors(v for several in measured.values() for v in several.values()))
        return {
            module: self._summarize({name: next(values) for name in several})
            for module, several in measured.items()
        }

    def _summarize(self, values: dict[str, Any]) -> dict[str, float]:
        """Return the numbers to log of a module, from what was measured of it."""
        return values

    def _describe_unseen(self, modules: str) -> str:
        """Return the warning about modules that could not be measured."""
        raise NotImplementedError
