"""Edits: what flows through a model is changed, with permission, and gradients follow."""

from __future__ import annotations

import json
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from loops import batches, make
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hookline
from hookline.errors import ConfigError, ProbeError
from hookline.probes.edit import Edit
from hookline.probes.store import CapturedState
from hookline.probes.taps import tap


class Model(nn.Module):
    """Two layers; `edit` is what stands in the code for an edit of the first one's output."""

    def __init__(self, edit: Callable[[Any], Any] = lambda y: y, how: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 3)
        self.edit = edit
        self.how = how

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.edit(self.first(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "plain":
            y = self.inner(x)
        else:
            y = checkpoint(self.inner, x, use_reentrant=self.how == "reentrant")
        return self.second(y)


def x_of(n: int = 5) -> torch.Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)


def results(model: nn.Module, edit: Edit | None = None) -> list[torch.Tensor]:
    """The output and all gradients, also that of what goes in."""
    x = x_of()
    if edit is not None:
        edit.attach(model)
    out = model(x)
    out.square().sum().backward()
    if edit is not None:
        edit.detach()
    gradients = [(one.grad, one) for one in (x, *model.parameters())]
    return [out.detach(), *(torch.zeros_like(p) if g is None else g for g, p in gradients)]


def any_rank(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.allclose(one, other, atol=1e-6) for one, other in zip(a, b, strict=True))


VECTOR = torch.linspace(-1, 1, 6)
WHOLE = torch.randn(5, 6, generator=torch.Generator().manual_seed(2))


def at_rows(y: torch.Tensor, value: Any) -> torch.Tensor:
    rows = value(y[1:3]) if callable(value) else value
    return torch.cat([y[:1], rows.expand(2, 6), y[3:]])


def last_column(y: torch.Tensor) -> torch.Tensor:
    return torch.cat([y[:, :-1], y[:, -1:] * 2], dim=1)


def allowed(make_edit: Callable[..., Edit], *args: Any, **options: Any) -> Edit:
    return make_edit("first", *args, enable_intervention=True, **options)


CASES: dict[str, tuple[Callable[[], Edit], Callable[[torch.Tensor], torch.Tensor]]] = {
    "replace by a tensor": (
        lambda: allowed(Edit.replace, WHOLE),
        lambda y: WHOLE + 0 * y,
    ),
    "replace by a number": (lambda: allowed(Edit.replace, 3), lambda y: 0 * y + 3),
    "replace by a vector that stretches": (
        lambda: allowed(Edit.replace, VECTOR),
        lambda y: VECTOR + 0 * y,
    ),
    "replace by a function": (lambda: allowed(Edit.replace, torch.sin), torch.sin),
    "scale": (lambda: allowed(Edit.scale, 0.5), lambda y: 0.5 * y),
    "scale by a tensor": (lambda: allowed(Edit.scale, VECTOR), lambda y: VECTOR * y),
    "ablate": (lambda: allowed(Edit.ablate), lambda y: 0 * y),
    "ablate to the mean": (
        lambda: allowed(Edit.ablate, "mean"),
        lambda y: y.mean(0, keepdim=True).expand_as(y),
    ),
    "add": (lambda: allowed(Edit.add, VECTOR), lambda y: y + VECTOR),
    "add with a coefficient": (
        lambda: allowed(Edit.add, VECTOR, coefficient=-2.0),
        lambda y: y - 2 * VECTOR,
    ),
    "patch": (lambda: allowed(Edit.patch, WHOLE), lambda y: WHOLE + 0 * y),
    "patch from a capture": (
        lambda: allowed(Edit.patch, CapturedState("first", output=WHOLE)),
        lambda y: WHOLE + 0 * y,
    ),
    "patch at rows, from all": (
        lambda: allowed(Edit.patch, WHOLE, at=slice(1, 3)),
        lambda y: at_rows(y, WHOLE[1:3]),
    ),
    "patch at rows, from these": (
        lambda: allowed(Edit.patch, WHOLE[:2], at=slice(1, 3)),
        lambda y: at_rows(y, WHOLE[:2]),
    ),
    "ablate at rows, to their mean": (
        lambda: allowed(Edit.ablate, "mean", at=slice(1, 3)),
        lambda y: at_rows(y, lambda z: z.mean(0, keepdim=True)),
    ),
    "replace at rows by a function": (
        lambda: allowed(Edit.replace, torch.sin, at=[1, 2]),
        lambda y: at_rows(y, torch.sin),
    ),
    "scale the last column": (lambda: allowed(Edit.scale, 2, at=(slice(None), -1)), last_column),
    "scale the last column, as text": (lambda: allowed(Edit.scale, 2, at=":, -1"), last_column),
    "scale with dots": (lambda: allowed(Edit.scale, 2, at="..., -1:"), last_column),
}


@pytest.mark.parametrize("case", CASES)
def test_an_edit_gives_the_outputs_and_gradients_of_the_model_written_with_it(case: str) -> None:
    edit, by_hand = CASES[case]
    assert any_rank(results(Model(), edit()), results(Model(by_hand)))
    assert not any_rank(results(Model(), edit()), results(Model()))


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("case", CASES)
def test_an_edit_is_applied_again_in_the_recomputation_of_checkpointing(
    case: str, how: str
) -> None:
    edit, by_hand = CASES[case]
    assert any_rank(results(Model(how=how), edit()), results(Model(by_hand)))


CUTS: dict[str, Callable[[], Edit]] = {
    "replace by a tensor": CASES["replace by a tensor"][0],
    "replace by a number": CASES["replace by a number"][0],
    "replace by a function": lambda: allowed(Edit.replace, torch.zeros_like),
    "replace by what is learned": lambda: allowed(Edit.replace, nn.Parameter(VECTOR.clone())),
    "ablate": CASES["ablate"][0],
    "patch": CASES["patch"][0],
}


# -- permission -----------------------------------------------------------------------------------


def test_an_edit_without_the_permission_is_an_error() -> None:
    with pytest.raises(ProbeError, match="enable_intervention=True"):
        Edit.scale("first", 2)


# -- parts of outputs -----------------------------------------------------------------------------

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Output:
    logits: torch.Tensor
    extra: Any = None


class Returns(nn.Module):
    def __init__(self, make_output: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.make_output = make_output

    def forward(self, x: torch.Tensor) -> Any:
        return self.make_output(x)


def edited(make_output: Callable[[torch.Tensor], Any], **options: Any) -> Any:
    model = Returns(make_output)
    edit = Edit.scale("", 10, enable_intervention=True, **options)
    edit.attach(model)
    out = model(torch.tensor([1.0, 2.0]))
    edit.detach()
    return out


def test_the_first_tensor_of_an_output_is_edited_unless_a_part_is_named() -> None:
    first, second = edited(lambda x: (x, x + 1))
    assert (first.tolist(), second.tolist()) == ([10, 20], [2, 3])
    first, second = edited(lambda x: (x, x + 1), part=1)
    assert (first.tolist(), second.tolist()) == ([1, 2], [20, 30])
    first, second = edited(lambda x: (x, x + 1), part=-1)
    assert (first.tolist(), second.tolist()) == ([1, 2], [20, 30])


def test_parts_are_found_in_dicts_lists_named_tuples_and_dataclasses() -> None:
    out = edited(lambda x: {"a": None, "b": [x, x + 1]}, part=["b", 1])
    assert out["b"][1].tolist() == [20, 30]
    assert out["b"][0].tolist() == [1, 2]
    out = edited(lambda x: Pair(x, x + 1), part=1)
    assert isinstance(out, Pair)
    assert (out.left.tolist(), out.right.tolist()) == ([1, 2], [20, 30])
    out = edited(lambda x: Output(x, (x,)), part=("extra", 0))
    assert isinstance(out, Output)
    assert (out.logits.tolist(), out.extra[0].tolist()) == ([1, 2], [10, 20])
    assert edited(lambda x: Output(x)).logits.tolist() == [10, 20]


def test_a_part_that_is_not_there_is_an_error_that_names_the_module() -> None:
    with pytest.raises(ProbeError, match="no part 5: it is a tuple of 2"):
        edited(lambda x: (x, x), part=5)
    with pytest.raises(ProbeError, match="no part 'c': it is a dict of 1"):
        edited(lambda x: {"a": x}, part="c")
    with pytest.raises(ProbeError, match="is a str, not a tensor"):
        edited(lambda x: ("a", x), part=0)
    with pytest.raises(ProbeError, match="without any tensor"):
        edited(lambda x: "a")


# -- what does not fit ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda: allowed(Edit.add, torch.ones(7)),
            r"add at 'first' does not fit: it is float32\[7\], and the output there is "
            r"float32\[5, 6\]",
        ),
        (lambda: allowed(Edit.replace, torch.ones(2, 5, 6)), r"it is float32\[2, 5, 6\]"),
        (lambda: allowed(Edit.patch, torch.ones(6).long()), r"it is int64\[6\]"),
        (lambda: allowed(Edit.replace, lambda y: y[0]), r"returned float32\[6\]. Expected: "),
        (lambda: allowed(Edit.replace, lambda y: y.double()), r"returned float64\[5, 6\]"),
        (lambda: allowed(Edit.replace, lambda y: None), "returned a NoneType"),
        (lambda: allowed(Edit.scale, 2, at=(0, 0, 0)), r"at=\[0, 0, 0\] does not fit"),
    ],
)
def test_what_does_not_fit_is_an_error_that_names_module_and_shapes(
    edit: Callable[[], Edit], message: str
) -> None:
    with pytest.raises(ProbeError, match=message):
        results(Model(), edit())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"operation": "scale"}, "'scale' needs a number or a tensor as its value, not None"),
        ({"operation": "add", "value": "x"}, "'add' needs a number or a tensor"),
        ({"operation": "ablate", "value": "median"}, "'zero' or 'mean' as its value, not 'median'"),
        ({"operation": "replace"}, "a tensor, a number or a function"),
        ({"operation": "patch", "value": 3}, "a captured state or a tensor"),
        ({"operation": "twist", "value": 3}, "'operation' is 'twist'"),
        ({"operation": "scale", "value": 3, "at": 1.5}, "at=1.5 is not an index"),
        ({"operation": "scale", "value": 3, "at": "a:b"}, "'a:b' is neither a number nor a slice"),
        ({"operation": "scale", "value": 3, "factor": 3}, "Unknown option 'factor'"),
    ],
)
def test_wrong_options_are_errors_when_the_edit_is_made(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Edit("first", enable_intervention=True, **options)


# -- where edits are ------------------------------------------------------------------------------


def test_a_tap_can_be_edited_and_only_where_it_is_named() -> None:
    model = Model(lambda y: tap(y, "scores"))
    edit = Edit.scale(None, 2, taps="scores", enable_intervention=True)
    assert any_rank(results(model, edit), results(Model(lambda y: 2 * y)))


def test_edits_are_described_so_that_a_manifest_can_have_them() -> None:
    edit = allowed(Edit.add, VECTOR, coefficient=2.0, at=(slice(None), ..., slice(1, 3)))
    text = json.dumps(dict(edit.hookline_options))
    options = json.loads(text)
    assert options["value"].startswith("float32[6] sha256:")
    assert (options["modules"], options["operation"]) == ("first", "add")
    assert (options["coefficient"], options["enable_intervention"]) == (2.0, True)
    other = allowed(Edit.add, VECTOR + 1)
    assert other.hookline_options["value"] != edit.hookline_options["value"]
    same = allowed(Edit.add, torch.stack([VECTOR, VECTOR], 1)[:, 0])  # other strides
    assert same.hookline_options["value"] == edit.hookline_options["value"]
    patch = allowed(Edit.patch, CapturedState("first", step=3, output=WHOLE))
    assert json.loads(json.dumps(dict(patch.hookline_options)))["value"].startswith("float32")
    function = Edit.replace([nn.Linear, "first"], torch.sin, enable_intervention=True)
    assert json.loads(json.dumps(dict(function.hookline_options)))["modules"] == ["Linear", "first"]


def test_an_edit_in_a_trainer_acts_and_is_listed_in_the_manifest(tmp_path: Any) -> None:
    def fit(*hooks: Any) -> tuple[Any, Any]:
        model, optimizer = make()
        config = hookline.TrainerConfig(runs=tmp_path, progress="off", max_epochs=1)
        trainer = hookline.Trainer(config, model, optimizer, loss_fn=F.mse_loss, hooks=list(hooks))
        trainer.fit(batches(4))
        return model, trainer

    plain, _ = fit()
    model, trainer = fit(Edit.scale("first", 0.5, enable_intervention=True))
    assert not torch.equal(model.second.weight, plain.second.weight)
    assert trainer.run is not None
    manifest = json.loads((trainer.run.path / "manifest.json").read_text())
    (hook,) = [hook for hook in manifest["hooks"] if hook["name"] == "edit"]
    assert hook["options"]["operation"] == "scale"
    assert hook["options"]["value"] == 0.5


# -- compiled models ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "case"),
    [
        pytest.param("inductor", "add with a coefficient", marks=pytest.mark.soak),
        ("aot_eager", "scale the last column"),
        ("aot_eager", "replace by a function"),
        ("aot_eager", "patch at rows, from all"),
        pytest.param("inductor", "ablate", marks=pytest.mark.soak),
        ("aot_eager", "replace by a vector that stretches"),
    ],
)
def test_an_edit_in_a_compiled_model_is_switched_without_compiling_again(
    backend: str, case: str
) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    make_edit, by_hand = CASES[case]
    inner, edit = Model(), make_edit()
    expected, plain = results(Model(by_hand)), results(Model())
    edit.attach(inner)
    torch.compiler.reset()
    counter = CompileCounterWithBackend(backend)
    model = torch.compile(inner, fullgraph=True, backend=counter)
    for _ in range(3):
        inner.zero_grad()
        assert any_rank(results(model), expected)
        assert edit.attachment is not None
        edit.attachment.disable()
        inner.zero_grad()
        assert any_rank(results(model), plain)
        edit.attachment.enable()
    graphs = [str(graph.graph) for graph in counter.graphs]
    assert sum("linear" in graph for graph in graphs) == 1
    edit.detach()


