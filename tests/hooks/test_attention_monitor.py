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

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self) -> Any:
        return self.function()


def measure(module: nn.Module, *inputs: Any, **kwargs: Any) -> Reported:
    """Return what is measured of one call of an attention module."""
    monitor = hookline.AttentionMonitor()
    with monitor.attach(nn.ModuleDict({"layer": module})):
        module(*inputs, **kwargs)
    assert not torch.overrides._get_current_function_mode_stack()
    return dict(monitor.report().get("layer", {}))


def check_exact(found: Reported, logits: Tensor) -> None:
    """Compare with logits, whose last dimension is that of the keys, one query at a time."""
    rows = [row for row in logits.detach().double().flatten(0, -2) if row.max() != -math.inf]
    entropies = [-sum(p * math.log(p) for p in row.softmax(-1).tolist() if p) for row in rows]
    expected = {
        "max_logit": max(row.max().item() for row in rows),
        "entropy": sum(entropies) / len(entropies),
    }
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


def check_bound(found: Reported, largest: float, rel: float = 1e-3) -> None:
    assert list(found) == ["max_logit_bound"]
    assert found["max_logit_bound"] >= largest - rel * abs(largest)


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
)
def test_the_bound_of_fused_attention_is_not_exceeded(
    seed, sizes, groups, how, dtype, scale, size
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

    largest = logits_of(q, k, scale, mask, causal=causal).max().item()
    found = measure(FunctionAttention(attend))
    check_bound(found, largest)
    if how == "aligned" and scale is None and length == 1:
        assert found["max_logit_bound"] == pytest.approx(largest, rel=1e-2)


@pytest.mark.parametrize("shape", [(5, 4), (6, 5, 4), (2, 3, 2, 5, 4)])
def test_batch_and_heads_may_have_any_dimensions(shape) -> None:
    """One head without a batch, both in one dimension, and a batch of two dimensions."""
    torch.manual_seed(0)
    q, k = torch.randn(2, *shape)
    found = measure(FunctionAttention(lambda: F.scaled_dot_product_attention(q, k, k)))
    check_bound(found, (q @ k.transpose(-2, -1)).max().item() / 2)


# -- attention by hand ----------------------------------------------------------------------------


@pytest.mark.parametrize("block", [64, 1 << 22])
@pytest.mark.parametrize("shape", [(2, 3, 8, 5), (2, 2, 3, 5, 5), (12, 5, 5)])
def test_weights_that_are_computed_by_hand_are_exact(shape, block, monkeypatch) -> None:
    """Also if large ones are measured in blocks, or the module computes them in parts."""
    monkeypatch.setattr("hookline.hooks.monitoring.attention_monitor._BLOCK", block)
    torch.manual_seed(0)
    logits = torch.randn(shape)
    check_exact(measure(FunctionAttention(lambda: logits.softmax(-1))), logits)
    parts = logits.split(3, -2)
    together = FunctionAttention(lambda: torch.cat([part.softmax(-1) for part in parts], -2))
    check_exact(measure(together), logits)


def test_a_query_whose_keys_are_all_masked_does_not_count() -> None:
    torch.manual_seed(0)
    masked = torch.ones(5, 5, dtype=torch.bool).triu()
    logits = torch.randn(2, 3, 5, 5).masked_fill(masked, -math.inf)
    check_exact(measure(FunctionAttention(lambda: logits.softmax(-1))), logits)


# -- nn.MultiheadAttention ------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [None, "causal", "bias"])
def test_the_attention_of_torch_is_exact_with_weights_and_bounded_without(mask) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, batch_first=True)
    inputs = torch.randn(3, 5, 8), torch.randn(3, 6, 8), torch.randn(3, 6, 8)
    options: dict[str, Any] = {}
    if mask is not None:
        blocked = torch.ones(5, 6, dtype=torch.bool).triu(1)
        options["attn_mask"] = blocked if mask == "causal" else torch.randn(5, 6)
    weights = module(*inputs, **options, average_attn_weights=False)[1].detach().double()
    exact = measure(module, *inputs, **options, need_weights=True)
    entropy = torch.special.entr(weights).sum(-1).mean().item()
    assert exact["entropy"] == pytest.approx(entropy, rel=1e-4)
    check_bound(measure(module, *inputs, **options, need_weights=False), exact["max_logit"])


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
def test_attention_of_transformers_is_exact_where_it_is_eager(family) -> None:
    """Padding, grouped queries, relative biases and cross attention, with both implementations."""
    eager, batch, names = tiny(family, "eager")
    fused, _, _ = tiny(family, "sdpa")
    fused.load_state_dict(eager.state_dict())
    shown = eager(**batch, output_attentions=True)
    if family == "t5":
        weights = [*shown.encoder_attentions, *shown.decoder_attentions, *shown.cross_attentions]
    else:
        weights = list(shown.attentions)
    reports: list[dict[str, Reported]] = []
    for model in (eager, fused):
        monitor = hookline.AttentionMonitor()
        with monitor.attach(model):
            model(**batch)
        reports.append(monitor.report())
        assert set(reports[-1]) == set(names)
    exact, bounds = reports
    for name, expected in zip(names, weights, strict=True):
        entropy = torch.special.entr(expected.detach()).sum(-1).mean().item()
        assert exact[name]["entropy"] == pytest.approx(entropy, rel=1e-3), name
        check_bound(bounds[name], exact[name]["max_logit"])


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
