"""Memory does not grow with the number of steps, in any loop. See also `bench/memory_growth.py`."""

import gc

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from hookline import (
    ConsoleLogHook,
    GradientMonitor,
    Hook,
    LazyFloat,
    LossSpikeDetector,
    LRMonitor,
    Trainer,
    TrainerConfig,
    attach,
)

# Losses are summed up 256 at a time: the two counts are at the same place between two sums.
FIRST, LAST = 300, 300 + 4 * 256
ALLOWED = 100  # objects; one for each step would be 1,024


class Counts(Hook):
    """Counts all objects after some steps, and the tensors among them."""

    def __init__(self):
        self.objects, self.tensors = [], []

    def on_step_end(self, trainer, step, loss: LazyFloat):
        if step in (FIRST, LAST):
            if trainer.run is not None:
                trainer.run.flush()  # up to 1,000 values wait to be written
            gc.collect()
            objects = gc.get_objects()
            self.objects.append(len(objects))
            # A proxy may raise where its class is asked for, so isinstance is not for all objects.
            self.tensors.append(sum(issubclass(type(one), torch.Tensor) for one in objects))

    def check(self):
        (objects, objects_after), (tensors, tensors_after) = self.objects, self.tensors
        assert objects_after - objects < ALLOWED
        assert tensors_after - tensors < ALLOWED


def make_model():
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


BATCH = (torch.ones(3, 4), torch.zeros(3, 2))


def run_trainer(hooks, runs, **settings):
    model, optimizer = make_model()
    config = TrainerConfig(runs=runs, progress="off", report=False, **settings)
    Trainer(config, model, optimizer, loss_fn=mse_loss, hooks=hooks).fit([BATCH] * (LAST + 1))


def run_bare_loop(hooks, runs, step=None):
    model, optimizer = make_model()
    with attach(model, optimizer, hooks=hooks, runs=runs, report=False) as session:
        for _ in range(LAST + 1):
            loss = mse_loss(model(BATCH[0]), BATCH[1])
            if step is not None:
                step(session, loss, optimizer)
                continue
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def run_loop_with_session_backward(hooks, runs):
    def step(session, loss, optimizer):
        session.backward(loss)
        session.updates()
        optimizer.step()
        optimizer.zero_grad()

    run_bare_loop(hooks, runs, step)


def run_loop_over_batches(hooks, runs):
    """Take the batches from the session, and accumulate gradients over two of them."""
    model, optimizer = make_model()
    with attach(model, optimizer, hooks=hooks, runs=runs, report=False) as session:
        for i, (x, y) in enumerate(session.batches([BATCH] * 2 * (LAST + 1))):
            (mse_loss(model(x), y) / 2).backward()
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()


def run_ignite(hooks, runs):
    from ignite.engine import Engine

    model, optimizer = make_model()

    def update(engine, batch):
        mse_loss(model(batch[0]), batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()

    engine = Engine(update)
    attach(engine, model=model, optimizer=optimizer, hooks=hooks, runs=runs, report=False)
    engine.run([BATCH] * (LAST + 1))


def run_lightning(hooks, runs):
    import lightning.pytorch as lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.optimizer = make_model()

        def training_step(self, batch, batch_idx):
            return mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return self.optimizer

    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    attach(trainer, hooks=hooks, runs=runs, report=False)
    trainer.fit(Module(), DataLoader([BATCH] * (LAST + 1), batch_size=None))


@pytest.mark.parametrize("loop", [run_loop_with_session_backward, run_loop_over_batches])
def test_memory_does_not_grow_with_the_steps_of_a_loop(loop, tmp_path):
    loop([counts := Counts()], tmp_path)
    counts.check()


@pytest.mark.parametrize("loop", [run_trainer, run_bare_loop])
def test_memory_does_not_grow_with_hooks_that_measure_and_log(loop, tmp_path):
    counts = Counts()
    hooks = [LRMonitor(), GradientMonitor(), ConsoleLogHook(), LossSpikeDetector(), counts]
    loop(hooks, tmp_path)
    counts.check()


@pytest.mark.parametrize("loop", [run_ignite, run_lightning])
def test_memory_does_not_grow_with_the_steps_of_other_libraries_loops(loop, tmp_path):
    loop([counts := Counts()], tmp_path)
    counts.check()
