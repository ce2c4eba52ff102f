"""Which faults the savers survive: `python -m bench.checkpoint_faults`, in a few minutes.

- kill: a process that saves all the time is killed (SIGKILL). Survived: every checkpoint that
  exists under its name loads with the right values.
- bit flip, truncation: of a random file at a random place. Survived: loading fails or gives the
  right values.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.checkpoint_peers import SAVERS, Saver, State, make_savers

_KILLS = 10
_DAMAGES = 40


def main() -> None:
    savers, missing = make_savers()
    for name, reason in missing.items():
        print(f"{name} is skipped: {reason}")
    print("saver | kills | bit flips | truncations")
    for name, saver in savers.items():
        with tempfile.TemporaryDirectory() as folder:
            kills = sum(_survives_kill(name, saver, Path(folder) / str(i)) for i in range(_KILLS))
            flips = _count_noticed(saver, Path(folder) / "flips", _flip_bit)
            cuts = _count_noticed(saver, Path(folder) / "cuts", _truncate)
        counts = f"{kills}/{_KILLS} | {flips}/{_DAMAGES} | {cuts}/{_DAMAGES}"
        print(f"{name} | {counts}", flush=True)
    os._exit(0)  # process groups and helper processes would otherwise wait for each other


def _make_state(value: float, size: int) -> State:
    weights = {f"w{i}": torch.full((size,), value + i) for i in range(8)}
    return {"model": weights, "optimizer": {"m": torch.full((size,), value)}}


def _is_right(saver: Saver, path: Path, value: float, size: int) -> bool:
    state = _make_state(value, size)
    loaded = saver.load(path, state)
    pairs = [(state[k][name], loaded[k][name]) for k in state for name in state[k]]
    return all(torch.equal(a, b) for a, b in pairs)


# -- kills ----------------------------------------------------------------------------------------

_KILLED_SIZE = 2_000_000  # 72 MB


def _survives_kill(name: str, saver: Saver, folder: Path) -> bool:
    folder.mkdir()
    command = [sys.executable, "-m", "bench.checkpoint_faults", name, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    process.stdout.readline()  # the first checkpoint is there
    time.sleep(random.uniform(0.2, 1.5))
    process.kill()
    process.wait()
    process.stdout.close()
    paths = [path for path in folder.iterdir() if path.name.isdigit()]
    return all(_loads(saver, path) for path in paths)


def _loads(saver: Saver, path: Path) -> bool:
    try:
        return _is_right(saver, path, float(path.name), _KILLED_SIZE)
    except BaseException:  # that of torch.distributed.checkpoint is not an Exception
        return False


def _save_forever(name: str, folder: Path) -> None:
    saver = SAVERS[name][1]()
    for i in range(10**6):
        saver.start(_make_state(i, _KILLED_SIZE), folder / str(i))
        saver.finish()
        print(i, flush=True)
        if i >= 3:
            # Renamed first: a kill during the deletion must not look like a torn save.
            old = (folder / str(i - 3)).rename(folder / "old")
            shutil.rmtree(old) if old.is_dir() else old.unlink()


# -- damage ---------------------------------------------------------------------------------------


def _count_noticed(saver: Saver, path: Path, damage: Any) -> int:
    size = 10_000
    saver.start(_make_state(1, size), path)
    saver.finish()
    files = [file for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()]
    weights = [file.stat().st_size for file in files]
    noticed = 0
    for _ in range(_DAMAGES):
        (file,) = random.choices(files, weights)
        content = file.read_bytes()
        file.write_bytes(damage(content))
        try:
            noticed += _is_right(saver, path, 1, size)
        except BaseException:
            noticed += 1
        file.write_bytes(content)
    return noticed


def _flip_bit(content: bytes) -> bytes:
    flipped = bytearray(content)
    flipped[random.randrange(len(flipped))] ^= 1 << random.randrange(8)
    return bytes(flipped)


def _truncate(content: bytes) -> bytes:
    return content[: random.randrange(len(content))]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _save_forever(sys.argv[1], Path(sys.argv[2]))
    main()
