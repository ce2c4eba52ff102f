"""`hookline report`: the report of runs, as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hookline.arguments import user_path
from hookline.cli.command_base import (
    Json,
    RunsFolder,
    bad_value,
    check_runs_folder,
    exit_on_interrupt,
)
from hookline.cli.text_output import print_json, show_lines


def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            help="The ids of runs, their beginnings or ends, or the runs' folders.", metavar="RUN"
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="The file to write; report.html if neither this nor --json is given.",
            metavar="FILE",
            parser=user_path,
        ),
    ] = None,
    folder: RunsFolder = None,
    as_json: Json = False,
) -> None:
    """Write a report of one or several runs: one HTML file that needs no network.

    It has the curves, the gradient flow, what the hooks cost, where the time went, and the run in
    words; for several runs, what differs. A run may still be training, or be damaged: the report
    says what is missing. **--json** prints the main facts, for programs; it writes a page only with
    **-o**.

    Example: **hookline report 20261115-210655-3f9c7b -o report.html**

    Example: **hookline report 20261115-21 20261115-22 -o both.html**
    """
    check_runs_folder(folder)
    if out is None and not as_json:
        out = Path("report.html")
    if out is not None:
        _check_out(out)
    with exit_on_interrupt():
        from hookline.report import make_report

        made = make_report(*runs, folder=folder or Path("runs"))
        written = None if out is None else made.write(out)
    if as_json:
        print_json({"report": None if written is None else str(written), **made.facts})
    else:
        from hookline.report.facts import describe_facts

        for facts in made.facts["runs"]:
            left_out = [f"left out: {line}" for line in facts["left_out"]]
            show_lines([f"run {facts['id']}", *describe_facts(facts), *left_out])
        show_lines([f"report  {written}"])


def _check_out(out: Path) -> None:
    """Raise if the file cannot be written, or if it is something else than a report."""
    from hookline.report.page import GENERATOR

    problem = None
    if out.is_dir():
        problem = "is a folder"
    elif not out.absolute().parent.is_dir():
        problem = "is in a folder that does not exist"
    elif out.exists() and not out.is_file():
        problem = "is not a regular file"
    elif out.exists():
        with out.open("rb") as file:
            if GENERATOR.encode() not in file.read(4096):
                problem = "exists and is not a report"
    if problem is not None:
        raise bad_value("--out", f"'{out}' {problem}; expected the name of a file to write.")
