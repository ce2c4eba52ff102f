"""What counts as a loader: one, several in a list, or several by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from hookline.arguments import show_value
from hookline.errors import ArgumentError

__all__ = ["length_of", "name_loaders"]


def name_loaders(loaders: Any, what: str) -> dict[str, Any]:
    """Return the loaders by name."""
    if isinstance(loaders, Mapping):
        named = dict(loaders)
    elif isinstance(loaders, list | tuple) and _holds_loaders(loaders, what):
        alone = len(loaders) == 1
        named = {what if alone else str(idx): loader for idx, loader in enumerate(loaders)}
    else:
        named = {what: loaders}
    if not named:
        raise ArgumentError(
            f"There are no {what} loaders: the mapping is empty; expected at least 1."
        )
    for name, loader in named.items():
        if not isinstance(name, str) or not name:
            raise ArgumentError(
                f"A {what} loader has the name {show_value(name)}; expected a string that is not "
                "empty."
            )
        if not _may_be_loader(loader):
            raise ArgumentError(
                f"The {what} loader '{name}' is of type {type(loader).__name__}; expected an "
                "object whose `__iter__` gives batches, such as a DataLoader or a list of batches. "
                "A dataset goes into a DataLoader, a single batch into a list: [batch]."
            )
    return named


def _holds_loaders(several: Sequence[Any], what: str) -> bool:
    """Return whether a list holds loaders, and not batches."""
    kinds = [_kind(item) for item in several]
    if several and kinds.count("loader") == len(several):
        return True
    if kinds.count("batch") == len(several):
        return False
    odd = next(i for i, kind in enumerate(kinds) if kind == "unclear" or kind != kinds[0])
    raise ArgumentError(
        f"The {what} {type(several).__name__} may be a list of loaders or a list of batches: "
        f"element {odd}, of type {type(several[odd]).__name__}, could be either. Say which "
        f'with a mapping: {{"{what}": batches}} for one loader, {{"a": first, "b": second}} for '
        "several."
    )


def _kind(item: Any) -> Literal["loader", "batch", "unclear"]:
    """Return what an element of a list is."""
    if not _may_be_loader(item):
        return "batch"
    if not isinstance(item, list | tuple):
        return "loader"
    if any(_is_array(part) for part in item):
        return "batch"
    of_batches = all(_holds_arrays(part) for part in item)
    # A tuple of tuples of tensors is as likely a batch as it is a loader.
    return "loader" if of_batches and isinstance(item, list) else "unclear"


def _may_be_loader(value: Any) -> bool:
    # Without `__iter__`, Python would iterate over a dataset by its indices, sample by sample.
    return isinstance(value, Iterable) and not (
        isinstance(value, Mapping | str | bytes) or _is_array(value)
    )


def _is_array(value: Any) -> bool:
    """Return whether this is a tensor or an array of any library."""
    return hasattr(type(value), "__array__")


def _holds_arrays(batch: Any) -> bool:
    items = batch.values() if isinstance(batch, Mapping) else batch
    return isinstance(batch, Mapping | list | tuple) and any(_is_array(item) for item in items)


def length_of(loader: Any) -> int | None:
    """Return the number of batches, None if it is not known."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # a DataLoader over a stream has a len() that raises
        return None
