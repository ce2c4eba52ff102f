"""Class paths run code: which packages a training file may name, and how their code is found."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from importlib import import_module, invalidate_caches
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from hookline.config import known_hooks
from hookline.errors import listed, nearest

__all__ = ["Trust", "importable", "load_object"]

_ALWAYS = ("hookline", "torch")
_OF_A_MODULE = (type, FunctionType, BuiltinFunctionType, MethodType)
_projects: set[Path] = set()  # folders whose modules were imported by this process


class Trust:
    """Which packages may be named.

    Args:
        folder: the project's own folder, whose modules may be named.
        packages: further packages, or modules in them; "*" for all.
    """

    def __init__(self, folder: Path, packages: Iterable[str] = ()) -> None:
        self.folder = folder.resolve()
        self.packages = tuple(packages)

    def refusal(self, path: str) -> str | None:
        """Say why a class path may not be named; None when it may. Nothing is imported."""
        if any(part.startswith("__") for part in path.split(".")):
            return f"'{path}' names what is private to Python. Expected a class or a function."
        if self._trusts(path) or self._is_own(path.partition(".")[0]):
            return None
        top = path.partition(".")[0]
        if not _is_installed(top):
            own = [one.name for one in iter_modules([str(self.folder)])]
            return f"'{path}': There is no module '{top}'.{nearest(top, own)}"
        return f"'{path}' is not trusted, and naming it would run its code. {self._way_out(path)}"

    def refusal_of(self, path: str, found: Any) -> str | None:
        """Say the same of what was found there: a package may only lend what is its own."""
        if self._is_own(path.partition(".")[0]) or not isinstance(found, _OF_A_MODULE):
            return None
        home = getattr(found, "__module__", None)
        if not isinstance(home, str) or self._trusts(home) or self._is_own(home.partition(".")[0]):
            return None
        return f"'{path}' comes from '{home}', which is not trusted. {self._way_out(home)}"

    def _trusts(self, path: str) -> bool:
        hooks = (one.path.partition(".")[0] for one in known_hooks().values())
        known = (*_ALWAYS, *self.packages, *hooks)
        return any(one == "*" or path == one or path.startswith(f"{one}.") for one in known)

    def _is_own(self, top: str) -> bool:
        """Whether the project's own folder has this module, and Python would take it from there."""
        loaded = sys.modules.get(top)
        if loaded is not None:
            return is_in(loaded, self.folder)
        return _has_module(self.folder, top)

    def _way_out(self, path: str) -> str:
        top = path.partition(".")[0]
        return (
            f"Trusted are the modules in {self.folder}, {listed([*_ALWAYS, *self.packages])} and "
            f"installed packages with hooks. If you trust '{top}', add it to the file: "
            f"`trust: [{', '.join([*self.packages, top])}]`."
        )


@contextmanager
def importable(folder: Path) -> Generator[None]:
    """Let the modules of a folder be imported; afterwards Python's search path is as it was.

    Modules that another project's folder has under the same name are forgotten before.
    """
    folder = folder.resolve()
    _forget_others(folder)
    _projects.add(folder)
    entry = str(folder)
    sys.path.insert(0, entry)
    invalidate_caches()  # a file that was written just now is found
    try:
        yield
    finally:
        if entry in sys.path:
            sys.path.remove(entry)


def _forget_others(folder: Path) -> None:
    others = _projects - {folder}
    if not others:
        return
    names = {path.name.partition(".")[0] for path in folder.iterdir()}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in names or is_in(module, folder):
            continue
        if any(is_in(module, other) for other in others):
            del sys.modules[name]


def load_object(path: str) -> Any:
    """Return the class or function of a path; of a class also its methods, `pkg.Net.tiny`.

    Raises:
        LookupError: there is none, or its module cannot be imported; the message says why.
    """
    parts = path.split(".")
    module: ModuleType | None = None
    used = 0
    for used in range(1, len(parts)):
        name = ".".join(parts[:used])
        inner = getattr(module, parts[used - 1], None)
        if module is not None and inner is not None and not isinstance(inner, ModuleType):
            used -= 1
            break
        try:
            module = import_module(name)
        except (Exception, SystemExit) as error:  # whatever the module's own code raises
            if isinstance(error, ModuleNotFoundError) and error.name == name:
                where = f"'{module.__name__}' has" if module is not None else "There is"
                known = dir(module) if module is not None else sorted(sys.modules)
                raise LookupError(
                    f"{where} no module '{parts[used - 1]}'.{nearest(parts[used - 1], known)}"
                ) from error
            raise LookupError(
                f"The module '{name}' could not be imported ({type(error).__name__}: {error})."
            ) from error
    found: Any = module
    for part in parts[used:]:
        owner = found
        try:
            found = getattr(found, part)
        except Exception as error:
            name = getattr(owner, "__name__", "it")
            raise LookupError(f"'{name}' has no '{part}'.{nearest(part, dir(owner))}") from error
    if isinstance(found, ModuleType):
        wrong = "a module; expected a class or a function in it"
    elif not callable(found):
        wrong = f"a {type(found).__name__}; expected a class or a function"
    else:
        return found
    raise LookupError(f"It is {wrong}.")


def is_in(module: ModuleType, folder: Path) -> bool:
    """Whether a module's file lies in a folder."""
    file = getattr(module, "__file__", None)
    paths = [file] if isinstance(file, str) else list(getattr(module, "__path__", []))
    return any(folder in Path(path).resolve().parents for path in paths)


def _is_installed(name: str) -> bool:
    """Whether Python would find a module of this name; nothing is imported."""
    try:
        return name in sys.modules or find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _has_module(folder: Path, name: str) -> bool:
    """Whether Python would import a module of this name from the folder."""
    try:
        spec = PathFinder.find_spec(name, [str(folder), *sys.path])
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    return any(folder in Path(place).resolve().parents for place in places)
