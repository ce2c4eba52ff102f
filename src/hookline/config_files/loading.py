"""Loading: from a config file, or a Python function, to a trainer that is ready to train."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from hookline.arguments import check_instance, check_path, listed_strings, user_path
from hookline.config.config_model import Config
from hookline.config.hook_names import load_object
from hookline.config_files.merging import merge_files, parse_override
from hookline.config_files.objects import (
    check_hooks,
    check_objects,
    find_argument_problems,
    iterate_hooks,
)
from hookline.config_files.sections import ScriptConfig, TrainingConfig, validate_file
from hookline.config_files.tree import (
    COMMAND_LINE,
    ConfigTree,
    FileError,
    Key,
    Problem,
    format_key,
)
from hookline.config_files.trust import (
    Trust,
    find_import_folder,
    find_project,
    find_trusted_packages,
    importable,
    is_in,
)
from hookline.errors import ConfigError, nearest
from hookline.masking import mask_secrets, remember_secrets

if TYPE_CHECKING:
    from hookline.trainer.trainer import Trainer

_Model = TypeVar("_Model", bound=Config)


@dataclass
class Training:
    """A trainer with its data, and its source.

    Attributes:
        trainer: the trainer.
        source: the config file, or the Python function.
        folder: the project's folder, whose modules can be imported during training.
        loaders: the training data, if the trainer does not have it yet.
        val_loaders: the validation data, likewise.
        trust: the packages that the caller trusts.
        tree: the configuration with its places, if it comes from a config file.
        hook_keys: the key of each of its hooks there, by the hook's name.
    """

    trainer: Trainer
    source: str
    folder: Path
    loaders: Any = None
    val_loaders: Any = None
    trust: tuple[str, ...] = ()
    tree: ConfigTree | None = None
    hook_keys: Mapping[str, Key] = field(default_factory=dict[str, Key])

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration, as in the run's manifest."""
        from hookline.runs.jsonable import to_jsonable

        dumped = to_jsonable(self.trainer.config.model_dump(mode="json"))
        return cast("dict[str, Any]", mask_secrets(dumped))

    @property
    def config_hash(self) -> str:
        """The hash of the resolved configuration, as in the run's manifest."""
        from hookline.runs.jsonable import config_hash

        return config_hash(self.trainer.config.model_dump(mode="json"))

    def fit(self, resume_from: Any = None, fork_from: Any = None) -> Trainer:
        """Train; return the trainer."""
        start = {"resume_from": resume_from, "fork_from": fork_from}
        with importable(self.folder):  # for imports during training
            return self.trainer.fit(self.loaders, self.val_loaders, **start)


def load_training(
    path: str | Path, *overrides: str, trust: Iterable[str] = (), project: str | Path | None = None
) -> Training:
    """Return the training that a config file describes, ready to start.

    Args:
        path: a YAML, TOML or JSON file.
        overrides: `key=value`, such as `trainer.max_epochs=3`; the value is parsed as YAML.
        trust: packages that class paths may name, besides those that the environment variable
            HOOKLINE_TRUST and the project's pyproject.toml name; "*" for all.
        project: the folder whose modules class paths may name, and whose files may be included; by
            default that of the current working directory.

    Raises:
        FileError: names every mistake, with file, line and key.
    """
    from hookline.config_files.building import build_trainer

    path = Path(check_path("load_training(path)", path))
    for override in overrides:
        check_instance("load_training(…, override)", override, str, "a string, key=value")
    if project is not None:
        project = Path(check_path("load_training(…, project=…)", project)).resolve()
    packages = tuple(listed_strings("load_training(…, trust=…)", trust))
    config, tree, trusted = read_file(TrainingConfig, path, overrides, packages, project)
    with importable(trusted.folder):
        targets = check_objects(config, tree, trusted)
        trainer, hook_keys = build_trainer(config, tree, targets)
    folder = trusted.folder
    return Training(trainer, str(path), folder, trust=packages, tree=tree, hook_keys=hook_keys)


def read_file(
    model: type[_Model],
    path: Path,
    overrides: Iterable[str] = (),
    trust: Iterable[str] = (),
    project: Path | None = None,
) -> tuple[_Model, ConfigTree, Trust]:
    """Return a file as this model, its values with their places, and what it may name."""
    project = find_project() if project is None else project
    packages = find_trusted_packages(trust, project)
    tree = merge_files(path, overrides, project=project)
    config = validate_file(model, tree)
    folder = find_import_folder(path, project)
    return config, tree, Trust(project, packages, folder, path.resolve().parent)


