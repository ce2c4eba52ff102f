"""Calls of backward and of gradient scalers, noticed while a loop is watched.

`Tensor.backward` and `torch.autograd.backward` start autograd's engine through one function, which
is replaced. `torch.autograd.grad`, and the backwards within a backward of reentrant activation
checkpointing, are not noticed. The methods of `torch.amp.GradScaler` are replaced because a scaler
that skips a step does not call the optimizer, and a fused optimizer skips inside its kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback as active_dynamo

from hookline.loop.patches import SharedPatch

if TYPE_CHECKING:
    from hookline.integrations.bare_loop.step_watch import StepWatch

_uncompiled: Any = torch.compiler.disable  # which loses the types of functions
_task_id = torch._C._current_graph_task_id


def _replace_engine(engine: Callable[..., Any]) -> Callable[..., Any]:
    def run_backward(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("accumulate_grad") or _task_id() != -1:
            return engine(outputs, *args, **kwargs)
        if active_dynamo() is not None:
            # A caller that is compiled in parts runs this eagerly, hooks included.
            return _uncompiled(run_backward)(outputs, *args, **kwargs)
        loss = outputs[0] if len(outputs) == 1 and isinstance(outputs[0], torch.Tensor) else None
        loss = None if loss is None or loss.numel() != 1 else loss
        before: list[Any] = []
        for listener in backward_patch:
            before.append((listener, listener.before_backward(loss, outputs)))
        try:
            result = engine(outputs, *args, **kwargs)
        except BaseException:
            for listener, _ in before:
                listener.backward_failed()
            raise
        for listener, known in before:
            listener.after_backward(known)
        return result

    return run_backward


backward_patch: SharedPatch[StepWatch] = SharedPatch(
    lambda listeners: [(torch.autograd, "_engine_run_backward")], _replace_engine
)


# -- scalers --------------------------------------------------------------------------------------

_METHODS = ("scale", "unscale_", "step")
_running: set[tuple[int, str]] = set()  # a subclass may call the method that it overrides


def _targets(watches: Iterable[StepWatch]) -> Iterator[tuple[Any, str]]:
    """Yield the classes that define the methods: torch's own, and those of given scalers."""
    kinds: list[type[Any]] = [torch.amp.GradScaler]
    kinds += [type(watch.scaler) for watch in watches if watch.scaler is not None]
    for kind in kinds:
        for name in _METHODS:
            yield next(base for base in kind.__mro__ if name in vars(base)), name


def _replace_method(method: Callable[..., Any]) -> Callable[..., Any]:
    name = f"scaler_{method.__name__.rstrip('_')}"

    @functools.wraps(method)
    def watched(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        call: Callable[..., Any] = functools.partial(method, self)
        key = id(self), name
        if key in _running or not self.is_enabled():
            return call(*args, **kwargs)
        for watch in scaler_patch:
            call = functools.partial(getattr(watch, name), call, self)
        _running.add(key)
        try:
            return call(*args, **kwargs)
        finally:
            _running.discard(key)

    return watched


scaler_patch: SharedPatch[StepWatch] = SharedPatch(_targets, _replace_method)
