"""`hookline runs`: list runs, show one, and compare two."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hookline.cli.command_base import Json, RunsFolder, check_runs_folder, new_group
from hookline.cli.text_output import print_json, show, show_lines
from hookline.printable import printable
from hookline.text_tables import format_table, join_lines

if TYPE_CHECKING:
    from hookline.runs.reader import OpenedRun

_WIDEST = 60
_MAX_ROWS = 100  # of one section of a diff
_MAX_RUNS = 2000  # of the list
_MAX_DAMAGED = 20  # runs whose problem is shown
_STYLES = {
    r"\A.*": "bold",
    r"  completed(?=  )(?!.*  -?(nan|inf)\b)": "green",
    r"  completed(?=  .*  -?(nan|inf)\b)": "red",  # its last loss
    r"  (training|stopped)(?=  )": "cyan",
    r"  (interrupted|preempted)(?=  )": "yellow",
    r"  (error|lost|unknown)(?=  )": "red",
}

runs_app = new_group("runs")

RunId = Annotated[
    str,
    typer.Argument(
        help="The id of a run, its beginning or end, or the run's folder.", metavar="ID"
    ),
]


@runs_app.callback(invoke_without_command=True)
def runs(context: typer.Context, folder: RunsFolder = None, as_json: Json = False) -> None:
    """List runs, show one, or compare two.

    Without a command: a table of all runs, newest first; an id begins with the time (UTC). A commit
    with a **+** had uncommitted changes; a run is **lost** if its process ended without writing a
    status.

    Example: **hookline runs --runs /tmp/runs**
    """
    check_runs_folder(folder)
    context.obj = (folder, as_json)
    if context.invoked_subcommand is None:
        _list_runs(folder or Path("runs"), as_json)


@runs_app.command("show")
def show_run(
    context: typer.Context, run: RunId, folder: RunsFolder = None, as_json: Json = False
) -> None:
    """Show one run: its configuration, metrics, checkpoints, and damaged files.

    Example: **hookline runs show 20261115-210655-3f9c7b**
    """
    folder, as_json = _options(context, folder, as_json)
    (opened,) = _open(folder, run)
    if as_json:
        print_json(_as_dict(opened))
    else:
        show(str(opened))


@runs_app.command()
def diff(
    context: typer.Context, a: RunId, b: RunId, folder: RunsFolder = None, as_json: Json = False
) -> None:
    """Show what differs between two runs: configuration, code, hooks, versions, results.

    Example: **hookline runs diff 20261115-21 20261115-22**
    """
    from hookline.runs.diff import diff_runs

    folder, as_json = _options(context, folder, as_json)
    first, second = _open(folder, a, b)
    differences = diff_runs(first, second)
    if as_json:
        sides = {"a": first.overview(), "b": second.overview()}
        print_json({**sides, "differences": differences})
    else:
        show(_as_text(first.id, second.id, differences))


def _options(context: typer.Context, folder: Path | None, as_json: bool) -> tuple[Path, bool]:
    """Return the options, which may also be given before the command's name."""
    check_runs_folder(folder)
    before: tuple[Path | None, bool] = context.obj
    return folder or before[0] or Path("runs"), as_json or before[1]


def _open(folder: Path, *ids: str) -> list[OpenedRun]:
    from hookline.runs.reader import open_run

    return [open_run(one, runs=folder) for one in ids]


def _list_runs(folder: Path, as_json: bool) -> None:
    from hookline.runs.location import list_run_folders
    from hookline.runs.reader import OpenedRun

    found = [OpenedRun(path).overview() for path in list_run_folders(folder)]
    if as_json:
        print_json(found)
    elif found:
        show("\n\n".join([_listing(found), *_list_damage(found)]), _STYLES)
    else:
        reason = "has no runs yet" if folder.is_dir() else "does not exist yet"
        advice = (
            "Trainer and hookline.attach(…, runs=…) write runs. For an example, run: hookline demo"
        )
        show_lines([f"The folder {folder} {reason}. {advice}"])


def _listing(overviews: list[dict[str, Any]]) -> str:
    from hookline.runs import formatting

    columns = {
        "id": [one["id"] for one in overviews],
        "duration": [formatting.format_duration(one["seconds"]) for one in overviews],
        "status": [one["status"] for one in overviews],
        "steps": [formatting.format_number(one["steps"]) for one in overviews],
        "last loss": [formatting.format_number(one["loss"]) for one in overviews],
        "git": [_commit(one["git"]) for one in overviews],
    }
    return format_table(list(columns), list(zip(*columns.values(), strict=True)), limit=_MAX_RUNS)


def _list_damage(overviews: list[dict[str, Any]]) -> list[str]:
    """Return a text with the first problem of each damaged run; nothing if there is none."""
    damaged = [one for one in overviews if one["damage"]]
    lines = [f"damaged: {one['path']}: {one['damage'][0]}" for one in damaged]
    return [join_lines(lines, _MAX_DAMAGED, " damaged runs")] if lines else []


def _commit(git: dict[str, Any]) -> str:
    commit = git.get("commit")
    if not commit:
        return "none" if git else "?"  # nothing is known without a manifest
    return f"{str(commit)[:8]}{'+' if git.get('dirty') else ''}"


def _as_dict(run: OpenedRun) -> dict[str, Any]:
    results, damage = run.results_and_damage()
    return {
        **run.overview(),
        "manifest": run.manifest,
        "results": {name: asdict(result) for name, result in results.items()},
        "checkpoints": [asdict(checkpoint) for checkpoint in run.checkpoints()],
        "damage": damage,
    }


def _as_text(a: str, b: str, differences: dict[str, dict[str, list[Any]]]) -> str:
    blocks: list[str] = []
    for section, pairs in differences.items():
        rows = [(name, *map(_shorten, values)) for name, values in pairs.items()]
        table = format_table((section, a, b), rows, limit=_MAX_ROWS)
        blocks.append(table if rows else f"{section}  identical")
    return "\n\n".join(blocks)


def _shorten(value: Any) -> str:
    from hookline.runs.formatting import format_number

    if value is None:
        return "-"
    return printable(value if isinstance(value, str) else format_number(value), _WIDEST)
