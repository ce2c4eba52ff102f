"""Run by `torchrun` with four ranks: numbers of sharded tensors are those of the whole ones.

Shards are summed in another order than whole tensors, in float32, so numbers agree to about 1e-6;
the tolerance is 1e-5. Values that no sum is taken of (maxima, counts, weights) agree exactly, or to
1e-6 where they depend on a norm.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_checks import check_in_all_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import hookline
from hookline.hooks.monitoring.gradient_monitor import GradientMonitor
from hookline.tensors.norms import all_finite, global_norm
from hookline.tensors.sharded import whole
from hookline.updates.gradients import Gradients

TOLERANCE = {"rtol": 1e-5, "atol": 1e-7}


class Record(dict[str, Any]):
    def log(self, name: str, value: Any, kind: str = "scalar") -> None:
        self[name] = value["counts"] if kind == "histogram" else [value]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    # The vectors have 5, 5, 2 and 2 elements: on four ranks some have nothing of them.
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2))


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in model:  # type: ignore[attr-defined]
        if next(layer.parameters(), None) is not None:
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def run_backward(model: nn.Module) -> torch.optim.Optimizer:
    """The same batch on all ranks, so that averaged gradients are those of one process."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    model(batch).square().sum().backward()
    return optimizer


def report(model: nn.Module, **options: Any) -> tuple[Record, int]:
    """Return what a GradientMonitor logs for a step, and how many collectives it used."""
    optimizer = run_backward(model)
    monitor = GradientMonitor(1, **options)
    monitor.on_train_start(model)
    record = Record()
    with CommDebugMode() as before:
        monitor.on_gradients_ready(0, 0, [optimizer], model)
        monitor.on_before_optimizer_step(0)
    optimizer.step()
    with CommDebugMode() as after:
        monitor.on_after_optimizer_step(0)
        monitor.on_step_end(record)
    return record, before.get_total_counts() + after.get_total_counts()


def check_monitor(mesh: DeviceMesh) -> None:
    for options, collectives in (
        ({}, 1),
        ({"log_statistics": True}, 1),
        ({"log_histogram": True, "percentiles": [10, 50, 90]}, 2),
    ):
        expected, used = report(make_model(), **options)
        assert used == 0
        found, used = report(shard(make_model(), mesh), **options)
        assert used == collectives, (options, used)
        assert found.keys() == expected.keys(), found
        for name, values in expected.items():
            torch.testing.assert_close(found[name], values, **TOLERANCE, msg=name)


def check_norms(mesh: DeviceMesh) -> None:
    alone, model = make_model(), shard(make_model(), mesh)
    run_backward(alone)
    run_backward(model)
    expected = nn.utils.get_total_norm([p.grad for p in alone.parameters()])
    gradients = [parameter.grad for parameter in model.parameters()]
    mode = CommDebugMode()
    with mode:
        found = global_norm(gradients)
    assert mode.get_total_counts() == 1
    torch.testing.assert_close(found, expected, **TOLERANCE)
    # The pitfall that the documentation names:
    assert not torch.allclose(gradients[0].to_local().norm(), whole(gradients[0]).norm())


def updated(model: nn.Module, update: Callable[..., Any]) -> list[torch.Tensor]:
    optimizer = run_backward(model)
    names = dict(model.named_parameters())
    gradients = Gradients(names)
    arguments = {"model": model, "optimizer_idx": 0, "trainer": None}
    wanted = type(update).__call__.__code__.co_varnames[
        2 : type(update).__call__.__code__.co_argcount
    ]
    gradients.carry(update, update, (gradients,), {name: arguments[name] for name in wanted})
    del optimizer
    return [whole(parameter.grad) for parameter in names.values()]


def check_updates(mesh: DeviceMesh) -> None:
    for update in (
        hookline.Scale(0.5),
        hookline.Mask(["0.weight"]),
        hookline.ClipNorm(0.1),
        hookline.ClipValue(0.01),
        hookline.Centralize(),
        hookline.SkipNonfinite(),
        hookline.EMAFilter(),
    ):
        expected = updated(make_model(), copy.deepcopy(update))
        found = updated(shard(make_model(), mesh), update)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, **TOLERANCE, msg=type(update).__name__)


