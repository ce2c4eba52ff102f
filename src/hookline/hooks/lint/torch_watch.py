"""Sees what no event shows: loss functions, loaders, schedulers, modules, loaded states.

Functions of torch are replaced while a `Lint` is attached, and put back afterwards. Each costs a
fraction of a microsecond where nobody looks.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.optim import lr_scheduler
from torch.utils.data.dataloader import DataLoader, _BaseDataLoaderIter
from torch.utils.hooks import RemovableHandle

from hookline.loop.clip_watch import ClipCall, clip_patch
from hookline.loop.model_watch import ModelCallback
from hookline.loop.patches import SharedPatch
from hookline.tensors.hidden_hooks import hide_hooks, unhide_hooks
from hookline.tensors.nested import tensors_in

Place = tuple[nn.Module, str]
"""A module, and the name of its parameter."""

LOSSES = (
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div"),
)
_BEFORE_TRAINING = (
    "on_optimizer_made",
    "on_state_loaded",
    "on_file_loaded",
    "on_ties_emptied",
    "on_weights_loaded",
)
_KEPT = frozenset({*_BEFORE_TRAINING, "on_batch_loaded", "on_loader_start"})
_MAX_KEPT = 16  # of what happens before training
_MAX_FILE = 2 << 30  # bytes of tensors in a file
_task_id = torch._C._current_graph_task_id


@dataclass(eq=False, slots=True)  # frozen ones take twice as long to make
class LossCall:
    """A call of a loss function of `torch.nn.functional`, by the names of its arguments."""

    name: str
    input: Tensor
    target: Tensor
    options: dict[str, Any]
    result: Any
    has_gradients: bool
    """Whether gradients were enabled: otherwise this is an evaluation."""


@dataclass(eq=False, slots=True)
class LoadedBatch:
    """A batch that a `DataLoader` has delivered; `indices` are None if they are not known."""

    loader: Any
    iterator: Any
    batch: Any
    index: int
    indices: Any


@dataclass(eq=False, slots=True)
class ModuleCall:
    """A call of a module of the model that has returned."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    has_gradients: bool


