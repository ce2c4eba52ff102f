"""Training that is killed at any instant and resumed ends as if nothing had happened."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from commands import run_command

KILLS = 12


def test_killed_at_random_instants_training_ends_with_the_same_bits(tmp_path):
    script = Path(__file__).parents[1] / "support" / "kill_and_resume.py"
    done = run_command(sys.executable, script, "--kills", KILLS, "--folder", tmp_path / "runs")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{KILLS} resumed" in done.stdout
    assert "0 different" in done.stdout
    identical = re.search(r"(\d+) identical", done.stdout)
    assert identical is not None, done.stdout
    assert int(identical[1]) > 0
