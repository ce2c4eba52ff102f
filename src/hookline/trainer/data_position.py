"""The position in the training data, saved and restored so that a resumed run is bit for bit equal.

A loader decides its order when a pass over it begins (`iter(loader)` and the first batch), with
random numbers from its own generator or from the global ones. Saved are therefore the states of the
loaders' generators at the start of the epoch, and for each loader the global random states at the
start of its current pass. To resume in the middle of an epoch, the batches that were trained on are
loaded and dropped with these states, and training continues with those of the checkpoint.

Persistent workers keep random states that cannot be read. Resuming in the middle of an epoch that
reused them raises an error. At the end of an epoch the order of the data can be reproduced: their
iterator is made before the random states are restored, because making it consumes random numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hookline.context import LazyFloat
from hookline.errors import CheckpointError, TrainingError
from hookline.loop.random_state import generators_of, random_state, restore_random_state
from hookline.trainer.data_stream import Stream

__all__ = ["DataPosition"]

log = logging.getLogger("hookline")


class DataPosition:
    """The epoch, the number of its loaded batches, and the random states to reload them."""

    def __init__(self) -> None:
        self.epoch = 0
        self.batches = 0  # of the epoch, that were loaded
        self.validated: dict[str, Any] = {}  # the metrics of the epoch's last validation
        self._device = torch.device("cpu")
        self._loaders: list[Any] = []
        self._generators: list[torch.Generator] = []
        self._epoch_start: dict[str, Any] | None = None
        self._saved: dict[str, Any] | None = None  # the checkpoint's state, until it is used
        self._reloading = False

    def end_epoch(self) -> None:
        """Go to the start of the next epoch."""
        self.epoch += 1
        self.batches = 0
        self._epoch_start = None

    def remaining_batches(
        self, stream: Stream, device: torch.device
    ) -> Iterator[tuple[Any, int, int, str]]:
        """Iterate over the batches of this epoch that were not trained on yet."""
        self._device, self._loaders = device, stream.loaders
        self._generators = generators_of(stream.loaders)
        stream.on_pass_start = self._pass_starts
        saved, self._saved = self._saved, None
        if saved is not None and self._is_within_epoch(saved):
            if not _reused_workers(saved, stream):
                return self._reload(stream, saved)
            self._restore(saved)  # all batches were trained on, or `check_resumable` has raised
            return iter(())
        if saved is not None:
            self._restore(saved)
        self.batches = 0
        self._epoch_start = {
            "generators": self._generator_states(),
            "passes": [None] * len(self._loaders),
        }
        return stream.tuples()

    def check_resumable(self, stream: Stream) -> None:
        """Raise if the run cannot be resumed exactly with these loaders."""
        saved = self._saved
        if saved is None or not saved["loaders"]:
            return
        generators = len(generators_of(stream.loaders))
        if len(saved["generators"]) != generators or len(stream.loaders) != saved["loaders"]:
            raise CheckpointError(
                f"The checkpoint was made with {saved['loaders']} train loaders with "
                f"{len(saved['generators'])} generators of their own, this trainer has "
                f"{len(stream.loaders)} loaders with {generators}. Resume with the loaders of the "
                "run."
            )
        for name, loader, had_workers in zip(
            stream.names, stream.loaders, saved["workers"], strict=True
        ):
            if had_workers and not getattr(loader, "persistent_workers", False):
                raise CheckpointError(
                    f"The train loader '{name}' had persistent_workers=True when the checkpoint "
                    "was made, and has not now; its order would differ. Resume with "
                    "persistent_workers=True."
                )
        reused = _reused_workers(saved, stream) if self._is_within_epoch(saved) else []
        if reused and self.batches != stream.length():
            raise CheckpointError(
                f"The checkpoint was made after {self.batches} batches of epoch {self.epoch}, and "
                f"the train loader '{reused[0]}' has persistent_workers=True: the random states of "
                "its workers come from earlier epochs and were not saved, so the rest of the epoch "
                "would differ. Resume from a checkpoint that was made at the end of an epoch, or "
                "train with persistent_workers=False to resume anywhere."
            )

    def _reload(self, stream: Stream, saved: Mapping[str, Any]) -> Iterator[Any]:
        """Load and drop the batches that were trained on; return the rest."""
        self._epoch_start = saved["epoch_start"]
        self._set_generators(saved["epoch_start"]["generators"])
        self._reloading = True
        batches = stream.tuples()
        for i in range(self.batches):
            if next(batches, None) is None:
                raise TrainingError(
                    f"The checkpoint was made after {self.batches} batches of epoch {self.epoch}, "
                    f"but the loaders have only {i}. Resume with the data of the run."
                )
        self._reloading = False
        restore_random_state(saved["now"], self._device)
        return batches

    def _pass_starts(self, idx: int) -> None:
        """Keep the random states with which a pass over a loader begins, or restore them."""
        if self._epoch_start is None:
            return
        passes = self._epoch_start["passes"]
        if self._reloading and passes[idx] is not None:
            # That of the loader's last pass. Earlier ones are dropped, whatever their order is.
            restore_random_state(passes[idx]["random"], self._device)
            return
        reuses_workers = _has_persistent_workers(self._loaders[idx])
        passes[idx] = {"random": random_state(self._device), "reuses_workers": reuses_workers}

    def _restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the random states of a checkpoint that was made at the end of an epoch."""
        self._epoch_start = saved["epoch_start"]
        for loader, had_workers in zip(self._loaders, saved["workers"], strict=False):
            if had_workers and not _has_persistent_workers(loader):
                iter(loader)
                log.warning(
                    "The workers of a train loader with persistent_workers=True are started anew. "
                    "Its order is that of the run, but random numbers that its dataset uses in "
                    "the workers differ. Train with persistent_workers=False to resume exactly."
                )
        self._set_generators(saved["generators"])
        restore_random_state(saved["now"], self._device)

    def _is_within_epoch(self, saved: Mapping[str, Any]) -> bool:
        return bool(self.batches and saved["epoch_start"])

    def _generator_states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _set_generators(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=False):
            generator.set_state(state)

    def state_dict(self, device: torch.device) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {
            "epoch": self.epoch,
            "batches": self.batches,
            "epoch_start": self._epoch_start,
            "now": random_state(device),
            "generators": self._generator_states(),
            "loaders": len(self._loaders),
            "workers": [_has_persistent_workers(loader) for loader in self._loaders],
            "validated": {
                name: float(value)
                for name, value in self.validated.items()
                if isinstance(value, int | float | LazyFloat)
            },
        }

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Restore the position, and the global random states."""
        self.epoch, self.batches = int(state["epoch"]), int(state["batches"])
        self.validated = dict(state["validated"])
        self._saved = dict(state)
        restore_random_state(state["now"], device)


def _reused_workers(saved: Mapping[str, Any], stream: Stream) -> list[str]:
    """Return the loaders whose pass at the checkpoint used workers of an earlier pass."""
    passes = zip(stream.names, saved["epoch_start"]["passes"], strict=True)
    return [name for name, current in passes if current is not None and current["reuses_workers"]]


def _has_persistent_workers(loader: Any) -> bool:
    """Return whether a DataLoader has workers from an earlier pass that its next pass reuses."""
    if not getattr(loader, "persistent_workers", False):
        return False
    return getattr(loader, "_iterator", None) is not None
