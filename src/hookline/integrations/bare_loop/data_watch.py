"""Batches of an unchanged loop: those that a `DataLoader` delivers and the model is called with.

The iterator of a `DataLoader` is watched while hooks or a run need its batches. Which batch is
trained on is decided when the model is called: it is the one that was loaded since the last call,
or, of several, the one whose tensors the model gets. A loader that is read ahead of the model has
several at once. If the batch cannot be told, there is none. Tokens are counted in the batch, or
else by what the model's first `Embedding` gets.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind
from torch.utils.hooks import RemovableHandle

from hookline.integrations.bare_loop.loop_checks import CALLS, Requirements
from hookline.integrations.bare_loop.loop_phases import Batch, LoopPhases
from hookline.loop.evaluation import count_tokens
from hookline.loop.model_watch import ModelCallback, is_compiled_in_place, models_in
from hookline.loop.patches import SharedPatch
from hookline.tensors.hidden_hooks import hide_hooks, unhide_hooks
from hookline.tensors.nested import tensors_in

if TYPE_CHECKING:
    from hookline.integrations.bare_loop.session import Session

log = logging.getLogger("hookline")

_task_id = torch._C._current_graph_task_id
_MAX_DELIVERED = 4  # batches that are kept; a loader may be read ahead of the model
_MAX_DRAWN = 1000  # batches whose indices are kept; workers draw some ahead


@dataclass(slots=True)
class _Delivery:
    """A batch that a loader has delivered."""

    batch: Any
    index: int
    loader: Any  # its iterator
    dataset: Any
    indices: Any
    seconds: float
    thread: int


class DataWatch:
    """Finds the batch of each training forward, and counts its tokens.

    Args:
        session: starts training with the first batch; its model, or several, is what is called.
        phases: begins and ends batches.
        requirements: are told that there are batches.

    Attributes:
        is_idle: whether the loop loads batches through the session, or they cannot be told.
    """

    def __init__(
        self,
        session: Session,
        phases: LoopPhases,
        requirements: Requirements,
    ) -> None:
        self._session, self._phases, self._requirements = session, phases, requirements
        self._model = session.model
        self._counts_tokens = phases.counts_tokens and not requirements.counts_batches
        self.is_idle = self._sees_calls = self._counts_inputs = False
        self._handles: list[RemovableHandle] = []
        self._hooked: list[torch.nn.Module] = []
        self._delivered: deque[_Delivery] = deque(maxlen=_MAX_DELIVERED)  # and not used yet
        self._read_ahead: WeakSet[Any] = WeakSet()  # iterators that are ahead of the model
        self._current: _Delivery | None = None
        self._datasets: list[int] = []  # their ids, in the order of their first use
        self._is_counted = self._is_taken = False

    # -- what is watched --------------------------------------------------------------------------

    def watch(self, *, batches: bool, is_compiled: bool) -> None:
        """Watch loaders and the model's calls, as long as somebody needs batches or tokens."""
        (data_patch.add if batches else data_patch.remove)(self)
        if batches == self._sees_calls:
            return
        self._remove_hooks()
        self._sees_calls = batches
        if not batches:
            return
        for model in models_in(self._model):
            if not is_compiled_in_place(model):
                self._hook(model, self._before_forward)
        embedding = next((m for m in self._model.modules() if type(m) is torch.nn.Embedding), None)
        if self._counts_tokens and embedding is not None and not is_compiled:
            self._hook(embedding, self._count_tokens)
        self._counts_inputs = self._counts_tokens and is_compiled

    def _hook(self, module: torch.nn.Module, method: Callable[..., None]) -> None:
        hide_hooks(module)
        self._hooked.append(module)
        callback: Any = ModelCallback(method)
        handle = module.register_forward_pre_hook(callback, prepend=True, with_kwargs=True)
        self._handles.append(handle)

    def _remove_hooks(self) -> None:
        while self._handles:
            self._handles.pop().remove()
            unhide_hooks(self._hooked.pop())

    def detach(self) -> None:
        """Watch nothing any more, and forget all batches."""
        data_patch.remove(self)
        self._remove_hooks()
        self._delivered.clear()
        self._datasets.clear()
        self._current = None

    # -- batches ----------------------------------------------------------------------------------

    def deliver(self, delivery: _Delivery) -> None:
        """Keep a batch until the model is called."""
        self._delivered.append(delivery)

    def take(self, batch: Any, *, trains: bool) -> None:
        """Note which batch the loop has loaded through the session, to train or to validate."""
        self.is_idle |= trains
        self._is_taken = True
        self._current = next((one for one in self._delivered if one.batch is batch), None)
        self._delivered.clear()

    def sample_indices(self, loader_idx: int, batch_idx: int) -> Any:
        """Return the indices of the batch in progress in its dataset; None if unknown."""
        current = self._current
        if current is None or current.index != batch_idx:
            return None
        is_loader = self._is_taken or self._number(current.dataset) == loader_idx
        return current.indices if is_loader else None

    def before_call(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Begin the batch that a model is called with which was compiled in place."""
        if self._sees_calls:
            self._before_forward(model, args, kwargs)

    def _before_forward(self, module: Any, args: Any, kwargs: Any) -> None:
        """Begin the batch that the model is called with."""
        if _task_id() != -1:  # activation checkpointing calls it again
            return
        is_training = torch.is_grad_enabled() and self._phases.validation is None
        self._is_counted = not is_training or self._session.loop.context.generating
        if self._delivered and not self.is_idle:
            found = self._choose(args, kwargs)
            if is_training:
                self._begin_batch(found)
        if self._counts_inputs:
            self._count_tokens(module, args, kwargs)

    def _begin_batch(self, found: _Delivery | None) -> None:
        if not self._session.started:
            self._session.begin()
        self._phases.end_batch()
        if found is None:
            self._give_up()
            return
        self._current, number = found, self._number(found.dataset)
        self._is_taken = False
        self._requirements.provided.add("batches")
        self._phases.begin_batch(
            Batch(found.batch, found.index, number, "train"), waited=found.seconds
        )

    def _give_up(self) -> None:
        """Provide no batches any more: some would be wrong."""
        if self._current is not None:
            log.warning(
                "The batches of this loop cannot be told from others any more, so hooks do not get "
                "them from now on. %s",
                CALLS["batches"],
            )
        self.is_idle = True
        self._delivered.clear()
        self._current = None
        self._phases.set_batch(None)

    def _choose(self, args: Any, kwargs: Any) -> _Delivery | None:
        """Return the batch that the model is called with; None if that cannot be told."""
        newest, is_single = self._delivered[-1], len(self._delivered) == 1
        if is_single and newest.thread == get_ident() and newest.loader not in self._read_ahead:
            self._delivered.clear()
            return newest
        loaders = Counter(id(one.loader) for one in self._delivered)
        self._read_ahead.update(d.loader for d in self._delivered if loaders[id(d.loader)] > 1)
        given = {_storage(tensor) for tensor in tensors_in((args, kwargs))}
        storages = [(one, map(_storage, tensors_in(one.batch))) for one in self._delivered]
        fitting = [one for one, of_batch in storages if not given.isdisjoint(of_batch)]
        if len(fitting) != 1:
            return None
        while self._delivered.popleft() is not fitting[0]:
            pass
        return fitting[0]

    def _number(self, dataset: Any) -> int:
        if id(dataset) not in self._datasets:
            self._datasets.append(id(dataset))
        return self._datasets.index(id(dataset))

    # -- tokens -----------------------------------------------------------------------------------

    def _count_tokens(self, module: Any, args: Any, kwargs: Any) -> None:
        """Count the tokens of a forward, unless its batch has them; once in each forward."""
        if self._is_counted or _task_id() != -1:
            return
        self._is_counted = True
        batch = self._phases.batch
        if batch is not None and batch.tokens is not None:
            return
        tokens = count_tokens(args or kwargs) or count_tokens(list(kwargs.values()))
        if tokens is not None:
            self._phases.add_tokens(tokens)


def _storage(tensor: torch.Tensor) -> Any:
    """Return a value that tensors have in common which share memory."""
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # sparse, or without data
        return id(tensor)


# -- the iterators of loaders ---------------------------------------------------------------------


_drawn: WeakKeyDictionary[Any, dict[int, Any]] = WeakKeyDictionary()
"""The indices that iterators have drawn from their samplers, by the number of the batch."""


def _replace(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def deliver(self: Any) -> Any:
        began = perf_counter()
        batch = method(self)
        seconds, index = perf_counter() - began, self._num_yielded - 1
        indices = _drawn.get(self, {}).get(index)
        delivery = _Delivery(batch, index, self, self._dataset, indices, seconds, get_ident())
        for watch in data_patch:
            watch.deliver(delivery)
        return batch

    @functools.wraps(method)
    def draw(self: Any) -> Any:
        index = method(self)
        if self._dataset_kind == _DatasetKind.Map and getattr(self, "_in_order", True):
            drawn = _drawn.setdefault(self, {})
            number = getattr(self, "_send_idx", self._num_yielded)
            drawn[number] = index
            drawn.pop(number - _MAX_DRAWN, None)
        return index

    return deliver if method.__name__ == "__next__" else draw


data_patch: SharedPatch[DataWatch] = SharedPatch(
    lambda watches: [(_BaseDataLoaderIter, "__next__"), (_BaseDataLoaderIter, "_next_index")],
    _replace,
)
