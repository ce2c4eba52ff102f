"""Watches a model's outermost calls through PyTorch's own hooks.

They are registered and removed as hooks need them. Nothing is wrapped or replaced.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback as active_dynamo
from torch.utils.hooks import RemovableHandle

from hookline.errors import TrainingError
from hookline.tensors.hidden_hooks import hide_hooks, unhide_hooks
from hookline.tensors.name_patterns import is_fsdp_module


class ModelGroup(torch.nn.ModuleList):
    """Several models that one loop trains, such as a generator and a discriminator.

    With names, the names of their parameters begin with these: `generator.main.3.weight`.
    """

    def __init__(self, models: Iterable[torch.nn.Module], names: Iterable[str] = ()) -> None:
        named = dict(zip(names, models, strict=True)) if names else None
        super().__init__(models if named is None else ())
        for name, model in (named or {}).items():
            self.add_module(name, model)

    def __getitem__(self, key: Any) -> Any:
        """Return a model by its number or its name."""
        return self._modules[key] if isinstance(key, str) else list(self)[key]


def models_in(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the models of a group, or the one model."""
    return list(model) if isinstance(model, ModelGroup) else [model]


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside DDP and `torch.compile`, whose weights have the model's own names."""
    if isinstance(model, ModelGroup):
        inner_models = [unwrapped(each) for each in model]
        are_own = all(a is b for a, b in zip(inner_models, model, strict=True))
        return model if are_own else ModelGroup(inner_models, list(model._modules))
    inner = getattr(model, "_orig_mod", model)
    if isinstance(inner, torch.nn.parallel.DistributedDataParallel):
        inner = inner.module
    return model if inner is model else unwrapped(inner)


def is_compiled_in_place(model: torch.nn.Module) -> bool:
    """Return whether `model.compile()` was called."""
    return getattr(model, "_compiled_call_impl", None) is not None


@dataclass(frozen=True)
class ForwardTargets:
    """The modules that a loop calls, where these are not the model itself.

    Attributes:
        submodules: those that the loop may call without calling the model.
        wrapper: what contains the model, and passes each of its own calls on to the model as a call
            that is not a forward of the model: a whole training step of the loop.
    """

    submodules: tuple[torch.nn.Module, ...] = ()
    wrapper: torch.nn.Module | None = None


def check_supported(model: torch.nn.Module) -> None:
    """Raise for an engine of DeepSpeed: it runs backward, clipping and steps by itself.

    Raises:
        TrainingError: the model is such an engine.
    """
    if any(kind.__name__ == "DeepSpeedEngine" for kind in type(model).__mro__):
        raise TrainingError(
            "The model is a DeepSpeedEngine, which is not supported: its backward and step hide "
            "the gradients and the optimizer steps that hooks are called for. Give the model "
            "itself, and train it with DDP or FSDP2 (strategy='ddp' or 'fsdp')."
        )


def keep_out_of_graphs(function: Any) -> None:
    """Let dynamo not trace a function; it may trace what that calls, if it is active then."""
    if not hasattr(function, "_torchdynamo_disable"):
        # Not when this file is imported: importing dynamo takes long. Making an optimizer has
        # imported it.
        from torch._dynamo.decorators import skip

        skip(function)


class ModelCallback:
    """A callable for PyTorch's hooks, kept out of compiled graphs.

    Copies and pickles of the model do not have it.
    """

    is_hidden = True

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        keep_out_of_graphs(ModelCallback.__call__)

    def __call__(self, *args: Any) -> Any:
        """Call the callback, outside of compiled graphs."""
        # `torch.compiler.disable` in each call would take half a microsecond.
        if active_dynamo() is None:
            return self._call(*args)
        return torch.compiler.disable(self._call)(*args)

    def __deepcopy__(self, memo: Any) -> ModelCallback:
        return ModelCallback(_nothing)

    def __reduce__(self) -> Any:
        return ModelCallback, (_nothing,)


def _nothing(*args: Any) -> None:
    """Do nothing."""


class ForwardListener(Protocol):
    """Called around a model's outermost calls."""

    def before_forward(self) -> None:
        """Handle a call that begins."""
        ...

    def after_forward(self, outputs: Any) -> None:
        """Handle a call that has returned."""
        ...


