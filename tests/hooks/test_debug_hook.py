"""DebugHook: its findings, their messages, and its actions."""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import subprocess
import sys
import textwrap
from contextlib import suppress

import every_loop
import pytest
import torch
from loops import batches, fit, make, run_on_two_ranks, same, weights
from torch.nn import functional as F

import hookline
from hookline import TrainingError
from hookline.hooks.debugging.debug_hook import DebugHook
from hookline.tensors.norms import all_finite, first_nonfinite

NAN, INF = float("nan"), float("inf")


def train(*hooks, optimizer=None, **options):
    return fit(*hooks, optimizers=optimizer, **{"on_nan": "continue"} | options)


def bad_batch(value=NAN):
    x, y = batches(1)[0]
    x = x.clone()
    x[2, 3] = value
    return x, y


class Poison(hookline.Hook):
    """Puts a value into the gradients or the parameters, in one step."""

    def __init__(self, what, at=2, value=NAN):
        self.what, self.at, self.value = what, at, value

    def on_after_backward(self, model, step):
        if self.what == "gradients" and step + 1 == self.at:
            model.first.bias.grad[3] = self.value
            model.second.weight.grad[:] = self.value

    def on_after_optimizer_step(self, model, step):
        if self.what == "parameters" and step + 1 == self.at:
            with torch.no_grad():
                model.second.bias[0] = self.value


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]


# -- what is found ---------------------------------------------------------------------------------


def test_a_bad_batch_is_named_when_the_loss_is_nan(caplog):
    trainer = train(DebugHook(), data=[*batches(2), bad_batch(), *batches(2)])
    first = warnings(caplog)[0]
    assert first == (
        "Step 3: The loss is nan. The first part of the batch that is not finite is 'batch[0]' "
        "(1 NaN and 0 Inf of 32)."
    )
    assert trainer.status == "stopped"


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_the_bad_gradient_that_backward_computes_first_is_named(caplog, value):
    train(Poison("gradients", value=value), DebugHook(action="stop"))
    said = warnings(caplog)[0]
    assert said.startswith("Step 2: The gradients of 2 of 4 parameters are not finite. ")
    assert "from the end, the last is 'second.weight' (" in said
    assert "and so are the outputs of all modules in a repeated forward" in said


def test_a_bad_parameter_is_named_after_the_step_that_made_it(caplog):
    everything = DebugHook(action="stop", check=["loss", "gradients", "parameters"])
    trainer = train(Poison("parameters"), everything)
    said = warnings(caplog)[0]
    assert said == "Step 2: The parameter 'second.bias' (1 NaN and 0 Inf of 4) is not finite."
    assert (trainer.status, trainer.step) == ("stopped", 2)


def test_a_finite_training_is_left_alone_and_nothing_is_said(caplog):
    model, optimizer = make()
    trainer = train(DebugHook(), model=model, optimizer=optimizer, on_nan="stop")
    other, its_optimizer = make()
    train(model=other, optimizer=its_optimizer)
    assert trainer.status == "completed"
    assert same(weights(model), weights(other))
    assert warnings(caplog) == []


def test_gradients_that_overflow_under_a_scaler_are_left_to_it(caplog):
    class Scaled(hookline.Hook):
        """Stands for an overflow: gradients are infinite where the scaler looks at them."""

        def on_after_backward(self, model, step):
            if not step:
                model.first.bias.grad[0] = INF

    hook = DebugHook(action="stop", check=["gradients"])
    trainer = train(Scaled(), hook, precision="fp16")
    assert trainer.status == "completed"
    assert warnings(caplog) == []


# -- repeating the forward -------------------------------------------------------------------------


class Breaks(hookline.Hook):
    """Lets a module of any model give NaN from the second step on."""

    def on_step_end(self, model, step):
        if step == 1:
            tanh = next(module for module in model.modules() if isinstance(module, torch.nn.Tanh))
            tanh.register_forward_hook(lambda module, args, output: output / 0 * 0)


