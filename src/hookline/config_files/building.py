"""Building: from a checked configuration to a trainer with its data."""

from __future__ import annotations

import traceback
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from hookline.config import SECTIONS
from hookline.config.hook_items import HookItem
from hookline.config.trainer_config import TrainerConfig
from hookline.config_files.config_tree import ConfigTree, FileError, Key
from hookline.config_files.file_model import (
    LoaderConfig,
    ObjectConfig,
    OptimizerConfig,
    TrainingConfig,
)
from hookline.config_files.object_specs import is_object, iterate_hooks, iterate_loaders
from hookline.config_files.validation import ResolvedObjects
from hookline.errors import HooklineError
from hookline.loop.random_state import seed_everything
from hookline.tensors.parameter_names import match_names
from hookline.trainer.trainer import Trainer

__all__ = ["RunConfig", "build_trainer", "format_origin", "run_config"]


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


def build_trainer(config: TrainingConfig, tree: ConfigTree, resolved: ResolvedObjects) -> Trainer:
    """Create everything that the configuration names; return the trainer with its data.

    Raises:
        FileError: something could not be created.
    """
    return _Builder(config, tree, resolved).trainer()


class _Builder:
    def __init__(self, config: TrainingConfig, tree: ConfigTree, resolved: ResolvedObjects) -> None:
        self._config, self._tree, self._resolved = config, tree, resolved

    def trainer(self) -> Trainer:
        config = self._config
        seed = config.trainer.seed if config.seed is None else config.seed
        if seed is not None:
            with self._creating(("seed",)):
                seed_everything(seed)
        model = self._model()
        optimizers = [
            self._optimizer(key, section, model) for key, section in self._sections("optimizer")
        ]
        schedulers = [
            self._create(key, section, optimizers[section.optimizer])
            for key, section in self._sections("scheduler")
        ]
        functions = {
            name: self._function((name,), section)
            for name in ("loss_fn", "step_fn", "tokens_fn")
            if (section := getattr(config, name)) is not None
        }
        train, val = self._loaders("train"), self._loaders("val")
        sections = config.model_dump(mode="json", exclude={"include", "trust", "trainer", "seed"})
        with self._creating(("trainer",)):
            fields = run_config(config.trainer, {**sections, "seed": seed}, seed)
            trainer = Trainer(fields, model, optimizers, schedulers, **functions)
        for key, section, hook in iterate_hooks(config):
            with self._creating(key):
                item = self._resolved.hooks.get(key)
                if item is None:  # its options contain objects
                    kind = None if section is None else SECTIONS[section]
                    item = HookItem.read(self._create_within(hook.item(), key), kind)
                trainer.hooks.add_item(item)
        with self._creating(("data",)):
            trainer.set_data(train, val)
        return trainer

    def _sections(self, name: str) -> list[tuple[Key, Any]]:
        """Return a section that may be a list as a list, with keys."""
        section = getattr(self._config, name)
        if isinstance(section, list):
            return [((name, i), item) for i, item in enumerate(section)]
        return [] if section is None else [((name,), section)]

    # -- sections ---------------------------------------------------------------------------------

    def _model(self) -> Any:
        model: Any = self._create(("model",), self._config.model)
        if not isinstance(model, torch.nn.Module):
            self._fail(
                ("model",), f"It returned a {type(model).__name__}; expected a torch.nn.Module."
            )
        return model

    def _optimizer(self, key: Key, section: OptimizerConfig, model: torch.nn.Module) -> Any:
        named = dict(model.named_parameters())
        if section.params is not None:
            chosen = self._match_parameters((*key, "params"), section.params, named)
            named = {name: named[name] for name in chosen}
        if not named:
            self._fail(key, "The model has no parameters to train.")
        groups: list[dict[str, Any]] = []
        rest = dict(named)
        for i, group in enumerate(section.groups):
            group_key = (*key, "groups", i)
            names = self._match_parameters((*group_key, "params"), group.params, named)
            duplicates = [name for name in names if name not in rest]
            if duplicates:
                text = f"The parameter '{duplicates[0]}' is already in an earlier group."
                self._fail(group_key, text)
            options = self._create_within(group.model_extra or {}, group_key)
            groups.append({**options, "params": [rest.pop(name) for name in names]})
        if rest or not groups:
            groups.insert(0, {"params": list(rest.values())})
        parameters: Any = groups if section.groups else list(rest.values())
        optimizer = self._create(key, section, parameters)
        if not isinstance(optimizer, torch.optim.Optimizer):
            kind = type(optimizer).__name__
            self._fail(key, f"It returned a {kind}; expected a torch.optim.Optimizer.")
        return optimizer

    def _match_parameters(
        self, key: Key, patterns: Sequence[str], named: Mapping[str, Any]
    ) -> list[str]:
        with self._creating(key):
            return match_names(patterns, list(named))

    def _function(self, key: Key, section: ObjectConfig) -> Any:
        target = self._resolved.targets[section.class_path]
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
        if isinstance(getattr(self._config.data, split), list):
            return list(loaders.values())
        return loaders.get(None, loaders or None)

    def _loader(self, key: Key, section: LoaderConfig) -> Any:
        data = self._create(key, section)
        if section.loader is not None or isinstance(data, torch.utils.data.Dataset):
            options = self._create_within(section.loader or {}, (*key, "loader"))
            with self._creating((*key, "loader") if section.loader is not None else key):
                return torch.utils.data.DataLoader(data, **options)
        if not hasattr(data, "__iter__"):
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
            return self._resolved.targets[section.class_path](*positional, **args)

    def _create_value(self, value: Any, key: Key) -> Any:
        """Return a value in which objects are created."""
        if isinstance(value, list):
            return [self._create_value(inner, (*key, i)) for i, inner in enumerate(value)]
        if not isinstance(value, dict):
            return value
        if is_object(value):
            target = self._resolved.targets[value["class_path"]]
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
            kind = type(error).__name__
            text = f"It could not be created: {kind}: {reason}{format_origin(error)}"
            raise FileError([self._tree.problem(key, text)]) from error

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
