"""How a session comes to the trainers of each library, without a change of its tests."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim.optimizer import register_optimizer_step_pre_hook

import hookline
from hookline import probes

__all__ = ["LIBRARIES", "Sessions"]

MAX_SESSIONS = 100  # of a test of PyTorch: some make thousands of modules, and have two minutes


class LogsEachStep(hookline.Hook):
    """Logs a number and reads two others in each step."""

    hookline_records = True

    def on_step_end(self, trainer: Any, loss: float, grad_norm: float, lr: float) -> None:
        trainer.log("suite/loss_and_norm", loss + grad_norm + lr)


class ReadsLossAndNorm(hookline.Hook):
    """Asks for what most hooks ask for, and logs nothing."""

    def on_step_end(self, loss: float, grad_norm: float, lr: float) -> None:
        pass

    def on_train_batch_start(self, trainer: Any) -> None:
        pass


class ReadsNorm(hookline.Hook):
    """For a loop whose loss does not come out of a module."""

    def on_step_end(self, grad_norm: float, lr: float) -> None:
        pass


class ReadsRate(hookline.Hook):
    """For LBFGS: hooks on its gradients are refused, because it has many of them in a step."""

    def on_step_end(self, lr: float) -> None:
        pass


class Sessions:
    """Makes sessions, and counts those of a test.

    Args:
        hooks: `all`, or `silent` for hooks that log nothing.
        runs: the folder for their runs.
    """

    def __init__(self, hooks: str, runs: str) -> None:
        self.is_silent, self.runs = hooks == "silent", runs
        self.count = 0
        self.end_test: Callable[[], None] = lambda: None

    def attach(self, *target: Any, **options: Any) -> Any:
        """Attach to a trainer of another library, or to model and optimizer."""
        is_loop = isinstance(target[0], torch.nn.Module)
        options = {**self._where(), **options}
        hooks = self._hooks(is_loop)
        if is_loop and any(isinstance(each, torch.optim.LBFGS) for each in target[1]):
            hooks = [ReadsRate(), *(each for each in hooks if isinstance(each, probes.Monitor))]
        session = hookline.attach(*target, hooks=hooks, **options)
        self.count += 1
        return session

    def attach_to_parameters(self, optimizer: torch.optim.Optimizer) -> Any:
        """Attach to an optimizer whose parameters belong to no module."""
        params = (p for group in optimizer.param_groups for p in group["params"])
        model = torch.nn.Module()
        for i, parameter in enumerate(params):
            model.register_parameter(f"p{i}", parameter)
        self.count += 1
        hooks: list[hookline.Hook] = [ReadsNorm()]
        if isinstance(optimizer, torch.optim.LBFGS):
            hooks = [ReadsRate()]
        elif not self.is_silent:
            hooks.append(hookline.GradientMonitor(log_frequency=1))
        return hookline.attach(model, optimizer, hooks=hooks, **self._where())

    def _where(self) -> dict[str, Any]:
        return {"runs": None if self.is_silent else self.runs, "report": False}

    def _hooks(self, is_loop: bool) -> list[hookline.Hook]:
        if self.is_silent:
            return [ReadsNorm() if is_loop else ReadsLossAndNorm()]
        return [
            LogsEachStep(),
            hookline.GradientMonitor(log_frequency=1),
            hookline.LRMonitor(),
            hookline.LoggingHook(),
            probes.Monitor("**"),
        ]


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a function of a class by what `make` makes of it."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))


# -- Lightning ------------------------------------------------------------------------------------


def attach_to_lightning(sessions: Sessions) -> None:
    """Attach when a trainer has its callbacks, and again before it fits once more."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.trainer.connectors.callback_connector import _CallbackConnector

    from hookline.integrations.lightning import HooklineCallback

    def on_trainer_init(original: Any) -> Any:
        def attached(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            sessions.attach(self.trainer)

        return attached

    def fit(original: Any) -> Any:
        def attached(self: Any, *args: Any, **kwargs: Any) -> Any:
            own = [each for each in self.callbacks if isinstance(each, HooklineCallback)]
            if all(each.session.has_ended for each in own):
                sessions.attach(self)
            return original(self, *args, **kwargs)

        return attached

    _replace(_CallbackConnector, "on_trainer_init", on_trainer_init)
    _replace(Trainer, "fit", fit)


# -- Hugging Face, TRL ----------------------------------------------------------------------------


def attach_to_transformers(sessions: Sessions) -> None:
    """Attach when a trainer is made, and again before it trains once more."""
    from transformers import Trainer

    from hookline.integrations.transformers import HooklineCallback

    def has_live_session(trainer: Any) -> bool:
        callbacks = trainer.callback_handler.callbacks
        own = [each for each in callbacks if isinstance(each, HooklineCallback)]
        return any(not each.session.has_ended for each in own)

    def init(original: Any) -> Any:
        def attached(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            sessions.attach(self)

        return attached

    def train(original: Any) -> Any:
        def attached(self: Any, *args: Any, **kwargs: Any) -> Any:
            if has_live_session(self):
                return original(self, *args, **kwargs)
            sessions.attach(self)
            return self.train(*args, **kwargs)  # which is the session's now

        return attached

    _replace(Trainer, "__init__", init)
    _replace(Trainer, "train", train)


# -- Ignite ---------------------------------------------------------------------------------------


def attach_to_ignite(sessions: Sessions) -> None:
    """Attach when an engine is made, and again before it runs once more.

    Model and optimizer are those that the process function refers to. An engine without any has a
    model that it does not train; one with a model and no optimizer evaluates, and has no session.
    """
    from ignite.engine import Engine

    def parts(process_function: Any) -> dict[str, Any] | None:
        found = list(_referred(process_function, 3))
        models = [each for each in found if isinstance(each, torch.nn.Module)]
        optimizers = [each for each in found if isinstance(each, torch.optim.Optimizer)]
        for model in models:
            own = {id(p) for p in model.parameters()}
            for optimizer in optimizers:
                if any(id(p) in own for g in optimizer.param_groups for p in g["params"]):
                    return {"model": model, "optimizer": optimizer}
        if models:
            return None
        model = torch.nn.Linear(1, 1)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters())}

    def attach(engine: Any) -> None:
        given = parts(engine._process_function)
        if given is not None:
            sessions.attach(engine, **given)
            vars(engine)["_suite_attached"] = True

    def init(original: Any) -> Any:
        def attached(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            with torch.random.fork_rng():
                attach(self)

        return attached

    def run(original: Any) -> Any:
        def attached(self: Any, *args: Any, **kwargs: Any) -> Any:
            if "run" in vars(self) or "_suite_attached" not in vars(self):
                return original(self, *args, **kwargs)
            with torch.random.fork_rng():
                attach(self)
            return self.run(*args, **kwargs)  # which is the session's now

        return attached

    _replace(Engine, "__init__", init)
    _replace(Engine, "run", run)


def _referred(function: Any, depth: int) -> Iterator[Any]:
    """Return what a function refers to: its closure, its globals, and its object's attributes."""
    if depth == 0 or not callable(function):
        return
    for cell in getattr(function, "__closure__", None) or ():
        try:
            value = cell.cell_contents
        except ValueError:  # empty
            continue
        yield value
        if not isinstance(value, torch.nn.Module | torch.optim.Optimizer):
            yield from _referred(value, depth - 1)
    code = getattr(function, "__code__", None)
    names = () if code is None else code.co_names
    known = getattr(function, "__globals__", {})
    yield from (known[name] for name in names if name in known)
    owner = getattr(function, "__self__", None)
    if owner is not None and not isinstance(owner, torch.nn.Module):
        yield from vars(owner).values() if hasattr(owner, "__dict__") else ()
    if isinstance(function, functools.partial):
        yield from (*function.args, *function.keywords.values())


# -- PyTorch --------------------------------------------------------------------------------------


def attach_to_torch(sessions: Sessions) -> None:
    """Attach to each module that is called with gradients, and to the optimizers that train it.

    A module without an optimizer gets one that never steps. Parameters that no called module has
    are a module of their own, from the first step of their optimizer on. Sessions end with the
    test.
    """
    attacher = _TorchAttacher(sessions)
    sessions.end_test = attacher.end_test
    optimizer_class, module_class = torch.optim.Optimizer, torch.nn.Module

    def init(original: Any) -> Any:
        def attached(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            attacher.optimizers.add(self)

        return attached

    def call(original: Any) -> Any:
        def attached(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():  # else Dynamo would trace the attaching, too
                attacher.before_call(self)
            return original(self, *args, **kwargs)

        return attached

    _replace(optimizer_class, "__init__", init)
    _replace(module_class, "__call__", call)
    register_optimizer_step_pre_hook(
        lambda optimizer, args, kwargs: attacher.before_step(optimizer)
    )


class _TorchAttacher:
    """Attaches to modules and optimizers of a test as they are used; keeps none of them alive."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._attached: weakref.WeakSet[Any] = weakref.WeakSet()  # modules and optimizers
        self._live: list[weakref.ref[Any]] = []
        self._thread = threading.get_ident()

    def before_call(self, module: torch.nn.Module) -> None:
        if module in self._attached or not self._can_attach(module):
            return
        own = {id(p) for p in module.parameters()}
        optimizers = [
            each
            for each in list(self.optimizers)
            if each not in self._attached
            and any(id(p) in own for group in each.param_groups for p in group["params"])
        ]
        if not own:
            return
        for each in (*module.modules(), *optimizers):
            self._attached.add(each)
        options: dict[str, Any] = {}
        if not optimizers:
            optimizers = [torch.optim.SGD(module.parameters(), lr=0.0)]
            self._attached.add(optimizers[0])
            options["runs"] = None  # without steps, it would be empty
        session = self._sessions.attach(module, optimizers, **options)
        self._live.append(weakref.ref(session))

    def before_step(self, optimizer: Any) -> None:
        if optimizer in self._attached or torch.compiler.is_compiling():
            return
        self._attached.add(optimizer)
        held = (p for group in optimizer.param_groups for p in group["params"])
        if not all(isinstance(p, torch.nn.Parameter) for p in held):
            return  # no module can have them
        self._live.append(weakref.ref(self._sessions.attach_to_parameters(optimizer)))

    def _can_attach(self, module: torch.nn.Module) -> bool:
        # A ParametrizationList is called before its module, which is what a user attaches to.
        other = torch.jit.ScriptModule | torch.fx.GraphModule | ParametrizationList
        is_plain = not isinstance(module, other)
        return (
            is_plain
            and self._sessions.count < MAX_SESSIONS
            and torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and not torch.jit.is_tracing()
            and torch._C._functorch.peek_interpreter_stack() is None
            and threading.get_ident() == self._thread
            and not any(torch.nn.parameter.is_lazy(p) for p in module.parameters())
        )

    def end_test(self) -> None:
        live, self._live = self._live, []
        self.optimizers.clear()
        self._attached.clear()
        for each in live:
            if (session := each()) is not None:
                session.detach()


LIBRARIES: dict[str, Callable[[Sessions], None]] = {
    "lightning": attach_to_lightning,
    "transformers": attach_to_transformers,
    "trl": attach_to_transformers,
    "ignite": attach_to_ignite,
    "torch": attach_to_torch,
}
