"""Which code ran: the commit, the branch, and whether files differ from it."""

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

__all__ = ["code_folders", "describe_commit", "git_facts"]

_SECONDS = 10.0  # for all of git's answers together
_CHUNK = 1 << 20
_CALLERS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")

# The same changes have the same hash, whatever the user's settings for showing them.
_DIFF = (
    *("diff", "HEAD", "--binary", "--full-index", "--no-color", "--no-ext-diff", "--no-textconv"),
    *("--no-renames", "--no-relative", "--diff-algorithm=myers", "--unified=3"),
    *("--inter-hunk-context=0", "--src-prefix=a/", "--dst-prefix=b/", "--submodule=short"),
)


def git_facts(folder: Path | None = None) -> dict[str, Any]:
    """Return what git says of a folder; nothing here fails, and nothing is written.

    - `commit`: None where git does not tell it; then `problem` says why.
    - `branch`: None for a detached head.
    - `dirty`: whether tracked files differ from the commit, staged or not.
    - `diff_sha256`: the hash of that difference; None when there is none.
    - `untracked`: how many files or folders git neither tracks nor ignores. They are counted and
      not hashed: data and results often lie there.

    Args:
        folder: where to look; by default the folder of the program, or else the working folder.
    """
    until = time.monotonic() + _SECONDS
    places = code_folders() if folder is None else [folder]
    tried = [_facts(place, until) for place in places[:1]]
    if tried[0]["commit"] is None:
        tried += [_facts(place, until) for place in places[1:]]
    return next((facts for facts in tried if facts["commit"] is not None), tried[0])


def describe_commit(facts: Mapping[str, Any], length: int | None = None) -> str:
    """Return the commit, cut to a length; or a placeholder that says why there is none."""
    commit = facts.get("commit")
    return str(commit)[:length] if commit else f"none ({facts.get('problem') or 'not recorded'})"


def code_folders() -> list[Path]:
    """Where the code may lie: beside the program, unless that is an installed one; then here."""
    program = getattr(sys.modules.get("__main__"), "__file__", None)
    here = Path.cwd()
    if program is None:  # a notebook, or an interpreter
        return [here]
    folder = Path(program).resolve().parent
    installed = folder.is_relative_to(Path(sys.prefix).resolve())  # pytest, say
    return [here] if installed or folder == here else [folder, here]


def _facts(folder: Path, until: float) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "commit": None,
        "branch": None,
        "dirty": None,
        "diff_sha256": None,
        "untracked": None,
        "folder": str(folder),
        "problem": None,
    }
    try:
        status = _ask(folder, until, "status", "--porcelain=v2", "--branch", "--untracked-files=no")
        lines = status.decode(errors="replace").splitlines()
        heads = dict(line[9:].split(" ", 1) for line in lines if line.startswith("# branch."))
        if heads["oid"] == "(initial)":
            facts["problem"] = "the repository has no commit yet"
            return facts
        facts["commit"] = heads["oid"]
        facts["branch"] = None if heads["head"] == "(detached)" else heads["head"]
        facts["dirty"] = any(not line.startswith("#") for line in lines)
        if facts["dirty"]:
            facts["diff_sha256"] = _ask_for_hash(folder, until, *_DIFF)
        others = _ask(
            *(folder, until, "ls-files", "-z", "--others", "--exclude-standard", "--directory"),
            "--no-empty-directory",
        )
        facts["untracked"] = others.count(b"\0")
    except FileNotFoundError:
        facts["problem"] = "git is not installed"
    except subprocess.TimeoutExpired as error:
        facts["problem"] = f"git took more than {_SECONDS:.0f} s to answer: {error.cmd[1]}"
    except subprocess.CalledProcessError as error:
        facts["problem"] = _reason(error)
    except Exception as error:  # whatever git is here: it does not keep anybody from training
        facts["problem"] = f"{type(error).__name__}: {error}"
    return facts


def _reason(error: subprocess.CalledProcessError) -> str:
    said = str(error.stderr, errors="replace").strip()
    if "not a git repository" in said:
        return "not in a git repository"
    return (said.splitlines() or [f"git ended with {error.returncode}"])[0].removeprefix("fatal: ")


def _ask(folder: Path, until: float, *words: str) -> bytes:
    with tempfile.TemporaryFile() as file:
        _run(folder, until, words, file)
        file.seek(0)
        return file.read()


def _ask_for_hash(folder: Path, until: float, *words: str) -> str:
    """Return the hash of an answer that may be too large for memory."""
    found = hashlib.sha256()
    with tempfile.TemporaryFile() as file:
        _run(folder, until, words, file)
        file.seek(0)
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()


def _run(folder: Path, until: float, words: tuple[str, ...], file: IO[bytes]) -> None:
    # Of a git hook that runs us, we do not take over the repository.
    environment = {k: v for k, v in os.environ.items() if k not in _CALLERS}
    environment |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    subprocess.run(
        ["git", *words],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=file,
        stderr=subprocess.PIPE,
        timeout=max(0.1, until - time.monotonic()),
        check=True,
        env=environment,
    )
