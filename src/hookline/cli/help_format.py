"""How `--help` shows commands: a flag takes no value, an argument stands as it is typed."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

__all__ = ["Command", "Group"]


class Command(TyperCommand):
    """A command with a usage line such as `hookline train [OPTIONS] CONFIG [KEY=VALUE]...`."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return what it takes; of typer's types, flags show none."""
        return _without_types_of_flags(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line."""
        given = [one for one in self.get_params(ctx) if one.param_type_name == "argument"]
        return ["[OPTIONS]", *map(_usage, given)]


class Group(TyperGroup):
    """A command with commands of its own."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return what it takes; of typer's types, flags show none."""
        return _without_types_of_flags(super().get_params(ctx))


def _without_types_of_flags(params: list[Any]) -> list[Any]:
    for one in params:
        if getattr(one, "is_flag", False):
            one.metavar = ""  # newer typers show <bool>, as if a value had to follow
    return params


def _usage(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return (name if argument.required else f"[{name}]") + ("" if argument.nargs == 1 else "...")
