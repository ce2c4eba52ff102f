"""Names and classes of modules as the model's author wrote them, and patterns that choose names.

Names are those of the model as its author wrote it: the parts that `torch.compile`, DDP, FSDP and
activation checkpointing add are not in them.

A pattern is one of

- a name: `blocks.3.mlp`;
- a glob: `*` stands for one part of a name, or for a piece within a part, and never for a dot; `**`
  for any number of parts, none included; `?` for one character, `[0-3]` for one of several;
- `re:` and a regular expression that matches the whole name.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

from hookline.arguments import show_value
from hookline.errors import ConfigError, listed, nearest

if TYPE_CHECKING:
    from torch import nn

_WRAPPERS = (
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
    (
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        "FullyShardedDataParallel",
        "_fsdp_wrapped_module",
    ),
)
"""The module and name of each wrapper class, and the attribute that has the wrapped module."""

_WRAPPED = {"OptimizedModule": "_orig_mod", "DistributedDataParallel": "module"}
_UNAMBIGUOUS = {attribute for *_, attribute in _WRAPPERS if attribute.startswith("_")}
_SHOWN = 8  # names in a message


class ModulePlace(NamedTuple):
    """A place in the tree of modules. A tied module has several."""

    name: str
    """Without the parts that wrappers add."""
    full_name: str
    """As in `named_modules`."""
    module: nn.Module
    is_wrapper: bool
    """Whether it only wraps the module with the same `name`."""


def clean_name(name: str) -> str:
    """Return a name without the parts that only wrappers add.

    `module`, which DDP adds, is kept, because a model may have an attribute of that name;
    `module_places` distinguishes the two.
    """
    return ".".join(part for part in name.split(".") if part not in _UNAMBIGUOUS)


def module_places(model: nn.Module) -> list[ModulePlace]:
    """Return all places of modules in a model, in the model's order, the model first."""
    # Looked up, not imported: whoever uses a wrapper has imported it, and some imports are slow.
    wrappers = [
        (cls, attribute)
        for module, name, attribute in _WRAPPERS
        if (cls := getattr(sys.modules.get(module), name, None)) is not None
    ]
    return list(_walk(model, "", "", wrappers, ()))


def _walk(
    module: nn.Module,
    name: str,
    full_name: str,
    wrappers: list[tuple[type, str]],
    parents: tuple[nn.Module, ...],
) -> Iterator[ModulePlace]:
    children = {part: child for part, child in module._modules.items() if child is not None}
    wrapped = next((attribute for cls, attribute in wrappers if isinstance(module, cls)), None)
    yield ModulePlace(name, full_name, module, is_wrapper=wrapped in children)
    parents = (*parents, module)
    for part, child in children.items():
        if not any(child is parent for parent in parents):  # a module may contain itself
            child_name = name if part == wrapped else f"{name}.{part}".lstrip(".")
            yield from _walk(
                child, child_name, f"{full_name}.{part}".lstrip("."), wrappers, parents
            )


def matches_glob(pattern: str, name: str) -> bool:
    """Return whether a glob matches the whole name."""
    return _parts_match(_split(pattern), _split(name))


def _split(name: str) -> list[str]:
    return name.split(".") if name else []


def _parts_match(pattern: list[str], name: list[str]) -> bool:
    if not pattern:
        return not name
    first, *rest = pattern
    if first == "**":
        return any(_parts_match(rest, name[skipped:]) for skipped in range(len(name) + 1))
    return bool(name) and fnmatchcase(name[0], first) and _parts_match(rest, name[1:])


def compile_regex(pattern: str | re.Pattern[str]) -> re.Pattern[str]:
    """Return a regular expression, with or without `re:`, compiled."""
    if isinstance(pattern, re.Pattern):
        return pattern
    try:
        return re.compile(pattern.removeprefix("re:"))
    except re.error as error:
        raise ConfigError(f"{show_value(pattern)} is not a regular expression: {error}.") from error


def explain_mismatch(pattern: str, names: Sequence[str]) -> str:
    """Return a hint on why a pattern matches none of the names, starting with a space, or ""."""
    if pattern.startswith("re:"):
        return " A regular expression has to match the whole name."
    deeper = next((name for name in names if "*" in pattern and fnmatchcase(name, pattern)), None)
    if deeper is not None:
        return (
            f" '*' stands for one part of a name, and '{deeper}' has more: write '**' for any "
            "number of parts."
        )
    return nearest(pattern, names)


def list_names(names: Sequence[str]) -> str:
    """Return the first names for a message, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{listed(names[:_SHOWN])}{more}"


# -- classes --------------------------------------------------------------------------------------


def module_class(module: Any) -> type:
    """Return the class of a module: inside `torch.compile` and DDP, and before FSDP2.

    `fully_shard` gives a module a class of its own, `FSDPBlock` instead of `Block`.
    """
    module = unwrap_module(module)
    kind = type(module)
    return kind.__bases__[1] if is_fsdp_module(module) else kind


def unwrap_module(module: Any) -> Any:
    """Return the module inside `torch.compile` and DDP."""
    while (inner := _WRAPPED.get(type(module).__name__)) is not None and hasattr(module, inner):
        module = getattr(module, inner)
    return module


def is_fsdp_module(module: Any) -> bool:
    """Return whether `fully_shard` was called with a module itself."""
    bases = type(module).__bases__
    return len(bases) == 2 and bases[0].__name__ == "FSDPModule"
