"""The store of captured states: limits that hold, and a count of what did not fit."""

from __future__ import annotations

import heapq
import logging
import math
import os
import random
import shutil
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from threading import RLock
from typing import Any, Literal, get_args, overload

from hookline.errors import ConfigError, HookFailedError, HooklineError, listed, nearest
from hookline.probes.captured_state import CONTENTS, CapturedState
from hookline.probes.probe_states import Counts, ProbeStates, Record
from hookline.probes.spilled_state import CannotSpill, Spilled, write
from hookline.probes.storage_counter import StorageCounter
from hookline.tensors.memory import storages

__all__ = ["Counts", "Policy", "Store", "StoreFullError"]

log = logging.getLogger("hookline")

Policy = Literal["drop_oldest", "sample", "spill", "error"]


class StoreFullError(HookFailedError, MemoryError):
    """A state does not fit into the store, and nothing may be dropped: training stops."""


class Store:
    """Keeps captured states within limits. Safe to use from several threads.

    The bytes that are counted are those kept alive: whole storages, also under views, each once,
    however many states share it. They are within `memory_limit` whenever a call returns. Objects
    that are no tensors are not counted.

    Args:
        max_states: How many states of each probe to keep in memory; None for all.
        memory_limit: How many bytes to keep in memory, over all probes; None for any number.
        policy: What happens to what does not fit:

            - `"drop_oldest"`: the oldest goes; for bytes, the oldest of all probes;
            - `"sample"`: what stays is a fair sample of all that a probe has captured, late and
              early alike. Where bytes are short, the probe that holds the most gives up first;
            - `"spill"`: the oldest is written to disk, and read back when it is asked for. Nothing
              is dropped but what cannot be written;
            - `"error"`: `StoreFullError`; what was there stays.
        cleanup_interval: Captures of a probe between two clean-ups of its number of states: in
            between, up to `cleanup_interval - 1` more than `max_states` are kept. The limit on
            bytes, and the policy `"error"`, never wait.
        folder: Where `"spill"` writes, in a new folder that is removed by `close`. By default the
            system's folder for temporary files.
        seed: What `"sample"` draws from: the same captures and seed give the same sample. No other
            random numbers are touched.
    """

    def __init__(
        self,
        max_states: int | None = None,
        memory_limit: int | None = None,
        policy: Policy = "drop_oldest",
        cleanup_interval: int = 1,
        folder: str | os.PathLike[str] | None = None,
        seed: int = 0,
    ) -> None:
        _check(max_states, memory_limit, policy, cleanup_interval, folder)
        self.max_states = max_states
        self.memory_limit = memory_limit
        self.policy: Policy = policy
        self.cleanup_interval = cleanup_interval
        self.seed = seed
        self._limit = math.inf if memory_limit is None else memory_limit
        self._patient = policy in ("drop_oldest", "spill")  # makes room for what is new
        self._lock = RLock()
        self._ledger = StorageCounter()
        self._books: dict[str, ProbeStates] = {}
        self._oldest: OrderedDict[int, ProbeStates] = (
            OrderedDict()
        )  # what is in memory, of all probes
        self._keys = count()
        self._files = count()
        self._closed = False
        self.folder = _new_folder(folder) if policy == "spill" else None
        """Where spilled states are written."""
        self._process = os.getpid()
        self._remove_folder = weakref.finalize(self, _remove, self.folder, self._process)

    # -- what probes do

    def add(self, probe: str, state: CapturedState) -> int:
        """Keep a state, and make room for it.

        Returns:
            A number to `amend` the state by, also when it was dropped.
        """
        places = storages(state.contents())
        nbytes = 0
        for size, _ in places.values():
            nbytes += size
        with self._lock:
            if self._closed:
                raise HooklineError("This store of captured states is closed. Make a new one.")
            book = self._books.get(probe) or self._new_book(probe)
            book.captured += 1
            record = Record(next(self._keys), state, places, nbytes)
            if (self._patient and nbytes <= self._limit) or self._fits(book, record):
                self._keep(book, record)
            if self.max_states is not None:
                self._clean_up(book, self.max_states)
            if self._ledger.nbytes > self._limit:
                self._make_room()
            return record.key

    def amend(self, key: int, **contents: Any) -> bool:
        """Add to a state what came later, such as its gradient, within the limits.

        Args:
            key: What `add` returned.
            contents: `input`, `kwargs`, `output` or `gradient`.

        Returns:
            Whether the state is still there and has it now.
        """
        if unknown := [name for name in contents if name not in CONTENTS]:
            raise TypeError(f"A state has no {listed(unknown)} to amend, but {listed(CONTENTS)}.")
        with self._lock:
            book = self._oldest.get(key)
            if book is not None:
                return self._amend(book, book.memory[key], contents)
            book = next((book for book in self._books.values() if key in book.disk), None)
            return book is not None and self._amend_on_disk(book, book.disk[key], contents)

    # -- what users ask

    def states(self, probe: str) -> list[CapturedState]:
        """Return a probe's states, oldest first; spilled ones are read back, all at once."""
        return self.pick(probe, slice(None))

    def each(self, probe: str, module: str | None = None) -> Iterator[CapturedState]:
        """Yield a probe's states, or a module's of them; spilled ones are read one at a time."""
        with self._lock:
            keys = [record.key for record in self._records(probe, module)]
        for key in keys:
            with self._lock:
                book = self._books.get(probe)
                record = book and (book.memory.get(key) or book.disk.get(key))
                if not record:  # gone in the meantime
                    continue
                state = record.read()
            yield state

    @overload
    def pick(self, probe: str, index: int, module: str | None = None) -> CapturedState: ...
    @overload
    def pick(self, probe: str, index: slice, module: str | None = None) -> list[CapturedState]: ...
    def pick(
        self, probe: str, index: int | slice, module: str | None = None
    ) -> CapturedState | list[CapturedState]:
        """Return what stands at an index among these states; only that is read from disk."""
        with self._lock:
            found = self._records(probe, module)[index]
            return [one.read() for one in found] if isinstance(found, list) else found.read()

    def shells(self, probe: str, module: str | None = None) -> list[CapturedState]:
        """Return these states without reading from disk: there, shapes stand for tensors."""
        with self._lock:
            return [record.shell for record in self._records(probe, module)]

    def _records(self, probe: str, module: str | None) -> list[Record]:
        """These states' records, oldest first."""
        if probe not in self._books:
            return []
        book = self._books[probe]
        records = (*book.memory.values(), *book.disk.values())
        found = [one for one in records if module is None or one.shell.module == module]
        return sorted(found, key=lambda record: record.key)

    def counts(self, probe: str | None = None) -> Counts:
        """Return what became of a probe's states, or of all probes' together."""
        with self._lock:
            if probe is not None:
                return self._books[probe].counts() if probe in self._books else Counts()
            each = [book.counts() for book in self._books.values()]
            return Counts(*map(sum, zip(*each, strict=True))) if each else Counts()

    @property
    def nbytes(self) -> int:
        """The bytes kept in memory, exactly."""
        with self._lock:
            return self._ledger.nbytes

    # -- taking away

    def clear(self, probe: str | None = None) -> None:
        """Free a probe's states, or all; the counts go on. A sample begins anew."""
        with self._lock:
            for book in self._chosen(probe):
                book.cleared += len(book.memory) + len(book.disk)
                for record in list(book.memory.values()):
                    self._free(book, record)
                while book.disk:
                    self._remove_file(book.disk.popitem()[1])
                book.highest.clear()
                book.below = math.inf

    def forget(self, probe: str) -> None:
        """Free everything of a probe, its files and counts too."""
        with self._lock:
            self.clear(probe)
            self._books.pop(probe, None)

    def close(self) -> None:
        """Free everything, and remove what was written."""
        with self._lock:
            self._closed = True
            for probe in list(self._books):
                self.forget(probe)
            self._remove_folder()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        counts = self.counts()
        return f"<Store of {len(self._books)} probes, {self.nbytes} bytes, {counts}>"

    # -- how

    def _new_book(self, probe: str) -> ProbeStates:
        # Each probe draws for itself: what others capture does not change its sample.
        book = self._books[probe] = ProbeStates(probe, random.Random(f"{self.seed} {probe}"))
        return book

    def _chosen(self, probe: str | None) -> list[ProbeStates]:
        if probe is None:
            return list(self._books.values())
        return [self._books[probe]] if probe in self._books else []

    def _fits(self, book: ProbeStates, record: Record) -> bool:
        """Whether to keep a new state in memory; else it has been dealt with."""
        if self.policy == "sample":
            record.rank = book.random.random()
        if self.policy == "error":
            self._refuse(book, record)
        elif record.nbytes > self._limit and self.policy == "spill":
            self._spill(book, record)
            return False
        elif record.nbytes > self._limit:
            book.dropped += 1
            self._warn(
                book,
                f"a state has {record.nbytes} bytes, and memory_limit is {self._limit}. It is "
                "counted as dropped",
            )
            return False
        elif record.rank >= book.below:
            book.dropped += 1
            return False
        return True

    def _refuse(self, book: ProbeStates, record: Record) -> None:
        needed = self._ledger.nbytes + self._ledger.new(record.places)
        if needed > self._limit:
            what = f"would take {needed} bytes, and memory_limit is {self._limit}"
        elif self.max_states is not None and len(book.memory) >= self.max_states:
            what = f"would be one more than max_states, {self.max_states}"
        else:
            return
        book.dropped += 1
        raise StoreFullError(_full(book, what))

    def _keep(self, book: ProbeStates, record: Record) -> None:
        self._ledger.hold(record.places)
        book.nbytes += record.nbytes
        book.memory[record.key] = record
        self._oldest[record.key] = book
        if self.policy == "sample":
            heapq.heappush(book.highest, (-record.rank, record.key))

    def _free(self, book: ProbeStates, record: Record) -> None:
        del book.memory[record.key], self._oldest[record.key]
        book.nbytes -= record.nbytes
        self._ledger.release(record.places)

    def _clean_up(self, book: ProbeStates, max_states: int) -> None:
        """Hold the number of states, every so many captures."""
        book.since_cleanup += 1
        if book.since_cleanup >= self.cleanup_interval:
            book.since_cleanup = 0
            while len(book.memory) > max_states:
                self._give_up(book)

    def _make_room(self) -> None:
        """Hold the bytes. States that share memory free nothing until the last of them goes."""
        while self._ledger.nbytes > self._limit:
            if self.policy == "sample":
                self._give_up(max(self._books.values(), key=lambda book: book.nbytes))
            else:
                self._give_up(next(iter(self._oldest.values())))

    def _give_up(self, book: ProbeStates) -> None:
        """Drop or spill one of a probe's states: the oldest, or what a sample of one less lacks.

        A sample keeps the lowest ranks. Once a rank was too high it is too high for later states
        as well, or these would have had better chances than those before.
        """
        if self.policy == "sample":
            below, key = heapq.heappop(book.highest)
            book.below = -below
        else:
            key = next(iter(book.memory))
        record = book.memory[key]
        self._free(book, record)
        if self.policy == "spill":
            self._spill(book, record)
        else:
            book.dropped += 1

    def _spill(self, book: ProbeStates, record: Record) -> None:
        try:
            book.disk[record.key] = self._written(record.key, record.read())
        except CannotSpill as error:
            book.dropped += 1
            self._warn(book, f"{error}. It is counted as dropped")
        except BaseException:  # such as Ctrl-C while it is written
            book.dropped += 1
            raise

    def _written(self, key: int, state: CapturedState) -> Record:
        assert self.folder is not None
        path = self.folder / f"{next(self._files)}.safetensors"
        return Record(key, write(state, path), {}, 0)

    def _amend(self, book: ProbeStates, record: Record, contents: dict[str, Any]) -> bool:
        state = record.state
        assert isinstance(state, CapturedState)
        held = zip(CONTENTS, state.contents(), strict=True)  # as it stands: nobody waits for it
        before = {name: value for name, value in held if name in contents}
        _set(state, contents)
        places = storages(state.contents())
        full = self._ledger.nbytes + self._ledger.new(places) > self._limit
        alone = _size(places) > self._limit
        if (full and self.policy == "error") or (alone and self.policy != "spill"):
            _set(state, before)
            what = f"with its {listed(contents)} would exceed memory_limit, {self._limit} bytes"
            if self.policy == "error":
                raise StoreFullError(_full(book, what))
            self._warn(book, f"a state {what}. It stays without")
            return False
        self._ledger.hold(places)
        self._ledger.release(record.places)
        book.nbytes += _size(places) - record.nbytes
        record.places, record.nbytes = places, _size(places)
        self._make_room()
        return record.key in book.memory or record.key in book.disk

    def _amend_on_disk(self, book: ProbeStates, record: Record, contents: dict[str, Any]) -> bool:
        state = record.read()
        _set(state, contents)
        try:
            book.disk[record.key] = self._written(record.key, state)
        except CannotSpill as error:
            self._warn(book, f"{error}. The state stays without its {listed(contents)}")
            return False
        self._remove_file(record)
        return True

    def _remove_file(self, record: Record) -> None:
        if isinstance(record.state, Spilled) and os.getpid() == self._process:
            record.state.remove()  # not in a forked worker: the file is its parent's

    def _warn(self, book: ProbeStates, what: str) -> None:
        if not book.warned:
            book.warned = True
            log.warning(
                "Probe '%s': %s. This is said once. Capture less (a slice, another dtype, fewer "
                "modules), or allow more.",
                book.probe,
                what,
            )


