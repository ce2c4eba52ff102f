"""AttentionMonitor with all kinds of attention: exact values are exact, bounds are bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hookline

Reported = dict[str, float]


class FunctionAttention(nn.Module):
    """Attention that a function computes."""

    def __init__(self, function: Callable[[], Any], heads: int | None = None) -> None:
        super().__init__()
        self.function = function
        if heads is not None:
            self.num_heads = heads

    def forward(self) -> Any:
        return self.function()


def measure(module: nn.Module, *inputs: Any, recompute: bool = False, **kwargs: Any) -> Reported:
    """Return what is measured of one call of an attention module."""
    monitor = hookline.AttentionMonitor(per_head=True, recompute=recompute)
    with monitor.attach(nn.ModuleDict({"layer": module})):
        module(*inputs, **kwargs)
    assert not torch.overrides._get_current_function_mode_stack()
    return dict(monitor.report().get("layer", {}))


def expected_of(logits: Tensor) -> Reported:
    """Measure logits with the dimensions batch, heads, queries and keys, one query at a time."""
    largest, entropies = [], []
    for head in logits.detach().double().unbind(1):
        rows = [row for row in head.flatten(0, -2) if row.max() != -math.inf]
        largest.append(max(row.max().item() for row in rows))
        weights = [row.softmax(-1) for row in rows]
        own = [-sum(p * math.log(p) for p in row.tolist() if p) for row in weights]
        entropies.append(sum(own) / len(own))
    found = {"max_logit": max(largest), "entropy": sum(entropies) / len(entropies)}
    for i, (value, entropy) in enumerate(zip(largest, entropies, strict=True)):
        found |= {f"head_{i}/max_logit": value, f"head_{i}/entropy": entropy}
    return found


def check(found: Reported, logits: Tensor, *, exact: bool, rel: float = 1e-4) -> None:
    expected = expected_of(logits)
    if exact:
        assert found == pytest.approx(expected, rel=rel, abs=1e-5)
        return
    bounds = {name.replace("max_logit", "max_logit_bound") for name in expected if "max" in name}
    assert found.keys() == bounds
    for name, value in found.items():
        largest = expected[name.replace("_bound", "")]
        assert value >= largest - rel * abs(largest)


# -- fused attention ------------------------------------------------------------------------------


def logits_of(q: Tensor, k: Tensor, scale: float | None, mask: Any, *, causal: bool) -> Tensor:
    """Return the logits as the documentation of `scaled_dot_product_attention` computes them."""
    if k.shape[-3] != q.shape[-3]:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    logits = q.double() @ k.double().transpose(-2, -1) * factor
    if causal:
        allowed = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
        logits = logits.masked_fill(~allowed, -math.inf)
    if mask is not None and mask.dtype is torch.bool:
        logits = logits.masked_fill(~mask, -math.inf)
    elif mask is not None:
        logits = logits + mask
    return logits


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    sizes=st.tuples(*[st.integers(1, 4)] * 4),
    groups=st.integers(1, 3),
    how=st.sampled_from(["plain", "causal", "masked", "biased", "aligned"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    scale=st.sampled_from([None, 0.1, 7.0, -1.0]),
    size=st.sampled_from([1e-3, 1.0, 30.0]),
    recompute=st.booleans(),
)
def test_fused_attention_is_exact_or_bounded(
    seed, sizes, groups, how, dtype, scale, size, recompute
) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch, kv_heads, length, keys = sizes
    heads = kv_heads * groups
    q = (torch.randn(batch, heads, length, 4, generator=generator) * size).to(dtype)
    k = (torch.randn(batch, kv_heads, keys, 4, generator=generator) * size).to(dtype)
    if how == "aligned":  # the largest logit equals the bound
        k = q[:, :1, :1].expand(batch, kv_heads, keys, 4) * 0.5
    mask = None
    if how == "masked":
        mask = torch.rand(batch, 1, length, keys, generator=generator) < 0.7
        mask[..., 0] = True
    elif how == "biased":
        mask = torch.randn(1, heads, length, keys, generator=generator).to(dtype) * 50
    causal = how == "causal"

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, k, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=groups > 1
        )

    found = measure(FunctionAttention(attend), recompute=recompute)
    check(found, logits_of(q, k, scale, mask, causal=causal), exact=recompute, rel=1e-3)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("shape", [(5, 4), (6, 5, 4), (2, 3, 2, 5, 4)])
def test_batch_and_heads_may_have_any_dimensions(shape, recompute) -> None:
    """One head without a batch, both in one dimension, and a batch of two dimensions."""
    torch.manual_seed(0)
    q, k = torch.randn(2, *shape)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(q, k, k, attn_mask=mask)

    found = measure(FunctionAttention(attend, heads=2), recompute=recompute)
    heads = 1 if len(shape) == 2 else 2
    logits = logits_of(q[None, None], k[None, None], None, mask, causal=False)
    check(found, logits.reshape(-1, heads, 5, 5), exact=recompute)


def test_a_query_whose_keys_are_all_masked_does_not_count() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 3, 5, 4)
    mask = torch.ones(5, 5, dtype=torch.bool).tril(-1)

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(q, k, k, attn_mask=mask)

    logits = logits_of(q, k, None, mask, causal=False)
    found = measure(FunctionAttention(attend), recompute=True)
    check(found, logits, exact=True)
    found = measure(FunctionAttention(lambda: logits.float().softmax(-1) @ k))
    check(found, logits, exact=True)


def test_under_autocast_logits_are_computed_in_full_precision() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 3, 5, 16)
    with torch.autocast("cpu", torch.bfloat16):
        attend = FunctionAttention(lambda: F.scaled_dot_product_attention(q, k, k))
        found = measure(attend, recompute=True)
    check(found, logits_of(q, k, None, None, causal=False), exact=True, rel=1e-6)


# -- attention by hand ----------------------------------------------------------------------------


def test_heads_that_are_grouped_or_joined_with_the_batch_are_told_apart() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 2, 3, 5, 5)  # batch, key heads, queries of each
    found = measure(FunctionAttention(lambda: logits.softmax(-1)))
    check(found, logits.flatten(1, 2), exact=True)
    found = measure(FunctionAttention(lambda: logits.flatten(0, 2).softmax(-1), heads=6))
    check(found, logits.flatten(1, 2), exact=True)


def test_attention_in_several_parts_is_measured_as_a_whole() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 8, 5)
    parts = logits.split(3, -2)

    def attend() -> Tensor:
        return torch.cat([part.softmax(-1) for part in parts], -2)

    check(measure(FunctionAttention(attend)), logits, exact=True)


def test_large_logits_are_measured_in_blocks(monkeypatch) -> None:
    monkeypatch.setattr("hookline.hooks.monitoring.attention_monitor._BLOCK", 64)
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 7, 5)
    check(measure(FunctionAttention(lambda: logits.softmax(-1))), logits, exact=True)
    q = torch.randn(2, 3, 7, 4)
    attend = FunctionAttention(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True))
    found = measure(attend, recompute=True)
    check(found, logits_of(q, q, None, None, causal=True), exact=True)


# -- nn.MultiheadAttention ------------------------------------------------------------------------


class ShownLogits:
    """The logits of `nn.MultiheadAttention`, from the weights that it returns.

    These are logits up to a constant of each query, which its own keys give.
    """

    def __init__(self, module: nn.MultiheadAttention, inputs: Any, options: Any) -> None:
        self.weights = module(
            *inputs, **{**options, "need_weights": True, "average_attn_weights": False}
        )[1].detach()
        if self.weights.ndim == 3:
            self.weights = self.weights[None]

    def entropies(self) -> list[float]:
        return torch.special.entr(self.weights.double()).sum(-1).mean((0, 2)).tolist()


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize(
    "made_with",
    [
        {},
        {"bias": False},
        {"kdim": 6, "vdim": 10},
        {"add_bias_kv": True},
        {"add_zero_attn": True, "add_bias_kv": True},
    ],
)
@pytest.mark.parametrize("masks", ["none", "causal", "padding", "both", "by head", "bias"])
def test_the_attention_of_torch_is_exact(made_with, masks, need_weights, batch_first) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, batch_first=batch_first, **made_with)
    kdim, vdim = made_with.get("kdim", 8), made_with.get("vdim", 8)
    inputs = [torch.randn(3, 5, 8), torch.randn(3, 6, kdim), torch.randn(3, 6, vdim)]
    if not batch_first:
        inputs = [one.transpose(0, 1) for one in inputs]
    options: dict[str, Any] = {}
    if masks in ("causal", "both"):
        options["attn_mask"] = torch.ones(5, 6, dtype=torch.bool).triu(1)
    elif masks == "by head":
        options["attn_mask"] = torch.rand(6, 5, 6) < 0.3
        options["attn_mask"][..., 0] = False
    elif masks == "bias":
        options["attn_mask"] = torch.randn(5, 6)
    if masks in ("padding", "both"):
        padding = torch.zeros(3, 6, dtype=torch.bool)
        padding[1, 4:] = True
        options["key_padding_mask"] = padding
        if masks == "both":
            options["attn_mask"] = (
                options["attn_mask"].float().masked_fill(options["attn_mask"], -math.inf)
            )
            options["key_padding_mask"] = padding.float().masked_fill(padding, -math.inf)
    shown = ShownLogits(module, inputs, options)
    found = measure(module, *inputs, recompute=True, need_weights=need_weights, **options)
    entropies = [found[f"head_{i}/entropy"] for i in range(2)]
    assert entropies == pytest.approx(shown.entropies(), rel=1e-4)
    bounded = measure(module, *inputs, need_weights=False, **options)
    assert bounded.keys() == {
        "max_logit_bound",
        "head_0/max_logit_bound",
        "head_1/max_logit_bound",
    }
    for name, bound in bounded.items():
        assert bound >= found[name.replace("_bound", "")] - 1e-5


# -- models of transformers -----------------------------------------------------------------------


def tiny(family: str, kind: str) -> tuple[nn.Module, dict[str, Any], list[str]]:
    """Return a model, a batch, and the names of its attention modules."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ids = torch.randint(3, 20, (2, 9))
    padding = torch.ones(2, 9, dtype=torch.int64)
    padding[1, 6:] = 0
    batch: dict[str, Any] = {"input_ids": ids, "attention_mask": padding}
    small = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 32}
    if family == "bert":
        config = transformers.BertConfig(
            **small, num_hidden_layers=2, num_attention_heads=4, is_decoder=False
        )
        names = [f"encoder.layer.{i}.attention.self" for i in range(2)]
        make = transformers.BertModel
    elif family == "llama":
        config = transformers.LlamaConfig(
            **small, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
        )
        names, make = [f"layers.{i}.self_attn" for i in range(2)], transformers.LlamaModel
    else:
        config = transformers.T5Config(
            vocab_size=20, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4
        )
        names = [f"encoder.block.{i}.layer.0.SelfAttention" for i in range(2)]
        names += [f"decoder.block.{i}.layer.0.SelfAttention" for i in range(2)]
        names += [f"decoder.block.{i}.layer.1.EncDecAttention" for i in range(2)]
        make, batch = transformers.T5Model, {**batch, "decoder_input_ids": ids[:, :4]}
    config._attn_implementation = kind
    return make(config).eval(), batch, names  # without dropout


