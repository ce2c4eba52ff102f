"""Settings of a resumed run that differ from those that its checkpoint was saved with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hookline.config.trainer_config import TrainerConfig
from hookline.printable import printable
from hookline.runs.diff import diff_configs, number_items
from hookline.runs.jsonable import to_jsonable

__all__ = ["compare_settings", "describe_settings"]

_USED = (  # a resumed run uses the new value
    *("precision", "accumulate", "clip_norm", "clip_value", "on_nan", "loaders"),
    *("optimizer_every", "scheduler_every", "validate_every_epochs", "validate_every_steps"),
)
_RESTORED = ("optimizers", "schedulers", "seed")  # it uses the checkpoint's


def describe_settings(config: TrainerConfig, training: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a checkpoint keeps, to be compared when it is resumed.

    Args:
        config: the configuration.
        training: the description of optimizers and schedulers.
    """
    fields = {name: to_jsonable(getattr(config, name)) for name in (*_USED, "seed")}
    described: dict[str, Any] = {name: training.get(name, []) for name in _RESTORED[:2]}
    return {**fields, **described}


def compare_settings(
    saved: Mapping[str, Any], now: Mapping[str, Any]
) -> tuple[dict[str, Any], str | None]:
    """Return the settings that a resumed run has, and a message about those that differ.

    Args:
        saved: What `describe_settings` returned for the checkpoint.
        now: The same of the trainer that resumes it.
    """
    saved = to_jsonable(saved)  # a checkpoint may have anything there
    used = _list_changes(saved, now, _USED)
    unused = _list_changes(saved, now, _RESTORED)
    in_force = {**now, **{name: saved[name] for name in _RESTORED if name in saved}}
    if not used and not unused:
        return in_force, None
    parts = ["The settings differ from those that the checkpoint was saved with."]
    if used:
        parts.append(f"Used from now on: {'; '.join(used)}.")
    if unused:
        parts.append(f"Without effect, because the checkpoint's are restored: {'; '.join(unused)}.")
    parts.append(
        "To train on with other settings in a run of its own, use fit(fork_from=…), or "
        "`hookline train CONFIG --from RUN`."
    )
    return in_force, " ".join(parts)


def _list_changes(
    saved: Mapping[str, Any], now: Mapping[str, Any], names: tuple[str, ...]
) -> list[str]:
    before = {name: saved[name] for name in names if name in saved}
    pairs = diff_configs(number_items(before), number_items({n: now.get(n) for n in before}))
    return [
        printable(f"{name} is {new!r} instead of {was!r}") for name, (was, new) in pairs.items()
    ]
