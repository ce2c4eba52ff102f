"""Validation: its batches in one process or in several, its events, and its means."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from hookline.context import LazyFloat, Metrics
from hookline.errors import TrainingError
from hookline.loop.broadcasts import broadcast_buffers
from hookline.loop.control_requests import ControlRequests
from hookline.loop.evaluation import evaluation, samples_in
from hookline.loop.loop import Loop
from hookline.loop.means import Means
from hookline.trainer.data_stream import Stream
from hookline.trainer.strategies import SingleProcess


class Validation:
    """Validates a model on a stream, together with the other processes.

    The batch in the loop's context is the same afterwards.
    """

    def __init__(
        self,
        loop: Loop,
        strategy: SingleProcess,
        model: torch.nn.Module,
        compute_loss: Callable[[Any], tuple[torch.Tensor, Mapping[str, Any]]],
    ) -> None:
        self._loop, self._strategy, self._model = loop, strategy, model
        self._compute_loss = compute_loss
        self._repeated: Any = None  # a batch for when this process has none and others have

    def run(self, stream: Stream | None, *, until_signal: bool = False) -> Metrics | None:
        """Validate and return the metrics; None if a signal has ended it."""
        if stream is None:
            raise TrainingError("There is no data to validate on. Give val_loaders to fit().")
        context = self._loop.context
        train_batch = context.batch, context.batch_idx
        train_loader = context.dataloader_idx, context.dataloader_name
        self._repeated = None
        with self._loop.record.phases.span("validation"):
            if self._strategy.is_distributed:
                broadcast_buffers(self._model)  # those of rank 0, which checkpoints have
            context.evaluating = True
            with evaluation(self._model, self._strategy.device):
                metrics = self._run_batches(stream, until_signal=until_signal)
        self._repeated = None
        context.evaluating = False
        context.batch, context.batch_idx = train_batch
        context.dataloader_idx, context.dataloader_name = train_loader
        return metrics

    def _run_batches(self, stream: Stream, *, until_signal: bool) -> Metrics | None:
        loop, fire, means = self._loop, self._loop.hooks.dispatchers, Means()
        context, is_canceled = loop.context, False
        if fire.on_validation_start is not None:
            fire.on_validation_start(context)
        for loaded, signaled in self._batches(stream, until_signal=until_signal):
            if signaled:
                is_canceled = True
                break
            if loaded is None:  # only other processes have a batch
                if self._strategy.forward_is_collective:
                    self._compute_loss(self._repeated)
                continue
            batch, batch_idx, loader_idx, loader_name = loaded
            context.batch, context.batch_idx = batch, batch_idx
            context.dataloader_idx, context.dataloader_name = loader_idx, loader_name
            context.event_metrics = None
            if fire.on_validation_batch_start is not None:
                fire.on_validation_batch_start(context)
            loss, extra = self._compute_loss(batch)
            weight = float(samples_in(batch))
            for name, value in {"loss": loss, **extra}.items():
                means.add(f"val/{name}", value, weight)
                if len(stream.names) > 1:
                    means.add(f"val/dl_{loader_name}/{name}", value, weight)
            if fire.on_validation_batch_end is not None:
                context.loss, context.extra = LazyFloat(loss.detach()), dict(extra)
                fire.on_validation_batch_end(context)
        found = loop.ranks.means(means)
        return None if is_canceled else loop.end_validation(found)

    def _batches(self, stream: Stream, *, until_signal: bool) -> Iterator[tuple[Any, bool]]:
        """Yield batches, each with whether a signal in any process ends the validation.

        A batch is None while only other processes have more. The processes agree on signals: one
        that comes right after an agreement waits for the next, or this process would end alone.
        """
        requests, strategy = self._loop.requests, self._strategy
        if not strategy.is_distributed:
            for batch in stream.epoch():
                yield batch, until_signal and requests.signal is not None
            return
        is_empty = True
        for batches in stream.epoch_by_loader():  # all processes begin each loader together
            while True:
                loaded: Any = None
                has_ended = False  # whether the signal has also ended the workers of the loader
                try:
                    loaded = next(batches, None)
                except RuntimeError as error:
                    if not until_signal or not has_ended_workers(error, requests):
                        raise
                    has_ended = True
                has_signal = until_signal and requests.signal is not None
                has_none = loaded is None and self._repeated is None
                more, signaled, missing = strategy.processes.any(
                    loaded is not None or has_ended, has_signal, has_none
                )
                if not more:
                    break
                is_empty = False
                if strategy.forward_is_collective and not signaled:
                    self._repeated = self._repeated if loaded is None else loaded[0]
                    if missing:  # also a process without a batch has to call the model
                        kept = strategy.processes.gather(self._repeated)
                        self._repeated = next(batch for batch in kept if batch is not None)
                yield loaded, signaled
        if is_empty:
            raise TrainingError("The validation loaders gave no batch in any process.")


def has_ended_workers(error: RuntimeError, requests: ControlRequests) -> bool:
    """Return whether a signal to all processes of the job has ended a loader's workers."""
    return requests.signal is not None and "DataLoader worker" in str(error)
