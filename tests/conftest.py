"""Fixtures that several test files use."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_checkpoints import make_template
from hypothesis import settings
from packages import install_package
from promise_suites import PROMISE_SUITES
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

# Tests compare the records of runs, also of other processes: on a slow machine some would take long
# enough for samples of the system.
os.environ["HOOKLINE_SAMPLE_SECONDS"] = "0"
# Thousands of tiny runs would each have a page of 5 MB; tests of reports turn them on.
os.environ.setdefault("HOOKLINE_REPORT", "0")

# A case may take as long as the machine needs for it. `make test` tries the same cases each time:
# it fails for what a change broke. `make soak` looks for new cases.
settings.register_profile("hookline", deadline=None, derandomize=True)
settings.load_profile("hookline")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts jobs in the background like that, and the commands that tests interrupt would
    # inherit it and never end.
    signal.signal(signal.SIGINT, signal.default_int_handler)


_loader_iterators: weakref.WeakSet[Any] = weakref.WeakSet()
_init_iterator = _MultiProcessingDataLoaderIter.__init__


def _init_and_note(self: Any, *args: Any, **options: Any) -> None:
    _loader_iterators.add(self)
    _init_iterator(self, *args, **options)


_MultiProcessingDataLoaderIter.__init__ = _init_and_note  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def _end_workers() -> Iterator[None]:
    """End the workers of loaders after each test: the garbage collector takes 5 s for each."""
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


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an installed package that provides hooks, `acme-hooks`."""
    return install_package(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with good checkpoints, which tests copy and change."""
    return make_template(tmp_path_factory.mktemp("template"))


def pytest_collection_finish() -> None:
    """Keep what is imported by now out of later collections: many tests ask for one, 0.5 s each."""
    gc.collect()
    gc.freeze()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests of the suites that hold the promises."""
    if item.path.name in PROMISE_SUITES:
        item.add_marker(pytest.mark.promise)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests marked `gpu` where there are not enough devices: a skip would fail in CI."""
    devices = torch.cuda.device_count()

    def needed(item: pytest.Item) -> int:
        mark = item.get_closest_marker("gpu")
        return 0 if mark is None else mark.kwargs.get("devices", 1)

    left_out = [item for item in items if needed(item) > devices]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if needed(item) <= devices]
