"""An index into a tensor, also as text: `":, -1"` in a configuration is `x[:, -1]`."""

from __future__ import annotations

from typing import Any

import torch

from hookline.errors import ConfigError

__all__ = ["as_index"]


def as_index(at: Any) -> Any:
    """Return what stands between the brackets of `x[…]`; text is read, the rest checked.

    Raises:
        ConfigError: It is no index.
    """
    if isinstance(at, str):
        parts = [_read(part.strip(), at) for part in at.strip("[] ").split(",")]
        return tuple(parts)
    for one in at if isinstance(at, tuple) else (at,):
        if not (
            isinstance(one, int | slice | list | torch.Tensor) or one is Ellipsis or one is None
        ):
            raise ConfigError(
                f"at={at!r} is no index: give a number, a slice, a list of numbers, a mask, a "
                "tuple of these, or text such as ':, -1'."
            )
    return at


def _read(part: str, whole: str) -> Any:
    if part == "...":
        return Ellipsis
    try:
        numbers = [int(number) if number.strip() else None for number in part.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) == 1 and numbers[0] is not None:
        return numbers[0]
    if 2 <= len(numbers) <= 3:
        return slice(*numbers)
    raise ConfigError(f"at={whole!r} is no index: {part!r} is no number and no slice.")
