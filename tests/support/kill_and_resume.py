"""Kill a training process at random instants, resume it until it ends, and compare the result.

    python tests/support/kill_and_resume.py --kills 200 --seed 7

This process imports torch and forks each part of a run, because importing takes seconds.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import torch
from killed_training import DONE, ENDING, STARTING, STEP, VALIDATION, compare_ends, train
from warm_processes import end_workers, import_modules, write_modules

from hookline.checkpoint import load_checkpoint
from hookline.errors import CheckpointError

PHASES = {STARTING: "starting", STEP: "step", VALIDATION: "validation", ENDING: "ending"}
TARGETS = ("any", "starting", "step", "save", "save", "validation")
_EDGES = ("starting", "ending")
_EXTRA_SECONDS = {"save": 0.002, "validation": 0.002}  # they take a few milliseconds
_MOST_BATCHES = 8  # of about 50, so that a run is killed several times
_PART_TIMEOUT = 120.0


class Killer:
    """Runs a training in processes that it kills.

    Args:
        seed: decides when each process is killed.
        folder: for the runs.

    Attributes:
        killed: the number of kills by what the process was doing.
        failures: what went wrong, with what is needed to look at it.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self._random = random.Random(seed)
        self._folder = folder
        # Shared with the process that trains: where it stands, and its batches so far.
        self._shared = mmap.mmap(-1, 2)
        self._start_seconds = 0.0
        self._sessions: set[int] = set()
        self._unfinished_before: set[Path] = set()
        self.killed: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []

    def run(self, kills: int) -> None:
        """Train without interruption, then with kills until there were as many as asked for."""
        whole = self._run_whole("whole")
        import_modules(whole / "modules.txt")
        differences = compare_ends(whole, self._run_whole("whole_again"))
        if differences:
            raise RuntimeError("Two uninterrupted runs differ:\n" + "\n".join(differences))
        while self.killed.total() < kills:
            self._run_killed(whole, self._folder / f"run_{self.counts['runs']:03d}", kills)
            end_workers(self._sessions)
            self._sessions.clear()
            self.counts["runs"] += 1

    def _run_whole(self, name: str) -> Path:
        """Train without interruption; return the folder."""
        folder = self._folder / name
        if self._run_part(folder, None) != 0:
            raise RuntimeError(f"Uninterrupted training failed:\n{_read_log(folder)}")
        return folder

    def _run_killed(self, whole: Path, folder: Path, kills: int) -> None:
        """Kill and resume a run until it ends; compare it with the one that was not killed."""
        history: list[str] = []
        targets = ["ending", *self._random.sample(TARGETS, len(TARGETS))]
        while True:
            target = targets.pop() if targets and self.killed.total() < kills else None
            part = len(history)
            code = self._run_part(folder, target)
            if code == -signal.SIGKILL:
                what = self._what_was_killed(folder)
                self.killed[what] += 1
                history.append(what)
                problems = _check_checkpoints(folder)
            else:
                problems = [] if code == 0 else [f"exit code {code}:\n{_read_log(folder)}"]
            if problems or code != -signal.SIGKILL:
                break
            self.counts["resumed"] += 1
        if not problems:
            problems = compare_ends(whole, folder) + _find_leftovers(folder)
        if problems:
            self.counts["different"] += 1
            lines = [f"{folder}, part {part}, killed in {', '.join(history) or 'nothing'}:"]
            self.failures.append("\n    ".join(lines + problems[:20]))
        else:
            self.counts["identical"] += 1

    def _run_part(self, folder: Path, target: str | None) -> int:
        """Train in a new process and kill it; return its exit code, negative after a signal."""
        folder.mkdir(parents=True, exist_ok=True)
        self._shared[:2] = bytes((STARTING, 0))
        self._unfinished_before = _find_unfinished(folder)
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            self._train_in_child(folder)
        self._sessions.add(pid)
        deadline = time.monotonic() + _PART_TIMEOUT
        if target is not None:
            # Half of the time the workers survive their parent, as after an out-of-memory kill.
            kill = self._random.choice((os.kill, os.killpg))
            if self._wait_for(target, pid, folder, deadline):
                try:
                    kill(pid, signal.SIGKILL)
                except ProcessLookupError:  # it has not called setsid() yet
                    os.kill(pid, signal.SIGKILL)
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if time.monotonic() > deadline:
                os.killpg(pid, signal.SIGABRT)  # faulthandler prints where it hangs
            time.sleep(0.005)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def _train_in_child(self, folder: Path) -> None:
        code = 1
        try:
            os.setsid()
            log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            print(f"-- process {os.getpid()}", flush=True)
            train(folder, tell=self._tell, resume_from="auto")
            write_modules(folder / "modules.txt")
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _tell(self, phase: int) -> None:
        self._shared[0] = phase
        if phase == STEP:
            self._shared[1] = (self._shared[1] + 1) % 256

    def _wait_for(self, target: str, pid: int, folder: Path, deadline: float) -> bool:
        """Wait for a random instant of this kind; return False if the process ended before."""
        batches = self._random.randrange(_MOST_BATCHES) if target not in _EDGES else 0
        share = self._random.random()
        started = time.monotonic()
        while time.monotonic() < deadline:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return False
            phase = self._shared[0]
            if phase == DONE:
                return False
            is_there = (
                target == "any"
                or PHASES.get(phase) == target
                or (target == "save" and self._is_saving(folder))
            )
            if is_there and self._shared[1] >= batches:
                break
            time.sleep(0.0002)
        if self._start_seconds == 0.0 and phase != STARTING:
            self._start_seconds = time.monotonic() - started
        longest = self._start_seconds if target == "starting" else _EXTRA_SECONDS.get(target, 0.01)
        time.sleep(share * longest)
        return True

    def _what_was_killed(self, folder: Path) -> str:
        if self._is_saving(folder):
            return "save"
        return PHASES.get(self._shared[0], "after training")

    def _is_saving(self, folder: Path) -> bool:
        """Return whether this part has a checkpoint that is unfinished or partly removed."""
        return bool(_find_unfinished(folder) - self._unfinished_before)


