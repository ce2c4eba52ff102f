"""Rule 5, replicas agree: processes that train one model have equal weights and different data."""

from __future__ import annotations

import gc
import zlib
from array import array
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hookline.hooks.lint.finding import Check, in_due_steps
from hookline.hooks.lint.torch_watch import LoadedBatch, ModuleCall
from hookline.hooks.lint.training_view import TrainingView
from hookline.tensors.nested import tensors_in
from hookline.tensors.sharded import needs_collective

_STEPS_IN_A_ROW = 3
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class ReplicasDiffer(Check):
    """Weights that all processes should have equally differ between them.

    The same gradients of the same weights keep them equal bit for bit. Once one differs, each
    process trains another model. Statistics of BatchNorm that differ, where all processes evaluate
    the model, are a warning.

    Bug:
        torch.manual_seed(rank)
        model = Net()  # the gradients are averaged, but each process has its own initial weights
    Fix: Wrap the model in `DistributedDataParallel` with `broadcast_buffers`, and call the wrapper,
        not its `.module`.
    Ignore: When processes train different models on purpose.
    """

    needs_ranks = True

    def setup(self) -> None:
        self._samples: dict[tuple[str, str], Tensor] = {}  # by kind and name
        self._start: dict[str, int] = {}
        self._bypassed: set[int] | None = None  # parameters of wrappers that are not called
        self._has_evaluated = False

    def on_train_start(self) -> None:
        self._sample_weights("start")
        self._read(self._keep_start)

    def on_model_call(self, call: ModuleCall) -> None:
        self._has_evaluated |= not (call.has_gradients or call.module.training)

    def _sample_weights(self, kind: str) -> None:
        for place in _replicated(self.view):
            self._samples[kind, place.name] = self.sample(place.tensor)

    def _sample_gradients(self, kind: str) -> None:
        for place in _replicated(self.view):
            gradient = place.tensor.grad
            if gradient is not None and not gradient.is_sparse:
                self._samples[kind, place.name] = self.sample(gradient)

    def _read(self, judge: Any) -> None:
        samples, self._samples = self._samples, {}
        self.read(list(samples.values()), judge, list(samples))

    def _keep_start(self, values: list[list[float]], keys: list[tuple[str, str]]) -> None:
        self._start = {name: _hash(value) for value, (_, name) in zip(values, keys, strict=True)}

    @in_due_steps
    def on_after_backward(self) -> None:
        self._sample_gradients("computed")

    @in_due_steps
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._sample_gradients("used")

    @in_due_steps
    def on_step_end(self) -> None:
        self.on_train_end()

    def on_train_end(self) -> None:
        model = self.view.model
        if self._bypassed is None:
            self._bypassed = _parameters_of_other_wrappers(model)
        self._sample_weights("weights")
        is_synced = isinstance(model, DistributedDataParallel) and _broadcasts_buffers(model)
        for module, name in {} if is_synced else self.view.module_names.items():
            if type(module) in _BATCH_NORMS and isinstance(module.running_mean, Tensor):
                self._samples["statistics", name] = self.sample(module.running_mean)
        self._read(self._exchange)

    def _exchange(self, values: list[list[float]], keys: list[tuple[str, str]]) -> None:
        mine: dict[str, Any] = {"start": self._start, "has evaluated": self._has_evaluated}
        mine |= {kind: {} for kind in ("weights", "computed", "used", "statistics")}
        for (kind, name), value in zip(keys, values, strict=True):
            is_gradient = kind in ("computed", "used")
            if not is_gradient or any(value if isinstance(value, list) else [value]):
                mine[kind][name] = _hash(value)
        self.view.compare_ranks(self.id, mine, self._judge)

    def _judge(self, ranks: list[dict[str, Any]]) -> None:
        known = set.intersection(*(set(rank["weights"]) for rank in ranks))
        agree = _agreeing(ranks, "weights") | _agreeing(ranks, "statistics")
        different = [name for name in ranks[0]["weights"] if name in known - agree]
        if different:
            self._judge_weights(ranks, different, len(known))
        statistics = [name for name in ranks[0]["statistics"] if name not in agree]
        if statistics and not different and all(rank["has evaluated"] for rank in ranks):
            self.find(
                statistics,
                f"The running statistics of {len(statistics)} BatchNorm modules differ between "
                f"{len(ranks)} processes, and all of them evaluate the model.",
                severity="warning",
            )

    def _judge_weights(self, ranks: list[Any], different: list[str], count: int) -> None:
        started = _agreeing(ranks, "start")
        # Equal gradients of equal weights: every rank computes them for its own replica.
        same_gradients = _agreeing(ranks, "used") | (_agreeing(ranks, "computed") & started)
        wrapped = self._bypassed or set()
        bypassed = {place.name for place in self.view.parameters if id(place.tensor) in wrapped}
        sure = same_gradients | bypassed | (started if 2 * len(different) <= count else set())
        is_ddp = isinstance(self.view.model, DistributedDataParallel)
        found = [name for name in different if is_ddp or name in sure]
        if not found:
            return
        why = "and so do their gradients"
        if set(found) & same_gradients:
            why = "although they got the same gradients"
        elif set(found) & bypassed:
            why = "as what is inside DistributedDataParallel is called, not the wrapper"
        self.find(
            found,
            f"{len(found)} of {count} weights differ between {len(ranks)} processes after this "
            f"step, {why}.",
        )


