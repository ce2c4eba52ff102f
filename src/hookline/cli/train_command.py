"""`hookline train`, `hookline check` and `hookline schema`: training from a config file."""

from __future__ import annotations

import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from hookline.arguments import user_path
from hookline.cli.command_base import (
    Json,
    bad_value,
    check_folder,
    exit_on_interrupt,
)
from hookline.cli.text_output import is_main_process, print_json, print_line, show
from hookline.interrupts import HeldInterrupts
from hookline.masking import mask_text

if TYPE_CHECKING:
    from hookline.config_files.loading import Training

_NEWEST = "newest"
_FILES = (".yaml", ".yml", ".toml", ".json")

Config = Annotated[
    str,
    typer.Argument(
        help="A config file (YAML, TOML, JSON), or a function that returns a trainer: "
        "train.py:make_trainer.",
        metavar="CONFIG",
        show_default=False,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Override a key of the file, such as trainer.max_epochs=3 or hooks.0.every=5; the "
        "value is parsed as YAML. For a function: its arguments.",
        metavar="KEY=VALUE",
        show_default=False,
    ),
]
TrustedPackages = Annotated[
    list[str] | None,
    typer.Option(
        "--trust",
        help="A package that class paths of the file may name, because you trust its code; may be "
        "repeated. Also: HOOKLINE_TRUST=PACKAGE,PACKAGE, and trust under tool.hookline in the "
        "project's pyproject.toml.",
        metavar="PACKAGE",
        show_default=False,
    ),
]


class TrainCommand(TyperCommand):
    """A command whose `--resume` may have no value, which means the newest run."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, after a value for a `--resume` that has none."""
        completed: list[str] = []
        for i, arg in enumerate(args):
            has_no_value = arg == "--resume" and not _is_run(args[i + 1 : i + 2])
            completed.append(f"--resume={_NEWEST}" if has_no_value else arg)
        return super().parse_args(ctx, completed)


def _is_run(following: list[str]) -> bool:
    """Return whether the argument after `--resume` is a run, not a config file or override."""
    if not following or following[0].startswith("-"):
        return False
    text = following[0]
    is_config = text.endswith(_FILES) or ".py:" in text
    return user_path(text).is_dir() or not (is_config or "=" in text)


def train(
    config: Config,
    overrides: Overrides = None,
    resume: Annotated[
        str | None,
        typer.Option(
            help="Resume a run: its id, its folder, or a checkpoint's folder. Without a value: the "
            "newest unfinished run of this configuration, or a new run if there is none, as jobs "
            "that may be preempted need it. If its newest checkpoint is damaged, the one before.",
            metavar="[RUN]",
            show_default=False,
        ),
    ] = None,
    start_from: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Start a new run from a checkpoint of another one, with changed settings: a run, "
            "a run and a step (RUN@120), or a checkpoint's folder. With --resume: only if there is "
            "no unfinished run that started there.",
            metavar="RUN[@STEP]",
            show_default=False,
        ),
    ] = None,
    trust: TrustedPackages = None,
) -> None:
    """Train as a config file describes, and print the run's folder.

    Example: **hookline train train.yaml**

    With overrides: **hookline train train.yaml trainer.max_epochs=3
    optimizer.init_args.lr=1e-2**

    In a job that may be preempted: **hookline train train.yaml --resume**

    More steps, with another learning rate, as a new run: **hookline train train.yaml --from
    20261115-210655-3f9c7b@400 trainer.max_steps=800 optimizer.init_args.lr=1e-4**

    From a Python function: **hookline train train.py:make_trainer lr=0.1**

    In several processes: **torchrun … -m hookline train train.yaml**

    Exit codes: 0 if training ended, 1 after an error, 130 after Ctrl-C, and 128 plus the number of
    the signal if the run was preempted: 143 after SIGTERM. After 130 and 143, **--resume**
    continues the run.
    """
    for option, given in (("--resume", resume), ("--from", start_from)):
        if given is not None and not given.strip():
            raise bad_value(option, "the value is empty; give a run.")
    if start_from is not None and resume not in (None, _NEWEST):
        text = "a run is given to --resume and to --from; give it to one of them."
        raise bad_value("--from", text)
    with exit_on_interrupt():
        training = load_config(config, overrides, trust)
        print_line(f"config {training.config_hash[:8]}  {training.source}")
        start = training.trainer.strategy.processes.call_on_main(
            lambda: _find_start(training, resume, start_from)
        )
        if "resume_from" not in start:
            _check_runs(training)
        try:
            training.fit(**start)
        except KeyboardInterrupt as interrupt:
            _print_run_folder(training)
            if hint := _resume_hint(training, overrides):
                interrupt.add_note(hint)
            raise
        _print_run_folder(training)
        _exit_if_preempted(training, overrides)


def _find_start(
    training: Training, resume: str | None, start_from: str | None
) -> dict[str, Path | None]:
    """Return the argument of `fit` that says where to start, after a message about it."""
    if resume is None and start_from is None:
        return {}
    from hookline.config_files.resuming import find_fork, find_resume

    parent = None if start_from is None else find_fork(training, start_from)
    if resume is not None:
        start, message = find_resume(training, resume, parent)
        print_line(message)
        if start is not None:
            return {"resume_from": start}
    return {} if parent is None else {"fork_from": parent}


def _resume_hint(training: Training, overrides: list[str] | None) -> str:
    from hookline.config_files.resuming import describe_resume_command

    return describe_resume_command(training, overrides or [])


