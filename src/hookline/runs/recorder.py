"""What a loop writes down: a run's folder, or only a line in the log."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hookline.dispatch import HookInfo, Summary
from hookline.runs.config_hash import config_hash
from hookline.runs.git import describe_commit, git_facts
from hookline.runs.manifest import new_run_id
from hookline.runs.masking import masked
from hookline.runs.run import Kind, Run

__all__ = ["Recorder"]

log = logging.getLogger("hookline")


class Recorder:
    """The record that every loop keeps, its own trainer's or somebody else's.

    Args:
        root: the folder of all runs, or a run that is open for writing; None: there is no folder,
            and what a run would say at its start is only logged.
    """

    def __init__(self, root: str | os.PathLike[str] | Run | None) -> None:
        self._root = root
        self.run: Run | None = None  # None also when the run is over
        self.run_id: str | None = None

    def begin(
        self,
        *,
        config: Mapping[str, Any],
        seed: Any,
        hooks: Sequence[HookInfo],
        device: Any,
        step: int | None = 0,
        goes_on: Path | None = None,
        restored: Path | None = None,
    ) -> None:
        """Begin a run, and log what it is: id, commit, hash of the configuration, hooks.

        Args:
            config: the resolved configuration; what its keys call a secret is masked.
            seed: the seed.
            hooks: all hooks, in order.
            device: where the model is trained.
            step: completed steps; None when that is not known yet.
            goes_on: the folder of the run that is resumed.
            restored: the checkpoint that was loaded.
        """
        config, said = masked(config), [masked(_told(info)) for info in hooks]
        if isinstance(self._root, Run):
            self.run = self._root
        elif goes_on is not None:
            self.run = Run.open(
                goes_on, resume=True, config=config, seed=seed, hooks=said, device=device
            )
        elif self._root is not None:
            self.run = Run.create(self._root, config=config, seed=seed, hooks=said, device=device)
        if self.run is not None or log.isEnabledFor(logging.INFO):
            self._announce(config, hooks)
        self.event("start", step=step, resumed_from=None if restored is None else str(restored))

    def _announce(self, config: Mapping[str, Any], hooks: Sequence[HookInfo]) -> None:
        run = self.run
        self.run_id = new_run_id() if run is None else run.id
        if not log.isEnabledFor(logging.INFO):
            return
        git = git_facts() if run is None else run.manifest.get("git") or {}
        log.info(
            "Run %s starts: git commit %s%s, config hash %s, hooks: %s",
            self.run_id,
            describe_commit(git),
            " with uncommitted changes" if git.get("dirty") else "",
            config_hash(config),
            ", ".join(f"{info.name} ({info.status})" for info in hooks) or "none",
        )

    def value(self, step: int, epoch: int | None, name: str, value: Any, kind: Kind) -> None:
        """Record a value that somebody logged."""
        if self.run is not None:
            self.run.log(step, epoch, name, value, kind)

    def metrics(self, step: int, epoch: int | None, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of an epoch or a validation."""
        if self.run is not None:
            self.run.log_metrics(step, epoch, metrics)

    def epoch(self, step: int, epoch: int | None, means: Mapping[str, Any]) -> None:
        """Record the means of an epoch as `<name>_epoch`, apart from the values of its steps."""
        self.metrics(step, epoch, {f"{name}_epoch": value for name, value in means.items()})

    def flush(self) -> None:
        """Make durable what was recorded so far."""
        if self.run is not None:
            self.run.flush(durable=True)

    def event(self, kind: str, **fields: Any) -> None:
        """Record that something happened."""
        if self.run is not None:
            self.run.event(kind, **fields)

    def close(
        self, status: str, reason: str | None, summary: Summary, error: BaseException | None
    ) -> None:
        """End the run; what comes after it is not recorded."""
        if self.run is not None:
            self.run.event("end", status=status, reason=reason, hooks=summary.as_dict())
            self.run.close(status, error)
            self.run = None


def _told(info: HookInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "kind": info.kind,
        "class": info.cls,
        "options": dict(info.options),
        "enabled": info.enabled,
        "schedule": info.schedule,
    }
