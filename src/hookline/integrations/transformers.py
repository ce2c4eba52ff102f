"""Hooks in a Hugging Face `Trainer`, TRL's trainers included.

    session = hookline.attach(trainer, hooks=[Watch()])
    trainer.train()

A callback of the trainer says where training is. Callbacks get neither batches nor the trainer, so
five of the trainer's public methods are wrapped on this object while it is attached: `train`,
`training_step`, `evaluate`, `prediction_step` and `save_model`; and `on_log` of its callback
handler, so that the trainer's loggers get what hooks log whenever the trainer logs.

The trainer would delete old checkpoints (`save_total_limit`) before a new one has the hooks' state
and a completion file. So its limit is taken away meanwhile, and applied after that.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import rotate_checkpoints

from hookline.checkpoint.completion_files import HOOKS_FOLDER
from hookline.dispatch import HookLike, HookManager
from hookline.errors import ArgumentError, LoopError
from hookline.integrations import session_state
from hookline.integrations.attach import callback_options
from hookline.integrations.bare_loop.loop_parts import unwrap_optimizer
from hookline.integrations.library import Library
from hookline.integrations.library_session import LibrarySession
from hookline.loop.patches import WrappedMethods, calling_frames, find_frame

LIBRARY = Library(
    name="a Hugging Face Trainer",
    places={
        "on_train_start": "`TrainerCallback.on_train_begin`",
        "on_epoch_start": "`TrainerCallback.on_epoch_begin`",
        "on_train_batch_start": "before `Trainer.training_step`",
        "on_train_batch_end": "`TrainerCallback.on_substep_end`, or when the optimizer has stepped",
        "on_validation_start": "before `Trainer.evaluate`",
        "on_validation_batch_start": "before `Trainer.prediction_step`",
        "on_validation_batch_end": "after `Trainer.prediction_step`",
        "on_validation_end": "after `Trainer.evaluate`",
        "on_epoch_end": "`TrainerCallback.on_epoch_end`",
        "on_checkpoint_save": "`TrainerCallback.on_save`, when the files are on the disk",
        "on_checkpoint_load": "`TrainerCallback.on_train_begin` of a resumed run",
        "on_exception": "`Trainer.train` raises",
        "on_train_end": "`TrainerCallback.on_train_end`",
    },
    missing={
        "on_before_backward": "its loss goes from `compute_loss` into backward, where no callback "
        "sees it. `on_after_forward` and `on_after_backward` are there."
    },
    provided=frozenset({"epoch", "batches", "validation", "checkpoint", "resumed"}),
    calls={
        "tokens": "Its batches have no `input_ids`: say how to count, `attach(…, tokens=…)`.",
        "validation": "It evaluates only with TrainingArguments(eval_strategy=…) and an "
        "eval_dataset.",
        "checkpoint": "It saves only with TrainingArguments(save_strategy=…).",
        "resumed": "It loads a checkpoint in train(resume_from_checkpoint=…).",
        "clip": "It clips only with TrainingArguments(max_grad_norm=…) above 0.",
        "backward": "The loss is read from backward.",
    },
)


class HooklineCallback(TrainerCallback):
    """Hooks as a callback: `Trainer(…, callbacks=[HooklineCallback([Watch()], runs="runs")])`.

    Its options are those of `hookline.attach`.

    Attributes:
        session: the session, as `hookline.attach(trainer, …)` returns it.
    """

    def __init__(
        self,
        hooks: Iterable[HookLike] | HookManager = (),
        **options: Any,
    ) -> None:
        self.session = LibrarySession(LIBRARY, callback_options(hooks, options), forwards_logs=True)
        self._trainer: Trainer | None = None
        self._epoch: int | None = None
        self._save_limit: int | None = None  # of the trainer, while it deletes no checkpoints
        self._wrapped = WrappedMethods()
        self._logs_own = self._epoch_has_ended = self._saves_for_signal = False
        self._validation_depth = self._validation_batches = 0

    def __deepcopy__(self, memo: Any) -> TrainerCallback:
        """Return a callback that does nothing: hooks belong to one training run."""
        self.session.warn_about_copy()
        return _NoHooks()

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.session.warn_about_copy()
        return _NoHooks, ()

    # -- the trainer ------------------------------------------------------------------------------

    def bind(self, trainer: Trainer) -> None:
        """Wrap the trainer's methods that callbacks do not show."""
        if trainer.args.auto_find_batch_size:
            raise LoopError(
                "TrainingArguments(auto_find_batch_size=True) starts training several times, and a "
                "session belongs to one. Choose the batch size, and attach again."
            )
        self._trainer, wrap = trainer, self._wrapped.wrap
        self.session.add_undo(self._unbind)
        wrap(trainer, "train", self._train)
        wrap(trainer, "training_step", self._training_step)
        wrap(trainer, "evaluate", self._evaluate)
        wrap(trainer, "prediction_step", self._prediction_step)
        wrap(trainer, "save_model", self._save_model)
        wrap(trainer.callback_handler, "on_log", self._on_log)

    def _unbind(self) -> None:
        """Put the trainer's own methods back, and its limit, if saving has failed."""
        trainer = self._trainer
        assert trainer is not None
        self._give_back_limit(trainer.args)
        self._wrapped.restore()
        has_trained = self.session.started and not self.session.has_failed_to_start
        if not has_trained and self in trainer.callback_handler.callbacks:
            trainer.remove_callback(self)
        if type(trainer) not in weakref.ProxyTypes:  # it has this callback: else only gc frees it
            self._trainer = weakref.proxy(trainer)

    def _find_trainer(self) -> Trainer:
        """Return the trainer that calls this callback: it is not among a callback's arguments."""
        for frame in calling_frames():
            caller = frame.f_locals.get("self")
            if isinstance(caller, Trainer) and self in caller.callback_handler.callbacks:
                return caller
        raise LoopError("HooklineCallback is called by something else than a transformers.Trainer.")

    # -- wrapped methods --------------------------------------------------------------------------

    def _train(self, train: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            result = train(*args, **kwargs)
        except BaseException as error:
            self.session.leave(error)
            raise
        self.session.leave()
        if self.session.received_signal == "SIGINT":
            raise KeyboardInterrupt
        return result

    def _training_step(
        self, training_step: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self.session.is_training and self._trainer is not None:
            divisor = self._trainer.current_gradient_accumulation_steps
            self.session.start_batch(inputs, divisor=divisor)
        return training_step(model, inputs, *args, **kwargs)

    def _evaluate(self, evaluate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.session.is_training or self._validation_depth:
            return evaluate(*args, **kwargs)  # of several data sets, or outside of training
        self._validation_depth, self._validation_batches = 1, 0
        self.session.start_validation()
        try:
            metrics = evaluate(*args, **kwargs)
            self.session.end_validation(metrics)
        finally:
            self._validation_depth = 0
            self.session.leave_validation()
        self._log_to_trainer()
        self._end_epoch()
        assert self._trainer is not None
        self._request_stop(self._trainer.control)
        return metrics

    def _prediction_step(
        self,
        prediction_step: Callable[..., Any],
        model: Any,
        inputs: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not self._validation_depth:
            return prediction_step(model, inputs, *args, **kwargs)
        self.session.start_validation_batch(inputs, self._validation_batches)
        self._validation_batches += 1
        outputs = prediction_step(model, inputs, *args, **kwargs)
        self.session.end_validation_batch(outputs[0])
        return outputs

    def _save_model(
        self, save_model: Callable[..., Any], output_dir: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Save the model; within a checkpoint, let the trainer delete no other one for now."""
        result = save_model(output_dir, *args, **kwargs)
        trainer = self._trainer
        if trainer is None or not self.session.is_training or output_dir is None:
            return result
        own = trainer.args
        is_checkpoint = Path(output_dir) == _checkpoint_folder(own, trainer.state)
        if is_checkpoint and own.save_total_limit is not None:
            self._save_limit, own.save_total_limit = own.save_total_limit, None
        return result

    def _give_back_limit(self, args: TrainingArguments) -> None:
        """Let the trainer delete old checkpoints again: the new one is complete, or has failed."""
        if self._save_limit is not None:
            args.save_total_limit, self._save_limit = self._save_limit, None

    def _on_log(
        self,
        on_log: Callable[..., Any],
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any],
    ) -> Any:
        """Record what the trainer logs, and add what hooks have logged since the last time.

        Values of a validation are neither: it is recorded as a whole.
        """
        if self.session.is_training and not self._logs_own and not self._validation_depth:
            self.session.record_values(logs)
            logs = self.session.take_logged(of_steps=True) | dict(logs)
        return on_log(args, state, control, logs)

    def _log_to_trainer(self) -> None:
        """Give the trainer's loggers what hooks have logged of an epoch or a validation.

        It is not in the trainer's own history and averages.
        """
        values, trainer = self.session.take_logged(of_steps=False), self._trainer
        if not values:
            return
        assert trainer is not None
        control = trainer.control
        is_due, self._logs_own = control.should_log, True
        try:
            trainer.callback_handler.on_log(trainer.args, trainer.state, control, values)
        finally:
            control.should_log, self._logs_own = is_due, False

    # -- events -----------------------------------------------------------------------------------

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer is None:
            self.bind(self._find_trainer())

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with self.session.starting():
            self._begin(args, state)

    def _begin(self, args: TrainingArguments, state: TrainerState) -> None:
        trainer, session = self._trainer, self.session
        if trainer is None:
            raise LoopError(
                "HooklineCallback was added to a trainer that exists, whose `train` it cannot "
                "follow. Give it to `Trainer(…, callbacks=[…])`, or call "
                "`hookline.attach(trainer, hooks=[…])`."
            )
        if state.is_hyper_param_search:
            raise LoopError(
                "hyperparameter_search starts training several times, and a session belongs to "
                "one. Search without hooks, and attach to the training with what it has found."
            )
        session.use_config(args)
        optimizer = unwrap_optimizer(trainer.optimizer)
        model: Any = trainer.model_wrapped
        session.connect(
            model,
            [optimizer],
            schedulers=[] if trainer.lr_scheduler is None else [trainer.lr_scheduler],
            scaler=trainer.accelerator.scaler,
            signals=("SIGTERM", "SIGUSR1"),
        )
        if state.global_step:
            folder = _resumed_folder() or _checkpoint_folder(args, state)
            saved = session_state.load(folder, _hooks_folder(self, trainer))
            session.restore(folder, saved, step=state.global_step)
        session.begin()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.session.is_training:
            self._end_epoch()
            first = int((state.epoch or 0) + 1e-6)
            self._epoch = first if self._epoch is None else self._epoch + 1
            self.session.start_epoch(self._epoch)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.session.is_training:
            return
        self._epoch_has_ended = True
        self._request_stop(control)
        if not control.should_evaluate:  # else it ends after the validation that comes next
            self._end_epoch()
            self._request_stop(control)

    def _end_epoch(self) -> None:
        """End an epoch whose batches are over, unless that was done."""
        if self._epoch_has_ended and self.session.is_training:
            self._epoch_has_ended = False
            self.session.end_epoch()
            self._log_to_trainer()

    def _request_stop(self, control: TrainerControl) -> None:
        """Let the trainer stop, if hooks or a signal ask for it.

        After a signal the process is about to be killed: the trainer saves, and evaluates no more.
        """
        if self.session.take_stop():
            control.should_training_stop = True
            if self.session.ends_for_signal:
                control.should_evaluate = False
                control.should_save |= not self._saves_for_signal
                self._saves_for_signal = True

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.session.is_training:
            self.session.end_batch()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.session.is_training:
            assert self._trainer is not None
            self.session.is_watched(unwrap_optimizer(self._trainer.optimizer))
            self._request_stop(control)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self._trainer
        assert trainer is not None
        training = [each for each in _own_callbacks(trainer) if each.session.is_training]
        if self not in training:
            self._give_back_limit(args)
        elif self is training[-1]:  # which saves for all: there is one completion file
            for each in training:
                each.prepare_save(args)
            sessions = {_hooks_folder(each, trainer): each.session for each in training}
            folder = _save_sessions(trainer, sessions)
            for session in sessions.values():
                session.notify_checkpoint_saved(str(folder))

    def prepare_save(self, args: TrainingArguments) -> None:
        """Bring trainer and session to where the state of the hooks is saved."""
        self._give_back_limit(args)
        self._end_epoch()  # another callback has kept the trainer from validating

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end_epoch()
        if self.session.is_training:
            self.session.end_resumed_epoch()  # if no epoch was left
        self.session.detach()


class _NoHooks(TrainerCallback):
    """The copy of a `HooklineCallback`, in the copy of a trainer."""


def _own_callbacks(trainer: Trainer) -> list[HooklineCallback]:
    return [
        each for each in trainer.callback_handler.callbacks if isinstance(each, HooklineCallback)
    ]


def _hooks_folder(callback: HooklineCallback, trainer: Trainer) -> str:
    """Return where the state of these hooks is in a checkpoint: a trainer may have two sessions."""
    place = _own_callbacks(trainer).index(callback)
    return f"{HOOKS_FOLDER}_{place + 1}" if place else HOOKS_FOLDER


def _save_sessions(trainer: Trainer, sessions: Mapping[str, LibrarySession]) -> Path:
    """Save the state of all sessions, by folder, in the trainer's newest checkpoint.

    It gets a completion file, and older checkpoints are deleted. All ranks call this. It returns
    the checkpoint.
    """
    args, state = trainer.args, trainer.state
    folder = _checkpoint_folder(args, state)
    trainer.accelerator.wait_for_everyone()  # every rank writes its random states
    if session_state.save(sessions, folder) and args.should_save:
        best, limit = state.best_model_checkpoint, args.save_total_limit
        rotate_checkpoints(str(args.output_dir), limit, best, use_mtime=True)
    return folder


def _checkpoint_folder(args: TrainingArguments, state: TrainerState) -> Path:
    """Return the folder of the checkpoint that the trainer saves at this step."""
    return Path(str(args.output_dir), f"checkpoint-{state.global_step}")


def _resumed_folder() -> Path | None:
    """Return the checkpoint that the running `Trainer.train` has loaded."""
    frame = find_frame(Trainer.train)
    given = None if frame is None else frame.f_locals.get("resume_from_checkpoint")
    return Path(given) if isinstance(given, str | os.PathLike) else None


def attach_to_trainer(trainer: Any, options: Mapping[str, Any]) -> LibrarySession:
    """Attach hooks to a Hugging Face trainer; see `hookline.attach`."""
    if not isinstance(trainer, Trainer):
        raise ArgumentError(f"Expected a transformers.Trainer, not a {type(trainer).__name__}.")
    callback = HooklineCallback(**options)
    callback.session.replace_equal(each.session for each in _own_callbacks(trainer))
    for other in _own_callbacks(trainer):
        if other.session.has_ended:
            trainer.remove_callback(other)
    callback.bind(trainer)
    trainer.add_callback(callback)
    return callback.session
