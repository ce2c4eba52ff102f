"""What `import hookline` adds to `import torch`, all its names loaded, in new processes."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial

from bench.harness import Row, Spread, interleave

__all__ = ["run"]

TORCH = "import torch"
# Names are loaded when first used: touch them all, hookline.attach included.
HOOKLINE = "import torch; half(); import hookline; [getattr(hookline, n) for n in hookline.__all__]"
CHILD = """
import json
from time import perf_counter
marks = []
half = lambda: marks.append(perf_counter())
half()
{statements}
half()
print(json.dumps(marks))
"""


def run(*, quick: bool) -> list[Row]:
    own: list[float] = []
    measured = interleave(
        {"torch": partial(_imported, TORCH, []), "both": partial(_imported, HOOKLINE, own)},
        rounds=3 if quick else 12,
        warmup=1,
    )
    between = measured.excess("both", "torch").scaled(1e3)
    return [
        Row(
            "import hookline and all its names, after import torch in the same process",
            Spread.of(own).scaled(1e3),
            "ms",
            limit=100,
            note=f"import torch {measured.time('torch') * 1e3:,.0f} ms",
        ),
        # The same from the outside, as a difference of two long times: right, but noisy.
        Row("    both imported, over a process that imports torch alone", between, "ms"),
    ]


def _imported(statements: str, own: list[float]) -> float:
    """Return the seconds of all imports; add those of what came after torch to `own`."""
    command = [sys.executable, "-c", CHILD.format(statements=statements)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"Importing failed in a new process:\n{done.stderr}")
    begin, *between, end = json.loads(done.stdout)
    own += [end - mark for mark in between]
    return float(end - begin)
