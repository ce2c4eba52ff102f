"""A bare training loop as a host: `hookline.attach(model, optimizer, hooks=[…])`.

PyTorch's own hooks tell when the model is called, when backward has ended and when the optimizer
steps; the loop stays as it is. `attaching` is the way in, `session` what the user holds, `context`
what events carry, and `needs` what an unchanged loop cannot tell, with the call that would.
`watch` sees the model and backward, `steps` makes the events of a step of it, `scaler` sees a
GradScaler, `losses` knows whose loss it was, `caller` which tensor backward was called on, and
`averages` has means.
"""

from hookline.integrations.bare_loop.attach import attach
from hookline.integrations.bare_loop.session import Session

__all__ = ["Session", "attach"]
