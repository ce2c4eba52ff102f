"""The tokens that a trainer has trained on, as far as they are known."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from hookline.loop.event_context import EventContext
from hookline.tensors.nested import describe_structure

__all__ = ["TokenCount"]

log = logging.getLogger("hookline")


class TokenCount:
    """Counts tokens, and provides `tokens_seen` in the context while every batch's are known.

    Attributes:
        count_batch: returns the tokens of a batch; None if the trainer does not count.
        count: the number of tokens trained on.
        is_known: whether the tokens of all batches could be counted.
    """

    def __init__(self, count_batch: Callable[[Any], int | None] | None) -> None:
        self.count_batch = count_batch
        self.context: EventContext
        self._has_warned = False
        self.count, self.is_known = 0, True

    def restart(self, count: int = 0) -> None:
        """Count from here."""
        self.count, self.is_known = count, True
        self.context.provide("tokens_seen", None if self.count_batch is None else count)

    def add(self, tokens: int | None) -> None:
        """Count a batch; None if its tokens are not known."""
        if tokens is not None:
            self.count += tokens
            if self.is_known:
                self.context.tokens_seen = self.count
        elif self.is_known:  # else it was said before: this is called for every batch
            self.is_known = False
            self.context.provide("tokens_seen", None)

    def read_absent(self, name: str) -> Any:
        """Return what the context does not have: the count as far as it is known, no loss yet."""
        if name == "loss":
            return None
        if name != "tokens_seen":
            raise AttributeError(f"The event context has no '{name}'.")
        if not self.is_known and not self._has_warned:
            self._has_warned = True
            log.warning(
                "A hook reads tokens_seen, which is not known for %s. Give Trainer(tokens_fn="
                "lambda batch: …), which returns the tokens of a batch. Hooks get %d.",
                describe_structure(self.context.batch),
                self.count,
            )
        return self.count
