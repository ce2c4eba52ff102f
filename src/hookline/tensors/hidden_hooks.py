"""Hooks on modules that are left out of copies and pickles of these modules.

`torch.save(model)` and `copy.deepcopy(model)` copy a module's hooks with it. Those of Hookline
belong to a loop, and the class of a pickled hook would have to be importable where the file is
loaded.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

_CALLABLES = ("_forward_hooks", "_forward_pre_hooks")
_FLAGS = (
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)


def hide_hooks(module: torch.nn.Module) -> None:
    """Leave hooks with a true attribute `is_hidden` out of copies and pickles of a module."""
    if "__getstate__" not in vars(module):
        vars(module)["__getstate__"] = _GetState(module)


def unhide_hooks(module: torch.nn.Module) -> None:
    """Undo `hide_hooks`, if the module has no such hook any more."""
    if isinstance(vars(module).get("__getstate__"), _GetState) and not _hidden_ids(vars(module)):
        del vars(module)["__getstate__"]


class _GetState:
    """The method `__getstate__` of a module; pickle and copy look it up on the instance."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self) -> Any:
        module = self._module()
        assert module is not None
        state: Any = type(module).__getstate__(module)
        if not isinstance(state, dict):  # the class has a method of its own
            return state
        state = {name: value for name, value in state.items() if value is not self}
        hidden = _hidden_ids(state)
        for name in (*_CALLABLES, *_FLAGS):
            if hidden & state.get(name, {}).keys():
                kept = [(key, hook) for key, hook in state[name].items() if key not in hidden]
                state[name] = type(state[name])(kept)
        return state


def _hidden_ids(state: dict[str, Any]) -> set[int]:
    return {
        key
        for name in _CALLABLES
        for key, hook in state.get(name, {}).items()
        if getattr(hook, "is_hidden", False)
    }
