"""Rule 5, replicas agree: processes that train one model have equal weights and different data."""

from __future__ import annotations

import gc
import zlib
from array import array
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hookline.hooks.lint.finding import Check
from hookline.hooks.lint.torch_watch import LoadedBatch
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

    Fix:
        Wrap the model in `DistributedDataParallel`, call the wrapper and not the module inside it,
        and add random numbers to weights or gradients with the same seed on all ranks.

    Ignore:
        When processes train different models on purpose.
    """

    id = "replicas-differ"
    rule = 5

    def __init__(self, report: Any) -> None:
        super().__init__(report)
        self._gradients: dict[str, Tensor] = {}
        self._start_hashes: dict[str, int] = {}
        self._is_bypassed: bool | None = None

    def on_train_start(self, view: TrainingView) -> None:
        """Sample the weights before the first step."""
        if view.ranks == 1:
            self.left_out = "there is one process"
            return
        names, samples = _sample_weights(view)
        view.read(samples, self._keep_start, names)

    def _keep_start(self, values: list[list[float]], names: list[str]) -> None:
        self._start_hashes = dict(zip(names, map(_hash, values), strict=True))

    def on_before_optimizer_step(self, view: TrainingView, optimizer: Any) -> None:
        """Sample the gradients that the optimizer uses."""
        if view.is_due:
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for place in _replicated(view):
                gradient = place.tensor.grad
                if id(place.tensor) in own and gradient is not None and not gradient.is_sparse:
                    self._gradients[place.name] = view.sample(gradient)

    def on_step_end(self, view: TrainingView) -> None:
        """Compare weights and gradients with the other ranks."""
        gradients, self._gradients = self._gradients, {}
        if not view.is_due:
            return
        if self._is_bypassed is None:
            self._is_bypassed = _is_inside_unused_wrapper(view.model)
        names, samples = _sample_weights(view)
        read = [*samples, *gradients.values()]
        view.read(read, self._exchange, view, names, list(gradients))

    def _exchange(
        self,
        values: list[list[float]],
        view: TrainingView,
        names: list[str],
        with_gradient: list[str],
    ) -> None:
        weights = dict(zip(names, map(_hash, values), strict=False))
        of_gradients = values[len(names) :]
        gradients = {
            name: _hash(value)
            for name, value in zip(with_gradient, of_gradients, strict=True)
            if any(value)
        }
        self._view = view
        mine = {"start": self._start_hashes, "weights": weights, "gradients": gradients}
        view.compare_ranks(self.id, mine, self._judge)

    def _judge(self, ranks: list[dict[str, dict[str, int]]]) -> None:
        view = self._view
        started, agree, same_gradients = (
            _agreeing(ranks, key) for key in ("start", "weights", "gradients")
        )
        known = set.intersection(*(set(rank["weights"]) for rank in ranks))
        different = [name for name in ranks[0]["weights"] if name in known - agree]
        if not different:
            return
        most_agree = 2 * len(different) <= len(known)
        if isinstance(view.model, DistributedDataParallel) or self._is_bypassed:
            found = different
        else:
            found = [
                name
                for name in different
                if name in same_gradients or (most_agree and name in started)
            ]
        if not found:
            return
        if self._is_bypassed and not same_gradients:
            self.find(
                view,
                found,
                f"{len(found)} of {len(known)} weights differ between {view.ranks} processes: "
                "DistributedDataParallel was made for this model, but the module inside it is "
                "called, so gradients are not averaged.",
                "Call the DistributedDataParallel object, not its .module.",
            )
            return
        why = (
            "although they got the same gradients"
            if set(found) & same_gradients
            else "and so do their gradients"
        )
        self.find(
            view,
            found,
            f"{len(found)} of {len(known)} weights differ between {view.ranks} processes after "
            f"this step, {why}.",
            "Start from the same weights on all ranks, average the gradients of all parameters, "
            "and change weights by the same numbers everywhere; DistributedDataParallel does so.",
        )


class BuffersDiffer(Check):
    """The ranks evaluate the model with different BatchNorm statistics.

    Each process updates the running statistics from its own batches. Without
    `DistributedDataParallel`'s broadcast they drift apart, so that every rank evaluates another
    model, and a mean of their metrics belongs to none.

    Bug:
        model = DistributedDataParallel(model, broadcast_buffers=False)
        ...
        metric = all_reduce(evaluate(model))

    Fix:
        Leave `broadcast_buffers` on, use `SyncBatchNorm`, or evaluate on rank 0 only.

    Ignore:
        When only one rank's evaluation is used.
    """

    id = "batch-norm-statistics-differ"
    rule = 5
    severity = "warning"

    def __init__(self, report: Any) -> None:
        super().__init__(report)
        self._has_evaluated = False

    def on_train_start(self, view: TrainingView) -> None:
        """Look only at replicas whose statistics nobody broadcasts."""
        wrapped = isinstance(view.model, DistributedDataParallel)
        if view.ranks == 1:
            self.left_out = "there is one process"
        elif wrapped and _broadcasts_buffers(view.model):
            self.left_out = "DistributedDataParallel broadcasts the buffers"

    def on_loss_call(self, view: TrainingView, call: Any) -> None:
        """Notice an evaluation."""
        if not call.has_gradients and not view.model.training:
            self._has_evaluated = True

    def on_step_end(self, view: TrainingView) -> None:
        """Compare the statistics with the other ranks."""
        if not view.is_due:
            return
        names = view.module_names
        norms: list[Any] = [m for m in view.model.modules() if type(m) in _BATCH_NORMS]
        norms = [m for m in norms if isinstance(m.running_mean, Tensor)]
        weights = [p.tensor for p in view.parameters if not needs_collective(p.tensor)][:8]
        read = [view.sample(m.running_mean) for m in norms]
        read += [view.sample(weight) for weight in weights]
        view.read(read, self._exchange, view, [names[m] for m in norms])

    def _exchange(self, values: list[list[float]], view: TrainingView, names: list[str]) -> None:
        self._view = view
        statistics = dict(zip(names, map(_hash, values), strict=False))
        weights = [_hash(value) for value in values[len(names) :]]
        mine = {"statistics": statistics, "weights": weights, "evaluated": self._has_evaluated}
        view.compare_ranks(self.id, mine, self._judge)

    def _judge(self, ranks: list[dict[str, Any]]) -> None:
        are_replicas = all(rank["weights"] == ranks[0]["weights"] for rank in ranks)
        if not are_replicas or not all(rank["evaluated"] for rank in ranks):
            return
        agree = _agreeing(ranks, "statistics")
        different = [name for name in ranks[0]["statistics"] if name not in agree]
        if different:
            self.find(
                self._view,
                different,
                f"The running statistics of {len(different)} BatchNorm modules differ between "
                f"{len(ranks)} processes, and all of them evaluate the model.",
                "Use SyncBatchNorm, leave broadcast_buffers of DistributedDataParallel on, or "
                "evaluate on rank 0 only.",
            )


class SameDataOnRanks(Check):
    """All processes train on the same batches.

    Data-parallel training averages the gradients of different batches. With the same batch on all
    ranks, the others compute what rank 0 computes already.

    Bug:
        loader = DataLoader(dataset, batch_size=32, shuffle=True)  # with the same seed on all ranks
        model = DistributedDataParallel(model)

    Fix:
        Give the loader a `DistributedSampler`; split an `IterableDataset` by rank.

    Ignore:
        When processes share a batch on purpose, as in tensor parallelism.
    """

    id = "same-data-on-all-ranks"
    rule = 5

    def __init__(self, report: Any) -> None:
        super().__init__(report)
        self._batch: LoadedBatch | None = None
        self._trained: list[Tensor] = []
        self._loader = ""
        self._in_a_row = 0
        self._seen: set[int] = set()

    def on_train_start(self, view: TrainingView) -> None:
        """Look only at data-parallel training."""
        if view.ranks == 1:
            self.left_out = "there is one process"

    def on_batch_loaded(self, view: TrainingView, loaded: LoadedBatch) -> None:
        """Keep the batch until it is known whether it is trained on."""
        self._batch = loaded if view.is_due else None

    def on_before_backward(self, view: TrainingView, loss: Any) -> None:
        """Sample the batch that is trained on, or the loss where no loader is used."""
        if not view.is_due:
            return
        batch, self._batch = self._batch, None
        if batch is not None:
            self._loader = f"DataLoader of {type(batch.loader.dataset).__name__}"
            self._trained += [view.sample(tensor) for tensor in tensors_in(batch.batch)][:4]
        elif not self._loader and isinstance(loss, Tensor) and loss.numel() == 1:
            self._trained.append(view.sample(loss))

    def on_step_end(self, view: TrainingView) -> None:
        """Compare what was trained on with the other ranks."""
        trained, self._trained = self._trained, []
        if view.is_due and trained and _is_data_parallel(view.model):
            view.read(trained, self._exchange, view)

    def _exchange(self, values: list[list[float]], view: TrainingView) -> None:
        self._view = view
        view.compare_ranks(self.id, [_hash(value) for value in values], self._judge)

    def _judge(self, ranks: list[list[int]]) -> None:
        mine = hash(tuple(ranks[0]))
        is_new = mine not in self._seen  # full-batch training repeats its batch
        self._seen.add(mine)
        are_equal = all(rank == ranks[0] for rank in ranks)
        self._in_a_row = self._in_a_row + 1 if are_equal and is_new else 0
        if self._in_a_row >= _STEPS_IN_A_ROW:
            self.find(
                self._view,
                self._loader or "the batches",
                f"All {len(ranks)} processes had the same batch in {self._in_a_row} steps in a "
                "row, another one in each step.",
                "Use a DistributedSampler, or split the data by rank.",
            )


def _replicated(view: TrainingView) -> list[Any]:
    return [place for place in view.parameters if not needs_collective(place.tensor)]


def _sample_weights(view: TrainingView) -> tuple[list[str], list[Tensor]]:
    places = _replicated(view)
    return [place.name for place in places], [view.sample(place.tensor) for place in places]


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


def _is_inside_unused_wrapper(model: nn.Module) -> bool:
    """Return whether a DDP object exists that has this model, and it is not what is called."""
    if isinstance(model, DistributedDataParallel):
        return False
    wrappers = (each for each in gc.get_objects() if type(each) is DistributedDataParallel)
    return any(each.module is model for each in wrappers)


def _is_data_parallel(model: nn.Module) -> bool:
    """Return whether DDP or FSDP2, over one dimension of ranks, averages the gradients."""
    if isinstance(model, DistributedDataParallel):
        return True
    meshes = (getattr(parameter, "device_mesh", None) for parameter in model.parameters())
    first = next((mesh for mesh in meshes if mesh is not None), None)
    return first is not None and first.ndim == 1


REPLICA_CHECKS = (ReplicasDiffer, BuffersDiffer, SameDataOnRanks)
