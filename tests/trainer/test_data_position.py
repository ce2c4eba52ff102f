"""Resuming in the middle of an epoch is exact for every kind of loader, or raises an error."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from loops import batches, fit, same, weights
from resume_checks import SaveAt, dataset, resume_equals, train
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

import hookline
from hookline import CheckpointError, TrainingError
from hookline.trainer import position as data_position


class RandomTransform(TensorDataset):
    """A dataset that draws random numbers for every sample."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn_like(x), y


class Endless(IterableDataset):
    """Batches without a length."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(batches(self.n))


def shuffled(seed=1, **options):
    return DataLoader(dataset(seed=seed), batch_size=4, shuffle=True, **options)


@pytest.mark.soak(every=2)
@pytest.mark.parametrize("at", [1, 2, 5, 11, 12, 15, 24])
@pytest.mark.parametrize("order", ["sequential", "round_robin"])
def test_two_loaders_shuffled_by_the_global_generator(tmp_path, at, order):
    def loaders():
        return {"a": shuffled(1), "b": shuffled(2)}

    assert resume_equals(tmp_path, loaders, at, loaders={"order": order})


WEIGHTED = {"loaders": {"order": "weighted", "weights": [1, 3, 4], "length": 16}}


def three():
    return {name: shuffled(seed) for seed, name in enumerate("abc", 1)}


@pytest.mark.parametrize("at", [1, 4, 9, 15, 20])
def test_weighted_loaders(tmp_path, at):
    assert resume_equals(tmp_path, three, at, **WEIGHTED)


def test_a_position_in_another_order_of_weighted_loaders_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(data_position, "_ORDER", 1)
        parent = train(tmp_path, three(), WEIGHTED, [SaveAt(7)])
    (saved,) = (parent.run.path / "checkpoints").glob("step_*")
    with pytest.raises(TrainingError, match="weighted loaders in another order"):
        train(tmp_path, three(), WEIGHTED, resume_from=saved)


@pytest.mark.parametrize("at", [3, 7, 10, 13, 17])
def test_a_loader_that_is_started_again_within_the_epoch(tmp_path, at):
    fields = {"loaders": {"order": "round_robin", "length": 14}}
    assert resume_equals(tmp_path, lambda: [shuffled(1), shuffled(2)], at, **fields)
    fields = {"loaders": {"length": 14}}
    assert resume_equals(tmp_path / "one", shuffled, at, **fields)


@pytest.mark.parametrize("at", [3, 9])
@pytest.mark.parametrize("own_generator", [False, True])
def test_a_batch_sampler_with_a_generator_in_its_sampler(tmp_path, at, own_generator):
    def loader():
        data = dataset()
        generator = torch.Generator().manual_seed(5) if own_generator else None
        sampler = BatchSampler(RandomSampler(data, generator=generator), 4, drop_last=False)
        return DataLoader(data, batch_sampler=sampler)

    assert resume_equals(tmp_path, loader, at)


@pytest.mark.parametrize("at", [1, 2, 3, 6, 7, 9])
@pytest.mark.parametrize("every", [[1, 2], [3, 1]])
def test_gradients_of_an_optimizer_that_steps_less_often(tmp_path, at, every):
    assert resume_equals(tmp_path, shuffled, at, optimizers=2, optimizer_every=every)


@pytest.mark.soak(every=2)
@pytest.mark.parametrize("event", ["on_step_end", "on_before_optimizer_step"])
@pytest.mark.parametrize("at", [2, 4, 5, 8])
def test_loaders_without_length_under_accumulation(tmp_path, at, event):
    def loader():
        return DataLoader(Endless(7), batch_size=None)

    assert resume_equals(tmp_path, loader, at, event, accumulate=2)


def persistent(data=None, **options):
    return DataLoader(
        data or dataset(),
        batch_size=4,
        shuffle=True,
        **{"num_workers": 1, "persistent_workers": True, **options},
    )


@pytest.mark.soak(every=2)
@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize(
    ("at", "event"),
    [(3, "on_step_end"), (6, "on_step_end"), (12, "on_step_end"), (12, "on_epoch_end")],
)
def test_persistent_workers_at_the_end_of_an_epoch_and_in_the_first(
    tmp_path, at, event, own_generator
):
    def loader():
        generator = torch.Generator().manual_seed(5) if own_generator else None
        return persistent(generator=generator)

    assert resume_equals(tmp_path, loader, at, event, max_epochs=3)


@pytest.mark.parametrize(("at", "event"), [(9, "on_step_end"), (14, "on_before_optimizer_step")])
def test_persistent_workers_that_were_reused_in_the_middle_of_an_epoch(tmp_path, at, event):
    def loader():
        return persistent(num_workers=2)

    assert resume_equals(tmp_path, loader, at, event, max_epochs=3)


def test_persistent_workers_of_a_loader_that_comes_later_in_the_resumed_epoch(tmp_path):
    def run(hooks, resume_from=None):
        loaders = {"a": shuffled(), "b": persistent()}
        return train(tmp_path, loaders, {}, hooks, resume_from=resume_from)

    whole = run([SaveAt(12, "on_epoch_end")])
    folder = whole.run.path / "checkpoints"
    run([SaveAt(14)], folder / "step_000012")
    resumed = run([], folder / "step_000014")
    assert same(weights(resumed.model), weights(whole.model))


def test_persistent_workers_of_a_loader_whose_pass_in_the_resumed_epoch_is_over(tmp_path):
    def run(hooks, resume_from=None):
        loaders = {"a": persistent(), "b": shuffled()}
        return train(tmp_path, loaders, {"max_epochs": 2}, hooks, resume_from=resume_from)

    whole = run([SaveAt(9)])
    resumed = run([], whole.run.path / "checkpoints" / "step_000009")
    assert same(weights(resumed.model), weights(whole.model))


def test_random_numbers_in_workers_are_not_restored_and_it_is_said_once(tmp_path, caplog):
    def loader():
        return persistent(RandomTransform(*dataset().tensors))

    assert not resume_equals(tmp_path / "first", loader, 3)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "seeds its random numbers by index" in caplog.text
    caplog.clear()
    resume_equals(tmp_path / "later", loader, 12, "on_epoch_end", max_epochs=3)
    assert caplog.text.count("not restored") == 1


def test_resuming_with_other_loaders_raises_an_error(tmp_path):
    hooks = [SaveAt(6, "on_epoch_end")]
    whole = train(tmp_path, persistent(), {}, hooks)
    (saved,) = (whole.run.path / "checkpoints").glob("step_*")
    with pytest.raises(CheckpointError, match="Resume with persistent_workers=True"):
        train(tmp_path, persistent(persistent_workers=False), {}, resume_from=saved)
    with pytest.raises(CheckpointError, match=r"1 train loaders with 0 .* has 1 loaders with 1"):
        train(tmp_path, persistent(generator=torch.Generator()), {}, resume_from=saved)


class Counting(TensorDataset):
    """Counts the samples that were loaded."""

    loaded = 0

    def __getitem__(self, index):
        type(self).loaded += 1
        return super().__getitem__(index)


def test_no_data_is_loaded_for_the_batches_before_the_checkpoint(tmp_path):
    def loader():
        return DataLoader(Counting(*dataset().tensors), batch_size=4, shuffle=True)

    whole = train(tmp_path, loader(), {"max_epochs": 1}, [SaveAt(5)])
    (saved,) = (whole.run.path / "checkpoints").glob("step_*")
    Counting.loaded = 0
    resumed = train(tmp_path, loader(), {"max_epochs": 1}, resume_from=saved)
    assert Counting.loaded == 4
    assert same(weights(resumed.model), weights(whole.model))


class GlobalBatches(BatchSampler):
    """Draws each batch from the global generator when it is asked for, as training does."""

    def __iter__(self):
        for _ in range(len(self)):
            yield torch.randint(24, (self.batch_size,)).tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_that_draws_during_the_pass_is_warned_about(tmp_path, caplog, workers):
    def loader():
        data = dataset()
        sampler = GlobalBatches(RandomSampler(data), 4, drop_last=False)
        return DataLoader(data, batch_sampler=sampler, num_workers=workers)

    is_exact = resume_equals(tmp_path, loader, 3)
    assert is_exact or workers  # it has no memory, but workers have indices from ahead
    assert "in the middle of a pass" in caplog.text


class Numbered(BatchSampler):
    """A batch sampler with generators of Python and numpy."""

    def __init__(self, data):
        super().__init__(range(len(data)), 4, drop_last=False)
        self.first, self.second = random.Random(3), numpy.random.default_rng(4)

    def __iter__(self):
        order = self.second.permutation(len(self.sampler)).tolist()
        for i in range(0, len(order), 4):
            yield self.first.sample(order[i : i + 4], len(order[i : i + 4]))


@pytest.mark.parametrize("at", [2, 6, 9])
def test_generators_of_python_and_numpy(tmp_path, at):
    def loader():
        data = dataset()
        return DataLoader(data, batch_sampler=Numbered(data))

    assert resume_equals(tmp_path, loader, at)


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0)])
def test_another_number_of_workers(tmp_path, before, after):
    def loader(workers):
        data, generator = dataset(), torch.Generator().manual_seed(1)
        sampler = RandomSampler(data, replacement=True, num_samples=100, generator=generator)
        return DataLoader(data, batch_size=4, sampler=sampler, num_workers=workers)

    assert resume_equals(
        tmp_path, lambda: loader(before), 3, make_other_loaders=lambda: loader(after)
    )


def test_an_iterator_is_refused(tmp_path):
    def run(resume_from=None):
        generator = (batch for batch in batches(8))
        return train(tmp_path, generator, {"max_epochs": 1}, [SaveAt(5)], resume_from=resume_from)

    whole = run()
    (saved,) = (whole.run.path / "checkpoints").glob("step_*")
    with pytest.raises(CheckpointError, match=r"is an iterator .* map-style"):
        run(saved)


def test_another_number_of_samples_within_an_epoch_raises_an_error(tmp_path):
    whole = train(tmp_path, shuffled(), {}, [SaveAt(3)])
    (saved,) = (whole.run.path / "checkpoints").glob("step_*")
    other = DataLoader(dataset(28), batch_size=4, shuffle=True)
    with pytest.raises(CheckpointError, match=r"had 24 samples .* has 28 now"):
        train(tmp_path, other, {}, resume_from=saved)


def test_a_checkpoint_before_the_first_batch_of_a_resumed_run(tmp_path):
    class SaveAtOnce(hookline.Hook):
        def on_train_start(self, trainer):
            self.path = trainer.save_checkpoint(tmp_path / "again")

    whole = train(tmp_path, shuffled(), {}, [SaveAt(9)])
    (saved,) = (whole.run.path / "checkpoints").glob("step_*")
    hook = SaveAtOnce()
    train(tmp_path, shuffled(), {}, [hook], resume_from=saved)
    resumed = train(tmp_path, shuffled(), {}, resume_from=hook.path or tmp_path / "again")
    assert same(weights(resumed.model), weights(whole.model))


def test_a_generator_of_a_validation_loader(tmp_path):
    class Batches(hookline.Hook):
        """Remembers the batches of the last validation."""

        def on_validation_start(self):
            self.batches = []

        def on_validation_batch_start(self, batch):
            self.batches.append(batch[0])

    def run(*hooks, resume_from=None):
        val = DataLoader(
            dataset(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)
        )
        trainer = fit(
            *hooks,
            data=shuffled(),
            val=val,
            resume_from=resume_from,
            runs=tmp_path,
            max_epochs=3,
        )
        return trainer, hooks[0].batches

    whole, expected = run(Batches(), SaveAt(9))
    (saved,) = (whole.run.path / "checkpoints").glob("step_*")
    _, found = run(Batches(), resume_from=saved)
    assert same(found, expected)


@pytest.mark.parametrize("sampler", [False, True], ids=["batch_size", "batch_sampler"])
def test_another_batch_size_in_the_middle_of_an_epoch_raises(tmp_path, sampler):
    def loader(size):
        if not sampler:
            return DataLoader(dataset(), batch_size=size, shuffle=True)
        indices = RandomSampler(range(len(dataset())))
        return DataLoader(dataset(), batch_sampler=BatchSampler(indices, size, drop_last=False))

    first = train(tmp_path, loader(4), {}, [SaveAt(2)])
    with pytest.raises(CheckpointError, match=r"had the batch size 4 .* and has 5 now"):
        train(tmp_path, loader(5), {}, [SaveAt(0)], resume_from=first.run.path)
