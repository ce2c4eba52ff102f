"""The options of a store of captured states, and their checks."""

from __future__ import annotations

from typing import Any, Literal, get_args

from hookline.arguments import show_value
from hookline.errors import ConfigError, listed, nearest

__all__ = ["Policy", "check_store_options"]

Policy = Literal["drop_oldest", "sample", "spill", "error"]
"""What happens to states that do not fit."""


def check_store_options(
    limits: dict[str, Any], policy: Any, cleanup_interval: Any, folder: Any
) -> None:
    """Raise a `ConfigError` for the first option that is not valid; limits may be None."""
    for name, value in (*limits.items(), ("cleanup_interval", cleanup_interval)):
        optional = name in limits
        if value is None and optional:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            none = " or None" if optional else ""
            raise ConfigError(f"{name} must be a positive integer{none}, not {show_value(value)}.")
    if not isinstance(policy, str) or policy not in get_args(Policy):
        hint = nearest(policy, get_args(Policy)) if isinstance(policy, str) else ""
        raise ConfigError(
            f"policy must be one of {listed(get_args(Policy))}, not {show_value(policy)}.{hint}"
        )
    if folder is not None and policy != "spill":
        raise ConfigError(f"folder is only used with policy='spill', not with '{policy}'.")
