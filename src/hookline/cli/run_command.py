"""`hookline run`: hooks in any training script, without a change of it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from hookline.arguments import check_name, user_path
from hookline.cli.command_base import (
    RunsFolder,
    bad_value,
    check_folder,
    exit_on_interrupt,
)
from hookline.cli.text_output import print_text
from hookline.cli.train_command import TrustedPackages
from hookline.errors import HooklineError
from hookline.integrations.scripts.run_settings import STARTUP, RunSettings
from hookline.interrupts import HeldInterrupts
from hookline.masking import mask_text
from hookline.printable import printable, printable_lines

_NEXT_OPTION = re.compile(r",(?=\s*[^\W\d]\w*\s*=)")  # a list has commas, too
_PYTHON = re.compile(r"python(\d+(\.\d+)*)?(\.exe)?")
_ISOLATING = re.compile(r"-[bBdiOPqsuvx]*([IES])[bBdiIEOPqsSuvx]*")  # flags of an interpreter


class RunCommand(TyperCommand):
    """A command whose options end where the script's command begins."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments up to the first that is no option."""
        ctx.allow_interspersed_args = False
        return super().parse_args(ctx, args)


def run(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            help="The script's own command, as you run it without Hookline.",
            metavar="-- COMMAND",
            show_default=False,
        ),
    ] = None,
    hook: Annotated[
        list[str] | None,
        typer.Option(
            help="A hook: its name, its name and options (lr_monitor:every=10,log_momentum=true), "
            "or a class of your own (package.module:Class). May be repeated. Without any: "
            "gradients, learning rate, loss spikes and non-finite values.",
            metavar="HOOK",
            show_default=False,
        ),
    ] = None,
    hooks: Annotated[
        Path | None,
        typer.Option(
            help="A file (YAML, TOML, JSON) with hooks, and optionally trackers, runs, name, tags, "
            "hparams and settings, written as in a config file.",
            metavar="FILE",
            parser=user_path,
            show_default=False,
        ),
    ] = None,
    runs: RunsFolder = None,
    name: Annotated[
        str | None, typer.Option(help="A name for the run.", metavar="NAME", show_default=False)
    ] = None,
    tag: Annotated[
        list[str] | None,
        typer.Option(help="A tag for the run; may be repeated.", metavar="TAG", show_default=False),
    ] = None,
    trust: TrustedPackages = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Raise an error before the first step if hooks cannot be attached. If nothing "
            "was attached when a Python program ends, exit with 1. Otherwise the script goes on "
            "without hooks, and a message says why.",
        ),
    ] = False,
    print_env: Annotated[
        bool,
        typer.Option("--print-env", help="Print the variables for a job file, and run nothing."),
    ] = False,
) -> None:
    """Run a training script with hooks, without a change of it.

    Example: **hookline run -- python train.py --lr 1e-3**

    With hooks: **hookline run --hook gradient_monitor --hook lr_monitor:every=10 -- torchrun
    --nproc_per_node 2 train.py**

    With a file of hooks: **hookline run --hooks hooks.yaml -- accelerate launch train.py**

    In a job file: **eval "$(hookline run --hooks hooks.yaml --print-env)"**

    Bare loops, and trainers of Hugging Face, TRL, Lightning and Ignite are recognised when they
    start to train; each training run leaves a run and its report in **--runs**. The command
    replaces this process: exit code, signals and streams are those of the script. If a hook stops
    a bare loop, the exit code is 75.

    Everything is checked before the script starts: after a mistake the exit code is 2, and nothing
    was run.
    """
    with exit_on_interrupt():
        try:
            settings = _settings(hook, hooks, runs, name, tag, trust, strict)
        except HooklineError as error:
            print_text(printable_lines(f"hookline: {mask_text(str(error))}"), sys.stderr)
            raise typer.Exit(2) from None
        if print_env:
            extended = shlex.quote(str(STARTUP)) + "${PYTHONPATH:+:$PYTHONPATH}"
            print(f"export PYTHONPATH={extended}")
            for variable, value in settings.variables().items():
                print(f"export {variable}={shlex.quote(value)}")
            return
        check_command(command or [], strict=strict)
    _become(command or [], settings)


