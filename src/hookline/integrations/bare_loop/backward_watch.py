"""Calls of backward, however the loop reaches the parameters.

`Tensor.backward` and `torch.autograd.backward` start autograd's engine through one function, which
is replaced while somebody listens. `torch.autograd.grad`, and the backwards within a backward of
reentrant activation checkpointing, are not noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback as active_dynamo

from hookline.loop.patches import SharedPatch

if TYPE_CHECKING:
    from hookline.integrations.bare_loop.step_watch import StepWatch

_uncompiled: Any = torch.compiler.disable  # which loses the types of functions
_task_id = torch._C._current_graph_task_id


def _replace(engine: Callable[..., Any]) -> Callable[..., Any]:
    def run_backward(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("accumulate_grad") or _task_id() != -1:
            return engine(outputs, *args, **kwargs)
        if active_dynamo() is not None:
            # A caller that is compiled in parts runs this eagerly, hooks included.
            return _uncompiled(run_backward)(outputs, *args, **kwargs)
        loss = outputs[0] if len(outputs) == 1 and isinstance(outputs[0], torch.Tensor) else None
        loss = None if loss is None or loss.numel() != 1 else loss
        before = [(listener, listener.before_backward(loss)) for listener in backward_patch]
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
    lambda listeners: [(torch.autograd, "_engine_run_backward")], _replace
)
