"""Retention: which checkpoints of a writer are kept, and how the others are removed.

A `Retention` belongs to one writer. It removes only checkpoints that this writer wrote, never one
that `last` or `best` names, and only after the next checkpoint is durable.

The state for resuming does not depend on when a checkpoint became durable: it lists those that are
kept once everything requested is saved. Which of them exist is read from the folder on resuming. A
checkpoint is the writer's own if it is of the same run and its own state, written with it, lists
it.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hookline.checkpoint.atomic_files import numbered_paths, sync, temporary_folder
from hookline.checkpoint.catalog import (
    is_checkpoint_name,
    is_count,
    read_json,
    read_manifest,
    read_pointers,
    scan_checkpoints,
    set_pointer,
)
from hookline.errors import CheckpointError, listed
from hookline.files import file_limits

log = logging.getLogger("hookline")

Mode = Literal["min", "max"]
"""Which score is better: the lower or the higher one."""

_reserved: set[Path] = set()
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

    def state_dict(self) -> dict[str, Any]:
        """Return what is saved: all but the time of creation."""
        return {"name": self.name, "step": self.step, "number": self.number, "score": self.score}


@dataclass(frozen=True)
class KeepRules:
    """Which checkpoints of a list are kept, the oldest first; one that any rule keeps is kept.

    Attributes:
        last: The newest N; -1 for all.
        best: The K with the best scores; -1 for all. Those without a finite score come last, the
            newest of them first.
        mode: Which score is better.
        every: Of every M steps, the first checkpoint, for ever.
    """

    last: int = 0
    best: int = 0
    mode: Mode = "min"
    every: int | None = None

    def newest(self, count: int) -> set[int]:
        """Return the indices of the newest of so many checkpoints."""
        return set(range(0 if self.last == -1 else max(count - self.last, 0), count))

    def rank(self, scores: Sequence[float | None]) -> list[int]:
        """Return the indices of the best scores, the best first; of equal ones the earlier."""

        def key(index: int) -> tuple[bool, float]:
            score = scores[index]
            if score is None or not math.isfinite(score):
                return True, -index  # a run that never has a score is resumed from the newest
            return False, score if self.mode == "min" else -score

        ranked = sorted(range(len(scores)), key=key)
        return ranked if self.best == -1 else ranked[: self.best]

    def first_of_intervals(self, steps: Sequence[int | None]) -> set[int]:
        """Return the indices of those that are kept for ever; a step of None is not known."""
        first: dict[int, int] = {}  # by the number of complete intervals
        for index, step in enumerate(steps):
            if self.every is not None and step is not None:
                first.setdefault(step // self.every, index)
        return {index for interval, index in first.items() if interval}


class Retention:
    """The checkpoints of one writer.

    Call `reserve` before a checkpoint is saved: the writer's state, which is part of that
    checkpoint, then includes it. Call `add_saved` for every checkpoint that is durable; it removes
    the checkpoints that are no longer kept. Call `discard` for one that could not be saved.
    """

    def __init__(
        self,
        *,
        keep_best: int = 0,
        mode: Mode = "min",
        keep_last: int = 0,
        keep_every: int | None = None,
        weights_only: bool = False,
    ) -> None:
        self._weights_only = weights_only
        self._rules = KeepRules(last=keep_last, best=keep_best, mode=mode, every=keep_every)
        self._folder: Path | None = None
        self._best_name: str | None = None
        self._resumed_from: str | None = None  # is kept until the next checkpoint is durable
        self._start()

    def _start(self) -> None:
        self._saved: list[RetainedCheckpoint] = []
        self._pending: dict[str, RetainedCheckpoint] = {}
        self._latest: list[RetainedCheckpoint] = []  # those of the last step that had any
        self._restored: list[RetainedCheckpoint] = []
        self._number = 0

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
        """The best durable checkpoint; None if nothing is ranked, or no score is finite."""
        return next(iter(self.best_ranked), None)

    @property
    def best_ranked(self) -> list[RetainedCheckpoint]:
        """The durable checkpoints that are kept for their finite scores, the best first."""
        oldest_first = _sort(self._saved)
        ranked = self._rules.rank([one.score for one in oldest_first])
        best = [oldest_first[index] for index in ranked]
        return [one for one in best if one.score is not None and math.isfinite(one.score)]

    @property
    def newest(self) -> RetainedCheckpoint | None:
        """The newest durable checkpoint."""
        return max(self._saved, key=lambda checkpoint: checkpoint.number, default=None)

    def path_of(self, checkpoint: RetainedCheckpoint | None) -> Path | None:
        """Return the folder of a checkpoint; None for None."""
        return None if checkpoint is None else self.folder / checkpoint.name

    def open(self, folder: Path, *, resumed: bool) -> None:
        """Set the folder when training starts; unless resumed, start with no checkpoints."""
        self.release()
        self._folder = Path(folder).absolute()  # the process may change its working folder
        self._best_name = self._resumed_from = None
        if not resumed:
            self._start()

    # -- saving -----------------------------------------------------------------------------------

    def would_keep(self, step: int, score: float | None) -> bool:
        """Return whether a new checkpoint would be kept, if those being saved are."""
        new = RetainedCheckpoint("", step, self._number, score)
        return new in self._choose_kept([*self._saved, *self._pending.values(), new])

    def reserve(self, name: str, step: int, score: float | None) -> Path:
        """Reserve a path that does not exist and that no other writer gets.

        If the name is taken, `_2`, `_3` … is added. The checkpoint is ranked by the score.
        """
        paths = numbered_paths(self.folder / name)
        path = next(p for p in paths if not os.path.lexists(p) and p.resolve() not in _reserved)
        _reserved.add(path.resolve())
        checkpoint = RetainedCheckpoint(path.name, step, self._number, score)
        self._pending[path.name] = checkpoint
        self._latest = [*(one for one in self._latest if one.step == step), checkpoint]
        self._number += 1
        return path

    def rescore(self, step: int, score: float | None) -> None:
        """Set the score of the checkpoints of a step, and rank again."""

        def rescored(checkpoints: Iterable[RetainedCheckpoint]) -> list[RetainedCheckpoint]:
            return [replace(c, score=score) if c.step == step else c for c in checkpoints]

        self._saved, self._latest = rescored(self._saved), rescored(self._latest)
        self._pending = {c.name: c for c in rescored(self._pending.values())}
        self._apply_rules()

    def add_saved(self, path: Path) -> bool:
        """Register a durable checkpoint and remove those that are no longer kept.

        Return False if the checkpoint was not reserved by this writer.
        """
        checkpoint = self._find_pending(path)
        if checkpoint is None:
            return False
        self._take_pending(checkpoint)
        created = _read_created(path) or ""
        self._saved.append(replace(checkpoint, name=path.name, created=created))
        self._resumed_from = None
        self._forget_missing()
        self._apply_rules()
        return True

    def discard(self, path: Path) -> RetainedCheckpoint | None:
        """Free a reserved name whose checkpoint could not be saved; return what was reserved."""
        checkpoint = self._find_pending(path)
        if checkpoint is not None:
            self._take_pending(checkpoint)
            self._latest = [one for one in self._latest if one.number != checkpoint.number]
        return checkpoint

    def release(self) -> None:
        """Free the reserved names: nothing more will be saved under them."""
        if self._folder is not None:
            paths = ((self._folder / name).resolve() for name in self._pending)
            _reserved.difference_update(paths)

    def _take_pending(self, checkpoint: RetainedCheckpoint) -> None:
        del self._pending[checkpoint.name]
        _reserved.discard((self.folder / checkpoint.name).resolve())

    def _find_pending(self, path: Path) -> RetainedCheckpoint | None:
        """Return what was reserved for this path."""
        if self._folder is None or path.parent.resolve() != self.folder.resolve():
            return None
        return self._pending.get(path.name)

    # -- which are kept ---------------------------------------------------------------------------

    def _choose_kept(self, checkpoints: Iterable[RetainedCheckpoint]) -> list[RetainedCheckpoint]:
        """Return those that a rule keeps, oldest first."""
        oldest_first, rules = _sort(checkpoints), self._rules
        kept = rules.newest(len(oldest_first))
        kept |= {*rules.rank([one.score for one in oldest_first])}
        kept |= rules.first_of_intervals([one.step for one in oldest_first])
        return [one for index, one in enumerate(oldest_first) if index in kept]

    def _apply_rules(self) -> None:
        """Make `best` name the best checkpoint, and remove those that are not kept."""
        try:
            best = self.best
            if best is not None and best.name != self._best_name:
                set_pointer(self.folder, "best", self.folder / best.name)
                self._best_name = best.name
        finally:
            self._remove_others()

    def _remove_others(self) -> None:
        kept = {checkpoint.name for checkpoint in self._choose_kept(self._saved)}
        if len(kept) == len(self._saved):
            return
        kept.update(read_pointers(self.folder).values())
        if self._resumed_from is not None:
            kept.add(self._resumed_from)
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

    # -- resuming ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state for resuming; it includes checkpoints that are being saved."""
        kept = self._choose_kept([*self._saved, *self._pending.values()])
        return {
            "kept": [checkpoint.state_dict() for checkpoint in kept],
            "latest": [checkpoint.state_dict() for checkpoint in self._latest],
            "number": self._number,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; `reconcile` then finds the checkpoints in the folder."""
        if not isinstance(state, Mapping) or not is_count(state.get("number")):
            raise CheckpointError("The saved list of checkpoints is damaged: it has no number.")
        kept, latest = (_read_entries(state.get(name)) for name in ("kept", "latest"))
        self._start()
        self._latest, self._number = latest, state["number"]
        self._restored = list({c.name: c for c in (*kept, *latest)}.values())

    def reconcile(self, path: Path, *, writer: str, run_id: str | None) -> None:
        """Find the writer's checkpoints in the folder, and apply the rules to them.

        A checkpoint that was requested but never became durable is forgotten, unless it was to be
        saved with the one that was resumed from: it is made from that. One that the restored state
        does not know, because it was saved later or is about to be removed, is found again.

        Args:
            path: The checkpoint that was resumed from.
            writer: The name of the writer's state among the states of hooks.
            run_id: The id of the run; None if there is none. Checkpoints of other runs are never
                touched; without an id, only those in the restored state are recognized.
        """
        try:
            self._complete_save(path, run_id)
        finally:
            self._find_saved(writer, run_id)
            self._resumed_from = path.name
            self._apply_rules()

    def _find_saved(self, writer: str, run_id: str | None) -> None:
        restored = {checkpoint.name: checkpoint for checkpoint in self._restored}
        for found, manifest in scan_checkpoints(self.folder).complete.items():
            own = _find_own(found, writer)
            info = manifest["info"]
            if own is None or (info.get("run_id"), info.get("step")) != (run_id, own.step):
                continue
            known = restored.pop(own.name, None)
            if known is not None and known.number != own.number:
                known = None  # another checkpoint had this name
            if known is not None or run_id is not None:
                saved = replace(known or own, name=found.name, created=manifest["created"])
                self._saved.append(saved)
        self._saved = _sort(self._saved)
        self._number = max([self._number, *(c.number + 1 for c in self._saved)])
        if restored:
            log.info("Not in %s, and forgotten: %s.", self.folder, listed(restored))
        self._restored = []

    def _complete_save(self, path: Path, run_id: str | None) -> None:
        """Make the checkpoints that were requested at the same boundary and are not there.

        Several requests at one boundary are one save into several folders, and the process may have
        died between two of them. Those for weights only were written before.
        """
        info = read_manifest(path)["info"]
        if self._weights_only or run_id is None or info.get("run_id") != run_id:
            return
        for checkpoint in self._latest:
            folder = self.folder / checkpoint.name
            if checkpoint.step != info.get("step") or os.path.lexists(folder):
                continue
            with temporary_folder(self.folder, folder.name) as temporary:
                copy = shutil.copytree(path, temporary / "copy", copy_function=_link_or_copy)
                sync(copy)
                copy.rename(folder)
            sync(self.folder)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # the file system has no hard links
        shutil.copyfile(source, target)
        sync(Path(target))


def _find_own(path: Path, writer: str) -> RetainedCheckpoint | None:
    """Return the entry of a checkpoint in the writer's state that was saved with it."""
    from hookline.checkpoint.snapshot import decode  # here, because it imports torch

    try:
        tree = read_json(path / "state.json", file_limits.state_bytes)
        saved = tree["state"]["hooks"][writer]
        entries = _read_entries(decode(saved["checkpoints"]["latest"], {}))
    except Exception:  # saved by another writer, or not a state at all
        return None
    return next((entry for entry in entries if entry.name == path.name), None)


def _read_entries(saved: Any) -> list[RetainedCheckpoint]:
    """Return the checkpoints of a saved state, whose names stay in the folder."""
    if not isinstance(saved, list):
        raise CheckpointError("The saved list of checkpoints is damaged: it is not a list.")
    for fields in saved:
        if not (
            isinstance(fields, dict)
            and fields.keys() == {"name", "step", "number", "score"}
            and is_checkpoint_name(fields["name"])
            and is_count(fields["step"])
            and is_count(fields["number"])
            and (fields["score"] is None or type(fields["score"]) in (int, float))
        ):
            raise CheckpointError(
                "The saved list of checkpoints is damaged: it has the entry "
                f"{str(fields)[:200]}. Expected the name of a folder, step, number and score."
            )
    return [RetainedCheckpoint(**fields) for fields in saved]


def remove_checkpoint(path: Path) -> bool:
    """Remove a checkpoint's folder; return False and log a warning if it is not removed.

    A folder is removed only if it has a valid manifest, and nothing but the files that the manifest
    names.
    It is first moved into a temporary folder, so that a crash leaves no partial checkpoint.
    """
    try:
        manifest = read_manifest(path)
        names = {"manifest.json", *manifest["files"]}
        foreign = {p.name for p in path.iterdir() if p.name not in names or p.is_dir()}
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


def _sort(checkpoints: Iterable[RetainedCheckpoint]) -> list[RetainedCheckpoint]:
    """Return checkpoints, the oldest first."""
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.number)


def _read_created(path: Path) -> str | None:
    try:
        return str(read_manifest(path)["created"])
    except CheckpointError:
        return None
