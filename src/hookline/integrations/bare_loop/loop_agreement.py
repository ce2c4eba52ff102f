"""What the processes of a bare loop under DDP or FSDP decide together.

Between two steps they agree on requests to stop and on toggles of hooks, and before a step on
requests to skip it. A process that stopped or skipped a step alone would make the others wait for
ever, or train another model.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist

from hookline.dispatch import HookManager
from hookline.errors import LoopError
from hookline.integrations.bare_loop.bare_loop_context import BareLoopEventContext
from hookline.loop.hook_agreement import HookAgreement
from hookline.loop.means import Means, means_of_all
from hookline.loop.processes import ProcessGroup
from hookline.loop.step_records import StepRecords
from hookline.tensors.name_patterns import module_places
from hookline.tensors.rank_rendezvous import missing_ranks
from hookline.tensors.sharded import needs_collective

__all__ = ["LoopAgreement", "is_sharded_loop", "meet", "trains_together"]

log = logging.getLogger("hookline")

_SECONDS = 120.0  # within which all processes have to attach, and to end their sessions
_VALIDATION_SECONDS = 60.0  # within which all processes have to begin a validation
_CALL_SECONDS = 60.0  # within which all processes have to save or load a checkpoint


class LoopAgreement:
    """The agreement of all processes on what hooks request.

    Attributes:
        processes: the processes.
        hooks_toggled: whether hooks were toggled in this process since the last agreement.
        records: the values of steps, for means over all processes.
        logged: what the loop has logged in the step in progress.
    """

    def __init__(self, hooks: HookManager, context: BareLoopEventContext) -> None:
        if missing := missing_ranks("attach", range(dist.get_world_size()), _SECONDS):
            raise LoopError(
                f"Rank {_join(missing)} has not attached to the loop within {_SECONDS:g} s. Call "
                "`hookline.attach` in all processes that train the model: a hook with "
                "ranks='main' is still called in rank 0 only, and only rank 0 writes the run."
            )
        self.processes = ProcessGroup(started_here=False)
        self._hooks, self._context = hooks, context
        _check_same_hooks(hooks, self.processes)
        self._agreement = HookAgreement(hooks, self.processes)
        context.agree_on_norm(hooks, self.processes)
        self.hooks_toggled = False
        self.records = StepRecords(self.processes)
        self.logged = Means()
        self._validates_alone = self._saves_alone = False

    def any_rank(self, flag: bool) -> bool:
        """Return whether a process has set the flag; all processes have to call this."""
        return self.processes.any(flag)[0]

    def keep_step(self, loss: Any) -> None:
        """Keep the values of a step that has ended, until they are averaged and recorded."""
        step, epoch = self._context.step, self._context.known_epoch
        values = self.logged.means()
        if loss is not None:
            values["train/loss"] = loss  # that of backward has precedence over a logged one
        for name, value in values.items():
            self.records.add(step, epoch, name, value)
        self.logged = Means()

    def epoch_means(self, means: Means, run: Any) -> dict[str, Any]:
        """Return the means of an epoch over all processes, and record its steps."""
        self.records.report(run)
        return means_of_all(means, self.processes)

    def begin_validation(self) -> bool:
        """Return whether all processes validate, so that means are those of all of them.

        A loop may validate in some processes only. They wait once for the others, and not again.
        """
        if self._validates_alone:
            return False
        size = self.processes.size
        missing = missing_ranks("validation", range(size), _VALIDATION_SECONDS)
        if missing:
            self._validates_alone = True
            log.warning(
                "Rank %s has not begun a validation within %g s. From now on val/… is that of each "
                "process alone, and the record has that of rank 0. Validate in all processes, each "
                "with its part of the batches: `with session.validation():`.",
                _join(missing),
                _VALIDATION_SECONDS,
            )
        return not missing

    def begin_save(self) -> bool:
        """Return whether all processes save now, so that the state of each is in the checkpoint.

        A loop may save in rank 0 only. It waits once for the others, and not again.
        """
        if self._saves_alone:
            return False
        missing = missing_ranks("save_checkpoint", range(self.processes.size), _CALL_SECONDS)
        if missing:
            self._saves_alone = True
            log.warning(
                "Rank %s has not called session.save_checkpoint() within %g s. From now on "
                "checkpoints have the random state of rank 0 only: a resumed loop has other random "
                "numbers in the other processes, such as those of dropout. Call it in all "
                "processes, at the same place of the loop; rank 0 writes.",
                _join(missing),
                _CALL_SECONDS,
            )
        return not missing

    def validation_means(self, means: Means) -> dict[str, Any]:
        """Return the means of a validation over all processes, with one collective."""
        return means_of_all(means, self.processes)

    def end_step(
        self, step: int, run: Any, *, stops: bool, has_news: bool = False
    ) -> tuple[bool, bool]:
        """Apply toggles of all processes; return whether one of them stops, and has other news.

        When it is due, the means of the steps' values are recorded in the run of rank 0.
        """
        if self.records.is_due(step):
            self.records.report(run)
        stop, toggled, news = self.processes.any(stops, self.hooks_toggled, has_news)
        if toggled:
            self._agreement.apply_toggles()
            self._context.agree_on_norm(self._hooks, self.processes)
            self.hooks_toggled = False
        return stop, news

    def close(self, run: Any) -> bool:
        """Record what remains; return whether all processes end their sessions now."""
        self.keep_step(None)
        if not dist.is_initialized():
            why = "The process group was destroyed before the session has ended"
            advice = "End the session first: `with hookline.attach(…):` around the loop."
        elif missing := missing_ranks("detach", range(self.processes.size), _SECONDS):
            why = f"Rank {_join(missing)} has not ended its session within {_SECONDS:g} s"
            advice = "Do all processes have equally many batches?"
        else:
            self.records.report(run)
            return True
        steps = self.records.report_own(run)
        if run is not None and steps:
            log.warning(
                "%s: train/loss of the last %d steps is that of rank 0 instead of the mean over "
                "all ranks. %s",
                *(why, steps, advice),
            )
        return False


def meet(call: str) -> None:
    """Wait until all processes make the same call of the session.

    Raises:
        LoopError: One of them has not come within the time limit.
    """
    if missing := missing_ranks(call, range(dist.get_world_size()), _CALL_SECONDS):
        raise LoopError(
            f"Rank {_join(missing)} has not called session.{call}() within {_CALL_SECONDS:g} s. "
            "Several processes train this model together: call it in all of them, at the same "
            "place of the loop."
        )


def is_sharded_loop(optimizers: list[torch.optim.Optimizer]) -> bool:
    """Return whether each process has a part of the parameters only."""
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


def _check_same_hooks(hooks: HookManager, processes: ProcessGroup) -> None:
    """Raise if the processes have attached different hooks."""
    all_names = processes.gather(hooks.list_hooks())
    for rank, names in enumerate(all_names):
        if names != all_names[0]:
            raise LoopError(
                f"Rank 0 has attached the hooks {all_names[0]}, and rank {rank} {names}. Attach "
                "the same hooks in all processes: `ranks='main'` of a hook says that it is called "
                "in rank 0 only."
            )
