"""GradientMonitor: the numbers it reports are those of the gradients, at little cost."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import loops
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import Net, batches, make, train
from torch import nn
from torch.nn import functional as F

import hookline
from hookline.hooks.monitoring.gradient_monitor import GradientMonitor
from hookline.runs.jsonl_reader import read_records
from hookline.tensors.histograms import estimate_percentiles
from hookline.tensors.statistics import TensorStatistics

NAMES = ["first.weight", "first.bias", "second.weight", "second.bias"]


def fit(
    folder: Path, *hooks: hookline.Hook, parts: Any = None, **options: Any
) -> dict[tuple[int, str], Any]:
    """Train, and return the logged values by step and name."""
    model, optimizers = parts or (None, None)
    trainer = loops.fit(*hooks, model=model, optimizers=optimizers, runs=folder, **options)
    assert trainer.hooks.summary().failures == {}
    records = read_records(trainer.run.path / "metrics.jsonl")
    return {(one["step"], one["name"]): one["value"] for one in records}


class Gradients(hookline.Hook):
    """Keeps what the gradients were, by step."""

    def __init__(self) -> None:
        self.seen: dict[int, dict[str, torch.Tensor]] = {}

    def on_gradients_ready(self, model: nn.Module, step: int) -> None:
        self.seen.setdefault(step + 1, {}).update(
            {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        )


# -- what is reported -----------------------------------------------------------------------------


def test_norms_are_those_of_each_parameter_and_of_all(tmp_path: Path) -> None:
    gradients = Gradients()
    values = fit(tmp_path, gradients, GradientMonitor(1))
    for step, seen in gradients.seen.items():
        for name in NAMES:
            assert values[step, f"gradients/{name}/norm"] == pytest.approx(seen[name].norm().item())
        whole = torch.cat([one.flatten() for one in seen.values()])
        assert values[step, "gradients/total/norm"] == pytest.approx(whole.norm().item())
    assert len(gradients.seen) == 4


def test_a_full_report_is_right(tmp_path: Path) -> None:
    gradients = Gradients()
    monitor = GradientMonitor(1, log_histogram=True, percentiles=[10, 50, 90])
    values = fit(tmp_path, gradients, monitor)
    everything = torch.cat([one.flatten() for one in gradients.seen[4].values()])
    for name, grad in {**gradients.seen[4], "total": everything}.items():
        found = {
            measure: values[4, f"gradients/{name}/{measure}"]
            for measure in ("mean", "std", "abs_max", "zeros", "nonfinite")
        }
        assert found == pytest.approx(
            {
                "mean": grad.mean().item(),
                "std": grad.std(correction=0).item(),
                "abs_max": grad.abs().max().item(),
                "zeros": (grad == 0).double().mean().item(),
                "nonfinite": 0,
            },
            rel=1e-4,
            abs=1e-8,
        )
    for name in NAMES:
        grad = gradients.seen[4][name]
        histogram = values[4, f"gradients/{name}/histogram"]
        counts, edges = histogram["counts"], histogram["edges"]
        assert sum(counts) == grad.numel()
        for count, low, high in zip(counts, edges, edges[1:], strict=False):
            assert count == ((grad > low) & (grad < high)).sum()
        for percentile in (10, 50, 90):
            exact = torch.quantile(grad, percentile / 100).item()
            near = pytest.approx(exact, abs=0.02 * grad.abs().max().item())
            assert values[4, f"gradients/{name}/p{percentile}"] == near
    assert (4, "gradients/total/histogram") not in values


def test_values_are_accumulated_unscaled_and_not_clipped(tmp_path: Path) -> None:
    gradients = Gradients()
    values = fit(tmp_path, gradients, GradientMonitor(1), accumulate=2, clip_norm=1e-3)
    norm = values[2, "gradients/total/norm"]
    assert norm > 1e-2
    assert norm == pytest.approx(
        torch.cat([one.flatten() for one in gradients.seen[2].values()]).norm().item()
    )


# -- which parameters -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["first"], ["first.weight", "first.bias"]),
        (["*.bias"], ["first.bias", "second.bias"]),
        ([r"^sec.*t$"], ["second.weight"]),
        (["first.bias", "*.weight"], ["first.weight", "first.bias", "second.weight"]),
    ],
)
def test_param_filter_takes_parts_of_names_globs_and_regular_expressions(
    tmp_path: Path, patterns: list[str], expected: list[str]
) -> None:
    values = fit(tmp_path, GradientMonitor(1, param_filter=patterns))
    layers = {name.split("/")[1] for _, name in values if name.startswith("gradients")}
    assert layers == {*expected, "total"}
    norms = [values[1, f"gradients/{name}/norm"] for name in expected]
    assert values[1, "gradients/total/norm"] == pytest.approx(math.hypot(*norms))


def test_a_pattern_that_matches_nothing_is_one_configuration_error_before_the_first_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = hookline.TrainerConfig(runs=None, progress="off")
    hooks = [GradientMonitor(param_filter=["scond.weight"])]
    trainer = hookline.Trainer(config, *make(), loss_fn=F.mse_loss, hooks=hooks)
    with pytest.raises(hookline.ConfigError) as error:
        trainer.fit(batches(1))
    assert str(error.value).startswith("GradientMonitor: param_filter: No parameter matches")
    assert "Did you mean 'second.weight'?" in str(error.value)
    assert "The parameters are: 'first.weight'" in str(error.value)
    assert trainer.step == 0
    assert "Traceback" not in caplog.text
    model, optimizer = make()
    attached = hookline.attach(model, optimizer, hooks=[GradientMonitor(param_filter=["secnd"])])
    with pytest.raises(hookline.ConfigError, match="Did you mean 'second'"), attached:
        pytest.fail("training must not start")


# -- warnings -------------------------------------------------------------------------------------


class Scale(hookline.Hook):
    """Makes gradients of the second layer large or small, step by step."""

    intervenes = True

    def __init__(self, *factors: float) -> None:
        self.factors = factors

    def on_gradients_ready(self, model: Net, step: int) -> None:
        model.second.weight.grad.mul_(self.factors[step])


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if "gradients" in one.getMessage()]


def test_exploding_layers_are_named_once_per_episode(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scale = Scale(1, 1e6, 1e6, 1, 1e6)
    fit(tmp_path, scale, GradientMonitor(1), data=batches(5), clip_norm=0.1)
    told = warnings_of(caplog)
    assert [one.split(":")[0] for one in told] == ["Step 2", "Step 5"]
    assert "explode, above 1000: 'second.weight' (" in told[0]
    assert "first" not in told[0]


def test_a_gradient_that_is_not_finite_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monitor = GradientMonitor(1, log_statistics=True)
    values = fit(tmp_path, Scale(math.nan, 1, 1, 1), monitor, data=batches(1), on_nan="continue")
    assert "gradients are not finite: 'second.weight' (nan)." in warnings_of(caplog)[0]
    assert values[1, "gradients/second.weight/norm"] == "NaN"
    assert values[1, "gradients/second.weight/nonfinite"] == 64
    assert (1, "gradients/second.weight/mean") not in values  # there is nothing to take it of
    assert values[1, "gradients/total/nonfinite"] == 64
    assert math.isfinite(values[1, "gradients/total/mean"])


def test_a_monitor_with_nothing_to_do_is_an_error() -> None:
    with pytest.raises(hookline.ConfigError, match="nothing to report"):
        GradientMonitor(log_norm=False, vanishing=None, exploding=None)


# -- cost -----------------------------------------------------------------------------------------


class Operations(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def told(monitor: GradientMonitor, session: Any, step: int) -> list[str]:
    """The tensor operations of a step's events."""
    with Operations() as seen:
        monitor.on_gradients_ready(step, 0, session.optimizers, session.model)
        monitor.on_step_end(session)
    return seen.names