class TorchWatch:
    """Sees what happens in torch while it is attached; before `start`, keeps what was seen.

    Loops iterate over a loader, make optimizers and load states before training begins.

    Attributes:
        notice: called with a point of `POINTS` and what belongs to it.
        wanted: the points that it is called for in the step in progress.
        sees_losses: whether loss functions are replaced.
        is_paused: whether it is not called, while active checks call the model.
    """

    def __init__(self) -> None:
        self.notice: Callable[..., None] = self._keep
        self.wanted: Container[str] = _KEPT
        self.sees_losses = False
        self._loaders: deque[tuple[str, tuple[Any, ...]]] = deque(maxlen=_MAX_KEPT)
        self._states: deque[tuple[str, tuple[Any, ...]]] = deque(maxlen=_MAX_KEPT)
        self._module_handles: list[tuple[nn.Module, RemovableHandle]] = []
        self._model_handles: list[tuple[nn.Module, RemovableHandle]] = []
        self.is_paused = self._has_batch = False

    def attach(self) -> None:
        """Replace the functions that are called before training; keep what they are called for."""
        torch_patch.add(self)
        clip_patch.add(self)

    def start(self, notice: Callable[..., None], *, sees_losses: bool) -> None:
        """Tell what was kept and what happens from now on, as `notice(point, *args)`.

        Args:
            notice: gets the name of a point of `POINTS`, and what belongs to it.
            sees_losses: whether loss functions are replaced. They may be part of a compiled model,
                which would then be compiled again.
        """
        torch_patch.remove(self)
        self.sees_losses = recorder.sees_losses = sees_losses
        torch_patch.add(self)
        own, recorded = self._take(), recorder._take()
        self.notice = notice
        for point, args in recorded if recorder.is_attached else own:
            self._has_batch |= point == "on_batch_loaded"
            notice(point, *args)

    @property
    def is_attached(self) -> bool:
        """Whether functions are replaced."""
        return any(watch is self for watch in torch_patch)

    def _keep(self, point: str, *args: Any) -> None:
        if point == "on_batch_loaded":
            self._loaders.append((point, (replace(args[0], batch=None),)))
        elif point == "on_loader_start":
            self._loaders.append((point, args))
        elif point in _BEFORE_TRAINING:
            self._states.append((point, args))

    def _take(self) -> list[tuple[str, tuple[Any, ...]]]:
        taken = [*self._states, *self._loaders]
        self._states.clear()
        self._loaders.clear()
        return taken

    def detach(self) -> None:
        """Put the functions back."""
        torch_patch.remove(self)
        clip_patch.remove(self)
        self.leave_modules()
        _unhook(self._model_handles)
        self._take()
        self.notice, self.wanted = self._keep, _KEPT

    def __reduce__(self) -> Any:
        return TorchWatch, ()

    def hook_modules(self, models: Iterable[nn.Module], names: dict[nn.Module, str]) -> None:
        """See the calls of whole models, and of layers with parameters, until `leave_modules`."""
        if self._module_handles:
            return
        models = set(models)
        chosen = [
            module
            for module in names
            if any(True for _ in module.parameters(recurse=False))
            or isinstance(module, nn.Linear | _ConvNd)
            or module in models
        ]
        self._module_handles += _hook(chosen, functools.partial(self._after_call, names))

    def leave_modules(self) -> None:
        """See no calls of modules any more."""
        _unhook(self._module_handles)

    def hook_models(self, models: Iterable[nn.Module]) -> None:
        """See the calls of whole models in all steps, until `detach`."""
        self._model_handles += _hook(models, self._after_model_call)

    def _after_model_call(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if "on_model_call" in self.wanted and _task_id() == -1:
            call = ModuleCall("", module, args, kwargs, output, torch.is_grad_enabled())
            self._tell("on_model_call", call)

    def _after_call(self, names: Any, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if _task_id() == -1 and module in names:  # not recomputed by activation checkpointing
            has_gradients = torch.is_grad_enabled()
            call = ModuleCall(names[module], module, args, kwargs, output, has_gradients)
            self._tell("on_module_call", call)

    def see_batch(self, loaded: LoadedBatch) -> None:
        """Tell that a batch was loaded."""
        self._has_batch = True
        self._tell("on_batch_loaded", loaded)

    def before_backward(self, loss: Tensor | None) -> None:
        """Tell that backward begins."""
        if self._has_batch:
            self._has_batch = False
            self._tell("on_batch_trained")
        self._tell("on_before_backward", loss)

    def before_clip(self, call: ClipCall) -> None:
        """Tell that gradients are about to be clipped."""
        if call.function != "get_total_norm":
            self._tell("on_before_clip", call)

    def after_clip(self, call: ClipCall) -> None:
        """Tell that gradients were clipped; a norm alone clips nothing."""
        if call.function != "get_total_norm":
            self._tell("on_clip_call", call)

    def _tell(self, point: str, *args: Any) -> None:
        if point in self.wanted and not self.is_paused:
            self.notice(point, *args)


def _hook(
    modules: Iterable[nn.Module], function: Callable[..., None]
) -> list[tuple[nn.Module, RemovableHandle]]:
    callback: Any = ModelCallback(function)
    handles: list[tuple[nn.Module, RemovableHandle]] = []
    for module in modules:
        hide_hooks(module)
        handles.append((module, module.register_forward_hook(callback, with_kwargs=True)))
    return handles


def _unhook(handles: list[tuple[nn.Module, RemovableHandle]]) -> None:
    while handles:
        module, handle = handles.pop()
        handle.remove()
        unhide_hooks(module)


def _tell(point: str, *args: Any) -> None:
    for watch in torch_patch:
        if point in watch.wanted and not watch.is_paused:
            watch.notice(point, *args)


def _replace(function: Callable[..., Any]) -> Callable[..., Any]:
    if function.__name__ == "to_empty":
        return _replace_to_empty(function)
    if function.__name__ not in _AFTER:
        return _replace_engine(function)
    after = _AFTER[function.__name__]

    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        result = function(*args, **kwargs)
        after(function.__name__, result, args, kwargs)
        return result

    return watched


def _replace_engine(engine: Callable[..., Any]) -> Callable[..., Any]:
    """Return autograd's engine, with calls before and after each backward that reaches `.grad`."""

    def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("accumulate_grad") or _task_id() != -1:
            return engine(outputs, *args, **kwargs)
        loss = outputs[0] if len(outputs) == 1 and isinstance(outputs[0], Tensor) else None
        for watch in torch_patch:
            watch.before_backward(loss)
        result = engine(outputs, *args, **kwargs)
        _tell("on_after_backward")
        return result

    return run_backward


def tied_places(model: nn.Module) -> list[tuple[Place, Place]]:
    """Return pairs of modules that share a parameter, with the names of their attributes."""
    first: dict[int, Place] = {}
    found: list[tuple[Place, Place]] = []
    for module in model.modules():
        for name, tensor in module.named_parameters(recurse=False, remove_duplicate=False):
            place = first.setdefault(id(tensor), (module, name))
            if place != (module, name):
                found.append((place, (module, name)))
    return found


def _replace_to_empty(to_empty: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Module.to_empty`, which tells of the ties that it breaks."""

    @functools.wraps(to_empty)
    def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tied = tied_places(module)
        result = to_empty(module, *args, **kwargs)
        if tied:
            _tell("on_ties_emptied", tied)
        return result

    return watched


# -- what is told after each function --------------------------------------------------------------


def _loss_called(name: str, result: Any, args: Any, kwargs: Any) -> None:
    given = dict(zip(("input", "target"), args, strict=False)) | kwargs
    source, target = given.pop("input", None), given.pop("target", None)
    if isinstance(source, Tensor) and isinstance(target, Tensor):
        has_gradients = torch.is_grad_enabled()
        _tell("on_loss_call", LossCall(name, source, target, given, result, has_gradients))


def _loader_started(name: str, result: Any, args: Any, kwargs: Any) -> None:
    vars(result)["_hookline_loader"] = args[0]
    _tell("on_loader_start", args[0], result)


def _index_drawn(name: str, result: Any, args: Any, kwargs: Any) -> None:
    iterator = args[0]
    drawn = vars(iterator).setdefault("_hookline_drawn", {})
    number = vars(iterator).get("_send_idx", vars(iterator)["_num_yielded"])
    drawn[number] = result


def _batch_loaded(name: str, result: Any, args: Any, kwargs: Any) -> None:
    iterator = args[0]
    index = vars(iterator)["_num_yielded"] - 1
    drawn = vars(iterator).get("_hookline_drawn", {})
    loader = getattr(iterator, "_hookline_loader", None)
    loaded = LoadedBatch(loader, iterator, result, index, drawn.pop(index, None))
    for watch in torch_patch:
        watch.see_batch(loaded)


def _scheduler_stepped(name: str, result: Any, args: Any, kwargs: Any) -> None:
    _tell("on_scheduler_step", args[0])


def _loss_scaled(name: str, result: Any, args: Any, kwargs: Any) -> None:
    if args[0].is_enabled():
        _tell("on_loss_scaled", args[0])


def _optimizer_made(name: str, result: Any, args: Any, kwargs: Any) -> None:
    _tell("on_optimizer_made", args[0])


def _state_loaded(name: str, result: Any, args: Any, kwargs: Any) -> None:
    state = args[1] if len(args) > 1 else kwargs.get("state_dict")
    _tell("on_state_loaded", args[0], state)
    if isinstance(args[0], nn.Module):
        is_assigned = bool(kwargs.get("assign", len(args) > 3 and args[3]))
        _tell("on_weights_loaded", args[0], state, result, is_assigned)


def _file_loaded(name: str, result: Any, args: Any, kwargs: Any) -> None:
    if sum(tensor.nbytes for tensor in tensors_in(result)) > _MAX_FILE:
        return  # it is kept until the first step
    _tell("on_file_loaded", result)


_AFTER: dict[str, Callable[[str, Any, Any, Any], None]] = {
    **dict.fromkeys(LOSSES, _loss_called),
    "__iter__": _loader_started,
    "_next_index": _index_drawn,
    "__next__": _batch_loaded,
    "step": _scheduler_stepped,
    "scale": _loss_scaled,
    "__init__": _optimizer_made,
    "load_state_dict": _state_loaded,
    "load": _file_loaded,
}


def _targets(watches: Iterable[TorchWatch]) -> list[tuple[Any, str]]:
    schedulers = [each for each in vars(lr_scheduler).values() if isinstance(each, type)]
    losses = LOSSES if any(watch.sees_losses for watch in watches) else ()
    return [
        *((F, name) for name in losses),
        (DataLoader, "__iter__"),
        *((_BaseDataLoaderIter, name) for name in ("_next_index", "__next__")),
        *(
            (each, name)
            for each in schedulers
            for name in ("step", "load_state_dict")
            if issubclass(each, lr_scheduler.LRScheduler) and name in vars(each)
        ),
        (torch.amp.GradScaler, "scale"),
        (torch.optim.Optimizer, "__init__"),
        *((each, "load_state_dict") for each in (nn.Module, torch.optim.Optimizer)),
        (torch, "load"),
        (nn.Module, "to_empty"),
        (torch.autograd, "_engine_run_backward"),
    ]


torch_patch: SharedPatch[TorchWatch] = SharedPatch(_targets, _replace)

recorder = TorchWatch()
recorder.sees_losses = True  # `F.mse_loss(model(x), y)` looks the loss up before the first call
"""Attached by `hookline run` and `hookline lint` before a script makes its loops."""
