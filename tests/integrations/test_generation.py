"""Text generation inside a step, as in GRPO: its forwards are not training forwards."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from typing import Any

import pytest
import torch
from loops import hooks_on, recorder, same, snapshot, weights
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.generation import GenerationMixin

import hookline
from hookline.probes import Capture

ORIGINAL = vars(GenerationMixin)["generate"]
IDS = torch.arange(8).reshape(2, 4)


@pytest.fixture(autouse=True)
def _methods_are_restored():
    yield
    gc.collect()
    assert vars(GenerationMixin)["generate"] is ORIGINAL


def make_gpt(seed: int = 0) -> tuple[GPT2LMHeadModel, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=32,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=31,
        pad_token_id=31,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def sample(model: Any, **options: Any) -> torch.Tensor:
    return model.generate(
        IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=3, do_sample=False, **options
    )


def step(model: Any, optimizer: Any, generator: Any = None) -> None:
    """One step of a loop that samples from the model first, in training mode."""
    ids = sample(model if generator is None else generator)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


class Outputs(hookline.Hook):
    """Keeps what events of the model's calls show."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.forwards = 0

    def on_before_forward(self):
        self.forwards += 1

    def on_after_forward(self, outputs):
        self.lengths.append(outputs.logits.shape[1])


def train(model: Any, optimizer: Any, generator: Any = None) -> Any:
    """Train two steps; return how often a probe and a forward hook were called, and the hook."""
    hook, probe, forwards = Outputs(), Capture("**.ln_f"), []
    with hookline.attach(model, optimizer, hooks=[hook], runs=None) as session:
        session.add_hook(probe, name="probe")
        session.add_hook(lambda activations: forwards.append(1), kind="forward", name="forward")
        for _ in range(2):
            step(model, optimizer, generator)
        return len(probe.states()), len(forwards), hook


def test_forwards_of_generate_are_left_alone():
    model, optimizer = make_gpt()
    before = snapshot(model)
    probed, forwards, hook = train(model, optimizer)
    assert (probed, forwards, hook.forwards) == (2, 2, 2)
    assert hook.lengths == [7, 7]
    assert hooks_on(model) == 0
    assert snapshot(model) == before
    plain, optimizer = make_gpt()
    for _ in range(2):
        step(plain, optimizer)
    assert same(weights(model), weights(plain))


class Sampler(nn.Module):
    """A model that generates with gradients, so that nothing but the call tells."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self(x) + self(x)


@pytest.mark.parametrize("through", ["model", "compiled model", "inner model"])
def test_a_model_that_generates_with_gradients_is_not_training(through):
    inner = Sampler()
    model = inner if through == "model" else torch.compile(inner, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told, probe = recorder("on_before_forward", "on_after_forward", "on_step_end"), Capture("layer")
    with hookline.attach(model, optimizer, hooks=[told]) as session:
        session.add_hook(probe)
        generator = inner if through == "inner model" else model
        model(generator.generate(torch.ones(2, 4)).detach()).sum().backward()
        optimizer.step()
        assert len(probe.states()) == 1
    assert told.told == ["on_before_forward", "on_after_forward", "on_step_end"]


class Adapter(nn.Module):
    """A wrapper like those of adapters: its `generate` calls the one of the model inside."""

    def __init__(self, base_model: nn.Module) -> None:
        super().__init__()
        self.base_model = base_model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model.generate(*args, **kwargs)


def test_adapters_are_seen_through():
    inner, optimizer = make_gpt()
    model = Adapter(inner)
    generate = vars(Adapter)["generate"]
    probed, forwards, hook = train(model, optimizer, inner)
    assert (probed, forwards, hook.lengths) == (2, 2, [7, 7])
    assert vars(Adapter)["generate"] is generate


def test_a_generate_that_raises_ends():
    model, optimizer = make_gpt()
    probe = Capture("**.ln_f")
    with hookline.attach(model, optimizer, runs=None) as session:
        session.add_hook(probe)
        with pytest.raises(ValueError, match="max_new_tokens"):
            model.generate(IDS, max_new_tokens=-1)
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        assert len(probe.states()) == 1


def test_copies_and_pickles_generate_by_themselves():
    model, optimizer = make_gpt()
    with hookline.attach(model, optimizer, runs=None):
        copied = copy.deepcopy(model)
        copied.transformer.wpe.weight.data.normal_(0, 5)
        assert not torch.equal(sample(copied), sample(model))
        file = io.BytesIO()
        torch.save(model, file)
        assert pickle.loads(pickle.dumps(model.generate)).__name__ == "generate"
    file.seek(0)
    assert torch.equal(sample(torch.load(file, weights_only=False)), sample(model))


def test_a_part_of_the_model_that_generates_is_part_of_the_forward():
    class Memory(nn.Linear):
        def generate(self, x):
            return self(x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.memory, self.head = Memory(4, 4), nn.Linear(4, 1)

        def forward(self, x):
            return self.head(self.memory.generate(x))

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = Capture("memory")
    with hookline.attach(model, optimizer) as session:
        session.add_hook(probe)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert len(probe.states()) == 1
