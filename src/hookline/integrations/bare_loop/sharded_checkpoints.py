"""The checkpoints of a bare loop with a sharded model (FSDP2): every process writes its part."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline.checkpoint.part_writer import SharedSaves
from hookline.config.trainer_config import CheckpointConfig
from hookline.integrations.bare_loop.loop_agreement import is_sharded_loop, meet
from hookline.integrations.bare_loop.session_checkpoints import SessionCheckpoints
from hookline.integrations.bare_loop.session_state import rank_state
from hookline.loop.checkpoint_saving import share_saves
from hookline.loop.event_context import device_of
from hookline.loop.random_state import random_state

if TYPE_CHECKING:
    from hookline.integrations.bare_loop.attached_loop import AttachedLoop

__all__ = ["make_checkpoints"]

log = logging.getLogger("hookline")


class ShardedCheckpoints(SessionCheckpoints):
    """Saves the state of a loop whose processes have parts of the parameters.

    What a hook of any process requests is agreed on between two steps, and saved by all processes
    before the next step begins.
    """

    def __init__(self, session: AttachedLoop, settings: CheckpointConfig) -> None:
        super().__init__(session, settings)
        self._asked: list[Path | None] = []  # by hooks of this process; None: in the run's folder
        self._is_ending = False
        self._saves: SharedSaves | None = None

    def prepare_after_step(self) -> None:
        """Allocate the memory for the first checkpoint after the next step."""
        self._prepares = True

    def save(self, path: Path | None, extra: Mapping[str, Any], *, wait: bool) -> Path | None:
        """Save now, in all processes together; return the folder if it is durable already."""
        if self._session._context.status in ("error", "interrupted"):
            log.warning(
                "A checkpoint was requested and is not saved: the loop ended with an exception, "
                "and all processes have to save a sharded model together."
            )
            return None
        if self._is_ending and not self._processes.is_main:
            self._asked.append(path)
            return None
        if self._is_ending:
            self._processes.share([path])  # with the others, which wait in `ending`
        else:
            meet("save_checkpoint")
        self.save_requested()
        self._extra = dict(extra)
        return self._save_together(self._folders_for([path]), wait=wait)

    def request(self, path: Path | None, extra: Mapping[str, Any]) -> None:
        """Save before the next step begins, if the processes have agreed on it until then."""
        self._check_boundary()
        if path not in self._asked:
            self._asked.append(path)
        self._extra |= extra

    def event_ended(self, *, in_step: bool) -> None:
        """Do nothing: the processes agree first."""

    def save_requested(self) -> None:
        """Save what was agreed on: the next step begins, or training ends."""
        self._boundary.stop()
        if self._requests:
            requests, self._requests = self._requests, []
            self._save_together(requests, wait=False)

    @property
    def has_news(self) -> bool:
        """Whether the other processes have to know something."""
        return super().has_news or bool(self._asked)

    def exchange_news(self) -> None:
        """Tell hooks of all processes what was saved, and agree on what was requested."""
        self.exchange_saved()
        if asked := self._gather_asked():
            self._requests = list(dict.fromkeys([*self._requests, *self._folders_for(asked)]))
            self._random = random_state(device_of(self._session.model))
            self._boundary.watch()

    def _gather_asked(self) -> list[Path | None]:
        """Return what was asked for in any process, and take over the loop's own values."""
        gathered = self._processes.gather((self._asked, self._extra))
        self._asked = []
        for _, extra in reversed(gathered):  # rank 0's count most
            self._extra |= extra
        return list(dict.fromkeys(path for paths, _ in gathered for path in paths))

    def _folders_for(self, paths: Sequence[Path | None]) -> list[Path]:
        """Return the folders of checkpoints, which rank 0 knows."""
        return self._processes.call_on_main(lambda: [self._folder_for(path) for path in paths])

    def finish(self, *, failed: bool, together: bool) -> None:
        """Save what was requested, wait for what is being written, and report it."""
        super().finish(failed=failed or not together, together=together)

    @contextmanager
    def ending(self) -> Generator[None]:
        """Fire `on_train_end` in the block; what a hook of one process saves, all of them save.

        A hook in rank 0 saves at once, and the others wait for that after their own hooks.
        """
        self._is_ending, processes = True, self._processes
        yield
        self._is_ending = False
        if processes.is_main:
            processes.share([])
        while not processes.is_main and (paths := processes.share(None)):
            self._save_together(self._folders_for(paths), wait=True)
            self._asked = [path for path in self._asked if path not in paths]
        if processes.any(bool(self._asked))[0]:
            self._save_together(self._folders_for(self._gather_asked()), wait=True)

    def _save_together(self, folders: Sequence[Path], *, wait: bool) -> Path | None:
        """Save in all processes; return the first folder if it is durable already."""
        processes, agreement = self._processes, self._session._agreement
        assert agreement is not None
        agreement.records.report(self._session.run)
        random = self._random or random_state(device_of(self._session.model))
        self._rank_states = processes.gather(rank_state(self._session, random))
        self._saves = self._saves or share_saves(processes)
        try:
            results = self._saving.save(folders, wait=wait, shared=self._saves.next())
        finally:
            self._extra, self._random, self._rank_states = {}, None, None
        if wait:
            self.exchange_saved()
        return next((result.path for result in results if result.requested == folders[0]), None)


def make_checkpoints(session: AttachedLoop, settings: CheckpointConfig) -> SessionCheckpoints:
    """Return what saves and loads the checkpoints of a session."""
    kind = ShardedCheckpoints if is_sharded_loop(session.optimizers) else SessionCheckpoints
    return kind(session, settings)
