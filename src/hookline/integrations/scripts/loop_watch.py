"""LoopWatch: finds the models that a script trains in a loop of its own.

    an optimizer is made        calls of modules, and optimizer steps, are watched from now on
    a module is called          with gradients, and it has parameters of such an optimizer: a model
    all models are known        the session begins, before that call; nothing is watched any more

`torch.nn.Module.__call__` is replaced meanwhile, and put back during each call: only the outermost
call is seen, and nothing of this is ever compiled. (A global forward hook would be: a model that is
evaluated before it is trained would be compiled twice.)
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from hookline.integrations.bare_loop.loop_parts import foreign_optimizers
from hookline.loop.event_context import parameters_of

PATIENCE = 10
"""Steps of other optimizers after which an optimizer without steps, or models, is left out."""

_STRANGE_STEPS = 2

Found = Callable[[list[torch.nn.Module], list[torch.optim.Optimizer], int], None]


class LoopWatch:
    """Calls a function when models and optimizers of a loop are known, before a forward.

    Where the models of several optimizers become known one by one, or a closure calls the model
    within the step, this is before a later step. An optimizer is bound to the outermost modules
    that have its parameters; it is left out if others have stepped `PATIENCE` times without it.

    Args:
        found: gets the models, the optimizers, and how many steps were not seen.
        failed: gets the error if a module or an optimizer is too unusual to be watched.
        finds_strangers: take the modules that the loop calls if none has the parameters of an
            optimizer that steps: it was made for others.

    Attributes:
        optimizers: those that were made and are not attached, with the number of their steps; they
            are not kept alive.
        is_paused: whether a known trainer trains, whose calls and optimizers are its own.
    """

    def __init__(
        self, found: Found, failed: Callable[[Exception], object], *, finds_strangers: bool = False
    ) -> None:
        self._found, self._failed, self._finds_strangers = found, failed, finds_strangers
        self.optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int]
        self.optimizers = weakref.WeakKeyDictionary()
        self.is_paused = False
        self._models: list[weakref.ref[torch.nn.Module]] = []
        self._threads: weakref.WeakKeyDictionary[torch.nn.Module, int]  # that have called models
        self._threads = weakref.WeakKeyDictionary()
        self._strangers: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._place = _Place()
        self._has_collected = self._is_attaching = False
        self._handles: list[RemovableHandle] = []
        self._lock = threading.RLock()
        self._calls = _OutermostCalls(partial(self._notice, self._before_call))

    # -- what is noticed --------------------------------------------------------------------------

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Notice an optimizer."""
        if not self.is_paused:
            self._notice(self._add, optimizer)

    def _notice(self, notice: Callable[..., None], *args: Any) -> None:
        """Call one of these methods; an error of it is not the script's."""
        with self._lock:
            self._is_attaching = False
            try:
                notice(*args)
            except Exception as error:
                if self._is_attaching:  # in `found`, which decides what is raised
                    raise
                self.stop()
                self.optimizers.clear()
                self._failed(error)

    def _add(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizers.setdefault(optimizer, 0)
        self._watch_steps()
        self._calls.start()

    def _watch_steps(self) -> None:
        if not self._handles:
            self._handles = [
                register_optimizer_step_pre_hook(partial(self._notice, self._before_step)),
                register_optimizer_step_post_hook(partial(self._notice, self._after_step)),
            ]

    def stop(self) -> None:
        """Watch nothing, until another optimizer is made."""
        self._calls.stop()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._models.clear()
        self._strangers.clear()
        self._place = _Place()
        self._has_collected = False

    def _before_call(self, module: torch.nn.Module) -> None:
        if self.is_paused or not _is_plain_call():
            return
        is_between_steps = not self._place.called_since_step and not self._place.is_stepping
        if not has_parameters(module, list(self.optimizers)):
            if self._finds_strangers and any(p.requires_grad for p in module.parameters()):
                self._strangers.add(module)
                if is_between_steps:
                    self._attach_strangers()
            return
        self._threads[module] = get_ident()
        self._place.called_since_step = True
        if any(map(torch.nn.parameter.is_lazy, module.parameters())):
            return  # its parameters are made in this call
        self._add_model(module)
        if is_between_steps:
            self._attach_if_known()

    def _add_model(self, module: torch.nn.Module) -> None:
        """Add a model, instead of those that it contains."""
        known = self._known_models()
        if any(module is part for each in known for part in each.modules()):
            return  # it is known, or a part of a model that the loop calls, too
        inner = set(map(id, module.modules()))
        known = [each for each in known if id(each) not in inner]
        self._models = [weakref.ref(each) for each in (*known, module)]

    def _known_models(self) -> list[torch.nn.Module]:
        return [model for each in self._models if (model := each()) is not None]

    def _live_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that may belong to this thread's loop: another may train, too."""
        elsewhere = {
            id(parameter)
            for model, thread in self._threads.items()
            if thread != get_ident()
            for parameter in model.parameters()
        }
        return [each for each in self.optimizers if not _trained(each) & elsewhere]

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.is_paused or optimizer not in self.optimizers:
            return
        if not self._calls.is_active:  # it was left out before
            self._calls.start()
        elif not self._place.called_since_step:  # a closure will call the model within the step
            self._attach_if_known()
        self._place.is_stepping = optimizer in self.optimizers

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in self.optimizers:
            self.optimizers[optimizer] += 1
            self._place.called_since_step = self._place.is_stepping = False

    # -- what is known ----------------------------------------------------------------------------

    def _attach_if_known(self) -> None:
        """Attach between two steps, if it is known what the loop trains."""
        if not self._has_collected and _overlap(list(self.optimizers)):
            self._has_collected = True
            gc.collect()  # some of them may be garbage already
        live = self._live_optimizers()
        used = [each for each in live if self.optimizers[each]]
        models = self._known_models()
        covered = {id(p) for model in models for p in model.parameters()}
        bound = [each for each in live if _trained(each) & covered]
        if not used:
            if not all(_trained(each) <= covered for each in live) or _overlap(live):
                return
            used = live
        elif max(self.optimizers[each] for each in used) < PATIENCE:
            rest = [each for each in live if each not in used and not _overlap([*used, each])]
            if rest:
                return
        used = [each for each in bound if each in used]
        models = [each for each in models if has_parameters(each, used)]
        if used and models:
            self._attach(models, used)

    def _attach_strangers(self) -> None:
        """Attach to models without parameters of the optimizers, which have stepped several times.

        Outermost modules only: those within others are called by them.
        """
        stepped = [each for each, steps in self.optimizers.items() if steps >= _STRANGE_STEPS]
        inner = {part for each in self._strangers for part in each.modules() if part is not each}
        models = [each for each in self._strangers if each not in inner]
        if stepped and not self._known_models() and len(stepped) == len(self.optimizers):
            for each in stepped:
                foreign_optimizers.add(each)
            self._attach(models, stepped)

    def _attach(
        self, models: list[torch.nn.Module], optimizers: list[torch.optim.Optimizer]
    ) -> None:
        missed = max(self.optimizers.pop(each) for each in optimizers)
        self.stop()
        if self.optimizers:  # they may begin to step
            self._watch_steps()
        self._is_attaching = True
        self._found(models, optimizers, missed)

    def describe(self) -> str:
        """Return which optimizers were made and not attached, for a message."""
        kinds = [type(each).__name__ for each in self.optimizers]
        return ", ".join(sorted(kinds)) or "none that is still alive"


class _Place(threading.local):
    """Where the loop of a thread stands."""

    called_since_step = is_stepping = is_in_call = False


class _OutermostCalls:
    """Calls a function before each outermost call of a module, with gradients enabled."""

    def __init__(self, before: Callable[[torch.nn.Module], None]) -> None:
        self._before = before
        self.is_active = False
        self._place = _Place()
        self._original: Any = None
        self._replacement: Any = None

    def start(self) -> None:
        """Replace `Module.__call__`."""
        self.is_active = True
        if self._replacement is None:
            self._original = torch.nn.Module.__call__
            self._replacement = self._make_replacement(self._original)
        self._replace(self._original, self._replacement)

    def stop(self) -> None:
        """Put `Module.__call__` back."""
        self.is_active = False
        self._replace(self._replacement, self._original)

    @staticmethod
    def _replace(before: Any, after: Any) -> None:
        """Replace it, unless somebody else has done so since."""
        if torch.nn.Module.__call__ is before:
            torch.nn.Module.__call__ = after  # type: ignore[method-assign]

    def _make_replacement(self, original: Any) -> Any:
        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            # In a compiled step, this is not part of its graph. Another thread may have put this
            # back while a call of this thread goes on.
            if torch.compiler.is_compiling() or self._place.is_in_call:
                return original(module, *args, **kwargs)
            self._place.is_in_call = True
            self._replace(call, original)
            try:
                if torch.is_grad_enabled():
                    self._before(module)
                return original(module, *args, **kwargs)
            finally:
                self._place.is_in_call = False
                if self.is_active:
                    self._replace(original, call)

        return call


def find_parts(optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return the schedulers of these optimizers, and the scaler, if one is enabled."""
    schedulers: list[Any] = []
    scalers: list[Any] = []
    for each in gc.get_objects():
        kind = type(each)
        if issubclass(kind, torch.optim.lr_scheduler.LRScheduler):
            schedulers.append(each)
        elif issubclass(kind, torch.amp.GradScaler):
            scalers.append(each)
    inner = {id(part) for each in schedulers for part in getattr(each, "_schedulers", ())}
    own = [
        each
        for each in schedulers
        if id(each) not in inner and any(vars(each).get("optimizer") is o for o in optimizers)
    ]
    enabled = [each for each in scalers if each.is_enabled()]
    return {"schedulers": own, "scaler": enabled[0] if len(enabled) == 1 else None}


def _is_plain_call() -> bool:
    """Return whether a module is called to train it, and not traced or transformed."""
    is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    return not is_traced and not torch._C._are_functorch_transforms_active()


def _trained(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the ids of the parameters that an optimizer trains."""
    return {id(p) for p in parameters_of(optimizer) if p.requires_grad}


def _overlap(optimizers: list[torch.optim.Optimizer]) -> bool:
    """Return whether two optimizers share a parameter: then not all of them are in use."""
    sets = [_trained(each) for each in optimizers]
    return len(set[int]().union(*sets)) < sum(map(len, sets))


def has_parameters(model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> bool:
    """Return whether a module has parameters that these optimizers train."""
    own = {id(parameter) for parameter in model.parameters()}
    return any(own & _trained(each) for each in optimizers)
