"""attach_next: hooks for whatever this process trains next."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

import torch

from hookline.dispatch import HookManager
from hookline.hook import Hook
from hookline.integrations.attach import session_options
from hookline.integrations.bare_loop.session import Session
from hookline.integrations.scripts.script_hooks import ScriptHooks
from hookline.integrations.scripts.startup.sitecustomize import watch


class NextSession:
    """The handle of `attach_next`: its session is there as soon as something trains.

    Leaving a `with` block ends the session, or stops waiting for it.

    Attributes:
        session: the session; None as long as nothing trains.
    """

    def __init__(self, hooks: Any, options: dict[str, Any]) -> None:
        self.session: Session | None = None
        given = {"hooks": hooks, **options}
        self._hooks = ScriptHooks(lambda _: given, strict=True, on_attach=self._attached)
        self._undo = watch(lambda _: self._hooks)
        for each in gc.get_objects():
            # A wrapper, such as Accelerate's, has no parameters of its own.
            if issubclass(type(each), torch.optim.Optimizer) and "param_groups" in vars(each):
                self._hooks.optimizer_made(each)

    def _attached(self, session: Session) -> None:
        self.session = session
        self.cancel()

    def cancel(self) -> None:
        """Wait no longer; a session that exists goes on."""
        self._undo()
        self._hooks.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()
        if self.session is not None:
            self.session.__exit__(kind, error, traceback)


def attach_next(hooks: Iterable[Hook] | HookManager = (), **options: Any) -> NextSession:
    """Attach hooks to whatever this process trains next: model and optimizer are found.

        with hookline.attach_next(hooks=[Watch()], runs="runs") as following:
            library.main()  # makes a model and trains it
        following.session.step

    A bare loop is recognised when a module that has parameters of an optimizer is called with
    gradients enabled; a trainer of Hugging Face, TRL, Lightning or Ignite when it starts to train.
    `hookline run` does the same for a script that stays as it is. Where hooks cannot be attached,
    the error is raised in the loop, before its first step.

    Args:
        hooks: hooks to register, as for `attach`.
        options: further options of `attach`, except those for model, optimizer, schedulers and
            scaler, which are found.

    Returns:
        A handle whose `session` is None until then. It works with `with`.
    """
    checked = session_options(hooks=hooks, **options)  # a mistake is an error here
    return NextSession(checked.hooks, options)
