"""Exchanges between the ranks of a loop: between two steps, and when they begin and end.

A rank that stopped, skipped a step or toggled a hook alone would make the others wait for ever, or
train another model. In a process that trains alone, everything here returns at once.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist

from hookline.context import to_float
from hookline.dispatch import HookManager
from hookline.errors import LoopError
from hookline.loop.event_context import EventContext
from hookline.loop.means import Means, add_means
from hookline.loop.processes import ProcessGroup, SingleProcessGroup
from hookline.tensors.full_tensor import barrier_with_timeout
from hookline.tensors.name_patterns import module_places
from hookline.tensors.sharded import needs_collective

log = logging.getLogger("hookline")

_SECONDS = 120.0  # within which all processes have to attach, and to end their sessions
_VALIDATION_SECONDS = 60.0  # within which all processes have to begin a validation
_CALL_SECONDS = 60.0  # within which all processes have to save or load a checkpoint
_RECORD_STEPS = 50  # steps whose values are averaged together

_NORM_EVENTS = ("on_gradient_clip", "on_step_end")
_NORM_ARGUMENTS = ("grad_norm", "ctx")


class RankSync:
    """Keeps hooks, records and means of all ranks together.

    Attributes:
        is_distributed: whether other processes take part.
        hooks_toggled: whether hooks were toggled in this process since all of them agreed.
        records: the values of steps, for means over all ranks.
    """

    def __init__(
        self, processes: SingleProcessGroup, hooks: HookManager, context: EventContext
    ) -> None:
        self.processes = processes
        self.is_distributed = processes.size > 1
        self.hooks_toggled = False
        self.records = StepRecords(processes)
        self._hooks, self._context = hooks, context
        self._agreed = self._read_status()
        self._not_together: set[str] = set()  # what some processes have not done in time

    def begin(self) -> None:
        """Start from the hooks as they are now, in all processes."""
        self.records = StepRecords(self.processes)
        self.hooks_toggled = False
        self._agreed = self._read_status()
        self._agree_on_norm()

    # -- hooks ------------------------------------------------------------------------------------

    def apply_toggles(self) -> None:
        """Enable and disable hooks as they were in any process since the last agreement.

        All processes have to call this.

        Raises:
            LoopError: an update was added or removed in some processes only.
        """
        now, before = self._read_status(), self._agreed
        own = {name: on for name, on in now.items() if before.get(name, on) != on}
        updates = [name for name, *_ in self._hooks.of_kind("update")]
        gathered = self.processes.gather((own, updates))
        for rank, (_, names) in enumerate(gathered):
            if names != gathered[0][1]:
                raise LoopError(
                    f"Updates were added or removed in some processes only: rank 0 has "
                    f"{gathered[0][1]}, and rank {rank} {names}. Add and remove them in all "
                    "processes, in the same step: otherwise each would train a model of its own."
                )
        agreed = dict(now)
        for changes, _ in reversed(gathered):  # rank 0's count most
            agreed |= {name: on for name, on in changes.items() if name in agreed}
        for name, on in agreed.items():
            if on != now[name]:
                (self._hooks.enable_hook if on else self._hooks.disable_hook)(name)
        self._agreed = agreed
        self.hooks_toggled = False
        self._agree_on_norm()

    def _read_status(self) -> dict[str, bool]:
        return {name: status == "enabled" for name, status in self._hooks.statuses().items()}

    def _agree_on_norm(self) -> None:
        """Agree on whether the norm is computed; not a collective without sharded parameters.

        The norm of sharded gradients is a collective, and a hook that asks for it may be called in
        one process only.
        """
        self._context.norm_is_agreed = None
        if is_sharded_loop(self._context.optimizers):
            asked = [self._hooks.required_arguments(e, optional=True) for e in _NORM_EVENTS]
            asks = any(argument in one for one in asked for argument in _NORM_ARGUMENTS)
            (self._context.norm_is_agreed,) = self.processes.any(asks)

    # -- means ------------------------------------------------------------------------------------

    def means(self, means: Means) -> dict[str, Any]:
        """Return means over all processes, which all have to call this."""
        if not self.is_distributed:
            return means.means()
        added = add_means(self.processes.gather(means.state_dict()))
        return {name: one["mean"] for name, one in added.items()}

    # -- loops in which not all ranks may make a call ---------------------------------------------

    def begin_validation(self) -> bool:
        """Return whether all processes validate, so that means are those of all of them."""
        return self._begin_together(
            "validation",
            _VALIDATION_SECONDS,
            "Rank %s has not begun a validation within %g s. From now on val/… is that of each "
            "process alone, and the record has that of rank 0. Validate in all processes, each "
            "with its own batches: `with session.validation():`.",
        )

    def begin_save(self) -> bool:
        """Return whether all processes save now, so that the state of each is in the checkpoint."""
        return self._begin_together(
            "save_checkpoint",
            _CALL_SECONDS,
            "Rank %s has not called session.save_checkpoint() within %g s. From now on "
            "checkpoints have the random state of rank 0 only. Call it in all processes, at the "
            "same place of the loop; rank 0 writes.",
        )

    def _begin_together(self, purpose: str, seconds: float, warning: str) -> bool:
        """Wait once for processes that do not take part; a loop may do this in rank 0 only."""
        if not self.is_distributed or purpose in self._not_together:
            return False
        missing = barrier_with_timeout(purpose, range(self.processes.size), seconds)
        if missing:
            self._not_together.add(purpose)
            log.warning(warning, _join(missing), seconds)
        return not missing

    def wait_for_save(self, seconds: float | None) -> None:
        """Wait until rank 0 has written the last checkpoint: torchrun ends all ranks with one."""
        if self.is_distributed and dist.is_initialized():
            ranks = range(self.processes.size)
            barrier_with_timeout("last save", ranks, _CALL_SECONDS if seconds is None else seconds)

    def end_together(self, run: Any) -> bool:
        """Record what remains; return whether all processes end their sessions now."""
        if not self.is_distributed:
            return False
        if not dist.is_initialized():
            why = "The process group was destroyed before the session has ended"
        elif missing := barrier_with_timeout("detach", range(self.processes.size), _SECONDS):
            why = f"Rank {_join(missing)} has not ended its session within {_SECONDS:g} s"
        else:
            self.records.report(run)
            return True
        steps = self.records.report(run, alone=True)
        if run is not None and steps:
            log.warning(
                "%s: train/loss of the last %d steps is that of rank 0, not the mean of all ranks.",
                *(why, steps),
            )
        return False


class StepRecords:
    """Keeps the values of each step, such as `train/loss`, until they are averaged and recorded.

    One collective per report instead of one per step: a step neither waits for other processes nor
    for the device.
    """

    def __init__(self, processes: SingleProcessGroup) -> None:
        self._processes = processes
        self._values: list[tuple[int, int | None, str, Any]] = []

    def add(self, step: int, epoch: int | None, name: str, value: Any) -> None:
        """Keep a value: a number, or a tensor with one element."""
        self._values.append((step, epoch, name, value))

    def is_due(self, step: int) -> bool:
        """Return whether the values are recorded after this step."""
        return step % _RECORD_STEPS == 0

    def own_values(self) -> list[tuple[int, int | None, str, float]]:
        """Return what is kept of this process: step, epoch, name and value."""
        return [(step, epoch, name, to_float(value)) for step, epoch, name, value in self._values]

    def report(self, run: Any, *, alone: bool = False) -> int:
        """Average what was kept over all processes, record it in the run of rank 0, and forget it.

        All processes have to call this, unless the values of this one are recorded `alone`. Return
        of how many steps they are.
        """
        kept, self._values = self._values, []
        own: dict[Any, Any] = {}
        for step, epoch, name, value in kept:
            attempt = 0  # a step that was skipped has the number of the step before
            while (step, attempt, epoch, name) in own:
                attempt += 1
            own[step, attempt, epoch, name] = {"mean": to_float(value), "weight": 1.0}
        processes = SingleProcessGroup() if alone else self._processes
        gathered = processes.gather_on_main(own)
        if run is not None and gathered is not None:
            means = add_means(gathered)
            for key in sorted(means, key=lambda key: key[:2]):  # a process need not have all names
                step, _, epoch, name = key
                run.log(step, epoch, name, means[key]["mean"])
        return len({step for step, *_ in kept})


def join_ranks(hooks: HookManager) -> ProcessGroup:
    """Return the processes of a bare loop, when all of them have attached the same hooks.

    Raises:
        LoopError: one of them has not attached within the time limit, or has other hooks.
    """
    if missing := barrier_with_timeout("attach", range(dist.get_world_size()), _SECONDS):
        raise LoopError(
            f"Rank {_join(missing)} has not attached to the loop within {_SECONDS:g} s. Call "
            "`hookline.attach` in all processes that train the model; only rank 0 writes the run."
        )
    processes = ProcessGroup()
    all_names = processes.gather(hooks.list_hooks())
    for rank, names in enumerate(all_names):
        if names != all_names[0]:
            raise LoopError(
                f"Rank 0 has attached the hooks {all_names[0]}, and rank {rank} {names}. Attach "
                "the same hooks in all processes: one with `ranks='main'` is called in rank 0 only."
            )
    return processes


def wait_for_ranks(call: str) -> None:
    """Wait until all processes make the same call of the session.

    Raises:
        LoopError: One of them has not come within the time limit.
    """
    if missing := barrier_with_timeout(call, range(dist.get_world_size()), _CALL_SECONDS):
        raise LoopError(
            f"Rank {_join(missing)} has not called session.{call}() within {_CALL_SECONDS:g} s. "
            "Several processes train this model together: call it in all of them, at the same "
            "place of the loop."
        )


def is_sharded_loop(optimizers: list[torch.optim.Optimizer]) -> bool:
    """Return whether each process has only a shard of a parameter."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return any(needs_collective(parameter) for group in groups for parameter in group["params"])


def trains_together(model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> bool:
    """Return whether several processes train this model, with DDP or sharded parameters."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return False
    wrappers = {type(place.module).__name__ for place in module_places(model) if place.is_wrapper}
    if wrappers & {"DistributedDataParallel", "FullyShardedDataParallel"}:
        return True
    return is_sharded_loop(optimizers)


def _join(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
