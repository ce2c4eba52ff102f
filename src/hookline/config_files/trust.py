"""Trust in class paths: what a config file may name, because naming it runs its code.

The modules of the project are trusted, the packages that its user names, and of torch and Hookline
the parts that run no foreign code. The project is that of the current working directory, not of the
config file: a file from elsewhere decides neither which modules nor which packages are trusted.
"""

from __future__ import annotations

import os
import re
import stat
import sys
import sysconfig
import tomllib
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from importlib import invalidate_caches
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from hookline.arguments import show_value
from hookline.config_files.tree import shorten
from hookline.errors import ConfigError, nearest
from hookline.files import file_limits, read_regular_file
from hookline.hook import Hook

VARIABLE = "HOOKLINE_TRUST"
_SETTINGS = "pyproject.toml"
_PACKAGE = re.compile(r"\*|[^\W\d]\w*(?:\.[^\W\d]\w*)*")
_DEFAULT = (
    "public classes of torch.nn, torch.optim and torch.utils.data, functions of "
    "torch.nn.functional, and Hookline's hooks, probes and updates"
)
_TORCH = ("torch.nn", "torch.optim", "torch.utils.data")
_EXCLUDED = (
    "torch.utils.data.datapipes",  # deprecated; some open files or unpickle
    "torch.nn.cpp",  # wrappers that return any attribute of any object
)
_FUNCTIONAL = "torch.nn.functional"
_FUNCTIONAL_SOURCES = (_FUNCTIONAL, "torch", "torch._C._nn")  # some forty are written in C++
_FUNCTIONS = ("torch.utils.data.default_collate", "torch.utils.data.default_convert")
_HOOKS = ("hookline.hooks", "hookline.probes", "hookline.updates")
_DEFINED_IN_MODULES = (type, FunctionType, BuiltinFunctionType, MethodType)
_projects: set[Path] = set()  # the folders that this process imported modules from


class Trust:
    """The objects that class paths may name.

    Args:
        project: the project's folder, whose modules are trusted.
        packages: further packages, modules or class paths; "*" for all.
        folder: the folder in it that modules are imported from; by default the project's.
        file_folder: the folder of the config file; if it is not in the project, a message says
            that its modules are not trusted.
    """

    def __init__(
        self,
        project: Path,
        packages: Iterable[str] = (),
        folder: Path | None = None,
        file_folder: Path | None = None,
    ) -> None:
        self.project = project.resolve()
        self.folder = self.project if folder is None else folder.resolve()
        self.packages = tuple(packages)
        self._foreign_folder = None if file_folder == self.folder else file_folder

    def find_problem(self, path: str) -> str | None:
        """Return why a class path is not trusted, or None if it may be. Nothing is imported."""
        shown, parts = shorten(path, 80), path.split(".")
        if not all(part.isidentifier() for part in parts):
            return f"'{shown}' is not a class path, `package.module.Name`."
        if any(part.startswith("__") for part in parts):
            return f"'{shown}' has a part that begins with '__'. Expected a class or a function."
        top = parts[0]
        if self._trusts(path) or self._is_in_project(top):
            return None
        if _is_default_path(path):
            return None
        foreign = self._foreign_folder
        if foreign is not None and PathFinder.find_spec(top, [str(foreign)]) is not None:
            return (
                f"'{shown}': '{top}' beside the file is not trusted: the file is not in the "
                f"project ({self.project}). If you trust it, run the command in the file's folder."
            )
        if not _is_installed(top):
            modules = [module.name for module in iter_modules([str(self.folder)])]
            return f"'{shown}': There is no module '{shorten(top, 80)}'.{nearest(top, modules)}"
        known = dir(sys.modules[top]) if top in ("torch", "hookline") else parts
        if len(parts) > 1 and parts[1] not in known:
            return f"'{shown}': '{top}' has no module '{parts[1]}'.{nearest(parts[1], known)}"
        return (
            f"'{shown}' is not trusted, and importing it would run its code. {self._advise(path)}"
        )

    def find_target_problem(self, path: str, target: Any) -> str | None:
        """Return why the object at a class path is not trusted, or None if it is.

        A package also contains objects that it imported from elsewhere.
        """
        if self._is_in_project(path.partition(".")[0]) or path in self.packages:
            return None
        if self._trusts(path):
            module = getattr(target, "__module__", None)
            if not isinstance(target, _DEFINED_IN_MODULES) or not isinstance(module, str):
                return None
            if self._trusts(module) or self._is_in_project(module.partition(".")[0]):
                return None
            if _is_default_path(f"{module}.{target.__qualname__}"):
                return None
            text = f"'{path}' is defined in '{module}', which is not trusted."
            return f"{text} {self._advise(module)}"
        if _is_default_path(path) and _is_default_target(path, target):
            return None
        return f"'{path}' is not trusted. {self._advise(path)}"

    def _trusts(self, path: str) -> bool:
        return "*" in self.packages or _is_within(path, self.packages)

    def _is_in_project(self, top: str) -> bool:
        """Return whether Python imports this module from the project's folder."""
        loaded = sys.modules.get(top)
        places = _places_of(loaded) if loaded is not None else _find_places(self.folder, top)
        return any(_is_own(place, self.project) for place in places)

    def _advise(self, path: str) -> str:
        top = path.partition(".")[0]
        name = shorten(path if top in ("torch", "hookline") else top, 80)
        return (
            f"A file may name modules of the project ({self.project}), {_DEFAULT}. If you trust "
            f"'{name}', pass `--trust {name}`, set {VARIABLE}={name}, or add it to the project's "
            f'pyproject.toml: `[tool.hookline]`, `trust = ["{name}"]`.'
        )


