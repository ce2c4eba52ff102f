"""The run that a restarted job continues: the newest unfinished one that is the same."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hookline.checkpoint.catalog import find_checkpoint
from hookline.errors import CheckpointError
from hookline.runs.diff import diff_configs, number_items
from hookline.runs.environment import is_process_alive
from hookline.runs.jsonable import make_comparable
from hookline.runs.location import find_refused_entries, list_run_folders
from hookline.runs.manifest import inspect_run_manifest
from hookline.runs.reader import OpenedRun

log = logging.getLogger("hookline")

_UNFINISHED = ("interrupted", "preempted", "error", "lost", "training")
_WITHOUT_EFFECT = ("runs", "progress", "checkpoints", "slow_rank_seconds")  # the last: of old runs
_MAX_SHOWN = 5  # differences


def find_unfinished_run(
    runs: Path, identity: Mapping[str, Any], *others: Mapping[str, Any]
) -> tuple[Path | None, str]:
    """Return the checkpoint to resume from, or None to start a new run, and a message about it.

    It is the newest undamaged checkpoint of the newest unfinished run that has one. A run counts as
    finished if it completed, or was stopped for another reason than a time limit. A run whose
    manifest is damaged, or whose files are links, is skipped with a warning. If there is none, the
    message names the unfinished run that differs least, and what differs.

    Args:
        runs: The folder of all runs.
        identity: What the manifest of a run that trains the same has: the configuration, and the
            values of other fields.
        others: The same as it may be in runs that an earlier version has written.
    """
    without_checkpoint = 0
    different: list[tuple[int, OpenedRun, list[str]]] = []
    for folder in list_run_folders(runs):
        run = OpenedRun(folder)
        manifest, problems = inspect_run_manifest(folder)
        problems += find_refused_entries(folder)
        if problems:
            log.warning("The run %s is not resumed automatically: %s.", folder, problems[0])
            continue
        if not _is_unfinished(run):
            continue
        found = (_list_differences(known, manifest) for known in (identity, *others))
        if differences := min(found, key=len):
            different.append((len(differences), run, differences))
            continue
        try:
            checkpoint = find_checkpoint(folder, verify=True)
        except CheckpointError:
            without_checkpoint += 1
            continue
        return checkpoint, f"Resuming the run {run.id} ({run.status}) from {checkpoint}."
    reason = "there is no unfinished run of this configuration"
    if without_checkpoint:
        plural = " has" if without_checkpoint == 1 else "s have"
        count = f"{without_checkpoint} unfinished run{plural}"
        reason = f"{count} this configuration, but no checkpoint to resume from"
    # Of several that differ equally, the newest.
    nearest = min(different, key=lambda one: one[0], default=None)
    hint = "" if nearest is None else _describe_nearest(*nearest[1:])
    return None, f"In {runs}, {reason}. Starting a new run.{hint}"


def _select(manifest: Mapping[str, Any], name: str) -> Any:
    """Return a field of a manifest; of the configuration, what affects training."""
    value = manifest.get(name)
    if name != "config":
        return value
    config = value if isinstance(value, Mapping) else {}
    trainer = config.get("trainer", config)  # a config file has a section for it
    if not isinstance(trainer, Mapping):
        return config
    kept = {name: value for name, value in trainer.items() if name not in _WITHOUT_EFFECT}
    if isinstance(hooks := kept.get("hooks"), Mapping):  # how failures and costs are reported
        kept["hooks"] = {name: value for name, value in hooks.items() if name != "settings"}
    return kept if trainer is config else {**config, "trainer": kept}


def _leave_out_unknown(value: Any, other: Any) -> Any:
    """Return a value without options that are off, and that another version does not know."""
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        return {
            name: _leave_out_unknown(one, other.get(name))
            for name, one in value.items()
            if name in other or one
        }
    if isinstance(value, list) and isinstance(other, list) and len(value) == len(other):
        return [_leave_out_unknown(one, two) for one, two in zip(value, other, strict=True)]
    return value


def _list_differences(identity: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[str]:
    """Return what differs between this training and the run with this manifest."""
    own, saved = (
        {name: _select(fields, name) for name in identity}
        for fields in (make_comparable(identity), make_comparable(manifest))
    )
    here = _flatten_sections(_leave_out_unknown(own, saved))
    there = _flatten_sections(_leave_out_unknown(saved, own))
    pairs = diff_configs(number_items(here), number_items(there))
    lines = [f"{name} is {mine!r} here, {other!r} there" for name, (mine, other) in pairs.items()]
    return [line[:200] for line in lines]


def _flatten_sections(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields with configuration and training at the top, and hooks by name, in order."""
    hooks = [hook for hook in fields.get("hooks") or () if isinstance(hook, Mapping)]
    by_name = {str(hook.get("name")): dict(hook) for hook in hooks}
    sections = [fields.get(name) for name in ("config", "training")]
    merged = {k: v for one in sections if isinstance(one, Mapping) for k, v in one.items()}
    others = {k: v for k, v in fields.items() if k not in ("config", "training", "hooks")}
    return {**merged, **others, "hooks": {**by_name, "order": list(by_name)}}


def _describe_nearest(run: OpenedRun, differences: list[str]) -> str:
    shown = differences[:_MAX_SHOWN]
    if len(differences) > _MAX_SHOWN:
        shown.append(f"and {len(differences) - _MAX_SHOWN} more differences")
    what = "; ".join(shown)
    return (
        f" The nearest unfinished run is {run.id} ({run.status}), which differs: {what}. To "
        f"continue it nevertheless, resume from its folder, {run.path}."
    )


def _is_unfinished(run: OpenedRun) -> bool:
    status = run.status
    if status == "training":
        attempts = run.manifest.get("attempts") or [{}]
        return is_process_alive(attempts[-1]) is not True  # None: it ran on another machine
    if status == "stopped":  # by a time limit, so that the next job can continue
        ends = run.events("end")
        return bool(ends) and "time limit" in str(ends[-1].get("reason"))
    return status in _UNFINISHED
