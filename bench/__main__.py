"""Run the benchmarks, print a table, write JSON; exit with 1 when a limit is missed."""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import hookline
from bench import (
    checkpoints,
    diagnostics,
    dispatch,
    hosts,
    imports,
    lint,
    memory_growth,
    monitors,
    probe_monitor,
    probes,
    raw,
    report,
    resume,
    scripts,
    series,
    several_processes,
    sharded_saves,
    trackers,
    trainer,
    unchanged_loops,
    updates,
)
from bench.harness import Row, table

PARTS = {
    "dispatch": dispatch.run,
    "raw": raw.run,
    "unchanged_loops": unchanged_loops.run,
    "trainer": trainer.run,
    "monitors": monitors.run,
    "diagnostics": diagnostics.run,
    "lint": lint.run,
    "probes": probes.run,
    "probe_monitor": probe_monitor.run,
    "updates": updates.run,
    "checkpoints": checkpoints.run,
    "resume": resume.run,
    "several_processes": several_processes.run,
    "sharded_saves": sharded_saves.run,
    "trackers": trackers.run,
    "hosts": hosts.run,
    "imports": imports.run,
    "scripts": scripts.run,
    "memory_growth": memory_growth.run,
    "report": report.run,
    "series": series.run,
}
PEERS = (
    "pluggy",
    "pytorch-ignite",
    "torch-checkpointing",
    "lightning",
    "transformers",
    "accelerate",
    "nnsight",
    "transformer-lens",
)
RESULTS = Path(__file__).parent / "results" / "latest.json"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m bench", description=__doc__)
    parser.add_argument("--only", choices=PARTS, action="append", help="run this part only")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, rougher numbers")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where to write the results")
    options = parser.parse_args(arguments)

    torch.set_num_threads(1)
    logging.getLogger("hookline").setLevel(logging.ERROR)  # do-nothing loops go over any budget
    about = _about(quick=options.quick)
    print("\n".join(f"{name:9} {value}" for name, value in about.items()), end="\n\n")
    begin = perf_counter()
    rows: list[Row] = []
    for name in options.only or PARTS:
        print(f"{name} ...", file=sys.stderr, flush=True)
        rows += PARTS[name](quick=options.quick)
    about["load"] = f"{about['load']} before, {_load()} after"
    print(table(rows), end="\n\n")

    missed = [row.measure.strip() for row in rows if row.met is False]
    options.json.parent.mkdir(parents=True, exist_ok=True)
    result = {**about, "rows": [row.as_dict() for row in rows], "missed": missed}
    options.json.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    print(f"{perf_counter() - begin:.0f} s, load {about['load']}, written to {options.json}")
    print(f"MISSED: {'; '.join(missed)}" if missed else "Every limit is met.")
    return 1 if missed else 0


def _about(*, quick: bool) -> dict[str, Any]:
    return {
        "machine": f"{_processor()}, {os.cpu_count()} cores, {platform.system()}",
        "python": platform.python_version(),
        "torch": f"{torch.__version__}, {torch.get_num_threads()} thread",
        "hookline": hookline.__version__,
        "peers": ", ".join(f"{name} {_version(name)}" for name in PEERS),
        "rounds": "quick" if quick else "full",
        "load": _load(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _load() -> str:
    """How busy the machine is: above its number of cores less one, do not trust the numbers."""
    return f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


if __name__ == "__main__":
    sys.exit(main())
