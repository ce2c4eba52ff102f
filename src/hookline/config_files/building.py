"""From a checked configuration to a trainer with its data."""

from __future__ import annotations

import traceback
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from hookline.config.trainer_config import TrainerConfig
from hookline.config_files.checking import Found
from hookline.config_files.file_model import ObjectConfig, OptimizerConfig, TrainingConfig
from hookline.config_files.merging import Merged
from hookline.config_files.object_specs import hooks_in, is_object, loaders_in
from hookline.config_files.problems import FileError, Key
from hookline.errors import ConfigError, HooklineError
from hookline.loop.random_state import seed_everything
from hookline.tensors.parameter_names import chosen_names
from hookline.trainer.trainer import Trainer

__all__ = ["RunConfig", "build_trainer", "raised_in", "run_config"]


class RunConfig(TrainerConfig):
    """A trainer's configuration that knows the file it comes from, for the record of the run."""

    training: dict[str, Any] = Field(
        default={}, description="the other sections of the training file, resolved"
    )

    @model_serializer(mode="wrap")
    def _as_in_the_file(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        return {**fields.pop("training"), "trainer": fields}


def run_config(config: TrainerConfig, training: Mapping[str, Any], seed: int | None) -> RunConfig:
    """Return a trainer's configuration with all that the run's record should have."""
    given: dict[str, Any] = {name: getattr(config, name) for name in config.model_fields_set}
    if config.max_steps is not None:
        given.setdefault("max_epochs", None)  # steps alone, and the record says so
    given |= {"seed": seed, "training": dict(training)}
    return RunConfig(**given)


def build_trainer(config: TrainingConfig, merged: Merged, found: Found) -> Trainer:
    """Make everything that the configuration names; return the trainer, which has its data.

    Raises:
        FileError: something could not be made.
    """
    return _Builder(config, merged, found).trainer()


class _Builder:
    def __init__(self, config: TrainingConfig, merged: Merged, found: Found) -> None:
        self._config, self._merged, self._found = config, merged, found

    def trainer(self) -> Trainer:
        config = self._config
        seed = config.trainer.seed if config.seed is None else config.seed
        if seed is not None:
            with self._making(("seed",)):
                seed_everything(seed)
        model = self._model()
        optimizers = [self._optimizer(key, one, model) for key, one in self._several("optimizer")]
        schedulers = [
            self._made(key, one, optimizers[one.optimizer])
            for key, one in self._several("scheduler")
        ]
        functions = {
            name: self._function((name,), given)
            for name in ("loss_fn", "step_fn", "tokens_fn")
            if (given := getattr(config, name)) is not None
        }
        train, val = self._loaders("train"), self._loaders("val")
        sections = config.model_dump(mode="json", exclude={"include", "trust", "trainer", "seed"})
        with self._making(("trainer",)):
            fields = run_config(config.trainer, {**sections, "seed": seed}, seed)
            trainer = Trainer(fields, model, optimizers, schedulers, **functions)
        for key, section, hook in hooks_in(config):
            with self._making(key):
                self._add_hook(trainer, section, self._each_filled(hook.item(), key))
        with self._making(("data",)):
            trainer.set_data(train, val)
        return trainer

    def _several(self, section: str) -> list[tuple[Key, Any]]:
        given = getattr(self._config, section)
        if isinstance(given, list):
            return [((section, i), one) for i, one in enumerate(given)]
        return [] if given is None else [((section,), given)]

    # -- sections ---------------------------------------------------------------------------------

    def _model(self) -> Any:
        model: Any = self._made(("model",), self._config.model)
        if not isinstance(model, torch.nn.Module):
            self._fail(("model",), f"It gave a {type(model).__name__}; expected a torch.nn.Module.")
        return model

    def _optimizer(self, key: Key, given: OptimizerConfig, model: torch.nn.Module) -> Any:
        named = dict(model.named_parameters())
        if given.params is not None:
            chosen = self._matching((*key, "params"), given.params, named)
            named = {name: named[name] for name in chosen}
        if not named:
            self._fail(key, "The model has no parameters to train.")
        groups: list[dict[str, Any]] = []
        rest = dict(named)
        for i, group in enumerate(given.groups):
            place = (*key, "groups", i)
            names = self._matching((*place, "params"), group.params, named)
            again = [name for name in names if name not in rest]
            if again:
                self._fail(place, f"The parameter '{again[0]}' is in an earlier group, too.")
            options = self._each_filled(group.model_extra or {}, place)
            groups.append({**options, "params": [rest.pop(name) for name in names]})
        if rest or not groups:
            groups.insert(0, {"params": list(rest.values())})
        first: Any = groups if given.groups else list(rest.values())
        optimizer = self._made(key, given, first)
        if not isinstance(optimizer, torch.optim.Optimizer):
            self._fail(
                key, f"It gave a {type(optimizer).__name__}; expected a torch.optim.Optimizer."
            )
        return optimizer

    def _matching(self, key: Key, patterns: Sequence[str], named: Mapping[str, Any]) -> list[str]:
        with self._making(key):
            return chosen_names(patterns, list(named))

    def _function(self, key: Key, given: ObjectConfig) -> Any:
        target = self._found[given.class_path]
        if isinstance(target, type):
            target = self._made(key, given)
        elif given.init_args:
            target = partial(target, **self._each_filled(given.init_args, (*key, "init_args")))
        if not callable(target):
            self._fail(key, f"It gave a {type(target).__name__}, which cannot be called.")
        return target

    def _loaders(self, which: str) -> Any:
        made = {name: self._loader(key, one) for key, name, one in loaders_in(self._config, which)}
        if isinstance(getattr(self._config.data, which), list):
            return list(made.values())
        return made.get(None, made or None)

    def _loader(self, key: Key, given: Any) -> Any:
        data = self._made(key, given)
        if given.loader is not None or isinstance(data, torch.utils.data.Dataset):
            options = self._each_filled(given.loader or {}, (*key, "loader"))
            with self._making((*key, "loader") if given.loader is not None else key):
                return torch.utils.data.DataLoader(data, **options)
        if not hasattr(data, "__iter__"):
            self._fail(
                key,
                f"It gave a {type(data).__name__}; expected what gives batches, or a dataset with "
                "`loader` beside it.",
            )
        return data

    def _add_hook(self, trainer: Trainer, section: str | None, item: dict[str, Any]) -> None:
        where = "hooks[0]: " if section is None else f"hooks.{section}[0]: "
        try:
            trainer.hooks.add_configured([item] if section is None else {section: [item]})
        except ConfigError as error:  # it counts within what it was given, which is this hook alone
            raise ConfigError(str(error).removeprefix(where)) from error

    # -- objects ----------------------------------------------------------------------------------

    def _made(self, key: Key, given: ObjectConfig, *first: Any) -> Any:
        args = self._each_filled(given.init_args, (*key, "init_args"))
        with self._making(key):
            return self._found[given.class_path](*first, **args)

    def _filled(self, value: Any, key: Key) -> Any:
        """Return a value with the objects in it made."""
        if isinstance(value, list):
            return [self._filled(one, (*key, i)) for i, one in enumerate(value)]
        if not isinstance(value, dict):
            return value
        if is_object(value):
            target = self._found[value["class_path"]]
            if value.get("call", True) is False:
                return target
            args = self._each_filled(value.get("init_args") or {}, (*key, "init_args"))
            with self._making(key):
                return target(**args)
        return self._each_filled(value, key)

    def _each_filled(self, given: Mapping[str, Any], key: Key) -> dict[str, Any]:
        return {name: self._filled(one, (*key, name)) for name, one in given.items()}

    @contextmanager
    def _making(self, key: Key) -> Generator[None]:
        """Whatever goes wrong while something is made is an error with its place."""
        try:
            yield
        except FileError:
            raise
        except HooklineError as error:
            raise FileError([self._merged.problem(key, str(error))]) from error
        except (Exception, SystemExit) as error:
            said = str(error) or "without a message"
            text = f"It could not be made: {type(error).__name__}: {said}{raised_in(error)}"
            raise FileError([self._merged.problem(key, text)]) from error

    def _fail(self, key: Key, text: str) -> NoReturn:
        raise FileError([self._merged.problem(key, text)])


def raised_in(error: BaseException) -> str:
    """Return where an error was raised, as the end of a message."""
    here = Path(__file__).parent
    raised = traceback.extract_tb(error.__traceback__)
    frames = [one for one in raised if Path(one.filename).parent != here]
    if not frames:
        return ""
    last = frames[-1]
    return f" ({Path(last.filename).name}, line {last.lineno})"
