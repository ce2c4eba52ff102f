"""Lint changes nothing on several ranks: DDP and FSDP2, started by a test."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from random_loops import Training
from rank_checks import check_in_all_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import hookline

PLAIN: dict[str, Any] = {
    **{"seed": 1, "data": "features", "layers": ["linear", "dropout"], "dtype": "float32"},
    **{"checkpointing": "", "optimizer": "adamw", "scheduler": "", "micro-batches": 1},
    **{"zeroed": "none", "clipped": "norm", "autocast": "", "in between": "", "others": []},
    **{"tied": False, "sparse": False, "loss in model": False, "loader": False, "scaled": False},
    **{"user hooks": False, "averaged": False, "two optimizers": False, "retain": False},
    **{"compiled": "", "lbfgs": False},
}


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, find_unused_parameters=True)


def fsdp(model: Any, policy: MixedPrecisionPolicy | None = None) -> nn.Module:
    options: dict[str, Any] = {} if policy is None else {"mp_policy": policy}
    for layer in model.body:
        if any(parameter.requires_grad for parameter in layer.parameters()):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
CASES: list[tuple[Callable[[nn.Module], nn.Module], dict[str, Any]]] = [
    (ddp, {"layers": ["batch norm", "noisy", "linear"], "in between": "validation"}),
    (ddp, {"data": "tokens", "layers": ["attention", "unused"], "checkpointing": "new"}),
    (ddp, {"layers": ["counting", "low rank"], "micro-batches": 2, "loader": True}),
    (ddp, {"layers": ["spectral norm"], "optimizer": "sgd", "others": ["ema", "clip"]}),
    (fsdp, {"layers": ["linear", "relu"], "micro-batches": 2}),
    (fsdp, {"data": "tokens", "layers": ["torch attention", "experts"], "checkpointing": "new"}),
    (fsdp, {"layers": ["batch norm", "noisy", "zeros"], "in between": "validation"}),
    (partial(fsdp, policy=HALF), {"layers": ["linear"], "others": ["ema", "gradient monitor"]}),
]


def _train(case: dict[str, Any], hooks: list[Any] | None, wrap: Any) -> list[Any]:
    training = Training(case, hooks, wrap)
    training.run()
    return training.state()


def check_harmless() -> None:
    for wrap, changes in CASES:
        case = {**PLAIN, **changes}
        lint = hookline.Lint()
        plain, linted = (
            _train(case, hooks, wrap) for hooks in ([] if case["others"] else None, [lint])
        )
        for one, two in zip(plain, linted, strict=True):
            assert one == two, case
        failed = {name: why for name, why in lint.left_out.items() if why.startswith("it failed (")}
        assert failed == {}, case


if __name__ == "__main__":
    check_in_all_ranks(check_harmless)
