"""`hookline lint`: silent training bugs of any script, found in its first steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hookline.cli.command_base import (
    RunsFolder,
    check_folder,
    delay_interrupts,
    exit_on_interrupt,
    whole_number,
)
from hookline.cli.run_command import check_command
from hookline.cli.text_output import print_text
from hookline.errors import HooklineError
from hookline.masking import mask_text
from hookline.printable import printable_lines

_NOTHING_TRAINED = 2
_LIMIT = "hookline.hooks.lint.step_limit.StepLimit"


def lint(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            help="The script's own command, as you run it without Hookline.",
            metavar="-- COMMAND",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(help="End the script after so many steps.", **whole_number(1))
    ] = 30,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Make only this check; may be repeated.", metavar="CHECK"),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="Leave out this check; may be repeated.", metavar="CHECK"),
    ] = None,
    passive: Annotated[
        bool, typer.Option("--passive", help="Make no check that calls the model again.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the findings as JSON, and nothing else of ours.")
    ] = False,
    runs: RunsFolder = None,
) -> None:
    """Find silent training bugs of a script in its first steps.

    Example: **hookline lint -- python train.py --lr 1e-3**

    On two ranks: **hookline lint -- torchrun --nproc_per_node 2 train.py**

    The script runs as a child, with its own output, and is ended after **--steps** steps; what it
    does after training is skipped. Training is the same as without the checks.

    Exit codes: 0 without errors, 1 if there are findings that are errors, 2 if nothing was trained
    or the command is wrong. A script that fails by itself passes its own code on.
    """
    with exit_on_interrupt():
        with delay_interrupts():
            from hookline.hooks.lint.lint_hook import Lint
            from hookline.integrations.scripts.run_settings import RunSettings
        options = {"only": only or None, "ignore": ignore or [], "active": not passive}
        try:
            Lint(**options)
        except HooklineError as error:
            print_text(printable_lines(f"hookline: {mask_text(str(error))}"), sys.stderr)
            raise typer.Exit(2) from None
        check_command(command or [], strict=True)
        if runs is not None:
            check_folder(runs, "--runs")
        with tempfile.TemporaryDirectory(prefix="hookline-lint-") as temporary:
            folder = Path(temporary) if runs is None else runs
            folder.mkdir(parents=True, exist_ok=True)
            before = set(folder.iterdir())
            settings = RunSettings(
                hooks=[{"name": "lint", **options}, {"name": _LIMIT, "steps": steps}],
                runs=str(folder.absolute()),
                folder=str(Path.cwd()),
            )
            code = _run(command or [], replace(settings, stopped_code=0))
            events = [
                event
                for run in sorted(set(folder.iterdir()) - before)
                for event in _read_events(run / "events.jsonl")
            ]
        raise typer.Exit(_report(events, code, as_json=as_json))


def _run(command: list[str], settings: Any) -> int:
    """Run the script as a child, and return its exit code; Ctrl-C reaches both."""
    environment = settings.environment(os.environ)
    process = subprocess.Popen(command, env=environment)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise


def _read_events(file: Path) -> list[dict[str, Any]]:
    from hookline.runs import read_records

    kinds = ("finding", "lint")
    return [e for e in read_records(file) if e.get("kind") in kinds] if file.is_file() else []


def _report(events: list[dict[str, Any]], code: int, *, as_json: bool) -> int:
    """Print the findings, and return the exit code."""
    fields = ("check", "severity", "step", "rank", "subject", "message", "fix")
    found = [event for event in events if event["kind"] == "finding"]
    findings = [{name: event.get(name) for name in fields} for event in found]
    summaries = [event for event in events if event["kind"] == "lint"]
    checks = max((summary.get("checks", 0) for summary in summaries), default=0)
    left_out = {k: v for summary in summaries for k, v in summary.get("left_out", {}).items()}
    errors = sum(finding["severity"] == "error" for finding in findings)
    has_trained = any(event.get("steps") for event in summaries) or bool(findings)
    if as_json:
        shown = {"findings": findings, "checks": checks, "left_out": left_out, "exit_code": code}
        print(json.dumps({**shown, "trained": has_trained}, indent=2))
    elif not has_trained:
        print_text(
            "hookline: nothing was trained that could be linted: the script has made no optimizer "
            "step that was seen. See the messages above.",
            sys.stderr,
        )
    else:
        count = f"{len(findings)} finding{'s' * (len(findings) != 1)}"
        print_text(f"hookline: {checks} checks, {count}, {errors} errors.", sys.stderr)
    if errors:
        return 1
    if not has_trained:
        return _NOTHING_TRAINED
    return code if code > 0 else 0 if code == 0 else 128 - code
