"""The folders of runs: created, found by id or from a checkpoint, and checked for links.

Nothing in a run's folder may be a link that leads out of it. The run's folder itself may be a link,
as may the folder of all runs: the user gave these.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from hookline.arguments import check_path, user_path
from hookline.checkpoint.atomic_files import create_folder, sync
from hookline.checkpoint.catalog import read_manifest
from hookline.errors import CheckpointError, RunError, listed, nearest
from hookline.files import describe_kind
from hookline.runs.manifest import inspect_run_manifest, is_run_manifest, new_run_id

_FILES = (
    *("manifest.json", "metrics.jsonl", "events.jsonl", "repeated.jsonl"),
    *("log.jsonl", "log.repeated.jsonl", "heartbeat.json", "writer.lock"),
)
_FOLDERS = ("checkpoints", "media", "profile", "trackers")
_LOG_FILES = ("metrics.jsonl", "events.jsonl")
_RUN_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")


def create_run_folder(root: Path) -> Path:
    """Create a folder with a new run's id, durably, and if needed the folder of all runs."""
    create_folder(root)
    while True:
        path = root / new_run_id()
        with suppress(FileExistsError):
            path.mkdir()
            sync(root)
            return path


def find_refused_entries(folder: Path) -> list[str]:
    """Return which entries of a run's folder are not opened, such as links, one line each."""
    kinds = {name: describe_kind(folder / name) for name in _FILES}
    refused = [
        f"{name} is {kind}; expected a regular file"
        for name, kind in kinds.items()
        if kind is not None
    ]
    return refused + [one for name in _FOLDERS if (one := find_refused_folder(folder / name))]


def find_refused_folder(folder: Path) -> str | None:
    """Return why a folder in a run's folder is not used; None if it is one, or does not exist."""
    if not os.path.lexists(folder):
        return None
    kind = describe_kind(folder) or "a regular file"
    return None if kind == "a folder" else f"{folder.name} is {kind}; expected a folder"


def list_run_folders(root: str | os.PathLike[str]) -> list[Path]:
    """Return the folders of all runs in a folder, the newest first."""
    try:
        folders = [path for path in user_path(root).iterdir() if _is_run(path)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise RunError(f"The runs in {root} cannot be listed: {error}.") from error
    return sorted(folders, key=lambda path: path.name, reverse=True)


def find_run(run: str | os.PathLike[str], root: str | os.PathLike[str] = "runs") -> Path:
    """Return the folder of a run."""
    path = Path(check_path("The run", run, "its folder or its id"))
    root = check_path("runs", root, "the folder of all runs")
    if _is_run(path):
        return path
    if _is_folder(path):
        ids = [folder.name for folder in list_run_folders(path)]
        inside = f" It contains runs, newest first: {listed(ids, 5)}." if ids else ""
        raise RunError(
            f"{path} is not a run: it has neither a manifest.json nor a metrics.jsonl.{inside} "
            "Give the folder of a run, runs/<run_id>."
        )
    if path.parent != Path():  # `results/runs/20261115`: the beginning of an id in that folder
        root = path.parent
    return _find_by_id(path.name, Path(root))


def find_run_of_checkpoint(checkpoint: Path) -> Path | None:
    """Return the folder of the run that saved `<run>/checkpoints/<checkpoint>`, or None."""
    folders = checkpoint.parents[1:2]
    folder = next((one for one in folders if os.path.lexists(one / "manifest.json")), None)
    if folder is None:
        return None
    try:
        saved_by = read_manifest(checkpoint)["info"].get("run_id")
    except CheckpointError:  # reported by whoever opens it
        return folder
    manifest, problems = inspect_run_manifest(folder)
    return folder if problems or saved_by in (None, manifest["run_id"]) else None


def _find_by_id(wanted: str, root: Path) -> Path:
    ids = [folder.name for folder in list_run_folders(root)]
    if not ids:
        raise RunError(f"There is no run '{wanted}': {root} contains no runs.")
    if wanted in ids:
        return root / wanted
    matching = [run_id for run_id in ids if wanted and run_id.startswith(wanted)]
    matching = matching or [run_id for run_id in ids if wanted and run_id.endswith(wanted)]
    if len(matching) == 1:
        return root / matching[0]
    if matching:
        raise RunError(
            f"'{wanted}' matches {len(matching)} runs in {root}: {listed(matching, 5)}. Give more "
            "of the id."
        )
    newest = f"The newest are: {listed(ids, 5)}."
    raise RunError(f"There is no run '{wanted}' in {root}.{nearest(wanted, ids) or f' {newest}'}")


def _is_run(path: Path) -> bool:
    if not _is_folder(path):
        return False
    # A folder that has lost its files is still recognized by its name.
    if _RUN_ID.fullmatch(path.name) or any(os.path.lexists(path / name) for name in _LOG_FILES):
        return True
    return is_run_manifest(path)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # the name is too long, or it is in a folder that cannot be read
        return False


def shorten_path(path: Path) -> Path:
    """Return a path for messages: relative to the working folder if it is inside."""
    try:
        return path.relative_to(Path.cwd())
    except (ValueError, OSError):  # OSError: the working folder was removed
        return path
