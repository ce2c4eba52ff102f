"""Names of trackers: the built-in ones, and class paths."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from hookline.arguments import check_mapping, describe_value, read_items
from hookline.config.hook_names import load_class
from hookline.errors import ArgumentError, ConfigError, nearest
from hookline.trackers.protocol import Tracker

BUILT_IN_TRACKERS: Mapping[str, str] = {
    "tensorboard": "hookline.trackers.tensorboard.TensorBoardTracker",
    "wandb": "hookline.trackers.wandb.WandbTracker",
    "mlflow": "hookline.trackers.mlflow.MLflowTracker",
    "trackio": "hookline.trackers.trackio.TrackioTracker",
}
"""Hookline's own trackers. The name is that of the package, and of the extra."""


def make_trackers(trackers: Any) -> dict[str, Tracker]:
    """Return trackers by name, from names, objects, or mappings with `name` and options."""
    if isinstance(trackers, str | Mapping) or hasattr(type(trackers), "start"):
        trackers = [trackers]
    by_name: dict[str, Tracker] = {}
    for item in read_items("trackers", trackers, "a list of trackers"):
        name, tracker = _make_tracker(item)
        if name in by_name:
            raise ConfigError(f"trackers has '{name}' twice. Give each tracker once.")
        by_name[name] = tracker
    return by_name


def _make_tracker(item: Any) -> tuple[str, Tracker]:
    if isinstance(item, str):
        return _create(item, {})
    if isinstance(item, Mapping):
        options = check_mapping("trackers", item)
        name = options.pop("name", None)
        if not isinstance(name, str):
            known = ", ".join(BUILT_IN_TRACKERS)
            raise ConfigError(f"A tracker needs `name`, such as one of: {known}.")
        return _create(name, options)
    if isinstance(item, Tracker) and not isinstance(item, type):
        return str(getattr(item, "name", type(item).__name__)), item
    raise ArgumentError(
        f"trackers takes names, mappings with `name` and options, and objects with the methods "
        f"start, log and finish, not {describe_value(item)}."
    )


def _create(name: str, options: dict[str, Any]) -> tuple[str, Tracker]:
    tracker_class = load_class(_find_path(name))
    if name in BUILT_IN_TRACKERS and find_spec(name) is None:
        raise ConfigError(
            f"The tracker '{name}' needs the package {name}, which is not installed: "
            f"pip install 'hookline[{name}]'."
        )
    try:
        tracker: Any = tracker_class(**options)
    except TypeError as error:
        raise ConfigError(f"The tracker '{name}' cannot be created: {error}.") from error
    if not isinstance(tracker, Tracker):
        raise ConfigError(f"'{name}' is not a tracker: it lacks one of start, log and finish.")
    return name, tracker


def _find_path(name: str) -> str:
    if name in BUILT_IN_TRACKERS:
        return BUILT_IN_TRACKERS[name]
    if "." in name:
        return name
    known = ", ".join(BUILT_IN_TRACKERS)
    raise ConfigError(
        f"Unknown tracker '{name}'.{nearest(name, BUILT_IN_TRACKERS)} Known are: {known}. One of "
        "your own is given as an object, or by its class path."
    )
