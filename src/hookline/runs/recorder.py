"""Recording a training loop: in a run's folder, or only as a line in the log."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hookline.dispatch import HookInfo, Summary
from hookline.masking import mask_secrets, mask_text, remember_secrets
from hookline.runs.event_recorder import EventRecorder, format_traceback
from hookline.runs.git import describe_commit, read_git_state
from hookline.runs.jsonable import config_hash, to_jsonable
from hookline.runs.manifest import new_run_id
from hookline.runs.run import Kind, Run
from hookline.runs.training_description import describe_training

__all__ = ["Recorder", "describe_loop"]

log = logging.getLogger("hookline")


class Recorder(EventRecorder):
    """Records a training loop, the trainer's or another one, in a run.

    Args:
        root: The folder of all runs, or a run that is open for writing. None: no run is written,
            and the start is only logged.
        trackers: The trackers of the loop, a `TrackerSet`; None if it has none.
    """

    def __init__(self, root: str | os.PathLike[str] | Run | None, trackers: Any = None) -> None:
        super().__init__()
        self._root = root
        self._trackers = trackers
        self.sink: Run | None = None  # what values are logged to: the run, or one for trackers only
        self.run_id: str | None = None

    def begin(
        self,
        *,
        config: Mapping[str, Any],
        seed: Any,
        hooks: Sequence[HookInfo],
        device: Any,
        step: int | None = 0,
        resumed_run: Path | None = None,
        restored: Path | None = None,
        position: Mapping[str, int] | None = None,
        parent: Mapping[str, Any] | None = None,
        loop: Any = None,
        config_is_complete: bool = False,
    ) -> None:
        """Start a run, and log its id, commit, configuration hash and hooks.

        Args:
            config: The resolved configuration; secrets are masked.
            seed: The seed.
            hooks: All hooks, in order.
            device: Where the model is trained.
            step: Completed steps; None if unknown.
            resumed_run: The folder of the run that is resumed.
            restored: The checkpoint that was loaded.
            position: Where the resumed run continues, from that checkpoint (`Run.rewind`). None:
                behind the records of `step`.
            parent: Where a new run was forked from: `run_id`, `checkpoint` and `step`.
            loop: The trainer or session, whose model, optimizers, … the manifest describes, with
                its `name` and `tags`.
            config_is_complete: The configuration itself describes all of that, as that of a config
                file does: the configuration hash covers only the configuration.
        """
        unmasked = _collect_fields(config, hooks, loop)
        remember_secrets(unmasked)
        covered = unmasked if loop is not None and not config_is_complete else config
        hashed = config_hash(covered)
        fields = _mask_fields(unmasked, hooks)
        fields |= {"config_hash": hashed, "seed": seed, "device": device}
        fields |= {"name": getattr(loop, "name", None), "tags": getattr(loop, "tags", ())}
        self._hook_statuses = {info.name: info.status for info in hooks}
        if isinstance(self._root, Run):
            self.run = self._root
            self._hook_statuses = {}  # its manifest does not have these hooks
        elif resumed_run is not None:
            if position is None and step is not None:
                position = {"step": step}
            fields["resumed_from"] = None if restored is None else restored.name
            self.run = Run.open(resumed_run, resume=True, position=position, **fields)
        elif self._root is not None:
            self.run = Run.create(self._root, parent=parent, **fields)
        self.sink = self.run
        if self.run is None and self._trackers is not None:
            from hookline.runs.unwritten_run import UnwrittenRun

            self.run_id = new_run_id()
            self.sink = UnwrittenRun(self.run_id, parent, **fields)
        if self.run is not None or log.isEnabledFor(logging.INFO):
            self._log_start(hashed, hooks)
        self.event("start", step=step, resumed_from=None if restored is None else str(restored))
        if self._trackers is not None:
            self._trackers.start(self.sink, getattr(loop, "hparams", {}))
            if resumed_run is not None:
                self._trackers.rewind(step)

    def _log_start(self, hashed: str, hooks: Sequence[HookInfo]) -> None:
        run = self.run
        self.run_id = (self.run_id or new_run_id()) if run is None else run.id
        if not log.isEnabledFor(logging.INFO):
            return
        git = read_git_state() if run is None else run.manifest.get("git") or {}
        log.info(
            "Run %s starts: git commit %s%s, config hash %s, hooks: %s",
            self.run_id,
            describe_commit(git),
            " with uncommitted changes" if git.get("dirty") else "",
            hashed,
            ", ".join(f"{info.name} ({info.status})" for info in hooks) or "none",
        )

    def value(self, step: int, epoch: int | None, name: str, value: Any, kind: Kind) -> None:
        """Record one value."""
        if self.sink is not None:
            self.sink.log(step, epoch, name, value, kind)

    def metrics(self, step: int, epoch: int | None, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of an epoch or a validation."""
        if self.sink is not None:
            self.sink.log_metrics(step, epoch, metrics)

    def epoch(self, step: int, epoch: int | None, means: Mapping[str, Any]) -> None:
        """Record the means of an epoch as `<name>_epoch`, apart from the values of its steps."""
        self.metrics(step, epoch, {f"{name}_epoch": value for name, value in means.items()})

    def flush(self) -> None:
        """Flush what was recorded so far to the disk."""
        if self.run is not None:
            self.run.flush(durable=True)

    def position(self) -> dict[str, int] | None:
        """Return where the run's metrics log stands, for a checkpoint; None without a run."""
        return None if self.run is None else self.run.position()

    def rewind(self, position: Mapping[str, int]) -> None:
        """Bring the run's metrics log back to where it stood when a checkpoint was saved."""
        if self.run is not None:
            self.run.rewind(position)
            if self._trackers is not None:
                self._trackers.rewind(position.get("step"))

    @contextmanager
    def paused(self, is_paused: bool = True) -> Generator[None]:
        """Record nothing within the block."""
        run, sink = self.run, self.sink
        if is_paused:
            self.run = self.sink = None
        try:
            yield
        finally:
            self.run, self.sink = run, sink

    def event(self, kind: str, **fields: Any) -> None:
        """Record an event."""
        super().event(kind, **fields)
        if self._trackers is not None and kind == "checkpoint":
            self._trackers.checkpoint(fields["path"], fields["step"])

    def problem(self) -> str | None:
        """Return what is missing in the run, in one line; None if it is complete."""
        problems = [] if self._trackers is None else self._trackers.describe_problems()
        if self.run is not None and (own := self.run.problem) is not None:
            problems.insert(0, own)
        return "; ".join(problems) or None

    def close(
        self,
        status: str,
        reason: str | None,
        summary: Summary,
        error: BaseException | None,
        step: int | None = None,
        **fields: Any,
    ) -> None:
        """End the run, with further fields for its last event; nothing is recorded afterwards.

        The run is closed before the wait for trackers: a process that is killed meanwhile has
        completed it.
        """
        sink = self.sink
        if sink is not None:
            sink.flush()
        if self.run is not None:
            if self._trackers is not None:
                self._trackers.write_ids()
                if missing := self._trackers.report():
                    self.run.event("trackers", missing=missing)
            end = {"status": status, "reason": reason, "step": step}
            if error is not None:
                end["error"] = mask_text(f"{type(error).__name__}: {error}")
                end["traceback"] = format_traceback(error)
            skipped = self.skipped_steps
            hooks = summary.as_dict()
            self.run.event("end", **end, **fields, skipped_steps=skipped, hooks=hooks)
            self.run.close(status, error)
        self.run = self.sink = None
        if self._trackers is not None and sink is not None:
            try:
                self._trackers.finish(status)
            finally:
                sink.close(status, error)  # of a run without a folder, whose images are needed
                self._trackers.close()


def describe_loop(
    config: Mapping[str, Any], hooks: Sequence[HookInfo], loop: Any
) -> dict[str, Any]:
    """Return what a run's manifest has about a training loop, with secrets masked."""
    return _mask_fields(_collect_fields(config, hooks, loop), hooks)


def _collect_fields(
    config: Mapping[str, Any], hooks: Sequence[HookInfo], loop: Any
) -> dict[str, Any]:
    """Return what the configuration hash covers."""
    return {
        "config": to_jsonable(config),
        "hooks": [_describe_hook(info) for info in hooks],
        "training": None if loop is None else describe_training(loop),
    }


def _mask_fields(fields: Mapping[str, Any], hooks: Sequence[HookInfo]) -> dict[str, Any]:
    described = zip(fields["hooks"], hooks, strict=True)
    shown = [{**hook, "options": to_jsonable(info.options)} for hook, info in described]
    masked: dict[str, Any] = mask_secrets({**fields, "hooks": shown})
    return masked


def _describe_hook(info: HookInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "kind": info.kind,
        "class": info.cls,
        "options": to_jsonable(info.unmasked_options),
        "enabled": info.enabled,
        "schedule": info.schedule,
    }
