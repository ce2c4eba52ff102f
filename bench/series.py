"""Reading one series of a long run, compared with `hookline runs show`, which reads all of them.

The run is that of `bench.report` with 10,000,000 values in 1.4 GB: `lr/AdamW` has 1,262,626 of
them, and the norm of a layer 25,252. The second reading of a series uses the index of the first.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from time import perf_counter

import hookline
from bench.harness import Row, Spread
from bench.report import write_run

STEPS = 1_262_626
LONG, SHORT = "lr/AdamW", "gradients/blocks.0.layer_0/norm"


def measure(steps: int = STEPS) -> dict[str, float]:
    """Return the number of values, and the seconds that reading takes."""
    with tempfile.TemporaryDirectory() as folder:
        values = write_run(Path(folder) / "long-run", steps)
        run = hookline.open_run(Path(folder) / "long-run")
        found: dict[str, float] = {"values": values}
        start = perf_counter()
        str(run)
        found["runs show"] = perf_counter() - start
        for name in (LONG, SHORT):
            start = perf_counter()
            found[f"values of {name}"] = len(run.metrics(name))
            found[name] = perf_counter() - start
        start = perf_counter()
        run.metrics(SHORT)
        found["again"] = perf_counter() - start
        return found


def run(*, quick: bool) -> list[Row]:
    found = measure(STEPS // 20 if quick else STEPS)
    rows = [
        Row(
            f"reading {found[f'values of {name}']:,.0f} of {found['values']:,.0f} values, "
            "over runs show",
            Spread.of([found[name] / found["runs show"]]),
            "x",
            limit=1.0,
        )
        for name in (LONG, SHORT)
    ]
    again = Row("reading the shorter series again", Spread.of([found["again"]]), "s", limit=1.0)
    return [*rows, Row("reading the shorter series", Spread.of([found[SHORT]]), "s"), again]


def main() -> None:
    for name, value in measure().items():
        print(f"  {name:45} {value:,.2f}")


if __name__ == "__main__":
    main()
