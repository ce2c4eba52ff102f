"""Validation: one pass over the validation data, with its events and the means of its metrics."""

from __future__ import annotations

from typing import Any

from hookline.context import LazyFloat, Metrics
from hookline.loop.evaluation import evaluation, samples_in
from hookline.loop.means import Means
from hookline.trainer.data_stream import Stream
from hookline.trainer.losses import LossComputer
from hookline.trainer.strategies import SingleProcess
from hookline.trainer.trainer_context import TrainerEventContext

__all__ = ["validate"]


def validate(
    stream: Stream,
    context: TrainerEventContext,
    dispatchers: Any,
    strategy: SingleProcess,
    compute_loss: LossComputer,
) -> Metrics:
    """Return the mean metrics over the stream, weighted by the batches' sizes.

    The model's mode, the random states and the batch in the context are the same afterwards.
    """
    train_batch = context.batch, context.batch_idx, context.dataloader_idx, context.dataloader_name
    means = Means()
    context.evaluating = True
    with evaluation(context.model, strategy.device):
        if dispatchers.on_validation_start is not None:
            dispatchers.on_validation_start(context)
        for batch, batch_idx, loader_idx, loader_name in stream.tuples():
            context.batch, context.batch_idx = batch, batch_idx
            context.dataloader_idx, context.dataloader_name = loader_idx, loader_name
            context.made_metrics = None
            if dispatchers.on_validation_batch_start is not None:
                dispatchers.on_validation_batch_start(context)
            with strategy.autocast():
                loss, extra = compute_loss(context.model, strategy.move(batch))
            weight = float(samples_in(batch))
            for name, value in {"loss": loss, **extra}.items():
                means.add(f"val/{name}", value, weight)
                if len(stream.names) > 1:
                    means.add(f"val/dl_{loader_name}/{name}", value, weight)
            if dispatchers.on_validation_batch_end is not None:
                context.loss, context.extra = LazyFloat(loss.detach()), dict(extra)
                dispatchers.on_validation_batch_end(context)
        context.made_metrics = metrics = Metrics(means.means())
        if dispatchers.on_validation_end is not None:
            dispatchers.on_validation_end(context)
    context.evaluating = False
    context.batch, context.batch_idx, context.dataloader_idx, context.dataloader_name = train_batch
    return metrics
