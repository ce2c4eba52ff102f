"""A monitor reports statistics of what modules give, and what they cost, and changes nothing."""

from __future__ import annotations

import copy
import gc
import json
import math
import pickle
import threading
import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import Net, batches, make, same, weights
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hookline
from hookline import ConfigError, Trainer, TrainerConfig
from hookline.probes.monitor import DEFAULT_METRICS, METRICS, Monitor
from hookline.tensors import running_statistics, timing
from hookline.tensors.device_numbers import read_tensors
from hookline.tensors.running_statistics import RunningSums


@pytest.fixture(params=["host", "device"])
def where(request, monkeypatch):
    """Both ways of measuring: where reading is free, and where it would wait for a device."""
    if request.param == "device":
        monkeypatch.setattr(running_statistics, "_can_read", lambda device: False)
    return request.param


class Gives(nn.Module):
    """Returns what it is given."""

    def forward(self, x: Any) -> Any:
        return x


def report_of(*given: Any, module: nn.Module | None = None, **options: Any) -> dict[str, Any]:
    """Return the report on a module that gives these, one after the other."""
    model = nn.Sequential(module or Gives())
    monitor = Monitor("0", **options)
    monitor.attach(model)
    for one in given:
        model(one)
    report = monitor.report()
    monitor.detach()
    return report.get("0", {})


def definition(values: torch.Tensor) -> dict[str, float]:
    """The metrics of values, in double precision."""
    values = values.double().reshape(-1)
    finite = values[values.isfinite()]
    return {
        "mean": finite.mean().item(),
        "std": finite.std(correction=0).item(),
        "min": finite.min().item(),
        "max": finite.max().item(),
        "zeros": (values == 0).double().mean().item(),
        "nonfinite": len(values) - len(finite),
        "norm": finite.norm().item(),
    }


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- statistics -----------------------------------------------------------------------------------


def test_the_default_metrics_are_those_of_all_calls_together(where):
    model, _ = make()
    monitor = Monitor("**")
    monitor.attach(model)
    seen: dict[str, list[torch.Tensor]] = {}
    for name, module in model.named_modules():
        module.register_forward_hook(
            lambda module, args, output, name=name: seen.setdefault(name, []).append(
                output.detach()
            )
        )
    for x, _ in batches(3):
        model(x)
    report = monitor.report()
    assert list(report) == ["", "first", "drop", "second"]
    for name, outputs in seen.items():
        assert tuple(report[name]) == DEFAULT_METRICS
        assert report[name] == pytest.approx(definition(torch.cat(outputs)), rel=1e-5, abs=1e-6)
    assert report["drop"]["zeros"] > 0.1


sizes = st.lists(st.integers(0, 40), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(
    sizes,
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    st.floats(-100, 100),
    st.booleans(),
    st.integers(1, 64),
    st.integers(0, 9),
)
def test_any_division_into_calls_gives_the_same_numbers(sizes, dtype, offset, device, many, seed):
    parts = [(randn(n, seed=seed + i) + offset).to(dtype) for i, n in enumerate(sizes)]
    whole = torch.cat(parts).double()
    if not len(whole):
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running_statistics, "_MAX_ROWS", many)  # rows are folded early
        split = torch.split  # tensors are measured in pieces
        patch.setattr(running_statistics, "pieces_of", lambda x: split(x.detach().reshape(-1), 16))
        if device:
            patch.setattr(running_statistics, "_can_read", lambda device: False)
        sums = RunningSums(extremes=True, zeros=True)
        for part in parts:
            sums.add("1", part)
            sums.add("0", part * 0)  # of another module
        names, rows = sums.take()
    found = RunningSums.merge(names, read_tensors(rows))
    expected = definition(whole)
    got = {
        "mean": found["1"].mean,
        "std": found["1"].std,
        "min": found["1"].low,
        "max": found["1"].high,
        "zeros": 1 - found["1"].nonzero / found["1"].size,
        "nonfinite": found["1"].size - found["1"].finite,
        "norm": found["1"].norm,
    }
    close = 1e-5 * (1 + abs(offset))
    assert got == pytest.approx(expected, rel=1e-4, abs=close)
    assert (found["0"].size, found["0"].nonzero, found["0"].std) == (len(whole), 0, 0)


