"""Run `hookline lint` on the corpus, and count what it finds.

    python -m bench.silent_bugs                       # everything
    python -m bench.silent_bugs bugs healthy --match tied --jobs 2
    python -m bench.silent_bugs --table docs/lint_results.md

Each script is run as a user would run it, to its end: a bug in its wrong and its fixed form. A bug
is caught if there is a finding in the wrong form and none in the fixed one. A finding in a fixed
twin or in a healthy run is a false alarm.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hookline.integrations.scripts.run_settings import RunSettings
from hookline.runs import read_records

ROOT = Path(__file__).parent
FOLDERS = ("bugs", "blind", "blind2", "healthy", "healthy2")
TIMEOUT = 300


@dataclass
class Result:
    """The findings and the exit code of one script."""

    name: str
    folder: str
    facts: dict[str, Any]
    form: str
    findings: list[dict[str, Any]] = field(default_factory=list)
    failed_checks: dict[str, str] = field(default_factory=dict)
    trained: bool = False
    code: int | None = 0
    output: str = ""

    @property
    def is_named(self) -> bool:
        """Whether a finding names what the corpus says is wrong."""
        pattern = self.facts.get("subject", "")
        texts = (f"{f['subject']} {f['message']}" for f in self.findings)
        return any(re.search(pattern, text, re.IGNORECASE) for text in texts)

    @property
    def is_prompt(self) -> bool:
        """Whether it was found within one step of being visible."""
        return any(f["step"] <= self.facts.get("visible", 1) + 1 for f in self.findings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folders", nargs="*", default=FOLDERS, metavar="FOLDER")
    parser.add_argument("--match", default="", help="scripts whose names contain this")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--table", type=Path, help="write the table to this file")
    options = parser.parse_args()
    tasks = [
        (folder, name, facts, form)
        for folder in options.folders
        for name, facts in _corpus(folder)
        if options.match in name
        for form in (("healthy",) if folder.startswith("healthy") else ("bug", "fixed"))
    ]
    with ThreadPoolExecutor(options.jobs) as pool:
        results = []
        for result in pool.map(lambda task: _run(*task), tasks):
            results.append(result)
            shown = ", ".join(f"{f['check']}@{f['step']} ({f['subject']})" for f in result.findings)
            note = "" if result.code == 0 else f" [exit code {result.code}]"
            note += "" if result.trained else " [nothing seen]"
            note += "".join(f" [{k}: {v}]" for k, v in result.failed_checks.items())
            print(f"{result.folder}/{result.name} {result.form}: {shown or '-'}{note}", flush=True)
    table = _table(results)
    print(table)
    if options.table:
        options.table.write_text(table)
    if options.json:
        options.json.write_text(json.dumps([vars(result) for result in results], indent=1))


def _corpus(folder: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the scripts of a folder, with what is known of them."""
    facts: dict[str, Any] = {}
    for file in sorted(ROOT.glob("*.toml")):
        facts |= tomllib.loads(file.read_text())
    for script in sorted((ROOT / folder).glob("*.py")):
        yield script.stem, facts.get(script.stem, {})


def _run(folder: str, name: str, facts: dict[str, Any], form: str) -> Result:
    script = ROOT / folder / f"{name}.py"
    result = Result(name, folder, facts, form)
    launch = [sys.executable]
    if facts.get("ranks", 1) > 1:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launch += ["--nproc_per_node", str(facts["ranks"])]
    command = [*launch, str(script), *(["--fixed"] if form == "fixed" else [])]
    with tempfile.TemporaryDirectory() as runs:
        settings = RunSettings(hooks=[{"name": "lint"}], runs=runs)
        environment = {**settings.environment(os.environ), "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, cwd=runs
            )
            result.code, result.output = done.returncode, done.stdout[-2000:] + done.stderr[-6000:]
        except subprocess.TimeoutExpired:
            result.code = None
        for file in sorted(Path(runs).glob("*/events.jsonl")):
            for event in read_records(file):
                if event["kind"] == "finding":
                    result.findings.append(event)
                elif event["kind"] == "lint":
                    result.trained = result.trained or bool(event.get("steps"))
                    failed = {k: v for k, v in event["left_out"].items() if "it failed" in v}
                    result.failed_checks |= failed
    return result


def _table(results: list[Result]) -> str:
    lines = ["| corpus | scripts | caught | within one step | named | false alarms |"]
    lines.append("|---|---|---|---|---|---|")
    for folder in FOLDERS:
        own = [result for result in results if result.folder == folder]
        wrong = [result for result in own if result.form == "bug"]
        alarms = sum(bool(result.findings) for result in own if result.form != "bug")
        right = len([result for result in own if result.form != "bug"])
        if own:
            caught = [result for result in wrong if result.findings]
            prompt = sum(result.is_prompt for result in caught)
            named = sum(result.is_named for result in caught)
            counts = (len(caught), prompt, named) if wrong else ("", "", "")
            row = [folder, len(wrong) or right, *counts, f"{alarms} of {right}"]
            lines.append("| " + " | ".join(map(str, row)) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
