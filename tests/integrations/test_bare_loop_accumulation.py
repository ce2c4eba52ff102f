"""The loss of a loop with gradient accumulation is the batches' own, divided by the loop or not."""

from __future__ import annotations

import gc

import pytest
import torch
from loops import batches, make, recorder, same, train, weights
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

import hookline
from hookline import NotSuppliedError


def accumulate(model, optimizer, sizes, prepare, scaler=None, each=lambda batch: None):
    """Train with as many batches in each step as `sizes` says; return the losses of the batches."""
    losses = []
    data = iter(batches(sum(sizes)))
    for size in sizes:
        losses.append([])
        for _ in range(size):
            x, y = next(data)
            loss = F.mse_loss(model(x), y)
            losses[-1].append(loss.item())
            prepared = prepare(loss)
            (scaler.scale(prepared) if scaler is not None else prepared).backward()
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
    return losses


def step_losses(hook):
    return [float(told[1]["loss"]) for told in hook.told if told[0] == "on_step_end"]


def means(losses):
    return pytest.approx([sum(step) / len(step) for step in losses], rel=1e-5)


PREPARES = {
    "divided": lambda loss: loss / 4,
    "multiplied": lambda loss: loss * (1 / 4),
    "a tensor": lambda loss: loss / torch.tensor(4.0),
    "not divided": lambda loss: loss,
    "divided by another number": lambda loss: loss / 10,
}


@pytest.mark.parametrize("name", PREPARES)
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaler"])
def test_the_loss_of_a_step_is_the_mean_of_its_batches(name, scaled):
    hook = recorder(on_step_end=("loss",))
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if scaled else None
    with hookline.attach(model, optimizer, hooks=[hook], scaler=scaler):
        losses = accumulate(model, optimizer, [4, 4], PREPARES[name], scaler)
    if name == "divided by another number":  # that is the loop's own loss
        losses = [[loss / 10 for loss in step] for step in losses]
    assert step_losses(hook) == means(losses)


def test_a_last_group_that_is_shorter_has_its_own_loss():
    hook = recorder(on_step_end=("loss",))
    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[hook]):
        losses = accumulate(model, optimizer, [4, 4, 2, 1], PREPARES["divided"])
    assert step_losses(hook) == means(losses)


def test_a_loop_without_accumulation_keeps_a_loss_that_it_divides():
    hook = recorder(on_step_end=("loss",))
    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[hook]):
        losses = accumulate(model, optimizer, [1, 1], lambda loss: loss / 2)
    assert step_losses(hook) == means([[loss / 2 for loss in step] for step in losses])


@pytest.mark.parametrize("divided", [True, False])
def test_loss_divided_decides(divided):
    hook = recorder(on_step_end=("loss",))
    model, optimizer = make()
    prepare = (lambda loss: loss / 2 + 0.0) if divided else (lambda loss: loss / 2)
    with hookline.attach(model, optimizer, hooks=[hook], loss_divided=divided):
        losses = accumulate(model, optimizer, [2, 2, 1], prepare)
    if not divided:
        losses = [[loss / 2 for loss in step] for step in losses]
    assert step_losses(hook) == means(losses)


@pytest.mark.parametrize("divisor", [1, 2, 1.5])
def test_batches_have_their_own_losses_before_and_after_the_first_step(divisor):
    hook = recorder(on_train_batch_end=("loss",))
    model, optimizer = make()
    losses = []
    with hookline.attach(model, optimizer, hooks=[hook]) as session:
        for i, (x, y) in enumerate(session.batches(batches(5))):
            loss = F.mse_loss(model(x), y)
            losses.append(loss.item() / (divisor if divisor == 1.5 else 1))
            (loss / divisor).backward()
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert [float(told["loss"]) for _, told in hook.told] == pytest.approx(losses, rel=1e-5)


