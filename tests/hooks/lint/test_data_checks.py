"""Rules 6 and 7: ties, and the order of data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from lint_loops import assert_none_failed
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    get_worker_info,
)

import hookline
from hookline.hooks.lint.finding import Finding


def data(count: int = 48) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 4, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


def train(loader: Any, epochs: int = 3, *, before: Any = None, prefetch: bool = False) -> Any:
    """Train for some epochs, and return the findings by check."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = hookline.Lint()
    with hookline.attach(model, optimizer, hooks=[hook]):
        for epoch in range(epochs):
            if before is not None:
                before(epoch)
            batches = list(loader) if prefetch else loader
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
    assert_none_failed(hook)
    return {finding.check: finding for finding in hook.findings}


def test_a_sampler_without_set_epoch_is_found_in_the_second_epoch() -> None:
    sampler: Any = DistributedSampler(data(), num_replicas=2, rank=0)
    found = train(DataLoader(data(), batch_size=8, sampler=sampler))
    finding: Finding = found["same-order-every-epoch"]
    assert "DistributedSampler" in finding.subject
    assert "set_epoch" in finding.fix
    assert 4 <= finding.step <= 5  # an epoch has three steps


@pytest.mark.parametrize("kind", ["set_epoch", "shuffle", "no shuffle", "all at once"])
def test_orders_that_are_right_are_not_found(kind: str) -> None:
    sampler: Any = DistributedSampler(data(), num_replicas=2, rank=0)
    loaders = {
        "set_epoch": DataLoader(data(), batch_size=8, sampler=sampler),
        "shuffle": DataLoader(data(), batch_size=8, shuffle=True),
        "no shuffle": DataLoader(data(), batch_size=8),
        "all at once": DataLoader(data(), batch_size=48, shuffle=True),
    }
    before = sampler.set_epoch if kind == "set_epoch" else None
    assert train(loaders[kind], before=before) == {}


def test_a_generator_that_is_seeded_in_each_epoch_is_found() -> None:
    generator = torch.Generator()
    loader = DataLoader(data(), batch_size=8, shuffle=True, generator=generator)
    found = train(loader, before=lambda epoch: generator.manual_seed(1))
    assert "generator" in found["same-order-every-epoch"].fix
    assert train(loader, before=lambda epoch: generator.manual_seed(epoch)) == {}


def test_batches_that_are_loaded_ahead_are_not_skipped_ones() -> None:
    assert train(DataLoader(data(), batch_size=8, shuffle=True), prefetch=True) == {}


def skip_first(epochs_with_skips: int) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, hook = DataLoader(data(), batch_size=8), hookline.Lint()
    with hookline.attach(model, optimizer, hooks=[hook]):
        for epoch in range(4):
            for i, (x, y) in enumerate(loader):
                if epoch < epochs_with_skips and i < 2:
                    continue
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
    return {finding.check: finding for finding in hook.findings}


def test_batches_that_every_epoch_skips_are_found() -> None:
    assert "first 2 batches" in skip_first(4)["batches-skipped-in-every-epoch"].message


def test_batches_of_the_resumed_epoch_may_be_skipped() -> None:
    assert skip_first(1) == {}


@pytest.mark.parametrize(("shuffle", "is_found"), [(False, True), (True, False)])
def test_an_iterator_for_every_step_is_found(shuffle: bool, is_found: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, hook = DataLoader(data(), batch_size=8, shuffle=shuffle), hookline.Lint()
    with hookline.attach(model, optimizer, hooks=[hook]):
        for _ in range(6):
            x, y = next(iter(loader))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    found = {finding.check for finding in hook.findings}
    assert found == ({"loader-iterator-made-anew"} if is_found else set())


class Noisy(Dataset[Any]):
    def __init__(self, uses: bool) -> None:
        self.rng = np.random.default_rng(0)
        self.values = torch.tensor(self.rng.normal(size=(32, 4)), dtype=torch.float32)
        self.uses = uses

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.values[index] + float(self.rng.normal()), index % 2


class Fixed(Noisy):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.values[index], index % 2


def test_a_generator_that_all_workers_have_is_found() -> None:
    found = train(DataLoader(Noisy(True), batch_size=8, num_workers=2), epochs=1)
    finding = found["workers-share-random-numbers"]
    assert finding.subject == "DataLoader of Noisy"
    assert "'rng'" in finding.message


def test_a_generator_that_samples_do_not_use_is_not_found() -> None:
    assert train(DataLoader(Fixed(False), batch_size=8, num_workers=2), epochs=1) == {}
    assert train(DataLoader(Noisy(True), batch_size=8), epochs=1) == {}


def test_labels_that_are_sorted_are_found() -> None:
    x = torch.randn(160, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(160) // 20 % 2 + (torch.arange(160) // 40)
    dataset = TensorDataset(x, labels.sort().values.clamp(max=1))
    halves = TensorDataset(x, (torch.arange(160) >= 40).long())
    assert "labels-sorted" in train(DataLoader(halves, batch_size=10), epochs=1)
    assert train(DataLoader(dataset, batch_size=10, shuffle=True), epochs=1) == {}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x))


def lint_tied(model: nn.Module) -> dict[str, Finding]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = hookline.Lint(only=["weights-untied"])
    with hookline.attach(model, optimizer, hooks=[hook]):
        for step in range(3):
            x = torch.arange(8) + step
            optimizer.zero_grad()
            F.cross_entropy(model(x), x).backward()
            optimizer.step()
    return {finding.check: finding for finding in hook.findings}


def test_weights_that_loading_has_untied_are_found_at_once() -> None:
    torch.manual_seed(0)
    model = Tied()
    assert lint_tied(model) == {}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    finding = lint_tied(model)["weights-untied"]
    assert finding.step == 1
    assert "head.weight" in finding.subject


def test_an_output_layer_of_its_own_is_not_found() -> None:
    torch.manual_seed(0)
    model = Tied()
    model.head.weight = nn.Parameter(torch.randn(16, 8))
    assert lint_tied(model) == {}


class Stream(IterableDataset[Any]):
    def __init__(self, is_split: bool) -> None:
        self.is_split = is_split

    def __iter__(self) -> Any:
        worker = get_worker_info()
        first = worker.id if worker is not None and self.is_split else 0
        for i in range(first, 96, 2 if self.is_split else 1):
            generator = torch.Generator().manual_seed(i)
            yield torch.randn(4, generator=generator), i % 2


@pytest.mark.parametrize("is_split", [True, False])
def test_a_stream_that_each_worker_reads_is_found(is_split: bool) -> None:
    found = train(DataLoader(Stream(is_split), batch_size=8, num_workers=2), 1)
    assert set(found) == (set() if is_split else {"stream-repeated-by-workers"})
