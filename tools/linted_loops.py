"""Write the table of docs/lint.md that says which checks of Lint are made in which loop.

Each loop trains once with Lint, in one process. A check is made unless it was left out, or unless
this loop alone never reaches the points in training that it looks at. `--check` changes nothing and
fails when the table is outdated.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hookline
from hookline.hooks.lint.catalogue import CHECKS
from hookline.hooks.lint.finding import POINTS, describe_left_out

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tools")]
PAGE = ROOT / "docs" / "lint.md"
_EVERYWHERE = {
    *("on_train_start", "on_step_end", "on_train_end"),
    # What is loaded is seen in every loop that loads something.
    *("on_state_loaded", "on_weights_loaded", "on_file_loaded", "on_step_after_loading"),
}


def in_unchanged_loop(hooks: list[Any], folder: Path) -> None:
    """Train in a loop that calls nothing of Hookline."""
    import every_loop as loops

    model = loops.make_model()
    optimizer = loops.make_optimizer(model)
    session = hookline.attach(model, optimizer, hooks=hooks, runs=folder / "runs", report=False)
    for _ in range(loops.EPOCHS):
        model.train()
        for i, (x, y) in enumerate(loops.make_loader()):
            (loops.F.mse_loss(model(x), y) / loops.ACCUMULATE).backward()
            if (i + 1) % loops.ACCUMULATE == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), loops.MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            for x, y in loops.make_loader(2, seed=2):
                loops.F.mse_loss(model(x), y)
    session.detach()  # as the end of the process does


def loops() -> dict[str, Callable[[list[Any], Path], Any]]:
    """Return the loops of the table."""
    import every_loop

    return {
        "a bare loop, unchanged": in_unchanged_loop,
        "Hookline's `Trainer`": every_loop.in_trainer,
        "Accelerate, in a bare loop": every_loop.in_accelerate_loop,
        "Hugging Face": every_loop.in_transformers,
        "Lightning": every_loop.in_lightning,
        "Ignite": every_loop.in_ignite,
    }


class LintedLoop:
    """The findings and the skipped checks of Lint in one loop.

    Attributes:
        findings: what it has found: nothing, as the loops are correct.
        left_out: the checks that were left out, with the reasons.
        points: the points in training that checks were called at.
    """

    def __init__(self, train: Callable[[list[Any], Path], Any]) -> None:
        lint: Any = hookline.Lint()
        self.points: set[str] = set()
        tell = lint._tell

        def record(point: str, *args: Any) -> None:
            self.points.add(point)
            tell(point, *args)

        lint._tell = record
        with tempfile.TemporaryDirectory() as folder:
            train([lint], Path(folder))
        self.findings, self.left_out = lint.findings, dict(lint.left_out)


def table(linted: dict[str, LintedLoop]) -> str:
    """Return the table: for each loop, how many checks are made, and which are not."""
    reached = set[str]().union(*(each.points for each in linted.values()))
    not_made = {name: _unreached(each, reached) | each.left_out for name, each in linted.items()}
    first = next(iter(not_made.values()))
    common = {k: v for k, v in first.items() if all(v == each.get(k) for each in not_made.values())}
    lines = ["| loop | checks made | not made |", "|---|---|---|"]
    alike: dict[str, list[str]] = {}  # loops by the rest of their row
    for name, reasons in not_made.items():
        own = {check: reason for check, reason in reasons.items() if check not in common}
        row = f"{len(CHECKS) - len(reasons)} of {len(CHECKS)} | {_shown(own)}"
        alike.setdefault(row, []).append(name)
    lines += [f"| {'; '.join(names)} | {row} |" for row, names in alike.items()]
    lines += ["", f"Left out in all of these runs: {_shown(common)}."] if common else []
    return "\n".join(lines)


def _unreached(one: LintedLoop, reached: set[str]) -> dict[str, str]:
    """Return the checks all of whose points are reached in other loops only."""
    found: dict[str, str] = {}
    for check in CHECKS:
        points = {point for point in POINTS if hasattr(check, point)} - _EVERYWHERE
        if points & reached and not points & one.points:
            found[check.id] = "this loop does not show what it looks at"
    return found


def _shown(reasons: dict[str, str]) -> str:
    said = [text.removeprefix("Left out: ").rstrip(".") for text in describe_left_out(reasons)]
    return "; ".join(said)


def main() -> int:
    from generate import rewritten

    os.environ["HOOKLINE_REPORT"] = "0"
    made = table({name: LintedLoop(train) for name, train in loops().items()})
    new = rewritten(PAGE, "<!-- loops: ", "<!-- end of loops", made)
    is_current = new == PAGE.read_text(encoding="utf-8")
    if not is_current and "--check" not in sys.argv[1:]:
        PAGE.write_text(new, encoding="utf-8")
    print(made)
    return 1 if "--check" in sys.argv[1:] and not is_current else 0


if __name__ == "__main__":
    sys.exit(main())
