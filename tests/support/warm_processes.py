"""Processes that start in milliseconds: forks of one that has already imported torch.

    with WarmParent() as parent:
        process = parent.start(function, "argument", log=folder / "log.txt")
        assert process.wait() == 0

A process is a session of its own, so that signals reach nothing else. It runs a function of a test
module, which gets its arguments as strings.

    done = run_warm(["-m", "hookline", "runs"], cwd=folder, environment=os.environ)

runs `python -m hookline runs` like that: with this folder and environment, and the end that Python
has. Variables that torch or Hookline read when they are imported have no effect there.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, TextIO


class WarmParent:
    """A process that has imported torch and Hookline, and forks the processes of tests."""

    def __init__(self) -> None:
        self._sessions: set[int] = set()
        self._lock = threading.Lock()  # tests may ask in several threads
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "NO_COLOR": "1"},
        )

    def __enter__(self) -> WarmParent:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._server.communicate(timeout=60)
        end_workers(self._sessions)

    def start(self, function: Callable[..., Any], *arguments: Any, log: Path) -> WarmProcess:
        """Start a process that calls a function; what it prints is added to a file."""
        pid = self.request(
            function=f"{function.__module__}:{function.__qualname__}",
            folder=str(Path(function.__code__.co_filename).parent),
            arguments=[str(argument) for argument in arguments],
            log=str(log),
        )
        self._sessions.add(pid)
        return WarmProcess(self, pid, log)

    def request(self, **request: Any) -> int:
        """Send a request to the process; return its answer."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with self._lock:
            self._server.stdin.write(json.dumps(request) + "\n")
            self._server.stdin.flush()
            return int(self._server.stdout.readline())


class WarmProcess:
    """A process of a `WarmParent`."""

    def __init__(self, parent: WarmParent, pid: int, log: Path) -> None:
        self._parent, self.pid, self._log = parent, pid, log
        self._code: int | None = None

    def wait(self, seconds: float = 60.0) -> int:
        """Wait for its end; return the exit code, negative after a signal."""
        if self._code is None:
            self._code = self._parent.request(wait=self.pid, seconds=seconds)
        return self._code

    def poll(self) -> int | None:
        """Return the exit code if it has ended."""
        if self._code is None and (code := self._parent.request(look=self.pid)) != _RUNNING:
            self._code = code
        return self._code

    def send_signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    @property
    def output(self) -> str:
        """Its output."""
        return self._log.read_text()

    @property
    def errors(self) -> str:
        """The stderr of a process of `start_warm`."""
        return _errors_of(self._log).read_text()

    def lines(self) -> Iterator[str]:
        """Yield the lines that it prints, until it ends."""
        has_ended = False
        with self._log.open() as file:
            while not has_ended:
                has_ended = self.poll() is not None
                while line := _read_line(file):
                    yield line


def _read_line(file: TextIO) -> str:
    """Return the next whole line, or nothing after some milliseconds."""
    place = file.tell()
    if (line := file.readline()).endswith("\n"):
        return line
    file.seek(place)
    time.sleep(0.005)
    return ""


def _errors_of(log: Path) -> Path:
    return log.with_name(f"{log.name}.err")


@cache  # one for all tests of this process
def _parent() -> WarmParent:
    parent = WarmParent()
    atexit.register(parent.__exit__)
    return parent


def start_warm(
    arguments: Sequence[str], *, cwd: Path | None = None, environment: Mapping[str, str], log: Path
) -> WarmProcess:
    """Start Python with these arguments, as `run_warm` does; what it prints is put into a file."""
    log.touch()
    pid = _parent().request(
        python=[*arguments],
        cwd=str(cwd or Path.cwd()),
        environment=dict(environment),
        out=str(log),
        err=str(_errors_of(log)),
    )
    return WarmProcess(_parent(), pid, log)


