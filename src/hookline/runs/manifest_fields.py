"""What the fields of a run's manifest may contain. Readers use only fields that were checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from hookline.files.plain_names import is_plain_name
from hookline.printable import printable
from hookline.runs.record_checks import is_finite_number

__all__ = ["check_manifest_fields", "parse_time"]

_LARGEST = 2**63

Check = tuple[Callable[[Any], bool], str]
"""Whether a value is valid, and what was expected."""


def check_manifest_fields(manifest: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a manifest without its invalid fields, and what is wrong with these, one line each.

    Fields that are not known here are kept.
    """
    valid, problems = _check_fields(manifest, _FIELDS, "")
    if "run_id" not in manifest:
        problems.insert(0, "it has no 'run_id'")
    for name, checks in (("git", _GIT), ("parent", _PARENT), ("versions", None)):
        if isinstance(valid.get(name), dict):
            chosen = checks if checks is not None else dict.fromkeys(valid[name], _OPTIONAL_TEXT)
            valid[name], found = _check_fields(valid[name], chosen, f" of '{name}'")
            problems += found
    if "parts" in valid:
        parts: list[dict[str, Any]] = []
        for number, part in enumerate(valid["parts"], 1):
            checked, found = _check_fields(part, _PART, f" of part {number}")
            parts.append(checked)
            problems += found
        valid["parts"] = parts
    return valid, problems


def parse_time(text: Any) -> float | None:
    """Return a time of a manifest in seconds since 1970; None if it is not a time."""
    try:
        parsed = datetime.fromisoformat(text)
        return (parsed if parsed.tzinfo is not None else parsed.replace(tzinfo=UTC)).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def _check_fields(
    fields: Mapping[str, Any], checks: Mapping[str, Check], where: str
) -> tuple[dict[str, Any], list[str]]:
    valid, problems = dict(fields), list[str]()
    for name, (is_valid, expected) in checks.items():
        if name in fields and not is_valid(fields[name]):
            found = _describe(valid.pop(name))
            problems.append(f"'{printable(name, 60)}'{where} is {found}; expected {expected}")
    return valid, problems


def _describe(value: Any) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, str):
        return f"'{printable(value, 60)}'"
    return "null" if value is None else printable(value, 60)


# -- checks ---------------------------------------------------------------------------------------


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, dict | list)


def _is_time(value: Any) -> bool:
    return parse_time(value) is not None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _is_process_number(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_object, value))


def _is_list_of_scalars(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_scalar, value))


def _is_error(value: Any) -> bool:
    return isinstance(value, dict) and not _check_fields(value, _ERROR, "")[1]


def _is_list_of_rewinds(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_rewind, value))


def _is_rewind(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("restored"), list):
        return False
    sizes = [value.get(name) for name in ("metrics", "end", "repeated")]
    for piece in value["restored"]:
        if not isinstance(piece, list) or len(piece) != 2:
            return False
        sizes += piece
    return all(map(_is_count, sizes)) and value["metrics"] <= value["end"]


def _or_null(check: Check) -> Check:
    is_valid, expected = check
    return lambda value: value is None or is_valid(value), f"{expected} or null"


_TEXT: Check = (_is_text, "a text")
_OPTIONAL_TEXT = _or_null(_TEXT)
_SCALAR: Check = (_is_scalar, "a text or number")
_NAME: Check = (is_plain_name, "a plain name: up to 200 letters, digits and ._=+-")
_TIME: Check = (_is_time, "a time such as 2026-11-15T21:06:55+00:00")
_COUNT: Check = (_is_count, "an integer of 0 or more")
_NUMBER: Check = (is_finite_number, "a number that a float can hold")
_OBJECT: Check = (_is_object, "an object")

_FIELDS: dict[str, Check] = {
    "run_id": _NAME,
    "parent": _or_null(_OBJECT),
    "status": _TEXT,
    **dict.fromkeys(("created", "started"), _TIME),
    "ended": _or_null(_TIME),
    **dict.fromkeys(("last_error", "config_hash", "packages_sha256", "platform"), _OPTIONAL_TEXT),
    **dict.fromkeys(("config", "packages", "versions", "devices", "trackers"), _OBJECT),
    **dict.fromkeys(("training", "git", "sources"), _or_null(_OBJECT)),
    "hooks": (_is_list, "a list"),
    **dict.fromkeys(("name", "torch_seed"), _SCALAR),
    **dict.fromkeys(
        ("tags", "command", "parameter_names"), (_is_list_of_scalars, "a list of texts")
    ),
    "lost_records": _or_null(_COUNT),
    "parts": (_is_list_of_objects, "a list of objects"),
    "rewinds": (_is_list_of_rewinds, "a list of objects with sizes and positions in bytes"),
}
_PARENT: dict[str, Check] = {
    "run_id": _or_null(_NAME),
    "checkpoint": _OPTIONAL_TEXT,
    "step": _or_null(_NUMBER),
}
_GIT: dict[str, Check] = {
    **dict.fromkeys(("commit", "branch", "diff_sha256", "folder", "problem"), _OPTIONAL_TEXT),
    "dirty": (_is_scalar, "true or false"),
    "untracked": _or_null(_COUNT),
}
_ERROR: dict[str, Check] = {
    "type": _OPTIONAL_TEXT,
    "message": _OPTIONAL_TEXT,
    "step": _or_null(_NUMBER),
}
_PART: dict[str, Check] = {
    "number": _COUNT,
    "started": _TIME,
    "ended": _or_null(_TIME),
    "status": _TEXT,
    **dict.fromkeys(("resumed_from", "host", "boot_id", "pid_namespace"), _OPTIONAL_TEXT),
    "error": _or_null((_is_error, "an object with type, message and step")),
    "pid": (_is_process_number, "the number of a process"),
    "pid_started": _or_null((lambda value: type(value) is int, "an integer")),
}
