"""Patterns for checkpoint names, such as `epoch_{epoch}_{val/loss:.2f}`."""

from __future__ import annotations

import re
from collections.abc import Callable
from string import Formatter

from hookline.arguments import show_value
from hookline.errors import ConfigError

__all__ = ["Filename"]

_COUNTERS = ("epoch", "step")


class Filename:
    """A pattern for checkpoint names, validated when it is created.

    Args:
        pattern: Text with fields in braces: `epoch`, `step` and names of metrics, which may contain
            slashes, each with an optional format after a colon.
        insert_names: Write `{epoch}` as `epoch=3` instead of `3`.

    Attributes:
        metrics: The names of the metrics in the pattern.
    """

    def __init__(self, pattern: str, *, insert_names: bool) -> None:
        self._insert_names = insert_names
        try:
            parts = list(Formatter().parse(pattern))
        except ValueError as error:
            raise ConfigError(f"filename is {show_value(pattern)}: {error}.") from None
        if not pattern.strip():
            raise ConfigError("filename is empty. Use a pattern such as '{epoch}-{step}'.")
        self._parts = [(text, name, spec or "") for text, name, spec, _ in parts]
        self.metrics = [name for _, name, _ in self._parts if name and name not in _COUNTERS]
        for _, name, spec, conversion in parts:
            if name is not None:
                _check_field(pattern, name, spec or "", conversion)

    def render(self, epoch: int, step: int, value_of: Callable[[str], float]) -> str:
        """Return the name; `value_of` returns the value of a metric."""
        counters = {"epoch": epoch, "step": step}
        name = ""
        for text, field, spec in self._parts:
            name += text
            if field is not None:
                value = counters[field] if field in counters else value_of(field)
                name += f"{field}=" if self._insert_names else ""
                name += format(value, spec)
        return _folder_name(name)


def _check_field(pattern: str, name: str, spec: str, conversion: str | None) -> None:
    if not name or conversion:
        raise ConfigError(
            f"filename is {show_value(pattern)}: a field is 'epoch', 'step' or the name of a "
            "metric, with "
            "an optional format after a colon, as in {val/loss:.2f}."
        )
    try:
        format(1 if name in _COUNTERS else 1.0, spec)
    except ValueError as error:
        raise ConfigError(
            f"filename is {show_value(pattern)}: invalid format for '{name}': {error}."
        ) from None


def _folder_name(text: str) -> str:
    """Return a text as a valid folder name that is not hidden, and not `last` or `best`."""
    name = re.sub(r'[/\\:*?"<>|\x00-\x1f]', "_", text)
    return f"_{name}" if name.startswith(".") or name in ("last", "best") else name