@pytest.mark.parametrize("family", ["bert", "llama", "t5"])
@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_attention_of_transformers_is_exact_by_head(family, kind) -> None:
    """Padding, grouped queries, relative biases and cross attention, with both implementations."""
    model, batch, names = tiny(family, kind)
    eager, _, _ = tiny(family, "eager")
    eager.load_state_dict(model.state_dict())
    shown = eager(**batch, output_attentions=True)
    if family == "t5":
        weights = [*shown.encoder_attentions, *shown.decoder_attentions, *shown.cross_attentions]
    else:
        weights = list(shown.attentions)
    monitor = hookline.AttentionMonitor(per_head=True, recompute=True)
    with monitor.attach(model):
        model(**batch)
    found = monitor.report()
    assert set(found) == set(names)
    for name, expected in zip(names, weights, strict=True):
        entropies = torch.special.entr(expected.detach()).sum(-1).mean((0, 2)).tolist()
        own = [found[name][f"head_{i}/entropy"] for i in range(4)]
        assert own == pytest.approx(entropies, rel=1e-3), name
    if kind == "eager":
        return
    monitor = hookline.AttentionMonitor(per_head=True)
    with monitor.attach(model):
        model(**batch)
    for name, bounds in monitor.report().items():
        for measure_name, value in bounds.items():
            exact = found[name][measure_name.replace("_bound", "")]
            assert value >= exact - 1e-4 * abs(exact), (name, measure_name)


# -- in training ----------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """An encoder layer under activation checkpointing."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Any:
        x = x.clone().requires_grad_()
        return checkpoint(self.layer, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_measures_once(reentrant, tmp_path) -> None:
    seen: list[str] = []

    class Counted(hookline.AttentionMonitor):
        def after(self, call: Any) -> None:
            super().after(call)
            seen.append(call.name)

    model = Checkpointed(reentrant=reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = hookline.TrainerConfig(runs=tmp_path, progress="off")
    trainer = hookline.Trainer(
        config, model, optimizer, loss_fn=F.mse_loss, hooks=[Counted(log_frequency=1)]
    )
    trainer.fit([tuple(torch.randn(2, 3, 5, 8))])
    assert trainer.hooks.summary().failures == {}
    assert seen == ["layer.self_attn"]
    names = {record["name"] for record in hookline.open_run(trainer.run.path).metrics()}
    assert "attention/layer.self_attn/max_logit_bound" in names