def test_accumulation_that_begins_later_is_followed():
    hook = recorder(on_step_end=("loss",))
    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[hook]):
        first = train(model, optimizer, batches(1))
        optimizer.zero_grad()
        losses = accumulate(model, optimizer, [2, 2], lambda loss: loss / 2)
    assert step_losses(hook) == means([first, *losses])


def test_torch_is_as_it_was_after_detaching_and_when_a_session_is_dropped():
    gc.collect()  # sessions that other tests have dropped listen until they are collected
    engine = torch.autograd._engine_run_backward
    assert engine is torch.autograd.graph._engine_run_backward
    assert torch.autograd.backward.__globals__ is vars(torch.autograd)
    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[recorder(on_step_end=("loss",))]):
        assert torch.autograd._engine_run_backward is not engine
    assert torch.autograd._engine_run_backward is engine
    session = hookline.attach(model, optimizer, hooks=[recorder(on_step_end=("loss",))])
    del session, model, optimizer
    gc.collect()
    assert torch.autograd._engine_run_backward is engine


class Language(nn.Module):
    """Returns logits and the loss, as language models do."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16)

    def forward(self, tokens, targets=None):
        logits = self.head(self.embedding(tokens))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


class DividingLanguage(Language):
    def forward(self, tokens, targets=None):
        logits, loss = super().forward(tokens, targets)
        return logits, loss / 2


@pytest.mark.parametrize("divided", [None, True, False])
def test_a_compiled_loss_under_accumulation_needs_loss_divided(divided):
    hook = recorder(on_step_end=("loss",))
    model = DividingLanguage() if divided else Language()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = weights(model)
    compiled = torch.compile(model, backend="aot_eager")
    tokens = torch.arange(32).reshape(2, 16) % 16
    own = float(model(tokens, tokens)[1].detach()) * (2 if divided else 1)
    session = hookline.attach(compiled, optimizer, hooks=[hook], loss_divided=divided)
    for _ in range(2):
        compiled(tokens, tokens)[1].backward()
    if divided is None:
        with pytest.raises(NotSuppliedError, match=r"compiled.*attach\(…, loss_divided=True\)"):
            optimizer.step()
        assert same(weights(model), before)
    else:
        optimizer.step()
        assert step_losses(hook) == means([[own]])
    session.detach()


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_a_language_model_loop_works_as_it_stands(compiled, tmp_path):
    """Accumulation of divided losses, a disabled scaler, clipping, a learning rate by hand."""
    monitor = hookline.GradientMonitor(log_frequency=1)
    hook = recorder(
        "on_gradients_ready", on_gradient_clip=("grad_norm",), on_step_end=("loss", "grad_norm")
    )
    torch.manual_seed(0)
    model = Language()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if compiled:
        model = torch.compile(model, backend="aot_eager")
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    session = hookline.attach(model, optimizer, hooks=[hook, monitor], runs=tmp_path)
    generator = torch.Generator().manual_seed(1)

    def get_batch():
        tokens = torch.randint(0, 16, (4, 9), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    losses, norms = [], []
    tokens, targets = get_batch()
    for iteration in range(4):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (iteration + 1)
        if iteration % 2 == 0:
            model.eval()
            with torch.no_grad():
                model(*get_batch())
            model.train()
        losses.append([])
        for _ in range(5):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                _, loss = model(tokens, targets)
                loss = loss / 5
            losses[-1].append(loss.item() * 5)
            tokens, targets = get_batch()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(clip_grad_norm_(model.parameters(), 0.01).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    session.detach()
    assert step_losses(hook) == means(losses)
    ends = [told[1] for told in hook.told if told[0] == "on_step_end"]
    assert [float(end["grad_norm"]) for end in ends] == norms
    events = [told if isinstance(told, str) else told[0] for told in hook.told]
    assert events == ["on_gradients_ready", "on_gradient_clip", "on_step_end"] * 4
    run = hookline.open_run(session.run.path)
    assert len(run.metrics("train/loss")) == 4
