"""The position in the training data, saved and restored so that a resumed run is bit for bit equal.

Saved are the number of batches that were trained on in this epoch, for each loader its current pass
(`LoaderPasses`) and the lengths of its earlier passes in the epoch, and all random states. To
resume in the middle of an epoch, first the loaders' passes are continued at their batches. Then the
stream runs through the epoch up to the checkpoint with placeholders instead of batches, so that
the order of the loaders, their shares and their numbers are those of the run, too.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice, repeat
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from hookline.context import LazyFloat
from hookline.errors import CheckpointError, TrainingError, listed
from hookline.loop.random_state import (
    generator_state,
    generators_of,
    random_state,
    restore_random_state,
    set_generator_state,
)
from hookline.trainer.data_stream import Stream, length_of
from hookline.trainer.loader_passes import LoaderPasses, make_passes

__all__ = ["DataPosition"]

log = logging.getLogger("hookline")


class DataPosition:
    """The epoch, the number of its batches that were loaded, and the passes over its loaders.

    Args:
        fast_forward: when resuming within an epoch, load batches again and drop them instead of
            skipping their indices; also those of iterators, which cannot be started again.

    Attributes:
        epoch: the epoch, from 0.
        batches: how many batches of the epoch were loaded.
        validated: the metrics of the epoch's last validation.
        per_sample_seed: the run's seed, if each sample of a map-style dataset is loaded with random
            numbers from this seed, the epoch and its index; otherwise None.
        val_loaders: loaders for validation, whose generators are saved and restored.
    """

    def __init__(self, *, fast_forward: bool = False) -> None:
        self.epoch = 0
        self.batches = 0
        self.validated: dict[str, Any] = {}
        self.per_sample_seed: int | None = None
        self.val_loaders: Sequence[Any] = ()
        self._fast_forward = fast_forward
        self._device = torch.device("cpu")
        self._stream: Stream | None = None
        self._passes: list[LoaderPasses] = []
        self._ended: list[list[list[int]]] = []  # for each loader: length of passes, how many
        self._generators: list[Any] = []
        self._saved: dict[str, Any] | None = None  # the checkpoint's state, until it is used

    def end_epoch(self) -> None:
        """Go to the start of the next epoch."""
        self.epoch += 1
        self.batches = 0
        self._ended = [[] for _ in self._passes]
        for passes in self._passes:
            passes.end()

    def remaining_batches(
        self, stream: Stream, device: torch.device
    ) -> Iterator[tuple[Any, int, int, str]]:
        """Iterate over the batches of this epoch that were not trained on yet."""
        self._device, self._stream = device, stream
        self._check_per_sample_seed(stream)
        seeded = self.per_sample_seed is not None
        self._passes = [
            make_passes(loader, name, seeds_samples=seeded)
            for name, loader in zip(stream.names, stream.loaders, strict=True)
        ]
        self._generators = generators_of(stream.loaders)
        self._ended = [[] for _ in stream.loaders]
        stream.start_pass, stream.on_pass_end = self._start_pass, self._end_pass
        saved, self._saved = self._saved, None
        if saved is None or not saved["loaders"]:
            self.batches = 0
            return stream.tuples()
        return self._resume(stream, saved)

    def check_resumable(self, stream: Stream, saved: Mapping[str, Any]) -> None:
        """Raise if a saved position cannot be resumed exactly with these loaders."""
        if not saved["loaders"]:
            return
        generators = len(generators_of(stream.loaders))
        if (len(saved["generators"]), len(saved["loaders"])) != (generators, len(stream.loaders)):
            raise CheckpointError(
                f"The checkpoint was made with {len(saved['loaders'])} train loaders with "
                f"{len(saved['generators'])} generators of their own, this trainer has "
                f"{len(stream.loaders)} loaders with {generators}. Resume with the loaders of the "
                "run."
            )
        for name, loader, before in zip(
            stream.names, stream.loaders, saved["loaders"], strict=True
        ):
            persistent = bool(getattr(loader, "persistent_workers", False))
            if persistent != before["persistent_workers"]:
                raise CheckpointError(
                    f"The train loader '{name}' had persistent_workers={not persistent} when the "
                    f"checkpoint was made, and has {persistent} now; its order would differ. "
                    f"Resume with persistent_workers={not persistent}."
                )
            if before["pass"] is not None:
                self._check_continuable(name, loader, before, saved)

    def _check_continuable(
        self, name: str, loader: Any, before: Mapping[str, Any], saved: Mapping[str, Any]
    ) -> None:
        """Raise if the pass that the checkpoint was made in cannot be continued."""
        batch_size, batch_size_before = _batch_size(loader), before.get("batch_size")
        if batch_size_before is not None and batch_size != batch_size_before:
            raise CheckpointError(
                f"The train loader '{name}' had the batch size {batch_size_before} when the "
                f"checkpoint was made in the middle of an epoch, and has {batch_size} now; samples "
                "would be skipped or trained on twice. Resume with the batch size of the run, or "
                "from a checkpoint at the end of an epoch."
            )
        samples = _number_of_samples(loader)
        if samples != before["samples"]:
            raise CheckpointError(
                f"The dataset of the train loader '{name}' had {before['samples']} samples when "
                f"the checkpoint was made in the middle of an epoch, and has {samples} now; its "
                "order would differ. Resume with the data of the run, or from a checkpoint at the "
                "end of an epoch."
            )
        if isinstance(loader, Iterator) and not self._fast_forward:
            raise CheckpointError(
                f"The checkpoint was made after {saved['batches']} batches of epoch "
                f"{saved['epoch']}, and the train loader '{name}' is an iterator "
                f"({type(loader).__name__}), whose position cannot be restored. Use "
                "a DataLoader with a map-style dataset, or torchdata's StatefulDataLoader. If this "
                "iterator starts with the first batch of the epoch and gives the same batches as "
                "then, set fast_forward=True in the TrainerConfig: the batches before the "
                "checkpoint are then loaded and dropped."
            )

    def _check_per_sample_seed(self, stream: Stream) -> None:
        if self.per_sample_seed is None:
            return
        streamed = [
            name
            for name, loader in zip(stream.names, stream.loaders, strict=True)
            if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
        ]
        if streamed:
            raise TrainingError(
                f"per_sample_seed needs samples with an index, and the datasets of these train "
                f"loaders are iterable-style: {listed(streamed)}. Use map-style datasets, or "
                "train with per_sample_seed=False."
            )

    def sample_indices(self, loader_idx: int, batch_idx: int) -> Any:
        """Return the indices of a loader's latest batch; None where they are not known."""
        if self._stream is None or loader_idx >= len(self._passes) or self._stream.loads_ahead():
            return None
        delivered = batch_idx + 1 - _batches_in(self._ended[loader_idx])
        return self._passes[loader_idx].indices_of(delivered)

    # -- the epoch --------------------------------------------------------------------------------

    def _start_pass(self, idx: int) -> Iterator[Any]:
        return self._passes[idx].start(self._seed_key(idx))

    def _end_pass(self, idx: int, length: int) -> None:
        self._passes[idx].end()
        ended = self._ended[idx]
        if ended and ended[-1][0] == length:
            ended[-1][1] += 1
        else:
            ended.append([length, 1])

    def _seed_key(self, idx: int) -> tuple[int, ...] | None:
        """Return what the seeds of samples in the loader's next pass are made from."""
        if self.per_sample_seed is None:
            return None
        passes = sum(times for _, times in self._ended[idx])
        return (self.per_sample_seed, self.epoch, idx, passes)

    # -- resuming ---------------------------------------------------------------------------------

    def _resume(self, stream: Stream, saved: Mapping[str, Any]) -> Iterator[Any]:
        """Restore the loaders and the random states; return the batches after the checkpoint."""
        loaders = saved["loaders"]
        self._ended = [[list(pair) for pair in before["ended"]] for before in loaders]
        _, counts = self._run_through(stream, lambda idx: repeat(None))
        delivered = [counts[idx] - _batches_in(ended) for idx, ended in enumerate(self._ended)]
        within = [idx for idx, before in enumerate(loaders) if before["pass"] is not None]
        for idx, before in enumerate(loaders):
            if idx in within:
                self._passes[idx].prepare(
                    before["pass"], delivered[idx], self._seed_key(idx), load=self._fast_forward
                )
            else:
                self._passes[idx].restore_workers(before["has_workers"], before["worker_seed"])
        self._restore_random_states(saved)
        rest = {idx: self._passes[idx].resume() for idx in within}
        batches, _ = self._run_through(
            stream, lambda idx: chain(repeat(None, delivered[idx]), rest[idx])
        )
        restore_random_state(saved["now"], self._device)
        if stream.loads_ahead():  # which may have used the generators of datasets
            self._restore_random_states(saved)
        stream.started.update(
            id(loader) for loader in stream.loaders if isinstance(loader, Iterator)
        )
        self._log_differences(loaders, delivered)
        return batches

    def _run_through(
        self, stream: Stream, continue_pass: Callable[[int], Iterator[Any]]
    ) -> tuple[Iterator[Any], Counter[int]]:
        """Run through the epoch up to the checkpoint, with placeholders instead of batches.

        Args:
            stream: the stream.
            continue_pass: returns the pass over a loader that was not over at the checkpoint.

        Returns:
            The rest of the epoch, and how many batches each loader gave until then.
        """
        lengths = [_lengths_of(ended) for ended in self._ended]

        def start_pass(idx: int) -> Iterator[Any]:
            length = next(lengths[idx], None)
            return continue_pass(idx) if length is None else repeat(None, length)

        stream.start_pass, stream.on_pass_end = start_pass, None
        batches = stream.tuples()
        counts = Counter(loader_idx for _, _, loader_idx, _ in islice(batches, self.batches))
        stream.start_pass, stream.on_pass_end = self._start_pass, self._end_pass
        if counts.total() < self.batches:
            raise TrainingError(
                f"The checkpoint was made after {self.batches} batches of epoch {self.epoch}, "
                f"but the loaders have only {counts.total()}. Resume with the data of the run."
            )
        return batches, counts

    def _restore_random_states(self, saved: Mapping[str, Any]) -> None:
        for generator, state in zip(self._generators, saved["generators"], strict=True):
            set_generator_state(generator, state)
        restore_random_state(saved["now"], self._device)

    def _log_differences(
        self, loaders: Sequence[Mapping[str, Any]], delivered: Sequence[int]
    ) -> None:
        """Warn about what may differ from an uninterrupted run."""
        several = list(zip(self._passes, loaders, delivered, strict=True))
        restarted = [
            passes.name
            for passes, before, n in several
            if passes.workers
            and (before["has_workers"] or (before["pass"] and n != length_of(passes.loader)))
        ]
        if restarted and self.per_sample_seed is None and not self._fast_forward:
            log.warning(
                "Random numbers that datasets draw in worker processes are not restored, only the "
                "order of the samples is. This concerns the train loaders %s, if their samples "
                "are random. fit(..., per_sample_seed=True) makes such samples exact.",
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
        validated = {
            name: float(value)
            for name, value in self.validated.items()
            if isinstance(value, int | float | LazyFloat)
        }
        if self._saved is not None:  # nothing was loaded since the checkpoint
            return {**self._saved, "validated": validated}
        ahead = self._stream is not None and self._stream.loads_ahead()
        return {
            "epoch": self.epoch,
            "batches": self.batches,
            "now": random_state(device),
            "generators": [generator_state(generator) for generator in self._generators],
            "val_generators": [
                generator_state(generator) for generator in generators_of(self.val_loaders)
            ],
            "loaders": [
                {
                    "pass": passes.state_dict(loads_ahead=ahead),
                    "ended": [list(pair) for pair in ended],
                    "persistent_workers": bool(getattr(passes.loader, "persistent_workers", False)),
                    "has_workers": passes.has_workers,
                    "worker_seed": passes.worker_seed(),
                    "samples": _number_of_samples(passes.loader),
                    "batch_size": _batch_size(passes.loader),
                }
                for passes, ended in zip(self._passes, self._ended, strict=True)
            ],
            "validated": validated,
        }

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Restore the position, and the global random states."""
        self.epoch, self.batches = int(state["epoch"]), int(state["batches"])
        self.validated = dict(state["validated"])
        self._saved = dict(state)
        val_generators = generators_of(self.val_loaders)
        if len(val_generators) == len(state["val_generators"]):  # else it is another validation
            for generator, saved in zip(val_generators, state["val_generators"], strict=True):
                set_generator_state(generator, saved)
        restore_random_state(state["now"], device)


def _lengths_of(ended: Sequence[Sequence[int]]) -> Iterator[int]:
    return chain.from_iterable(repeat(length, times) for length, times in ended)


def _batches_in(ended: Sequence[Sequence[int]]) -> int:
    return sum(length * times for length, times in ended)


def _number_of_samples(loader: Any) -> int | None:
    """Return the size of a map-style dataset in a DataLoader, None for other loaders."""
    dataset = loader.dataset if isinstance(loader, DataLoader) else None
    return None if dataset is None or isinstance(dataset, IterableDataset) else length_of(dataset)


def _batch_size(loader: Any) -> int | None:
    """Return the batch size of a DataLoader or its batch sampler, None where it is not known."""
    if not isinstance(loader, DataLoader):
        return None
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) else None
