"""Run a library's own tests plain and with a session attached, and compare.

    PYTHONPATH=src:tools python -m attached_suites.run ignite --checkout <folder> --results <folder>

Exits with 1 if a test that passes plain fails attached or ends with other weights, unless
`expected.toml` names it with a reason.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tomllib
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    suites = tomllib.loads((HERE / "suites.toml").read_text())
    parser.add_argument("library", choices=list(suites))
    parser.add_argument("--checkout", type=Path, required=True, help="the library's sources")
    parser.add_argument("--results", type=Path, required=True, help="a folder for the results")
    parser.add_argument("--hooks", choices=["silent", "all"], default="all")
    parser.add_argument("--keep-plain", action="store_true", help="use the last plain results")
    parser.add_argument("--compare-only", action="store_true", help="run nothing")
    parser.epilog = "Arguments after `--` are pytest's: other tests, or options."
    arguments = sys.argv[1:]
    place = arguments.index("--") if "--" in arguments else len(arguments)
    given, for_pytest = parser.parse_args(arguments[:place]), arguments[place + 1 :]
    suite = _Suite(given.library, suites[given.library], given.checkout, given.results.absolute())
    if not given.compare_only:
        if not given.keep_plain:
            suite.run("none", "plain", for_pytest)
        suite.run(given.hooks, "attached", for_pytest)
    plain, attached = suite.read("plain"), suite.read("attached")
    other = [test for test in attached if _weights_differ(plain, attached, test)]
    again: dict[str, Any] = {}
    if other and not given.compare_only:
        suite.run("none", "plain-again", other)
        again = suite.read("plain-again")
    sys.exit(_compare(given.library, plain, attached, again))


class _Suite:
    """The tests of one library."""

    def __init__(self, library: str, suite: dict[str, Any], checkout: Path, folder: Path) -> None:
        self._library, self._suite, self._checkout = library, suite, checkout
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, hooks: str, name: str, arguments: list[str]) -> None:
        """Run the tests in one process; its output goes to a file beside the results."""
        suite, results = self._suite, self._folder / f"{self._library}-{name}.jsonl"
        are_tests = any("::" in each or (self._checkout / each).exists() for each in arguments)
        command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider"]
        # Otherwise a results' file that exists moves pytest's root, and with it the names of tests.
        command += ["--rootdir", "."]
        command += ["--continue-on-collection-errors", "-p", "attached_suites.plugin"]
        for plugin in suite.get("plugins", ()):
            command += ["-p", plugin]
        command += ["--library", self._library, "--hooks", hooks, "--results", str(results)]
        command += suite.get("options", [])
        if find_spec("pytest_timeout") is not None:
            command += ["--timeout", "300"]
        command += arguments if are_tests else [*suite["tests"], *arguments]
        environment = {**os.environ, **suite.get("environment", {})}
        with results.with_suffix(".log").open("w") as log:
            print(f"{self._library}, {name}: {log.name}")
            subprocess.run(
                command, cwd=self._checkout, env=environment, stdout=log, stderr=log, check=False
            )

    def read(self, name: str) -> dict[str, Any]:
        """Return the results of a run by test."""
        lines = (self._folder / f"{self._library}-{name}.jsonl").read_text().splitlines()
        return {each["test"]: each for each in map(json.loads, lines)}


def _weights_differ(plain: dict[str, Any], attached: dict[str, Any], test: str) -> bool:
    both_pass = test in plain and plain[test]["outcome"] == attached[test]["outcome"] == "passed"
    return both_pass and plain[test]["weights"] != attached[test]["weights"]


def _compare(
    library: str, plain: dict[str, Any], attached: dict[str, Any], again: dict[str, Any]
) -> int:
    """Print what differs, and return 1 if something does that is not expected."""
    passed = [test for test, line in plain.items() if line["outcome"] == "passed"]
    failed = [t for t in passed if t not in attached or attached[t]["outcome"] != "passed"]
    other = [test for test in attached if _weights_differ(plain, attached, test)]
    random = [test for test in other if test in again and _weights_differ(plain, again, test)]
    stepped = [t for t in passed if plain[t]["steps"] and t not in failed]
    have_session = sum(attached[t]["sessions"] > 0 for t in passed if t in attached)
    print(f"{library}: {len(passed)} tests pass plain, {have_session} of them with a session.")
    print(f"  {len(passed) - len(failed)} of {len(passed)} pass attached.")
    equal = len(stepped) - len(other)
    print(f"  {equal} of {len(stepped)} tests with optimizer steps end with equal weights.")
    if not passed:
        print("  Nothing was compared: see the logs.")
        return 1
    expected = tomllib.loads((HERE / "expected.toml").read_text()).get(library, [])
    unexpected = 0
    for test in [*failed, *(test for test in other if test not in random)]:
        reason = next((e["reason"] for e in expected if _is_named(test, e["tests"])), None)
        what = "fails" if test in failed else "has other weights"
        unexpected += reason is None
        cause = attached.get(test, {}).get("cause", "" if test in attached else "not run")
        last = [line for line in cause.splitlines() if line.startswith("E ")][-1:] or [""]
        print(f"  {'UNEXPECTED' if reason is None else 'expected'}: {test} {what}")
        print(f"    {reason or last[0] or cause[-200:]}")
    for test in random:
        print(f"  not reproducible: {test} has other weights in a second plain run, too")
    for each in expected:
        if not any(_is_named(test, each["tests"]) for test in (*failed, *other)):
            print(f"  no longer needed in expected.toml, or not run: {each['tests']}")
    return 1 if unexpected else 0


def _is_named(test: str, patterns: list[str]) -> bool:
    """Return whether a test is one of `file::name` or `name`, where `*` stands for anything."""
    return any(fnmatchcase(test.replace("[", "("), f"*{p.replace('[', '(')}") for p in patterns)


if __name__ == "__main__":
    main()
