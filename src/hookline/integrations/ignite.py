"""Hooks in an Ignite `Engine`.

    session = hookline.attach(
        trainer, model=model, optimizer=optimizer, evaluator=evaluator, hooks=[Watch()]
    )
    trainer.run(loader, max_epochs=3)

Handlers of the engines say where training is. They are added when `run` is called, so that they
come after the user's own: a validation in a handler of EPOCH_COMPLETED is over when `on_epoch_end`
is fired. The method `run` is wrapped on the engine while it is attached: a handler for
EXCEPTION_RAISED would keep the exception from being raised.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from ignite.engine import Engine, Events, RemovableEventHandle
from ignite.handlers.checkpoint import Checkpoint, CheckpointEvents

from hookline.arguments import describe_value
from hookline.checkpoint.atomic_files import sync
from hookline.context import to_float
from hookline.errors import ArgumentError
from hookline.integrations.attach import session_options
from hookline.integrations.bare_loop.loop_parts import loop_parts
from hookline.integrations.library import Library, of_phase
from hookline.integrations.library_session import LibrarySession
from hookline.loop.patches import WrappedMethods, find_frame
from hookline.loop.signals import SignalWatch

log = logging.getLogger("hookline")

LIBRARY = Library(
    name="an Ignite engine",
    places={
        "on_train_start": "`Events.STARTED` of the trainer",
        "on_epoch_start": "`Events.EPOCH_STARTED` of the trainer",
        "on_train_batch_start": "`Events.ITERATION_STARTED` of the trainer",
        "on_before_backward": "`session.backward(loss)`, which the process function has to call",
        "on_train_batch_end": "the optimizer has stepped, or `Events.ITERATION_COMPLETED`",
        "on_validation_start": "`Events.STARTED` of the evaluator",
        "on_validation_batch_start": "`Events.ITERATION_STARTED` of the evaluator",
        "on_validation_batch_end": "`Events.ITERATION_COMPLETED` of the evaluator",
        "on_validation_end": "`Events.COMPLETED` of the evaluator",
        "on_epoch_end": "`Events.EPOCH_COMPLETED` of the trainer, after other handlers",
        "on_checkpoint_save": "`CheckpointEvents.SAVED_CHECKPOINT`, by Ignite's `Checkpoint`",
        "on_checkpoint_load": "`Events.STARTED`, if the session was among the objects of "
        "`Checkpoint.load_objects`",
        "on_exception": "`Engine.run` raises, or `Events.EXCEPTION_RAISED`",
        "on_train_end": "`Engine.run` returns",
    },
    missing={},
    provided=frozenset({"epoch", "batches", "validation"}),
    calls={
        "tokens": "Its batches have no `input_ids`: say how to count, `attach(…, tokens=…)`.",
        "validation": "Give the engine that validates: `attach(…, evaluator=evaluator)`.",
        "checkpoint": "It saves only with a handler, `ignite.handlers.Checkpoint`.",
        "resumed": "Load the session with the other objects: "
        "`Checkpoint.load_objects({…, 'hooks': session}, path)`.",
        "backward": "Let the session run backward: `session.backward(loss)` instead of "
        "`loss.backward()` in the process function.",
    },
)

_VALIDATION = (
    "on_validation_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_end",
)


class EngineDriver:
    """Tells a session what happens in an Ignite engine.

    Args:
        engine: the engine that trains.
        evaluator: the engine that validates.
        parts: `model`, `optimizers`, `schedulers` and `scaler`.
        options: those of `attach`, checked.

    Attributes:
        session: the session, as `hookline.attach(engine, …)` returns it.
    """

    def __init__(
        self,
        engine: Engine,
        evaluator: Engine | None,
        parts: Mapping[str, Any],
        options: SimpleNamespace,
    ) -> None:
        library = LIBRARY
        if evaluator is None:
            missing = dict.fromkeys(_VALIDATION, library.calls["validation"])
            provided = library.provided - {"validation"}
            library = replace(library, missing=missing, provided=provided)
        self.session = LibrarySession(
            library,
            options,
            on_log=self._log_to_engine,
            before_state=self._catch_up,
            find_loaded_path=_find_loaded_path,
        )
        self._engine, self._evaluator, self._parts = engine, evaluator, parts
        self._handles: list[RemovableEventHandle] = []
        self._own_names: set[str] = set()  # of what was put into the engine's metrics
        self._epoch_is_open = self._is_interrupted = False
        self._validation_batches = 0
        self._handled_exception: BaseException | None = None
        self.session.replace_equal(_attached_sessions(engine))
        self._wrapped = WrappedMethods()
        self.session.add_undo(self._leave_engines)
        self._wrapped.wrap(engine, "run", self._run, on_copy=self.session.warn_about_copy)

    # -- start and end ----------------------------------------------------------------------------

    def _run(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Do what `Engine.run` does, with hooks."""
        if self.session.has_ended:  # and another session has wrapped it since
            return run(*args, **kwargs)
        if not self._handles:
            self._listen(self._engine, Events.STARTED, self._started)
        self._is_interrupted = False
        with SignalWatch(
            self.session.loop.requests, ("SIGTERM", "SIGUSR1")
        ):  # until the run is closed
            try:
                result = run(*args, **kwargs)
            except BaseException as error:
                if self.session.is_connected:  # else it has failed before training started
                    self._leave(error)
                raise
            if self._is_interrupted:  # the next `run` continues
                return result
            self._leave(self._handled_exception)
        if self.session.received_signal == "SIGINT":
            raise KeyboardInterrupt
        return result

    def _leave(self, error: BaseException | None) -> None:
        try:
            self.session.leave(error)
        finally:
            self.session.detach()

    def _leave_engines(self) -> None:
        """Remove all handlers from the engines, and put `run` back."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._wrapped.restore()

    def _listen(self, engine: Engine, event: Any, handler: Callable[..., None]) -> None:
        self._handles.append(engine.add_event_handler(event, _Handler(handler)))

    def _started(self) -> None:
        with self.session.starting():
            self._begin()

    def _begin(self) -> None:
        """Begin training, and listen to everything else, after the user's own handlers."""
        engine = self._engine
        self._listen(engine, Events.EPOCH_STARTED, self._start_engine_epoch)
        self._listen(engine, Events.ITERATION_STARTED, self._start_iteration)
        self._listen(engine, Events.ITERATION_COMPLETED, self._end_iteration)
        self._listen(engine, Events.EPOCH_COMPLETED, self._complete_epoch)
        self._listen(engine, Events.TERMINATE, self._terminated)
        self._listen(engine, Events.INTERRUPT, self._interrupted)
        any_handler: Any = _Any()
        if engine.has_event_handler(any_handler, Events.EXCEPTION_RAISED):
            self._listen(engine, Events.EXCEPTION_RAISED, self._exception_raised)
        self._listen_to_checkpoints(engine)
        if (evaluator := self._evaluator) is not None:
            self._listen(evaluator, Events.STARTED, self._start_evaluation)
            self._listen(evaluator, Events.ITERATION_STARTED, self._start_evaluation_batch)
            self._listen(evaluator, Events.ITERATION_COMPLETED, self._end_evaluation_batch)
            self._listen(evaluator, Events.COMPLETED, self._end_evaluation)
            self._listen_to_checkpoints(evaluator)
        session = self.session
        session.connect(**self._parts, signals=None)
        if not session.restore_loaded() and engine.state.iteration:
            log.warning(
                "The engine continues at iteration %d, but the state of its hooks was not loaded: "
                "they start anew, at step 0. %s",
                engine.state.iteration,
                LIBRARY.calls["resumed"],
            )
        session.begin()
        self._request_stop()

    def _listen_to_checkpoints(self, engine: Engine) -> None:
        if not engine.has_registered_events(CheckpointEvents.SAVED_CHECKPOINT):
            engine.register_events(*CheckpointEvents)
        self._listen(engine, CheckpointEvents.SAVED_CHECKPOINT, self._checkpoint_saved)

    def _terminated(self) -> None:
        self.session.stop("the engine was terminated")  # unless it was asked for already

    def _interrupted(self) -> None:
        self._is_interrupted = True

    def _exception_raised(self, error: BaseException) -> None:
        """Note an exception that handlers of the user keep from being raised."""
        self._handled_exception = error

    def _request_stop(self) -> None:
        if self.session.take_stop():
            self._engine.terminate()

    # -- epochs and batches -----------------------------------------------------------------------

    def _start_engine_epoch(self) -> None:
        self._close_epoch()  # `terminate_epoch` may leave out EPOCH_COMPLETED
        self.session.start_epoch(self._engine.state.epoch - 1)
        self._epoch_is_open = True

    def _start_iteration(self) -> None:
        if self._evaluator is not None and self.session.is_validating:  # it has failed
            self.session.leave_validation()
        self.session.start_batch(self._engine.state.batch)

    def _end_iteration(self) -> None:
        self.session.end_batch()
        if self.session.loop.requests.pending:
            self._request_stop()

    def _complete_epoch(self) -> None:
        self._close_epoch()
        self._request_stop()

    def _close_epoch(self) -> None:
        """End the epoch, unless that was done when a checkpoint was saved."""
        if not self._epoch_is_open:
            return
        self._epoch_is_open = False
        own = {
            name: value
            for name, value in self._engine.state.metrics.items()
            if name not in self._own_names
        }
        self.session.record_values(own)
        metrics = of_phase(own, "train")
        if "train/loss" in self.session.loop.context.means.means():
            metrics.pop("train/loss", None)  # that of backward has precedence
        self.session.end_epoch(metrics)

    def _catch_up(self) -> None:
        """Fire what the engines have reached: another handler of the same event is called first.

        Within a handler of EPOCH_COMPLETED, `on_epoch_end` is fired before the state is saved, so
        that a resumed training run continues with the next epoch.
        """
        evaluator, last = self._evaluator, self._engine.last_event_name
        if evaluator is not None and self.session.is_validating:
            if evaluator.last_event_name != Events.COMPLETED:
                return
            self._end_evaluation()
        if last in (Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED):
            self.session.end_batch()
        if last == Events.EPOCH_COMPLETED:
            self._close_epoch()

    # -- metrics ----------------------------------------------------------------------------------

    def _log_to_engine(self, name: str, value: Any) -> None:
        """Give `engine.state.metrics` a number that was logged, unless it has one of this name."""
        metrics = self._engine.state.metrics
        if name in self._own_names or name not in metrics:
            is_tensor = isinstance(value, torch.Tensor)
            metrics[name] = value.detach().clone() if is_tensor else to_float(value)
            self._own_names.add(name)

    # -- validation -------------------------------------------------------------------------------

    def _start_evaluation(self) -> None:
        if self.session.is_validating:
            self.session.leave_validation()
        if self._engine.last_event_name in (Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED):
            self.session.end_batch()
        self._validation_batches = 0
        self.session.start_validation()

    def _start_evaluation_batch(self) -> None:
        assert self._evaluator is not None
        self.session.start_validation_batch(self._evaluator.state.batch, self._validation_batches)
        self._validation_batches += 1

    def _end_evaluation_batch(self) -> None:
        assert self._evaluator is not None
        output = self._evaluator.state.output
        self.session.end_validation_batch(
            output.get("loss") if isinstance(output, Mapping) else output
        )

    def _end_evaluation(self) -> None:
        if not self.session.is_validating:  # ended when a checkpoint was saved
            return
        assert self._evaluator is not None
        self.session.end_validation(of_phase(self._evaluator.state.metrics, "val"))
        self._request_stop()

    # -- checkpoints ------------------------------------------------------------------------------

    def _checkpoint_saved(self) -> None:
        """Tell hooks about a file that Ignite's `Checkpoint` has written, once it is durable."""
        frame = find_frame(Checkpoint.__call__)
        if frame is None or not self.session.is_training:
            return
        handler, name = frame.f_locals["self"], frame.f_locals["filename"]
        folder = getattr(handler.save_handler, "dirname", None)
        path = Path(name) if folder is None else Path(folder) / name
        with suppress(OSError):  # on another rank, or another machine
            sync(path)
            sync(path.parent)
        self.session.notify_checkpoint_saved(str(path))


