"""The run that a restarted job continues: the newest unfinished one that is the same.

A run that fails again and again after the same checkpoint is not continued.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hookline.checkpoint.catalog import find_checkpoint
from hookline.errors import CheckpointError, RunError
from hookline.printable import message_lines
from hookline.runs.checkpoint_reader import read_checkpoints
from hookline.runs.diff import diff_configs, number_items
from hookline.runs.environment import is_process_alive
from hookline.runs.jsonable import canonical_json
from hookline.runs.location import find_refused_entries, list_run_folders
from hookline.runs.manifest import inspect_run_manifest, read_run_manifest
from hookline.runs.reader import OpenedRun

log = logging.getLogger("hookline")

_UNFINISHED = ("interrupted", "preempted", "error", "lost", "training")
_WITHOUT_EFFECT = (
    "runs",
    "progress",
    "checkpoints",
    "slow_rank_seconds",
)  # the last is of old runs
_MAX_SHOWN = 5  # differences
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+")  # addresses, process numbers, free memory


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
        if not any(_is_same(manifest, known) for known in (identity, *others)):
            differences = _list_differences(identity, manifest)
            different.append((len(differences), run, differences))
            continue
        if not _is_unfinished(run):
            continue
        try:
            checkpoint = find_checkpoint(folder, verify=True)
        except CheckpointError:
            without_checkpoint += 1
            continue
        check_crash_loop(folder, checkpoint)
        return checkpoint, f"Resuming the run {run.id} ({run.status}) from {checkpoint}."
    reason = "there is no unfinished run of this configuration"
    if without_checkpoint:
        plural = " has" if without_checkpoint == 1 else "s have"
        count = f"{without_checkpoint} unfinished run{plural}"
        reason = f"{count} this configuration, but no checkpoint to resume from"
    different.sort(key=lambda one: one[0])  # the newest is the first of those that differ equally
    nearest = next((one for one in different if _is_unfinished(one[1])), None)
    hint = "" if nearest is None else _describe_nearest(*nearest[1:])
    return None, f"In {runs}, {reason}. Starting a new run.{hint}"


def _is_same(manifest: Mapping[str, Any], identity: Mapping[str, Any]) -> bool:
    """Return whether the run with this manifest trains the same."""
    pairs = [(_select(identity, name), _select(manifest, name)) for name in identity]
    return all(
        canonical_json(_leave_out_unknown(mine, saved))
        == canonical_json(_leave_out_unknown(saved, mine))
        for mine, saved in pairs
    )


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
    """Return a value without options that are off, and that the other's version does not know."""
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        return {
            name: _leave_out_unknown(one, other.get(name))
            for name, one in value.items()
            if name in other or one
        }
    if isinstance(value, list) and isinstance(other, list) and len(value) == len(other):
        return [_leave_out_unknown(*pair) for pair in zip(value, other, strict=True)]
    return value


def _list_differences(identity: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[str]:
    """Return what differs between this training and the run with this manifest."""
    saved = {name: _select(manifest, name) for name in identity}
    mine = {name: _leave_out_unknown(_select(identity, name), saved[name]) for name in identity}
    sides = [mine, {name: _leave_out_unknown(value, mine[name]) for name, value in saved.items()}]
    here, there = (
        {**_mapping(side.pop("config", None)), **_mapping(side.pop("training", None))}
        | {"hooks": _by_name(side.pop("hooks", None))}
        | side
        for side in sides
    )
    hooks = (here["hooks"], there["hooks"])
    lines = [f"the hook {name!r} is only here" for name in hooks[0] if name not in hooks[1]]
    lines += [f"the hook {name!r} is only there" for name in hooks[1] if name not in hooks[0]]
    for one in hooks:
        for name in set(hooks[0]) ^ set(hooks[1]):
            one.pop(name, None)
    pairs = diff_configs(number_items(here), number_items(there))
    lines += [f"{name} is {own!r} here, {other!r} there" for name, (own, other) in pairs.items()]
    if not lines and list(hooks[0]) != list(hooks[1]):
        lines = ["the hooks are in another order"]
    return [line[:200] for line in lines]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _by_name(hooks: Any) -> dict[str, Any]:
    described = [hook for hook in hooks if isinstance(hook, Mapping)] if hooks else []
    return {str(hook.get("name")): dict(hook) for hook in described}


def _describe_nearest(run: OpenedRun, differences: list[str]) -> str:
    shown = differences[:_MAX_SHOWN]
    if len(differences) > _MAX_SHOWN:
        shown.append(f"and {len(differences) - _MAX_SHOWN} more differences")
    what = "; ".join(shown) or "values of another type"
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


# -- crash loops ----------------------------------------------------------------------------------


def check_crash_loop(run_folder: Path, checkpoint: Path) -> None:
    """Raise an error if the same failure has followed a checkpoint twice in a row.

    Failures are the same if the exceptions have the same class and message, apart from numbers and
    addresses, and came after the same step. Call it for checkpoints that were chosen automatically:
    somebody who names a checkpoint may have repaired the cause.
    """
    last_two = read_run_manifest(run_folder).get("attempts", [])[-2:]
    failures = [_describe_failure(attempt, checkpoint.name) for attempt in last_two]
    if len(failures) < 2 or failures[0] is None or failures[0] != failures[1]:
        return
    error = last_two[-1]["error"]
    failure = f"{error.get('type')}: {error.get('message')}"
    raise RunError(
        message_lines(
            f"The run {run_folder} failed twice in the same way after the checkpoint {checkpoint}, "
            f"in or after step {error.get('step')}: {failure[:2000]}",
            *_describe_choices(checkpoint),
        )
    )


def _describe_failure(attempt: Mapping[str, Any], checkpoint: str) -> tuple[Any, ...] | None:
    """Return what identifies the failure of an attempt whose newest checkpoint was this one."""
    error = attempt.get("error")
    if error is None or attempt.get("status") != "error":
        return None
    if error.get("checkpoint", attempt.get("resumed_from")) != checkpoint:
        return None
    message = _VARYING.sub("#", str(error.get("message")))
    return error.get("type"), message, error.get("step")


def _describe_choices(checkpoint: Path) -> list[str]:
    saved = [one.path for one in read_checkpoints(checkpoint.parent)[0]]
    earlier = saved[: saved.index(checkpoint)] if checkpoint in saved else saved
    again = f"To try this one again, give its folder: --resume {checkpoint}"
    if not earlier:
        return [f"There is no older checkpoint. {again}"]
    older = f"hookline train CONFIG --resume {earlier[-1]}"
    return [f"To continue from an older checkpoint: {older}", again]
