"""Hooks in a Lightning `Trainer`, of the package `lightning` or `pytorch_lightning`.

    session = hookline.attach(trainer, hooks=[Watch()])
    trainer.fit(model, loader)

A callback of the trainer says where training is. Only public parts of Lightning are used;
`Trainer.save_checkpoint` is wrapped on this trainer while it trains, and `remove_checkpoint` on its
strategy.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hookline.arguments import check_name
from hookline.dispatch import HookLike, HookManager
from hookline.errors import LoopError
from hookline.integrations import session_state
from hookline.integrations.attach import callback_options
from hookline.integrations.bare_loop.loop_parts import unwrap_optimizer
from hookline.integrations.library import Library, of_phase
from hookline.integrations.library_session import LibrarySession
from hookline.integrations.lightning_parts import (
    SavedCheckpoints,
    callback_classes,
    called_parts,
    find_package,
    writes_in_background,
)
from hookline.loop.event_context import parameters_of
from hookline.loop.model_watch import ForwardTargets
from hookline.loop.rank_sync import is_sharded_loop, trains_together
from hookline.tensors.full_tensor import full_tensor

if TYPE_CHECKING:
    from lightning.pytorch import Callback as _Callback
    from lightning.pytorch import LightningModule, Trainer
else:
    _Callback = type("_Callback", callback_classes(), {})

log = logging.getLogger("hookline")

LIBRARY = Library(
    name="a Lightning Trainer",
    places={
        "on_train_start": "`Callback.on_train_start`, after the sanity check",
        "on_epoch_start": "`Callback.on_train_epoch_start`",
        "on_train_batch_start": "`Callback.on_train_batch_start`",
        "on_before_forward": "the first call of the LightningModule, or of a child with "
        "parameters, begins",
        "on_after_forward": "this call has returned",
        "on_before_backward": "`Callback.on_before_backward`",
        "on_train_batch_end": "the last optimizer has stepped; without a step "
        "`Callback.on_train_batch_end`",
        "on_validation_start": "`Callback.on_validation_start`",
        "on_validation_batch_start": "`Callback.on_validation_batch_start`",
        "on_validation_batch_end": "`Callback.on_validation_batch_end`",
        "on_validation_end": "`Callback.on_validation_end`",
        "on_epoch_end": "`Callback.on_train_epoch_end`",
        "on_checkpoint_save": "before the next batch, validation or end of an epoch, when "
        "`Trainer.save_checkpoint` has written the file",
        "on_checkpoint_load": "`Callback.on_train_start` of `fit(ckpt_path=…)`",
        "on_exception": "`Callback.on_exception`",
        "on_train_end": "`Callback.on_train_end`, or `Callback.on_exception`",
    },
    missing={},
    provided=frozenset({"epoch", "batches", "backward", "validation", "checkpoint", "resumed"}),
    calls={
        "tokens": "Its batches have no `input_ids`: say how to count, `attach(…, tokens=…)`.",
        "validation": "It validates only with a `validation_step` and `fit(…, val_dataloaders=…)`.",
        "checkpoint": "It saves only with a ModelCheckpoint.",
        "resumed": "It loads a checkpoint in `fit(ckpt_path=…)`.",
        "clip": "It clips only with Trainer(gradient_clip_val=…).",
        "forward": "Call the LightningModule or a child with parameters, as `self.net(x)`. In a "
        "LightningModule that is compiled as a whole, calls are not seen: compile the child, "
        "`self.net = torch.compile(self.net)`.",
        "backward": "The loss is read from backward.",
        "config": "The LightningModule has none: call `self.save_hyperparameters()` in it, or give "
        "one to attach: `attach(…, config=…)`.",
    },
)


class HooklineCallback(_Callback):
    """Hooks as a callback: `Trainer(callbacks=[HooklineCallback([Watch()], runs="runs")])`.

    Its options are those of `hookline.attach`, and one more.

    Args:
        key: tells the states of several of these callbacks apart in checkpoints.

    Attributes:
        session: the session, as `hookline.attach(trainer, …)` returns it.
    """

    def __init__(
        self,
        hooks: Iterable[HookLike] | HookManager = (),
        *,
        key: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if key is not None:
            check_name("HooklineCallback(…, key=…)", key)
        self._key, self._options = key, options
        self._make_session(hooks)
        self._trainer: Trainer | None = None
        self._saved: SavedCheckpoints | None = None
        self._loaded: Any = None  # the state in the checkpoint that `fit` has loaded
        self._last_state: dict[str, Any] | None = None  # at the end of training
        self._in_epoch = False
        self._is_between_steps = True
        self._host_step = 0  # under which the trainer logs what this batch gives
        self._metrics = LoggedMetrics()

    def _make_session(self, hooks: Iterable[HookLike] | HookManager) -> None:
        self.session = LibrarySession(
            LIBRARY,
            callback_options(hooks, self._options),
            forwards_logs=True,
            batch_metrics=lambda: self._metrics.take_batch(self._trainer),
        )
        self._process = os.getpid()

    def __deepcopy__(self, memo: Any) -> _Callback:
        """Return a callback that does nothing: hooks belong to one training run."""
        self.session.warn_about_copy()
        return _NoHooks()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle hooks that have not trained, for strategies that spawn processes; else nothing."""
        if self.session.started or self.session.has_ended:
            self.session.warn_about_copy()
            return _NoHooks, ()
        return _make_callback, (self.session.hooks, self._key, self._options)

    @property
    def state_key(self) -> str:
        return "HooklineCallback" if self._key is None else f"HooklineCallback[{self._key}]"

    # -- start and end ----------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if self._process != os.getpid() and not self.session.started:
            self._make_session(self.session.hooks)  # a strategy has forked this process
        if self.session.started or self.session.has_ended:
            raise LoopError(
                "This trainer fits a second time, and a session belongs to one training. Before "
                "the second `fit`, attach again (`hookline.attach(trainer, …)`), or make another "
                "Trainer with another HooklineCallback."
            )
        self._trainer, self._loaded = trainer, None
        self.session.add_undo(self._leave)
        context = self.session.loop.context
        self._saved = SavedCheckpoints(trainer, lambda: (context.step, context.known("epoch")))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with self.session.starting():
            self._begin(trainer, pl_module)

    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        session = self.session
        optimizers = [unwrap_optimizer(optimizer) for optimizer in trainer.optimizers]
        outer = trainer.model
        if not any(optimizer.param_groups for optimizer in optimizers):
            self._refuse(
                "This LightningModule has no optimizer, so no step can be seen. Return one from "
                "`configure_optimizers`, or train without hooks."
            )
        if trainer.world_size > 1 and not trains_together(outer or pl_module, optimizers):
            self._refuse(
                f"{trainer.world_size} processes train, and each has a model of its own: this "
                "LightningModule is neither in DDP nor sharded over several of them. In "
                "`configure_model`, shard it over the mesh of `ModelParallelStrategy(…)`."
            )
        if writes_in_background(trainer.strategy.checkpoint_io):
            self._refuse(
                "AsyncCheckpointIO writes in the background, and does not say when a checkpoint is "
                "complete. Use another checkpoint plugin to train with hooks."
            )
        if pl_module.hparams:
            session.use_config(pl_module.hparams)
        session.connect(
            pl_module,
            optimizers,
            schedulers=[config.scheduler for config in trainer.lr_scheduler_configs],
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            signals=None,  # Lightning's own handlers: SIGTERM, Ctrl-C, a scheduler's requeue
            called=ForwardTargets(called_parts(pl_module), None if outer is pl_module else outer),
            ends_with_batch=not pl_module.automatic_optimization,
        )
        self._restore(trainer, len(optimizers))
        session.begin()

    def _refuse(self, problem: str) -> None:
        error = LoopError(problem)
        self.session.abandon(error)
        raise error

    def _restore(self, trainer: Trainer, optimizers: int) -> None:
        """Continue from the checkpoint that `fit` has loaded, if there is one."""
        if not trainer.ckpt_path:
            return
        path = Path(trainer.ckpt_path)
        if self._loaded is None and not trainer.global_step:
            return  # a copy of the start, as LearningRateFinder makes it
        state = None if self._loaded is None else session_state.unpack_state(self._loaded, path)
        self._loaded = None
        self.session.restore(path, state, step=trainer.global_step // optimizers)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        session = self.session
        if not session.is_training:
            return
        self._notify_saved()
        session.end_resumed_epoch()  # if no epoch was left
        if trainer.should_stop and not session.should_stop:
            session.stop("trainer.should_stop was set")
        self._keep_state(in_all_ranks=True)
        session.detach()
        self._log_to_trainer(of_steps=self._logs_steps(trainer))  # what has waited

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        session = self.session
        exceptions = find_package(trainer).utilities.exceptions
        is_signal = isinstance(exception, exceptions.SIGTERMException)
        if session.is_training:
            self._notify_saved()
            self._keep_state(in_all_ranks=is_signal)  # of which Lightning tells all of them
            if is_signal:
                session.preempt()
        session.leave(exception)
        self._release()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            if self.session.started:
                self.session.detach()
            self._release()
            if trainer.fit_loop.skip:  # else this was no training, as `Tuner.lr_find`
                self.session.detach()

    def join(self, trainer: Trainer, key: str | None) -> None:
        """Prepare for a trainer that this callback is added to, with a key as for `__init__`."""
        self._trainer, self._key = trainer, key
        self.session.add_undo(self._leave)

    def _leave(self) -> None:
        """Leave the trainer as it was, if training has not started with these hooks."""
        trainer: Any = self._trainer
        has_trained = self.session.started and not self.session.has_failed_to_start
        if trainer is not None and not has_trained:
            self._release()
            # Another list: the trainer may be calling its callbacks now.
            trainer.callbacks = [each for each in trainer.callbacks if each is not self]

    def _release(self) -> None:
        if self._saved is not None:
            self._saved.detach()
        self._saved = self._trainer = None

    # -- epochs, batches, steps -------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_epoch(trainer)

    def _start_epoch(self, trainer: Trainer) -> None:
        """Begin an epoch; a resumed one has no `on_train_epoch_start`."""
        if self.session.is_training and not self._in_epoch:
            self._notify_saved()
            self._in_epoch = True
            self.session.start_epoch(trainer.current_epoch)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self.session.is_training:
            return
        self._start_epoch(trainer)
        self._notify_saved()
        automatic = pl_module.automatic_optimization
        self._host_step = trainer.global_step if automatic else self.session.step
        divisor = float(trainer.accumulate_grad_batches) if automatic else None
        self.session.start_batch(batch, divisor=divisor, idx=batch_idx)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor
    ) -> None:
        if not self.session.is_training:
            return
        scaler = self.session.scaler
        if scaler is not None and scaler.is_enabled():
            loss = loss / scaler.scale(torch.ones_like(loss))
        self.session.before_backward(loss)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        session, own = self.session, unwrap_optimizer(optimizer)
        if not session.is_training or not session.is_watched(own):
            return
        if all(parameter.grad is None for parameter in parameters_of(own)):
            session.skip_optimizer_step(session.optimizers.index(own), "there are no gradients")
        elif pl_module.automatic_optimization and session.scaler is None:
            fire = session.hooks.dispatchers
            if fire.on_gradients_ready is not None or fire.update is not None:
                session.updates(own)  # from here, the module may change gradients by hand

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if not self.session.is_training:
            return
        self._is_between_steps = self.session.end_batch()
        if self._is_between_steps:
            self._record(trainer)
            if self.session.has_logged:
                self._log_to_trainer(of_steps=self._logs_steps(trainer, self._host_step))
        self._request_stop(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.session.is_training:
            return
        self._notify_saved()
        if self._in_epoch:
            self._in_epoch, self._is_between_steps = False, True
            self._record(trainer)
            self.session.end_epoch(trainer.callback_metrics)
            self._log_to_trainer(of_steps=False)
        self._request_stop(trainer)

    def _request_stop(self, trainer: Trainer) -> None:
        """Let the trainer stop between two steps, if a hook asks for it."""
        if self._is_between_steps and self.session.take_stop():
            trainer.should_stop = True

    # -- metrics ----------------------------------------------------------------------------------

    def _record(self, trainer: Trainer) -> None:
        """Record what the module has logged since the last time."""
        if self.session.loop.record.is_wanted:
            self.session.record_values(self._metrics.take_record(trainer))

    def _logs_steps(self, trainer: Any, step: int | None = None) -> bool:
        """Return whether the trainer logs what the module logs in steps; or in this one."""
        every = trainer.log_every_n_steps
        if step is None or not every:
            return bool(every)
        return bool((step + 1) % every == 0 or trainer.should_stop or trainer.fast_dev_run)

    def _log_to_trainer(self, *, of_steps: bool) -> None:
        """Give the trainer's loggers what hooks have logged; see `take_logged`."""
        assert self._trainer is not None
        if values := self.session.take_logged(of_steps=of_steps):
            for logger in self._trainer.loggers:
                logger.log_metrics(metrics=values, step=self._host_step)

    # -- validation -------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.session.is_training:
            return  # the sanity check, or `trainer.validate`
        self._notify_saved()
        self._metrics.start_validation(trainer)
        self.session.start_validation()

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self.session.is_training:
            self.session.start_validation_batch(batch, batch_idx, dataloader_idx)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self.session.is_training:
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            self.session.end_validation_batch(loss)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.session.is_training:
            return
        self.session.end_validation(self._metrics.take_validation(trainer))
        self._log_to_trainer(of_steps=False)
        self._request_stop(trainer)

    # -- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if self._last_state is not None:
            return self._last_state
        if not self.session.is_training:
            return {}
        if self.session.run is not None:
            self.session.run.flush(durable=True)  # the state has the record's length
        return session_state.pack_state(full_tensor(self.session.collect_state()))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    def _keep_state(self, *, in_all_ranks: bool) -> None:
        """Keep the state: Lightning's own callbacks may save once more after training has ended.

        Where a rank fails alone, what is sharded cannot be gathered: then there is none.
        """
        is_sharded = is_sharded_loop(self.session.optimizers)
        self._last_state = self.state_dict() if in_all_ranks or not is_sharded else {}

    def _notify_saved(self) -> None:
        """Fire `on_checkpoint_save` for what has been written since the last time."""
        if self._saved is None:
            return
        for path, step, epoch in self._saved.take():
            if self.session.is_training:
                self.session.notify_checkpoint_saved(path, step=step, epoch=epoch)


class LoggedMetrics:
    """The metrics of a Lightning Trainer, as far as they are new.

    It keeps the values of earlier batches beside those of this one.
    """

    def __init__(self) -> None:
        self._recorded: dict[str, Any] = {}  # what the run has already
        self._shown: dict[str, Any] = {}  # what hooks have had as metrics of batches
        self._before_validation: dict[str, Any] = {}

    def take_batch(self, trainer: Any) -> dict[str, Any]:
        """Return what the module has logged in this batch, under its own names."""
        return _take_new(trainer.callback_metrics, self._shown)

    def take_record(self, trainer: Any) -> dict[str, Any]:
        """Return what the module has logged since the last call.

        Reading it may be a collective: all processes do it, or none.
        """
        return _take_new(trainer.logged_metrics, self._recorded)

    def start_validation(self, trainer: Any) -> None:
        """Remember what was logged before a validation."""
        self._before_validation = dict(trainer.callback_metrics)

    def take_validation(self, trainer: Any) -> dict[str, Any]:
        """Return the metrics of the validation that has ended."""
        new = _new_values(trainer.callback_metrics, self._before_validation)
        self._before_validation = {}
        self._recorded |= new
        self._shown |= new
        return of_phase(new, "val")


def _take_new(values: Mapping[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """Return the values that are not known yet, and add them to those that are."""
    new = _new_values(values, known)
    known |= values
    return new


def _new_values(values: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    return {name: v for name, v in values.items() if not _is_same(v, known.get(name))}


def _is_same(value: Any, known: Any) -> bool:
    """Return whether two values are the same tensor; the trainer detaches it at each access."""
    if isinstance(value, torch.Tensor) and isinstance(known, torch.Tensor):
        return value.data_ptr() == known.data_ptr()
    return value is known


class _NoHooks(_Callback):
    """The copy of a `HooklineCallback`, in the copy of a trainer."""


def _make_callback(
    hooks: HookManager, key: str | None, options: Mapping[str, Any]
) -> HooklineCallback:
    """Return what a pickled callback is in another process."""
    return HooklineCallback(hooks, key=key, **options)


def _own_callbacks(trainer: Any) -> list[HooklineCallback]:
    return [each for each in trainer.callbacks if isinstance(each, HooklineCallback)]


def attach_to_trainer(trainer: Any, options: Mapping[str, Any]) -> LibrarySession:
    """Attach hooks to a Lightning trainer; see `hookline.attach`."""
    package = find_package(trainer)
    kind: type[HooklineCallback] = HooklineCallback
    if not issubclass(kind, package.Callback):  # the other package was imported first
        kind = type("HooklineCallback", (HooklineCallback, package.Callback), {})
    callback = kind(**options)
    callback.session.replace_equal(each.session for each in _own_callbacks(trainer))
    for ended in [each for each in _own_callbacks(trainer) if each.session.has_ended]:
        trainer.callbacks.remove(ended)
    own = _own_callbacks(trainer)
    callback.join(trainer, str(len(own) + 1) if own else None)
    first = package.callbacks.Checkpoint
    places = [i for i, each in enumerate(trainer.callbacks) if isinstance(each, first)]
    trainer.callbacks.insert(min(places, default=len(trainer.callbacks)), callback)
    return callback.session