def _is_within(path: str, packages: Iterable[str]) -> bool:
    return any(path == one or path.startswith(f"{one}.") for one in packages)


def _is_default_path(path: str) -> bool:
    """Return whether a path leads to a part of torch or Hookline that may be imported.

    All of torch would be too much: `torch.load` unpickles, `torch.hub.load` runs a repository, and
    `torch.utils.collect_env.run` runs a command.
    """
    if any(part.startswith("_") for part in path.split(".")):
        return False
    if path.startswith("hookline."):
        return path.count(".") == 1 or _is_within(path, _HOOKS)
    return _is_within(path, _TORCH) and not _is_within(path, _EXCLUDED)


def _is_default_target(path: str, target: Any) -> bool:
    """Return whether every config file may name the object at a default path.

    A class, a class method such as `Embedding.from_pretrained`, or a documented function of
    `torch.nn.functional`. Any other method would be called with a `self` that the file chooses:
    `ParameterDict.get` would return any item of anything, such as the globals of a function.
    """
    if isinstance(target, MethodType) and isinstance(target.__self__, type):
        return _is_default_target(path, target.__self__) and _is_within(target.__module__, _TORCH)
    module = str(getattr(target, "__module__", None))
    if isinstance(target, type):
        if path.startswith("hookline."):
            return issubclass(target, Hook) and _is_within(module, _HOOKS)
        return _is_within(module, _TORCH) and not _is_within(module, _EXCLUDED)
    is_function = isinstance(target, FunctionType | BuiltinFunctionType) and bool(target.__doc__)
    is_functional = path.rpartition(".")[0] == _FUNCTIONAL and module in _FUNCTIONAL_SOURCES
    return path in _FUNCTIONS or (is_function and is_functional)


# -- the project -----------------------------------------------------------------------------------


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
    """Return the folder to import from: the file's own if it is in the project, else this one."""
    folder, current = file.resolve().parent, Path.cwd()
    is_inside = project in folder.parents and not _is_shared(project)
    if is_inside or folder in (project, current):
        return folder
    return current if project in (current, *current.parents) else project


def find_trusted_packages(
    given: Iterable[str], project: Path, environment: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Return the packages that the caller, the environment and the project's settings trust."""
    variables = os.environ if environment is None else environment
    sources: dict[str, Any] = {
        "trust": list(given),
        f"The environment variable {VARIABLE}": [variables.get(VARIABLE, "")],
        f"{project / _SETTINGS}: tool.hookline.trust": _read_settings(project / _SETTINGS),
    }
    found: dict[str, None] = {}
    for source, names in sources.items():
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"{source} is {show_value(names)}. Expected a list of names.")
        for name in (part.strip() for text in names for part in text.split(",")):
            if name and not _PACKAGE.fullmatch(name):
                raise ConfigError(
                    f"{source} has {show_value(name)}. Expected the name of a package, such as "
                    "'torchvision'."
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
        raise ConfigError(f"{file} cannot be read ({error}).") from None
    for key, default in (("hookline", {}), ("trust", [])):
        settings = settings.get(key, default) if isinstance(settings, dict) else settings
    return settings


def _is_shared(folder: Path) -> bool:
    """Return whether a folder is the home folder, one above it, or one that everybody writes to."""
    home = Path(os.path.expanduser("~")).resolve()  # noqa: PTH111 - never raises
    try:
        return (
            folder == home or folder in home.parents or bool(folder.stat().st_mode & stat.S_IWOTH)
        )
    except OSError:
        return True


# -- importing -------------------------------------------------------------------------------------


@contextmanager
def importable(folder: Path) -> Generator[None]:
    """Make the modules of a folder importable; those of other projects are unloaded first."""
    folder = folder.resolve()
    _unload_other_projects(folder)
    _projects.add(folder)
    entry = str(folder)
    sys.path.insert(0, entry)
    invalidate_caches()  # so that a file that was just written is found
    try:
        yield
    finally:
        if entry in sys.path:
            sys.path.remove(entry)


def _unload_other_projects(folder: Path) -> None:
    others = _projects - {folder}
    if not others:
        return
    names = {path.name.partition(".")[0] for path in folder.iterdir()}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in names or is_in(module, folder):
            continue
        if any(is_in(module, other) for other in others):
            del sys.modules[name]


def is_in(module: ModuleType, folder: Path) -> bool:
    """Return whether a module's file is in a folder."""
    return any(folder in place.parents for place in _places_of(module))


def _places_of(module: ModuleType) -> list[Path]:
    """Return the file of a module, or the folders of a package without one."""
    file = getattr(module, "__file__", None)
    places = [file] if isinstance(file, str) else list(getattr(module, "__path__", []))
    return [Path(place).resolve() for place in places]


def _find_places(folder: Path, name: str) -> list[Path]:
    """Return where Python would import a module from, with a folder first in its search path."""
    try:
        spec = PathFinder.find_spec(name, [str(folder), *sys.path])
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    return [Path(place).resolve() for place in places]


def _is_own(place: Path, project: Path) -> bool:
    """Return whether a module's file is the project's, not of an environment in its folder."""
    if project not in place.parents:
        return False
    if {"site-packages", "dist-packages"} & set(place.relative_to(project).parts):
        return False
    installed = (sys.prefix, sys.base_prefix, *sysconfig.get_paths().values())
    environments = {Path(one).resolve() for one in installed}
    return not any(project in one.parents and one in place.parents for one in environments)


def _is_installed(name: str) -> bool:
    """Return whether Python finds a module of this name; nothing is imported."""
    try:
        return name in sys.modules or find_spec(name) is not None
    except (ImportError, ValueError):
        return False
