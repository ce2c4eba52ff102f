"""The file of `hookline run --hooks`: hooks, trackers and the run, and nothing about training."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import Field

from hookline.config.config_model import Config
from hookline.config_files.merging import merge_files
from hookline.config_files.objects import check_hooks, iterate_hooks
from hookline.config_files.sections import Hooks, TrackerConfig, validate_file
from hookline.config_files.tree import FileError
from hookline.config_files.trust import (
    Trust,
    find_import_folder,
    find_project,
    find_trusted_packages,
    importable,
)
from hookline.dispatch import HookSettings


class ScriptConfig(Config):
    """The hooks and the run of `hookline run`, as in a config file."""

    include: str | list[str] = Field(default=[], description="other files, relative to this one")
    name: str | None = Field(default=None, min_length=1, description="the run's name")
    tags: list[str] = Field(default=[], description="words to find the run by")
    hparams: dict[str, Any] = Field(default={}, description="hyperparameters to record")
    runs: str | None = Field(default=None, min_length=1, description="the folder for runs")
    trackers: list[TrackerConfig] = Field(
        default=[], description="experiment trackers that the run is also written to"
    )
    settings: HookSettings = Field(
        default_factory=HookSettings, description="how failing and costly hooks are treated"
    )
    hooks: Hooks = Field(default=[], description="a list of hooks, or hooks by kind")


def load_script_file(path: Path, trust: Iterable[str] = ()) -> tuple[ScriptConfig, list[Any], Path]:
    """Return the configuration, its hooks as items of a `HookRegistry`, and their folder.

    Raises:
        FileError: names every mistake, with file, line and key.
    """
    project = find_project()
    packages = find_trusted_packages(trust, project)
    tree = merge_files(path, project=project)
    config = validate_file(ScriptConfig, tree)
    folder = find_import_folder(path, project)
    with importable(folder):
        check_hooks(config, tree, Trust(project, packages, folder, path.resolve().parent))
    hooks = [(key, hook.item()) for key, _, hook in iterate_hooks(config)]
    for key, item in hooks:
        try:
            json.dumps(item)  # how it is passed to the script
        except TypeError as error:
            raise FileError(
                [tree.problem(key, f"It cannot be passed to a script ({error}).")]
            ) from None
    return config, [item for _, item in hooks], folder