FULL: dict[str, Any] = {"log_histogram": True, "percentiles": [10, 50]}


@pytest.mark.parametrize("options", [{}, FULL])
def test_values_are_read_once_per_report(options: dict[str, Any]) -> None:
    """Reading a number (`.item()`, `.tolist()`) is what waits for a device."""
    model, optimizer = make()
    session = hookline.attach(model, optimizer)
    train(model, optimizer, batches(1))
    monitor = GradientMonitor(1, **options)
    monitor.on_train_start(model)
    reads: list[int] = []
    read = torch.Tensor.tolist
    try:
        torch.Tensor.tolist = lambda self: (reads.append(self.numel()), read(self))[1]  # type: ignore[method-assign]
        operations = told(monitor, session, 0)
    finally:
        torch.Tensor.tolist = read  # type: ignore[method-assign]
    assert len(reads) == 1
    assert "aten._local_scalar_dense.default" not in operations  # what `.item()` and `if` do
    if not options:
        assert operations.count("aten._foreach_norm.Scalar") == 1
    session.detach()


def test_nothing_is_computed_in_other_steps() -> None:
    model, optimizer = make()
    session = hookline.attach(model, optimizer)
    train(model, optimizer, batches(1))
    monitor = GradientMonitor(3, **FULL)
    monitor.on_train_start(model)
    assert told(monitor, session, 0) == told(monitor, session, 1) == []
    assert told(monitor, session, 2) != []
    session.detach()