class ModelWatch:
    """Calls back when a model's outermost call begins and returns.

    Calls under `no_grad`, and the recomputation of activation checkpointing, are ignored.

    Attributes:
        calls_seen: how many calls there were.
        is_paused: whether calls of the model are not those of the loop.
        listener: what is called.
        leaves_compiled: whether the driver sees the calls of models that were compiled in place
            (`before_call`), where hooks would be compiled.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        listener: ForwardListener,
        called: ForwardTargets | None = None,
    ) -> None:
        self.model = model
        self._called = called or ForwardTargets()
        self._is_passed_on = False  # the next call of the model comes from its wrapper
        self.calls_seen = 0
        self.is_paused = self.leaves_compiled = False
        self.listener = listener
        self._handles: list[RemovableHandle] = []
        self._sees = (False, False)
        self._depth = 0
        self._raised: BaseException | None = None

    def watch(self, *, calls: bool, returns: bool = False) -> None:
        """Watch the model's calls; or only count those that have returned."""
        if (calls, returns) == self._sees:
            return
        self.detach()
        self._sees = (calls, returns)
        self._depth = 0
        for model in self._models() if calls or returns else ():
            if self.leaves_compiled and is_compiled_in_place(model):
                continue
            if calls:
                before = ModelCallback(self._before)
                # FSDP2 replaces parameters by whole ones before forward: events come before that.
                first = is_fsdp_module(model)
                self._handles.append(model.register_forward_pre_hook(before, prepend=first))
                # always_call: a forward that raises must not leave the depth wrong
                after = model.register_forward_hook(ModelCallback(self._after), always_call=True)
                self._handles.append(after)
            else:
                self._handles.append(model.register_forward_hook(ModelCallback(self._returned)))
            hide_hooks(model)
        if calls and (wrapper := self._called.wrapper) is not None:
            self._handles.append(wrapper.register_forward_pre_hook(ModelCallback(self._pass_on)))
            hide_hooks(wrapper)

    def _models(self) -> list[torch.nn.Module]:
        return [*models_in(self.model), *self._called.submodules]

    def detach(self) -> None:
        """Remove all hooks from the model."""
        for handle in self._handles:
            handle.remove()
        for model in (*self._models(), self._called.wrapper):
            if model is not None:
                unhide_hooks(model)
        self._is_passed_on = False
        self._sees = (False, False)
        self._handles = []

    def before_call(self, model: torch.nn.Module, args: Any) -> None:
        """Handle a call of a model that was compiled in place, whose driver sees its calls."""
        if self._sees[0]:
            self._before(model, args)

    def after_call(self, model: torch.nn.Module, args: Any, outputs: Any) -> None:
        """Handle that such a call has returned, or raised."""
        if self._sees[0]:
            self._after(model, args, outputs)
        elif self._sees[1]:
            self._returned(model, args, outputs)

    def _pass_on(self, wrapper: torch.nn.Module, args: Any) -> None:
        self._is_passed_on = True

    def _before(self, module: torch.nn.Module, args: Any) -> None:
        if self._is_passed_on and module is self.model:
            self._is_passed_on = False
            return
        if self.is_paused or not torch.is_grad_enabled() or _task_id() != -1:
            return
        self._depth += 1
        if self._depth == 1:
            self._raised = sys.exc_info()[1]  # a loop may call the model while handling an error
            self.calls_seen += 1
            self.listener.before_forward()

    def _after(self, module: torch.nn.Module, args: Any, outputs: Any) -> None:
        if self._depth == 0 or _task_id() != -1:
            return
        self._depth -= 1
        if self._depth == 0 and sys.exc_info()[1] is self._raised:
            self._raised = None
            self.listener.after_forward(outputs)

    def _returned(self, module: torch.nn.Module, args: Any, outputs: Any) -> None:
        """Count a call; calls of the model within itself do not matter here."""
        if torch.is_grad_enabled() and _task_id() == -1:
            self.calls_seen += 1


_task_id = torch._C._current_graph_task_id
