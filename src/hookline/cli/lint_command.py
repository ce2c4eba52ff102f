"""`hookline lint`: silent training bugs of any script, found in its first steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sized
from pathlib import Path
from typing import Annotated, Any

import typer

from hookline.arguments import user_path
from hookline.cli.command_base import (
    bad_value,
    check_folder,
    exit_on_interrupt,
)
from hookline.cli.run_command import check_command
from hookline.cli.text_output import print_text
from hookline.errors import HooklineError
from hookline.interrupts import HeldInterrupts
from hookline.masking import mask_text
from hookline.printable import printable, printable_lines

_FIELDS = ("check", "severity", "step", "rank", "subject", "message", "fix")
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
    steps: Annotated[int, typer.Option(help="End the script after so many steps.", min=1)] = 30,
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
        bool,
        typer.Option(
            "--json", help="Print the findings as JSON; the script's output goes to stderr."
        ),
    ] = False,
    runs: Annotated[
        Path | None,
        typer.Option(
            "--runs",
            help="Keep the run and its report in this folder of runs; by default nothing is kept.",
            metavar="FOLDER",
            parser=user_path,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Find silent training bugs of a script in its first steps.

    Example: **hookline lint -- python train.py --lr 1e-3**

    On two ranks: **hookline lint -- torchrun --nproc_per_node 2 train.py**

    The script runs as a child, with its own output, and is ended after **--steps** steps; what it
    does after training is skipped. Training is the same as without the checks.

    Exit codes: 1 if there are findings that are errors; else the script's own code if it failed;
    else 2 if nothing was trained or the command is wrong; else 0.
    """
    with exit_on_interrupt():
        with HeldInterrupts():
            from hookline.hooks.lint.lint_hook import Lint
            from hookline.integrations.scripts.run_settings import RunSettings
        options: dict[str, Any] = {
            "only": only or None,
            "ignore": ignore or [],
            "active": not passive,
        }
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
                stopped_code=0,
                is_temporary=runs is None,
            )
            code = _run(command or [], settings, as_json=as_json)
            events = [
                event
                for run in sorted(set(folder.iterdir()) - before)
                for event in _read_events(run / "events.jsonl")
            ]
        raise typer.Exit(_report(events, code, as_json=as_json))


def _run(command: list[str], settings: Any, *, as_json: bool) -> int:
    """Run the script as a child, and return its exit code; Ctrl-C reaches both."""
    environment = settings.environment(os.environ)
    try:
        process = subprocess.Popen(command, env=environment, stdout=sys.stderr if as_json else None)
    except OSError as error:
        shown = printable(command[0], 200)
        raise bad_value("COMMAND", f"'{shown}' cannot be run ({error.strerror}).") from None
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise
    return code if code >= 0 else 128 - code  # as shells do for signals


def _read_events(file: Path) -> list[dict[str, Any]]:
    from hookline.runs import read_records

    kinds = ("finding", "lint")
    return [e for e in read_records(file) if e.get("kind") in kinds] if file.is_file() else []


def _report(events: list[dict[str, Any]], script_code: int, *, as_json: bool) -> int:
    """Print what was found in all training runs of a script, and return the exit code."""
    from hookline.hooks.lint.finding import describe_left_out

    found = [event for event in events if event["kind"] == "finding"]
    summaries = [event for event in events if event["kind"] == "lint"]
    findings = [{name: event.get(name) for name in _FIELDS} for event in found]
    errors = [finding for finding in findings if finding["severity"] == "error"]
    checks = max((each.get("checks", 0) for each in summaries), default=0)
    first, *others = [each.get("left_out", {}) for each in summaries] or [{}]
    left_out = {name: why for name, why in first.items() if all(name in each for each in others)}
    has_trained = bool(found) or any(each.get("steps") for each in summaries)
    exit_code = 1 if errors else script_code or (0 if has_trained else _NOTHING_TRAINED)
    if as_json:
        facts = {"findings": findings, "checks": checks, "left_out": left_out}
        facts |= {"has_trained": has_trained, "script_code": script_code, "exit_code": exit_code}
        print(json.dumps(facts, indent=2))
        return exit_code
    lines = [
        f"hookline: {checks} checks, {_count(findings, 'finding')}, {_count(errors, 'error')}.",
        *(f"    {line}" for line in describe_left_out(left_out)),
    ]
    if not has_trained:
        lines = [
            "hookline: nothing was trained that could be linted: the script has made no optimizer "
            "step that was seen. See the messages above."
        ]
    print_text(printable_lines("\n".join(lines)), sys.stderr)
    return exit_code


def _count(items: Sized, what: str) -> str:
    return f"{len(items)} {what}{'' if len(items) == 1 else 's'}"
