"""Hooks in a bare training loop: `hookline.attach(model, optimizer, hooks=[…])`.

PyTorch's own hooks show when the model is called, when backward has ended and when the optimizer
steps, so the loop stays unchanged. `attach` returns a `Session`; `attached_loop` connects it to the
loop, `step_watch` turns PyTorch's hooks into the events of a step, and `requirements` has what an
unchanged loop does not provide, with the call on the session that does.
"""

from hookline.integrations.bare_loop.attach import attach_to_loop
from hookline.integrations.bare_loop.loaded_checkpoint import LoadedCheckpoint
from hookline.integrations.bare_loop.session import Session

__all__ = ["LoadedCheckpoint", "Session", "attach_to_loop"]