def load_script_file(path: Path, trust: Iterable[str] = ()) -> tuple[ScriptConfig, list[Any], Path]:
    """Return the configuration, its hooks as items of a `HookRegistry`, and their folder.

    Raises:
        FileError: names every mistake, with file, line and key.
    """
    config, tree, trusted = read_file(ScriptConfig, path, trust=trust)
    with importable(trusted.folder):
        check_hooks(config, tree, trusted)
    hooks = [(key, hook.item()) for key, _, hook in iterate_hooks(config)]
    for key, item in hooks:
        try:
            json.dumps(item)  # how it is passed to the script
        except TypeError as error:
            raise FileError(
                [tree.problem(key, f"It cannot be passed to a script ({error}).")]
            ) from None
    return config, [item for _, item in hooks], trusted.folder


# -- a Python function ----------------------------------------------------------------------------


def is_python_function(target: str) -> bool:
    """Return whether a target names a function, `train.py:make_trainer`, rather than a file."""
    place, colon, name = target.rpartition(":")
    return bool(colon and place and name.isidentifier()) and not user_path(target).exists()


def load_python(target: str, *overrides: str) -> Training:
    """Return the training that a Python function creates.

    The function returns a trainer with its data, as `hookline.get_trainer` does, or a tuple of the
    trainer, its loaders, and optionally its validation loaders.

    Args:
        target: the function: `train.py:make_trainer`, or `package.module:make_trainer`.
        overrides: arguments of the function as `key=value`; the value is parsed as YAML.

    Raises:
        FileError: the arguments do not match the function's signature.
        ConfigError: there is no such function, or it returns something else.
    """
    from hookline.config_files.building import run_config
    from hookline.trainer.trainer import Trainer

    place, _, name = target.rpartition(":")
    folder, module = _find_module(place)
    with importable(folder):
        own_folder = folder if place.endswith(".py") else None
        function = _load_function(target, f"{module}.{name}", own_folder)
        arguments = _parse_arguments(target, function, overrides)
        remember_secrets(arguments)
        result = function(**arguments)
    trainer, *data = result if isinstance(result, tuple) and result else (result,)
    if not isinstance(trainer, Trainer) or len(data) > 2:
        found = f"a {type(result).__name__}"
        if isinstance(result, tuple):
            found += f" of {len(result)}: {', '.join(type(item).__name__ for item in result)}"
        raise ConfigError(
            f"'{target}' returned {found}; expected a Trainer, or a tuple of the trainer, its "
            "loaders, and optionally its validation loaders."
        )
    if not data and trainer.train_data is None:
        raise ConfigError(
            f"'{target}' returned a trainer without data. Return (trainer, loaders), or create "
            "the trainer with hookline.get_trainer."
        )
    source = {"python": {"function": f"{module}:{name}", "arguments": arguments}}
    trainer.config = run_config(trainer.config, source, trainer.config.seed)
    loaders, val_loaders = (*data, None, None)[:2]
    return Training(trainer, target, folder, loaders, val_loaders)


def _find_module(place: str) -> tuple[Path, str]:
    """Return the folder to import from, and the module's name."""
    if not place.endswith(".py"):
        return Path.cwd(), place
    file = user_path(place)
    if not file.is_file():
        files = [path.name for path in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise ConfigError(f"There is no file '{place}'.{nearest(file.name, files)}")
    return file.resolve().parent, file.stem


def _load_function(target: str, path: str, folder: Path | None) -> Callable[..., Any]:
    top = path.partition(".")[0]
    loaded = sys.modules.get(top)
    if folder is not None and loaded is not None and not is_in(loaded, folder):
        origin = getattr(loaded, "__file__", None) or "built into Python"
        raise ConfigError(
            f"'{target}': another module '{top}' is already imported ({origin}). Rename the file."
        )
    try:
        function: Callable[..., Any] = load_object(path)
    except LookupError as error:
        raise ConfigError(f"'{target}': {error}") from error
    return function


def _parse_arguments(
    target: str, function: Callable[..., Any], overrides: tuple[str, ...]
) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    problems: list[Problem] = []
    for override in overrides:
        try:
            key, value = parse_override(override)
            arguments[format_key(key)] = value
        except ValueError as error:
            problems.append(Problem(COMMAND_LINE, None, "", str(error)))
    for name, text in find_argument_problems(f"'{target}'", function, arguments):
        problems.append(Problem(COMMAND_LINE, None, name, text))
    if problems:
        raise FileError(problems)
    return arguments
