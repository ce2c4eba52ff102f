"""Trainers that a script may use: what their integrations need, when they start to train."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from hookline.errors import LoopError
from hookline.integrations.attach import attach
from hookline.integrations.library_session import LibrarySession
from hookline.integrations.scripts.loop_watch import find_parts, has_parameters
from hookline.loop.patches import find_wrapper

Parts = Mapping[str, Any]
Optimizers = list[torch.optim.Optimizer]


def attach_to(trainer: Any, options: Mapping[str, Any]) -> LibrarySession:
    """Attach to a trainer whose method that trains was called; return the session."""
    if getattr(trainer, "hp_search_backend", None) is not None:
        raise LoopError(
            "hyperparameter_search starts training several times, and a session belongs to one. "
            "Search without hooks."
        )
    session = attach(trainer, **options)
    assert isinstance(session, LibrarySession)
    return session


def find_run(original: Callable[..., Any], trainer: Any) -> Callable[..., Any]:
    """Return the method that trains, as a session has wrapped it on this trainer.

    The trainer's own is not called: that of a subclass may be running, and has called `original`.
    """
    run, wrapper = partial(original, trainer), find_wrapper(trainer, original.__name__)
    return run if wrapper is None else partial(wrapper, run)


# -- what an engine of Ignite trains --------------------------------------------------------------


def find_parts_of(trainer: Any, optimizers: Optimizers) -> Parts | None:
    """Return the options that `attach` needs for a trainer; None for an engine that does not train.

    An engine does not know its parts: they are those that its process function refers to.
    """
    if "_process_function" not in vars(trainer):
        return {}
    referred = list(_referred(_process_function(trainer), 3))
    found = [each for each in optimizers if any(each is other for other in referred)]
    models = _trained_models(referred, found)
    if not models:
        return None
    evaluators = _find_evaluators(trainer, models)
    return {
        "model": models[0] if len(models) == 1 else models,
        "optimizer": found,
        "evaluator": evaluators[0] if len(evaluators) == 1 else None,
        **find_parts(found),
    }


def _trained_models(referred: list[Any], optimizers: Optimizers) -> list[torch.nn.Module]:
    """Return the outermost of these modules that have parameters of the optimizers."""
    models: dict[int, torch.nn.Module] = {
        id(each): each
        for each in referred
        if isinstance(each, torch.nn.Module) and has_parameters(each, optimizers)
    }
    inner = {id(part) for each in models.values() for part in list(each.modules())[1:]}
    return [each for each in models.values() if id(each) not in inner]


def _find_evaluators(engine: Any, models: list[torch.nn.Module]) -> list[Any]:
    """Return the other engines that call these models."""
    kind = next(each for each in type(engine).__mro__ if each.__module__ == "ignite.engine.engine")
    others = [each for each in gc.get_objects() if issubclass(type(each), kind)]
    own = set(map(id, models))
    return [
        each
        for each in others
        if each is not engine
        and any(id(one) in own for one in _referred(_process_function(each), 3))
    ]


def _process_function(engine: Any) -> Any:
    return vars(engine)["_process_function"]


def _referred(function: Any, depth: int) -> Iterator[Any]:
    """Yield what a function refers to: its closure, its globals, and its object's attributes."""
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
    code, known = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    yield from (known[name] for name in (code.co_names if code else ()) if name in known)
    owner = getattr(function, "__self__", None)
    if owner is not None and not isinstance(owner, torch.nn.Module) and hasattr(owner, "__dict__"):
        yield from vars(owner).values()
    if isinstance(function, partial):
        yield from (*function.args, *function.keywords.values())
        yield from _referred(function.func, depth - 1)
