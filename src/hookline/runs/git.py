"""The state of the code: commit, branch, and uncommitted changes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

__all__ = ["describe_commit", "read_git_state"]

_SECONDS = 10.0  # the time limit for all git commands together
_CHUNK = 1 << 20
_CALLER_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")

# Equal changes have equal hashes, independently of the user's settings for diffs.
_DIFF = (
    *("diff", "HEAD", "--binary", "--full-index", "--no-color", "--no-ext-diff", "--no-textconv"),
    *("--no-renames", "--no-relative", "--diff-algorithm=myers", "--unified=3"),
    *("--inter-hunk-context=0", "--src-prefix=a/", "--dst-prefix=b/", "--submodule=short"),
)


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
    deadline = time.monotonic() + _SECONDS
    first, *others = _code_folders() if folder is None else [folder]
    state = _read_state(first, deadline)
    if state["commit"] is None:
        states = (_read_state(other, deadline) for other in others)
        state = next((other for other in states if other["commit"] is not None), state)
    return state


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
    state: dict[str, Any] = {
        "commit": None,
        "branch": None,
        "dirty": None,
        "diff_sha256": None,
        "untracked": None,
        "folder": str(folder),
        "problem": None,
    }
    try:
        status = _run_git(
            folder, deadline, "status", "--porcelain=v2", "--branch", "--untracked-files=no"
        )
        lines = status.decode(errors="replace").splitlines()
        headers = dict(line[9:].split(" ", 1) for line in lines if line.startswith("# branch."))
        if headers["oid"] == "(initial)":
            state["problem"] = "the repository has no commit yet"
            return state
        state["commit"] = headers["oid"]
        state["branch"] = None if headers["head"] == "(detached)" else headers["head"]
        state["dirty"] = any(not line.startswith("#") for line in lines)
        if state["dirty"]:
            state["diff_sha256"] = _hash_output(folder, deadline, *_DIFF)
        untracked = _run_git(
            *(folder, deadline, "ls-files", "-z", "--others", "--exclude-standard", "--directory"),
            "--no-empty-directory",
        )
        state["untracked"] = untracked.count(b"\0")
    except FileNotFoundError:
        state["problem"] = "git is not installed"
    except subprocess.TimeoutExpired as error:
        state["problem"] = f"git took more than {_SECONDS:.0f} s to answer: {error.cmd[1]}"
    except subprocess.CalledProcessError as error:
        state["problem"] = _describe_failure(error)
    except Exception as error:  # a problem with git must not stop training
        state["problem"] = f"{type(error).__name__}: {error}"
    return state


def _describe_failure(error: subprocess.CalledProcessError) -> str:
    message = str(error.stderr, errors="replace").strip()
    if "not a git repository" in message:
        return "not in a git repository"
    return (message.splitlines() or [f"git ended with {error.returncode}"])[0].removeprefix(
        "fatal: "
    )


def _run_git(folder: Path, deadline: float, *arguments: str) -> bytes:
    with tempfile.TemporaryFile() as file:
        _execute(folder, deadline, arguments, file)
        file.seek(0)
        return file.read()


def _hash_output(folder: Path, deadline: float, *arguments: str) -> str:
    """Return the hash of an output that may be too large for memory."""
    hasher = hashlib.sha256()
    with tempfile.TemporaryFile() as file:
        _execute(folder, deadline, arguments, file)
        file.seek(0)
        while chunk := file.read(_CHUNK):
            hasher.update(chunk)
    return hasher.hexdigest()


def _execute(folder: Path, deadline: float, arguments: tuple[str, ...], file: IO[bytes]) -> None:
    # A git hook that runs this program sets variables for its own repository.
    environment = {k: v for k, v in os.environ.items() if k not in _CALLER_VARIABLES}
    environment |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    subprocess.run(
        ["git", *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=file,
        stderr=subprocess.PIPE,
        timeout=max(0.1, deadline - time.monotonic()),
        check=True,
        env=environment,
    )
