"""The order in which batches come from several loaders."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import count, cycle
from typing import Any

from hookline.arguments import show_value
from hookline.config.trainer_config import MixConfig
from hookline.errors import ArgumentError, listed, nearest

__all__ = ["LoaderOrder", "make_order"]


class PatternOrder:
    """A pattern of loader numbers, repeated. Round-robin is such a pattern."""

    def __init__(self, pattern: Sequence[int]) -> None:
        self._pattern = pattern
        self._shares = [pattern.count(idx) for idx in range(max(pattern) + 1)]
        self.round_size = len(pattern)

    def turns(self, active: list[bool]) -> Iterator[int]:
        """Yield loaders without end; those that are not active at their turn are skipped."""
        return (idx for idx in cycle(self._pattern) if active[idx])

    def longest(self, lengths: list[int]) -> int:
        """Return the batches in the fewest rounds that take each loader to its end."""
        rounds = (-(-own // share) for own, share in zip(lengths, self._shares, strict=True))
        return max(rounds) * self.round_size

    def shortest(self, lengths: list[int]) -> int:
        """Return the batches in the most rounds in which no loader starts again."""
        rounds = (own // share for own, share in zip(lengths, self._shares, strict=True))
        return min(rounds) * self.round_size


class WeightedOrder:
    """Loaders by weights: whole numbers without a common factor, so that a period is their sum."""

    round_size = 1

    def __init__(self, weights: list[int]) -> None:
        self._weights = weights

    def turns(self, active: list[bool]) -> Iterator[int]:
        """Yield loaders without end; those that are not active at their turn are skipped."""
        while True:
            remaining = [idx for idx, is_active in enumerate(active) if is_active]
            for turn in _weighted_turns([self._weights[idx] for idx in remaining]):
                yield remaining[turn]
                if not all(active[idx] for idx in remaining):
                    break

    def longest(self, lengths: list[int]) -> int:
        """Return the fewest batches that take each loader to its end."""
        return max(self._turn_of_each(lengths))

    def shortest(self, lengths: list[int]) -> int:
        """Return the most batches in which no loader starts again."""
        return min(self._turn_of_each([own + 1 for own in lengths])) - 1

    def _turn_of_each(self, nth: list[int]) -> list[int]:
        """Return after how many turns each loader has had its n-th; looks at one period at most."""
        period = sum(self._weights)
        cuts = [divmod(n - 1, weight) for n, weight in zip(nth, self._weights, strict=True)]
        left = {idx: rest + 1 for idx, (_, rest) in enumerate(cuts)}
        found = [periods * period for periods, _ in cuts]
        for turn, idx in enumerate(_weighted_turns(self._weights), 1):
            if idx in left:
                left[idx] -= 1
                if not left[idx]:
                    del left[idx]
                    found[idx] += turn
            if not left:
                break
        return found


LoaderOrder = PatternOrder | WeightedOrder


def _weighted_turns(weights: Sequence[int]) -> Iterator[int]:
    """Yield turns so that after each of them everyone has had its share, to less than one turn.

    Taking the largest deficit first is not enough: with many, several are due at once, and one
    of them is more than a turn behind (1.08 for the weights 3, 3, 1, 25, 30, 1). Tijdeman's rule
    (The chairman assignment problem, 1980) is: of those that are at least 1/(2N - 2) of a turn
    behind, the one that would be 1 - 1/(2N - 2) behind first. For two, it is the largest deficit.
    """
    total, parts = sum(weights), max(2 * len(weights) - 2, 1)
    had = [0] * len(weights)
    deadlines = [Fraction(parts - 1, weight) for weight in weights]
    for turn in count(1):
        due = (
            idx
            for idx, weight in enumerate(weights)
            if (turn * weight - had[idx] * total) * parts >= total
        )
        pick = min(due, key=deadlines.__getitem__)
        yield pick
        had[pick] += 1
        deadlines[pick] = Fraction(had[pick] * parts + parts - 1, weights[pick])


def make_order(mixing: MixConfig, names: list[str]) -> LoaderOrder | None:
    """Return the order of several loaders; None for one loader after the other."""
    order: LoaderOrder | None = None
    if mixing.pattern is not None:
        order = PatternOrder(_resolved_pattern(mixing.pattern, names))
    elif mixing.weights is not None:
        order = WeightedOrder(_to_integers(_resolved_weights(mixing.weights, names)))
    elif mixing.order == "round_robin":
        order = PatternOrder(range(len(names)))
    return order if len(names) > 1 else None


def _resolved_pattern(pattern: Sequence[str | int], names: list[str]) -> list[int]:
    for entry in pattern:
        if isinstance(entry, str):
            _check_name("pattern", entry, names)
        elif not 0 <= entry < len(names):
            raise ArgumentError(
                f"pattern has loader number {entry}; expected 0 to {len(names) - 1}, or one of "
                f"{listed(names)}."
            )
    resolved = [names.index(entry) if isinstance(entry, str) else entry for entry in pattern]
    missing = [name for idx, name in enumerate(names) if idx not in resolved]
    if missing:
        raise ArgumentError(
            f"pattern {show_value(tuple(pattern))} never loads from {listed(missing)}; expected "
            "every "
            "loader in it. Add what is missing, or do not pass that loader."
        )
    return resolved


def _resolved_weights(
    weights: Mapping[str, float] | Sequence[float], names: list[str]
) -> list[float]:
    if not isinstance(weights, Mapping):
        if len(weights) != len(names):
            raise ArgumentError(
                f"weights has {len(weights)} numbers; expected {len(names)}, one for each of "
                f"{listed(names)}."
            )
        return list(weights)
    for name in weights:
        _check_name("weights", name, names)
    missing = [name for name in names if name not in weights]
    if missing:
        raise ArgumentError(
            f"weights has no number for {listed(missing)}; expected one for each of "
            f"{listed(names)}."
        )
    return [weights[name] for name in names]


def _to_integers(weights: list[float]) -> list[int]:
    """Return the same proportions in whole numbers; 0.7 is seven tenths, not the nearest float."""
    exact = [Fraction(w) if isinstance(w, int) else Fraction(repr(float(w))) for w in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * common) for weight in exact]
    return [weight // math.gcd(*whole) for weight in whole]


def _check_name(where: str, name: Any, names: list[str]) -> None:
    if name not in names:
        hint = nearest(name, names) if isinstance(name, str) else ""
        raise ArgumentError(
            f"{where} names the loader {show_value(name)}; expected {listed(names)}.{hint}"
        )