def check_noise(mesh: DeviceMesh) -> None:
    """All ranks have the same whole noise, copies of a shard the same, and shards other noise."""
    model = nn.Linear(8, 16, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    fully_shard(model, mesh=mesh)
    model(torch.zeros(1, 8)).sum().backward()
    hookline.Noise(eta=1.0)(Gradients(dict(model.named_parameters())), 0)
    gradient = model.weight.grad
    seen = [torch.empty(16, 8) for _ in range(4)]
    dist.all_gather(seen, whole(gradient).contiguous())
    assert all(torch.equal(seen[0], other) for other in seen)  # also of HSDP's copies
    parts = seen[0].split(len(gradient.to_local()))
    assert not torch.equal(parts[0], parts[1])
    assert 0.7 < seen[0].std().item() < 1.3


def check_finiteness(mesh: DeviceMesh) -> None:
    model = shard(make_model(), mesh)
    run_backward(model)
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all_finite(gradients, on_all_ranks=True)
    local = gradients[0].to_local()
    if dist.get_rank() == 1 and local.numel():
        local.view(-1)[0] = torch.nan
    assert all_finite(gradients) == (dist.get_rank() != 1)
    last_shard = mesh.ndim == 1 or mesh.get_local_rank(0) == 0  # rank 1 is in this copy
    assert all_finite(gradients, on_all_ranks=True) == (not last_shard)

    class Skips:
        skipped = False

        def skip_optimizer_step(self, idx: int, reason: str) -> None:
            self.skipped = True

    skips = Skips()
    hookline.SkipNonfinite()(dict(model.named_parameters()), skips, 0)
    assert not skips.skipped  # weights are finite


def check_ema(mesh: DeviceMesh) -> None:
    averages: list[list[torch.Tensor]] = []
    for model in (make_model(), shard(make_model(), mesh)):
        ema = hookline.EMA(decay=0.9, every_n_steps=1)
        ema.on_train_start(model)
        optimizer = run_backward(model)
        ema.on_before_optimizer_step(model)
        optimizer.step()
        ema.on_after_optimizer_step()
        ema.on_step_end()
        trained = [whole(p.detach()).clone() for p in model.parameters()]
        ema.on_validation_start()
        averages.append([whole(p.detach()).clone() for p in model.parameters()])
        ema.on_validation_end()
        other = make_model()
        ema.apply_to(other)
        for parameter, average in zip(other.parameters(), averages[-1], strict=True):
            assert torch.equal(parameter, average)
        state = {name: whole(value) for name, value in ema.state_dict()["averages"].items()}
        resumed = hookline.EMA(decay=0.9)
        resumed.load_state_dict({"averages": state, "updates": 1, "steps": 1})
        resumed.on_train_start(model)
        for name, average in resumed.state_dict()["averages"].items():
            assert torch.equal(whole(average), state[name])
        for parameter, before in zip(model.parameters(), trained, strict=True):
            assert torch.equal(whole(parameter.detach()), before)
    for a, b in zip(*averages, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)


def check_full_tensor(mesh: DeviceMesh) -> None:
    rank = dist.get_rank()
    whole_value = torch.arange(10.0).reshape(5, 2)
    placements = [[Shard(0)], [Shard(1)], [Replicate()]]
    if mesh.ndim == 2:
        placements = [[Replicate(), Shard(0)], [Shard(0), Shard(1)], [Shard(1), Replicate()]]
    for places in placements:
        sharded = distribute_tensor(whole_value, mesh, places)
        assert torch.equal(hookline.full_tensor(sharded), whole_value)
    partial = DTensor.from_local(
        torch.full((3,), float(rank + 1)), mesh, [Partial()] + [Replicate()] * (mesh.ndim - 1)
    )
    expected = 10.0 if mesh.ndim == 1 else (1.0 + 3.0 if mesh.get_local_rank(1) == 0 else 2.0 + 4.0)
    assert hookline.full_tensor(partial).tolist() == [expected] * 3
    one = distribute_tensor(torch.ones(1), mesh, [Shard(0)] + [Replicate()] * (mesh.ndim - 1))
    assert hookline.full_tensor(one).tolist() == [1.0]  # most ranks have nothing of it
    nested = {"a": [sharded, whole_value], "b": 3}
    found: Any = hookline.full_tensor(nested)
    assert torch.equal(found["a"][0], whole_value)
    assert found["a"][1] is whole_value
    assert found["b"] == 3
    assert hookline.full_tensor(whole_value) is whole_value


def check_flow(mesh: DeviceMesh) -> None:
    alone, model = make_model(), shard(make_model(), mesh)
    run_backward(alone)
    run_backward(model)
    expected, found = (hookline.probes.gradient_flow(m).rows for m in (alone, model))
    for a, b in zip(found, expected, strict=True):
        assert (a.layer, a.problem) == (b.layer, b.problem)
        values = [[row.norm, row.mean_abs, row.zeros, row.ratio or 0.0] for row in (a, b)]
        torch.testing.assert_close(*values, **TOLERANCE)


def check_time_limit(mesh: DeviceMesh) -> None:
    """A rank that calls it alone gets an error that names the others; then all can call it."""
    value = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    for alone in (0, 2):
        if dist.get_rank() == alone:
            others = ", ".join(str(rank) for rank in range(4) if rank != alone)
            with pytest.raises(hookline.CollectiveError, match=f"rank {others}"):
                hookline.full_tensor(value, timeout=0.5)
        dist.barrier()
        assert hookline.full_tensor(value).tolist() == list(range(8))


def check_limited_hook(mesh: DeviceMesh) -> None:
    """In a hook that is called on one rank it raises at once."""
    value = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    errors: list[str] = []

    class Reader(hookline.Hook):
        def on_step_end(self) -> None:
            try:
                hookline.full_tensor(value)
            except hookline.CollectiveError as error:
                errors.append(str(error))

    hooks = hookline.HookManager()
    hooks.add_hook(Reader(), "reader", ranks="main")
    hooks.set_process(is_main=dist.get_rank() == 0, is_local_main=dist.get_rank() == 0)
    hooks.fire("on_step_end")
    hooks.add_hook(Reader(), "everywhere")
    hooks.remove_hook("reader")
    hooks.fire("on_step_end")
    assert len(errors) == (dist.get_rank() == 0)
    assert all("'reader'" in error and "ranks='main'" in error for error in errors)


def check_all() -> None:
    flat = init_device_mesh("cpu", (4,))
    hsdp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for mesh in (flat, hsdp):
        for check in (
            check_norms,
            check_monitor,
            check_updates,
            check_noise,
            check_finiteness,
            check_ema,
            check_full_tensor,
            check_flow,
        ):
            check(mesh)
    check_time_limit(flat)
    check_limited_hook(flat)


if __name__ == "__main__":
    check_in_all_ranks(check_all)
