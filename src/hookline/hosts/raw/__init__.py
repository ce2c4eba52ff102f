"""A bare training loop as a host: `hookline.attach(model, optimizer, hooks=[…])`.

PyTorch's own hooks tell when the model is called, when backward has ended and when the optimizer
steps; the loop stays as it is. `session` is what the user holds, `moment` what events carry, and
`needs` what an unchanged loop cannot tell, with the call that would. `watch` sees model and
backward, `scaler` a GradScaler, `caller` which tensor backward was called on.
"""

from hookline.hosts.raw.session import Session, attach

__all__ = ["Session", "attach"]
