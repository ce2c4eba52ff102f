"""The session of a callback that a host takes: `Trainer(callbacks=[HooklineCallback([…])])`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hookline.integrations.bare_loop.attach import session_options
from hookline.integrations.hosts.host_events import Host
from hookline.integrations.hosts.host_session import HostSession

__all__ = ["make_callback_session"]


def make_callback_session(
    host: Host,
    hooks: Any,
    *,
    batch_metrics: Callable[[], Mapping[str, Any]] | None = None,
    allow_missing: bool = False,
    watch_generation: bool = False,
    **options: Any,
) -> HostSession:
    """Return a session whose options are those of `hookline.attach`, checked."""
    return HostSession(
        host,
        allow_missing=allow_missing,
        watch_generation=watch_generation,
        forwards_logs=True,
        batch_metrics=batch_metrics,
        **session_options(hooks, **options),
    )
