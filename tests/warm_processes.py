"""Processes that start in milliseconds: forks of one that has already imported torch.

    with WarmParent() as parent:
        process = parent.start(function, "argument", log=folder / "log.txt")
        assert process.wait() == 0

A process is a session of its own, so that signals reach nothing else. It runs a function of a test
module, which gets its arguments as strings.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any


class WarmParent:
    """A process that has imported torch and Hookline, and forks the processes of tests."""

    def __init__(self) -> None:
        self._sessions: set[int] = set()
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
            arguments=[str(argument) for argument in arguments],
            log=str(log),
        )
        self._sessions.add(pid)
        return WarmProcess(self, pid, log)

    def request(self, **request: Any) -> int:
        """Send a request to the process; return its answer."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())


class WarmProcess:
    """A process of a `WarmParent`."""

    def __init__(self, parent: WarmParent, pid: int, log: Path) -> None:
        self._parent, self.pid, self._log = parent, pid, log

    def wait(self, seconds: float = 60.0) -> int:
        """Wait for its end; return the exit code, negative after a signal."""
        return self._parent.request(wait=self.pid, seconds=seconds)

    def send_signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    @property
    def output(self) -> str:
        """What it has printed."""
        return self._log.read_text()


def _serve() -> None:
    import torch

    torch.set_num_threads(1)  # threads do not survive a fork
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for line in sys.stdin:
        request = json.loads(line)
        answer = _wait(**request) if "wait" in request else _fork(**request)
        print(answer, flush=True)


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


def _fork(function: str, arguments: list[str], log: str) -> int:
    module, _, name = function.partition(":")
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


def _wait(wait: int, seconds: float) -> int:
    deadline = time.monotonic() + seconds
    while True:
        pid, status = os.waitpid(wait, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.killpg(wait, signal.SIGABRT)  # faulthandler prints where it hangs
        time.sleep(0.005)


if __name__ == "__main__":
    _serve()
