"""`hookline init`: create a project. Its files are copied from `starter/`."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from hookline.arguments import user_path
from hookline.cli.command_base import bad_value
from hookline.cli.text_output import print_line

_FILES = {
    "train.yaml": "the config file: model, data, optimizer, trainer, hooks",
    "model.py": "the model and its data",
    "hooks.py": "a hook of your own",
    "test_hooks.py": "its tests",
}
_SCHEMA = {"train.schema.json": "the schema of train.yaml, for editors"}
_SLURM = {"job.sh": "a Slurm job that resumes after preemption"}


def init(
    folder: Annotated[
        Path,
        typer.Argument(
            help="The folder, which is created if needed.", metavar="DIR", parser=user_path
        ),
    ] = Path(),
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Add a Slurm job that resumes after preemption.")
    ] = False,
) -> None:
    """Create a project: a config file, a model, a hook and its tests.

    It trains without changes in under a minute: a small model learns to predict the next letter.
    Existing files are never overwritten.

    Example: **hookline init my_project**, and then **cd my_project** and **hookline train
    train.yaml**
    """
    texts = _texts(slurm)
    _check(folder, list(texts))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            with (folder / name).open("x", encoding="utf-8", newline="\n") as file:
                file.write(text)
        if slurm:
            job = folder / "job.sh"
            mode = job.stat().st_mode
            job.chmod(mode | (mode & 0o444) >> 2)  # executable for those who may read it
    except OSError as error:
        text = f"'{error.filename}' cannot be written ({error.strerror})."
        raise bad_value("DIR", text) from error
    _print_summary(folder, slurm)


def _texts(slurm: bool) -> dict[str, str]:
    from hookline.config_files.json_schema import schema_text

    starter = files("hookline.cli") / "starter"
    names = [*_FILES, *(_SLURM if slurm else {})]
    texts = {name: (starter / f"{name}.txt").read_text(encoding="utf-8") for name in names}
    return texts | dict.fromkeys(_SCHEMA, schema_text())


def _check(folder: Path, names: list[str]) -> None:
    """Raise before anything is written if files are in the way."""
    if folder.exists() and not folder.is_dir():
        text = f"'{folder}' is a file; expected a folder, or the name of a new one."
        raise bad_value("DIR", text)
    existing = [name for name in names if (folder / name).exists()]
    if existing:
        verb = "exists" if len(existing) == 1 else "exist"
        raise bad_value(
            "DIR",
            f"{', '.join(existing)} already {verb} in '{folder}', and files are never overwritten. "
            "Choose another folder: hookline init DIR.",
        )


def _print_summary(folder: Path, slurm: bool) -> None:
    written = {**_FILES, **_SCHEMA, **(_SLURM if slurm else {})}
    width, place = max(map(len, written)), str(folder)
    print_line(f"In {place}:" if folder != Path() else "In this folder:")
    for name, meaning in written.items():
        print_line(f"  {name.ljust(width)}  {meaning}")
    steps = [
        *([] if folder == Path() else [(f"cd {place}", "")]),
        ("hookline check train.yaml", "check everything without training"),
        ("hookline train train.yaml", "train in under a minute"),
        ("hookline runs", "list the results"),
        ("python -m pytest", "the tests of your hook"),
        *([("sbatch job.sh", "train on the cluster")] if slurm else []),
    ]
    width = max(len(command) for command, _ in steps)
    print_line("")
    print_line("Next steps:")
    for command, meaning in steps:
        print_line(f"  {command.ljust(width)}  {meaning}".rstrip())
