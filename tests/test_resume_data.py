"""Resuming in the middle of an epoch is exact for every kind of loader, or raises an error."""

from __future__ import annotations

import pytest
import torch
from loops import Net, batches, same, weights
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

import hookline
from hookline import CheckpointError, Trainer, TrainerConfig


class SaveAt(hookline.Hook):
    """Save a checkpoint in one event of one step."""

    def __init__(self, step, event="on_step_end"):
        self.at, self.event = step, event

    def on_step_end(self, trainer, step):
        if step == self.at and self.event == "on_step_end":
            trainer.save_checkpoint()

    def on_epoch_end(self, trainer, step):
        if step == self.at and self.event == "on_epoch_end":
            trainer.save_checkpoint()

    def on_before_optimizer_step(self, trainer, step):
        if step == self.at - 1 and self.event == "on_before_optimizer_step":
            trainer.save_checkpoint()


def dataset(samples=24, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(samples, 8, generator=generator), torch.randn(samples, 4)
    return TensorDataset(x, y * 0 + x[:, :4])


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


def train(tmp_path, loaders, fields, hooks=(), optimizers=1, resume_from=None):
    torch.manual_seed(0)
    model = Net()
    parts = (
        [model.parameters()]
        if optimizers == 1
        else [m.parameters() for m in (model.first, model.second)]
    )
    config = {"runs": tmp_path / "runs", "progress": "off", "max_epochs": 2, "seed": 7, **fields}
    trainer = Trainer(
        TrainerConfig(**config),
        model,
        [torch.optim.AdamW(p, lr=0.01) for p in parts],
        hooks=list(hooks),
    )
    trainer.fit(loaders, resume_from=resume_from)
    return trainer


def resume_equals(tmp_path, make_loaders, at, event="on_step_end", optimizers=1, **fields):
    """Whether a run that is resumed from step `at` ends with the weights of the whole run."""
    whole = train(tmp_path, make_loaders(), fields, [SaveAt(at, event)], optimizers)
    (saved,) = (whole.run.path / "checkpoints").glob("step_*")
    torch.manual_seed(99)  # whatever happened since
    resumed = train(tmp_path, make_loaders(), fields, (), optimizers, saved)
    assert resumed.step == whole.step
    return same(weights(resumed.model), weights(whole.model))


def shuffled(seed=1, **options):
    return DataLoader(dataset(seed=seed), batch_size=4, shuffle=True, **options)


@pytest.mark.parametrize("at", [1, 2, 5, 11, 12, 15, 24])
@pytest.mark.parametrize("order", ["sequential", "round_robin"])
def test_two_loaders_shuffled_by_the_global_generator(tmp_path, at, order):
    def loaders():
        return {"a": shuffled(1), "b": shuffled(2)}

    assert resume_equals(tmp_path, loaders, at, loaders={"order": order})


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


def test_random_numbers_in_workers_are_not_restored_and_it_is_said_once(tmp_path, caplog):
    def loader():
        return persistent(RandomTransform(*dataset().tensors))

    assert not resume_equals(tmp_path / "first", loader, 3)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "per_sample_seed=True" in caplog.text
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


@pytest.mark.parametrize("at", [3, 9])
def test_workers_with_random_transforms_are_exact_if_batches_are_loaded_again(tmp_path, at):
    def loader():
        data = RandomTransform(*dataset().tensors)
        return DataLoader(data, batch_size=4, shuffle=True, num_workers=2)

    assert resume_equals(tmp_path, loader, at, fast_forward=True)
    assert resume_equals(tmp_path / "two", lambda: [loader(), loader()], at, fast_forward=True)
