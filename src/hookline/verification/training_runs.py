"""Short training runs of the user's trainer, each with new objects, in a temporary folder."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import weakref
from collections.abc import Callable, Collection, Generator
from pathlib import Path
from typing import Any

from hookline.errors import ConfigError
from hookline.hooks.checkpointing.model_checkpoint import SavingHook
from hookline.hooks.checkpointing.upload import UploadHook
from hookline.hooks.notification.notification_hook import NotificationHook
from hookline.loop.random_state import seed_everything
from hookline.trainer.trainer import Trainer
from hookline.verification.recording import Interruption, Recording, RecordingHook

log = logging.getLogger("hookline")

_RECORDING = "hookline_verify"
_OUTPUT_OPTIONS = ("path", "folder")

Watch = Callable[[str, int, int], object]


class TrainingRuns:
    """Makes trainers, as `make_trainer` of `verify` returns them, and runs them in a folder."""

    def __init__(
        self,
        make_trainer: Callable[[], Any],
        folder: Path,
        watch: Watch | None,
    ) -> None:
        self._make_trainer = make_trainer
        self._folder = folder
        self._watch = watch
        self._seed = 0
        self._models: list[Any] = []  # weak references
        self._seen_messages: set[str] = set()
        trainer = self._make(1, ())
        if trainer.config.seed is not None:
            self._seed = trainer.config.seed
        hooks = {name: trainer.hooks.get_hook(name) for name in trainer.hooks.list_hooks()}
        self.not_run = [n for n, hook in hooks.items() if _leaves_process(hook)]
        off = {*self.not_run, *(one.name for one in trainer.hooks.describe() if not one.enabled)}
        self.observers = [n for n, h in hooks.items() if n not in off and not h.intervenes]
        self.hooks = [name for name in hooks if name not in off]
        length = None if trainer.train_data is None else trainer.train_data.length()
        self.epoch_steps = None if length is None else -(-length // trainer.config.accumulate)

    def run(
        self,
        label: str,
        steps: int,
        *,
        disabled: Collection[str] = (),
        removed: Collection[str] = (),
        interrupt_at: int | None = None,
        resume_from: Path | None = None,
        traces: bool = False,
    ) -> Recording:
        """Train for a number of steps, counted from the start of training; return what happened.

        An error of the run is in the recording. The states of hooks that are `removed` are not
        restored either. With `interrupt_at`, training ends after that step and its checkpoint.
        """
        watch = self._watch
        on_step = None if watch is None else lambda step: watch(label, step, steps)
        recorder = RecordingHook(interrupt_at, traces=traces, on_step=on_step)
        with self._quiet():
            trainer = self._make(steps, disabled)
            for name in removed:
                trainer.remove_hook(name)
            trainer.add_hook(recorder, name=_RECORDING)
            try:
                trainer.fit(resume_from=resume_from)
            except Interruption:
                pass
            except Exception as error:  # it may be what is looked for
                recorder.recording.error = f"{type(error).__name__}: {error}"
                recorder.recording.exception = error
        return recorder.recording

    def _make(self, steps: int, disabled: Collection[str]) -> Trainer:
        """Return a new trainer, which trains for so many steps and writes to the folder."""
        gc.collect()  # ends the workers of earlier loaders before new ones are started
        seed_everything(self._seed)
        made = self._make_trainer()
        trainer, *data = made if isinstance(made, tuple) and made else (made,)
        if not isinstance(trainer, Trainer) or len(data) > 2:
            raise ConfigError(
                f"make_trainer returned a {type(made).__name__}; expected a Trainer with its data, "
                "or a tuple of the trainer, its loaders, and optionally its validation loaders."
            )
        if data:
            trainer.set_data(*data)
        if any(reference() is trainer.model for reference in self._models):
            raise ConfigError(
                "make_trainer returned the same model twice. Create everything inside of the "
                "function: the model, the optimizer, the data and the trainer."
            )
        self._models.append(weakref.ref(trainer.model))
        end = trainer.config.max_steps
        fields: dict[str, Any] = {
            "runs": self._folder / "runs",
            "progress": "off",
            "max_steps": steps if end is None else min(steps, end),
        }
        saving: Any = getattr(trainer.config, "checkpoints", None)
        if saving is not None:
            fields["checkpoints"] = saving.model_copy(update={"background": False})
        trainer.config = trainer.config.model_copy(update=fields)
        for name in trainer.hooks.list_hooks():
            hook = trainer.hooks.get_hook(name)
            if isinstance(hook, SavingHook):
                hook.save_into_run()  # whose folder is removed
            if name in disabled or _leaves_process(hook):
                trainer.disable_hook(name)
        return trainer

    @contextlib.contextmanager
    def _quiet(self) -> Generator[None]:
        """Log each message once, and drop what hooks print: they do so in each run."""

        def is_new(record: logging.LogRecord) -> bool:
            text = record.getMessage()
            is_first = text not in self._seen_messages
            self._seen_messages.add(text)
            return is_first and record.levelno >= logging.WARNING

        log.addFilter(is_new)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                yield
        finally:
            log.removeFilter(is_new)


def _leaves_process(hook: Any) -> bool:
    """Return whether a built-in hook sends messages, or writes to a place that the user named."""
    if isinstance(hook, UploadHook | NotificationHook):
        return True
    options = getattr(hook, "hookline_options", {})
    is_built_in = type(hook).__module__.startswith("hookline.")
    writes = any(options.get(name) is not None for name in _OUTPUT_OPTIONS)
    return is_built_in and writes and not isinstance(hook, SavingHook)
