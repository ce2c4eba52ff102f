"""Retention: which checkpoints of a writer are kept, and how the others are removed.

A `Retention` belongs to one writer. It removes only checkpoints that this writer wrote, never one
that `last` or `best` names, and only after the next checkpoint is durable.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal

from hookline.checkpoint.atomic_files import temporary_folder
from hookline.checkpoint.checkpoint_lookup import read_manifest, read_pointers, set_pointer
from hookline.errors import CheckpointError, listed

__all__ = ["Order", "RetainedCheckpoint", "Retention", "rank_checkpoints", "remove_checkpoint"]

log = logging.getLogger("hookline")

Order = Literal["min", "max", "newest"]
"""What ranks higher: the checkpoint with the lower score, the higher score, or the newer one."""

_reserved_paths: set[Path] = set()
"""Paths that writers of this process have reserved and not saved yet."""


@dataclass(frozen=True)
class RetainedCheckpoint:
    """A checkpoint that a writer has written or reserved a name for.

    Attributes:
        number: How many checkpoints the writer had reserved before.
        created: The manifest's time of creation; "" before it is saved. It distinguishes the
            checkpoint from another one that replaced it.
    """

    name: str
    step: int
    number: int
    score: float | None = None
    created: str = ""

    @property
    def has_finite_score(self) -> bool:
        """Whether the score can be compared: NaN and infinities cannot."""
        return self.score is not None and math.isfinite(self.score)


def rank_checkpoints(
    checkpoints: Iterable[RetainedCheckpoint], order: Order
) -> list[RetainedCheckpoint]:
    """Return checkpoints, the best first; of equal scores the earlier, NaN and infinities last."""

    def key(checkpoint: RetainedCheckpoint) -> tuple[bool, float, int]:
        if order == "newest":
            return False, -checkpoint.number, 0
        if checkpoint.score is None or not checkpoint.has_finite_score:
            return True, 0.0, checkpoint.number
        score = checkpoint.score if order == "min" else -checkpoint.score
        return False, score, checkpoint.number

    return sorted(checkpoints, key=key)


class Retention:
    """The checkpoints of one writer.

    Call `reserve` before a checkpoint is saved: the writer's state, which is part of that
    checkpoint, then includes it. Call `mark_saved` for every checkpoint that is durable; it removes
    the checkpoints that are no longer kept.

    Args:
        keep: How many of the best checkpoints are kept; -1 for all.
        order: What ranks higher.
        keep_newest: Also keep the newest checkpoint, whatever its rank.
    """

    def __init__(self, *, keep: int, order: Order, keep_newest: bool = False) -> None:
        self._keep = keep
        self._order: Order = order
        self._keep_newest = keep_newest
        self._folder: Path | None = None
        self._saved: list[RetainedCheckpoint] = []
        self._pending: dict[str, RetainedCheckpoint] = {}
        self._number = 0
        self._best_name: str | None = None

    @property
    def folder(self) -> Path:
        """The folder of the checkpoints."""
        if self._folder is None:
            raise CheckpointError("Checkpoints have no folder before training has started.")
        return self._folder

    @property
    def saved(self) -> tuple[RetainedCheckpoint, ...]:
        """The checkpoints that were saved and are kept, oldest first."""
        return tuple(self._saved)

    @property
    def best(self) -> RetainedCheckpoint | None:
        """The best checkpoint; None if nothing is ranked, or no score is finite."""
        if self._order == "newest" or not self._keep:
            return None
        first = rank_checkpoints(self._saved, self._order)[:1]
        return first[0] if first and first[0].has_finite_score else None

    @property
    def newest(self) -> RetainedCheckpoint | None:
        """The newest checkpoint."""
        return max(self._saved, key=lambda checkpoint: checkpoint.number, default=None)

    def path_of(self, checkpoint: RetainedCheckpoint | None) -> Path | None:
        """Return the folder of a checkpoint; None for None."""
        return None if checkpoint is None else self.folder / checkpoint.name

    def open(self, folder: Path, *, resumed: bool) -> None:
        """Set the folder when training starts; unless resumed, start with no checkpoints."""
        self.release()
        self._folder = Path(folder)
        self._best_name = None
        if not resumed:
            self._saved, self._pending, self._number = [], {}, 0

    def would_keep(self, score: float | None) -> bool:
        """Return whether a new checkpoint with this score would be kept."""
        if self._keep_newest or self._keep < 0:
            return True
        new = RetainedCheckpoint("", 0, self._number, score)
        known = [*self._saved, *self._pending.values(), new]
        return new in rank_checkpoints(known, self._order)[: self._keep]

    def reserve(self, name: str, step: int, score: float | None) -> Path:
        """Reserve a path that does not exist and that no other writer gets.

        If the name is taken, `_2`, `_3` … is added. The checkpoint is ranked by the score.
        """
        names = chain([name], (f"{name}_{number}" for number in count(2)))
        path = next(path for name in names if _is_free(path := self.folder / name))
        _reserved_paths.add(path.resolve())
        self._pending[path.name] = RetainedCheckpoint(path.name, step, self._number, score)
        self._number += 1
        return path

    def rescore(self, step: int, score: float | None) -> None:
        """Set the score of the checkpoints of a step, and rank again."""
        scored = [
            replace(checkpoint, score=score) if checkpoint.step == step else checkpoint
            for checkpoint in (*self._saved, *self._pending.values())
        ]
        self._saved = scored[: len(self._saved)]
        self._pending = {checkpoint.name: checkpoint for checkpoint in scored[len(self._saved) :]}
        self._apply_ranking()

    def mark_saved(self, path: Path) -> bool:
        """Register a durable checkpoint and remove those that are no longer kept.

        Return False if the checkpoint was not reserved by this writer.
        """
        checkpoint = self._find_pending(path)
        if checkpoint is None:
            return False
        del self._pending[checkpoint.name]
        _reserved_paths.discard((self.folder / checkpoint.name).resolve())
        created = _read_created(path) or ""
        self._saved.append(replace(checkpoint, name=path.name, created=created))
        self._forget_missing()
        self._apply_ranking()
        return True

    def release(self) -> None:
        """Free the reserved names: nothing more will be saved under them."""
        if self._folder is not None:
            paths = ((self._folder / name).resolve() for name in self._pending)
            _reserved_paths.difference_update(paths)

    def _find_pending(self, path: Path) -> RetainedCheckpoint | None:
        """Return what was reserved for this path; another process may have taken the name."""
        if path.parent.resolve() != self.folder.resolve():
            return None
        if path.name in self._pending:
            return self._pending[path.name]
        if path.resolve() in _reserved_paths:
            return None  # reserved by another writer
        return next((c for c in self._pending.values() if _is_variant(path, c.name)), None)

    def _apply_ranking(self) -> None:
        """Make `best` name the best checkpoint, and remove those that are not kept."""
        best = self.best
        if best is not None and best.name != self._best_name:
            set_pointer(self.folder, "best", self.folder / best.name)
            self._best_name = best.name
        if self._keep < 0:
            return
        kept = {c.name for c in rank_checkpoints(self._saved, self._order)[: self._keep]}
        kept.update(read_pointers(self.folder).values())
        if self._keep_newest and self.newest is not None:
            kept.add(self.newest.name)
        for checkpoint in self._saved:
            if checkpoint.name not in kept:
                remove_checkpoint(self.folder / checkpoint.name)
        self._saved = [checkpoint for checkpoint in self._saved if checkpoint.name in kept]

    def _forget_missing(self) -> None:
        """Forget checkpoints that were removed, damaged or replaced by someone else."""
        present = [c for c in self._saved if _read_created(self.folder / c.name) == c.created]
        missing = [c.name for c in self._saved if c not in present]
        if missing:
            log.info("No longer in %s, and forgotten: %s.", self.folder, listed(missing))
        self._saved = present

    def state_dict(self) -> dict[str, Any]:
        """Return the state for resuming; it includes checkpoints that are being saved."""
        return {
            "written": [asdict(checkpoint) for checkpoint in self._saved],
            "pending": [asdict(checkpoint) for checkpoint in self._pending.values()],
            "number": self._number,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; `reconcile` then compares it with the folder."""
        self._saved = [RetainedCheckpoint(**fields) for fields in state["written"]]
        self._pending = {f["name"]: RetainedCheckpoint(**f) for f in state["pending"]}
        self._number = int(state["number"])

    def reconcile(self, path: Path) -> None:
        """Compare the restored state with the folder of the checkpoint that was resumed from."""
        for name, checkpoint in self._pending.items():
            is_resumed_from = path.parent.resolve() == self.folder.resolve() and (
                path.name == name or _is_variant(path, name)
            )
            found = path if is_resumed_from else self.folder / name
            created = _read_created(found)
            if created is None:
                log.info("The checkpoint %s was requested but never saved.", found)
            else:
                self._saved.append(replace(checkpoint, name=found.name, created=created))
        self._pending = {}
        self._forget_missing()


