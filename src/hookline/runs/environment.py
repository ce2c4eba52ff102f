"""The environment of a run: its code, versions, platform, devices, and the process that writes it.

torch is imported by the functions that need it: reading a run does not.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from hookline._version import __version__
from hookline.masking import mask_arguments
from hookline.runs.jsonable import to_jsonable

_MAX_FILES = 500  # of the program's own modules
_MAX_BYTES = 20_000_000  # of one of them
_NAME_OR_VERSION = re.compile(r"^(Name|Version):[ \t]*(\S+)[ \t]*$", re.MULTILINE)

_GIT_SECONDS = 10.0  # the time limit for all git commands together
_CALLER_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")

_STATUS = ("status", "--porcelain=v2", "--branch", "--untracked-files=no")
_UNTRACKED = (
    *("ls-files", "-z", "--others", "--exclude-standard", "--directory", "--no-empty-directory"),
)
# Equal changes have equal hashes, independently of the user's settings for diffs.
_DIFF = (
    *("diff", "HEAD", "--binary", "--full-index", "--no-color", "--no-ext-diff", "--no-textconv"),
    *("--no-renames", "--no-relative", "--diff-algorithm=myers", "--unified=3"),
    *("--inter-hunk-context=0", "--src-prefix=a/", "--dst-prefix=b/", "--submodule=short"),
)


def describe_environment(device: Any = None) -> dict[str, Any]:
    """Return the environment of this process, as manifest fields."""
    import torch

    packages = installed_packages()
    listing = "\n".join(f"{name}=={version}" for name, version in packages.items())
    return {
        "git": read_git_state(),
        "sources": _hash_sources(),
        "command": mask_arguments(to_jsonable(sys.orig_argv)),
        "versions": {
            "hookline": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
        },
        "packages": dict(packages),
        "packages_sha256": hashlib.sha256(listing.encode()).hexdigest(),
        "platform": platform.platform(),
        "devices": _describe_devices(device),
        **describe_process(),
    }


def describe_process() -> dict[str, Any]:
    """Return what identifies this process, for `is_process_alive`."""
    return {
        "host": socket.gethostname(),
        "boot_id": _boot_id(),
        "pid": os.getpid(),
        "pid_started": _start_time(os.getpid()),
        "pid_namespace": _pid_namespace(),
    }


@lru_cache(maxsize=1)
def installed_packages() -> dict[str, str]:
    """Return the version of each installed distribution by name; read once per process."""
    versions: dict[str, str] = {}
    for distribution in metadata.distributions():
        try:
            text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
        except Exception:  # a broken installation
            continue
        # `distribution.metadata` parses the whole text, with the package's README: 0.1 s for 250.
        fields = dict(_NAME_OR_VERSION.findall(text.partition("\n\n")[0]))
        if len(fields) == 2:
            name = fields["Name"].lower()
            versions.setdefault(name, fields["Version"])  # the first one on the path is imported
    return dict(sorted(versions.items()))


def _describe_devices(device: Any) -> dict[str, Any]:
    import torch

    used = None if device is None else torch.device(device)
    affinity = getattr(os, "sched_getaffinity", None)
    devices: dict[str, Any] = {
        "used": None if used is None else str(used),
        "cpus": os.cpu_count(),
        "cpus_usable": None if affinity is None else len(affinity(0)),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.device_count(),
        "names": None,
    }
    # Reading the names initializes CUDA, which costs memory: not if the model is on the CPU.
    if (used is not None and used.type == "cuda") or torch.cuda.is_initialized():
        devices["names"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return devices


def is_process_alive(process: Mapping[str, Any]) -> bool | None:
    """Return whether a described process is alive; None for one of another container or machine."""
    pid = process.get("pid")
    if type(pid) is not int or not 0 < pid < 2**31:  # others mean groups of processes
        return None
    if process.get("host") != socket.gethostname() or os.name != "posix":
        return None
    # Several machines may have the same name.
    if process.get("pid_namespace") != _pid_namespace() or process.get("boot_id") != _boot_id():
        return None
    try:
        os.kill(pid, 0)  # only checks whether the process exists
    except ProcessLookupError:
        return False
    except OSError:  # another user's process
        pass
    started = _start_time(pid)
    return started is None or process.get("pid_started") in (None, started)


def _pid_namespace() -> str | None:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return None


@lru_cache(maxsize=1)
def _boot_id() -> str | None:
    """Return the id that the kernel chose when this machine started."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks: a later one may have the same number."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        state, *rest = text.rpartition(")")[2].split()  # the name before it may contain anything
        return -1 if state in "ZX" else int(rest[18])
    except (OSError, ValueError, IndexError):
        return None


# -- code: the state of git, and the hashes of source files ---------------------------------------