def _full(book: ProbeStates, what: str) -> str:
    return (
        f"Probe '{book.probe}' has captured a state that {what}. Clear what is not needed, "
        "capture less, raise the limit, or choose policy='drop_oldest', 'sample' or 'spill'."
    )


def _size(places: dict[Any, tuple[int, Any]]) -> int:
    return sum(size for size, _ in places.values())


def _set(state: CapturedState, contents: dict[str, Any]) -> None:
    for name, value in contents.items():
        setattr(state, name, value)


def _new_folder(parent: str | os.PathLike[str] | None) -> Path:
    try:
        if parent is not None:
            Path(parent).mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="hookline-probes-", dir=parent))
    except OSError as error:
        raise ConfigError(f"folder: {parent} cannot be written to: {error}.") from error


def _remove(folder: Path | None, process: int) -> None:
    if folder is not None and os.getpid() == process:  # not in a forked worker
        shutil.rmtree(folder, ignore_errors=True)


def _check(
    max_states: Any, memory_limit: Any, policy: Any, cleanup_interval: Any, folder: Any
) -> None:
    for name, value, optional in (
        ("max_states", max_states, True),
        ("memory_limit", memory_limit, True),
        ("cleanup_interval", cleanup_interval, False),
    ):
        if value is None and optional:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            none = " or None" if optional else ""
            raise ConfigError(f"{name} is a whole number from 1{none}, not {value!r}.")
    if policy not in get_args(Policy):
        raise ConfigError(
            f"policy is one of {listed(get_args(Policy))}, not {policy!r}."
            + nearest(str(policy), get_args(Policy))
        )
    if folder is not None and policy != "spill":
        raise ConfigError(f"folder is where policy='spill' writes; with {policy!r} it is not used.")
