"""The result of a verification."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from hookline.printable import printable
from hookline.text_tables import format_table

__all__ = ["Check", "Culprit", "Report"]

_HEADERS = ("check", "result", "compared")


@dataclass(frozen=True)
class Culprit:
    """What makes two runs differ.

    Attributes:
        kind: "hook", "loader", "module", "parameter", or "unknown".
        name: Its name in the trainer; "" if it has none.
        reason: How it was found.
    """

    kind: Literal["hook", "loader", "module", "parameter", "unknown"]
    name: str
    reason: str

    def __str__(self) -> str:
        name, reason = printable(self.name), printable(self.reason, 1000)
        return f"{self.kind} '{name}': {reason}" if name else reason


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
    ok: bool = field(init=False)
    """Whether every check has passed. A check that was skipped has not."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ok", all(check.result == "ok" for check in self.checks))

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON types."""
        return asdict(self)

    def __str__(self) -> str:
        rows = [(check.name, check.result, check.compared) for check in self.checks]
        lines = [format_table(_HEADERS, rows)]
        for check in self.checks:
            if check.difference:
                lines += ["", f"{check.name}: {printable(check.difference, 1000)}."]
                lines += [f"  {culprit}" for culprit in check.culprits]
        if self.notes:
            lines += ["", *(f"note: {printable(note, 1000)}" for note in self.notes)]
        return "\n".join(lines)