def remove_checkpoint(path: Path) -> bool:
    """Remove a checkpoint's folder; return False and log a warning if it is not removed.

    A folder is removed only if it has a valid manifest and no file that the manifest does not name.
    It is first moved into a temporary folder, so that a crash leaves no partial checkpoint.
    """
    try:
        manifest = read_manifest(path)
        foreign = {p.name for p in path.iterdir()} - {"manifest.json", *manifest["files"]}
        if path.is_symlink() or foreign:
            reason = f"it also contains {listed(sorted(foreign))}" if foreign else "it is a link"
            log.warning("The checkpoint %s is not removed: %s.", path, reason)
            return False
        with temporary_folder(path.parent, path.name) as temporary:
            path.rename(temporary / path.name)
    except (CheckpointError, OSError) as error:
        log.warning("The checkpoint %s could not be removed: %s", path, error)
        return False
    return True


def _read_created(path: Path) -> str | None:
    try:
        return str(read_manifest(path)["created"])
    except CheckpointError:
        return None


def _is_free(path: Path) -> bool:
    return not os.path.lexists(path) and path.resolve() not in _reserved_paths


def _is_variant(path: Path, name: str) -> bool:
    """Return whether a path has this name with `_2`, `_3` … added."""
    return re.fullmatch(re.escape(name) + r"_\d+", path.name) is not None
