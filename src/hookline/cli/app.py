"""The `hookline` command: what it understands, and how it ends.

Exit codes: 0 for success, 1 for an error, 2 for bad input, 130 for Ctrl-C. Errors go to stderr, as
one message; what nobody expected has a traceback with `--debug`. Whatever imports torch is imported
by the command that needs it, so that `--help` is quick.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from hookline._version import __version__
from hookline.cli.folder_checks import check_folder
from hookline.cli.help_format import Command, Group
from hookline.cli.hooks_command import events, hooks_app
from hookline.cli.init_command import init
from hookline.cli.runs_command import runs_app
from hookline.cli.streams import prepare_streams
from hookline.cli.torch_import import interrupted_afterwards
from hookline.cli.train_command import add_training_commands
from hookline.errors import HookFailedError, HooklineError

__all__ = ["app", "main"]

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
LARGEST_SEED = 2**63 - 1

app = typer.Typer(
    name="hookline",
    cls=Group,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=Command)(init)
add_training_commands(app)
app.add_typer(hooks_app)
app.command(cls=Command)(events)
app.add_typer(runs_app)


def main() -> None:
    """Run the command line, and exit."""
    prepare_streams()
    arguments = [one for one in sys.argv[1:] if one != "--debug"]  # it may stand anywhere
    try:
        sys.exit(app(arguments, prog_name="hookline", standalone_mode=False))
    except HooklineError as error:
        if isinstance(error, HookFailedError) and len(arguments) < len(sys.argv) - 1:
            traceback.print_exception(error)  # where in a hook; a user's mistake needs none
        _end("\n".join([str(error), *getattr(error, "__notes__", [])]), FAILED)
    except (KeyboardInterrupt, typer.Abort):
        _end("Interrupted.", INTERRUPTED)
    except _USAGE_ERRORS as error:
        _end(_usage_message(error), BAD_INPUT)
    except Exception as error:
        if len(arguments) < len(sys.argv) - 1:
            raise
        _end(_unexpected(error), FAILED)


# The parent of all that typer says about bad input; newer typers bring a click of their own.
_USAGE_ERRORS: type[Exception] = typer.BadParameter.__mro__[1]


def _usage_message(error: Any) -> str:
    command = error.ctx.command_path if error.ctx is not None else "hookline"
    return f"{error.format_message().rstrip('.')}. See: {command} --help"


def _unexpected(error: Exception) -> str:
    """What was raised and where: the last line that is not of an installed package."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    place = f"{own[-1].filename}, line {own[-1].lineno}"
    again = " ".join(["hookline", "--debug", *sys.argv[1:]])
    return f"{type(error).__name__}: {error} (from {place}). With the traceback: {again}"


def _end(message: str, code: int) -> NoReturn:
    print(f"hookline: {message}", file=sys.stderr)
    sys.exit(code)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"hookline {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def hookline(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of what nobody expected.")
    ] = False,
) -> None:
    """One hook system for every PyTorch training loop.

    To see it at work, in half a minute: **hookline demo**

    To begin with a training of your own: **hookline init my_project**
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


def _whole_number(least: int, most: int | None = None) -> dict[str, Any]:
    """Options for a number in a range, whose error says what was seen (typer's own does not)."""
    wanted = f"a whole number of {least} or more" + ("" if most is None else f", up to {most}")

    def parse(given: str) -> int:
        try:
            number = int(given)
        except ValueError:
            number = least - 1
        if number < least or (most is not None and number > most):
            raise typer.BadParameter(f"it is '{given}'; expected {wanted}.")
        return number

    return {"parser": parse, "metavar": "INTEGER"}


@app.command(cls=Command)
def demo(
    steps: Annotated[
        int, typer.Option(help="How many steps to train, 1 or more.", **_whole_number(1))
    ] = 400,
    out: Annotated[Path, typer.Option(help="The folder that gets the run's folder.")] = Path(
        "runs"
    ),
    seed: Annotated[
        int,
        typer.Option(
            help="The same seed gives the same weights, bit for bit.",
            **_whole_number(0, LARGEST_SEED),
        ),
    ] = 0,
) -> None:
    """Train a small GPT on Python's own help, with hooks.

    It takes about half a minute on one core. You see text from before and after training, a
    validation loss that falls, what hooks found out and what they cost, and the folder that the
    run leaves behind.

    Example: **hookline demo --steps 100 --out /tmp/runs --seed 1**
    """
    check_folder(out, "--out")
    try:
        with interrupted_afterwards():
            from hookline.cli.demo_command import run_demo
        run_demo(steps=steps, out=out, seed=seed)
    except KeyboardInterrupt:  # here, because each version of typer makes something else of it
        _end("Interrupted.", INTERRUPTED)