def read_git_state(folder: Path | None = None) -> dict[str, Any]:
    """Return the state of a folder's git repository, without writing. It never raises.

    - `commit`: None if there is none; then `problem` says why.
    - `branch`: None for a detached head.
    - `dirty`: whether tracked files differ from the commit, staged or not.
    - `diff_sha256`: the hash of the difference; None if there is none.
    - `untracked`: how many files or folders are neither tracked nor ignored. They are not hashed,
      because they are often data and results.

    Args:
        folder: Where to look; by default the folder of the program, then the working folder.
    """
    deadline = time.monotonic() + _GIT_SECONDS
    folders = _code_folders() if folder is None else [folder]
    states = [_read_state(folders[0], deadline)]
    if states[0]["commit"] is None:
        states += [_read_state(other, deadline) for other in folders[1:]]
    return next((state for state in states if state["commit"] is not None), states[0])


def describe_commit(state: Mapping[str, Any], length: int | None = None) -> str:
    """Return the commit, shortened to a length, or why there is none."""
    commit = state.get("commit")
    return str(commit)[:length] if commit else f"none ({state.get('problem') or 'not recorded'})"


def _code_folders() -> list[Path]:
    """Return where the code may be: the program's folder unless it is installed, and this one."""
    program = getattr(sys.modules.get("__main__"), "__file__", None)
    here = Path.cwd()
    if program is None:  # a notebook, or an interpreter
        return [here]
    folder = Path(program).resolve().parent
    installed = folder.is_relative_to(Path(sys.prefix).resolve())  # pytest, say
    return [here] if installed or folder == here else [folder, here]


def _read_state(folder: Path, deadline: float) -> dict[str, Any]:
    fields = ("commit", "branch", "dirty", "diff_sha256", "untracked", "folder", "problem")
    state: dict[str, Any] = {**dict.fromkeys(fields), "folder": str(folder)}
    try:
        lines = _run_git(folder, deadline, *_STATUS).decode(errors="replace").splitlines()
        headers = dict(line[9:].split(" ", 1) for line in lines if line.startswith("# branch."))
        if headers["oid"] == "(initial)":
            state["problem"] = "the repository has no commit yet"
            return state
        state["commit"] = headers["oid"]
        state["branch"] = None if headers["head"] == "(detached)" else headers["head"]
        state["dirty"] = any(not line.startswith("#") for line in lines)
        if state["dirty"]:
            diff = _run_git(folder, deadline, *_DIFF)
            state["diff_sha256"] = hashlib.sha256(diff).hexdigest()
        state["untracked"] = _run_git(folder, deadline, *_UNTRACKED).count(b"\0")
    except subprocess.CalledProcessError as error:
        lines = str(error.stderr, errors="replace").strip().splitlines()
        lines = lines or [f"git ended with {error.returncode}"]
        state["problem"] = lines[0].removeprefix("fatal: ")
    except Exception as error:  # a problem with git must not stop training
        state["problem"] = f"{type(error).__name__}: {error}"
    return state


def _run_git(folder: Path, deadline: float, *arguments: str) -> bytes:
    """Return the output of a git command."""
    # A git hook that runs this program sets variables for its own repository.
    environment = {k: v for k, v in os.environ.items() if k not in _CALLER_VARIABLES}
    environment |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    return subprocess.run(
        ["git", *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=max(0.1, deadline - time.monotonic()),
        check=True,
        env=environment,
    ).stdout


def _hash_sources() -> dict[str, str | None]:
    """Return the SHA-256 of the file of each module that is loaded, by the module's name.

    The modules are the program (`__main__`) and all others that belong to no installed package and
    not to Python: the versions of those are known. The hash is None where it is not known: of a
    notebook, which has no file, and of files that cannot be read. It never raises.
    """
    paths = sysconfig.get_paths()
    python = tuple(f"{paths[name]}{os.sep}" for name in ("stdlib", "platstdlib", "scripts"))
    files = {name: _file_of(module) for name, module in sys.modules.copy().items()}

    def is_own(file: str | None) -> bool:
        return file is None or not ("-packages" + os.sep in file or file.startswith(python))

    # The modules of a package are its own if the package is.
    own = [
        (name, file)
        for name, file in sorted(files.items())
        if file is not None
        and is_own(file)
        and is_own(files.get(top := name.partition(".")[0]))
        and top not in ("hookline", "__mp_main__")
    ]
    hashes = {name: _hash_file(file) for name, file in own[:_MAX_FILES]}
    if len(own) > _MAX_FILES:
        hashes["more modules"] = None
    if files.get("__main__") is None:
        hashes["__main__"] = None  # a notebook, or an interpreter
    return hashes


def _file_of(module: Any) -> str | None:
    """Return the absolute path of a module's file; None if it has none."""
    try:
        file = vars(module).get("__file__")
    except Exception:  # a program may put anything into sys.modules
        return None
    return file if type(file) is str and Path(file).is_absolute() else None


def _hash_file(file: str) -> str | None:
    try:
        path = Path(file)
        if not path.is_file() or path.stat().st_size > _MAX_BYTES:
            return None
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, ValueError):
        return None
