"""The report of a long run: how long it takes, how much memory, and how large the file is.

The run has 1,000,000 steps and 200 series: `train/loss`, `train/accuracy`, `lr/AdamW` and
`train/grad_norm` at every step, 196 gradient norms and activation statistics every 50 steps, with
spikes that the report must keep. These are 7,920,000 values in about 1 GB.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.harness import Row, Spread

STEPS = 1_000_000
EVERY = 50
LAYERS = 49
PER_STEP = ("train/loss", "train/accuracy", "lr/AdamW", "train/grad_norm")
SPIKE = 777_777


def write_run(folder: Path, steps: int = STEPS) -> int:
    """Write the run, and return its number of values."""
    names = [
        f"{group}/blocks.{i // 7}.layer_{i % 7}/{measure}"
        for group, measures in (("gradients", ("norm", "std")), ("activations", ("mean", "dead")))
        for i in range(LAYERS)
        for measure in measures
    ]
    folder.mkdir(parents=True)
    manifest = {"format": "hookline.run", "version": 1, "run_id": folder.name}
    manifest |= {"status": "completed", "started": "2026-11-01T00:00:00.000000+00:00", "parts": []}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    start = {"v": 1, "time": 1.7e9, "kind": "start", "step": 0}
    (folder / "events.jsonl").write_text(json.dumps(start) + "\n")
    rng, count = random.Random(0), 0
    noise = [rng.gauss(0, 0.05) for _ in range(4096)]
    with (folder / "metrics.jsonl").open("w", buffering=1 << 20) as file:
        for step in range(1, steps + 1):
            seconds, loss = 1.7e9 + step * 0.05, 2 + 8 / math.sqrt(step) + noise[step % 4096]
            if step == SPIKE:
                loss = 99.5
            values = (loss, 1 - loss / 20, 3e-4 * (1 - step / steps), 1 + noise[step % 1024])
            head = f'{{"v": 1, "step": {step}, "epoch": 0, "time": {seconds!r}, "name": "'
            for name, value in zip(PER_STEP, values, strict=True):
                file.write(f'{head}{name}", "kind": "scalar", "value": {value!r}}}\n')
            count += len(PER_STEP)
            if step % EVERY == 0:
                for i, name in enumerate(names):
                    value = math.exp(-i / 30) * (1.1 + noise[(step + i * 37) % 4096])
                    file.write(f'{head}{name}", "kind": "scalar", "value": {value!r}}}\n')
                count += len(names)
    return count


MAKE = """
import json, resource, sys, time
start = time.perf_counter()
from hookline.report import make_report
report = make_report(sys.argv[1])
report.write(sys.argv[2])
seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
loss = report.facts["runs"][0]["metrics"]["train/loss"]
print(json.dumps({"seconds": seconds, "peak_mb": peak, "highest": loss["highest"]}))
"""


def measure(steps: int = STEPS) -> dict[str, Any]:
    """Return what the report of the run takes."""
    with tempfile.TemporaryDirectory() as folder:
        run, page = Path(folder) / "long-run", Path(folder) / "report.html"
        values = write_run(run, steps)
        command = [sys.executable, "-c", MAKE, str(run), str(page)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        size = (run / "metrics.jsonl").stat().st_size
        return {
            "steps": steps,
            "series": len(PER_STEP) + 4 * LAYERS,
            "values": values,
            "log_mb": size / 1e6,
            "page_mb": page.stat().st_size / 1e6,
            **found,
        }


def run(*, quick: bool) -> list[Row]:
    found = measure(STEPS // 20 if quick else STEPS)
    name = f"report of {found['steps']:,} steps, {found['series']} series"
    limits = (("seconds", "s", 60.0), ("peak_mb", "MB", 1024.0), ("page_mb", "MB", 10.0))
    return [
        Row(f"{name}: {key}", Spread.of([found[key]]), unit, limit=limit)
        for key, unit, limit in limits
    ]


def main() -> None:
    print("A report of a run with a million steps and 200 series (limits: 60 s, 1024 MB, 10 MB)")
    for name, value in measure().items():
        print(f"  {name:10} {value:,.1f}" if isinstance(value, float) else f"  {name:10} {value:,}")


if __name__ == "__main__":
    main()
