"""Ten do-nothing hooks in the trainers of other libraries, over ten of their own callbacks.

Both on two events of each step. What is compared is the time that each adds to a step of the host
without callbacks; Ignite's handlers cost almost nothing, so there it is the time itself.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import hookline
from bench import peers
from bench.harness import Row, Spread, interleave

__all__ = ["run"]

TEN = 10
WARMUP = 60
LIMIT = 1.0
IGNITE_MICROSECONDS = 20.0


class Nothing(hookline.Hook):
    def on_train_batch_start(self) -> None: ...

    def on_step_end(self) -> None: ...


def make_hooks() -> list[Any]:
    return [Nothing() for _ in range(TEN)]


def run(*, quick: bool) -> list[Row]:
    steps, rounds = (150, 6) if quick else (300, 30)
    size = {"steps": steps, "warmup": WARMUP}
    kinds = {
        "alone": peers.loops(hooks=0, **size),
        "callbacks": peers.loops(hooks=TEN, **size),
        "hooks": peers.hosts(make_hooks, **size),
    }
    candidates = {
        f"{host} {kind}": one for kind, several in kinds.items() for host, one in several.items()
    }
    measured = interleave(candidates, rounds=rounds, warmup=1)
    rows: list[Row] = []
    for host in kinds["hooks"]:
        hooks = measured.excess(f"{host} hooks", f"{host} alone")
        callbacks = measured.excess(f"{host} callbacks", f"{host} alone")
        alone = measured.time(f"{host} alone") * 1e6
        note = (
            f"adds {hooks.median * 1e6:.1f} µs, its own callbacks {callbacks.median * 1e6:.1f} µs, "
            f"to a step of {alone:.0f} µs"
        )
        name = f"{host}: what ten hooks add to a step"
        if host == "Ignite":
            rows.append(Row(name, hooks.scaled(1e6), "µs", IGNITE_MICROSECONDS, note=note))
        else:
            ratio = _ratio(measured.seconds, host)
            rows.append(Row(f"{name}, over ten of its callbacks", ratio, "×", LIMIT, note=note))
    return rows


def _ratio(seconds: dict[str, list[float]], host: str) -> Spread:
    """Return the added time over that of callbacks: of medians, because differences are noisy."""
    alone = seconds[f"{host} alone"]
    own = median(a - b for a, b in zip(seconds[f"{host} callbacks"], alone, strict=True))
    hooks = Spread.of([a - b for a, b in zip(seconds[f"{host} hooks"], alone, strict=True)])
    return hooks.scaled(1 / own)
