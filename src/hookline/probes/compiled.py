"""The operator that a probe becomes in a compiled graph.

It takes tensors and a token that it says it changes, or the compiler would drop it; and it looks at
a switch when it runs, so that a probe can be toggled without compiling again. It has no gradient.
An edit is compiled itself, with a tensor that says whether it is on.

Who is to be told is a number in a tensor: a plain one would be a part of what is compiled, and each
probe a reason to compile again, of which dynamo takes eight.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, cast

import torch
from torch.utils import _pytree

__all__ = ["numbered", "see", "tell", "tensors", "token"]

_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_WHOLE = (*_ATOMS, Enum, type, torch.nn.Module, torch.optim.Optimizer)
_MANY = 100  # objects: each is traced

_library = torch.library.Library("hookline", "DEF")
_library.define(
    "see(Tensor[] seen, Tensor(a!) token, Tensor? site, int number, int gradients) -> ()"
)

tell: list[Callable[[int, list[torch.Tensor], int], None]] = []
"""Who is told what was seen: put here where probes are attached."""

token = torch.zeros(1, device="cpu")
"""What all operators say they change, so that they keep their order."""


def _see(
    seen: list[torch.Tensor],
    token: torch.Tensor,
    site: torch.Tensor | None,
    number: int,
    gradients: int,
) -> None:
    # The memory of what flows through a compiled graph is used again: who keeps it has to copy.
    who = number if site is None else int(site)  # it is in the host's memory
    for one in tell:
        one(who, [tensor.detach() for tensor in seen], gradients)


def _pretend(*_: Any) -> None:
    """What the compiler runs to learn the shape of the result: there is none."""


_library.impl("see", _see, "CompositeExplicitAutograd")
torch.library.register_fake("hookline::see", _pretend, lib=_library)


def see(seen: list[torch.Tensor], site: torch.Tensor | int, gradients: int = 0) -> None:
    """Put the operator here.

    Args:
        seen: What is seen.
        site: Who is told: a number, by `numbered` where there may be many.
        gradients: Whether gradients are on: 1, or 0 where nobody wants to know.
    """
    if isinstance(site, torch.Tensor):
        torch.ops.hookline.see(seen, token, site, 0, gradients)
    else:
        torch.ops.hookline.see(seen, token, None, site, gradients)


def numbered(number: int) -> torch.Tensor:
    """Return a number as `see` takes it."""
    return torch.tensor(number, dtype=torch.int64, device="cpu")


def tensors(value: Any) -> list[torch.Tensor]:
    """Return all tensors in a value, those in objects too, in a way that can be compiled."""
    found: list[torch.Tensor] = []
    seen: list[Any] = []
    ahead = _pytree.tree_leaves(value)[::-1]
    while ahead:
        one = ahead.pop()
        if isinstance(one, torch.Tensor):
            found.append(one)
            continue
        look = not isinstance(one, _WHOLE) and len(seen) < _MANY and _opens(type(one))
        if look and not any(one is other for other in seen):
            seen.append(one)
            ahead += _pytree.tree_leaves(_held(one))[::-1]
    return found


def _opens(kind: type) -> bool:
    """Whether dynamo can look into objects of a class: one written in Python, by users mostly."""
    if kind.__module__.partition(".")[0] in sys.stdlib_module_names:
        return False
    return is_dataclass(kind) or any("__dict__" in vars(cls) for cls in kind.__mro__)


# What `torch.compiler.assume_constant_result` does, without importing the compiler.
cast("Any", _opens)._dynamo_marked_constant = True


def _held(value: Any) -> list[Any]:
    items: Any = value
    if isinstance(value, dict):  # of a class of its own
        return list(items.values())
    if isinstance(value, list | tuple):
        return list(items)
    if is_dataclass(value):  # also one with slots
        return [getattr(value, field.name, None) for field in fields(value)]
    return list(value.__dict__.values())
