"""A training from a Python function: `train.py:make_trainer`, or `package.module:make_trainer`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hookline.config_files.loading import Training
from hookline.config_files.merging import parse_override
from hookline.config_files.problems import COMMAND_LINE, FileError, Problem, dotted
from hookline.config_files.trust import importable, is_in, load_object
from hookline.errors import ConfigError, nearest

__all__ = ["is_python", "load_python"]


def is_python(target: str) -> bool:
    """Whether a training is named by a function, and not by a file."""
    place, colon, name = target.rpartition(":")
    return bool(colon and place and name.isidentifier()) and not Path(target).exists()


def load_python(target: str, *overrides: str) -> Training:
    """Return the training that a function makes.

    It returns a trainer that has its data (as `hookline.get_trainer` makes one), or a tuple: the
    trainer, its loaders, and loaders to validate on.

    Args:
        target: the function: `train.py:make_trainer`, or `package.module:make_trainer`.
        overrides: `key=value`: its arguments; the value is written as YAML.

    Raises:
        FileError: the arguments do not fit.
        ConfigError: there is no such function, or it returns something else.
    """
    from hookline.config_files.building import run_config
    from hookline.trainer.trainer import Trainer

    place, _, name = target.rpartition(":")
    folder, module = _where(place)
    with importable(folder):
        function = _function(target, f"{module}.{name}", folder if place.endswith(".py") else None)
        arguments = _arguments(target, function, overrides)
        made = function(**arguments)
    trainer, *data = made if isinstance(made, tuple) else (made,)
    if not isinstance(trainer, Trainer) or len(data) > 2:
        raise ConfigError(
            f"'{target}' returned {_described(made)}; expected a Trainer, or a tuple: the trainer, "
            "its loaders, and loaders to validate on."
        )
    if not data and trainer.train_data is None:
        raise ConfigError(
            f"'{target}' returned a trainer without data. Return (trainer, loaders), or make it "
            "with hookline.get_trainer."
        )
    source = {"python": {"function": f"{module}:{name}", "arguments": arguments}}
    trainer.config = run_config(trainer.config, source, trainer.config.seed)
    loaders, val_loaders = (*data, None, None)[:2]
    return Training(trainer, target, folder, loaders, val_loaders)


def _where(place: str) -> tuple[Path, str]:
    """The folder to import from, and the module's name."""
    if not place.endswith(".py"):
        return Path.cwd(), place
    file = Path(place)
    if not file.is_file():
        there = [one.name for one in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise ConfigError(f"There is no file '{place}'.{nearest(file.name, there)}")
    if not file.stem.isidentifier():
        raise ConfigError(
            f"'{file.name}' cannot be imported: '{file.stem}' is no name in Python. Rename it."
        )
    return file.resolve().parent, file.stem


def _function(target: str, path: str, folder: Path | None) -> Callable[..., Any]:
    top = path.partition(".")[0]
    other = sys.modules.get(top)
    if folder is not None and other is not None and not is_in(other, folder):
        where = getattr(other, "__file__", None) or "built into it"
        raise ConfigError(
            f"'{target}': Python has another module '{top}' already ({where}). Rename the file."
        )
    try:
        found: Callable[..., Any] = load_object(path)
    except LookupError as error:
        raise ConfigError(f"'{target}': {error.args[0]}") from error
    return found


def _arguments(
    target: str, function: Callable[..., Any], overrides: tuple[str, ...]
) -> dict[str, Any]:
    given: dict[str, Any] = {}
    problems: list[Problem] = []
    parameters = inspect.signature(function).parameters.values()
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for text in overrides:
        try:
            key, value = parse_override(text)
        except ValueError as error:
            problems.append(Problem(COMMAND_LINE, None, "", str(error)))
            continue
        name = dotted(key)
        if len(key) == 1 and (open_ended or name in known):
            given[name] = value
        else:
            takes = f" It takes: {', '.join(known)}." if known else " It takes none."
            text = f"'{target}' has no argument '{name}'.{nearest(name, known)}{takes}"
            problems.append(Problem(COMMAND_LINE, None, name, text))
    needs = [p.name for p in parameters if p.name in known and p.default is p.empty]
    for name in needs:
        if name not in given:
            text = f"'{target}' needs this argument: {name}=…"
            problems.append(Problem(COMMAND_LINE, None, name, text))
    if problems:
        raise FileError(problems)
    return given


def _described(made: Any) -> str:
    if isinstance(made, tuple):
        return f"a tuple of {len(made)}: {', '.join(type(one).__name__ for one in made)}"
    return f"a {type(made).__name__}"
