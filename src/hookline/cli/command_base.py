"""The base of all commands: the format of `--help`, common options, interrupts and checks."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from hookline.arguments import user_path
from hookline.cli.text_output import is_main_process, print_text

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
RunsFolder = Annotated[
    Path | None,
    typer.Option(
        "--runs",
        help="The folder of all runs; by default runs.",
        metavar="FOLDER",
        parser=user_path,  # a shell leaves the `~` of `--runs=~/runs`
    ),
]


def new_group(name: str) -> typer.Typer:
    """Return a command with subcommands."""
    return typer.Typer(
        name=name,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
    )


@contextmanager
def exit_on_interrupt() -> Generator[None, None, None]:
    """Exit on Ctrl-C, which versions of typer handle differently."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if is_main_process():
            notes = getattr(interrupt, "__notes__", ())
            print_text(" ".join(["hookline: Interrupted.", *notes]), sys.stderr)
        raise typer.Exit(130) from None


def bad_value(option: str, message: str) -> typer.BadParameter:
    """Return the error about the value of an option or argument."""
    return typer.BadParameter(message, param_hint=f"'{option}'")


def check_folder(folder: Path, option: str) -> None:
    """Raise if no run can be written to the folder that an option names; leave nothing behind."""
    existing = folder
    try:
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        if existing.is_dir():
            with tempfile.TemporaryDirectory(dir=existing):
                return
        problem = (
            "is a file" if existing == folder else f"cannot be written ('{existing}' is a file)"
        )
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
    raise bad_value(option, f"'{folder}' {problem}; expected a folder, or the name of a new one.")


def check_runs_folder(folder: Path | None) -> None:
    """Raise if the folder of all runs, as an option gives it, is a file."""
    if folder is not None and folder.exists() and not folder.is_dir():
        raise bad_value("--runs", f"'{folder}' is a file; expected the folder of all runs.")
