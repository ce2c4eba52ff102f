"""full_tensor: the whole value of a sharded tensor, for hooks, and the barrier before collectives.

A collective waits for all its processes, and a process that never comes makes the others wait until
the process group's time limit, which is long and fails for all. A barrier in the process group's
store costs a few short messages to it, and tells which processes are missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from hookline.dispatch.calling_hook import find_limited_hook
from hookline.errors import CollectiveError
from hookline.tensors.nested import map_tensors, tensors_in
from hookline.tensors.sharded import is_sharded, needs_collective, whole

T = TypeVar("T")


def full_tensor(value: T, *, timeout: float = 60.0) -> T:
    """Return the whole value of a sharded tensor (a `DTensor`), as a plain tensor.

    Under FSDP2, parameters and gradients are sharded: each process has a part of them, and
    `gradient.norm().item()` is the norm of that part. This is a collective, so all processes of the
    tensor's device mesh have to call it, in the same order.

        def on_gradients_ready(self, model, step):
            gradient = hookline.full_tensor(model.head.weight.grad)
            if torch.distributed.get_rank() == 0:
                print(step, gradient.norm().item())

    Args:
        value: a tensor, or lists, tuples and mappings with tensors. Plain tensors are returned as
            they are; whole values of sharded ones are detached.
        timeout: how many seconds to wait for the other processes.

    Raises:
        CollectiveError: the hook that calls this is not called in all processes (its `ranks`), or
            a process has not called this in time.
    """
    sharded = [tensor for tensor in tensors_in(value) if is_sharded(tensor)]
    if not sharded:
        return value
    require_all_ranks(sharded, "full_tensor", timeout)
    result: T = map_tensors(value, lambda t: whole(t.detach()) if is_sharded(t) else t)
    return result


def require_all_ranks(tensors: Iterable[Any], function: str, timeout: float) -> None:
    """Wait until all processes are here that have parts of the tensors, or raise."""
    tensors = [tensor for tensor in tensors if needs_collective(tensor)]
    if not tensors:
        return
    hook = find_limited_hook()
    if hook is not None:
        raise CollectiveError(
            f"{function} was called in the hook '{hook.name}', which is not called in all "
            f"processes (ranks='{hook.ranks}'). It gathers the parts of all of them, so it would "
            f"wait for ever. Register the hook with ranks='all', call {function} in all "
            "processes, and use the result in one of them."
        )
    purposes: dict[tuple[int, ...], list[str]] = {}
    for tensor in tensors:
        ranks = tuple(tensor.device_mesh.mesh.flatten().tolist())
        described = f"{tuple(tensor.shape)} {tensor.dtype} {tensor.placements}"
        purposes.setdefault(ranks, []).append(described)
    for ranks, several in purposes.items():
        purpose = f"{function} {' '.join(several[:8])} of {len(several)}"
        if missing := barrier_with_timeout(purpose, ranks, timeout):
            raise CollectiveError(
                f"{function} waited {timeout:g} s for rank {', '.join(map(str, missing))}, which "
                f"did not call it for a tensor of shape {tuple(tensors[0].shape)}. All processes "
                "have to call it, in the same order. Is the hook enabled, registered with the same "
                "schedule, and without an error on all ranks?"
            )


def barrier_with_timeout(purpose: str, ranks: Sequence[int], seconds: float) -> list[int]:
    """Wait until all ranks have called this for the same purpose; return those that have not."""
    from torch.distributed.distributed_c10d import _get_default_store

    store, size = _get_default_store(), len(ranks)
    key = f"hookline/{purpose}/{'-'.join(map(str, ranks))}"
    met = f"{key}/{dist.get_rank()}/met"  # how often this rank has met the others
    meeting = store.add(met, 0) + 1
    store.set(f"{key}/{dist.get_rank()}/{meeting}", "here")
    if store.add(key, 1) == meeting * size:
        store.set(f"{key}/{meeting}", "complete")
    else:
        try:
            store.wait([f"{key}/{meeting}"], timedelta(seconds=seconds))
        except RuntimeError:  # the time limit
            if store.add(key, -1) != meeting * size - 1:  # else the last one has just come
                store.delete_key(f"{key}/{dist.get_rank()}/{meeting}")  # for those that come later
                others = [rank for rank in ranks if rank != dist.get_rank()]
                absent = [r for r in others if not store.check([f"{key}/{r}/{meeting}"])]
                return absent or others  # if all have come, some are leaving just now
            store.add(key, 1)
    store.add(met, 1)
    store.delete_key(f"{key}/{dist.get_rank()}/{meeting}")
    store.delete_key(f"{key}/{meeting - 1}")  # all ranks have left it
    return []
