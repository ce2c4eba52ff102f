"""Where in the data training is, so that it can be resumed there, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hookline.context import LazyFloat
from hookline.errors import TrainingError
from hookline.loop.random_state import generators_of, random_state, restore_random_state
from hookline.trainer.data_stream import Stream

__all__ = ["Position"]


class Position:
    """The epoch, how many of its batches were drawn, and the random states it began with."""

    def __init__(self) -> None:
        self.epoch = 0
        self.batches = 0
        self.validated: dict[str, Any] = {}
        self._began: dict[str, Any] = {}
        self._generators: list[torch.Generator] = []
        self._resumes: dict[str, Any] | None = None

    def next_epoch(self) -> None:
        """The epoch is over."""
        self.epoch += 1
        self.batches = 0
        self._began = {}

    def drawn(self, stream: Stream, device: torch.device) -> Iterator[tuple[Any, int, int, str]]:
        """The batches of this epoch that have not been drawn yet.

        Loaders shuffle when an epoch begins. So a resumed epoch begins with the random states that
        it had then, draws what was drawn, and goes on with those of the checkpoint.
        """
        self._generators = generators_of(stream.loaders)
        resumes, self._resumes = self._resumes, None
        within = bool(resumes is not None and self.batches and resumes["began"])
        if resumes is not None:
            states = resumes["began"]["generators"] if within else resumes["generators"]
            for generator, state in zip(self._generators, states, strict=False):
                generator.set_state(state)
        if resumes is not None and within:
            self._began = dict(resumes["began"])
            restore_random_state(self._began["random"], device)
        else:
            self.batches = 0
            self._began = {"random": random_state(device), "generators": self._states()}
        batches = stream.tuples()
        for i in range(self.batches):
            if next(batches, None) is None:
                raise TrainingError(
                    f"The checkpoint was made after {self.batches} batches of epoch {self.epoch}, "
                    f"but the loaders have only {i}. Resume with the data of the run."
                )
        if resumes is not None and within:
            restore_random_state(resumes["now"], device)
        return batches

    def _states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]

    def state_dict(self, device: torch.device) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {
            "epoch": self.epoch,
            "batches": self.batches,
            "began": self._began,
            "now": random_state(device),
            "generators": self._states(),
            "validated": {
                name: float(value)
                for name, value in self.validated.items()
                if isinstance(value, int | float | LazyFloat)
            },
        }

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Take it back, the random states included."""
        self.epoch, self.batches = int(state["epoch"]), int(state["batches"])
        self.validated = dict(state["validated"])
        self._resumes = dict(state)
        restore_random_state(state["now"], device)
