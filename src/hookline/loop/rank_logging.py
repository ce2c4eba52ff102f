"""The log of several processes: what all of them would say is logged by rank 0 only."""

from __future__ import annotations

import logging

__all__ = ["log_as_rank"]


class _RankFilter(logging.Filter):
    """Drops warnings and less in other ranks than 0, and adds the rank to the rest.

    Warnings are about settings, data and checkpoints, which are the same in all processes. Errors
    are failures of this process. A warning about this process alone has `extra={"own_rank": True}`.
    """

    rank = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether this process logs the record."""
        if self.rank == 0:
            return True
        if record.levelno < logging.ERROR and not getattr(record, "own_rank", False):
            return False
        if not getattr(record, "rank", None):
            record.rank = self.rank
            record.msg = f"[rank {self.rank}] {record.msg}"
        return True


_FILTER = _RankFilter()


def log_as_rank(rank: int) -> None:
    """Have the logger `hookline` log as one of several processes."""
    _FILTER.rank = rank
    logging.getLogger("hookline").addFilter(_FILTER)  # once, also if it is called again