class _Handler(functools.partial[None]):
    """A handler that does nothing in a copy or pickle of the engine."""

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return _do_nothing

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _get_do_nothing, ()


def _do_nothing(*args: Any) -> None:
    """Handle an event of the copy of an engine."""


def _get_do_nothing() -> Callable[..., None]:
    return _do_nothing


class _Any:
    """Equal to every handler: whether an engine has any cannot be asked otherwise."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def _attached_sessions(engine: Engine) -> Iterator[LibrarySession]:
    """Yield the sessions that have wrapped `engine.run`, the latest first."""
    run: Any = vars(engine).get("run")
    while isinstance(driver := getattr(getattr(run, "func", None), "__self__", None), EngineDriver):
        run = run.args[0]
        yield driver.session


def _find_loaded_path() -> Path | None:
    """Return the path that `Checkpoint.load_objects` reads, if it is running."""
    frame = find_frame(Checkpoint.load_objects)
    given = None if frame is None else frame.f_locals.get("checkpoint")
    return Path(given) if isinstance(given, str | Path) else None


def attach_to_trainer(engine: Any, options: Mapping[str, Any]) -> LibrarySession:
    """Attach hooks to an Ignite engine; see `hookline.attach`."""
    model, optimizer, evaluator = (options[name] for name in ("model", "optimizer", "evaluator"))
    if model is None or optimizer is None:
        raise ArgumentError(
            "An Ignite engine knows neither the model nor the optimizer. Give both: "
            "attach(engine, model=model, optimizer=optimizer, hooks=[…])."
        )
    if evaluator is not None and (not isinstance(evaluator, Engine) or evaluator is engine):
        what = "the engine that trains" if evaluator is engine else describe_value(evaluator)
        raise ArgumentError(
            f"attach(…, evaluator=…) takes the Ignite engine that validates, not {what}."
        )
    parts = loop_parts(model, optimizer, options["schedulers"], options["scaler"])
    return EngineDriver(engine, evaluator, parts, session_options(**options)).session
