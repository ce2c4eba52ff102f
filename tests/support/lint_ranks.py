"""Checks of `Lint` on several ranks, started by a test."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from lint_loops import batch, ids, layers
from rank_checks import check_in_all_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

import hookline
from hookline.hooks.lint.finding import Finding

STEPS = 5


def findings(model: nn.Module, clip: Callable[[nn.Module], object]) -> list[Finding]:
    optimizer = AdamW(model.parameters(), lr=0.01)
    hook = hookline.Lint()
    with hookline.attach(model, optimizer, hooks=[hook]):
        for step in range(STEPS):
            optimizer.zero_grad()
            x, y = batch(10 * step + dist.get_rank())
            F.mse_loss(model(x), y).backward()
            clip(model)
            optimizer.step()
    failed = {name: why for name, why in hook.left_out.items() if "failed" in why}
    assert not failed, failed
    return hook.findings


def sharded() -> nn.Module:
    model = layers()
    for child in model.children():
        fully_shard(child)
    return fully_shard(model)


def clip_all(model: nn.Module) -> object:
    return clip_grad_norm_(model.parameters(), 0.1)


@torch.no_grad()
def clip_own_shard(model: nn.Module) -> None:
    shards = [p.grad.to_local() for p in model.parameters() if isinstance(p.grad, DTensor)]
    norm = torch.stack([shard.norm() for shard in shards]).norm()
    for shard in shards:
        shard.mul_(0.1 / (norm + 1e-6))


def check_whole_norm() -> None:
    assert findings(sharded(), clip_all) == []
    assert findings(DistributedDataParallel(layers()), clip_all) == []


def check_norm_of_shard() -> None:
    found = findings(sharded(), clip_own_shard)
    assert ids(found) == ["clip-differs-over-ranks"], found
    assert found[0].step == 2
    assert found[0].subject == "last.weight"


def train_ranks(model: nn.Module, *, own_data: bool = True, average: bool = False) -> set[str]:
    """Return the ids of what is found in a loop without clipping."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    hook = hookline.Lint()
    with hookline.attach(model, optimizer, hooks=[hook]):
        for step in range(STEPS):
            optimizer.zero_grad()
            x, y = batch(10 * step + dist.get_rank() * own_data)
            F.mse_loss(model(x), y).backward()
            if average:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter.grad.div_(dist.get_world_size())
            optimizer.step()
    return set(ids(hook.findings))


def check_replicas() -> None:
    rank = dist.get_rank()
    assert train_ranks(layers(), average=True) == set()
    assert train_ranks(layers(rank), average=True) == {"replicas-differ"}
    assert train_ranks(layers(rank)) == set()  # two experiments
    assert train_ranks(DistributedDataParallel(layers())) == set()
    wrapper = DistributedDataParallel(layers())
    assert train_ranks(wrapper.module) == {"replicas-differ"}  # around the wrapper
    wrapper = DistributedDataParallel(nn.ModuleDict({"net": layers()}))
    assert train_ranks(wrapper.module["net"]) == {"replicas-differ"}  # a method of the module
    assert train_ranks(nn.Sequential(DistributedDataParallel(layers()))) == set()
    assert train_ranks(DistributedDataParallel(layers()), own_data=False) == {
        "same-data-on-all-ranks"
    }
    drifting = DistributedDataParallel(layers())
    handle = drifting.module.last.register_forward_pre_hook(lambda *_: drift(drifting, rank))
    assert train_ranks(drifting) == {"replicas-differ"}
    handle.remove()


@torch.no_grad()
def drift(model: DistributedDataParallel, rank: int) -> None:
    model.module.last.bias.add_(1e-3 * rank)


if __name__ == "__main__":
    check_in_all_ranks(check_whole_norm, check_norm_of_shard, check_replicas)
