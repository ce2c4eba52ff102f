"""`hookline init`: a folder to begin with. What it writes stands in `starter/`."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["init"]

_FILES = {
    "train.yaml": "the training: model, data, optimizer, trainer, hooks",
    "model.py": "the model and its data",
    "hooks.py": "a hook of yours",
    "test_hooks.py": "its tests",
}
_SCHEMA = {"train.schema.json": "what may stand in train.yaml, for editors"}
_SLURM = {"job.sh": "a Slurm job that goes on after preemption"}


def init(
    folder: Annotated[
        Path, typer.Argument(help="The folder; it is made if needed.", metavar="DIR")
    ] = Path(),
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Add a Slurm job that resumes after preemption.")
    ] = False,
) -> None:
    """Begin a training of your own: a configuration, a model, a hook and its tests.

    It trains as it is, in under a minute: a small model learns which letter comes next. Files that
    are there already are never overwritten.

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
            (folder / "job.sh").chmod(0o755)
    except OSError as error:
        raise _bad(f"'{error.filename}' cannot be written ({error.strerror}).") from error
    _say_what_is_there(folder, slurm)


def _texts(slurm: bool) -> dict[str, str]:
    from hookline.config_files import training_schema

    starter = files("hookline.cli") / "starter"
    names = [*_FILES, *(_SLURM if slurm else {})]
    texts = {name: (starter / f"{name}.txt").read_text(encoding="utf-8") for name in names}
    schema = json.dumps(training_schema(), indent=1, ensure_ascii=False)
    return texts | dict.fromkeys(_SCHEMA, schema + "\n")


def _check(folder: Path, names: list[str]) -> None:
    """End before anything is written, when something is in the way."""
    if folder.exists() and not folder.is_dir():
        raise _bad(f"'{folder}' is a file; expected a folder, or the name of one to make.")
    there = [name for name in names if (folder / name).exists()]
    if there:
        verb = "is" if len(there) == 1 else "are"
        raise _bad(
            f"{', '.join(there)} {verb} in '{folder}' already, and nothing is overwritten. Choose "
            "another folder: hookline init DIR."
        )


def _bad(message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint="'DIR'")


def _say_what_is_there(folder: Path, slurm: bool) -> None:
    written = {**_FILES, **_SCHEMA, **(_SLURM if slurm else {})}
    width = max(map(len, written))
    print(f"In {folder}:" if folder != Path() else "In this folder:")
    for name, meaning in written.items():
        print(f"  {name.ljust(width)}  {meaning}")
    steps = [
        *([] if folder == Path() else [(f"cd {folder}", "")]),
        ("hookline check train.yaml", "everything short of training"),
        ("hookline train train.yaml", "train, in under a minute"),
        ("hookline runs", "what came of it"),
        ("python -m pytest", "the tests of your hook"),
        *([("sbatch job.sh", "train on the cluster")] if slurm else []),
    ]
    width = max(len(command) for command, _ in steps)
    print("\nWhat to do next:")
    for command, meaning in steps:
        print(f"  {command.ljust(width)}  {meaning}".rstrip())
