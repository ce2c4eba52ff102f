"""MLflow in a run's folder: its database, its artifacts, and names that it allows."""

from __future__ import annotations

import os
import re
import sqlite3
import zlib
from contextlib import closing
from pathlib import Path

__all__ = ["PlainNames", "find_artifacts", "find_database", "move_artifacts"]

_MAX_NAME = 250
_REFUSED = re.compile(r"[^\w.\-/ ]" if os.name == "nt" else r"[^\w.\-/ :]")
_ARTIFACTS = "mlartifacts"


def find_database(folder: Path) -> str:
    """Return the tracking URI of the database in a run's folder."""
    return f"sqlite:///{folder.absolute() / 'mlflow.db'}"


def find_artifacts(folder: Path) -> str:
    """Return where the artifacts of that database are."""
    return (folder.absolute() / _ARTIFACTS).as_uri()


def move_artifacts(folder: Path) -> None:
    """Let the database find its artifacts in the folder where it is now.

    It has their absolute path, which a run's folder that was moved or copied has no more.
    """
    file, here = folder / "mlflow.db", find_artifacts(folder)
    if not file.exists():
        return
    with closing(sqlite3.connect(file)) as database, database:
        for table, column in (("experiments", "artifact_location"), ("runs", "artifact_uri")):
            for row, uri in database.execute(f"SELECT rowid, {column} FROM {table}").fetchall():
                before, found, rest = str(uri).partition(f"/{_ARTIFACTS}")
                if found and f"{before}{found}" != here and rest[:1] in ("", "/"):
                    change = f"UPDATE {table} SET {column} = ? WHERE rowid = ?"
                    database.execute(change, (here + rest, row))


class PlainNames:
    """Names as MLflow allows them: relative paths of letters, digits and a few characters.

    Two names that would become the same stay different.
    """

    def __init__(self) -> None:
        self._originals: dict[str, str] = {}

    def convert(self, name: str) -> str:
        """Return a name that MLflow allows."""
        plain = _make_plain(name)
        if self._originals.setdefault(plain, name) != name:
            plain = f"{plain[: _MAX_NAME - 9]}_{zlib.crc32(name.encode()):08x}"
        return plain


def _make_plain(name: str) -> str:
    plain = _REFUSED.sub("_", name)
    parts = [part if part.strip(".") else "_" * len(part) for part in plain.split("/") if part]
    return "/".join(parts)[:_MAX_NAME].rstrip("/") or "_"
