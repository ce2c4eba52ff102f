"""The state of the code: commit, branch, and uncommitted changes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from io import BufferedRandom
from pathlib import Path
from typing import Any

__all__ = ["describe_commit", "read_git_state"]

_SECONDS = 10.0  # the time limit for all git commands together
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
        with _run_git(folder, deadline, *_STATUS) as output:
            lines = output.read().decode(errors="replace").splitlines()
        headers = dict(line[9:].split(" ", 1) for line in lines if line.startswith("# branch."))
        if headers["oid"] == "(initial)":
            state["problem"] = "the repository has no commit yet"
            return state
        state["commit"] = headers["oid"]
        state["branch"] = None if headers["head"] == "(detached)" else headers["head"]
        state["dirty"] = any(not line.startswith("#") for line in lines)
        if state["dirty"]:
            with _run_git(folder, deadline, *_DIFF) as output:
                state["diff_sha256"] = hashlib.file_digest(output, "sha256").hexdigest()
        with _run_git(folder, deadline, *_UNTRACKED) as output:
            state["untracked"] = output.read().count(b"\0")
    except FileNotFoundError:
        state["problem"] = "git is not installed"
    except subprocess.TimeoutExpired as error:
        state["problem"] = f"git took more than {_SECONDS:.0f} s to answer: {error.cmd[1]}"
    except subprocess.CalledProcessError as error:
        message = str(error.stderr, errors="replace").strip()
        lines = message.splitlines() or [f"git ended with {error.returncode}"]
        is_outside = "not a git repository" in message
        state["problem"] = (
            "not in a git repository" if is_outside else lines[0].removeprefix("fatal: ")
        )
    except Exception as error:  # a problem with git must not stop training
        state["problem"] = f"{type(error).__name__}: {error}"
    return state


@contextmanager
def _run_git(
    folder: Path, deadline: float, *arguments: str
) -> Generator[BufferedRandom, None, None]:
    """Yield the output of a git command: a file, because it may be too large for memory."""
    # A git hook that runs this program sets variables for its own repository.
    environment = {k: v for k, v in os.environ.items() if k not in _CALLER_VARIABLES}
    environment |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    with tempfile.TemporaryFile() as output:
        subprocess.run(
            ["git", *arguments],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.PIPE,
            timeout=max(0.1, deadline - time.monotonic()),
            check=True,
            env=environment,
        )
        output.seek(0)
        yield output
