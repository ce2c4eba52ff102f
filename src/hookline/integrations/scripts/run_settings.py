"""RunSettings: what `hookline run` is asked for, passed to the script's processes as a variable.

Importing this does not import torch, which would take most of the command's time.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline.integrations.scripts.startup.sitecustomize import PROCESS, SETTINGS
from hookline.masking import remember_secrets

if TYPE_CHECKING:
    from hookline.config.registry import HookRegistry

STARTUP = Path(__file__).parent / "startup"

DEFAULT_HOOKS: tuple[Mapping[str, Any], ...] = (
    {"name": "gradient_monitor", "log_frequency": 10},
    {"name": "lr_monitor"},
    {"name": "loss_spike_detector"},
    {"name": "debug", "every_n_steps": 10, "action": "warn"},  # nobody has asked it to stop
)
"""The hooks of `hookline run` if the user names none."""

ALWAYS_POSSIBLE = ("lr_monitor", "loss_spike_detector")
"""Those of them that see every loop: also LBFGS, and models compiled in place."""


@dataclass(frozen=True)
class RunSettings:
    """The hooks that `hookline run` attaches, and where it records.

    Args:
        hooks: hooks as in a configuration; none for `DEFAULT_HOOKS`.
        runs: the folder for runs.
        name: a name for the runs.
        tags: tags for the runs.
        hparams: hyperparameters to record.
        trackers: experiment trackers.
        settings: fields of `HookSettings`.
        strict: whether an error is raised where hooks cannot be attached.
        folder: where modules of the user's own hooks are imported from.
        stopped_code: the exit code of a script whose loop a hook has stopped; 75 is EX_TEMPFAIL
            of sysexits.h.
        is_temporary: whether the runs are deleted afterwards: they get no report, and nothing says
            where they are.
    """

    hooks: list[Any] = field(default_factory=list[Any])
    runs: str = "runs"
    name: str | None = None
    tags: list[str] = field(default_factory=list[str])
    hparams: dict[str, Any] = field(default_factory=dict[str, Any])
    trackers: list[Any] = field(default_factory=list[Any])
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    strict: bool = False
    folder: str = ""
    stopped_code: int = 75
    is_temporary: bool = False

    @classmethod
    def from_json(cls, text: str) -> RunSettings:
        """Return the settings of the `hookline run` that has started this process."""
        settings = cls(**json.loads(text))
        remember_secrets(asdict(settings))
        return settings

    def variables(self) -> dict[str, str]:
        """Return the environment variables of the script, without PYTHONPATH."""
        return {SETTINGS: json.dumps(asdict(self))}

    def environment(self, before: Mapping[str, str]) -> dict[str, str]:
        """Return the whole environment of the script, for a process that becomes the script."""
        path = before.get("PYTHONPATH", "")
        return {
            **before,
            **self.variables(),
            "PYTHONPATH": f"{STARTUP}{os.pathsep}{path}" if path else str(STARTUP),
            PROCESS: str(os.getpid()),
        }

    def make_hooks(self, *, only_possible: bool = False) -> HookRegistry:
        """Return new hooks; `only_possible` leaves out default hooks that not every loop allows."""
        from hookline.config.registry import HookRegistry

        items = self.hooks or [
            each for each in DEFAULT_HOOKS if not only_possible or each["name"] in ALWAYS_POSSIBLE
        ]
        if self.folder and self.folder not in sys.path:
            sys.path.append(self.folder)  # last: nothing of the script's own is hidden
        return HookRegistry(items)

    def attach_options(self) -> dict[str, Any]:
        """Return the options of `attach`, except the hooks."""
        from hookline.dispatch import HookSettings

        return {
            "runs": self.runs,
            "name": self.name,
            "tags": self.tags,
            "hparams": self.hparams,
            "trackers": self.trackers,
            "settings": HookSettings(**self.settings),
            "report": not self.is_temporary,
        }
