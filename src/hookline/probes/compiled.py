"""The operator that a probe becomes in a compiled graph.

It takes tensors and a token that it claims to change, or the compiler would remove it. When it runs
it calls the listeners below, which check whether the probe is enabled, so a probe can be toggled
without recompilation. It has no gradient. An edit is itself compiled, together with a tensor that
says whether it is enabled.

The receiver of what was observed is a number in a tensor. A Python integer would be a constant of
the graph, so each probe would be a reason to recompile, and Dynamo gives up after eight.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, cast

import torch
from torch.utils import _pytree

_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_NOT_OPENED = (*_ATOMS, Enum, type, torch.nn.Module, torch.optim.Optimizer)
_MAX_OBJECTS = 100  # each one that is looked into is traced

_library = torch.library.Library("hookline", "DEF")
_library.define(
    "observe(Tensor[] tensors, Tensor(a!) token, Tensor? site, int number, int gradients) -> ()"
)

listeners: list[Callable[[int, list[torch.Tensor], int], None]] = []
"""Called with the site's number, the tensors and whether gradients were enabled."""

token = torch.zeros(1, device="cpu")
"""The tensor that all operators claim to change, which also keeps them in order."""


def _observe(
    tensors: list[torch.Tensor],
    token: torch.Tensor,
    site: torch.Tensor | None,
    number: int,
    gradients: int,
) -> None:
    # A compiled graph reuses the memory of its tensors: a listener that keeps one has to copy it.
    site_number = number if site is None else int(site)  # it is in CPU memory: no synchronization
    for listener in listeners:
        listener(site_number, [tensor.detach() for tensor in tensors], gradients)


_library.impl("observe", _observe, "CompositeExplicitAutograd")
torch.library.register_fake("hookline::observe", lambda *_: None, lib=_library)


def _in_transform() -> bool:
    return torch._C._are_functorch_transforms_active()


def observe(tensors: list[torch.Tensor], site: torch.Tensor | int, gradients: int = 0) -> None:
    """Put the operator into the graph that is being traced, unless within a functional transform.

    `site` is the receiver's number, as a tensor where there may be many receivers.
    """
    if _in_transform():
        return
    if isinstance(site, torch.Tensor):
        torch.ops.hookline.observe(tensors, token, site, 0, gradients)
    else:
        torch.ops.hookline.observe(tensors, token, None, site, gradients)


def find_tensors(value: Any) -> list[torch.Tensor]:
    """Return all tensors in a value, also those in objects, in a way that can be compiled."""
    found: list[torch.Tensor] = []
    opened: list[Any] = []
    pending = _pytree.tree_leaves(value)[::-1]
    while pending:
        leaf = pending.pop()
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
            continue
        can_open = (
            not isinstance(leaf, _NOT_OPENED)
            and len(opened) < _MAX_OBJECTS
            and _can_trace_into(type(leaf))
        )
        if can_open and not any(leaf is other for other in opened):
            opened.append(leaf)
            pending += _pytree.tree_leaves(_members(leaf))[::-1]
    return found


def _can_trace_into(cls: type) -> bool:
    """Return whether Dynamo can trace into objects of a class: those written in Python."""
    if cls.__module__.partition(".")[0] in sys.stdlib_module_names:
        return False
    return is_dataclass(cls) or any("__dict__" in vars(base) for base in cls.__mro__)


# What `torch.compiler.assume_constant_result` does, without importing the compiler.
for _function in (_can_trace_into, _in_transform):
    cast("Any", _function)._dynamo_marked_constant = True


def _members(value: Any) -> list[Any]:
    items: Any = value
    if isinstance(value, dict):  # a subclass that pytree does not know
        return list(items.values())
    if isinstance(value, list | tuple):
        return list(items)
    if is_dataclass(value):  # also with slots
        return [getattr(value, field.name, None) for field in fields(value)]
    return list(value.__dict__.values())
