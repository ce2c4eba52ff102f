"""A run's manifest: what ran, with which code and configuration, how it ended.

The manifest describes the newest attempt: its configuration, hooks, code and versions. An attempt
is one process that worked on the run; a resumed run has several. Each has the facts of its own
process; configuration, hooks and packages are kept in an earlier one only if they changed since.

Reading a manifest does not import torch.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hookline.arguments import listed_strings
from hookline.checkpoint.atomic_files import write_atomic
from hookline.checkpoint.catalog import is_count
from hookline.errors import RunError
from hookline.files import file_limits, is_plain_name, parse_json, read_regular_file
from hookline.masking import mask_secrets
from hookline.runs.environment import describe_environment
from hookline.runs.jsonable import config_hash as hash_config
from hookline.runs.jsonable import to_jsonable
from hookline.runs.jsonl_reader import is_finite_number

_NAME = "manifest.json"
_FORMAT = "hookline.run"
_VERSION = 1
_MAX_SHOWN = 5  # problems in one message
_ATTEMPT_FIELDS = (  # in the attempt only
    *("number", "started", "ended", "status", "resumed_from", "error"),
    *("host", "boot_id", "pid", "pid_started", "pid_namespace"),
)
_LONG_FIELDS = (  # in an earlier attempt if they changed afterwards
    *("config", "hooks", "training", "name", "tags", "packages", "seed", "torch_seed"),
    *("sources", "parameter_names"),
)


def utc_now() -> str:
    """Return the current time in UTC, as manifests have it."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def new_run_id() -> str:
    """Return an id such as `20261115-210655-3f9c7b`: the UTC time to 15 µs, and a random byte."""
    seconds = time.time()
    fraction = int(seconds % 1 * 65536)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(seconds))
    return f"{stamp}-{fraction:04x}{secrets.token_hex(1)}"


def read_run_manifest(folder: Path) -> dict[str, Any]:
    """Return a run's manifest; raise RunError if it is missing, of a newer version or not valid."""
    manifest, problems = _parse_manifest(folder)
    if problems:
        raise RunError(
            f"{folder / _NAME} is not valid: {'; '.join(problems)}. Repair the file, or start a "
            "new run."
        )
    return manifest


