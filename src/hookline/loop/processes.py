"""The processes that train together: their ranks, and what they tell each other.

Everything here goes through a process group of its own on the CPU (gloo), so that it neither waits
for a device nor mixes with the collectives of the model. Methods are collectives, unless they say
otherwise: all processes have to call them, in the same order.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from hookline.arguments import show_value
from hookline.errors import LoopError, TrainingError
from hookline.loop.torchrun import report_error

T = TypeVar("T")
_TIMEOUT = timedelta(minutes=30)  # one process may save or validate while the others wait


class SingleProcessGroup:
    """A process that trains alone; `ProcessGroup` has the same methods for several of them."""

    rank = 0
    size = 1
    local_rank = 0

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes the run."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is the first process of its node."""
        return self.local_rank == 0

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Return for each flag whether a process has set it."""
        return flags

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, by rank."""
        return [value]

    def gather_on_main(self, value: Any) -> list[Any] | None:
        """Return the values of all processes, by rank, in rank 0; None in the others."""
        return [value]

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0."""
        return value

    def call_on_main(self, function: Callable[[], T]) -> T:
        """Call a function in rank 0; return its value, or raise its error, in all processes."""
        value: Any = None
        error: Exception | None = None
        if self.is_main:
            try:
                value = function()
            except Exception as raised:
                error = raised
        problem = None if error is None else f"{type(error).__name__}: {error}"
        value, problem = self.broadcast((value, problem))
        if error is not None:
            raise error
        if problem is not None:
            raise TrainingError(f"Rank 0 has failed: {problem}")
        return cast("T", value)

    def report_error(self, error: BaseException) -> None:
        """Tell torchrun which error ends this process. This is not a collective."""
        if self.size > 1:
            report_error(error)


class ProcessGroup(SingleProcessGroup):
    """Several processes, in torch's default process group."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.local_rank = local_rank()
        _LOG_FILTER.rank = self.rank
        logging.getLogger("hookline").addFilter(_LOG_FILTER)  # once, also if there are several
        self._group: Any = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        atexit.register(self._leave_group)

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Return for each flag whether a process has set it."""
        tensor = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        return tuple(map(bool, tensor.tolist()))

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, by rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def gather_on_main(self, value: Any) -> list[Any] | None:
        """Return the values of all processes, by rank, in rank 0; None in the others."""
        values: list[Any] | None = [None] * self.size if self.is_main else None
        dist.gather_object(value, values, dst=0, group=self._group)
        return values

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0."""
        values = [value if self.is_main else None]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def _leave_group(self) -> None:
        """End the group before Python does: its threads would abort the process now and then.

        A script that has ended the default group has ended this one as well, but its threads end
        with the last reference to it, which is here.
        """
        group, self._group = self._group, None
        if dist.is_initialized():
            with suppress(Exception):  # the script may have ended it
                dist.destroy_process_group(group)


class _RankFilter(logging.Filter):
    """Drops warnings and less in other ranks than 0, and adds the rank to the rest.

    Warnings are about settings, data and checkpoints, which are the same in all processes. Errors
    are failures of this process. A warning about this process alone has `extra={"own_rank": True}`.
    """

    rank = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether this process logs the record."""
        if self.rank == 0:
            return True
        if record.levelno < logging.ERROR and not getattr(record, "own_rank", False):
            return False
        if not getattr(record, "rank", None):
            record.rank = self.rank
            record.msg = f"[rank {self.rank}] {record.msg}"
        return True


_LOG_FILTER = _RankFilter()


def local_rank() -> int:
    """Return the number of this process on its node."""
    return _variable("LOCAL_RANK", 0)


def world_size() -> int:
    """Return the number of processes of this job, as torchrun or the process group says."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return _variable("WORLD_SIZE", 1, least=1)


def _variable(name: str, default: int, least: int = 0) -> int:
    """Return the number in a variable that torchrun sets.

    Raises:
        TrainingError: it is not such a number.
    """
    text = os.environ.get(name) or str(default)
    if text.isdecimal() and int(text) >= least:
        return int(text)
    raise TrainingError(
        f"The environment variable {name} is {show_value(text)}; expected a whole number of "
        f"{least} or more, as `torchrun` sets it. Start the script with `torchrun "
        "--nproc_per_node N`, or unset it to train in one process."
    )


def join_processes(device: torch.device) -> SingleProcessGroup:
    """Join the process group that torchrun or the script has started; alone if there is none.

    Raises:
        TrainingError: WORLD_SIZE says that there are several processes, and they cannot be joined.
    """
    if world_size() == 1:
        return SingleProcessGroup()
    if not dist.is_initialized():
        if missing := [n for n in ("RANK", "MASTER_ADDR", "MASTER_PORT") if n not in os.environ]:
            raise TrainingError(
                f"WORLD_SIZE is {os.environ.get('WORLD_SIZE')}, but {', '.join(missing)} is not "
                "set. Start the script with `torchrun --nproc_per_node N`, or unset WORLD_SIZE."
            )
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, **_options_after_restart())
    return ProcessGroup()


def is_main_process() -> bool:
    """Return whether this is rank 0, also before there is a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return (os.environ.get("RANK") or "0") == "0"  # as torchrun sets it


def broadcast_from_main(value: Any) -> Any:
    """Return the value of rank 0 in all processes, in the process group of the loop.

    Raises:
        LoopError: there are several processes, and no process group yet.
    """
    if world_size() == 1:
        return value
    if not dist.is_initialized():
        raise LoopError(
            "The processes of this job cannot agree on a checkpoint, because there is no process "
            "group yet. Call `torch.distributed.init_process_group` first, or give the "
            "checkpoint's path."
        )
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def _options_after_restart() -> dict[str, Any]:
    """Return arguments of `init_process_group`: after a restart, a store of this attempt.

    torchrun's store outlives a restart, with the addresses of the processes before (torch 2.13).
    On several nodes their agents count restarts differently: there the user has to set
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which gives every attempt a store of its own.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    uses_agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if attempt == "0" or not uses_agent_store or os.environ.get("GROUP_WORLD_SIZE") != "1":
        return {}
    size, port = int(os.environ["WORLD_SIZE"]), int(os.environ["MASTER_PORT"])
    stores: Any = dist
    store = stores.TCPStore(os.environ["MASTER_ADDR"], port, size, is_master=False)
    store = stores.PrefixStore(f"hookline/attempt_{attempt}", store)
    return {"store": store, "rank": int(os.environ["RANK"]), "world_size": size}