@pytest.mark.slow
def test_an_edit_in_a_compiled_model_with_checkpointing_has_the_right_gradients() -> None:
    make_edit, by_hand = CASES["scale"]
    inner, edit = Model(how="non-reentrant"), make_edit()
    edit.attach(inner)
    torch.compiler.reset()
    model = torch.compile(inner, backend="aot_eager")
    assert any_rank(results(model), results(Model(by_hand)))
    edit.detach()


# -- inputs, blocks and patches from a probe ------------------------------------------------------


class HalvesInput(Model):
    """Does by hand as an edit of the second layer's input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.inner(x) * 0.5)


@pytest.mark.parametrize("how", ["plain", "reentrant", "other"])
def test_the_input_of_a_module_is_edited_with_gradients(how: str) -> None:
    edit = Edit.scale("second", 0.5, enable_intervention=True, where="input")
    assert any_rank(results(Model(how=how), edit), results(HalvesInput()))
    assert not Model().second._forward_pre_hooks


def test_a_part_of_the_input_is_chosen_by_position_or_keyword() -> None:
    class Adds(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor, *, bias: torch.Tensor) -> torch.Tensor:
            return x + 10 * y + 100 * bias

    model, one = Adds(), torch.ones(2, 3)
    expected = {None: 110.0, 0: 110.0, 1: 101.0, "bias": 11.0}
    for part, value in expected.items():
        with Edit.ablate("", where="input", part=part, enable_intervention=True).attach(model):
            assert torch.equal(model(one, one, bias=one), one * value)
    with Edit.ablate("", where="input", at=":, 0", enable_intervention=True).attach(model):
        assert model(one, one, bias=one)[0].tolist() == [110.0, 111.0, 111.0]
    with (
        Edit.ablate("", where="input", part="mask", enable_intervention=True).attach(model),
        pytest.raises(ProbeError, match="The input of '' has no part 'mask'"),
    ):
        model(one, one, bias=one)
    with pytest.raises(ConfigError, match="a tap has no input"):
        Edit.ablate(None, where="input", taps="x", enable_intervention=True)


def test_a_patch_takes_what_a_probe_returned() -> None:
    model, clean, corrupt = Model(), x_of(), x_of() * 3
    with hookline.probe(model, ["first", "second"], input=True) as seen:
        out = model(clean)
    for source in (seen, seen["first"], seen["first"][-1], seen.capture):
        with Edit.patch("first", source, enable_intervention=True).attach(model):
            torch.testing.assert_close(model(corrupt), out)
    with Edit.patch(["first", "second"], seen, enable_intervention=True).attach(model):
        torch.testing.assert_close(model(corrupt), out)
    with Edit.patch("second", seen, where="input", enable_intervention=True).attach(model):
        torch.testing.assert_close(model(corrupt), out)


def test_a_patch_from_a_probe_without_what_it_needs_is_an_error() -> None:
    model = Model()
    with hookline.probe(model, ["first", "second"]) as seen:
        with pytest.raises(ProbeError, match="nothing was captured to patch with"):
            Edit.patch("first", seen, enable_intervention=True)
        model(x_of())
    with pytest.raises(ProbeError, match=r"The input of 'first' was not captured.*input=True"):
        Edit.patch("second", seen, where="input", enable_intervention=True)
    edit = Edit.patch("", seen, enable_intervention=True)
    with pytest.raises(ProbeError, match=r"no captured state of ''.*'first', 'second'"):
        edit.attach(model)
