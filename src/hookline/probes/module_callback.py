"""The callables that PyTorch's forward hooks hold for an attachment, in eager and compiled models.

Dynamo traces them: in a compiled graph each becomes the operator of `compiled.py`, which looks up
its receiver by a number. A copy or a pickle of a model gets a function that does nothing instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from hookline.probes import compiled

if TYPE_CHECKING:
    from hookline.probes.attachment import Site

__all__ = [
    "ForwardCallback",
    "ModuleCallback",
    "arrange_sites",
    "register_receiver",
    "unregister_receiver",
]

_RECEIVERS: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""The objects that operators in compiled graphs notify, by the number that the operator has."""


def register_receiver(receiver: Any) -> torch.Tensor:
    """Have `receiver.after_compiled` called by the operator; return the number to give it."""
    _RECEIVERS[id(receiver)] = receiver
    return torch.tensor(id(receiver), dtype=torch.int64, device="cpu")


def unregister_receiver(receiver: Any) -> None:
    """Have the operators that were compiled for a receiver do nothing."""
    _RECEIVERS.pop(id(receiver), None)


def _notify_receiver(number: int, tensors: list[torch.Tensor], gradients: int) -> None:
    receiver = _RECEIVERS.get(number)
    if receiver is not None:
        receiver.after_compiled(tensors, gradients)


compiled.listeners.append(_notify_receiver)


def _do_nothing(*_: Any) -> None:
    """Take a callback's place in a copy of the model."""


def _get_do_nothing() -> Any:
    return _do_nothing


class _NotCopied:
    """A callback that copies and pickles of a model do not have; a copy of it does nothing."""

    is_hidden = True

    def __deepcopy__(self, memo: Any) -> Any:
        return _do_nothing

    def __reduce__(self) -> Any:
        return _get_do_nothing, ()


class ModuleCallback(_NotCopied):
    """The forward pre-hook or forward hook of one module."""

    def __init__(self, site: Site, *, before: bool) -> None:
        probe = site.attachment.probe
        self.site = site
        self._before = before
        self._number = register_receiver(self if before else site)
        self._wants_input = probe.wants_input
        self._wants_before = probe.wants_before
        self._edits_input = probe.edits_input
        self._edit = probe.compiled_edit(site.name)
        self._is_active = site.attachment.flag

    def __call__(self, module: torch.nn.Module, args: Any, *more: Any) -> Any:
        """Pass a call on to the site, or be traced."""
        if len(more) < (1 if self._before else 2):
            # Another thread is registering or removing this hook: PyTorch keeps in a second place
            # that it takes keyword arguments, and sets that a little later.
            return None
        kwargs, output = more[0], more[-1]
        if is_compiling():
            return self._trace_before(args, kwargs) if self._before else self._trace_after(output)
        site = self.site
        if not site.enabled:  # hooks that were compiled stay registered
            return None
        if self._before:
            return site.before(args, kwargs) if self._wants_before else None
        return site.after(args, kwargs, output)

    def _trace_before(self, args: Any, kwargs: Any) -> Any:
        if self._wants_input:
            compiled.observe(compiled.find_tensors((args, kwargs)), self._number)
        elif self._edit is not None and self._wants_before:
            compiled.observe([], self._number)
        return self._trace_edit((args, kwargs)) if self._edits_input else None

    def _trace_after(self, output: Any) -> Any:
        if self._edit is None:
            compiled.observe(compiled.find_tensors(output), self._number)
            return None
        compiled.observe([], self._number)
        return None if self._edits_input else self._trace_edit(output)

    def _trace_edit(self, value: Any) -> Any:
        if self._edit is None:
            return None
        tensors = compiled.find_tensors(value)
        # Without a tensor in the value the edit raises its own error.
        flag = self._is_active.to(tensors[0].device) if tensors else self._is_active
        return self._edit(value, flag)

    def after_compiled(self, tensors: list[torch.Tensor], gradients: int) -> None:
        """Handle the operator before a module having run."""
        self.site.before_compiled(tensors)


class ForwardCallback(_NotCopied):
    """The hook at the start or the end of the model's outermost call.

    `call` is called with whether gradients are enabled; None in eager models, where one can look.
    """

    def __init__(self, call: Callable[[bool | None], None], *, is_end: bool) -> None:
        self._call = call
        self.is_end = is_end
        self._number = register_receiver(self)
        self.compiled = False
        self.handle: RemovableHandle | None = None

    def __call__(self, module: torch.nn.Module, args: Any, output: Any = None) -> None:
        """Pass a call of the model on, or be traced."""
        if is_compiling():
            # Gradients are off when the operator runs: autograd sees the graph as one function.
            compiled.observe([], self._number, int(torch.is_grad_enabled()))
        else:
            self._call(None)

    def after_compiled(self, tensors: list[torch.Tensor], gradients: int) -> None:
        """Handle the operator having run, in a graph compiled with or without gradients."""
        self.compiled = True
        self._call(bool(gradients))

    def detach(self) -> None:
        """Remove the hook."""
        if self.handle is not None:
            self.handle.remove()
        unregister_receiver(self)


def arrange_sites(sites: Sequence[Site]) -> None:
    """Have the sites of one module called in this order, in the places that they have together.

    A site that is attached again gets its old place among the other hooks of its module.
    """
    places = sorted(site.place for site in sites)
    for site, place in zip(sites, places, strict=True):
        site.place = place
    module = sites[0].module
    assert module is not None
    ordered_dicts: Any = (module._forward_pre_hooks, module._forward_hooks)
    for hooks in ordered_dicts:
        ours = [key for key, hook in hooks.items() if isinstance(hook, ModuleCallback)]
        order = [key for key in hooks if key not in ours]
        for key in sorted(ours, key=lambda key: _place(hooks, key)):
            index = len(order)
            while index and _place(hooks, order[index - 1]) > _place(hooks, key):
                index -= 1
            order.insert(index, key)
        order.sort(key=lambda key: isinstance(hooks[key], ForwardCallback) and hooks[key].is_end)
        if order != list(hooks):
            for key in order:
                hooks.move_to_end(key)


def _place(hooks: Mapping[int, Any], key: int) -> float:
    """Return when a hook was registered first; PyTorch counts the keys of hooks up."""
    hook = hooks[key]
    if isinstance(hook, ForwardCallback):
        return math.inf if hook.is_end else -1
    return hook.site.place if isinstance(hook, ModuleCallback) else key
