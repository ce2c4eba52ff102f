"""What a training file may say: each section, each key, what is valid and what it means.

The file's errors, the JSON schema and the reference page are made from these models.

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
from typing import Annotated, Any, Self

from pydantic import (
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    NonNegativeInt,
    Tag,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from hookline.config.trainer_config import Config, TrainerConfig

__all__ = [
    "TAGS",
    "DataConfig",
    "GroupConfig",
    "HookConfig",
    "HooksByKind",
    "LoaderConfig",
    "ObjectConfig",
    "OptimizerConfig",
    "SchedulerConfig",
    "TrainingConfig",
]

TAGS = ("(one)", "(list)", "(named)")
"""What pydantic puts into the path of an error where a section has several forms."""

_PATH = r"^[^\W\d]\w*(\.[^\W\d]\w*)+$"


class Short(Config):
    """A mapping that may be written as a string: the value of one of its keys."""

    @classmethod
    def short_for(cls) -> str:
        """Return the key that the string stands for."""
        return "class_path"

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, given: Any) -> Any:
        return {cls.short_for(): given} if isinstance(given, str) else given

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        whole = handler(core_schema)
        inside = handler.resolve_ref_schema(whole)
        if "anyOf" in inside:
            return whole
        text = f"short for a mapping with `{cls.short_for()}` alone"
        mapping = {key: inside.pop(key) for key in list(inside) if key != "title"}
        description = mapping.pop("description", "")
        inside["description"] = description
        inside["anyOf"] = [{"type": "string", "description": text}, mapping]
        return whole


class ObjectConfig(Short):
    """An object: a class or function, and what it is called with."""

    class_path: str = Field(
        pattern=_PATH,
        description="a class, or a function that returns the object: `package.module.Name`",
    )
    init_args: dict[str, Any] = Field(
        default={},
        description="its arguments by name; one that is a mapping with `class_path` is made into "
        "an object first, and with `call: false` it is the class or function itself",
    )


class GroupConfig(Config):
    """Some of an optimizer's parameters, with options of their own, such as `lr`."""

    model_config = ConfigDict(extra="allow")

    params: list[str] = Field(
        min_length=1,
        description="parameters: parts of their names, globs (`head.*`), or regular expressions",
    )


class OptimizerConfig(ObjectConfig):
    """An optimizer. The model's parameters are its first argument, without being named."""

    params: list[str] | None = Field(
        default=None,
        description="which of the model's parameters it gets: parts of their names, globs, or "
        "regular expressions; null for all",
    )
    groups: list[GroupConfig] = Field(
        default=[],
        description="parameters with options of their own; all others are a group by themselves",
    )


class SchedulerConfig(ObjectConfig):
    """A learning-rate scheduler. Its optimizer is its first argument, without being named."""

    optimizer: NonNegativeInt = Field(default=0, description="which optimizer, counted from 0")


class LoaderConfig(ObjectConfig):
    """Data: what gives batches, or a dataset and how to load it."""

    loader: dict[str, Any] | None = Field(
        default=None,
        description="for a dataset: the options of `torch.utils.data.DataLoader`, such as "
        "`batch_size` and `shuffle`",
    )


def _form(given: Any) -> str:
    if isinstance(given, list | tuple):
        return "(list)"
    if not isinstance(given, Mapping) or not given:
        return "(one)"
    names = [str(name) for name in given]
    # A misspelled key is no loader's name.
    one = get_close_matches("class_path", names, cutoff=0.75) or not (
        set(names) - set(LoaderConfig.model_fields)
    )
    return "(one)" if one else "(named)"


def _one_or_list(given: Any) -> str:
    return "(list)" if isinstance(given, list | tuple) else "(one)"


Loaders = Annotated[
    Annotated[LoaderConfig, Tag("(one)")]
    | Annotated[list[LoaderConfig], Tag("(list)"), Field(min_length=1)]
    | Annotated[dict[str, LoaderConfig], Tag("(named)"), Field(min_length=1)],
    Discriminator(_form),
]


