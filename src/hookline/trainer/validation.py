"""The batches of a validation, in one process or in several, until they end or a signal comes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hookline.errors import TrainingError
from hookline.loop.control_requests import ControlRequests
from hookline.trainer.data_stream import Stream
from hookline.trainer.strategies import SingleProcess

__all__ = ["ValidationBatches", "has_ended_workers"]


class ValidationBatches:
    """Iterates over the batches of a validation, together with the other processes.

    Args:
        stream: the data.
        strategy: where training runs.
        requests: has the signal that this process has received.
        until_signal: whether a signal ends the validation.

    Attributes:
        repeated: a batch for when this process has none and others call the model.
    """

    def __init__(
        self, stream: Stream, strategy: SingleProcess, requests: ControlRequests, until_signal: bool
    ) -> None:
        self._stream, self._strategy = stream, strategy
        self._requests, self._until_signal = requests, until_signal
        self.repeated: Any = None

    def __iter__(self) -> Iterator[tuple[Any, bool]]:
        """Yield batches, each with whether a signal in any process ends the validation.

        A batch is None while only other processes have more. The processes agree on signals: one
        that comes right after an agreement waits for the next, or this process would end alone.
        """
        if self._strategy.alone:
            for batch in self._stream.tuples():
                yield batch, self._has_signal()
            return
        is_empty = True
        for batches in self._stream.tuples_by_loader():  # all processes begin each loader together
            while True:
                loaded: Any = None
                has_ended = False  # whether the signal has also ended the workers of the loader
                try:
                    loaded = next(batches, None)
                except RuntimeError as error:
                    if not self._until_signal or not has_ended_workers(error, self._requests):
                        raise
                    has_ended = True
                has_more = loaded is not None or has_ended
                more, signaled = self._strategy.any_rank(has_more, self._has_signal())
                if not more:
                    break
                is_empty = False
                if self._strategy.forward_is_collective and not signaled:
                    self._keep(loaded)
                yield loaded, signaled
        if is_empty:
            raise TrainingError("The validation loaders gave no batch in any process.")

    def _has_signal(self) -> bool:
        return self._until_signal and self._requests.signal is not None

    def _keep(self, loaded: Any) -> None:
        """Keep a batch to repeat; from another process, if this one has none."""
        if loaded is not None:
            self.repeated = loaded[0]
        has_none = loaded is None and self.repeated is None
        (missing,) = self._strategy.any_rank(has_none)
        if missing:
            kept = self._strategy.processes.gather(self.repeated)
            if self.repeated is None:
                self.repeated = next(batch for batch in kept if batch is not None)


def has_ended_workers(error: RuntimeError, requests: ControlRequests) -> bool:
    """Return whether a signal to all processes of the job has ended a loader's workers."""
    return requests.signal is not None and "DataLoader worker" in str(error)
