"""Which events each host gives to hooks, and where they fire in the host's loop.

The table in the documentation is made from this file, and the integrations refuse hooks that need
what is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hookline.events import EVENTS

__all__ = ["Host"]

_STEP: Mapping[str, str] = {
    "on_before_forward": "the model's outermost call begins",
    "on_after_forward": "the model's outermost call has returned",
    "on_after_backward": "backward has ended",
    "on_gradients_ready": "before the first clip, or before `optimizer.step()`",
    "on_gradient_clip": "torch's clipping functions were called",
    "on_before_optimizer_step": "`optimizer.step()` begins",
    "on_after_optimizer_step": "`optimizer.step()` has ended",
    "on_step_skipped": "the scaler, or a hook, has skipped `optimizer.step()`",
    "on_step_end": "the last optimizer has stepped, before gradients are zeroed",
}
"""What PyTorch's own hooks show in every host."""


@dataclass(frozen=True)
class Host:
    """A host, as messages and the documentation describe it.

    Attributes:
        name: what messages call it.
        places: where each event fires, apart from those that PyTorch's hooks show.
        missing: events that it does not give, each with the reason.
        supplied: what hooks may ask for (keys of `requirements.CALLS`).
        calls: what to do about what is missing, by the same keys.
    """

    name: str
    places: Mapping[str, str]
    missing: Mapping[str, str]
    supplied: frozenset[str]
    calls: Mapping[str, str]

    def where(self, event: str) -> str | None:
        """Return where an event fires; None if the host does not give it."""
        if event in self.missing:
            return None
        return self.places.get(event) or _STEP[event]

    def rows(self) -> list[tuple[str, str | None]]:
        """Return all events, with where they fire."""
        return [(event, self.where(event)) for event in EVENTS]
