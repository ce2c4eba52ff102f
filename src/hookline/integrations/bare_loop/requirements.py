"""What an unchanged loop does not provide, and the call on the session that provides it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hookline.dispatch import HookManager
from hookline.errors import NotSuppliedError
from hookline.events import EVENTS, FLOWS

__all__ = ["CALLS", "Requirements", "calls_for"]

CALLS: Mapping[str, str] = {
    "epoch": "Wrap each epoch: `with session.epoch():`.",
    "batches": "Load batches through the session: `for batch in session.batches(loader):`.",
    "backward": "Let the session run backward: `session.backward(loss)` instead of "
    "`loss.backward()`.",
    "forward": "Attach what the loop calls: the compiled or wrapped model, not the one inside; and "
    "call it as `model(x)`, not `model.forward(x)`.",
    "validation": "Wrap validation: `with session.validation():`.",
    "checkpoint": "Save with `session.save_checkpoint()`, or say when the loop has saved by "
    "itself: `session.notify_checkpoint_saved(path)`.",
    "resumed": "Load with `session.load_checkpoint()`, or say when the loop has loaded by "
    "itself: `session.notify_checkpoint_loaded(path, step=…)`.",
    "clip": "Clip with torch's functions, or let the session clip: `session.clip(max_norm)`.",
    "tokens": "Load batches with `input_ids`, or with integer inputs of two or more dimensions, "
    "through `session.batches(loader)`, or say how to count: `attach(…, tokens=lambda batch: …)`.",
    "config": "Give it to attach: `attach(…, config=…)`.",
    "log": "Report it: `session.log('loss', value)` before the batch ends.",
    "run": "This loop has no run folder. Give it one: `attach(…, runs='runs')`.",
}

_EVENTS = {
    "on_epoch_start": "epoch",
    "on_epoch_end": "epoch",
    "on_train_batch_start": "batches",
    "on_train_batch_end": "batches",
    "on_before_backward": "backward",
    "on_validation_start": "validation",
    "on_validation_batch_start": "validation",
    "on_validation_batch_end": "validation",
    "on_validation_end": "validation",
    "on_checkpoint_save": "checkpoint",
    "on_checkpoint_load": "resumed",
}

_ARGUMENTS = {
    "epoch": "epoch",
    "batch": "batches",
    "batch_idx": "batches",
    "dataloader_idx": "batches",
    "dataloader_name": "batches",
    "tokens_seen": "tokens",
    "config": "config",
    "run": "run",
}

_MAY_COME_LATER = {"validation", "checkpoint", "resumed"}


class Requirements:
    """What hooks need of a loop, what it provides, and what to do about the rest.

    Attributes:
        provided: the keys of `CALLS` for what the loop provides.
        calls: what to do about each need, where it is not a call of the loop.
        why_no_loss: the end of the sentence that the loop has not provided the loss.
    """

    def __init__(self) -> None:
        self.provided: set[str] = set()
        self.calls: Mapping[str, str] = CALLS
        self.why_no_loss = f". {CALLS['backward']}"

    def read_absent(self, name: str) -> Any:
        """Raise for an argument that this loop has not provided."""
        if name == "loss":
            raise NotSuppliedError(f"This loop has not provided 'loss'{self.why_no_loss}")
        if name not in _ARGUMENTS:
            raise AttributeError(f"The event context has no '{name}'.")
        call = self.calls[_ARGUMENTS[name]]
        raise NotSuppliedError(f"This loop has not provided '{name}'. {call}")

    def unmet(self, hooks: HookManager, needs: Iterable[str] = CALLS) -> Iterator[str]:
        """Yield a line for everything that hooks need and the loop has not provided.

        Args:
            hooks: the hooks.
            needs: the keys of `CALLS` to look at; by default all.
        """
        looked_at = set(needs) - self.provided
        yield from self._waiting(hooks, looked_at - _MAY_COME_LATER, "needs")
        for event, _ in _listening(hooks):
            if _EVENTS.get(event) in looked_at - _MAY_COME_LATER:
                continue  # its arguments come with it
            known = {"epoch", "tokens"} if event == "on_train_start" else set[str]()
            for argument, asking in hooks.required_arguments(event).items():
                need = _ARGUMENTS.get(argument)
                if need in looked_at - known:
                    yield f"{', '.join(asking)} asks for '{argument}'. {self.calls[need]}"

    def pending(self, hooks: HookManager) -> Iterator[str]:
        """Yield a line for everything that may still come: validation and checkpoints."""
        yield from self._waiting(hooks, _MAY_COME_LATER - self.provided, "waits for")

    def _waiting(self, hooks: HookManager, needs: set[str], verb: str) -> Iterator[str]:
        """Yield a line for each of these needs that hooks have events for."""
        by_need: dict[str, list[tuple[str, list[str]]]] = {}
        for event, listeners in _listening(hooks):
            if (need := _EVENTS.get(event)) is not None and need in needs:
                by_need.setdefault(need, []).append((event, listeners))
        for need, events in by_need.items():
            labels = ", ".join(label for _, listeners in events for label in listeners)
            names = " and ".join(event for event, _ in events)
            yield f"{labels} {verb} {names}. {self.calls[need]}"


def calls_for(event: str, arguments: Iterable[str]) -> set[str]:
    """Return the keys of `CALLS` that an event with these arguments needs in an unchanged loop."""
    needs = {_ARGUMENTS[argument] for argument in arguments if argument in _ARGUMENTS}
    if event == "on_train_start":
        needs -= {"epoch", "tokens"}
    return needs | ({_EVENTS[event]} if event in _EVENTS else set())


def _listening(hooks: HookManager) -> Iterator[tuple[str, list[str]]]:
    for event in (*EVENTS, *FLOWS):
        if listeners := hooks.listeners(event, needed=True):
            yield event, listeners
