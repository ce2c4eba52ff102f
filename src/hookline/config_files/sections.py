"""The models of a config file: each section and key, its valid values and its meaning.

`validate_file` compares a merged configuration with them; nothing is imported.

Error messages, the JSON schema and the reference page are derived from these models.

    seed: 0
    model: {class_path: model.GPT, init_args: {width: 64}}
    data:
      train: {class_path: data.Text, init_args: {split: train}, loader: {batch_size: 32}}
      val: {class_path: data.val_loader}
    optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 1e-3}}
    scheduler: {class_path: torch.optim.lr_scheduler.CosineAnnealingLR, init_args: {T_max: 100}}
    loss_fn: torch.nn.functional.cross_entropy
    trainer: {max_epochs: 3}
    hooks:
      - lr_monitor
      - {name: early_stopping, patience: 3}
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import (
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    NonNegativeInt,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from hookline.config.config_model import UNKNOWN_FIELD_ERRORS, Config, describe_fields
from hookline.config.trainer_config import TrainerConfig
from hookline.config_files.tree import (
    MAX_PROBLEMS,
    ConfigTree,
    FileError,
    Key,
    Problem,
    format_key,
    format_value,
    shorten,
)
from hookline.config_files.trust import VARIABLE
from hookline.dispatch import HookSettings
from hookline.errors import nearest

_TAGS = ("(one)", "(list)", "(named)")
"""The names of a section's forms, which pydantic puts into the path of an error."""

_Model = TypeVar("_Model", bound=Config)
_TRACKER_NAME = r"^[\w-]+$"
_PATH = r"^[^\W\d]\w*(\.[^\W\d]\w*)+$"


class StringShorthand(Config):
    """A mapping that may be written as a string, which is the value of one of its keys."""

    shorthand_key: ClassVar[str] = "class_path"

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, given: Any) -> Any:
        return {cls.shorthand_key: given} if isinstance(given, str) else given

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        reference = handler(core_schema)
        schema = handler.resolve_ref_schema(reference)
        if "anyOf" in schema:
            return reference
        text = f"shorthand for a mapping with only `{cls.shorthand_key}`"
        mapping = {key: schema.pop(key) for key in list(schema) if key != "title"}
        schema["description"] = mapping.pop("description", "")
        schema["anyOf"] = [{"type": "string", "description": text}, mapping]
        return reference


class ObjectConfig(StringShorthand):
    """An object: a class or function, and the arguments it is called with."""

    class_path: str = Field(
        pattern=_PATH,
        description="a class, or a function that returns the object: `package.module.Name`",
    )
    init_args: dict[str, Any] = Field(
        default={},
        description="its arguments by name; an argument that is a mapping with `class_path` is "
        "created first, or with `call: false` passed as the class or function itself",
    )


class InnerObject(ObjectConfig):
    """An object among the arguments of another one."""

    call: bool = Field(
        default=True, strict=True, description="false: the class or function itself is passed"
    )

    @model_validator(mode="after")
    def _is_called_with_arguments(self) -> Self:
        if not self.call and self.init_args:
            raise ValueError("With `call: false` nothing is called. Remove the arguments")
        return self


class GroupConfig(Config):
    """A parameter group of an optimizer, with its own options, such as `lr`."""

    model_config = ConfigDict(extra="allow")

    params: list[str] = Field(
        min_length=1,
        description="parameters: parts of their names, globs (`head.*`), or regular expressions",
    )


class OptimizerConfig(ObjectConfig):
    """An optimizer. It receives the model's parameters as its first argument."""

    params: list[str] | None = Field(
        default=None,
        description="the parameters it optimizes: parts of their names, globs, or "
        "regular expressions; null for all",
    )
    groups: list[GroupConfig] = Field(
        default=[],
        description="parameter groups with their own options; all other parameters form one group",
    )


class SchedulerConfig(ObjectConfig):
    """A learning-rate scheduler. It receives its optimizer as its first argument."""

    optimizer: NonNegativeInt = Field(default=0, description="the index of its optimizer, from 0")


class LoaderConfig(ObjectConfig):
    """A loader: an iterable of batches, or a dataset with the options to load it."""

    loader: dict[str, Any] | None = Field(
        default=None,
        description="for a dataset: the options of `torch.utils.data.DataLoader`, such as "
        "`batch_size` and `shuffle`",
    )


