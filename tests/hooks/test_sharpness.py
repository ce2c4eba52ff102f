"""Sharpness: the curvature in odd models, and a training that is bit for bit the same."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hookline
from hookline.runs.jsonl_reader import read_records

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")  # of the compiler


class OddModel(nn.Module):
    """Batch norm, dropout, a generator of its own, and a buffer that each forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(6)
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(6, 3)
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2))
        self.generator = torch.Generator().manual_seed(5)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        noise = torch.randn(x.shape, generator=self.generator)
        x = self.linear(self.norm(x) + 0.1 * noise) * self.frozen * (1 + self.calls / 100)
        return self.head(self.drop(torch.relu(x)))


def make_batches(n: int = 6) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(5, 6, generator=generator), torch.randn(5, 3, generator=generator))
        for _ in range(n)
    ]


def optimizers_of(model: nn.Module, how: str) -> Any:
    if how != "several optimizers":
        return torch.optim.AdamW(model.parameters(), lr=0.01)
    head = list(model.head.parameters())
    others = [p for n, p in model.named_parameters() if not n.startswith("head")]
    return [torch.optim.AdamW(head, lr=0.01), torch.optim.SGD(others, lr=0.1, momentum=0.9)]


class Everything(hookline.Hook):
    """Keeps a copy of all that training depends on, after each step, and counts what it sees."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.calls = {"forward": 0, "backward": 0}

    def on_after_forward(self) -> None:
        self.calls["forward"] += 1

    def on_after_backward(self) -> None:
        self.calls["backward"] += 1

    def on_step_end(self, trainer: Any, model: Any, optimizers: Any, tokens_seen: int) -> None:
        scaler = trainer.strategy.scaler
        kept = {
            "model": model.state_dict(),
            "gradients": [p.grad for p in model.parameters()],
            "optimizers": [one.state_dict() for one in optimizers],
            "random": [torch.get_rng_state(), model.generator.get_state()],
            "scaler": None if scaler is None else scaler.state_dict(),
            "tokens": tokens_seen,
        }
        self.seen.append(copy.deepcopy(kept))


class Calls(hookline.probes.Probe):
    """Counts the calls that probes see."""

    count = 0

    def after(self, call: Any) -> None:
        self.count += 1


def assert_same(first: Any, second: Any, place: str = "") -> None:
    if isinstance(first, dict):
        assert first.keys() == second.keys()
        first, second = list(first.items()), list(second.items())
    if isinstance(first, list | tuple):
        assert len(first) == len(second)
        for i, (a, b) in enumerate(zip(first, second, strict=True)):
            assert_same(a, b, f"{place}/{a[0] if isinstance(a, tuple) else i}")
    elif isinstance(first, Tensor):
        assert torch.equal(first, second), place
    else:
        assert first == second, place


HOW: dict[str, dict[str, Any]] = {
    "accumulated": {"accumulate": 2, "clip_norm": 0.1},
    "several optimizers": {"optimizer_every": [1, 2], "precision": "fp16"},
    "compiled": {},
}


@pytest.mark.parametrize("how", HOW)
def test_training_is_bit_for_bit_the_same(how, tmp_path) -> None:
    kept, calls = [], []
    for hooks in ([], [hookline.Sharpness(1)]):
        torch._dynamo.reset()
        model = OddModel()
        optimizers = optimizers_of(model, how)
        if how == "compiled":
            model.head.compile(backend="eager")
        everything, probe = Everything(), Calls("head")
        config = hookline.TrainerConfig(runs=tmp_path, progress="off", seed=3, **HOW[how])
        trainer = hookline.Trainer(
            config, model, optimizers, loss_fn=F.mse_loss, hooks=[everything, probe, *hooks]
        )
        trainer.fit(make_batches())
        assert trainer.hooks.summary().failures == {}
        kept.append(everything.seen)
        calls.append((everything.calls, probe.count))
        records = read_records(trainer.run.path / "metrics.jsonl")
    assert calls[0] == calls[1]
    assert_same(*kept)
    assert any(one["name"] == "sharpness/along_gradient" for one in records)


class OddWeights(nn.Module):
    """Sparse gradients, complex and tied weights, a scalar, and a layer that is not reached."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 4, sparse=sparse)
        self.rotation = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x) * self.scale
        x = torch.view_as_real(x * self.rotation).sum(-1)
        return self.second(torch.tanh(self.first(x)))


def curvature(model: nn.Module, batch: tuple[Tensor, Tensor]) -> float:
    """Return gᵀHg / gᵀg from the Hessian, with complex numbers as pairs of real ones."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    loss = F.mse_loss(model(batch[0]), batch[1].double())
    gradients = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    used = [(p, g) for p, g in zip(parameters, gradients, strict=True) if g is not None]

    def real(x: Tensor) -> Tensor:
        return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x

    square = sum(real(g).square().sum() for _, g in used)
    product = sum((real(g) * real(g).detach()).sum() for _, g in used)
    second = torch.autograd.grad(product, [p for p, _ in used])
    pairs = zip(second, used, strict=True)
    return (sum((real(h) * real(g)).sum() for h, (_, g) in pairs) / square).item()


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_odd_weights_have_the_curvature_of_their_hessian(sparse, accumulate, tmp_path) -> None:
    model = OddWeights(sparse=sparse)
    reference = copy.deepcopy(model)
    reference.embedding.sparse = False
    reference.double()
    reference.rotation.data = reference.rotation.data.to(torch.complex128)
    generator = torch.Generator().manual_seed(1)
    data = [
        (torch.randint(0, 5, (6,), generator=generator), torch.randn(6, 4, generator=generator))
        for _ in range(accumulate)
    ]
    found = measure(tmp_path, model, data, accumulate=accumulate)
    assert found == pytest.approx(curvature(reference, data[-1]), rel=2e-2)


def measure(folder: Path, model: nn.Module, data: Any, **options: Any) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = hookline.TrainerConfig(runs=folder, progress="off", **options)
    trainer = hookline.Trainer(
        config, model, optimizer, loss_fn=F.mse_loss, hooks=[hookline.Sharpness(1, distance=1e-3)]
    )
    trainer.fit(data)
    assert trainer.hooks.summary().failures == {}
    records = read_records(trainer.run.path / "metrics.jsonl")
    values = {one["name"]: one["value"] for one in records}
    assert values["sharpness/times_lr"] == pytest.approx(0.1 * values["sharpness/along_gradient"])
    return values["sharpness/along_gradient"]


def test_a_failure_in_the_middle_leaves_training_unchanged(tmp_path) -> None:
    class FailingLoss:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 6:  # in the second measurement
                raise RuntimeError("out of memory")
            return F.mse_loss(outputs, targets)

    weights = []
    for hooks in ([], [hookline.Sharpness(1)]):
        model = OddModel()
        config = hookline.TrainerConfig(runs=None, progress="off", seed=3)
        loss: Any = FailingLoss() if hooks else F.mse_loss
        trainer = hookline.Trainer(
            config, model, optimizers_of(model, ""), loss_fn=loss, hooks=hooks
        )
        trainer.fit(make_batches())
        assert sum(trainer.hooks.summary().failures.values()) == len(hooks)
        weights.append(model.state_dict() | {"random": torch.get_rng_state()})
    assert_same(*weights)


def test_a_loop_that_cannot_compute_a_loss_again_is_refused_also_later() -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(hookline.HooklineError, match="only Hookline's own Trainer"),
        hookline.attach(model, optimizer, runs=None) as session,
    ):
        for i, (x, y) in enumerate(session.batches(make_batches(3))):
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if i == 0:
                session.add_hook(hookline.Sharpness(1))