def inspect_run_manifest(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the valid fields of a run's manifest, and what is wrong with it, one line each."""
    try:
        manifest, problems = _parse_manifest(folder)
    except RunError as error:
        is_missing = not os.path.lexists(folder / _NAME)
        return {}, [f"{_NAME} is missing" if is_missing else str(error)]
    return manifest, [f"{_NAME}: {problem}" for problem in problems]


def is_run_manifest(folder: Path) -> bool:
    """Return whether a folder has the manifest of a run; checkpoints have a file of this name."""
    try:
        _parse_manifest(folder)
    except RunError:
        return False
    return True


def _parse_manifest(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the valid fields of a manifest, and what is wrong with the others."""
    file = folder / _NAME
    try:
        manifest = parse_json(read_regular_file(file, file_limits.manifest_bytes))
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(
            f"{folder} is not a run: it has no manifest.json. Give the folder of a run, "
            "runs/<run_id>."
        ) from None
    except (OSError, ValueError) as error:
        raise RunError(f"{file} cannot be read: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise RunError(f"{file} is not the manifest of a run: its 'format' is not '{_FORMAT}'.")
    version = manifest.get("version")
    if type(version) is not int or not 1 <= version <= _VERSION:
        raise RunError(
            f"{file} has version {str(version)[:60]}, and this hookline reads up to {_VERSION}. "
            "Install a newer hookline: pip install -U hookline"
        )
    if "parts" in manifest:  # as older versions called them
        manifest.setdefault("attempts", manifest.pop("parts"))
    return _check_manifest(manifest)


def write_run_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Replace a run's manifest atomically."""
    text = json.dumps(manifest, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    write_atomic(folder / _NAME, text)


def last_write_time(folder: Path) -> float | None:
    """Return when metrics or events of a run were last written; None if there are none."""
    times: list[float] = []
    for name in ("metrics.jsonl", "events.jsonl"):
        with suppress(OSError):
            found = os.lstat(folder / name)
            if stat.S_ISREG(found.st_mode):
                times.append(found.st_mtime)
    return max(times, default=None)


def describe_attempt(
    config: Mapping[str, Any] | None,
    seed: Any,
    hooks: Sequence[Any] | None,
    device: Any = None,
    training: Mapping[str, Any] | None = None,
    config_hash: str | None = None,
    name: str | None = None,
    tags: Sequence[str] = (),
    resumed_from: str | None = None,
    parameter_names: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the fields of an attempt that starts now; None means the same as before."""
    fields: dict[str, Any] = {"number": 1, "started": utc_now(), "ended": None}
    fields |= {"status": "training", "resumed_from": resumed_from, "error": None}
    if config is not None:
        recorded = mask_secrets(to_jsonable(config))
        fields |= {"config": recorded, "config_hash": config_hash or hash_config(config)}
    labels = {"training": training, "name": name, "tags": listed_strings("tags", tags) or None}
    labels = {key: to_jsonable(value) for key, value in labels.items() if value is not None}
    fields |= mask_secrets(labels)
    if parameter_names:
        fields["parameter_names"] = list(parameter_names)
    if hooks is not None:
        fields["hooks"] = mask_secrets(to_jsonable(list(hooks)))
    if config is not None or hooks is not None:
        import torch

        fields |= {"seed": to_jsonable(seed), "torch_seed": torch.initial_seed()}
    environment = describe_environment(device)
    return {**fields, **mask_secrets(environment, by_name=False)}  # packages have any name


def new_manifest(
    run_id: str, attempt: Mapping[str, Any], parent: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the manifest of a run that starts with this attempt; forked from `parent`, if any.

    Fields that would not be valid are left out, such as the run id of a stranger's checkpoint.
    """
    manifest = {
        "format": _FORMAT,
        "version": _VERSION,
        "run_id": run_id,
        "parent": to_jsonable(parent),
        "status": "training",
        "created": attempt["started"],
        "started": attempt["started"],
        "ended": None,
        "last_error": None,
        **_without(attempt, _ATTEMPT_FIELDS),
        "lost_records": 0,
        "attempts": [_without(attempt, _LONG_FIELDS)],
    }
    return _check_manifest(manifest)[0]


def continue_manifest(
    folder: Path, manifest: Mapping[str, Any], attempt: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the manifest of a run that is resumed with this attempt, as `new_manifest`."""
    attempts = [dict(earlier) for earlier in manifest.get("attempts") or ()]
    if attempts:
        earlier = {n: manifest[n] for n in _LONG_FIELDS if n in manifest and n in attempt}
        attempts[-1] |= {name: value for name, value in earlier.items() if value != attempt[name]}
        if attempts[-1].get("ended") is None:  # its process died
            written = last_write_time(folder)
            attempts[-1] |= {"status": "lost", "ended": written and _format_time(written)}
    continued = {
        **manifest,
        **{"status": "training", "ended": None, "last_error": None},
        **_without(attempt, _ATTEMPT_FIELDS),
        "attempts": [*attempts, {**_without(attempt, _LONG_FIELDS), "number": len(attempts) + 1}],
    }
    return _check_manifest(continued)[0]


def _format_time(seconds: float) -> str | None:
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat()
    except (ValueError, OverflowError):  # the file has the time of no calendar
        return None


def _without(fields: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


# -- the fields, which may come from anybody: readers use only those that were checked ------------


def _check_manifest(manifest: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a manifest without its invalid fields, and what is wrong with these, one line each."""
    valid, problems = _check_fields(manifest, _FIELDS, "")
    if "run_id" not in manifest:
        problems.insert(0, "it has no 'run_id'")
    for name, expected in _OBJECTS.items():
        if isinstance(valid.get(name), dict):
            expected = expected or dict.fromkeys(valid[name], "a text or null")
            valid[name], found = _check_fields(valid[name], expected, f" of '{name}'")
            problems += found
    for number, attempt in enumerate(valid.get("attempts", ())):
        checked, found = _check_fields(attempt, _ATTEMPT, f" of attempt {number + 1}")
        valid["attempts"][number] = checked
        problems += found
    more = len(problems) - _MAX_SHOWN
    return valid, problems[:_MAX_SHOWN] + [f"{more} more fields are not valid"] * (more > 0)


def parse_time(text: Any) -> float | None:
    """Return a time of a manifest in seconds since 1970; None if it is not a time."""
    try:
        parsed = datetime.fromisoformat(text)
        return (parsed if parsed.tzinfo is not None else parsed.replace(tzinfo=UTC)).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def _check_fields(
    fields: Mapping[str, Any], expected: Mapping[str, str], where: str
) -> tuple[dict[str, Any], list[str]]:
    """Return the valid fields, and what is wrong with the others; `expected` names their kinds."""
    valid, problems = dict(fields), list[str]()
    for name, kinds in expected.items():
        if name in fields and not any(_KINDS[kind](fields[name]) for kind in kinds.split(" or ")):
            value = valid.pop(name)
            container = {dict: "an object", list: "a list", type(None): "null"}.get(type(value))
            found = container or repr(value[:60] if isinstance(value, str) else value)[:60]
            problems.append(f"'{name[:60]}'{where} is {found}; expected {kinds}")
    return valid, problems


def _is_error(value: Any) -> bool:
    return isinstance(value, dict) and not _check_fields(value, _ERROR, "")[1]


def _is_rewind(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("restored"), list):
        return False
    sizes = [value.get(name) for name in ("metrics", "end", "repeated")]
    for piece in value["restored"]:
        if not isinstance(piece, list) or len(piece) != 2:
            return False
        sizes += piece
    return all(map(is_count, sizes)) and value["metrics"] <= value["end"]


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, dict | list)


def _is_list_of(is_valid: Callable[[Any], bool], value: Any) -> bool:
    return isinstance(value, list) and all(map(is_valid, value))


_KINDS: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "a text": lambda value: isinstance(value, str),
    "a plain name": is_plain_name,
    "a time": lambda value: parse_time(value) is not None,
    "an integer": lambda value: type(value) is int,
    "a count": is_count,
    "a number": is_finite_number,
    "a text, number, true, false": _is_scalar,
    "an object": lambda value: isinstance(value, dict),
    "a list": lambda value: isinstance(value, list),
    "a list of texts": lambda value: _is_list_of(_is_scalar, value),
    "a list of objects": lambda value: _is_list_of(lambda one: isinstance(one, dict), value),
    "a list of rewinds": lambda value: _is_list_of(_is_rewind, value),
    "an error": _is_error,
    "the number of a process": lambda value: is_count(value) and 0 < value < 2**31,
}
_SCALAR = "a text, number, true, false or null"
_FIELDS = {
    "run_id": "a plain name",
    "parent": "an object or null",
    "status": "a text",
    **dict.fromkeys(("created", "started"), "a time"),
    "ended": "a time or null",
    **dict.fromkeys(("last_error", "config_hash", "packages_sha256", "platform"), "a text or null"),
    **dict.fromkeys(("config", "packages", "versions", "devices", "trackers"), "an object"),
    **dict.fromkeys(("training", "git", "sources"), "an object or null"),
    "hooks": "a list",
    **dict.fromkeys(("name", "torch_seed"), _SCALAR),
    **dict.fromkeys(("tags", "command", "parameter_names"), "a list of texts"),
    "lost_records": "a count or null",
    "attempts": "a list of objects",
    "rewinds": "a list of rewinds",
}
_OBJECTS = {  # their fields; None: texts
    "versions": None,
    "parent": {
        "run_id": "a plain name or null",
        "checkpoint": "a text or null",
        "step": "a number or null",
    },
    "git": {
        **dict.fromkeys(("commit", "branch", "diff_sha256", "folder", "problem"), "a text or null"),
        "dirty": _SCALAR,
        "untracked": "a count or null",
    },
}
_ERROR = {"type": "a text or null", "message": "a text or null", "step": "a number or null"}
_ATTEMPT = {
    "number": "a count",
    "started": "a time",
    "ended": "a time or null",
    "status": "a text",
    **dict.fromkeys(("resumed_from", "host", "boot_id", "pid_namespace"), "a text or null"),
    "error": "an error or null",
    "pid": "the number of a process",
    "pid_started": "an integer or null",
}
