"""Waits in each Python process of `hookline run` for an optimizer, or a known trainer that starts.

Python runs this file when a process starts, because its folder is on PYTHONPATH. Nothing of
Hookline, and nothing that costs time, is imported before something is about to train: launchers,
workers of loaders and other helpers pay nothing.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing `typing` would take milliseconds
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    GetListener = Callable[[bool], Any]

SETTINGS = "HOOKLINE_RUN"
"""The environment variable with the settings of `hookline run`, as JSON."""

PROCESS = "HOOKLINE_RUN_PROCESS"
"""The environment variable with the id of the process that `hookline run` has become."""

WATCHED = {
    "torch.optim.optimizer": ("Optimizer", "__init__"),
    "transformers.trainer": ("Trainer", "train"),
    "lightning.pytorch.trainer.trainer": ("Trainer", "fit"),
    "pytorch_lightning.trainer.trainer": ("Trainer", "fit"),
    "ignite.engine.engine": ("Engine", "run"),
    "torch.distributed.distributed_c10d": (None, "destroy_process_group"),
}
"""By module: the class, if it has one, and the function whose calls a listener is told of."""

EARLY = {"torch.nn.modules.module": ("Module", ("to_empty", "load_state_dict"))}
"""Functions whose first call makes the listener of `Lint`: what they do is seen by its checks."""


def watch(get_listener: GetListener, *, is_early: bool = False) -> Callable[[], None]:
    """Tell a listener of the calls of `WATCHED`; return a function that undoes this.

    `get_listener` is called when something happens, with whether something is about to train. It
    returns None, or an object with `optimizer_made(optimizer)`, `processes_part()` and
    `train(module, original, trainer, args, kwargs)`. With `is_early`, the functions of `EARLY`
    call it, too.
    """
    undo: list[Callable[[], None]] = []

    def wrap(module: Any) -> None:
        if module.__name__ in WATCHED:
            undo.append(_wrap(module, get_listener))
        elif is_early:
            _wrap_early(module, get_listener)

    finder = _Finder(wrap)
    sys.meta_path.insert(0, finder)
    for name in (*WATCHED, *EARLY):
        if name in sys.modules:
            wrap(sys.modules[name])

    def stop() -> None:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
        for step in undo:
            step()

    return stop


def _wrap(module: Any, get_listener: GetListener) -> Callable[[], None]:
    """Wrap the function of a module or its class; return a function that puts it back."""
    from functools import wraps  # torch has imported it

    kind, name = WATCHED[module.__name__]
    owners = [module if kind is None else getattr(module, kind)]
    original = getattr(owners[0], name)
    if kind is None:  # it was imported from there, unless that comes later
        package = sys.modules[module.__name__.rpartition(".")[0]]
        owners += [package] if getattr(package, name, None) is original else []

    def told_of_optimizer(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if (listener := get_listener(True)) is not None:
            listener.optimizer_made(self)

    def told_of_end(*args: Any, **kwargs: Any) -> Any:
        if (listener := get_listener(False)) is not None and not args and not kwargs:
            listener.processes_part()
        return original(*args, **kwargs)

    def told_of_training(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (listener := get_listener(True)) is None:
            return original(self, *args, **kwargs)
        return listener.train(module.__name__, original, self, args, kwargs)

    others: Any = told_of_end if kind is None else told_of_training
    told = wraps(original)(told_of_optimizer if name == "__init__" else others)

    def put_back() -> None:
        for owner in owners:
            if getattr(owner, name) is told:
                setattr(owner, name, original)

    for owner in owners:
        setattr(owner, name, told)
    return put_back


def _wrap_early(module: Any, get_listener: GetListener) -> None:
    """Make the listener at the first call of a function, which may be replaced by that."""
    kind, names = EARLY[module.__name__]
    owner = getattr(module, kind)
    originals = {name: getattr(owner, name) for name in names}

    def put_back(name: str) -> Any:
        from functools import wraps

        @wraps(originals[name])
        def first_call(*args: Any, **kwargs: Any) -> Any:
            is_ours = vars(owner).get(name) is first[name]  # else the script has wrapped this
            for each, original in originals.items():
                if vars(owner).get(each) is first[each]:
                    setattr(owner, each, original)
            if not called:
                called.append(name)
                get_listener(True)
            call = getattr(owner, name) if is_ours else originals[name]
            return call(*args, **kwargs)

        return first_call

    called: list[str] = []
    first = {name: put_back(name) for name in names}
    for name in names:
        setattr(owner, name, first[name])


class _Finder:
    """Calls a function with each module of `WATCHED` and `EARLY`, right after it was executed."""

    def __init__(self, on_loaded: Callable[[Any], None]) -> None:
        self._on_loaded = on_loaded
        self._searched: set[str] = set()  # another finder of this kind may ask this one

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the module's spec, as the other finders find it."""
        if (name not in WATCHED and name not in EARLY) or name in self._searched:
            return None
        self._searched.add(name)
        try:
            others = (each for each in sys.meta_path if each is not self)
            found = (each.find_spec(name, path, target) for each in others)
            spec = next((each for each in found if each is not None), None)
        finally:
            self._searched.discard(name)
        if spec is not None and spec.loader is not None:
            self._extend(spec.loader)
        return spec

    def _extend(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            loader.exec_module = execute
            execute(module)
            self._on_loaded(module)

        loader.exec_module = exec_module


# -- `hookline run` --------------------------------------------------------------------------------


class _Child:
    """The listener of this process, made when it is needed first.

    Args:
        settings: the settings of `hookline run`; the script may change its environment.
    """

    _listener: Any = None

    def __init__(self, settings: str) -> None:
        from time import time

        self._settings = settings
        self._process = os.getpid()
        self._is_command = os.environ.get(PROCESS) == str(self._process)
        self._start = time() - 1.0  # file systems have coarse clocks
        self._was_needed = self._has_failed = False

    def get(self, is_needed: bool) -> Any:
        """Return the listener; None if it was not needed, or this interpreter has no Hookline."""
        if self._listener is None and is_needed and not self._has_failed:
            self._was_needed = True
            try:
                # Several threads may train: the others wait here until one has imported it.
                from hookline.integrations.scripts.script_hooks import listen_to_script

                vars(self).setdefault("_listener", listen_to_script(self._settings))
            except Exception as error:  # also of a version for another Python
                self._has_failed = True
                self._report_missing(error)
        return self._listener

    def _report_missing(self, error: Exception) -> None:
        message = (
            f"The interpreter {sys.executable} cannot import Hookline "
            f"({type(error).__name__}: {error}), so no hooks are attached. Install it there, or "
            "run the script with the interpreter that has it."
        )
        if self._setting("strict"):
            raise RuntimeError(message) from error
        _say(message)

    def _setting(self, name: str) -> Any:
        from json import loads

        return loads(self._settings)[name]

    def end(self) -> None:
        """Say at the exit if no hooks were called; with `--strict`, fail.

        Registered before all that the script registers, and therefore called last.
        """
        if os.getpid() != self._process:  # a fork
            return
        has_failed = hasattr(sys, "last_value")  # its traceback says enough
        is_settled = has_failed or (self._is_command and self._has_run())
        if self._listener is not None:
            self._listener.report(is_settled=is_settled)
        if is_settled or not self._is_command:
            return
        if not self._was_needed:
            self._report_nothing()
        if self._setting("strict"):
            _flush_files()
            os._exit(1)  # nothing else changes the exit code here

    def _has_run(self) -> bool:
        """Return whether a run was written, also by another process, since this one started."""
        runs = self._setting("runs")
        if not os.path.isdir(runs):  # noqa: PTH112
            return False
        with os.scandir(runs) as folders:
            return any(each.stat().st_mtime >= self._start for each in folders)

    def _report_nothing(self) -> None:
        _say(
            "This process has made no optimizer, and no run was written to "
            f"{self._setting('runs')}: no hooks were called. A loop that changes parameters "
            "without an optimizer cannot have hooks. If another process trains, it has to inherit "
            f"PYTHONPATH and {SETTINGS} (python -I and -E ignore them), and its interpreter has to "
            "have Hookline."
        )


def _say(message: str) -> None:
    print(f"hookline: {message}", file=sys.stderr, flush=True)


def _flush_files() -> None:
    """Write what open files have buffered, as Python does when it ends by itself."""
    import gc
    import io
    from contextlib import suppress

    for each in gc.get_objects():
        if issubclass(type(each), io.IOBase):
            with suppress(Exception):  # closed, a broken pipe
                each.flush()


def _start(settings: str) -> None:
    import atexit

    if hasattr(sys, "hookline_run"):  # the script has imported this once more
        return
    sys.hookline_run = settings  # type: ignore[attr-defined]
    child = _Child(settings)
    watch(child.get, is_early='"lint"' in settings)
    atexit.register(child.end)


def _run_other() -> None:
    """Run the `sitecustomize` that Python would have run without this one."""
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    places = [each for each in sys.path if os.path.abspath(each) != here]  # noqa: PTH100
    finders = [each for each in sys.meta_path if getattr(each, "__name__", "") == "PathFinder"]
    spec = finders[0].find_spec("sitecustomize", places) if finders else None
    if spec is None or spec.loader is None:
        return
    module = type(sys)("sitecustomize")
    module.__spec__, module.__loader__, module.__file__ = spec, spec.loader, spec.origin
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if __name__ == "sitecustomize":  # else it was imported for what it defines
    if SETTINGS in os.environ:
        _start(os.environ[SETTINGS])
    _run_other()
