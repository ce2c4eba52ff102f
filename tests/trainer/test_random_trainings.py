"""Random trainings, cut at a random checkpoint and resumed, end exactly as if never interrupted.

The suite runs 40 of them; `HOOKLINE_RANDOM_TRAININGS=200` runs more, as `make soak` does.
"""

from __future__ import annotations

import os
import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import hookline
from hookline import EMA, EarlyStopping, Trainer, TrainerConfig
from hookline.runs.run import Run
from hookline.updates import EMAFilter, Noise

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    # An optimizer that steps in every third step may not have stepped when the epoch ends.
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
]
HAS_POSITIONS = hasattr(Run, "position")
CASES = int(os.environ.get("HOOKLINE_RANDOM_TRAININGS", "40"))

# -- data -----------------------------------------------------------------------------------------


class Noisy(TensorDataset):
    """A dataset that draws random numbers for every sample; only used without workers."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn_like(x), y


class Rows(IterableDataset):
    """An iterable-style dataset, without a length."""

    def __init__(self, tensors):
        self.tensors = tensors

    def __iter__(self):
        return iter(zip(*self.tensors, strict=True))


class EagerSampler(Sampler):
    """Shuffles with the global generator of Python when it is iterated over."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __iter__(self):
        return iter(random.sample(range(self.n), self.n))


class LateSampler(EagerSampler):
    """Draws each index from its own generator when it is asked for."""

    def __init__(self, n, seed):
        super().__init__(n)
        self.generator = random.Random(seed)

    def __iter__(self):
        return (self.generator.randrange(self.n) for _ in range(self.n))


SHUFFLES = ("global", "generator", "eager", "late", "subset", "weighted", "replacement")
KINDS = (*SHUFFLES, "batch_sampler", "single", "list", "iterable")


@dataclass
class LoaderSpec:
    kind: str
    samples: int
    batch_size: int
    seed: int
    noisy: bool
    drop_last: bool
    workers: int = 0
    persistent: bool = False

    def make(self) -> Any:
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.randn(self.samples, 2, 4, generator=generator)
        tensors = x, x[..., :2].sin()
        data = (Noisy if self.noisy and not self.workers else TensorDataset)(*tensors)
        n, size, last = self.samples, self.batch_size, self.drop_last
        options = {"num_workers": self.workers, "persistent_workers": self.persistent}
        if self.kind == "list":
            return list(DataLoader(TensorDataset(*tensors), size))
        if self.kind == "iterable":
            return DataLoader(Rows(tensors), size, **options)
        if self.kind == "single":
            data = TensorDataset(*(tensor[:, None] for tensor in tensors))
            return DataLoader(data, None, shuffle=True, **options)
        if self.kind == "batch_sampler":
            sampler = BatchSampler(RandomSampler(data, generator=generator), size, last)
            return DataLoader(data, batch_sampler=sampler, **options)
        samplers = {
            "eager": lambda: EagerSampler(n),
            "late": lambda: LateSampler(n, self.seed),
            "subset": lambda: SubsetRandomSampler(range(n), generator),
            "weighted": lambda: WeightedRandomSampler(torch.rand(n, generator=generator), n),
            "replacement": lambda: RandomSampler(data, True, 40, generator),
        }
        if self.kind in samplers:
            options["sampler"] = samplers[self.kind]()
        else:
            options["shuffle"] = True
            options["generator"] = generator if self.kind == "generator" else None
        return DataLoader(data, size, drop_last=last, **options)


# -- trainings ------------------------------------------------------------------------------------