def _exit_if_preempted(training: Training, overrides: list[str] | None) -> None:
    """Exit with 128 plus the number of the signal that preempted the run, as shells do."""
    trainer = training.trainer
    if trainer.status != "preempted":
        return
    name = getattr(trainer, "stop_signal", None) or "SIGTERM"
    hint = _resume_hint(training, overrides)
    message = f"hookline: Preempted by {name} after step {trainer.step}. {hint}"
    if is_main_process():
        print_line(message.rstrip(), sys.stderr)
    raise typer.Exit(128 + signal.Signals[name])


def _print_run_folder(training: Training) -> None:
    from hookline.runs.location import shorten_path

    if training.trainer.run is not None:
        print_line(f"run {shorten_path(training.trainer.run.path)}")


def check(
    config: Config,
    overrides: Overrides = None,
    trust: TrustedPackages = None,
    as_json: Json = False,
) -> None:
    """Check a config file without training.

    Checks that all classes exist, that arguments match their signatures, that hooks can be
    registered, that a batch passes through the model, the loss and backward, that monitored metrics
    exist, and that a run can be written. The passive checks of **lint** look for silent bugs in
    this batch; if they find an error, the exit code is 1. No optimizer steps, and no run is
    written. Nothing that is not trusted is imported.

    Example: **hookline check train.yaml**
    """
    from hookline.errors import HooklineError

    try:
        with exit_on_interrupt():
            training = load_config(config, overrides, trust)
            _check_runs(training)
            from hookline.config_files.dry_run import dry_run

            facts = dry_run(training)
    except HooklineError as error:
        if not as_json:
            raise
        problems = [vars(one) for one in getattr(error, "problems", ())]
        count = getattr(error, "count", len(problems))
        print_json({"ok": False, "error": str(error), "problems": problems, "count": count})
        raise typer.Exit(1) from None
    errors = [finding for finding in facts["findings"] if finding["severity"] == "error"]
    if as_json:
        print_json({"ok": not errors, **facts})
    else:
        show(_as_table(facts))
        if not errors:
            print_line("OK")
    if errors:
        raise typer.Exit(1)


def schema(
    out: Annotated[
        Path | None,
        typer.Option(help="Write the schema to this file.", metavar="FILE", parser=user_path),
    ] = None,
) -> None:
    """Print the JSON schema of config files, for completion and validation in editors.

    Example: **hookline schema --out hookline.schema.json**

    Name it in the first line of a YAML file, so that editors find it:
    **# yaml-language-server: $schema=hookline.schema.json**
    """
    with HeldInterrupts():
        from hookline.config_files.json_schema import schema_text

    if out is None:
        print(schema_text(), end="")
        return
    try:
        out.write_text(schema_text(), encoding="utf-8")
    except OSError as error:
        raise bad_value("--out", f"'{out}' cannot be written ({error.strerror}).") from None
    print_line(out)


def load_config(
    config: str, overrides: list[str] | None, trust: list[str] | None = None
) -> Training:
    """Return the training that a config file or a Python function describes."""
    with HeldInterrupts():
        import_module("hookline.config_files.building")  # which imports torch
        from hookline.config_files.loading import is_python_function, load_python, load_training
        from hookline.config_files.merging import parse_override
    given = overrides or []
    for override in given:
        try:
            parse_override(override)
        except ValueError as error:
            raise bad_value("KEY=VALUE", str(error)) from None
    if is_python_function(config):
        return load_python(config, *given)
    if config.endswith(".py"):
        raise bad_value(
            "CONFIG",
            f"'{config}' is a Python file. Name the function that returns a trainer: "
            f"{config}:make_trainer.",
        )
    return load_training(config, *given, trust=trust or ())


def _check_runs(training: Training) -> None:
    runs = training.trainer.config.runs
    if runs is not None:
        check_folder(runs, "trainer.runs")


def _as_table(facts: dict[str, Any]) -> str:
    from hookline.runs.formatting import format_number
    from hookline.text_tables import format_table, join_some

    train, val = facts["train"], facts["val"]
    hooks = join_some(
        one["name"] + ("" if one["status"] == "enabled" else f" ({one['status']})")
        for one in facts["hooks"]
    )
    length = [f"{facts['epochs']} epochs"] if facts["epochs"] is not None else []
    length += [f"{facts['steps']} steps"] if facts["steps"] is not None else []
    rows = [
        ("model", f"{facts['model']}, {facts['parameters']:,} parameters"),
        ("train", _data(train)),
        *([("val", _data(val))] if val is not None else []),
        ("loss", f"{format_number(train['loss'])} of the first batch"),
        ("findings", str(len(facts["findings"])) if facts["findings"] else "none"),
        ("backward", f"reaches {train['gradients']} of {train['parameters']} tensors"),
        ("optimizer", ", ".join(facts["optimizers"])),
        *([("scheduler", ", ".join(facts["schedulers"]))] if facts["schedulers"] else []),
        ("hooks", hooks or "none"),
        ("length", " or ".join(length) or "no limit"),
        ("device", f"{facts['device']}, {facts['precision']}"),
        ("runs", facts["runs"] or "no run is written"),
        ("config", f"{facts['config_hash'][:8]}  {facts['config']}"),
    ]
    rows = [(name, mask_text(str(value))) for name, value in rows]
    return format_table(rows[0], rows[1:])


def _data(facts: dict[str, Any]) -> str:
    count = "" if facts["batches"] is None else f"{facts['batches']} "
    return f"{count}batches, the first: {facts['batch']}"
