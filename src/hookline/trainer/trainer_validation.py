"""Validation: on request, between two steps and after an epoch; a signal may end it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hookline.context import LazyFloat, Metrics
from hookline.errors import CheckpointError, TrainingError
from hookline.loop.evaluation import evaluation, samples_in
from hookline.loop.means import Means
from hookline.loop.random_state import generator_state, generators_of, set_generator_state
from hookline.loop.weight_sharing import share_buffers
from hookline.trainer.data_stream import Stream
from hookline.trainer.rank_checks import require_all_processes
from hookline.trainer.trainer_base import Phase
from hookline.trainer.trainer_checkpoint import decode_states, encode_states
from hookline.trainer.trainer_saving import TrainerSaving

__all__ = ["TrainerValidation"]


class TrainerValidation(TrainerSaving):
    """A trainer that validates."""

    def validate(self, loaders: Any = None) -> Metrics:
        """Validate, and return the metrics: means, weighted by the sizes of the batches.

        The model's mode, the random states and the batch in the context do not change.
        """
        require_all_processes(self, "trainer.validate()")
        stream = self.val_data
        if loaders is not None:
            stream = self._val_stream(loaders)
        metrics = self._validate(stream)
        assert metrics is not None  # only a signal would end it, and nothing looks for signals
        return metrics

    def _validate(self, stream: Stream | None, *, until_signal: bool = False) -> Metrics | None:
        """Validate and return the metrics; None if a signal has ended it."""
        if stream is None:
            raise TrainingError("There is no data to validate on. Give val_loaders to fit().")
        with self._phases.span("validation"):
            return self._run_validation(stream, until_signal=until_signal)

    def _run_validation(self, stream: Stream, *, until_signal: bool) -> Metrics | None:
        context, fire = self._context, self._dispatchers
        is_canceled = False
        train_batch = context.batch, context.batch_idx
        train_loader = context.dataloader_idx, context.dataloader_name
        means = Means()
        if not self.strategy.alone:
            share_buffers(self.model)  # those of rank 0, which checkpoints have
        context.evaluating = True
        with evaluation(self.model, self.device):
            if fire.on_validation_start is not None:
                fire.on_validation_start(context)
            for loaded, signaled in self._validation_batches(stream, until_signal):
                if signaled:
                    is_canceled = True
                    break
                if loaded is None:  # only other processes have a batch
                    if self.strategy.forward_is_collective:
                        self.compute_loss(self._batch_to_repeat)
                    continue
                batch, batch_idx, loader_idx, loader_name = loaded
                context.batch, context.batch_idx = batch, batch_idx
                context.dataloader_idx, context.dataloader_name = loader_idx, loader_name
                context.made_metrics = None
                if fire.on_validation_batch_start is not None:
                    fire.on_validation_batch_start(context)
                loss, extra = self.compute_loss(batch)
                weight = float(samples_in(batch))
                for name, value in {"loss": loss, **extra}.items():
                    means.add(f"val/{name}", value, weight)
                    if len(stream.names) > 1:
                        means.add(f"val/dl_{loader_name}/{name}", value, weight)
                if fire.on_validation_batch_end is not None:
                    context.loss, context.extra = LazyFloat(loss.detach()), dict(extra)
                    fire.on_validation_batch_end(context)
            context.made_metrics = metrics = Metrics(self._means_of_all(means))
            if fire.on_validation_end is not None and not is_canceled:
                fire.on_validation_end(context)
        context.evaluating = False
        context.batch, context.batch_idx = train_batch
        context.dataloader_idx, context.dataloader_name = train_loader
        if is_canceled:
            return None
        self._position.validated = dict.copy(metrics)
        self._recorder.metrics(context.step, context.epoch, metrics)
        self._progress.validation(metrics, context.epoch, context.step)
        if "val/accuracy" in metrics:
            self.best_accuracy = max(self.best_accuracy, float(metrics["val/accuracy"]))
        return metrics

    def _validation_batches(self, stream: Stream, until_signal: bool) -> Iterator[tuple[Any, bool]]:
        """Iterate over batches, each with whether a signal in any process ends the validation.

        A batch is None while only other processes have more. The processes agree on signals: one
        that comes right after an agreement waits for the next, or this process would end alone.
        """
        requests = self._requests
        if self.strategy.alone:
            for batch in stream.tuples():
                yield batch, until_signal and requests.signal is not None
            return
        is_empty = True
        self._batch_to_repeat = None
        for batches in stream.tuples_by_loader():  # all processes begin each loader together
            while True:
                loaded: Any = None
                has_ended = False  # whether the signal has also ended the workers of the loader
                try:
                    loaded = next(batches, None)
                except RuntimeError as error:
                    if not until_signal or not self._ended_workers(error):
                        raise
                    has_ended = True
                signal_came = until_signal and requests.signal is not None
                more, signaled = self.strategy.any_rank(
                    loaded is not None or has_ended, signal_came
                )
                if not more:
                    break
                is_empty = False
                if self.strategy.forward_is_collective and not signaled:
                    self._keep_batch_to_repeat(loaded)
                yield loaded, signaled
        if is_empty:
            raise TrainingError("The validation loaders gave no batch in any process.")

    def _ended_workers(self, error: RuntimeError) -> bool:
        """Return whether a signal to all processes of the job has ended a loader's workers."""
        return self._requests.signal is not None and "DataLoader worker" in str(error)

    def _keep_batch_to_repeat(self, loaded: Any) -> None:
        """Keep a batch for when this process has none and others call the model."""
        if loaded is not None:
            self._batch_to_repeat = loaded[0]
        has_none = loaded is None and self._batch_to_repeat is None
        (missing,) = self.strategy.any_rank(has_none)
        if missing:
            kept = self.strategy.processes.gather(self._batch_to_repeat)
            if self._batch_to_repeat is None:
                self._batch_to_repeat = next(batch for batch in kept if batch is not None)

    # -- within training ----------------------------------------------------------------------

    def _validate_in_loop(self) -> None:
        """Validate, unless a signal ends it: then save the state from before it, and leave."""
        assert self.val_data is not None
        if not self.strategy.alone:
            self._step_records.report(self._recorder.sink)  # before the values of the validation
        state = self._state_before_validation()
        generators = [(g, generator_state(g)) for g in generators_of(self.val_data.loaders)]
        phase, self._phase = self._phase, Phase.IN_STEP  # checkpoints wait for its end
        try:
            metrics = self._validate(self.val_data, until_signal=True)
        except RuntimeError as error:
            if not self._ended_workers(error):
                raise
            metrics = None
        self._phase = phase
        if metrics is None:
            self._cancel_validation(state, generators)
            self._leave()

    def _state_before_validation(self) -> Any:
        """Return the encoded state that hooks may change in a validation.

        None if it cannot be saved: the error is raised when a checkpoint is saved.
        """
        try:
            return encode_states(
                {
                    "hooks": self.hooks.state_dict(),
                    "attributes": self._attribute_states(),
                    "run": self._recorder.position(),  # of the metrics log
                }
            )
        except CheckpointError:
            return None

    def _cancel_validation(self, state: Any, generators: list[tuple[Any, Any]]) -> None:
        """Undo a validation that does not end: it is repeated after resuming.

        Args:
            state: what `_state_before_validation` returned.
            generators: the generators of the validation loaders, with their states before it.
        """
        for generator, saved in generators:
            set_generator_state(generator, saved)
        for name in self.hooks:
            cancel = getattr(self.hooks.get_hook(name), "cancel_validation", None)
            if cancel is not None:
                cancel()
        self._before_validation = {} if state is None else decode_states(state)
