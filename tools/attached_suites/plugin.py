"""A pytest plugin that attaches a session to every trainer that the tests of a library make.

    PYTHONPATH=src:tools python -m pytest -p attached_suites.plugin --library ignite \
        --hooks all --results attached.jsonl <the suite's tests>

With `--hooks none` nothing is attached: the same run, to compare with. Each test is a line of the
results: its outcome, how many sessions were attached, a hash of all weights after each step of an
optimizer, and what Hookline has logged as a warning or an error.
"""

from __future__ import annotations

import json
import logging
import random
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from torch.optim.optimizer import register_optimizer_step_post_hook

from attached_suites import attaching

SEED = 20240229
MAX_HASHED_BYTES = 200_000_000


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("attached suites")
    group.addoption("--library", choices=list(attaching.LIBRARIES), required=True)
    group.addoption("--hooks", choices=["none", "silent", "all"], default="all")
    group.addoption("--results", type=Path, required=True)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Recorder(config), "attached-suites")


class _Messages(logging.Handler):
    """Collects what Hookline logs as a warning or an error."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + "".join(traceback.format_exception(*record.exc_info))
        self.texts.append(text)


class _Recorder:
    """Attaches sessions while tests run, and writes one line for each test."""

    def __init__(self, config: pytest.Config) -> None:
        self._path: Path = config.getoption("--results").absolute()
        self._path.write_text("")
        self._hash = xxhash.xxh3_64()
        self._steps = 0
        self._line: dict[str, Any] = {}
        self._messages = _Messages()
        self._sessions: attaching.Sessions | None = None
        register_optimizer_step_post_hook(self._hash_weights)
        if (hooks := config.getoption("--hooks")) != "none":
            logging.getLogger("hookline").addHandler(self._messages)
            runs = tempfile.mkdtemp(prefix="attached-suites-")
            self._sessions = attaching.Sessions(hooks, runs)
            attaching.LIBRARIES[config.getoption("--library")](self._sessions)

    def _hash_weights(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or type(self)._is_too_large(optimizer):
            return
        self._steps += 1
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                # Tests of PyTorch give others made by `torch.empty`, whose values are accidental.
                if isinstance(parameter, torch.nn.Parameter):
                    self._hash.update(_as_bytes(parameter))

    @staticmethod
    def _is_too_large(optimizer: torch.optim.Optimizer) -> bool:
        sizes = (p.numel() for group in optimizer.param_groups for p in group["params"])
        return sum(sizes) * 4 > MAX_HASHED_BYTES

    def pytest_collectstart(self) -> None:
        _seed()  # modules make data when they are imported

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._hash.reset()
        self._steps = 0
        self._messages.texts.clear()
        self._line = {"test": item.nodeid, "outcome": "passed"}
        if self._sessions is not None:
            self._sessions.count = 0
        _seed()
        try:
            return (yield)
        finally:
            self._line["sessions"] = 0 if self._sessions is None else self._sessions.count
            self._line["steps"] = self._steps
            self._line["weights"] = self._hash.hexdigest()
            self._line["messages"] = list(self._messages.texts)
            with self._path.open("a") as file:
                file.write(json.dumps(self._line) + "\n")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        try:
            return (yield)
        finally:
            if self._sessions is not None:
                self._sessions.end_test()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self._line["seconds"] = round(report.duration, 3)
        if report.outcome != "passed" and self._line.get("outcome") == "passed":
            self._line["outcome"] = report.outcome
            self._line["cause"] = str(report.longrepr)[-6000:]


def _seed() -> None:
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


def _as_bytes(tensor: torch.Tensor) -> bytes:
    """Return the values of a tensor; those of one that has none on this machine as nothing."""
    try:
        plain = tensor.detach().cpu().contiguous().clone()
        return plain.flatten().view(torch.uint8).numpy().tobytes()
    except (RuntimeError, NotImplementedError, TypeError):
        return b""
