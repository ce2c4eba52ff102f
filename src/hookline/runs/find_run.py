"""Finding runs: by folder, by id, or by the beginning or the end of an id."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from pathlib import Path

from hookline.errors import RunError, listed
from hookline.runs.manifest import read_manifest

__all__ = ["find_run", "run_folders"]

_RECORDS = ("metrics.jsonl", "events.jsonl")
_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")
_SHOWN = 5


def run_folders(root: str | os.PathLike[str]) -> list[Path]:
    """Return the folders of all runs in a folder, the newest first."""
    try:
        found = [path for path in Path(root).iterdir() if _is_run(path)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise RunError(f"The runs in {root} cannot be listed: {error}.") from error
    return sorted(found, key=lambda path: path.name, reverse=True)


def find_run(given: str | os.PathLike[str], root: str | os.PathLike[str] = "runs") -> Path:
    """Return the folder of a run.

    Args:
        given: the folder itself; or, in `root`, the run's id, or the beginning or end of it.
        root: the folder of all runs.

    Raises:
        RunError: There is no such run, or several; the message names the nearest ids.
    """
    path = Path(given)
    if _is_run(path):
        return path
    if path.is_dir():
        inside = [folder.name for folder in run_folders(path)]
        if not inside:
            raise RunError(
                f"{path} is no run: it has neither a manifest.json nor a metrics.jsonl. Give a "
                "run's own folder, runs/<run_id>."
            )
        raise RunError(
            f"{path} holds {len(inside)} runs. Give one of them, newest first: {_some(inside)}."
        )
    if path.parent != Path():  # `results/runs/20261115`: the beginning of an id in that folder
        root = path.parent
    return _by_id(path.name, Path(root))


def _by_id(wanted: str, root: Path) -> Path:
    ids = [folder.name for folder in run_folders(root)]
    if not ids:
        raise RunError(f"There is no run '{wanted}': {root} holds no runs.")
    if wanted in ids:
        return root / wanted
    matching = [one for one in ids if wanted and one.startswith(wanted)]
    matching = matching or [one for one in ids if wanted and one.endswith(wanted)]
    if len(matching) == 1:
        return root / matching[0]
    if matching:
        raise RunError(
            f"'{wanted}' fits {len(matching)} runs in {root}: {_some(matching)}. Give more of it."
        )
    near = get_close_matches(wanted, ids, n=_SHOWN, cutoff=0.6)
    hint = f"Near it: {_some(near)}." if near else f"The newest are: {_some(ids)}."
    raise RunError(f"There is no run '{wanted}' in {root}. {hint}")


def _is_run(path: Path) -> bool:
    if not path.is_dir():
        return False
    # A folder that has lost its files is still known by its name.
    if _ID.fullmatch(path.name) or any((path / name).is_file() for name in _RECORDS):
        return True
    try:
        read_manifest(path)  # checkpoints have a file of this name, too
    except RunError:
        return False
    return True


def _some(names: list[str]) -> str:
    return listed(names[:_SHOWN]) + (" …" if len(names) > _SHOWN else "")
