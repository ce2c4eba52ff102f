"""Edits of one head of attention, against hooks written by hand, and edits without an effect."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from loops import batches, make
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.overrides import _get_current_function_mode_stack

import hookline
from hookline.errors import ConfigError, ProbeError
from hookline.probes import Edit
from hookline.probes.attention import find_projection

HEADS, WIDTH, HEAD = 4, 16, 2
COMPILED = "compiled nn.MultiheadAttention, whose heads cannot be edited"
SLICE = slice(HEAD * WIDTH // HEADS, (HEAD + 1) * WIDTH // HEADS)


def gpt2() -> tuple[nn.Module, str, str]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=20, n_positions=8, n_embd=WIDTH, n_layer=2, n_head=HEADS)
    return GPT2LMHeadModel(config), "transformer.h.1.attn", "c_proj"


OPERATIONS: dict[str, Any] = {
    "ablate": (lambda name, **o: Edit.ablate(name, **o), torch.zeros_like),
    "mean": (
        lambda name, **o: Edit.ablate(name, "mean", **o),
        lambda x: x.mean(dim=tuple(range(x.dim() - 1)), keepdim=True).expand_as(x),
    ),
    "scale": (lambda name, **o: Edit.scale(name, 3.0, **o), lambda x: 3 * x),
    "add": (
        lambda name, **o: Edit.add(name, torch.arange(4.0), **o),
        lambda x: x + torch.arange(4.0),
    ),
    "replace": (lambda name, **o: Edit.replace(name, lambda x: x.tanh(), **o), torch.tanh),
}


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_head_of_transformers_is_edited_as_by_a_hook_on_its_projection(operation) -> None:
    torch.manual_seed(0)
    model, name, projection = gpt2()
    model.eval()
    edit, by_hand = OPERATIONS[operation]
    tokens = torch.arange(12).reshape(2, 6)

    def change(module: nn.Module, args: Any) -> Any:
        x = args[0].clone()
        x[..., SLICE] = by_hand(args[0][..., SLICE])
        return (x, *args[1:])

    plain = model(tokens).logits
    handle = model.get_submodule(f"{name}.{projection}").register_forward_pre_hook(change)
    expected = model(tokens).logits
    expected.sum().backward()
    by_hook = gradients(model)
    handle.remove()
    model.zero_grad()
    with edit(name, head=HEAD, enable_intervention=True).attach(model):
        found = model(tokens).logits
        found.sum().backward()
    assert torch.equal(found, expected)
    assert not torch.equal(found, plain)
    assert all(map(torch.equal, gradients(model), by_hook))


def attention_by_hand(module: nn.MultiheadAttention, x: torch.Tensor, change: Any) -> torch.Tensor:
    q, k, v = F.linear(x, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
    q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
    weights = (q @ k.transpose(-2, -1) / math.sqrt(WIDTH // HEADS)).softmax(-1)
    joined = (weights @ v).transpose(1, 2).flatten(2).transpose(0, 1)
    changed = joined.clone()
    changed[..., SLICE] = change(joined[..., SLICE])
    return F.linear(changed.transpose(0, 1), module.out_proj.weight, module.out_proj.bias)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("need_weights", [True, False])
def test_a_head_of_torchs_attention_is_edited_as_by_hand(operation, need_weights) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    edit, by_hand = OPERATIONS[operation]
    x = torch.randn(2, 5, WIDTH)
    model = nn.ModuleDict({"attention": module})
    expected = attention_by_hand(module, x, by_hand)
    plain = module(x, x, x, need_weights=need_weights)[0]
    with edit("attention", head=HEAD, enable_intervention=True).attach(model):
        found = module(x, x, x, need_weights=need_weights)[0]
        with pytest.raises((AssertionError, RuntimeError)):
            module(torch.ones(2, 5, 3), x, x)  # a call that fails leaves nothing behind
    assert torch.allclose(found, expected, atol=1e-6)
    assert not torch.allclose(found, plain, atol=1e-6)
    assert torch.equal(module(x, x, x, need_weights=need_weights)[0], plain)


@pytest.mark.parametrize("at", [None, ":, -1"])
def test_a_head_is_patched_with_the_captured_input_of_its_projection(at) -> None:
    torch.manual_seed(0)
    model, name, projection = gpt2()
    model.eval()
    clean, other = torch.arange(6)[None], torch.arange(6, 12)[None]
    place = f"{name}.{projection}"
    inputs = []
    with hookline.probe(model, place, input=True) as seen:
        model(clean)
        model(other)
        value, expected = (call.input[0].clone() for call in seen[place])
        with Edit.patch(name, value, head=HEAD, at=at, enable_intervention=True).attach(model):
            handle = model.get_submodule(place).register_forward_pre_hook(
                lambda _, args: inputs.append(args[0].clone())
            )
            model(other)
            handle.remove()
    tokens = slice(None) if at is None else -1
    expected[:, tokens, SLICE] = value[:, tokens, SLICE]
    assert torch.equal(inputs[0], expected)


def test_several_heads_of_one_module_can_be_edited() -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    model, x = nn.ModuleDict({"attention": module}), torch.randn(2, 5, WIDTH)
    edits = [Edit.ablate("attention", head=i, enable_intervention=True) for i in range(HEADS)]
    with ExitStack() as stack:
        for edit in edits:
            stack.enter_context(edit.attach(model))
        found = module(x, x, x)[0]
    assert torch.equal(found, module.out_proj.bias.expand(2, 5, WIDTH))
    assert not _get_current_function_mode_stack()


def test_a_head_is_edited_in_the_fast_path_of_an_encoder() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 8, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 5, WIDTH)
    edit = Edit.ablate("layers.1.self_attn", head=HEAD, enable_intervention=True)
    with torch.no_grad(), edit.attach(model):
        found = model(x)
    with torch.no_grad():
        model.layers[1].self_attn.out_proj.weight[:, SLICE] = 0  # what reads the head
        expected = model(x)
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.slow
def test_a_head_is_edited_in_a_compiled_model_but_not_one_of_torchs_attention() -> None:
    torch.manual_seed(0)
    model, name, _ = gpt2()
    model.eval()
    tokens = torch.arange(12).reshape(2, 6)
    edit = Edit.ablate(name, head=HEAD, enable_intervention=True)
    with torch.no_grad(), edit.attach(model):
        expected = model(tokens).logits
        found = torch.compile(model, backend="eager")(tokens).logits
    assert torch.allclose(found, expected, atol=1e-6)
    attention, x = nn.MultiheadAttention(WIDTH, HEADS), torch.randn(5, 2, WIDTH)
    edit = Edit.ablate("0", head=HEAD, enable_intervention=True)
    with edit.attach(nn.ModuleList([attention])), pytest.raises(Exception, match=COMPILED):
        torch.compile(attention, backend="eager", fullgraph=True)(x, x, x)


def test_the_projections_of_other_classes_are_found() -> None:
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

    sizes = {"hidden_size": WIDTH, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": HEADS, "vocab_size": 20}
    llama = LlamaModel(LlamaConfig(**sizes, num_key_value_heads=2)).layers[0].self_attn
    bert = BertModel(BertConfig(**sizes)).encoder.layer[0].attention
    assert find_projection("llama", llama) == (llama.o_proj, HEADS)
    assert find_projection("bert", bert) == (bert.output.dense, HEADS)


def test_a_head_that_does_not_exist_and_a_module_that_is_no_attention_are_errors() -> None:
    model, name, _ = gpt2()
    with pytest.raises(ConfigError, match=rf"head=4, but '{name}' has 4 heads, from 0"):
        Edit.ablate(name, head=4, enable_intervention=True).attach(model)
    with pytest.raises(ProbeError, match=r"'transformer\.h\.0\.mlp' is a GPT2MLP, whose number of"):
        Edit.ablate("transformer.h.0.mlp", head=0, enable_intervention=True).attach(model)
    with pytest.raises(ConfigError, match="without taps and part"):
        Edit.ablate(name, head=1, part=0, enable_intervention=True)
    with hookline.probe(model, name, input=True) as seen:
        model(torch.arange(6)[None])
    with pytest.raises(ConfigError, match="needs the input of the output projection, a tensor"):
        Edit.patch(name, seen, head=1, enable_intervention=True)


# -- edits without an effect ----------------------------------------------------------------------


def test_an_edit_of_a_module_that_is_not_called_raises_at_the_end_of_the_first_forward() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)  # takes the weights of out_proj
    x = torch.randn(1, 3, 8)
    edit = Edit.ablate("out_proj", enable_intervention=True)
    with (
        pytest.raises(ProbeError, match=r"has changed nothing in this forward.*'out_proj'"),
        edit.attach(attention),
    ):
        attention(x, x, x)
    attention(x, x, x)


def test_an_edit_of_a_head_that_is_not_seen_raises() -> None:
    attention, x = nn.MultiheadAttention(WIDTH, HEADS), torch.randn(5, 2, WIDTH)
    spectral_norm(attention.out_proj)  # makes another tensor at each access
    edit = Edit.ablate("0", head=HEAD, enable_intervention=True)
    with (
        pytest.raises(ProbeError, match="head 2 of '0' has changed nothing"),
        edit.attach(nn.ModuleList([attention])),
    ):
        attention(x, x, x)
    assert not _get_current_function_mode_stack()


def test_an_edit_without_an_effect_stops_training() -> None:
    model, optimizer = make()
    model.spare = nn.Linear(2, 2)
    config = hookline.TrainerConfig(runs=None, progress="off")
    trainer = hookline.Trainer(config, model, optimizer, loss_fn=F.mse_loss)
    trainer.add_hook(Edit.ablate("spare", enable_intervention=True))
    with pytest.raises(ProbeError, match="The edit 'edit' has changed nothing"):
        trainer.fit(batches(2))
    assert trainer.status == "error"