@pytest.mark.parametrize("loop", every_loop.LOOPS)
def test_the_first_module_with_a_bad_output_is_named_in_every_loop(caplog, tmp_path, loop):
    with suppress(TrainingError):  # the trainer's own, after it
        every_loop.LOOPS[loop]([Breaks(), DebugHook()], tmp_path)
    (said, *_) = [text for text in warnings(caplog) if text.startswith("Step ")]
    assert said.startswith("Step 2: ")
    assert said.endswith("the first output that is not finite is that of 'body.1'.") or (
        loop == "lightning" and said.endswith(" is that of 'net.body.1'.")
    )
    (events,) = tmp_path.glob("runs/*/events.jsonl")
    records = [json.loads(line) for line in events.read_text().splitlines()]
    (found,) = [record for record in records if record["kind"] == "debug_finding"]
    assert (found["step"], found["probe"], found["condition"]) == (2, "debug", "nonfinite")
    assert (found["module"], found["where"]) == (said.split("'")[-2], "output")
    assert said == f"Step 2: {found['message']}"


class Odd(torch.nn.Module):
    """Has everything that a forward may change: statistics, random numbers, attributes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(), torch.nn.ReLU()
        )
        self.head = torch.nn.Linear(8, 4)
        self.calls = 0
        self.generator = torch.Generator().manual_seed(1)
        self.is_broken = False

    def forward(self, x):
        self.calls += 1
        noise = torch.rand(x.shape, generator=self.generator) * random.random()
        x = self.layers(x + noise)
        return self.head(x / 0 if self.is_broken else x)


def train_odd(*hooks):
    """Train with NaN in two of six steps, which are not applied; return all that may change."""
    random.seed(0)
    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = []
    with hookline.attach(model, optimizer, hooks=hooks):
        for i, (x, y) in enumerate(batches(6)):
            model.is_broken = i in (2, 4)
            F.mse_loss(model(x), y).backward()
            kept.append([p.grad.clone() for p in model.parameters()])
            if model.is_broken:
                optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
    state = [*model.state_dict().values(), model.generator.get_state(), torch.get_rng_state()]
    return [*state, *itertools.chain(*kept)], (model.calls, random.random())


def test_the_repeated_forward_changes_nothing_in_training(caplog):
    capture = hookline.probes.Capture("head", input=False)
    plain, watched = train_odd(), train_odd(DebugHook(check=["loss"], action="warn"), capture)
    for one, other in zip(plain[0], watched[0], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert plain[1] == watched[1]
    assert len(capture.states()) == 6
    said = [text for text in warnings(caplog) if "is that of 'head', and its input was" in text]
    assert len(said) == 2
    assert said[0].endswith("not finite already: look at the code of the model.")


def test_a_forward_that_changes_parameters_is_not_repeated(caplog):
    model, optimizer = make()
    key = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
    model.register_parameter("key", key)

    def move(module, args):
        module.key.data.add_(1)  # as in the update of a momentum encoder

    model.register_forward_pre_hook(move)
    with hookline.attach(model, optimizer, hooks=[DebugHook(check=["loss"])]):
        for x, y in batches(3):
            (F.mse_loss(model(x), y) * NAN).backward()
            optimizer.zero_grad()
            optimizer.step()
    assert key == 3
    (said, *_) = warnings(caplog)
    assert "The model's forward could not be repeated: it changes parameters." in said


RANKS = """
    import logging, sys, torch, hookline
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    dist.init_process_group("gloo")

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
            self.communicates = False

        def forward(self, x):
            x = self.first(x)
            if self.communicates:
                x = x + torch.zeros_like(x).copy_(reduced(x))
            return self.second(x)

    def reduced(x):
        total = x.detach().clone()
        dist.all_reduce(total)
        return total

    for communicates in (False, True):
        model = Model()
        model.communicates = communicates
        if dist.get_rank() == 0:  # only one process sees it, and the other does not take part
            model.second.register_forward_hook(lambda module, args, output: output * float("nan"))
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hook = hookline.DebugHook(check=["loss"])
        with hookline.attach(ddp, optimizer, hooks=[hook]) as session:
            for _ in session.batches([0, 1]):
                session.backward(ddp(torch.ones(3, 2)).sum())
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()
    print("ended")
