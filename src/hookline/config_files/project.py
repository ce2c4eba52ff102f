"""The project that a config file is used in: its folder, and the packages that it trusts.

The project is that of the current working directory, not of the config file: a file from elsewhere
decides neither which modules nor which packages are trusted.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hookline.errors import ConfigError
from hookline.files.limits import file_limits
from hookline.files.regular_files import read_regular_file
from hookline.printable import printable

__all__ = ["VARIABLE", "find_import_folder", "find_project", "find_trusted_packages"]

VARIABLE = "HOOKLINE_TRUST"
_SETTINGS = "pyproject.toml"
_PACKAGE = re.compile(r"\*|[^\W\d]\w*(?:\.[^\W\d]\w*)*")


def find_project() -> Path:
    """Return the folder of the project of the current working directory.

    It is the nearest folder with a pyproject.toml, from the current working directory upwards, or
    else the current working directory. A pyproject.toml in the home folder, or where everybody may
    write, does not make a project of the folders below.
    """
    current = Path.cwd()
    for folder in (current, *current.parents):
        if folder != current and _is_shared(folder):
            break
        if (folder / _SETTINGS).is_file():
            return folder
    return current


def find_import_folder(file: Path, project: Path) -> Path:
    """Return the folder to import modules from: the config file's own, if it is in the project.

    Otherwise it is the current working directory, or the project if that is elsewhere.
    """
    folder, current = file.resolve().parent, Path.cwd()
    is_inside = project in folder.parents and not _is_shared(project)
    if is_inside or folder in (project, current):
        return folder
    return current if project in (current, *current.parents) else project


def find_trusted_packages(
    given: Iterable[str], project: Path, environment: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Return the packages that the caller, the environment and the project's settings trust.

    Raises:
        ConfigError: one of them is not the name of a package.
    """
    variables = os.environ if environment is None else environment
    sources: dict[str, Any] = {
        "trust": list(given),
        f"The environment variable {VARIABLE}": [variables.get(VARIABLE, "")],
        f"{project / _SETTINGS}: tool.hookline.trust": _read_settings(project / _SETTINGS),
    }
    found: dict[str, None] = {}
    for source, names in sources.items():
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ConfigError(
                f"{source} is {printable(repr(names), 80)}. Expected a list of names."
            )
        for name in (part.strip() for text in names for part in text.split(",")):
            if name and not _PACKAGE.fullmatch(name):
                raise ConfigError(
                    f"{source} has {printable(repr(name), 80)}. Expected the name of a package, "
                    "such as 'torchvision'."
                )
            found |= {name: None} if name else {}
    return tuple(found)


def _read_settings(file: Path) -> Any:
    """Return `tool.hookline.trust` of a pyproject.toml."""
    if not file.is_file():
        return []
    try:
        contents = read_regular_file(file.resolve(), file_limits.config_bytes)
        settings: Any = tomllib.loads(contents.decode()).get("tool", {})
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read ({printable(error)}).") from None
    for key, default in (("hookline", {}), ("trust", [])):
        settings = settings.get(key, default) if isinstance(settings, dict) else settings
    return settings


def _is_shared(folder: Path) -> bool:
    """Return whether a folder is likely to contain files of strangers.

    It is the home folder, one above it, or one that everybody may write to.
    """
    home = Path(os.path.expanduser("~")).resolve()  # noqa: PTH111 - never raises
    try:
        return (
            folder == home or folder in home.parents or bool(folder.stat().st_mode & stat.S_IWOTH)
        )
    except OSError:
        return True
