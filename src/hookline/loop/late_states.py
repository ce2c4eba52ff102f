"""States in a checkpoint whose objects come later: optimizers and a scaler that the loop finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hookline.checkpoint.differences import describe_groups
from hookline.loop.state_differences import describe_optimizer


class LateStates:
    """The states of a loaded checkpoint that wait for their objects.

    They are saved again in checkpoints, until their objects have come.

    Attributes:
        expects_optimizers: whether the loop finds optimizers while it runs.
        expects_scaler: the same for a scaler.
        is_strict: whether a state that does not fit its object is an error.
        optimizers: the states of the optimizers that come next, in their order.
        classes: the names of their classes, as far as the checkpoint has them.
        scaler: the state of the scaler; None if none waits.
    """

    def __init__(self) -> None:
        self.expects_optimizers = self.expects_scaler = False
        self.is_strict = True
        self.optimizers: list[Any] = []
        self.classes: list[str] = []
        self.scaler: Any = None
        self._saved_classes: Sequence[str] = ()

    def load_classes(self, saved: Mapping[str, Sequence[str]]) -> None:
        """Note the classes of all optimizers in the checkpoint that is being loaded."""
        self._saved_classes = saved.get("optimizers", ())

    def take_optimizers(self, states: Sequence[Any], here: int) -> Sequence[Any]:
        """Keep the states of later optimizers; return those of the ones that are here."""
        first = here if self.expects_optimizers else len(states)
        self.optimizers, self.classes = list(states[first:]), list(self._saved_classes[first:])
        return states[:first]

    def complete(self, state: dict[str, Any], saved: Mapping[str, Any], here: int) -> Any:
        """Return a loop's state with the saved states of later optimizers, to be compared."""
        if not self.expects_optimizers:
            return state
        kinds = [each.get("classes", {}).get("optimizers", []) for each in (state, saved)]
        return {
            **state,
            "optimizers": [*state["optimizers"][:here], *saved["optimizers"][here:]],
            "classes": {**state["classes"], "optimizers": [*kinds[0][:here], *kinds[1][here:]]},
        }

    def next_optimizer(self, index: int, optimizer: Any) -> tuple[Any, list[str]]:
        """Return the state of the optimizer that has come, and why it cannot be loaded."""
        if not self.optimizers:
            return None, []
        saved, name = self.optimizers.pop(0), f"optimizer {index}"
        kind, own = self.classes.pop(0) if self.classes else None, type(optimizer).__name__
        lines = [f"{name} is {kind} in the checkpoint and {own} here"] * (kind not in (None, own))
        lines += describe_groups(name, saved, optimizer.state_dict())
        return saved, lines or [f"{name}: {line}" for line in describe_optimizer(optimizer, saved)]

    def describe(self, here: int) -> list[str]:
        """Return the objects whose states wait, in a loop that has so many optimizers."""
        found = [f"optimizer {here + i}" for i in range(len(self.optimizers))]
        return [*found, *(["the scaler"] if self.scaler is not None else [])]
