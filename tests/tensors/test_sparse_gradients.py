"""Sparse gradients, and arguments that cannot be computed: training continues."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import hookline
from hookline import (
    EMA,
    DebugHook,
    GradientMonitor,
    GradientNoiseScale,
    Hook,
    OptimizerMonitor,
    Trainer,
    TrainerConfig,
    attach,
)


class Norms(Hook):
    def __init__(self):
        self.norms = []

    def on_step_end(self, grad_norm):
        self.norms.append(grad_norm)


class Rates(Hook):
    def __init__(self):
        self.rates = []

    def on_step_end(self, lr):
        self.rates.append(lr)


class Steps(Hook):
    def __init__(self):
        self.steps = []

    def on_step_end(self, step):
        self.steps.append(step)


class PlainDescent(torch.optim.Optimizer):
    """An optimizer without learning rate."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= 0.01 * parameter.grad


def make_model(sparse=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(8, 4, sparse=sparse), nn.Flatten(), nn.Linear(8, 1))


def make_data():
    """Each batch has some rows of the embedding several times: its gradient is not coalesced."""
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(0, 4, (24, 2), generator=generator)
    return TensorDataset(indices, torch.randn(24, 1, generator=generator))


def run_bare_loop(hooks, model, optimizer, clip=None):
    with attach(model, optimizer, hooks=hooks, runs=None) as session:
        for indices, target in DataLoader(make_data(), batch_size=4):
            optimizer.zero_grad()
            mse_loss(model(indices), target).backward()
            if clip is not None:
                clip(model)
            optimizer.step()
    return session


def run_trainer(hooks, model, optimizer, **settings):
    config = TrainerConfig(runs=None, progress=False, **settings)
    trainer = Trainer(config, model, optimizer, loss_fn=mse_loss, hooks=hooks)
    trainer.fit(DataLoader(make_data(), batch_size=4))
    return trainer


both_loops = pytest.mark.parametrize("run", [run_bare_loop, run_trainer])


def make_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


# -- sparse gradients ------------------------------------------------------------------------------


@both_loops
def test_the_norm_of_sparse_gradients_is_that_of_the_same_dense_ones(run):
    norms = {}
    for sparse in (True, False):
        model = make_model(sparse)
        run([hook := Norms()], model, make_sgd(model))
        norms[sparse] = hook.norms
    assert len(norms[True]) == 6
    assert norms[True] == pytest.approx(norms[False], rel=1e-6)


def test_sparse_gradients_have_a_norm_before_clipping_in_a_bare_loop():
    def clip_dense(model):
        nn.utils.clip_grad_value_(model[2].parameters(), 1e-3)

    model = make_model()
    session = run_bare_loop([hook := Norms()], model, make_sgd(model), clip_dense)
    assert min(hook.norms) > 0.1
    assert session.hooks.summary().failures == {}


@both_loops
@pytest.mark.parametrize("hook", [GradientMonitor, OptimizerMonitor, EMA, DebugHook])
def test_built_in_hooks_do_not_fail_on_sparse_gradients(run, hook):
    model = make_model()
    loop = run([hook()], model, make_sgd(model))
    assert loop.hooks.summary().failures == {}


def test_the_noise_scale_of_sparse_gradients_is_measured():
    model = make_model()
    trainer = run_trainer([GradientNoiseScale()], model, make_sgd(model), accumulate=2)
    assert trainer.hooks.summary().failures == {}


def test_a_checkpoint_in_the_middle_of_sparse_training_continues_it_exactly(tmp_path):
    def train(steps, **options):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = TrainerConfig(runs=tmp_path, progress=False, max_steps=steps, accumulate=2)
        trainer = Trainer(config, model, optimizer, loss_fn=mse_loss, hooks=[Norms()])
        trainer.fit(DataLoader(make_data(), batch_size=4), **options)
        return trainer

    whole = train(3).model.state_dict()
    half = train(2)
    path = half.save_checkpoint(tmp_path / "half")
    resumed = train(3, resume_from=path).model.state_dict()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


# -- arguments that cannot be computed -------------------------------------------------------------


@both_loops
def test_an_argument_that_cannot_be_computed_fails_only_the_hooks_that_ask_for_it(run, caplog):
    model = make_model(sparse=False)
    hooks = [before := Steps(), asking := Rates(), after := Steps()]
    loop = run(hooks, model, PlainDescent(model.parameters()))
    assert before.steps == after.steps == [1, 2, 3, 4, 5, 6]
    assert asking.rates == []
    described = {hook.name: hook for hook in loop.hooks.describe()}
    assert described["rates"].status == "failed"
    assert (described["rates"].failures, described["rates"].calls) == (3, 3)
    assert (
        described["rates"].last_error == "LoopError: The optimizer has no 'lr' in its param_groups."
    )
    assert (described["steps"].failures, described["steps"].calls) == (0, 6)
    assert "The argument 'lr' could not be computed." in caplog.text


@both_loops
def test_a_scheduled_hook_fails_only_in_the_steps_in_which_it_is_due(run):
    model = make_model(sparse=False)
    manager = hookline.HookManager([other := Steps()])
    manager.add_hook(Rates(), every=2)
    loop = run(manager, model, PlainDescent(model.parameters()))
    described = {hook.name: hook for hook in loop.hooks.describe()}
    assert (described["rates"].failures, described["rates"].calls) == (3, 3)
    assert other.steps == [1, 2, 3, 4, 5, 6]


def test_without_isolation_the_error_of_an_argument_is_raised():
    manager = hookline.HookManager([Norms()], settings=hookline.HookSettings(isolate=False))
    with pytest.raises(ValueError, match="no norm"):
        manager.dispatchers.on_step_end(Unreliable())


class Unreliable:
    """Arguments of a loop: `loss` can be computed at the second attempt, `lr` never."""

    attempts = 0
    step = step_in_progress = 1

    @property
    def loss(self):
        self.attempts += 1
        if self.attempts == 1:
            raise MemoryError("not now")
        return 0.5

    @property
    def lr(self):
        raise hookline.NotSuppliedError("This loop has no lr.")

    @property
    def grad_norm(self):
        raise ValueError("no norm")


def test_missing_arguments_and_failing_ones_do_not_hide_each_other():
    class Both(Hook):
        def on_step_end(self, grad_norm, lr):
            raise AssertionError("never called")

    manager = hookline.HookManager([Norms(), Both(), Rates(), other := Steps()])
    for _ in range(2):
        manager.dispatchers.on_step_end(Unreliable())
    described = {hook.name: hook for hook in manager.describe()}
    assert {name: hook.failures for name, hook in described.items()} == {
        "norms": 2,
        "both": 1,  # the loop does not provide lr: disabled at once
        "rates": 1,
        "steps": 0,
    }
    assert other.steps == [1, 1]