class DataConfig(Config):
    """What to train and validate on."""

    train: Loaders = Field(
        description="one loader, a list, or a mapping by name; `trainer.loaders` says how several "
        "become one stream"
    )
    val: Loaders | None = Field(default=None, description="the same, for validation")


class HookConfig(Short):
    """A hook. All further keys are its options, or those of `add_hook`, such as `every`."""

    model_config = ConfigDict(extra="allow", serialize_by_alias=True)

    name: str | None = Field(
        default=None,
        min_length=1,
        description="a built-in, what an installed package brings, or a class path",
    )
    class_path: str | None = Field(
        default=None,
        pattern=_PATH,
        description="a hook class; `name`, if it is there too, is then its name in the run",
    )
    init_args: dict[str, Any] | None = Field(
        default=None, description="its options, where they do not stand beside its name"
    )
    enabled: bool = Field(default=True, strict=True, description="false: there, but switched off")
    its_name: str | None = Field(
        default=None, alias="as", min_length=1, description="its name in the run"
    )

    @classmethod
    def short_for(cls) -> str:
        """Return the key that the string stands for."""
        return "name"

    @model_validator(mode="after")
    def _is_named(self) -> Self:
        if self.name is None and self.class_path is None:
            raise ValueError("A hook needs `name` or `class_path`")
        return self

    def item(self) -> dict[str, Any]:
        """Return it as a `HookRegistry` takes it."""
        given = self.model_dump(exclude_unset=True)
        return {key: value for key, value in given.items() if value is not None}


class HooksByKind(Config):
    """Hooks by what they are called with, each kind in the order of calling."""

    loop: list[HookConfig] = Field(default=[], description="called by events")
    forward: list[HookConfig] = Field(default=[], description="see the model's outputs")
    update: list[HookConfig] = Field(default=[], description="transform gradients")
    probes: list[HookConfig] = Field(default=[], description="on modules of the model")


Hooks = Annotated[
    Annotated[list[HookConfig], Tag("(list)")] | Annotated[HooksByKind, Tag("(one)")],
    Discriminator(_one_or_list),
]


class TrainingConfig(Config):
    """A training, in one file."""

    include: str | list[str] = Field(
        default=[],
        description="other files, relative to this one; what stands here wins over what stands "
        "there, and later files win over earlier ones",
    )
    trust: list[str] = Field(
        default=[],
        description="packages that class paths may name, beside the folder of this file, hookline, "
        'torch, and installed packages with hooks; "*" for all. Class paths run code',
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        lt=2**63,
        description="seeds Python, torch and numpy (if imported) before anything is made, and "
        "again when training begins",
    )
    model: ObjectConfig = Field(description="the model, a `torch.nn.Module`")
    data: DataConfig = Field(description="what to train and validate on")
    optimizer: Annotated[
        Annotated[OptimizerConfig, Tag("(one)")]
        | Annotated[list[OptimizerConfig], Tag("(list)"), Field(min_length=1)],
        Discriminator(_one_or_list),
    ] = Field(description="the optimizer, or a list of several")
    scheduler: (
        Annotated[
            Annotated[SchedulerConfig, Tag("(one)")]
            | Annotated[list[SchedulerConfig], Tag("(list)")],
            Discriminator(_one_or_list),
        ]
        | None
    ) = Field(default=None, description="a learning-rate scheduler, or a list of several")
    loss_fn: ObjectConfig | None = Field(
        default=None,
        description="`loss_fn(outputs, targets)`: a function, which is taken as it is, with "
        "`init_args` as further arguments; or a class, of which one is made",
    )
    step_fn: ObjectConfig | None = Field(
        default=None,
        description="`step_fn(model, batch)`, which returns the loss, or a mapping with `loss`; in "
        "place of `loss_fn`",
    )
    tokens_fn: ObjectConfig | None = Field(
        default=None, description="`tokens_fn(batch)`: how many tokens a batch has"
    )
    trainer: TrainerConfig = Field(
        default_factory=TrainerConfig, description="what the trainer does"
    )
    hooks: Hooks = Field(
        default=[],
        description="hooks in a list, or by kind: `loop`, `forward`, `update`, `probes`",
    )
