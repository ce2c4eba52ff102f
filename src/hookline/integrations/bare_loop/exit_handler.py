"""Ends sessions that are still attached when the interpreter exits."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hookline.integrations.bare_loop.session import Session

__all__ = ["detach_at_exit"]


def detach_at_exit(session: Session) -> Callable[[], None]:
    """End the session when the interpreter exits; return a function that cancels this.

    A script may use `attach` without `with` and never detach. The checkpoint that was requested in
    the last step is saved then, and the run gets its status.
    """
    reference, process = weakref.ref(session), os.getpid()

    def end() -> None:
        attached = reference()
        if attached is not None and process == os.getpid():  # a forked process has a copy only
            error = _uncaught_error()
            attached.__exit__(type(error) if error is not None else None, error, None)

    atexit.register(end)
    return partial(atexit.unregister, end)


def _uncaught_error() -> BaseException | None:
    """Return the exception that ended the script."""
    if hasattr(sys, "ps1"):  # interactive: the last exception has not ended the program
        return None
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return error if isinstance(error, BaseException) else None