# -- other loops, other gradients -----------------------------------------------------------------


def std_of(moments: dict[str, torch.Tensor]) -> torch.Tensor:
    return (moments["squares"] / moments["finite"]).sqrt()


def test_a_tensor_of_many_pieces_is_measured_whole() -> None:
    torch.manual_seed(0)
    values = torch.randn(500_000)
    values[::7] = 0
    values[3] = math.inf
    values[400_000] = math.nan
    values[450_000] = -9.5
    finite = values[values.isfinite()]
    measured = TensorStatistics([values, torch.zeros(3)])
    found = measured.moments()
    assert found["finite"].tolist() == [499_998, 3]
    assert found["zeros"].tolist() == [int((values == 0).sum()), 3]
    assert found["largest"].tolist() == [9.5, 0]
    assert found["mean"][0].item() == pytest.approx(finite.double().mean().item(), abs=1e-8)
    assert std_of(found)[0].item() == pytest.approx(
        finite.double().std(correction=0).item(), rel=1e-5
    )
    counts = measured.counts()
    assert counts.sum(1).tolist() == [499_998, 3]
    assert estimate_percentiles(counts, [50])[1].item() == 0


def test_a_sparse_gradient_counts_the_zeros_it_does_not_store() -> None:
    embedding = nn.Embedding(50, 4, sparse=True)
    embedding(torch.tensor([1, 1, 7])).square().sum().backward()
    sparse = embedding.weight.grad
    assert sparse is not None
    for one, other in zip(_all_of(sparse), _all_of(sparse.to_dense()), strict=True):
        torch.testing.assert_close(one, other)
    assert TensorStatistics([sparse]).sizes() == [200]


def _all_of(gradient: torch.Tensor) -> list[torch.Tensor]:
    measured = TensorStatistics([gradient])
    found = measured.moments()
    return [
        measured.norms(),
        *(found | {"squares": std_of(found)}).values(),
        measured.counts(),
        estimate_percentiles(measured.counts(), [0, 3, 50, 99, 100]),
    ]


values_of_gradients = st.lists(
    st.one_of(
        st.floats(-1e3, 1e3, width=32),
        st.floats(-(2**-20), 2**-20, width=32, allow_subnormal=False),
        st.sampled_from([0.0, 1.0, -1.0]),
    ),
    min_size=1,
    max_size=60,
)


@settings(deadline=None, max_examples=200)
@given(values=values_of_gradients, wanted=st.floats(0, 100))
def test_percentiles_are_as_near_as_the_docstring_says(values: list[float], wanted: float) -> None:
    tensor = torch.tensor(values)
    estimate = estimate_percentiles(TensorStatistics([tensor]).counts(), [wanted]).item()
    ordered = sorted(tensor.tolist())
    position = wanted / 100 * (len(ordered) - 1)
    low, high = ordered[math.floor(position)], ordered[math.ceil(position)]
    exact = low + (high - low) * (position - math.floor(position))
    assert abs(estimate - exact) <= 0.02 * max(abs(low), abs(high)) + 2**-64


def test_percentiles_of_nothing_finite_are_not_a_number() -> None:
    measured = TensorStatistics([torch.full((3,), math.nan)])
    found = measured.moments()
    assert math.isnan(estimate_percentiles(measured.counts(), [50]).item())
    assert found["finite"].item() == 0
