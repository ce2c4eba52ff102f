"""Which checkpoints are kept: what was written, how it ranks, what is removed, and how.

A `Retention` belongs to one writer. It removes only what that writer wrote, never what `last` or
`best` names, and only after the next checkpoint is durable.
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
from hookline.checkpoint.checkpoint_folder import read_manifest
from hookline.checkpoint.find_checkpoint import point
from hookline.errors import CheckpointError, listed

__all__ = ["Order", "Retention", "Written", "pointed", "ranked", "remove_checkpoint"]

log = logging.getLogger("hookline")

Order = Literal["min", "max", "newest"]
"""Which checkpoint is the better one: that with the lower or the higher score, or the newer."""

_asked_for: set[Path] = set()
"""What all writers of this process have asked for and is not saved yet: no name is given twice."""


@dataclass(frozen=True)
class Written:
    """A checkpoint that a writer wrote, or has asked for.

    Attributes:
        name: Its folder's name.
        step: The step it was made at.
        number: How many this writer had asked for before.
        score: The number it ranks by; None where nothing is ranked.
        created: When it was written, as its manifest says; "" before that. It tells a checkpoint
            from another one that somebody put in its place.
    """

    name: str
    step: int
    number: int
    score: float | None = None
    created: str = ""

    @property
    def may_be_best(self) -> bool:
        """Whether there is a score to compare: NaN and infinities are none."""
        return self.score is not None and math.isfinite(self.score)


def ranked(written: Iterable[Written], order: Order) -> list[Written]:
    """Return checkpoints, the best first.

    Of equal scores the earlier comes first; scores that are not finite come last.
    """

    def place(one: Written) -> tuple[bool, float, int]:
        if order == "newest":
            return False, -one.number, 0
        if one.score is None or not one.may_be_best:
            return True, 0.0, one.number
        return False, one.score if order == "min" else -one.score, one.number

    return sorted(written, key=place)


class Retention:
    """The checkpoints of one writer.

    Before a checkpoint is saved, `ask` gives its path and notes it: so the checkpoint itself, whose
    state is made while it is being saved, knows of it too. `saved` is told of every checkpoint that
    is durable, and removes what is not kept any more.

    Args:
        keep: How many are kept, the best of them; -1 for all.
        order: What makes one better.
        newest_too: The newest one is kept as well, whatever its rank.
    """

    def __init__(self, *, keep: int, order: Order, newest_too: bool = False) -> None:
        self._keep = keep
        self._order: Order = order
        self._newest_too = newest_too
        self._folder: Path | None = None
        self._written: list[Written] = []
        self._pending: dict[str, Written] = {}
        self._number = 0
        self._pointed_at: str | None = None

    # -- what there is ----------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        """Where the checkpoints are."""
        if self._folder is None:
            raise CheckpointError("Checkpoints have no folder before training has started.")
        return self._folder

    @property
    def written(self) -> tuple[Written, ...]:
        """What was written and is still kept, oldest first."""
        return tuple(self._written)

    @property
    def best(self) -> Written | None:
        """The best one; None where nothing is ranked, or no score is a finite number."""
        if self._order == "newest" or not self._keep:
            return None
        first = ranked(self._written, self._order)[:1]
        return first[0] if first and first[0].may_be_best else None

    @property
    def newest(self) -> Written | None:
        """The newest one."""
        return max(self._written, key=lambda one: one.number, default=None)

    def path(self, one: Written | None) -> Path | None:
        """Return where a checkpoint is."""
        return None if one is None else self.folder / one.name

    # -- writing ----------------------------------------------------------------------------------

    def open(self, folder: Path, *, resumed: bool) -> None:
        """Begin a run: with what was loaded, when it is resumed, else with nothing."""
        self.release()
        self._folder = Path(folder)
        self._pointed_at = None
        if not resumed:
            self._written, self._pending, self._number = [], {}, 0

    def wants(self, score: float | None) -> bool:
        """Whether a checkpoint with this score would be kept."""
        if self._newest_too or self._keep < 0:
            return True
        new = Written("", 0, self._number, score)
        return (
            new in ranked([*self._written, *self._pending.values(), new], self._order)[: self._keep]
        )

    def ask(self, name: str, step: int, score: float | None) -> Path:
        """Return where a checkpoint is to be saved: a path that nobody has, and nobody else gets.

        Args:
            name: How to call it; when that is taken, `_2`, `_3` … is added.
            step: The step.
            score: The number to rank it by.
        """
        names = chain([name], (f"{name}_{number}" for number in count(2)))
        path = next(path for name in names if _is_free(path := self.folder / name))
        _asked_for.add(path.resolve())
        self._pending[path.name] = Written(path.name, step, self._number, score)
        self._number += 1
        return path

    def rescore(self, step: int, score: float | None) -> None:
        """Give what was asked for at this step a score that came later, and rank anew."""
        for name, one in self._pending.items():
            if one.step == step:
                self._pending[name] = replace(one, score=score)
        self._written = [
            replace(one, score=score) if one.step == step else one for one in self._written
        ]
        self._point_at_best()
        self._prune()

    def saved(self, path: Path) -> bool:
        """Take note of a durable checkpoint and remove what is not kept; False: it is not ours."""
        one = self._asked(path)
        if one is None:
            return False
        self._drop(one.name)
        self._written.append(replace(one, name=path.name, created=_created(path) or ""))
        self._forget_vanished()
        self._point_at_best()
        self._prune()
        return True

    def release(self) -> None:
        """Give back the names that were asked for: nothing is saved any more."""
        if self._folder is not None:
            _asked_for.difference_update((self._folder / name).resolve() for name in self._pending)

    def _asked(self, path: Path) -> Written | None:
        """What was asked for under this path; another process may have taken the name."""
        if path.parent.resolve() != self.folder.resolve():
            return None
        if path.name in self._pending:
            return self._pending[path.name]
        if path.resolve() in _asked_for:
            return None  # another writer's
        return next((one for one in self._pending.values() if _is_variant(path, one.name)), None)

    def _drop(self, name: str) -> None:
        del self._pending[name]
        _asked_for.discard((self.folder / name).resolve())

    def _point_at_best(self) -> None:
        best = self.best
        if best is not None and best.name != self._pointed_at:
            point(self.folder, "best", self.folder / best.name)
            self._pointed_at = best.name

    def _prune(self) -> None:
        if self._keep < 0:
            return
        kept = {one.name for one in ranked(self._written, self._order)[: self._keep]}
        kept |= pointed(self.folder)
        if self._newest_too and self.newest is not None:
            kept.add(self.newest.name)
        for one in self._written:
            if one.name not in kept:
                remove_checkpoint(self.folder / one.name)
        self._written = [one for one in self._written if one.name in kept]

    def _forget_vanished(self) -> None:
        """Forget what somebody else has removed, damaged or replaced."""
        there = [one for one in self._written if _created(self.folder / one.name) == one.created]
        gone = [one.name for one in self._written if one not in there]
        if gone:
            log.info("No longer in %s, and forgotten: %s.", self.folder, listed(gone))
        self._written = there

    # -- resuming ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs; what is being saved is part of it."""
        return {
            "written": [asdict(one) for one in self._written],
            "pending": [asdict(one) for one in self._pending.values()],
            "number": self._number,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take it back; `resumed` then compares it with what is there."""
        self._written = [Written(**one) for one in state["written"]]
        self._pending = {one["name"]: Written(**one) for one in state["pending"]}
        self._number = int(state["number"])

    def resumed(self, path: Path) -> None:
        """Compare what was loaded with the folder; this path is what training was resumed from."""
        for name, one in self._pending.items():
            itself = path.parent.resolve() == self.folder.resolve() and (
                path.name == name or _is_variant(path, name)
            )
            found = path if itself else self.folder / name
            created = _created(found)
            if created is None:
                log.info("The checkpoint %s was asked for and never saved.", found)
            else:
                self._written.append(replace(one, name=found.name, created=created))
        self._pending = {}
        self._forget_vanished()


def pointed(folder: Path) -> set[str]:
    """Return the names of the checkpoints that `last` and `best` name."""
    names: set[str] = set()
    for pointer in ("last", "best"):
        try:
            names.add((folder / pointer).read_bytes().decode(errors="replace").strip())
        except OSError:
            continue
    return names


def remove_checkpoint(path: Path) -> bool:
    """Remove a checkpoint's folder; False, with a line in the log, when it is left alone.

    Only what was written as a checkpoint is removed: a folder with a valid manifest and nothing
    that the manifest does not name. It gets a temporary name first, so that a kill leaves nothing
    that looks like a checkpoint.
    """
    try:
        manifest = read_manifest(path)
        foreign = {p.name for p in path.iterdir()} - {"manifest.json", *manifest["files"]}
        if path.is_symlink() or foreign:
            what = f"it holds {listed(sorted(foreign))} too" if foreign else "it is a link"
            log.warning("The checkpoint %s is not removed: %s.", path, what)
            return False
        with temporary_folder(path.parent, path.name) as temporary:
            path.rename(temporary / path.name)
    except (CheckpointError, OSError) as error:
        log.warning("The checkpoint %s could not be removed: %s", path, error)
        return False
    return True


def _created(path: Path) -> str | None:
    """When a checkpoint was written; None when there is none."""
    try:
        return str(read_manifest(path)["created"])
    except CheckpointError:
        return None


def _is_free(path: Path) -> bool:
    return not os.path.lexists(path) and path.resolve() not in _asked_for


def _is_variant(path: Path, name: str) -> bool:
    """Whether this is the name with `_2`, `_3` … added, because it was taken."""
    return re.fullmatch(re.escape(name) + r"_\d+", path.name) is not None