def _find_unfinished(folder: Path) -> set[Path]:
    return set(folder.glob("runs/*/checkpoints/.tmp-*"))


def _check_checkpoints(folder: Path) -> list[str]:
    """Return what is wrong with the checkpoints after a kill: each has to be complete."""
    problems = []
    for path in folder.glob("runs/*/checkpoints/[!.]*"):
        try:
            load_checkpoint(path if path.is_dir() else path.parent / path.read_text().strip())
        except (CheckpointError, OSError) as error:
            problems.append(f"{path}: {error}")
    return problems


def _find_leftovers(folder: Path) -> list[str]:
    """Return the unfinished folders of the run that ended."""
    newest = max((folder / "runs").iterdir())
    return [f"{path} was left" for path in newest.rglob(".tmp-*")]


def _read_log(folder: Path) -> str:
    return (folder / "log.txt").read_text()[-3000:]


def main() -> int:
    """Kill as often as asked for; print the counts, and return 1 if a run came out different."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # threads do not survive a fork
    seed = arguments.seed if arguments.seed is not None else random.randrange(10**6)
    folder = arguments.folder or Path(tempfile.mkdtemp())
    killer = Killer(seed, folder)
    started = time.monotonic()
    killer.run(arguments.kills)
    for failure in killer.failures:
        print(f"  {failure}")
    print(f"seed {seed}, in {folder}, {time.monotonic() - started:.0f} s")
    where = ", ".join(f"{count} in {what}" for what, count in sorted(killer.killed.items()))
    print(f"{killer.killed.total()} killed: {where}")
    names = ("resumed", "runs", "identical", "different")
    print(", ".join(f"{killer.counts[name]} {name}" for name in names))
    if killer.failures:
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
