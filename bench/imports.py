"""Measure what `import hookline` adds to `import torch`, in new processes.

Names are loaded when first used, so the import alone is next to nothing; what a bare loop needs
has to keep the limit, too. The trainer's configuration brings pydantic.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial

from bench.harness import Row, Spread, interleave

__all__ = ["run"]

AFTER_TORCH = {
    "import hookline": "import hookline",
    "    and what a bare loop uses": "import hookline; hookline.Hook, hookline.attach",
    "    and the trainer": "import hookline; hookline.Hook, hookline.Trainer",
    "    and every name there is": (
        "import hookline; [getattr(hookline, n) for n in hookline.__all__]"
    ),
}
LIMITED = ("import hookline", "    and what a bare loop uses")
CHILD = """
import json
from time import perf_counter
import torch
begin = perf_counter()
{statements}
print(json.dumps(perf_counter() - begin))
"""


def run(*, quick: bool) -> list[Row]:
    measured = interleave(
        {name: partial(_imported, code) for name, code in AFTER_TORCH.items()},
        rounds=3 if quick else 12,
        warmup=1,
    )
    return [
        Row(
            f"{name}, after import torch" if name in LIMITED[:1] else name,
            Spread.of(measured.seconds[name]).scaled(1e3),
            "ms",
            limit=100 if name in LIMITED else None,
        )
        for name in AFTER_TORCH
    ]


def _imported(statements: str) -> float:
    """Return the seconds of what is imported after torch."""
    command = [sys.executable, "-c", CHILD.format(statements=statements)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"Importing failed in a new process:\n{done.stderr}")
    return float(json.loads(done.stdout))