def run_warm(
    arguments: Sequence[str],
    *,
    cwd: Path | None = None,
    environment: Mapping[str, str],
    seconds: float = 180.0,
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments: a script, `-m` and a module, or `-c` and code."""
    (done,) = run_warm_together(arguments, [environment], cwd=cwd, seconds=seconds)
    return done


def run_warm_together(
    arguments: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    *,
    cwd: Path | None = None,
    seconds: float = 180.0,
    imports: Sequence[str] = (),
) -> list[subprocess.CompletedProcess[str]]:
    """Run Python in a process for each environment; if one fails, the others are killed.

    Args:
        imports: modules that take long to import, and all of the processes import.
    """
    parent = _parent()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pids = [
            parent.request(
                python=[*arguments],
                cwd=str(cwd or Path.cwd()),
                environment=dict(environment),
                out=str(folder / f"{number}.out"),
                err=str(folder / f"{number}.err"),
                imports=[*imports],
            )
            for number, environment in enumerate(environments)
        ]
        codes = _wait_for_all(parent, pids, time.monotonic() + seconds)
        texts = [
            [(folder / f"{number}.{end}").read_text() for end in ("out", "err")]
            for number in range(len(pids))
        ]
    command = [sys.executable, *arguments]
    return [
        subprocess.CompletedProcess(command, codes[pid], *text)
        for pid, text in zip(pids, texts, strict=True)
    ]


def _wait_for_all(parent: WarmParent, pids: Sequence[int], deadline: float) -> dict[int, int]:
    codes: dict[int, int] = {}
    while running := [pid for pid in pids if pid not in codes]:
        for pid in running:
            if (code := parent.request(look=pid)) != _RUNNING:
                codes[pid] = code
        if any(codes.values()) or time.monotonic() > deadline:
            for pid in set(pids) - set(codes):
                os.killpg(pid, signal.SIGKILL)
        time.sleep(0.005)
    return codes


def _serve() -> None:
    import torch

    torch.set_num_threads(1)  # threads do not survive a fork
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.fsync = os.fdatasync = lambda fd: None  # takes long, and a kill does not need it
    for line in sys.stdin:
        request = json.loads(line)
        answer = next(ask for key, ask in _REQUESTS.items() if key in request)(**request)
        print(answer, flush=True)
    os._exit(0)  # the interpreter would free each object, which takes seconds


def end_workers(sessions: set[int]) -> None:
    """End the workers of loaders whose process was killed.

    They notice it within seconds, but not if it died before they had started completely.
    """
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            name, _, rest = stat.read_text().rpartition(")")
            if name.endswith("(pt_data_worker") and int(rest.split()[3]) in sessions:
                os.kill(int(stat.parent.name), signal.SIGKILL)


def write_modules(file: Path) -> None:
    """Write the names of the modules that this process has imported."""
    file.write_text("\n".join(sys.modules))


def import_modules(file: Path) -> None:
    """Import what a child has imported, so that the next ones need not."""
    for name in file.read_text().split() if file.exists() else ():
        with suppress(ImportError):
            import_module(name)


def _fork(function: str, folder: str, arguments: list[str], log: str) -> int:
    module, _, name = function.partition(":")
    if folder not in sys.path:
        sys.path.append(folder)
    called = getattr(import_module(module), name)
    modules = Path(tempfile.gettempdir()) / f"modules_{os.getpid()}.txt"
    import_modules(modules)
    modules.unlink(missing_ok=True)
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 # what was read ahead is the parent's
    faulthandler.enable()
    code: Any = 1
    try:
        called(*arguments)
        write_modules(modules)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _fork_python(
    python: list[str], cwd: str, environment: Any, out: str, err: str, imports: Sequence[str] = ()
) -> int:
    for module in (*_IMPORTED, *imports):
        import_module(module)
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    for number, path in ((0, os.devnull), (1, out), (2, err)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    places = [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each]
    kind, what = python[0], python[1] if python[0] in ("-m", "-c") else python[0]
    sys.argv = [kind, *python[2:]] if what != kind else list(python)
    first = "" if kind == "-c" else cwd if kind == "-m" else str(Path(kind).resolve().parent)
    sys.path[:1] = [first, *places]
    code: Any = 0
    try:
        if kind == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        elif kind == "-c":
            sys.modules["__main__"] = main = ModuleType("__main__")
            exec(compile(what, "<string>", "exec"), main.__dict__)
        else:
            runpy.run_path(str(Path(kind).absolute()), run_name="__main__")
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    finally:
        _end_python(code)


def _end_python(code: int) -> None:
    """End this process as the interpreter does: threads, then functions for the exit."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _look(look: int) -> int:
    pid, status = os.waitpid(look, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if pid else _RUNNING


def _wait(wait: int, seconds: float) -> int:
    deadline = time.monotonic() + seconds
    while True:
        pid, status = os.waitpid(wait, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.killpg(wait, signal.SIGABRT)  # faulthandler prints where it hangs
        time.sleep(0.005)


_RUNNING = 1000  # no exit code
# What most processes need: torch's optimizers import `torch._dynamo`, which takes a second.
_IMPORTED = (
    "hookline.cli.app",
    "hookline.config_files",
    "hookline.trainer.trainer",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
)
_REQUESTS: dict[str, Callable[..., int]] = {
    "python": _fork_python,
    "function": _fork,
    "look": _look,
    "wait": _wait,
}

if __name__ == "__main__":
    _serve()
