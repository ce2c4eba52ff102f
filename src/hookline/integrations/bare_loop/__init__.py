"""Hooks in a bare training loop: `hookline.attach(model, optimizer, hooks=[…])`.

PyTorch's own hooks show when the model is called and when the optimizer steps, so the loop stays
unchanged. `attach` returns a `Session`; `step_watch` turns what is seen into the events of a step,
and `loop_checks` has what an unchanged loop does not provide, with the call on the session that
does.
"""

from hookline.integrations.bare_loop.session import LoadedCheckpoint, Session

__all__ = ["LoadedCheckpoint", "Session"]
