"""The base of all commands: the format of `--help`, common options, interrupts and checks."""

from __future__ import annotations

import errno
import signal
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

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


class Command(TyperCommand):
    """A command with a usage line such as `hookline train [OPTIONS] CONFIG [KEY=VALUE]...`."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, without the types of flags."""
        return _without_types_of_flags(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line."""
        arguments = [one for one in self.get_params(ctx) if one.param_type_name == "argument"]
        return ["[OPTIONS]", *map(_usage, arguments)]


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types_of_flags(super().get_params(ctx))


def new_group(name: str) -> typer.Typer:
    """Return a command with subcommands."""
    return typer.Typer(
        name=name,
        cls=_Group,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def _without_types_of_flags(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""  # newer versions of typer show <bool>, although no value follows
    return params


def _usage(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return (name if argument.required else f"[{name}]") + ("" if argument.nargs == 1 else "...")


@contextmanager
def delay_interrupts() -> Generator[None, None, None]:
    """Delay Ctrl-C until the end: interrupting the import of torch raises unrelated errors."""
    received: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if received and previous is not signal.SIG_IGN:
        raise KeyboardInterrupt


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
    problem = "is a file"
    try:
        while not existing.exists() and existing != existing.parent:
            if existing.is_symlink():
                raise OSError(errno.ENOENT, "broken symbolic link")
            existing = existing.parent
        if existing.is_dir() or existing != folder:
            with tempfile.TemporaryDirectory(dir=existing):
                return
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
    raise bad_value(option, f"'{folder}' {problem}; expected a folder, or the name of a new one.")


def check_runs_folder(folder: Path | None) -> None:
    """Raise if the folder of all runs, as an option gives it, is a file."""
    if folder is not None and folder.exists() and not folder.is_dir():
        raise bad_value("--runs", f"'{folder}' is a file; expected the folder of all runs.")


def whole_number(least: int, most: int | None = None, metavar: str = "INTEGER") -> dict[str, Any]:
    """Return options of a number in a range, whose error names the value (typer's does not)."""
    expected = f"a whole number of {least} or more" + ("" if most is None else f", up to {most}")

    def parse(given: str) -> int:
        try:
            number = int(given)
        except ValueError:
            number = least - 1
        if number < least or (most is not None and number > most):
            raise typer.BadParameter(f"it is '{given}'; expected {expected}.")
        return number

    return {"parser": parse, "metavar": metavar}
