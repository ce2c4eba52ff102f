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
    """A weight that all processes should have equally differs between them.

    Data-parallel processes apply the same gradients to the same weights, so their weights stay
    equal bit for bit. Once a weight differs, each process trains another model, and only that of
    rank 0 is saved.

    Bug:
        # the gradients are averaged, but every process has its own initial weights
        torch.manual_seed(rank)
        model = Net()
        ...
        for p in model.parameters():
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
        optimizer.step()
    Fix: Wrap the model in `DistributedDataParallel`, call the wrapper and not its `.module`, start
        from the same weights, and change weights by the same numbers on all ranks.
    Ignore: When processes train different models on purpose.
    """

    def setup(self) -> None:
        self._samples: dict[tuple[str, str], Tensor] = {}  # by kind and name
        self._start: dict[str, int] = {}
        self._bypassed: set[int] | None = None  # parameters of wrappers that are not called

    def on_train_start(self) -> None:
        if self.view.ranks == 1:
            self.left_out = "there is one process"
            return
        self._sample_weights("start")
        self._read(self._keep_start)

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
        if self._bypassed is None:
            self._bypassed = _parameters_of_other_wrappers(self.view.model)
        self._sample_weights("weights")
        self._read(self._exchange)

    def _exchange(self, values: list[list[float]], keys: list[tuple[str, str]]) -> None:
        mine: dict[str, dict[str, int]] = {kind: {} for kind in ("weights", "computed", "used")}
        mine["start"] = self._start
        for (kind, name), value in zip(keys, values, strict=True):
            if kind == "weights" or any(value if isinstance(value, list) else [value]):
                mine[kind][name] = _hash(value)
        self.view.compare_ranks(self.id, mine, self._judge)

    def _judge(self, ranks: list[dict[str, dict[str, int]]]) -> None:
        started, agree = _agreeing(ranks, "start"), _agreeing(ranks, "weights")
        # Equal gradients of equal weights: every rank computes them for its own replica.
        same_gradients = _agreeing(ranks, "used") | (_agreeing(ranks, "computed") & started)
        known = set.intersection(*(set(rank["weights"]) for rank in ranks))
        different = [name for name in ranks[0]["weights"] if name in known - agree]
        if not different:
            return
        most_agree = 2 * len(different) <= len(known)
        wrapped = self._bypassed or set()
        bypassed = {place.name for place in self.view.parameters if id(place.tensor) in wrapped}
        if isinstance(self.view.model, DistributedDataParallel):
            found = different
        else:
            found = [
                name
                for name in different
                if name in same_gradients | bypassed or (most_agree and name in started)
            ]
        if not found:
            return
        why = "and so do their gradients"
        if set(found) & same_gradients:
            why = "although they got the same gradients"
        elif set(found) & bypassed:
            why = "as what is inside DistributedDataParallel is called, not the wrapper"
        self.find(
            found,
            f"{len(found)} of {len(known)} weights differ between {len(ranks)} processes after "
            f"this step, {why}.",
        )


class BatchNormStatisticsDiffer(Check):
    """The ranks evaluate the model with different BatchNorm statistics.

    Each process updates the running statistics from its own batches. Without
    `DistributedDataParallel`'s broadcast they drift apart, so that every rank evaluates another
    model, and a mean of their metrics belongs to none.

    Bug:
        model = DistributedDataParallel(model, broadcast_buffers=False)
        ...
        metric = all_reduce(evaluate(model))
    Fix: Leave `broadcast_buffers` on, use `SyncBatchNorm`, or evaluate on rank 0 only.
    Ignore: When only one rank's evaluation is used.
    """

    severity = "warning"

    def setup(self) -> None:
        self._has_evaluated = False

    def on_train_start(self) -> None:
        wrapped = isinstance(self.view.model, DistributedDataParallel)
        if self.view.ranks == 1:
            self.left_out = "there is one process"
        elif wrapped and _broadcasts_buffers(self.view.model):
            self.left_out = "DistributedDataParallel broadcasts the buffers"

    def on_model_call(self, call: ModuleCall) -> None:
        if not call.has_gradients and not call.module.training:
            self._has_evaluated = True

    @in_due_steps
    def on_step_end(self) -> None:
        names = self.view.module_names
        norms: list[Any] = [m for m in self.view.model.modules() if type(m) in _BATCH_NORMS]
        norms = [m for m in norms if isinstance(m.running_mean, Tensor)]
        weights = [p.tensor for p in self.view.parameters if not needs_collective(p.tensor)][:8]
        read = [self.sample(m.running_mean) for m in norms]
        read += [self.sample(weight) for weight in weights]
        self.read(read, self._exchange, [names[m] for m in norms])

    def _exchange(self, values: list[list[float]], names: list[str]) -> None:
        statistics = dict(zip(names, map(_hash, values), strict=False))
        weights = [_hash(value) for value in values[len(names) :]]
        mine = {"statistics": statistics, "weights": weights, "evaluated": self._has_evaluated}
        self.view.compare_ranks(self.id, mine, self._judge)

    def _judge(self, ranks: list[dict[str, Any]]) -> None:
        are_replicas = all(rank["weights"] == ranks[0]["weights"] for rank in ranks)
        if not are_replicas or not all(rank["evaluated"] for rank in ranks):
            return
        agree = _agreeing(ranks, "statistics")
        different = [name for name in ranks[0]["statistics"] if name not in agree]
        if different:
            self.find(
                different,
                f"The running statistics of {len(different)} BatchNorm modules differ between "
                f"{len(ranks)} processes, and all of them evaluate the model.",
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

    def setup(self) -> None:
        self._batch: LoadedBatch | None = None
        self._trained: list[Tensor] = []
        self._loader = ""
        self._seen: set[int] = set()

    def on_train_start(self) -> None:
        if self.view.ranks == 1:
            self.left_out = "there is one process"

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
