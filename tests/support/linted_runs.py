"""A pytest plugin that adds `Lint` to every training run of the tests, and fails for false alarms.

    pytest -p linted_runs -n 3 tests/trainer tests/loop tests/integrations tests/hooks

What tests compare does not count here, since many list the hooks that they expect. Their runs
count, and what `Lint` finds in them. Findings that are true, since a test trains in a way that is
wrong on purpose, are in `linted_runs.toml`, with the reason. Runs in processes that tests start are
not linted.
"""

from __future__ import annotations

import json
import os
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

from hookline import Lint
from hookline.loop.loop import Loop

_FILE = "HOOKLINE_LINTED_RUNS"
_KNOWN = Path(__file__).with_suffix(".toml")

_make_loop = Loop.__init__
_process = os.getpid()


class TestLint(Lint):
    """A `Lint` that writes down what it has found in a run."""

    __test__ = False

    def _summarize(self, trainer: Any, steps: int) -> None:
        super()._summarize(trainer, steps)
        if os.getpid() != _process:
            return
        failed = {n: why for n, why in self.left_out.items() if why.startswith("it failed (")}
        row = {
            "test": os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0],
            "steps": steps,
            "findings": [finding.as_dict() for finding in self.findings],
            "failed": failed,
        }
        with Path(os.environ[_FILE]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _make_linted_loop(self: Loop, context: Any, hooks: Any, *args: Any, **options: Any) -> None:
    if not any(isinstance(hook, Lint) for _, hook, _ in hooks.of_kind("loop")):
        hooks.add_hook(TestLint())
    _make_loop(self, context, hooks, *args, **options)


def pytest_configure(config: pytest.Config) -> None:
    """Lint every loop from now on; no test is made simpler when it fails."""
    if not hasattr(config, "workerinput") and _FILE not in os.environ:
        handle, name = tempfile.mkstemp(prefix="linted-runs-", suffix=".jsonl")
        os.close(handle)
        os.environ[_FILE] = name
    Loop.__init__ = _make_linted_loop  # type: ignore[method-assign]
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("linted", settings.get_profile("hookline"), phases=phases)
    settings.load_profile("linted")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Iterator[None]:
    """Take every test as passed."""
    outcome: Any = yield
    report = outcome.get_result()
    if report.failed:
        report.outcome, report.longrepr = "passed", None


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail only for findings that nobody has explained, and for checks that failed."""
    if not hasattr(session.config, "workerinput"):
        session.exitstatus = 1 if _judge()[1] else 0


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how many runs were linted, and what was found in them."""
    runs, problems, expected = _judge()
    terminalreporter.section("linted runs")
    write = terminalreporter.write_line
    write(f"{len(runs)} runs with {sum(run['steps'] for run in runs)} steps")
    for name, count in expected.most_common():
        write(f"{count:5d} expected findings of {name}")
    for problem in problems:
        write(problem)


def _judge() -> tuple[list[Any], list[str], Counter[str]]:
    """Return the runs that have trained, what is wrong in them, and the expected findings."""
    runs = [json.loads(line) for line in Path(os.environ[_FILE]).read_text("utf-8").splitlines()]
    known = tomllib.loads(_KNOWN.read_text("utf-8"))
    problems: list[str] = []
    expected: Counter[str] = Counter()
    for run in runs:
        test = run["test"].partition("[")[0]
        for finding in run["findings"]:
            if finding["check"] in known.get(test, {}):
                expected[finding["check"]] += 1
            else:
                what = f"{finding['check']} at step {finding['step']}: {finding['subject']}"
                problems.append(f"{run['test']}: {what}: {finding['message']}")
        problems += [f"{run['test']}: the check {n} {why}" for n, why in run["failed"].items()]
    return [run for run in runs if run["steps"]], problems, expected
