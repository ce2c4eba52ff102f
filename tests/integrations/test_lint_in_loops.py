"""Lint in every loop: a correct training run has no finding, and the page says what is checked."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))

import linted_loops  # noqa: E402

SEEN = {
    *("on_loader_start", "on_batch_loaded", "on_after_forward", "on_loss_call"),
    *("on_batch_trained", "on_before_backward", "on_after_backward"),
    *("on_before_clip", "on_clip_call"),
    *("on_before_optimizer_step", "on_after_optimizer_step", "on_step_end", "on_train_end"),
}


@pytest.fixture(scope="module")
def linted() -> dict[str, Any]:
    return {name: linted_loops.LintedLoop(train) for name, train in linted_loops.loops().items()}


@pytest.mark.parametrize("name", linted_loops.loops())
def test_a_correct_loop_is_seen_and_has_no_finding(linted: dict[str, Any], name: str) -> None:
    one = linted[name]
    assert one.findings == []
    assert [reason for reason in one.left_out.values() if "fail" in reason] == []
    assert SEEN - one.points == set()


def test_the_page_says_which_checks_are_made_in_which_loop(linted: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "lint.md").read_text(encoding="utf-8")
    assert linted_loops.table(linted) in page, "run tools/linted_loops.py"
