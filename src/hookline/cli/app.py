"""The `hookline` command: what it understands, and how it ends.

Exit codes: 0 for success, 1 for an error of Hookline, 2 for bad input, 130 for Ctrl-C. Errors go to
stderr. Whatever imports torch is imported by the command that needs it, so that `--help` is quick.
"""

from __future__ import annotations

import io
import signal
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from hookline._version import __version__
from hookline.cli.runs import runs_app
from hookline.errors import HooklineError

__all__ = ["app", "main"]

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
LARGEST_SEED = 2**63 - 1

app = typer.Typer(
    name="hookline",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(runs_app)


def main() -> None:
    """Run the command line, and exit."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a letter shows "?"
            stream.reconfigure(errors="replace")
    try:
        sys.exit(app(prog_name="hookline", standalone_mode=False))
    except HooklineError as error:
        _end(str(error), FAILED)
    except (KeyboardInterrupt, typer.Abort):
        _end("Interrupted.", INTERRUPTED)
    except _USAGE_ERRORS as error:
        _end(_usage_message(error), BAD_INPUT)


# The parent of all that typer says about bad input; newer typers bring a click of their own.
_USAGE_ERRORS: type[Exception] = typer.BadParameter.__mro__[1]


def _usage_message(error: Any) -> str:
    command = error.ctx.command_path if error.ctx is not None else "hookline"
    return f"{error.format_message().rstrip('.')}. See: {command} --help"


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
) -> None:
    """One hook system for every PyTorch training loop.

    To see it at work, in half a minute: **hookline demo**
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


@app.command()
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
    _check_folder(out)
    try:
        with _interrupted_afterwards():
            from hookline.cli.demo import run_demo
        run_demo(steps=steps, out=out, seed=seed)
    except KeyboardInterrupt:  # here, because each version of typer makes something else of it
        _end("Interrupted.", INTERRUPTED)


@contextmanager
def _interrupted_afterwards() -> Generator[None, None, None]:
    """Let Ctrl-C wait: an import of torch that is torn apart ends in errors about other things."""
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed and before is not signal.SIG_IGN:
        raise KeyboardInterrupt


def _check_folder(out: Path) -> None:
    """End now, and not after the model was made, when a run cannot be written there."""
    try:
        if out.exists() and not out.is_dir():
            problem = "is a file"
        else:
            out.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=out):
                return
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
    raise typer.BadParameter(
        f"'{out}' {problem}; expected a folder, or the name of one to make.", param_hint="'--out'"
    )


if __name__ == "__main__":
    main()
