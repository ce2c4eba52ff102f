"""Fixtures that several test files use."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from depth import is_left_to_soak, scale_cases
from hostile_checkpoints import make_template
from hypothesis import settings
from packages import install_package
from promise_suites import PROMISE_SUITES
from torch.utils.data import _utils
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from hookline.runs import environment

ROOT = Path(__file__).resolve().parents[1]
SUPPORT = Path(__file__).resolve().parent / "support"

# Processes that tests start import the shared modules, too.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]
)
# Tests compare the records of runs, also of other processes: on a slow machine some would take long
# enough for samples of the system.
os.environ["HOOKLINE_SAMPLE_SECONDS"] = "0"
# Thousands of tiny runs would each have a page of 5 MB; tests of reports turn them on.
os.environ.setdefault("HOOKLINE_REPORT", "0")

# A case may take as long as the machine needs for it. `make test` tries the same cases each time:
# it fails for what a change broke. `make soak` looks for new cases.
SHARE_OF_CASES = 0.3
settings.register_profile("hookline", deadline=None, derandomize=True)
settings.load_profile("hookline")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts jobs in the background like that, and the commands that tests interrupt would
    # inherit it and never end.
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Syncing takes long, on a busy disk seconds, and no test cuts the power. Tests of what is synced
# replace these functions by their own.
os.fsync = os.fdatasync = lambda fd: None

# So many seconds a loader that the garbage collector frees waits for its worker, to which it cannot
# say any more that it should end, before it ends it. (torch: 5 s.)
_utils.MP_STATUS_CHECK_INTERVAL = 0.5

_loader_iterators: weakref.WeakSet[Any] = weakref.WeakSet()
_init_iterator = _MultiProcessingDataLoaderIter.__init__


def _init_and_note(self: Any, *args: Any, **options: Any) -> None:
    _loader_iterators.add(self)
    _init_iterator(self, *args, **options)


_MultiProcessingDataLoaderIter.__init__ = _init_and_note  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def _end_workers() -> Iterator[None]:
    """End the workers of loaders after each test, before the garbage collector does."""
    yield
    for iterator in list(_loader_iterators):
        iterator._shutdown_workers()
        _loader_iterators.discard(iterator)


@pytest.fixture(autouse=True)
def _restore_handlers() -> Iterator[None]:
    """Restore signal handlers after each test: one that a failed test leaves ends the next ones."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture(autouse=True, scope="module")
def _keep_old_objects_out_of_collections() -> None:
    """Freeze what earlier files have imported: many tests ask for a collection, 0.5 s each."""
    gc.collect()
    gc.freeze()


_read_state = environment._read_state


@cache
def _read_own_state() -> dict[str, Any]:
    return _read_state(ROOT, time.monotonic() + 60)


@pytest.fixture(autouse=True)
def _read_git_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask git for the state of this repository once: each of thousands of runs would."""

    def read_state(folder: Path, deadline: float) -> dict[str, Any]:
        return dict(_read_own_state()) if folder == ROOT else _read_state(folder, deadline)

    monkeypatch.setattr(environment, "_read_state", read_state)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an installed package that provides hooks, `acme-hooks`."""
    return install_package(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with good checkpoints, which tests copy and change."""
    return make_template(tmp_path_factory.mktemp("template"))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests of the suites that hold the promises."""
    if item.path.name in PROMISE_SUITES:
        item.add_marker(pytest.mark.promise)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that need more devices than there are, and what `make soak` runs.

    They are deselected: a skip would fail in CI.
    """
    devices = torch.cuda.device_count()
    is_soak = config.pluginmanager.hasplugin("soak")

    def is_left_out(item: pytest.Item) -> bool:
        mark = item.get_closest_marker("gpu")
        needed = 0 if mark is None else mark.kwargs.get("devices", 1)
        return needed > devices or (not is_soak and is_left_to_soak(item))

    if left_out := [item for item in items if is_left_out(item)]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not is_left_out(item)]
    if not is_soak:
        scale_cases(items, SHARE_OF_CASES)
