"""Numbers of sharded tensors, in real processes."""

from __future__ import annotations

from rank_checks import run_ranks


def test_numbers_of_sharded_tensors_are_those_of_whole_ones() -> None:
    assert run_ranks("distributed_numbers.py", ranks=4).count("fine") == 4
