"""Names the processes that make the others wait.

Each process writes to the process group's store where it stands, from a thread: the batch, the
stage within it, and whether it waits for the others. A thread of rank 0 reads that, and names the
processes that have stood behind the others for some time, and those that write nothing any more.
There is no collective, so it works while all processes are stuck in one.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from hookline.loop.processes import SingleProcessGroup

log = logging.getLogger("hookline")

STAGES = ("before forward", "forward or loss", "backward or after it", "waiting for the others")
_LONGEST = 10.0  # seconds between two writes
_runs = iter(range(1 << 62))  # fits of this process, the same number in all processes


@dataclass
class _Seen:
    """One process as rank 0 sees it, with its own clock."""

    heard: float
    moved: float
    beat: int = -1
    place: tuple[int, ...] = ()
    host: str = ""
    behind_since: float | None = None  # others are further


class RankWatch:
    """Writes where this process stands; in rank 0 it also names those that are behind.

    Args:
        processes: the processes that train together.
        after: a process is named when it has been behind for so many seconds.
        place: returns where this process stands, in an order that is the same in all: its epoch,
            -1 if it is not known; its batch; and its stage, an index of `STAGES`.
        report: called in rank 0, from a thread, with a kind of event and its fields.
    """

    def __init__(
        self,
        processes: SingleProcessGroup,
        after: float,
        place: Callable[[], tuple[int, int, int]],
        report: Callable[..., None],
    ) -> None:
        self._processes, self._rank = processes, processes.rank
        self._after, self._place, self._report = after, place, report
        stores: Any = dist
        store: Any = _get_default_store()
        store = store.clone() if hasattr(store, "clone") else store  # a connection of its own
        self._store = stores.PrefixStore(f"hookline/ranks/{next(_runs)}", store)
        now = monotonic()
        self._seen = {rank: _Seen(now, now) for rank in range(processes.size)}
        self._named: set[int] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hookline-ranks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join(timeout=1.0)  # it may wait for the store

    def _run(self) -> None:
        host = f"{socket.gethostname()}, process {os.getpid()}"
        beat = 0
        try:
            while not self._ended.wait(min(self._after / 4, _LONGEST) if beat else 0.0):
                beat += 1
                epoch, batch, stage = self._place()
                stage = len(STAGES) - 1 if self._processes.is_waiting else stage
                written = json.dumps([beat, (epoch, batch, stage), host])
                self._store.set(str(self._rank), written)
                if self._rank == 0:
                    self._read()
                    self._name_ranks()
        except Exception:  # the store has ended: its processes end, too
            log.debug("The watch over the ranks has ended.", exc_info=True)

    def _read(self) -> None:
        seen_ranks = self._seen.items()
        known = [r for r, seen in seen_ranks if seen.beat >= 0 or self._store.check([str(r)])]
        values = self._store.multi_get([str(rank) for rank in known])
        now = monotonic()
        for rank, value in zip(known, values, strict=True):
            beat, place, host = json.loads(value)
            seen = self._seen[rank]
            if beat != seen.beat:
                seen.beat, seen.heard = beat, now
            if tuple(place) != seen.place:
                seen.place, seen.moved, seen.host = tuple(place), now, host

    def _name_ranks(self) -> None:
        now, after = monotonic(), self._after
        missing = {r for r, seen in self._seen.items() if now - seen.heard > after}
        present = [seen for r, seen in self._seen.items() if r not in missing]
        front = max((seen.place for seen in present), default=())
        behind: set[int] = set()
        for rank, seen in self._seen.items():
            if rank in missing or seen.place >= front:
                seen.behind_since = None
                continue
            if seen.behind_since is None:  # until now, it may have waited for the others
                seen.behind_since = now
            if now - max(seen.moved, seen.behind_since) > after:
                behind.add(rank)
        named = missing | behind
        if named == self._named:
            return
        new, self._named = named - self._named, named
        for rank in sorted(new):
            fields = self._describe(rank, now, is_missing=rank in missing)
            log.warning("Rank %d is behind: %s", rank, fields.pop("text"))
            self._record("rank_behind", **fields)
        if not named:
            log.info("No rank is behind any more.")
            self._record("ranks_together")

    def _describe(self, rank: int, now: float, *, is_missing: bool) -> dict[str, Any]:
        seen = self._seen[rank]
        seconds = round(now - (seen.heard if is_missing else seen.moved), 1)
        epoch, batch, stage = seen.place or (0, 0, 0)
        at = f"{f'epoch {epoch}, ' if epoch >= 0 else ''}batch {batch}, {STAGES[stage]}"
        where = f" ({seen.host})" if seen.host else ""
        if is_missing:
            text = f"nothing was heard of it for {seconds} s{where}. It last stood at {at}."
        else:
            text = f"it has stood at {at} for {seconds} s{where}, and others wait for it."
        fields = {"rank": rank, "missing": is_missing, "seconds": seconds, "host": seen.host}
        place = {"epoch": None if epoch < 0 else epoch, "batch": batch, "stage": STAGES[stage]}
        return {**fields, **place, "text": text}

    def _record(self, kind: str, **fields: Any) -> None:
        try:
            self._report(kind, **fields)
        except Exception:  # the run has ended meanwhile
            log.debug("An event of the ranks was not recorded.", exc_info=True)