"""


@pytest.mark.slow
def test_one_of_several_processes_repeats_a_forward_only_if_it_does_not_communicate(tmp_path):
    shown = run_on_two_ranks(textwrap.dedent(RANKS), tmp_path)
    assert "the first output that is not finite is that of 'second'" in shown
    assert "could not be repeated: it communicates with other processes" in shown
    assert shown.count("ended") == 2


# -- stopping --------------------------------------------------------------------------------------


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["loss", "gradients", "parameters"])
def test_only_what_is_asked_for_is_checked(caplog, what):
    data = [bad_batch(), *batches(2)]
    train(DebugHook(action="warn", check=[what]), data=data)
    said = warnings(caplog)
    expected = {"loss": "The loss", "gradients": "The gradient", "parameters": "The parameter"}
    assert len(said) == 2
    assert expected[what] in said[0]
    assert said[1] == f"In this run the {what} had NaN or Inf in 3 check(s)."


def test_warn_only_warns_and_says_it_once_until_it_was_finite_again(caplog):
    data = [bad_batch(), bad_batch(), *batches(2)]

    class Skips(hookline.Hook):
        def on_before_backward(self, trainer, loss):
            trainer.skip_optimizer_step()

    trainer = train(Skips(), DebugHook(action="warn", check=["loss"]), data=data, max_epochs=2)
    assert trainer.status == "completed"
    said = warnings(caplog)
    assert sum("The loss is nan" in text for text in said) == 2  # once in each epoch
    assert said[-1] == "In this run the loss had NaN or Inf in 4 check(s)."


@pytest.mark.parametrize("what", ["loss", "gradients"])
def test_stop_ends_training_before_the_step_that_would_spoil_the_weights(what):
    model, optimizer = make()
    data = [bad_batch(), *batches(3)] if what == "loss" else batches(4)
    hooks = [Poison(what, at=1), DebugHook(action="stop", check=[what])]
    before = weights(model)
    trainer = train(*hooks, data=data, model=model, optimizer=optimizer)
    assert (trainer.status, trainer.step) == ("stopped", 0)
    assert same(weights(model), before)


@pytest.mark.parametrize("what", ["loss", "gradients", "parameters"])
def test_it_looks_at_every_nth_step_only(caplog, what):
    """NaN in steps 1 and 2, and from then on, as it stays in the parameters."""
    hook = DebugHook(action="warn", check=[what], every_n_steps=3)
    train(hook, data=[bad_batch(), *batches(5)])
    said = warnings(caplog)
    assert said[0].startswith("Step 3: ")
    assert "4 of 4 parameters are not finite, so none is named as the first" in said[0]
    assert "as steps 1 to 2 were not looked at" in said[0]
    assert "`hookline run --hook debug:action=stop" in said[0]
    assert "first parameter" not in said[0]
    assert "the last is" not in said[0]
    assert said[1].endswith("in 2 check(s).")


def test_no_parameter_is_named_the_first_when_the_step_before_spoiled_most(caplog):
    class NanGradients(hookline.Hook):
        def on_after_backward(self, model):
            for parameter in model.parameters():
                parameter.grad.fill_(NAN)

    train(NanGradients(), DebugHook(action="warn", check=["loss"]))
    said = warnings(caplog)[0]
    assert said.startswith("Step 2: The loss is nan. 4 of 4 parameters are not finite")
    assert "the origin is older than this step" in said


def test_parameters_that_may_be_older_are_listed(caplog):
    train(Poison("parameters", at=1), DebugHook(action="warn", check=["parameters"]))
    assert "The parameter 'second.bias' (1 NaN" in warnings(caplog)[0]
    caplog.clear()
    hooks = [Poison("parameters", at=2), DebugHook(action="warn", check=["parameters"], every=2)]
    train(*hooks)
    expected = "Step 2: 1 of 4 parameters are not finite ('second.bias'), so none"
    assert warnings(caplog)[0].startswith(expected)
    assert "as step 1 was not looked at" in warnings(caplog)[0]


def test_shapes_are_logged_for_the_first_batch_of_a_loader_and_when_they_change(caplog):
    caplog.set_level(logging.INFO)
    (x, y), *_ = batches(1)
    data = {"a": [(x, y), (x, y), (x[:2], y[:2])], "b": [(x, y)]}
    train(DebugHook(log_shapes=True), data=data)
    said = [r.getMessage() for r in caplog.records if "A batch of" in r.getMessage()]
    whole = "tuple(Tensor[4, 8] of float32, Tensor[4, 4] of float32)"
    assert said == [
        f"A batch of 'a' is {whole}",
        "A batch of 'a' is now tuple(Tensor[2, 8] of float32, Tensor[2, 4] of float32)",
        f"A batch of 'b' is {whole}",
    ]


# -- where it runs ---------------------------------------------------------------------------------


IN_TERMINAL = """
    import torch, hookline
    from hookline.hooks.debugging.debug_hook import DebugHook
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = hookline.TrainerConfig(runs=None, progress="off", on_nan="continue")
    hook = DebugHook(break_on_nan=True, check=["loss"])
    data = [(torch.full((3, 2), value), torch.ones(3, 1)) for value in (float("nan"), 1.0)]
    trainer = hookline.Trainer(config, model, optimizer, hooks=[hook]).fit(data)
    print("status:", trainer.status)