def _settings(
    hook: list[str] | None,
    file: Path | None,
    runs: Path | None,
    name: str | None,
    tags: list[str] | None,
    trust: list[str] | None,
    strict: bool,
) -> RunSettings:
    """Return what is asked for, after all of it was checked."""
    fields: dict[str, Any] = {"strict": strict, "folder": str(Path.cwd()), "hooks": []}
    if hook or file is not None:
        with HeldInterrupts():
            import_module("torch")  # the default hooks need no check, and not these seconds
    if file is not None:
        fields |= _read_file(file, trust or [])
    fields["hooks"] += [parse_hook(text) for text in hook or []]
    fields["tags"] = [*fields.get("tags", []), *(tags or [])]
    if name is not None:
        check_name("--name", name)
        fields["name"] = name
    folder = runs if runs is not None else user_path(fields.get("runs") or "runs")
    check_folder(folder, "--runs")
    fields["runs"] = str(folder.absolute())
    settings = RunSettings(**fields)
    if hook or file is not None:
        _check_options(settings)
    return settings


def _read_file(file: Path, trust: list[str]) -> dict[str, Any]:
    from dataclasses import asdict

    from hookline.config_files.loading import load_script_file

    if not file.is_file():
        raise bad_value("--hooks", f"There is no file '{file}'.")
    config, hooks, folder = load_script_file(file, trust)
    return {
        "hooks": hooks,
        "folder": str(folder),
        "name": config.name,
        "tags": config.tags,
        "hparams": config.hparams,
        "runs": config.runs,
        "trackers": [each.model_dump(mode="json") for each in config.trackers],
        "settings": asdict(config.settings),
    }


def _check_options(settings: RunSettings) -> None:
    """Make the hooks and trackers once, so that every mistake is found before the script starts."""
    from hookline.integrations.attach import session_options

    session_options(hooks=settings.make_hooks(), **settings.attach_options())


def parse_hook(text: str) -> dict[str, Any]:
    """Return `name:option=value,…` or `package.module:Class` as a configuration has it."""
    from hookline.config_files.merging import parse_override

    name, colon, rest = text.rpartition(":")
    if not colon or "=" not in rest:
        name, rest = text, ""
    item: dict[str, Any] = {}
    for part in _NEXT_OPTION.split(rest) if rest else ():
        try:
            key, value = parse_override(part)
        except ValueError as error:
            raise bad_value("--hook", f"'{text}': {error}") from None
        item[".".join(map(str, key))] = value
    return {"name": name.replace(":", "."), **item}


# -- the script's command -------------------------------------------------------------------------


def check_command(command: list[str], *, strict: bool) -> None:
    """Raise if a command cannot be run, or (if strict) ignores what Hookline adds to it."""
    if not command:
        raise bad_value("COMMAND", "it is missing. Write it after --, as: -- python train.py.")
    program = command[0]
    if shutil.which(program) is None:
        hint = f" Write: -- python {program}." if program.endswith(".py") else ""
        raise bad_value("COMMAND", f"There is no program '{program}'.{hint}")
    flag = _find_isolating_flag(command)
    if flag is not None:
        problem = (
            f"python {flag} ignores what Hookline adds to the environment, so no hooks are "
            "attached. Leave it out, or attach in the script: hookline.attach_next(hooks=[…])."
        )
        if strict:
            raise bad_value("COMMAND", problem)
        print_text(f"hookline: {problem}", sys.stderr)


def _find_isolating_flag(command: list[str]) -> str | None:
    """Return the option of a Python interpreter that keeps `sitecustomize` from being run."""
    if not _PYTHON.fullmatch(Path(command[0]).name):
        return None
    options = iter(command[1:])
    for option in options:
        if option in ("-W", "-X"):
            next(options, None)  # its value
        elif found := _ISOLATING.fullmatch(option):
            return f"-{found[1]}"
        elif not option.startswith("-"):
            break
    return None


def _become(command: list[str], settings: RunSettings) -> NoReturn:
    """Replace this process by the script's."""
    environment: Mapping[str, str] = settings.environment(os.environ)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        shown = printable(command[0], 200)
        raise bad_value("COMMAND", f"'{shown}' cannot be run ({error.strerror}).") from None