def _loaders_form(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "(list)"
    if not isinstance(value, Mapping) or not value:
        return "(one)"
    names = [str(name) for name in value]
    # A misspelled `class_path` is not the name of a loader.
    is_loader = get_close_matches("class_path", names, cutoff=0.75) or not (
        set(names) - set(LoaderConfig.model_fields)
    )
    return "(one)" if is_loader else "(named)"


def _one_or_list(value: Any) -> str:
    return "(list)" if isinstance(value, list | tuple) else "(one)"


Loaders = Annotated[
    Annotated[LoaderConfig, Tag("(one)")]
    | Annotated[list[LoaderConfig], Tag("(list)"), Field(min_length=1)]
    | Annotated[dict[str, LoaderConfig], Tag("(named)"), Field(min_length=1)],
    Discriminator(_loaders_form),
]


class DataConfig(Config):
    """The data for training and validation."""

    train: Loaders = Field(
        description="one loader, a list, or a mapping by name; `trainer.loaders` defines how "
        "several are combined"
    )
    val: Loaders | None = Field(default=None, description="the same, for validation")


class HookConfig(StringShorthand):
    """A hook. Further keys are its options, or arguments of `add_hook`, such as `every`."""

    model_config = ConfigDict(extra="allow", serialize_by_alias=True)
    shorthand_key = "name"

    name: str | None = Field(
        default=None,
        min_length=1,
        description="a built-in, or a class path",
    )
    class_path: str | None = Field(
        default=None,
        pattern=_PATH,
        description="a hook class; `name`, if also given, is then its name in the run",
    )
    init_args: dict[str, Any] | None = Field(
        default=None, description="its options, if they are not given beside its name"
    )
    enabled: bool = Field(default=True, strict=True, description="false registers it disabled")
    run_name: str | None = Field(
        default=None, alias="as", min_length=1, description="its name in the run"
    )

    @model_validator(mode="after")
    def _is_named(self) -> Self:
        if self.name is None and self.class_path is None:
            example = "`name: early_stopping`, with its options beside it"
            raise ValueError(f"A hook needs `name` or `class_path`, such as {example}")
        return self

    def item(self) -> dict[str, Any]:
        """Return the hook as a `HookRegistry` expects it."""
        fields = self.model_dump(exclude_unset=True)
        return {key: value for key, value in fields.items() if value is not None}


class HooksByKind(Config):
    """Hooks by kind, each kind in calling order."""

    loop: list[HookConfig] = Field(default=[], description="called by events")
    forward: list[HookConfig] = Field(default=[], description="receive the model's outputs")
    update: list[HookConfig] = Field(default=[], description="transform gradients")
    probes: list[HookConfig] = Field(default=[], description="attached to modules of the model")


Hooks = Annotated[
    Annotated[list[HookConfig], Tag("(list)")] | Annotated[HooksByKind, Tag("(one)")],
    Discriminator(_one_or_list),
]


class TrackerConfig(StringShorthand):
    """An experiment tracker. Further keys are its options."""

    model_config = ConfigDict(extra="allow")
    shorthand_key = "name"

    name: str = Field(
        pattern=_TRACKER_NAME,
        description="`tensorboard`, `wandb`, `mlflow` or `trackio`",
    )


class RunSections(Config):
    """The sections that every config file may have: other files, labels of the run, trackers."""

    include: str | list[str] = Field(
        default=[],
        description="other files, relative to this one; this file overrides them, and later files "
        "override earlier ones",
    )
    name: str | None = Field(default=None, min_length=1, description="the run's name")
    tags: list[str] = Field(default=[], description="words to find the run by")
    hparams: dict[str, Any] = Field(
        default={},
        description="hyperparameters to record with the run; other keys may refer to them, such as "
        "`${hparams.lr}`",
    )
    trackers: list[TrackerConfig] = Field(
        default=[], description="experiment trackers that the run is also written to"
    )


class TrainingConfig(RunSections):
    """A config file: everything that a training run needs."""

    seed: int | None = Field(
        default=None,
        ge=0,
        lt=2**63,
        description="seeds Python, torch and numpy (if imported) before objects are created, and "
        "again when training starts",
    )
    model: ObjectConfig = Field(description="the model, a `torch.nn.Module`")
    data: DataConfig = Field(description="the data for training and validation")
    optimizer: Annotated[
        Annotated[OptimizerConfig, Tag("(one)")]
        | Annotated[list[OptimizerConfig], Tag("(list)"), Field(min_length=1)],
        Discriminator(_one_or_list),
    ] = Field(description="the optimizer, or a list of optimizers")
    scheduler: (
        Annotated[
            Annotated[SchedulerConfig, Tag("(one)")]
            | Annotated[list[SchedulerConfig], Tag("(list)")],
            Discriminator(_one_or_list),
        ]
        | None
    ) = Field(default=None, description="a learning-rate scheduler, or a list of schedulers")
    loss_fn: ObjectConfig | None = Field(
        default=None,
        description="`loss_fn(outputs, targets)`: a function, or a class, which is instantiated",
    )
    step_fn: ObjectConfig | None = Field(
        default=None,
        description="`step_fn(model, batch)`, which returns the loss or a mapping with `loss`; "
        "instead of `loss_fn`",
    )
    tokens_fn: ObjectConfig | None = Field(
        default=None,
        description="`tokens_fn(batch)`, which returns the number of tokens of a batch",
    )
    trainer: TrainerConfig = Field(
        default_factory=TrainerConfig, description="the settings of the trainer"
    )
    hooks: Hooks = Field(
        default=[],
        description="a list of hooks, or hooks by kind: `loop`, `forward`, `update`, `probes`",
    )


class ScriptConfig(RunSections):
    """The file of `hookline run --hooks`: hooks, trackers and the run, nothing about training."""

    runs: str | None = Field(default=None, min_length=1, description="the folder for runs")
    settings: HookSettings = Field(
        default_factory=HookSettings, description="how failing and costly hooks are treated"
    )
    hooks: Hooks = Field(default=[], description="a list of hooks, or hooks by kind")


# -- validation ------------------------------------------------------------------------------------


_TRUST_IN_FILE = (
    "A config file does not decide which packages are trusted. Pass `--trust PACKAGE`, set "
    f"{VARIABLE}=PACKAGE, or set `trust` under `[tool.hookline]` in the project's pyproject.toml; "
    "from Python, call load_training(…, trust=[…])."
)


def validate_file(model: type[_Model], tree: ConfigTree) -> _Model:
    """Return a file as this model; raise a `FileError` that names every wrong key."""
    if "trust" in tree.values:
        raise FileError([tree.problem(("trust",), _TRUST_IN_FILE)])
    return validate_as(model, tree.values, tree)


def validate_as(model: type[_Model], values: Any, tree: ConfigTree, key: Key = ()) -> _Model:
    """Return the values of a key as a model; raise a `FileError` that names every wrong key."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        found = error.errors(include_url=False)
    problems = [_describe(tree, model, key, dict(one)) for one in found[:MAX_PROBLEMS]]
    raise FileError(problems, len(found))


def _describe(tree: ConfigTree, model: type[Config], within: Key, error: dict[str, Any]) -> Problem:
    path: Key = error["loc"]
    key = (*within, *(part for part in path if part not in _TAGS))
    if error["type"] in UNKNOWN_FIELD_ERRORS:
        name, known = str(path[-1]), _fields_at(model, path[:-1])
        hint = f" The keys here are: {', '.join(known)}." if known else ""
        return tree.problem(key, f"Unknown key '{shorten(name, 80)}'.{nearest(name, known)}{hint}")
    if error["type"] == "missing":
        meaning = _fields_at(model, path[:-1]).get(str(path[-1]), "")
        file, line = tree.place(key[:-1])  # the place of the mapping that lacks the key
        hint = f" Expected {meaning}." if meaning else ""
        return Problem(file, line, format_key(key), f"The key is missing.{hint}")
    return tree.problem(key, f"It is {format_value(error['input'], key)}. {_expectation(error)}.")


def _expectation(error: dict[str, Any]) -> str:
    context = error.get("ctx", {})
    if error["type"] in ("model_type", "dict_type"):
        is_union = context.get("class_name") == HooksByKind.__name__
        return f"Expected a mapping{' or a list' if is_union else ''}"
    if error["type"] == "string_pattern_mismatch" and context["pattern"] == _TRACKER_NAME:
        return "Expected the name of a tracker: tensorboard, wandb, mlflow or trackio"
    if error["type"] == "string_pattern_mismatch":
        return "Expected a class path, `package.module.Name`"
    if error["type"] == "value_error":  # raised by a validator of the models
        return str(context["error"])
    return str(error["msg"])


def _fields_at(model: type[Config], path: Key) -> dict[str, str]:
    if path[:2] == ("hooks", "(one)"):
        return describe_fields(HooksByKind, path[2:])
    return describe_fields(model, path)