"""


def test_in_a_terminal_it_breaks_into_the_debugger_with_model_and_batch_at_hand(tmp_path):
    shown = run_in_terminal(
        IN_TERMINAL, tmp_path, answers=["p 'batch', batch[0].shape, model", "c", "c"]
    )
    assert "The loss is nan. The first part of the batch that is not finite is" in shown
    assert "('batch', torch.Size([3, 2]), Linear(" in shown
    assert "status: completed" in shown  # `c` goes on


def run_in_terminal(code, folder, answers):
    """Run a program in a real terminal, answer the debugger's prompts, return what was shown."""
    pty = pytest.importorskip("pty")
    parent, child = pty.openpty()
    command = [sys.executable, "-c", textwrap.dedent(code)]
    shown, waiting = b"", list(answers)
    with subprocess.Popen(command, cwd=folder, stdin=child, stdout=child, stderr=child) as process:
        os.close(child)
        try:
            with suppress(OSError):  # how Linux says that the other side is closed
                while chunk := os.read(parent, 65536):
                    shown += chunk
                    if shown.endswith(b"(Pdb) "):
                        os.write(parent, waiting.pop(0).encode() + b"\n")
        finally:
            os.close(parent)  # a debugger that still asks gets no answer, and ends
    assert process.returncode == 0, shown.decode()
    return shown.decode()


# -- finding ---------------------------------------------------------------------------------------


def test_mixed_kinds_of_tensors_are_looked_at():
    fine = [
        torch.zeros(0),
        torch.tensor([1, 2]),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.float64),
        torch.ones(2, dtype=torch.complex64),
        torch.eye(2).to_sparse(),
    ]
    assert all_finite(fine)
    assert all_finite([])
    for bad in (
        torch.tensor([1.0, NAN], dtype=torch.bfloat16),
        torch.tensor([complex(INF, 0)]),
        torch.tensor([[0.0, INF]]).to_sparse(),
    ):
        assert not all_finite([*fine, bad])
        named = [(str(i), one) for i, one in enumerate([*fine, bad])]
        assert first_nonfinite(named).startswith("'6' (")
    assert first_nonfinite([("fine", torch.ones(1))]) is None
