"""SavingHook, the base of hooks that save checkpoints, and CheckpointHook, the simplest of them."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import PositiveInt

from hookline.checkpoint.retention import Retention
from hookline.errors import CheckpointError, ConfigError, TrainingError
from hookline.hook import HookGroup
from hookline.options import BuiltIn

log = logging.getLogger("hookline")


class SavingHook(BuiltIn):
    """Saves through the trainer; a `Retention` decides which checkpoints are kept.

    A save that is requested in an event happens at the next step boundary, and `on_checkpoint_save`
    comes at a later one, when the checkpoint is durable. Only then is the retention updated. If the
    save failed or was replaced, `checkpoint_failed` is called instead.

    The hook is critical: without a folder, or without the metric to rank by, there would be no
    checkpoints. What goes wrong when a checkpoint is removed is logged, and training continues,
    unless `checkpoints.on_failure` of the trainer's configuration is `stop`.
    """

    critical = True
    hookline_group = HookGroup.CHECKPOINT
    ranks = "main"

    _retention: Retention
    _folder: Path | None = None
    _resumed = False
    _opened: tuple[str | None, Path] | None = None  # the run and the folder it was opened for

    def on_train_start(self, trainer: Any) -> None:
        self._open(trainer, self._find_folder(trainer))

    def _open(self, trainer: Any, folder: Path) -> None:
        self._retention.open(folder, resumed=self._resumed)
        self._opened = _run_id(trainer), folder

    def on_checkpoint_load(self, trainer: Any, checkpoint_path: Any) -> None:
        if self._resumed:
            with logged_failures(trainer):
                self._retention.reconcile(
                    Path(checkpoint_path), writer=self._name_in(trainer), run_id=_run_id(trainer)
                )

    def _open_late(self, trainer: Any) -> None:
        """Find folder and checkpoints, if the hook was added or enabled in the middle of a run."""
        folder = self._find_folder(trainer)
        if self._opened != (_run_id(trainer), folder):
            self._open(trainer, folder)
            with logged_failures(trainer):
                self._retention.find_saved(
                    self._name_in(trainer), _run_id(trainer), self._ranking()
                )

    def _ranking(self) -> dict[str, Any]:
        """Return what the saved state of a hook has that ranks in the same way."""
        return {}

    def _name_in(self, trainer: Any) -> str:
        hooks = trainer.hooks.of_kind(self.hookline_kind)
        return next((name for name, hook, _ in hooks if hook is self), "")

    def on_checkpoint_save(self, trainer: Any, checkpoint_path: Any) -> None:
        with logged_failures(trainer):
            self._retention.add_saved(Path(checkpoint_path))

    def checkpoint_saved(self, path: str) -> None:
        """Do what `on_checkpoint_save` does; called while the hook is disabled."""
        self.on_checkpoint_save(None, path)

    def checkpoint_failed(self, path: str, error: Exception | None) -> None:
        """Free the name of a checkpoint that was requested and not saved."""
        self._retention.discard(Path(path))

    def save_into_run(self) -> None:
        """Save into the run's folder, whichever folder the user gave."""
        self._folder = None

    def forget_resumed(self) -> None:
        """Start without the checkpoints of the run whose state was loaded: they are another's."""
        self._resumed = False

    def _release(self) -> None:
        self._retention.release()
        self._resumed = False
        self._opened = None

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoints of this hook with their scores."""
        return {"checkpoints": self._retention.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the list of checkpoints."""
        self._retention.load_state_dict(state["checkpoints"])
        self._resumed = True

    @property
    def last_model_path(self) -> Path | None:
        """The newest checkpoint of this hook."""
        return self._retention.path_of(self._retention.newest)

    def _find_folder(self, trainer: Any) -> Path:
        hook = type(self).__name__
        if not hasattr(trainer, "save_checkpoint"):
            raise TrainingError(
                f"{hook} saves through a Trainer or a Session, which this loop does not have. "
                "Attach it: hookline.attach(model, optimizer, hooks=[…])."
            )
        if self._folder is not None:
            return self._folder
        run = getattr(trainer, "run", None)
        if run is None:
            raise TrainingError(
                f"{hook} saves into the run's folder, but this training run has none. Set `runs` "
                "in the configuration, or pass a folder to the hook."
            )
        return Path(run.checkpoints)


def _run_id(trainer: Any) -> str | None:
    run = getattr(trainer, "run", None)
    return None if run is None else str(run.id)


@contextmanager
def logged_failures(trainer: Any) -> Generator[None, None, None]:
    """Log an error with checkpoints that exist already, unless the configuration says `stop`."""
    try:
        yield
    except (CheckpointError, OSError) as error:
        checkpoints = getattr(getattr(trainer, "config", None), "checkpoints", None)
        if getattr(checkpoints, "on_failure", "continue") == "stop":
            raise
        log.error("Training continues, but: %s", error)  # noqa: TRY400 - the message is complete


class CheckpointHook(SavingHook):
    """Saves a checkpoint at the end of every N-th epoch, as `epoch_0003` in the run's folder.

    Args:
        every: the number of epochs between checkpoints.
        keep: the number of newest checkpoints to keep; None: all.
        keep_every: of every M steps, also keep the first checkpoint for ever.
    """

    every_name = "save_every_n_epochs"
    cost = "The time of a checkpoint at the end of every N-th epoch, and nothing in between."

    def __init__(
        self,
        every: PositiveInt = 1,
        keep: PositiveInt | None = None,
        keep_every: PositiveInt | None = None,
    ) -> None:
        if keep is None and keep_every is not None:
            raise ConfigError(
                "CheckpointHook: keep=None keeps all checkpoints, so keep_every has no effect. "
                "Pass keep as well, or remove keep_every."
            )
        self.every = every
        self._retention = Retention(keep_last=-1 if keep is None else keep, keep_every=keep_every)

    def on_epoch_end(self, trainer: Any, epoch: int, step: int) -> None:
        if (epoch + 1) % self.every == 0:
            self._open_late(trainer)
            trainer.save_checkpoint(self._retention.reserve(f"epoch_{epoch:04d}", step, None))

    def on_train_end(self) -> None:
        self._release()