def test_what_is_not_finite_is_counted_and_left_out(where):
    values = torch.tensor([1.0, math.nan, 3.0, math.inf, -math.inf, 0.0])
    found = report_of(values, torch.tensor([5.0]))
    expected = definition(torch.cat([values, torch.tensor([5.0])]))
    assert found == pytest.approx(expected)
    assert (found["nonfinite"], found["min"], found["max"]) == (3, 0.0, 5.0)


def test_what_is_not_finite_is_seen_also_when_nobody_asked(where):
    assert report_of(torch.tensor([1.0, math.nan]), metrics=["mean"]) == {
        "mean": 1.0,
        "nonfinite": 1,
    }
    assert report_of(torch.ones(2), metrics=["mean"]) == {"mean": 1.0}
    found = report_of(torch.full((2,), math.nan), metrics=["mean", "std", "min", "max", "norm"])
    assert found.pop("nonfinite") == 2
    assert all(math.isnan(value) for value in found.values())


def test_nothing_of_an_output_is_kept_alive():
    model, monitor = nn.Sequential(nn.Linear(4, 4)), Monitor("**", list(METRICS))
    monitor.attach(model)
    output = weakref.ref(model(torch.randn(2, 4)))
    gc.collect()
    assert output() is None
    assert monitor.report()["0"]["zeros"] == 0


def test_under_no_grad_inference_mode_and_autocast():
    model, monitor = nn.Sequential(nn.Linear(8, 4), nn.Tanh()), Monitor("0", list(METRICS))
    monitor.attach(model)
    outputs = []
    model[0].register_forward_hook(lambda module, args, output: outputs.append(output.detach()))
    x = randn(3, 8)
    model(x)
    with torch.no_grad():
        model(x)
    with torch.inference_mode():
        model(x)
    with torch.autocast("cpu", torch.bfloat16):
        model(x)
    model(x)
    found = monitor.report()["0"]
    expected = definition(torch.cat([one.float() for one in outputs]))
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4)


# -- further metrics ------------------------------------------------------------------------------


def test_a_histogram_counts_in_four_bins_for_each_doubling():
    exact = [2.0**i * (1 + j / 4) for i in range(-20, 20) for j in range(4)]
    near, infinite = torch.tensor(exact), torch.tensor(math.inf)
    edges_of_bins = torch.cat([near.nextafter(-infinite), near, near.nextafter(infinite)])
    values = torch.cat([edges_of_bins, -edges_of_bins, randn(2000) * 3, torch.zeros(7)])
    values = torch.cat([values, torch.tensor([1e-30, -1e-30, 1e30, -1e30, math.nan, math.inf])])
    found = report_of(values[:500], values[500:], metrics=["histogram"])["histogram"]
    counts, edges = found["counts"], found["edges"]
    assert sum(counts) == len(values) - 2
    assert len(edges) == len(counts) + 1
    assert edges == sorted(edges)
    assert not any(a == b == 0 for a, b in pairwise(counts))
    middle = next(i for i, edge in enumerate(edges) if edge > 0)
    assert (edges[middle - 1], edges[middle]) == (-(2.0**-64), 2.0**-64)
    assert counts[middle - 1] == 9
    assert (edges[0], edges[-1], counts[0], counts[-1]) == (-(2.0**32), 2.0**32, 1, 1)
    wide = values.double()
    for count, low, high in zip(counts[1:-1], edges[1:], edges[2:], strict=False):
        # Each bin has the edge that is nearer to zero.
        inside = (wide >= low) & (wide < high) if low > 0 else (wide > low) & (wide <= high)
        if low < 0 < high:
            inside = (wide > low) & (wide < high)
        assert count == inside.sum(), (low, high)


def test_a_unit_is_dead_when_it_never_gave_anything_but_zeros(where):
    first, second = torch.zeros(2, 3, 4), torch.zeros(5, 4)
    first[0, 1, 2] = -1
    second[3, 0] = math.nan
    assert report_of(first, metrics=["dead"]) == {"dead": 0.75}
    assert report_of(first, second, metrics=["dead"]) == {"dead": 0.5}
    assert report_of((first, second), metrics=["dead"]) == {"dead": 0.75}


# -- functions ------------------------------------------------------------------------------------


# -- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metrics": ["maen"]}, r"unknown metric 'maen'. Did you mean 'mean'\?"),
        ({"metrics": []}, "nothing to measure"),
        ({"every": 5}, "'every' belongs to the registration"),
    ],
)
def test_options_that_do_not_fit_are_errors_when_it_is_made(options, message):
    with pytest.raises(ConfigError, match=message):
        Monitor("**", **options)


