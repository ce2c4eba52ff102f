"""Where a trainer stands, saved and restored so that a resumed run is bit for bit equal.

Saved of the position in the data are the number of batches that were trained on in this epoch, for
each loader its current pass (`LoaderPasses`) and the lengths of its earlier passes in the epoch,
and all random states. To resume in the middle of an epoch, the stream runs through it up to the
checkpoint with placeholders instead of batches: so the order of the loaders and the numbers of
their batches are those of the run. The loaders' passes are then continued at their batches.

`make_items` lists what a trainer's checkpoint has of it, apart from the items of all loops.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from hookline.context import numbers_in
from hookline.errors import CheckpointError, TrainingError, listed
from hookline.loop.processes import SingleProcessGroup
from hookline.loop.random_state import (
    describe_generators,
    describe_random_state,
    generator_state,
    generators_of,
    random_state,
    restore_random_state,
    set_generator_state,
)
from hookline.loop.state import (
    StateItem,
    adapt_tokens,
    compare_gradients,
    load_gradients,
    save_gradients,
)
from hookline.trainer.data_stream import Stream, length_of
from hookline.trainer.loader_passes import (
    LoaderPasses,
    batch_size_of,
    make_passes,
    number_of_samples,
    skips_indices,
)

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer

log = logging.getLogger("hookline")

_ORDER = 2  # how weighted loaders take turns; before it was saved, there was another order
_MAX_BATCHES = 10**9  # of an epoch whose length is not known; they are counted one by one


@dataclass
class EpochProgress:
    """Where a trainer stands in its epoch, apart from the data."""

    round: int = 0  # counts steps, to choose the optimizers that are due
    sanity_due: bool = False  # whether the validation before training has not ended yet
    validation_due: bool = False  # the same for a validation between two steps
    epoch_started: bool = False  # whether on_epoch_start was fired for the current position
    epoch_over: bool = False  # the same for on_epoch_end
    last_epoch: int = 0  # of the checkpoint that was loaded


class DataPosition:
    """The epoch, the number of its batches that were loaded, and the passes over its loaders."""

    def __init__(self) -> None:
        self.epoch = 0
        self.batches = 0  # of the epoch that were loaded
        self.val_loaders: Sequence[Any] = ()  # whose generators are saved and restored
        self._device = torch.device("cpu")
        self._passes: list[LoaderPasses] = []
        self._generators: list[Any] = []
        self._saved: dict[str, Any] | None = None  # the checkpoint's state, until it is used

    def end_epoch(self) -> None:
        """Go to the start of the next epoch."""
        self.epoch += 1
        self.batches = 0
        for passes in self._passes:
            passes.end_epoch()

    def remaining_batches(
        self, stream: Stream, device: torch.device
    ) -> Iterator[tuple[Any, int, int, str]]:
        """Iterate over the batches of this epoch that were not trained on yet."""
        self._device = device
        before, self._passes = self._passes, list(map(make_passes, stream.loaders, stream.names))
        for passes, last in zip(self._passes, before, strict=False):
            if last.has_workers:  # also where a resumed epoch had no pass that started them again
                passes.restore_workers(True)
        self._generators = generators_of(stream.loaders)
        saved, self._saved = self._saved, None
        if saved is None or not saved["loaders"]:
            self.batches = 0
            return stream.epoch(self._passes)
        return self._resume(stream, saved)

    def sample_indices(self, loader_idx: int, batch_idx: int) -> Any:
        """Return the indices of a loader's latest batch; None where they are not known."""
        if loader_idx >= len(self._passes):
            return None
        return self._passes[loader_idx].indices_of(batch_idx)

    # -- resuming ---------------------------------------------------------------------------------

    def _resume(self, stream: Stream, saved: Mapping[str, Any]) -> Iterator[Any]:
        """Restore the loaders and the random states; return the batches after the checkpoint."""
        if stream.had_another_order and saved.get("order") != _ORDER:
            raise TrainingError(
                f"The checkpoint was made within epoch {self.epoch} by a version that mixed three "
                "or more weighted loaders in another order, so its batches cannot be found again. "
                "Resume from a checkpoint at the end of an epoch."
            )
        loaders = saved["loaders"]
        several = list(zip(self._passes, loaders, strict=True))
        for passes, before in several:
            passes.repeat_ended(before)
        batches = stream.epoch(self._passes)
        found = sum(1 for _ in islice(batches, self.batches))
        for passes, before in several:
            passes.reach_checkpoint()
            if before["pass"] is None:
                found -= passes.delivered
        if found < self.batches:
            raise TrainingError(
                f"The checkpoint was made after {self.batches} batches of epoch {self.epoch}, but "
                f"the loaders have only {found}. Resume with the data of the run."
            )
        within: list[tuple[LoaderPasses, Callable[[], Iterator[Any]]]] = []
        for passes, before in several:
            if before["pass"] is not None:
                within.append((passes, passes.continue_pass(before["pass"], passes.delivered)))
            else:
                passes.restore_workers(before["has_workers"])
        self._restore_random_states(saved)
        for passes, start in within:
            passes.rest = start()
        restore_random_state(saved["now"], self._device)
        self._log_differences(loaders)
        return batches

    def _restore_random_states(self, saved: Mapping[str, Any]) -> None:
        for generator, state in zip(self._generators, saved["generators"], strict=True):
            set_generator_state(generator, state)
        restore_random_state(saved["now"], self._device)

    def _log_differences(self, loaders: Sequence[Mapping[str, Any]]) -> None:
        """Warn about what may differ from an uninterrupted run."""
        restarted: list[str] = []
        for passes, before in zip(self._passes, loaders, strict=True):
            is_within = before["pass"] and passes.delivered != length_of(passes.loader)
            if getattr(passes.loader, "num_workers", 0) and (before["has_workers"] or is_within):
                restarted.append(passes.name)
        if restarted:
            log.warning(
                "Random numbers that datasets draw in worker processes are not restored, only the "
                "order of the samples is. This concerns the train loaders %s, if their samples "
                "are random. A dataset that seeds its random numbers by index makes them exact.",
                listed(restarted),
            )
        late = [passes.name for passes in self._passes if passes.draws_late]
        if late:
            log.warning(
                "The train loaders %s use random numbers of the global generators in the middle of "
                "a pass, which training uses too. What they load after resuming may differ from an "
                "uninterrupted run. Give their samplers or datasets a torch.Generator.",
                listed(late),
            )

    def state_dict(self, device: torch.device) -> dict[str, Any]:
        """Return what a resumed run needs."""
        if self._saved is not None:  # nothing was loaded since the checkpoint
            return dict(self._saved)
        val_generators = generators_of(self.val_loaders)
        return {
            "epoch": self.epoch,
            "batches": self.batches,
            "now": random_state(device),
            "generators": [generator_state(generator) for generator in self._generators],
            "val_generators": [generator_state(generator) for generator in val_generators],
            "loaders": [passes.state_dict() for passes in self._passes],
            "order": _ORDER,
        }

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Restore the position, and the global random states."""
        self.epoch, self.batches = int(state["epoch"]), int(state["batches"])
        self._saved = dict(state)
        val_generators = generators_of(self.val_loaders)
        if len(val_generators) == len(state["val_generators"]):  # else it is another validation
            for generator, saved in zip(val_generators, state["val_generators"], strict=True):
                set_generator_state(generator, saved)
        restore_random_state(state["now"], device)


# -- comparing a saved position with the loaders, before anything is restored ----------------------


def describe_position(
    saved: Mapping[str, Any], stream: Stream | None, val_loaders: Sequence[Any]
) -> list[str]:
    """Return why training cannot continue at a saved position of the right form, one line each."""
    lines = describe_random_state(saved["now"])
    lines += describe_generators(val_loaders, saved["val_generators"])
    if stream is None or not saved["loaders"]:
        return lines
    counts = len(stream.loaders), len(generators_of(stream.loaders))
    before = len(saved["loaders"]), len(saved["generators"])
    if counts != before:
        return [
            *lines,
            f"The checkpoint was made with {before[0]} train loaders with {before[1]} generators "
            f"of their own, this trainer has {counts[0]} loaders with {counts[1]}. Resume with the "
            "loaders of the run.",
        ]
    lines += describe_generators(stream.loaders, saved["generators"])
    length = _MAX_BATCHES if (length := stream.length()) is None else length
    if saved["batches"] > length:
        lines.append(
            f"The checkpoint was made after {saved['batches']} batches of epoch {saved['epoch']}, "
            f"but it has only {length}. Resume with the data of the run."
        )
    for name, loader, own in zip(stream.names, stream.loaders, saved["loaders"], strict=True):
        found = _describe_other_loader(loader, own)
        if sum(length * times for length, times in own["ended"]) > saved["batches"]:
            found.append("has passes that are not valid")
        if own["pass"] is not None:
            found += _describe_pass(loader, own["pass"])
        lines += [f"The train loader '{name}' {line}" for line in found]
    return lines


def _describe_other_loader(loader: Any, saved: Mapping[str, Any]) -> list[str]:
    """Return how a loader is not the one that the checkpoint was made with."""
    persistent = bool(getattr(loader, "persistent_workers", False))
    compared: list[tuple[str, Any, Any, str]]
    compared = [("persistent_workers={}", saved["persistent_workers"], persistent, "")]
    if saved["pass"] is not None:
        instead = ", or from a checkpoint at the end of an epoch"
        batch_size, samples = batch_size_of(loader), number_of_samples(loader)
        before = saved.get("batch_size") or batch_size
        compared.append(("the batch size {}", before, batch_size, instead))
        compared.append(("{} samples", saved["samples"], samples, instead))
    lines = [
        f"had {text.format(was)} when the checkpoint was made, and has {now} now: samples would "
        "come in another order, be skipped or trained on twice. Resume with "
        f"{text.format(was)}{instead}."
        for text, was, now, instead in compared
        if was != now
    ]
    if saved["pass"] is not None and isinstance(loader, Iterator):
        lines.append(
            f"is an iterator ({type(loader).__name__}), whose position in the epoch cannot be "
            "restored. Use a DataLoader with a map-style dataset, or torchdata's "
            "StatefulDataLoader."
        )
    return lines


def _describe_pass(loader: Any, saved: Mapping[str, Any]) -> list[str]:
    """Return why a saved pass is not valid, or not one over this loader."""
    starts, indices = [saved["start"]], saved.get("indices")
    if indices is not None:
        starts += [indices["start"], indices["first"]]
    elif "indices" not in saved and "loader" not in saved and skips_indices(loader):
        return ["has a position without 'indices'"]
    generators, lines = len(generators_of([loader])), list[str]()
    for start in starts:
        lines += describe_random_state(start["random"])
        lines += describe_generators([loader], start["generators"])
        if len(start["generators"]) != generators:
            lines.append(f"has {generators} generators, not {len(start['generators'])}")
    return lines


# -- another number of processes than the position was saved by ------------------------------------


def adapt_position(
    saved: Sequence[Mapping[str, Any]],
    processes: SingleProcessGroup,
    length: int | None,
    device: torch.device,
) -> dict[str, Any]:
    """Return the position of this process, from those of all that saved, by rank.

    All continue after as many batches as all processes together had trained on, in rank 0's order
    of samples. `length` is the number of batches in an epoch of this process, if it is known.
    """
    position = saved[0]
    batches = position["batches"] * len(saved)
    if batches:
        _check_position(position, len(saved), processes.size)
    own = batches // processes.size
    own = own if length is None else min(own, length)
    is_new = processes.rank >= len(saved)
    now = random_state(device) if is_new else saved[processes.rank]["now"]
    again = batches - own * processes.size
    log.warning(
        "The checkpoint was saved by %d processes, and this run has %d. It continues after the "
        "same %d batches of the epoch%s, in the same order of samples. What differs from the run "
        "with %d processes: a step has the batches of %d processes, and random numbers, such as "
        "those of dropout, are others.",
        *(len(saved), processes.size, batches),
        f" ({again} of them are trained on again)" if again > 0 else "",
        *(len(saved), processes.size),
    )
    loaders = [{**loader, "pass": _move(loader["pass"], own)} for loader in position["loaders"]]
    return {**position, "batches": own, "loaders": loaders, "now": now}


def _check_position(position: Mapping[str, Any], before: int, now: int) -> None:
    loaders = position["loaders"]
    is_simple = len(loaders) == 1 and not loaders[0]["ended"]
    if not is_simple or "loader" in (loaders[0]["pass"] or {}):
        raise CheckpointError(
            f"The checkpoint was saved by {before} processes in the middle of an epoch, and this "
            f"run has {now}. The position of several loaders, or of a loader that saves its own, "
            f"cannot be converted. Resume with {before} processes, or from a checkpoint at the end "
            "of an epoch."
        )


def _move(saved: Mapping[str, Any] | None, batches: int) -> Mapping[str, Any] | None:
    """Return the state of a pass after so many of its batches."""
    if saved is None or saved.get("indices") is None:
        return saved
    return {**saved, "indices": {**saved["indices"], "drawn": batches, "is_over": False}}


# -- the items of a trainer's checkpoint, apart from those of all loops ----------------------------


def make_items(trainer: Trainer) -> list[StateItem]:
    """Return the items of a trainer's state; random states are restored with the position."""
    loop, strategy, progress = trainer.loop, trainer.strategy, trainer.epoch_progress
    tokens, context = trainer.token_count, trainer.loop.context

    def flag(name: str) -> StateItem:
        return StateItem(name, partial(getattr, progress, name), partial(setattr, progress, name))

    def save_position() -> dict[str, Any]:
        validated = numbers_in(context.validated)
        return {**trainer.position.state_dict(trainer.device), "validated": validated}

    def load_position(state: Mapping[str, Any]) -> None:
        context.validated = dict(state["validated"])
        trainer.position.load_state_dict(state, trainer.device)

    def load_epoch(epoch: int) -> None:
        position, config = trainer.position, trainer.config
        is_over = position.epoch == trainer.max_epochs or context.step == config.max_steps
        progress.last_epoch = epoch
        context.epoch = epoch if is_over else position.epoch

    def adapt(saved: Sequence[Any], processes: SingleProcessGroup) -> Any:
        length = None if trainer.train_data is None else trainer.train_data.length()
        return adapt_position(saved, processes, length, trainer.device)

    def compare_position(saved: Mapping[str, Any]) -> list[str]:
        val_loaders = () if trainer.val_data is None else trainer.val_data.loaders
        return describe_position(saved, trainer.train_data, val_loaders)

    return [
        StateItem("tokens_seen", lambda: tokens.count, tokens.restart, adapt_tokens),
        flag("round"),
        StateItem(
            "pending_gradients",
            partial(_save_gradients, trainer),
            partial(load_gradients, trainer.optimizers),
            compare=partial(compare_gradients, trainer.optimizers),
        ),
        flag("sanity_due"),
        flag("validation_due"),
        flag("epoch_started"),
        flag("epoch_over"),
        StateItem("settings", lambda: trainer.compared_settings),
        StateItem("strategy", strategy.state, strategy.load_state),
        StateItem("position", save_position, load_position, adapt, compare_position),
        StateItem("epoch", lambda: loop.context.epoch, load_epoch),
    ]


def _save_gradients(trainer: Trainer) -> list[list[Any] | None]:
    """Return the gradients of optimizers that do not step in every step."""
    every = trainer.config.optimizer_every or [1] * len(trainer.optimizers)
    return save_gradients(trainer.optimizers, [n > 1 for n in every])