class SameDataOnAllRanks(Check):
    """All processes train on the same batches.

    Data-parallel training averages the gradients of different batches. With the same batch on all
    ranks, the others compute what rank 0 computes already.

    Bug:
        loader = DataLoader(dataset, batch_size=32, shuffle=True)  # with the same seed on all ranks
        model = DistributedDataParallel(model)
    Fix: Give the loader a `DistributedSampler`; split an `IterableDataset` by rank.
    Ignore: When processes share a batch on purpose, as in tensor parallelism.
    """

    needs_ranks = True

    def setup(self) -> None:
        self._batch: LoadedBatch | None = None
        self._trained: list[Tensor] = []
        self._loader = ""
        self._seen: set[int] = set()

    @in_due_steps
    def on_batch_loaded(self, loaded: LoadedBatch) -> None:
        self._batch = loaded

    @in_due_steps
    def on_before_backward(self, loss: Any) -> None:
        batch, self._batch = self._batch, None
        if batch is not None:
            self._loader = f"DataLoader of {type(batch.loader.dataset).__name__}"
            self._trained += [self.sample(tensor) for tensor in tensors_in(batch.batch)][:4]
        elif not self._loader and isinstance(loss, Tensor) and loss.numel() == 1:
            self._trained.append(self.sample(loss))

    @in_due_steps
    def on_step_end(self) -> None:
        trained, self._trained = self._trained, []
        if trained and _is_data_parallel(self.view.model):
            self.read(trained, self._exchange)

    def _exchange(self, values: list[list[float]]) -> None:
        self.view.compare_ranks(self.id, [_hash(value) for value in values], self._judge)

    def _judge(self, ranks: list[list[int]]) -> None:
        mine = hash(tuple(ranks[0]))
        is_new = mine not in self._seen  # full-batch training repeats its batch
        self._seen.add(mine)
        are_equal = all(rank == ranks[0] for rank in ranks)
        if self.in_a_row(are_equal and is_new) >= _STEPS_IN_A_ROW:
            self.find(
                self._loader or "the batches",
                f"All {len(ranks)} processes had the same batch in {_STEPS_IN_A_ROW} steps in a "
                "row, another one in each step.",
            )


def _replicated(view: TrainingView) -> list[Any]:
    return [place for place in view.parameters if not needs_collective(place.tensor)]


def _hash(values: Any) -> int:
    """Return a number that equal lists of numbers have in common, NaN included."""
    numbers = values if isinstance(values, list) else [values]
    return zlib.crc32(array("d", numbers).tobytes())


def _agreeing(ranks: list[dict[str, Any]], key: str) -> set[str]:
    """Return the names whose values are the same on all ranks."""
    first, *others = (rank[key] for rank in ranks)
    return {name for name in first if all(each.get(name) == first[name] for each in others)}


def _broadcasts_buffers(model: Any) -> bool:
    older = getattr(model, "broadcast_buffers", True)
    return bool(getattr(model, "forward_sync_buffers", older))


def _parameters_of_other_wrappers(model: nn.Module) -> set[int]:
    """Return the parameters of DDP objects that are no part of the model: these are not called."""
    own = set(map(id, model.modules()))
    wrappers = [each for each in gc.get_objects() if type(each) is DistributedDataParallel]
    return {id(p) for each in wrappers if id(each) not in own for p in each.parameters()}


def _is_data_parallel(model: nn.Module) -> bool:
    """Return whether DDP or FSDP2, over one dimension of ranks, averages the gradients."""
    if isinstance(model, DistributedDataParallel):
        return True
    meshes = (getattr(parameter, "device_mesh", None) for parameter in model.parameters())
    first = next((mesh for mesh in meshes if mesh is not None), None)
    return first is not None and first.ndim == 1