@dataclass
class Case:
    loaders: list[LoaderSpec]
    mixing: dict[str, Any]
    epochs: int
    accumulate: int
    optimizers: list[int]  # the interval of each
    hooks: list[str]
    validate_every: int | None
    scheduler: str | None
    saves: list[tuple[str, int]] = field(default_factory=list)  # event, and its how manieth call
    cut: int = 0

    def make_trainer(self, runs: Path, saves: bool) -> Trainer:
        torch.manual_seed(3)
        model = nn.Sequential(
            *(nn.Flatten(0, 1), nn.Linear(4, 8), nn.BatchNorm1d(8)),
            *(nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 2)),
        )
        parts = [model.parameters()]
        if len(self.optimizers) == 2:
            parts = [model[:3].parameters(), model[3:].parameters()]
        optimizers = [torch.optim.AdamW(part, lr=0.01) for part in parts]
        schedulers = []
        if self.scheduler is not None:
            schedulers = [torch.optim.lr_scheduler.StepLR(optimizers[0], 3, 0.8)]
        available = {
            "ema": lambda: EMA(decay=0.9),
            "stopping": lambda: EarlyStopping("val/loss", patience=2),
            "noise": lambda: Noise(eta=0.001),
            "filter": lambda: EMAFilter(alpha=0.5),
        }
        hooks = [available[name]() for name in self.hooks]
        config = TrainerConfig(
            runs=runs,
            progress="off",
            seed=11,
            max_epochs=self.epochs,
            accumulate=self.accumulate,
            optimizer_every=self.optimizers,
            validate_every_steps=self.validate_every,
            scheduler_every=self.scheduler or "step",
            loaders=self.mixing,
        )
        if saves:
            hooks.append(Save(self.saves))
        return Trainer(config, model, optimizers, schedulers, loss_fn=mean_error, hooks=hooks)

    def fit(self, trainer: Trainer, resume_from: Any = None) -> Trainer:
        val = [(torch.ones(3, 1, 4), torch.zeros(3, 2)), (torch.zeros(2, 1, 4), torch.ones(2, 2))]
        named = {f"loader{i}": spec.make() for i, spec in enumerate(self.loaders)}
        return trainer.fit(named, val, resume_from=resume_from)


def mean_error(outputs, targets):
    return nn.functional.mse_loss(outputs, targets.flatten(end_dim=-2))


class Save(hookline.Hook):
    """Asks for checkpoints in some calls of some events."""

    def __init__(self, saves):
        self.saves = saves
        self.calls = dict.fromkeys(("step", "validation", "epoch"), 0)

    def _count(self, trainer, event):
        self.calls[event] += 1
        if (event, self.calls[event]) in self.saves:
            trainer.save_checkpoint()

    def on_step_end(self, trainer):
        self._count(trainer, "step")

    def on_validation_end(self, trainer):
        self._count(trainer, "validation")

    def on_epoch_end(self, trainer):
        self._count(trainer, "epoch")


def loader_specs(workers: bool) -> st.SearchStrategy[LoaderSpec]:
    return st.builds(
        LoaderSpec,
        kind=st.sampled_from([kind for kind in KINDS if kind != "list" or not workers]),
        samples=st.integers(5, 13),
        batch_size=st.integers(2, 4),
        seed=st.integers(0, 99),
        noisy=st.booleans(),
        drop_last=st.booleans(),
        workers=st.sampled_from([1, 2]) if workers else st.just(0),
        persistent=st.booleans() if workers else st.just(False),
    )


@st.composite
def mixings(draw: Any, loaders: list[LoaderSpec]) -> dict[str, Any]:
    n = len(loaders)
    order = draw(st.sampled_from(["sequential", "round_robin", "weighted"]))
    lengths = [draw(st.integers(3, 20)), "longest", "sum", "shortest"]
    exhausted = draw(st.sampled_from(["cycle", "drop"]))
    mixing: dict[str, Any] = {"order": order, "on_exhausted": exhausted}
    if order == "sequential":
        mixing["length"] = draw(st.sampled_from(lengths[:3]))
        return mixing
    if order == "weighted":
        mixing["weights"] = draw(st.lists(st.sampled_from([1, 2, 0.5]), min_size=n, max_size=n))
    has_lengths = all(spec.kind != "iterable" for spec in loaders)
    allowed = lengths if has_lengths or exhausted == "drop" else lengths[:2]
    mixing["length"] = draw(st.sampled_from(allowed))
    return mixing


