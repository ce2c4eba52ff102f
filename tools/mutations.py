"""Make the mistakes of `tests/mutations.toml` in a copy of the code: do the tests notice them?

    python tools/mutations.py                              # all of them
    python tools/mutations.py trainer-means-not-restored   # only these

Each mistake is made in a copy of `src`, with which the tests then run that have to fail. A test
that waits for ever has noticed it, too. Before that, the same tests have to pass without one, in
the same time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from time import sleep
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 120  # for the tests of one mistake: if they take longer, something waits for ever
PYTEST = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider")


@contextmanager
def copied_source() -> Iterator[Path]:
    """Give a temporary folder with a copy of `src`."""
    with tempfile.TemporaryDirectory(prefix="hookline_", ignore_cleanup_errors=True) as folder:
        shutil.copytree(ROOT / "src", Path(folder, "src"))
        yield Path(folder)


def run_python(folder: Path, *arguments: str) -> tuple[int | None, str]:
    """Run Python with the code in a folder; return its exit code (None: too slow) and output."""
    output = folder / "output.txt"  # not a pipe: what a test has started may keep that open
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(folder / "src")},  # also of what tests start
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group of its own, which is ended as a whole
        )
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(SECONDS)
        with suppress(ProcessLookupError):
            if code is None:  # torchrun ends its ranks, which are in groups of their own
                os.killpg(process.pid, signal.SIGTERM)
                sleep(5)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return code, output.read_text(errors="replace")


def show_place() -> None:
    """Show which code the tests run, and raise if it is not the copy."""
    with copied_source() as folder:
        _, output = run_python(folder, "-c", "import hookline; print(hookline.__file__)")
        print(f"The tests run {output.strip()}, a copy for each.", flush=True)
        assert output.startswith(str(folder)), "the tests would run other code than the copy"


def check_tests(tests: tuple[str, ...]) -> str:
    """Run tests without a mistake; return "" if they pass in time."""
    with copied_source() as folder:
        code, output = run_python(folder, *PYTEST, *tests)
    return "" if code == 0 else "TOO SLOW" if code is None else f"{output[-3000:]}\nFAILED"


def judge(mutation: dict[str, Any]) -> str:
    """Make a mistake in a copy of the code, and run its tests; return what came of it."""
    with copied_source() as folder:
        file = folder / mutation["file"]
        text = file.read_text() if file.is_file() else ""
        if (count := text.count(mutation["old"])) != 1:
            return f"NOT APPLIED: `old` occurs {count} times in {mutation['file']}"
        file.write_text(text.replace(mutation["old"], mutation["new"]))
        code, output = run_python(folder, *PYTEST, *mutation["killed_by"])
    if code is None:
        return f"killed (nothing happened for {SECONDS} s)"
    if code in (4, 5) or "during collection" in output:  # no such test, or no such import
        return f"NOT RUN: {output[-1000:]}"
    if code == 0:
        return "SURVIVED"
    starts = "FAILED tests/", "ERROR tests/"
    failed = [line.split(" ", 1)[1] for line in output.splitlines() if line.startswith(starts)]
    return f"killed by {failed[0][:120] if failed else f'exit code {code}'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="which mistakes; all if none is named")
    parser.add_argument("--jobs", type=int, default=1, help="how many of them at a time")
    parser.add_argument("--unchecked", action="store_true", help="do not run the tests without any")
    given = parser.parse_args()
    mutations = tomllib.loads((ROOT / "tests" / "mutations.toml").read_text())["mutation"]
    if unknown := set(given.names) - {mutation["name"] for mutation in mutations}:
        parser.error(f"there is no mutation {', '.join(sorted(unknown))}")
    chosen = [m for m in mutations if not given.names or m["name"] in given.names]
    show_place()
    problems = []
    with ThreadPoolExecutor(given.jobs) as pool:
        groups = [] if given.unchecked else sorted({tuple(m["killed_by"]) for m in chosen})
        for tests, problem in zip(groups, pool.map(check_tests, groups), strict=True):
            if problem:
                problems.append(tests[0])
            print(f"{problem or 'passed'} without a mistake: {', '.join(tests)}", flush=True)
        if problems:
            return 1
        for mutation, outcome in zip(chosen, pool.map(judge, chosen), strict=True):
            print(f"{mutation['name']:<48} {outcome}", flush=True)
            if not outcome.startswith("killed"):
                problems.append(mutation["name"])
    print(f"{len(chosen) - len(problems)} of {len(chosen)} killed")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
