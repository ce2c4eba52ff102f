"""Trust in class paths: the packages that a config file may import code from."""

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

from hookline.config.hook_names import known_hooks
from hookline.errors import listed, nearest

__all__ = ["Trust", "importable", "load_object"]

_ALWAYS = ("hookline", "torch")
_DEFINED_IN_MODULES = (type, FunctionType, BuiltinFunctionType, MethodType)
_projects: set[Path] = set()  # the folders that this process imported modules from


class Trust:
    """The packages that class paths may name, because importing a module runs its code.

    Args:
        folder: the project's folder, whose modules are trusted.
        packages: further packages or modules; "*" for all.
    """

    def __init__(self, folder: Path, packages: Iterable[str] = ()) -> None:
        self.folder = folder.resolve()
        self.packages = tuple(packages)

    def find_problem(self, path: str) -> str | None:
        """Return why a class path is not trusted, or None if it is. Nothing is imported."""
        if any(part.startswith("__") for part in path.split(".")):
            return f"'{path}' has a part that begins with '__'. Expected a class or a function."
        if self._trusts(path) or self._is_in_project(path.partition(".")[0]):
            return None
        top = path.partition(".")[0]
        if not _is_installed(top):
            modules = [module.name for module in iter_modules([str(self.folder)])]
            return f"'{path}': There is no module '{top}'.{nearest(top, modules)}"
        return f"'{path}' is not trusted, and importing it would run its code. {self._advice(path)}"

    def find_target_problem(self, path: str, target: Any) -> str | None:
        """Return why the object at a class path is not trusted, or None if it is.

        A trusted package may also contain objects that it imported from elsewhere.
        """
        is_in_project = self._is_in_project(path.partition(".")[0])
        if is_in_project or not isinstance(target, _DEFINED_IN_MODULES):
            return None
        module = getattr(target, "__module__", None)
        if not isinstance(module, str) or self._trusts(module):
            return None
        if self._is_in_project(module.partition(".")[0]):
            return None
        return f"'{path}' is defined in '{module}', which is not trusted. {self._advice(module)}"

    def _trusts(self, path: str) -> bool:
        hooks = (hook.path.partition(".")[0] for hook in known_hooks().values())
        trusted = (*_ALWAYS, *self.packages, *hooks)
        return any(one == "*" or path == one or path.startswith(f"{one}.") for one in trusted)

    def _is_in_project(self, top: str) -> bool:
        """Return whether Python imports this module from the project's folder."""
        loaded = sys.modules.get(top)
        if loaded is not None:
            return is_in(loaded, self.folder)
        return _has_module(self.folder, top)

    def _advice(self, path: str) -> str:
        top = path.partition(".")[0]
        return (
            f"Trusted are the modules in {self.folder}, {listed([*_ALWAYS, *self.packages])} and "
            f"installed packages with hooks. If you trust '{top}', add it to the config file: "
            f"`trust: [{', '.join([*self.packages, top])}]`."
        )


@contextmanager
def importable(folder: Path) -> Generator[None]:
    """Make the modules of a folder importable; restore Python's search path afterwards.

    Modules of the same name that were imported from another project's folder are unloaded first.
    """
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


def load_object(path: str) -> Any:
    """Import and return the class or function of a path, or a class's method, `pkg.Net.tiny`.

    Raises:
        LookupError: it does not exist, or its module cannot be imported.
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
        kind = "a module; expected a class or a function in it"
    elif not callable(found):
        kind = f"an instance of {type(found).__name__}; expected a class or a function"
    else:
        return found
    raise LookupError(f"It is {kind}.")


def is_in(module: ModuleType, folder: Path) -> bool:
    """Return whether a module's file is in a folder."""
    file = getattr(module, "__file__", None)
    paths = [file] if isinstance(file, str) else list(getattr(module, "__path__", []))
    return any(folder in Path(path).resolve().parents for path in paths)


def _is_installed(name: str) -> bool:
    """Return whether Python finds a module of this name; nothing is imported."""
    try:
        return name in sys.modules or find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _has_module(folder: Path, name: str) -> bool:
    """Return whether Python would import a module of this name from the folder."""
    try:
        spec = PathFinder.find_spec(name, [str(folder), *sys.path])
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    return any(folder in Path(place).resolve().parents for place in places)