def test_a_copy_and_a_pickle_measure_for_themselves():
    model, _ = make()
    monitor = Monitor("first", ["mean", "histogram", "dead", "forward_time_ms"])
    monitor.attach(model)
    model(randn(4, 8))
    for other in (copy.deepcopy(monitor), pickle.loads(pickle.dumps(monitor))):
        assert other.attachment is None
        assert other.report() == {}
        other.attach(copy.deepcopy(model)).root(randn(4, 8))
        assert list(other.report()["first"]) == list(monitor.metrics)
    assert list(monitor.report()["first"]) == list(monitor.metrics)


# -- times ----------------------------------------------------------------------------------------


class Clock:
    """A clock that goes only when somebody works."""

    def __init__(self, monkeypatch: Any) -> None:
        self.now = 0.0
        monkeypatch.setattr(timing, "perf_counter", lambda: self.now)


class Takes(nn.Module):
    """Takes some seconds."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.now += self.seconds
        return x * 1


def times_of(report: dict[str, Any]) -> dict[str, float]:
    return {name: values["forward_time_ms"] / 1e3 for name, values in report.items()}


def test_each_module_is_timed_also_after_a_forward_that_failed(monkeypatch):
    class Tries(nn.Sequential):
        def forward(self, x):
            try:
                return super().forward(torch.ones(3))
            except RuntimeError:
                return x

    clock = Clock(monkeypatch)
    inner = nn.Sequential(Takes(clock, 1), Takes(clock, 4))
    model = nn.Sequential(inner, Tries(nn.Linear(2, 2)), nn.Linear(2, 2))
    monitor = Monitor("**", ["forward_time_ms"])
    monitor.attach(model)
    with pytest.raises(RuntimeError):
        model(torch.ones(3))
    clock.now += 100
    model(torch.ones(2))
    expected = {"": 5, "0": 10, "0.0": 2, "0.1": 8, "1": 0, "2": 0}
    assert times_of(monitor.report()) == expected


# -- in training ----------------------------------------------------------------------------------


def fit(
    *hooks: Any,
    data: Any = None,
    val: Any = None,
    folder: Any = None,
    every: int = 1,
    **fields: Any,
) -> Trainer:
    model, optimizer = make()
    config = TrainerConfig(**{"runs": folder, "progress": "off", "seed": 3, **fields})
    trainer = Trainer(config, model, optimizer, loss_fn=F.mse_loss)
    for hook in hooks:
        trainer.add_hook(hook, every=every if isinstance(hook, Monitor) else 1)
    trainer.fit(data or batches(6), val_loaders=val)
    return trainer


def logged(folder: Any) -> list[dict[str, Any]]:
    (path,) = folder.glob("*/metrics.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [one for one in records if one["name"].startswith(("probes", "mine"))]


def test_with_accumulation_the_numbers_are_those_of_the_whole_step(tmp_path):
    class Sees(hookline.Hook):
        def __init__(self):
            self.outputs = {}

        def on_after_forward(self, outputs, step):
            self.outputs.setdefault(step + 1, []).append(outputs.detach().clone())

    sees = Sees()
    val = [(100 * x, y) for x, y in batches(2, seed=5)]
    fit(
        sees,
        Monitor(""),
        every=2,
        data=batches(12),
        val=val,
        folder=tmp_path,
        accumulate=3,
        validate_every_steps=1,
    )
    records = logged(tmp_path)
    assert {one["step"] for one in records} == {2, 4}
    for step in (2, 4):
        found = {
            one["name"].removeprefix("probes/"): one["value"]
            for one in records
            if one["step"] == step
        }
        expected = definition(torch.cat(sees.outputs[step][:3]))
        assert found == pytest.approx(expected, rel=1e-5)


def test_values_are_in_the_record_under_their_prefix(tmp_path):
    monitor = Monitor(nn.Linear, ["mean", "histogram"], prefix="mine")
    trainer = fit(monitor, every=3, folder=tmp_path)
    records = logged(tmp_path)
    assert [(one["step"], one["name"], one["kind"]) for one in records] == [
        (step, f"mine/{module}/{metric}", kind)
        for step in (3, 6)
        for module in ("first", "second")
        for metric, kind in (("mean", "scalar"), ("histogram", "histogram"))
    ]
    assert trainer.hooks.describe()[0].name == "monitor"
    assert monitor.attachment is None or not monitor.attachment.enabled


def test_training_is_the_same_bit_for_bit_with_and_without():
    everything = Monitor("**", list(METRICS))
    plain, observed = fit(), fit(everything)
    assert same(weights(plain.model), weights(observed.model))
    assert observed.hooks.summary().failures == {}


@pytest.mark.parametrize("every", [1, 2])
def test_a_step_that_was_not_measured_to_its_end_is_not_reported(tmp_path, every):
    class Toggles(hookline.Hook):
        def on_train_batch_start(self, trainer, batch_idx):
            hooks = trainer.hooks
            {3: hooks.disable_hook, 4: hooks.enable_hook}.get(batch_idx, len)("monitor")

    monitor = Monitor("", ["mean"])
    fit(Toggles(), monitor, every=every, data=batches(8), folder=tmp_path, accumulate=2)
    records = [one for one in logged(tmp_path) if one["name"] == "probes/mean"]
    assert [one["step"] for one in records] == ([1, 3, 4] if every == 1 else [4])
    expected = Monitor("", ["mean"])
    fit(expected, every=every, data=batches(8), folder=tmp_path / "all", accumulate=2)
    whole = {one["step"]: one["value"] for one in logged(tmp_path / "all")}
    assert all(whole[one["step"]] == one["value"] for one in records)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.body, self.head, self.reentrant = Net(), nn.Linear(4, 4), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            return self.head(self.body(x))
        return self.head(checkpoint(self.body, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputation_is_not_counted_and_changes_nothing(reentrant):
    gradients, reports = [], []
    for kind in (None, reentrant):
        torch.manual_seed(0)
        model = Checkpointed(kind)
        monitor = Monitor("**", [*DEFAULT_METRICS, "histogram", "dead"])
        monitor.attach(model)
        torch.manual_seed(1)
        model(randn(4, 8).requires_grad_()).sum().backward()
        gradients.append([one.grad for one in model.parameters()])
        reports.append(monitor.report())
    assert same(*gradients)
    for one, other in zip(reports[0].values(), reports[1].values(), strict=True):
        for metric in (*DEFAULT_METRICS, "histogram", "dead"):
            assert one[metric] == other[metric]


def test_threads_that_run_the_same_model_lose_nothing(monkeypatch):
    monkeypatch.setattr(running_statistics, "_MAX_ROWS", 7)
    model, monitor = nn.Sequential(Gives()), Monitor("0", ["mean", "norm", "dead", "histogram"])
    monitor.attach(model)
    reports = []

    def work(number):
        for _ in range(200):
            model(torch.full((3,), float(number)))

    threads = [threading.Thread(target=work, args=(2**i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        reports.append(monitor.report())
    reports.append(monitor.report())
    squares = sum(one["0"]["norm"] ** 2 for one in reports if "norm" in one.get("0", {}))
    assert squares == pytest.approx(200 * 3 * (1 + 4 + 16 + 64))
    counts = [one["0"]["histogram"]["counts"] for one in reports if "histogram" in one.get("0", {})]
    assert sum(map(sum, counts)) == 4 * 200 * 3


def test_nothing_is_read_before_the_report_and_then_at_once(monkeypatch):
    monkeypatch.setattr(running_statistics, "_can_read", lambda device: False)
    metrics = [name for name in METRICS if name != "forward_time_ms"]
    model, _ = make()
    monitor = Monitor("**", metrics)
    monitor.attach(model)
    reads = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "nonzero"):
        original = getattr(torch.Tensor, name)

        def read(self, *args, name=name, original=original):
            reads.append(name)
            return original(self, *args)

        monkeypatch.setattr(torch.Tensor, name, read)
    for x, _ in batches(4):
        model(x)
    assert reads == []
    assert len(monitor.report()) == 4
    assert reads == ["tolist"]


@pytest.mark.slow
def test_a_compiled_model_is_monitored_and_times_are_left_out():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    plain = copy.deepcopy(model)
    monitor, expected = Monitor("**", list(METRICS)), Monitor("**", list(METRICS))
    monitor.attach(model)
    expected.attach(plain)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for seed in range(3):
        for one in (compiled, plain):
            one(randn(4, 8, seed=seed)).sum().backward()
    found, known = monitor.report(), expected.report()
    assert list(found) == list(known)
    for name, values in found.items():
        assert "forward_time_ms" not in values
        for metric in (*DEFAULT_METRICS, "dead", "memory"):
            assert values[metric] == pytest.approx(known[name][metric], rel=1e-5), (name, metric)
    monitor.attachment.disable()
    compiled(randn(4, 8))
    assert monitor.report() == {}
