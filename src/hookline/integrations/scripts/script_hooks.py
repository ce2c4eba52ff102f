"""ScriptHooks: attaches hooks to whatever a process trains, and never breaks what it does."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Thread, current_thread
from typing import Any

import torch

from hookline.errors import HooklineError, StopTraining, listed
from hookline.integrations.attach import attach
from hookline.integrations.bare_loop.session import Session
from hookline.integrations.scripts import known_trainers
from hookline.integrations.scripts.loop_watch import LoopWatch, find_parts
from hookline.integrations.scripts.run_settings import (
    ALWAYS_POSSIBLE,
    DEFAULT_HOOKS,
    RunSettings,
)
from hookline.loop.patches import calling_frames
from hookline.loop.processes import is_main_process
from hookline.masking import mask_text
from hookline.printable import printable_lines

Options = Callable[[bool], Mapping[str, Any]]

_LOAD = """hookline: checkpoints are in {folder}. The script cannot load them by itself:
    import hookline
    checkpoint = hookline.open_run({run!r}).checkpoints()[-1]
    checkpoint.load_into(model)"""


def listen_to_script(text: str) -> ScriptHooks:
    """Return what attaches hooks to this process, from the settings of `hookline run` as JSON."""
    settings = RunSettings.from_json(text)

    def options(only_possible: bool) -> Mapping[str, Any]:
        hooks = settings.make_hooks(only_possible=only_possible)
        return {"hooks": hooks, **settings.attach_options()}

    has_lint = any(isinstance(h, Mapping) and h.get("name") == "lint" for h in settings.hooks)
    if has_lint:
        from hookline.hooks.lint.torch_watch import recorder

        recorder.attach()
    return ScriptHooks(
        options,
        strict=settings.strict,
        has_default_hooks=not settings.hooks,
        loop_options={"on_stop": "raise"},  # nobody reads `should_stop`
        stopped_code=settings.stopped_code,
        is_quiet=settings.is_temporary,
        finds_strangers=has_lint,
    )


class ScriptHooks:
    """Attaches hooks to the training runs of this process as they begin.

    A training run that cannot be attached goes on as without this, and one message says why.

    Args:
        options: returns the options of `attach`, with new hooks; called with whether default hooks
            that not every loop allows are left out.
        strict: raise an error where hooks cannot be attached, before the first step.
        has_default_hooks: whether nobody has asked for these hooks.
        loop_options: further options of `attach`, for bare loops.
        on_attach: called with each session.
        stopped_code: the exit code of a process whose loop a hook has stopped.
        is_quiet: do not say where runs are written.
        finds_strangers: attach to models whose parameters no optimizer has, too.
    """

    def __init__(
        self,
        options: Options,
        *,
        strict: bool = False,
        has_default_hooks: bool = False,
        loop_options: Mapping[str, Any] | None = None,
        on_attach: Callable[[Session], None] | None = None,
        stopped_code: int = 0,
        is_quiet: bool = False,
        finds_strangers: bool = False,
    ) -> None:
        self._loop_options, self._stopped_code = loop_options or {}, stopped_code
        self._options, self._strict, self._on_attach = options, strict, on_attach
        self._has_default_hooks, self._is_quiet = has_default_hooks, is_quiet
        self._loops = LoopWatch(
            self._attach_to_loop,
            partial(self._fail, "this loop"),
            finds_strangers=finds_strangers,
        )
        # Of bare loops, each with the step in which the newest optimizer was made, and its thread.
        # They are kept alive: one that was freed with its model could not close its run.
        self._sessions: dict[Session, tuple[int, Thread]] = {}
        self._trainers: weakref.WeakKeyDictionary[Any, weakref.ref[Session]]
        self._trainers = weakref.WeakKeyDictionary()
        self._runs: list[Path] = []
        self._was_attached = self._has_failed = False

    # -- loops ------------------------------------------------------------------------------------

    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        """Notice an optimizer: the models that it trains are found when they are called."""
        for session, (_, thread) in list(self._sessions.items()):
            self._sessions[session] = session.step, thread
        self._loops.add(optimizer)

    def _attach_to_loop(
        self,
        models: list[torch.nn.Module],
        optimizers: list[torch.optim.Optimizer],
        missed: int,
    ) -> None:
        if _is_in_trainer():
            return
        self._end_earlier()
        what = f"{_names(models)} with {_names(optimizers)}"
        session = self._try(what, partial(self._begin_loop, models, optimizers))
        if session is not None and missed:
            say(
                f"Hooks are called from step {missed + 1} of {what} on: before that it was not "
                "known which models its optimizers train."
            )

    def _begin_loop(
        self,
        models: list[torch.nn.Module],
        optimizers: list[torch.optim.Optimizer],
        only_possible: bool,
    ) -> Session:
        session = attach(
            models[0] if len(models) == 1 else models,
            optimizers,
            **find_parts(optimizers),
            **self._loop_options,
            **self._options(only_possible),
        )
        session.is_quiet = self._is_quiet
        if not self._strict:
            session.allow_missing()
        session.begin()
        self._sessions[session] = session.step, current_thread()
        if self._loop_options:
            _exit_when_stopped(self._stopped_code)
        return session

    def _end_earlier(self) -> None:
        """End this thread's sessions that have not stepped since the newest optimizer was made."""
        for session, (step, thread) in list(self._sessions.items()):
            if session.step == step and (thread is current_thread() or not thread.is_alive()):
                self._end(session)

    def processes_part(self) -> None:
        """End sessions of several processes, while these can still exchange what they record."""
        for session in list(self._sessions):
            if session.loop.ranks.is_distributed:
                self._end(session)

    def _end(self, session: Session) -> None:
        del self._sessions[session]
        try:
            session.detach()
        except HooklineError as error:
            say(f"A hook failed at the end of a training run: {error}")

    # -- known trainers ---------------------------------------------------------------------------

    def train(
        self, module: str, original: Callable[..., Any], trainer: Any, args: Any, kwargs: Any
    ) -> Any:
        """Do what the method of a known trainer does that trains, with hooks."""
        reference = self._trainers.get(trainer)
        live = None if reference is None else reference()
        if (live is not None and not live.has_ended) or self._loops.is_paused:
            return original(trainer, *args, **kwargs)
        parts = known_trainers.find_parts_of(trainer, list(self._loops.optimizers))
        if parts is None:  # an engine that does not train, or whose loop is seen as a bare one
            return original(trainer, *args, **kwargs)
        what = f"a {type(trainer).__name__} of {module.partition('.')[0]}"
        with self._loop_watch_paused():
            self._end_earlier()
            begin = partial(self._begin_trainer, trainer, parts)
            session = self._try(what, begin)
            find_run = partial if session is None else known_trainers.find_run
            run = find_run(original, trainer)
            try:
                return run(*args, **kwargs)
            finally:
                if session is not None:
                    self._note_run(session)

    def _begin_trainer(
        self, trainer: Any, parts: Mapping[str, Any], only_possible: bool
    ) -> Session:
        options = {**self._options(only_possible), **parts, "allow_missing": not self._strict}
        session = known_trainers.attach_to(trainer, options)
        session.is_quiet = self._is_quiet
        self._trainers[trainer] = weakref.ref(session)
        if not self._strict:
            session.on_refusal = partial(self._fail, f"a {type(trainer).__name__}")
        return session

    @contextmanager
    def _loop_watch_paused(self) -> Generator[None]:
        """Leave the calls and optimizers of a trainer to its own session."""
        self._loops.stop()
        self._loops.is_paused = True
        try:
            yield
        finally:
            self._loops.is_paused = False
            self._loops.optimizers.clear()

    # -- what cannot be attached ------------------------------------------------------------------

    def _try(self, what: str, begin: Callable[[bool], Session]) -> Session | None:
        """Return the session; None, after a message, if there cannot be one."""
        try:
            session = self._begin(begin)
        except Exception as error:  # also of a hook's own code, or a mistake of Hookline
            self._fail(what, error)
            return None
        self._was_attached = True
        self._note_run(session)
        if self._on_attach is not None:
            self._on_attach(session)
        return session

    def _begin(self, begin: Callable[[bool], Session]) -> Session:
        """Begin a session, if need be without default hooks that not every loop allows."""
        try:
            return begin(False)
        except HooklineError as error:
            if not self._has_default_hooks:
                raise
            with suppress(HooklineError):
                session = begin(True)
                names = [each["name"] for each in DEFAULT_HOOKS]
                left_out = [name for name in names if name not in ALWAYS_POSSIBLE]
                say(f"The default hooks {listed(left_out)} are left out here. {error}")
                return session
            raise

    def _fail(self, what: str, error: Exception) -> None:
        self._has_failed = True
        if self._strict:
            raise error
        kind = "" if isinstance(error, HooklineError) else f"{type(error).__name__}: "
        say(f"No hooks are attached to {what}, and the script goes on without them. {kind}{error}")

    # -- the end ----------------------------------------------------------------------------------

    def _note_run(self, session: Session) -> None:
        if session.run is not None and session.run.path not in self._runs:
            self._runs.append(session.run.path)

    def report(self, *, is_settled: bool) -> None:
        """Say why nothing was attached, unless that is known, and how checkpoints are loaded.

        Called at the exit, after sessions have ended.
        """
        if not is_settled and not self._was_attached and not self._has_failed:
            say(
                f"Of the optimizers ({self._loops.describe()}), no module with their parameters "
                "was called with gradients enabled, so no hooks were attached. A loop "
                "that calls `model.forward(…)`, or a function that is compiled as a whole, has to "
                "attach by itself: `hookline.attach(model, optimizer, hooks=[…])`."
            )
        for path in self._runs:
            folder = path / "checkpoints"
            if folder.is_dir() and any(each.is_dir() for each in folder.iterdir()):
                say(_LOAD.format(folder=folder, run=str(path)), is_message=True)

    def stop(self) -> None:
        """Attach to nothing any more; sessions are left to those who have them."""
        self._sessions.clear()
        self._loops.stop()
        self._loops.optimizers.clear()


def say(text: str, *, is_message: bool = False) -> None:
    """Print a message to stderr, in rank 0."""
    if is_main_process():
        shown = text if is_message else f"hookline: {text}"
        print(printable_lines(mask_text(shown)), file=sys.stderr, flush=True)


def _names(objects: list[Any]) -> str:
    return ", ".join(type(each).__name__ for each in objects)


def _is_in_trainer() -> bool:
    """Return whether Hookline's own trainer calls the model, which has its hooks."""
    names = (frame.f_globals.get("__name__", "") for frame in calling_frames())
    return any(name.startswith("hookline.trainer.") for name in names)


def _exit_when_stopped(code: int) -> None:
    """Exit with this code, and one line, if nobody catches `StopTraining`."""
    before: Any = sys.excepthook
    if getattr(before, "exits_when_stopped", False):
        return

    def exit_or_show(kind: Any, error: BaseException, traceback: Any) -> None:
        if not isinstance(error, StopTraining):
            before(kind, error, traceback)
            return
        say(f"{error} What the script does after training was skipped.")
        raise SystemExit(code)

    exit_or_show.exits_when_stopped = True  # type: ignore[attr-defined]
    sys.excepthook = exit_or_show