@st.composite
def cases(draw: Any, workers: bool) -> Case:
    loaders = draw(st.lists(loader_specs(workers), min_size=1, max_size=2 if workers else 3))
    validate_every = draw(st.sampled_from([None, None, 2, 3]))
    events = [("step", st.integers(1, 14)), ("epoch", st.integers(1, 2))]
    events.append(("validation", st.integers(1, 3)))
    event = st.one_of(*(st.tuples(st.just(name), number) for name, number in events))
    return Case(
        loaders=loaders,
        mixing=draw(mixings(loaders)),
        epochs=draw(st.integers(1, 3)),
        accumulate=draw(st.integers(1, 3)),
        optimizers=draw(st.sampled_from([[1], [1, 1], [1, 2], [3, 1]])),
        hooks=draw(st.lists(st.sampled_from(["ema", "stopping", "noise", "filter"]), unique=True)),
        validate_every=validate_every,
        scheduler=draw(st.sampled_from([None, "step", "epoch"])),
        saves=[("step", draw(st.integers(1, 3))), *draw(st.lists(event, max_size=2))],
        cut=draw(st.integers(0, 2)),
    )


# -- the comparison -------------------------------------------------------------------------------


def frozen(tree: Any) -> Any:
    """Return a copy that `==` compares bit for bit."""
    if isinstance(tree, torch.Tensor):
        return (str(tree.dtype), tree.tolist() if tree.ndim else tree.item())
    if isinstance(tree, dict):
        return {key: frozen(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [frozen(value) for value in tree]
    return tree


def final_state(trainer: Trainer) -> dict[str, Any]:
    state = trainer.state_dict()
    hooks = {name: value for name, value in state["hooks"].items() if name != "save"}
    return frozen(
        {
            "model": trainer.model.state_dict(),
            "optimizers": state["optimizers"],
            "schedulers": state["schedulers"],
            "hooks": hooks,
            "counters": [state["step"], state["epoch"], state["round"], state["tokens_seen"]],
            "random": state["position"]["now"],
            "generators": state["position"]["generators"],
            "status": trainer.status,
        }
    )


def records(trainer: Trainer) -> list[tuple[Any, ...]]:
    rows = hookline.open_run(trainer.run.path).metrics()
    return [(row["step"], row["epoch"], row["name"], frozen(row["value"])) for row in rows]


def find_step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_")[:6])


def check_resume(case: Case, folder: Path) -> None:
    note(str(case))
    whole = case.fit(case.make_trainer(folder, saves=True))
    expected, expected_records = final_state(whole), records(whole)
    saved = sorted((whole.run.path / "checkpoints").glob("step_*"))
    if whole.status == "stopped":  # a run that stopped is over, and is not resumed at its end
        saved = [path for path in saved if find_step(path) < whole.step]
    if not saved:
        return  # training was shorter than the first save
    torch.manual_seed(99)  # whatever happened since
    resumed = case.fit(case.make_trainer(folder, saves=False), saved[case.cut % len(saved)])
    found = final_state(resumed)
    for part, value in expected.items():
        assert found[part] == value, part
    if HAS_POSITIONS:  # of the log in checkpoints; without them, records of an epoch may be doubled
        assert records(resumed) == expected_records


def given_cases(number: int, *, workers: bool) -> Any:
    """Run a test with so many cases, always the same; a case that fails is not made smaller."""
    limits = settings(
        max_examples=number,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    return lambda test: limits(given(case=cases(workers))(test))


@given_cases(CASES - CASES // 5, workers=False)
def test_a_random_training_resumes_exactly(case):
    with tempfile.TemporaryDirectory() as folder:
        check_resume(case, Path(folder))


@given_cases(CASES // 5, workers=True)
def test_a_random_training_with_workers_resumes_exactly(case):
    with tempfile.TemporaryDirectory() as folder:
        check_resume(case, Path(folder))
