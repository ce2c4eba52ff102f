"""The `hookline` command: its subcommands, error messages and exit codes.

Exit codes: 0 for success, 1 for an error, 2 for bad input, 130 for Ctrl-C; `train` also exits with
128 plus a signal's number, `run` and `lint` with the script's exit code. An error is one message on
stderr; unexpected errors have a traceback with `--debug`. Modules that import torch are imported by
the commands that need them, so that `--help` is fast.
"""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from hookline._version import __version__
from hookline.arguments import user_path
from hookline.cli.checkpoints_command import checkpoints_app
from hookline.cli.command_base import (
    check_folder,
    exit_on_interrupt,
    new_group,
)
from hookline.cli.hooks_command import events, hooks_app
from hookline.cli.init_command import init
from hookline.cli.lint_command import lint
from hookline.cli.report_command import report
from hookline.cli.run_command import RunCommand, run
from hookline.cli.runs_command import runs_app
from hookline.cli.text_output import prepare_streams, print_text
from hookline.cli.train_command import TrainCommand, check, schema, train
from hookline.cli.verify_command import verify
from hookline.errors import HookFailedError, HooklineError
from hookline.interrupts import HeldInterrupts
from hookline.masking import mask_text
from hookline.printable import filter_log_records, printable, printable_lines, quote_lines

FAILED, BAD_INPUT = 1, 2
LARGEST_SEED = 2**63 - 1

app = new_group("hookline")
app.command()(init)
app.command(cls=TrainCommand)(train)
app.command(cls=RunCommand)(run)
app.command(cls=RunCommand)(lint)
app.command()(check)
app.command()(schema)
app.command()(verify)
app.add_typer(hooks_app)
app.command()(events)
app.add_typer(runs_app)
app.add_typer(checkpoints_app)
app.command()(report)


def main() -> None:
    """Run the command line and exit."""
    prepare_streams()
    filter_log_records()
    arguments = _without_debug(sys.argv[1:])
    is_debug = len(arguments) < len(sys.argv) - 1
    try:
        sys.exit(app(arguments, prog_name="hookline", standalone_mode=False))
    except HooklineError as error:
        if isinstance(error, HookFailedError) and is_debug:
            _print_traceback(error)  # shows where the hook failed
        _end("\n".join([str(error), *getattr(error, "__notes__", [])]), FAILED, error)
    except (KeyboardInterrupt, typer.Abort):
        _end("Interrupted.", 130)
    except _USAGE_ERRORS as error:
        _end(_usage_message(error), BAD_INPUT, error)
    except Exception as error:
        if is_debug:
            _print_traceback(error)
            sys.exit(FAILED)
        _end(_unexpected_error_message(error), FAILED, error)


def _without_debug(arguments: list[str]) -> list[str]:
    """Remove `--debug`, which is allowed at any position but those of a script's own command."""
    own = len(arguments)
    if "run" in arguments:
        own = arguments.index("run")
    return [one for i, one in enumerate(arguments) if one != "--debug" or i > own]


# The base class of typer's errors about bad input. Newer versions of typer include their own click.
_USAGE_ERRORS: type[Exception] = typer.BadParameter.__mro__[1]


def _usage_message(error: Any) -> str:
    command = error.ctx.command_path if error.ctx is not None else "hookline"
    message = printable(error.format_message(), 1000)
    return f"{message}{'' if message.endswith(('.', '?')) else '.'} See: {command} --help"


def _unexpected_error_message(error: Exception) -> str:
    """Return the error and the last line outside of installed packages that it passed."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    place = f"{own[-1].filename}, line {own[-1].lineno}"
    again = printable(shlex.join(["hookline", "--debug", *sys.argv[1:]]), 1000)
    shown = quote_lines(str(error))
    return f"{type(error).__name__}: {shown} (from {place}). For the traceback, run: {again}"


def _print_traceback(error: Exception) -> None:
    text = mask_text("".join(traceback.format_exception(error)))
    print_text(text.rstrip(), sys.stderr)


def _end(message: str, code: int, error: Exception | None = None) -> NoReturn:
    """Print an error and exit; torchrun shows that of the process which has failed first."""
    if error is not None and os.environ.get("WORLD_SIZE", "1") != "1":
        from hookline.loop.torchrun import report_error

        report_error(error)
        message = f"[rank {os.environ.get('RANK', '?')}] {message}"
    print_text(printable_lines(f"hookline: {mask_text(message)}"), sys.stderr)
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
        bool, typer.Option("--debug", help="Show the traceback of unexpected errors.")
    ] = False,
) -> None:
    """One hook system for every PyTorch training loop.

    Run an example in half a minute: **hookline demo**

    Create a project of your own: **hookline init my_project**
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def demo(
    steps: Annotated[int, typer.Option(help="Number of training steps, 1 or more.", min=1)] = 400,
    out: Annotated[
        Path,
        typer.Option(
            help="The folder to create the run's folder in.", metavar="FOLDER", parser=user_path
        ),
    ] = Path("runs"),
    seed: Annotated[
        int,
        typer.Option(
            help="Random seed; the same seed gives identical weights.",
            min=0,
            max=LARGEST_SEED,
        ),
    ] = 0,
) -> None:
    """Train a small GPT on the text of Python's help, with hooks.

    It takes about half a minute on one core. It shows text generated before and after training, the
    validation loss, the results and the cost of hooks, and the run's folder.

    Example: **hookline demo --steps 100 --out /tmp/runs --seed 1**
    """
    check_folder(out, "--out")
    with exit_on_interrupt():
        with HeldInterrupts():
            from hookline.cli.demo_command import run_demo
        run_demo(steps=steps, out=out, seed=seed)
