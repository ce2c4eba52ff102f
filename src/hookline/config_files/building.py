"""Building: from a checked configuration to a trainer with its data."""

from __future__ import annotations

import traceback
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from hookline.config.hook_items import HookItem
from hookline.config.trainer_config import TrainerConfig
from hookline.config_files.objects import (
    Targets,
    iterate_hooks,
    iterate_loaders,
    iterate_section,
)
from hookline.config_files.sections import (
    LoaderConfig,
    ObjectConfig,
    OptimizerConfig,
    TrainingConfig,
)
from hookline.config_files.tree import ConfigTree, FileError, Key
from hookline.errors import HooklineError
from hookline.loop.random_state import seed_everything
from hookline.tensors.parameter_names import match_names
from hookline.trackers.group import make_tracker_set
from hookline.trainer.trainer import Trainer

_LABELS = ("name", "tags", "hparams")


class RunConfig(TrainerConfig):
    """A trainer's configuration with the other sections of its file, for the run's manifest."""

    training: dict[str, Any] = Field(
        default={}, description="the other sections of the config file, resolved"
    )

    @model_serializer(mode="wrap")
    def _serialize_like_file(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        return {**fields.pop("training"), "trainer": fields}


def run_config(config: TrainerConfig, training: Mapping[str, Any], seed: int | None) -> RunConfig:
    """Return a trainer's configuration with everything that the run's manifest contains."""
    given: dict[str, Any] = {name: getattr(config, name) for name in config.model_fields_set}
    if config.max_steps is not None:
        given.setdefault("max_epochs", None)  # only steps count, and the manifest shows it
    given |= {"seed": seed, "training": dict(training)}
    return RunConfig(**given)


def build_trainer(
    config: TrainingConfig, tree: ConfigTree, targets: Targets
) -> tuple[Trainer, dict[str, Key]]:
    """Return the trainer with its data, and the key of each hook by the hook's name."""
    builder = _Builder(config, tree, targets)
    return builder.trainer(), builder.hook_keys


def _run_labels(config: TrainingConfig) -> dict[str, Any]:
    """Return the sections that label the run, if they are given."""
    given = {name: getattr(config, name) for name in _LABELS}
    return {name: value for name, value in given.items() if value}


class _Builder:
    def __init__(self, config: TrainingConfig, tree: ConfigTree, targets: Targets) -> None:
        self._config, self._tree, self._targets = config, tree, targets
        self.hook_keys: dict[str, Key] = {}

    def trainer(self) -> Trainer:
        config = self._config
        seed = config.trainer.seed if config.seed is None else config.seed
        if seed is not None:
            with self._creating(("seed",)):
                seed_everything(seed)
        model = self._model()
        optimizers = [
            self._optimizer(key, section, model)
            for key, section in iterate_section(config, "optimizer")
        ]
        schedulers = [
            self._create(key, section, optimizers[section.optimizer])
            for key, section in iterate_section(config, "scheduler")
        ]
        functions = {
            name: self._function(key, section)
            for name in ("loss_fn", "step_fn", "tokens_fn")
            for key, section in iterate_section(config, name)
        }
        train, val = self._loaders("train"), self._loaders("val")
        labels = _run_labels(config)
        outside = {"include", "trainer", "seed", "trackers", *labels} - {"hparams"}
        sections = config.model_dump(mode="json", exclude=outside)
        sections = {name: value for name, value in sections.items() if name not in _LABELS or value}
        with self._creating(("trackers",)):
            given = [tracker.model_dump(mode="json") for tracker in config.trackers]
            trackers = make_tracker_set(given)
        with self._creating(("trainer",)):
            fields = run_config(config.trainer, {**sections, "seed": seed}, seed)
            trainer = Trainer(
                fields, model, optimizers, schedulers, trackers=trackers, **functions, **labels
            )
        for key, kind, hook in iterate_hooks(config):
            with self._creating(key):
                new = HookItem.read(self._create_within(hook.item(), key), kind).register()
                self.hook_keys[trainer.hooks.add_hook(new.hook, **new.options)] = key
        with self._creating(("data",)):
            trainer.set_data(train, val)
        return trainer

    # -- sections ---------------------------------------------------------------------------------

    def _model(self) -> Any:
        model: Any = self._create(("model",), self._config.model)
        return self._check_type(("model",), model, "torch.nn", torch.nn.Module)

    def _check_type(self, key: Key, created: Any, package: str, expected: type[Any]) -> Any:
        if not isinstance(created, expected):
            name = f"{package}.{expected.__name__}"
            self._fail(key, f"It returned a {type(created).__name__}; expected a {name}.")
        return created

    def _optimizer(self, key: Key, section: OptimizerConfig, model: torch.nn.Module) -> Any:
        named = dict(model.named_parameters())
        if section.params is not None:
            with self._creating((*key, "params")):
                named = {name: named[name] for name in match_names(section.params, list(named))}
        if not named:
            self._fail(key, "The model has no parameters to train.")
        groups: list[dict[str, Any]] = []
        rest = dict(named)
        for i, group in enumerate(section.groups):
            group_key = (*key, "groups", i)
            with self._creating((*group_key, "params")):
                names = match_names(group.params, list(named))
            duplicates = [name for name in names if name not in rest]
            if duplicates:
                text = f"The parameter '{duplicates[0]}' is already in an earlier group."
                self._fail(group_key, text)
            options = self._create_within(group.model_extra or {}, group_key)
            groups.append({**options, "params": [rest.pop(name) for name in names]})
        if rest:
            groups.insert(0, {"params": list(rest.values())})
        parameters: Any = groups if section.groups else list(rest.values())
        optimizer = self._create(key, section, parameters)
        return self._check_type(key, optimizer, "torch.optim", torch.optim.Optimizer)

    def _function(self, key: Key, section: ObjectConfig) -> Any:
        target = self._targets[section.class_path]
        if isinstance(target, type):
            target = self._create(key, section)
        elif section.init_args:
            target = partial(target, **self._create_within(section.init_args, (*key, "init_args")))
        if not callable(target):
            self._fail(key, f"It returned a {type(target).__name__}, which is not callable.")
        return target

    def _loaders(self, split: str) -> Any:
        loaders = {
            name: self._loader(key, section)
            for key, name, section in iterate_loaders(self._config, split)
        }
        if None in loaders:
            return loaders[None]
        return {str(name): loader for name, loader in loaders.items()} or None

    def _loader(self, key: Key, section: LoaderConfig) -> Any:
        data: Any = self._create(key, section)
        is_dataset = section.loader is not None and not isinstance(data, type)
        if is_dataset or isinstance(data, torch.utils.data.Dataset):
            options = self._create_within(section.loader or {}, (*key, "loader"))
            with self._creating((*key, "loader") if section.loader is not None else key):
                return torch.utils.data.DataLoader(cast("Any", data), **options)
        if not hasattr(data, "__iter__") or isinstance(data, type):
            self._fail(
                key,
                f"It returned a {type(data).__name__}; expected an iterable of batches, or a "
                "dataset with `loader` beside it.",
            )
        return data

    # -- objects ----------------------------------------------------------------------------------

    def _create(self, key: Key, section: ObjectConfig, *positional: Any) -> Any:
        args = self._create_within(section.init_args, (*key, "init_args"))
        with self._creating(key):
            return self._targets[section.class_path](*positional, **args)

    def _create_value(self, value: Any, key: Key) -> Any:
        """Return a value in which objects are created."""
        if isinstance(value, list):
            return [self._create_value(inner, (*key, i)) for i, inner in enumerate(value)]
        if not isinstance(value, dict):
            return value
        if "class_path" in value:
            target = self._targets[value["class_path"]]
            if value.get("call", True) is False:
                return target
            args = self._create_within(value.get("init_args") or {}, (*key, "init_args"))
            with self._creating(key):
                return target(**args)
        return self._create_within(value, key)

    def _create_within(self, values: Mapping[str, Any], key: Key) -> dict[str, Any]:
        return {name: self._create_value(inner, (*key, name)) for name, inner in values.items()}

    @contextmanager
    def _creating(self, key: Key) -> Generator[None]:
        """Turn any error while something is created into a `FileError` with its place."""
        try:
            yield
        except FileError:
            raise
        except HooklineError as error:
            raise FileError([self._tree.problem(key, str(error))]) from error
        except (Exception, SystemExit) as error:
            reason = str(error) or "without a message"
            text = f"It could not be created: {type(error).__name__}: {reason}"
            raise FileError([self._tree.problem(key, text + format_origin(error))]) from error

    def _fail(self, key: Key, text: str) -> NoReturn:
        raise FileError([self._tree.problem(key, text)])


def format_origin(error: BaseException) -> str:
    """Return the file and line that raised an error, to append to a message."""
    here = Path(__file__).parent
    all_frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in all_frames if Path(frame.filename).parent != here]
    if not frames:
        return ""
    last = frames[-1]
    return f" ({Path(last.filename).name}, line {last.lineno})"
