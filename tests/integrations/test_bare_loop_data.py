"""Batches, sample indices, waiting times and tokens of a loop that was not changed."""

from __future__ import annotations

import gc
import json
import time

import pytest
import torch
from fake_clock import FakeClock
from loops import batches, make, recorder, same, told_in, train, weights
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

import hookline
from hookline import NotSuppliedError
from hookline.loop import record


class Pairs(Dataset):
    """Twelve samples; the first number of each is its index."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        x = torch.full((8,), 0.1 * index)
        x[0] = index
        return x, torch.ones(4)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([Pairs()[i] for i in range(12)])


PAIRS = Pairs()


def shuffled(**options):
    generator = torch.Generator().manual_seed(3)
    return DataLoader(PAIRS, batch_size=3, shuffle=True, generator=generator, **options)


BATCH = ("batch", "batch_idx", "dataloader_idx", "dataloader_name")


class Indices(hookline.Hook):
    def __init__(self):
        self.found = []

    def on_train_batch_start(self, trainer, batch, batch_idx, dataloader_idx):
        indices = trainer.sample_indices(dataloader_idx, batch_idx)
        self.found.append((batch[0][:, 0].tolist(), indices))


def test_batches_of_a_loader_are_noticed():
    plain, optimizer = make()
    losses = train(plain, optimizer, shuffled())
    model, optimizer = make()
    hook = recorder(on_train_batch_start=BATCH, on_train_batch_end=("batch_idx", "loss"))
    with hookline.attach(model, optimizer, hooks=[hook]):
        assert train(model, optimizer, shuffled()) == losses
        assert train(model, optimizer, shuffled()) != losses  # the next epoch
    assert same(weights(model), weights(plain)) is False
    starts = told_in(hook, "on_train_batch_start")
    assert [start["batch_idx"] for start in starts] == [0, 1, 2, 3] * 2
    assert {(s["dataloader_idx"], s["dataloader_name"]) for s in starts} == {(0, "train")}
    expected = [x for x, _ in shuffled()]
    assert all(torch.equal(s["batch"][0], x) for s, x in zip(starts[:4], expected, strict=True))
    ends = told_in(hook, "on_train_batch_end")
    assert [float(end["loss"]) for end in ends[:4]] == losses
    names = [told[0] for told in hook.told]
    assert names == ["on_train_batch_start", "on_train_batch_end"] * 8


def test_weights_are_the_same_with_and_without():
    found = []
    for hooks in ([], [recorder(on_train_batch_start=BATCH)]):
        model, optimizer = make()
        with hookline.attach(model, optimizer, hooks=hooks):
            train(model, optimizer, shuffled())
            train(model, optimizer, DataLoader(Pairs(), batch_size=4, shuffle=True))
        found.append(weights(model))
    assert same(*found)


@pytest.mark.parametrize("workers", [0, 2])
def test_sample_indices_are_those_of_the_batch(workers):
    model, optimizer = make()
    hook = Indices()
    loader = shuffled(num_workers=workers, persistent_workers=workers > 0)
    with hookline.attach(model, optimizer, hooks=[hook]):
        for _ in range(2):
            train(model, optimizer, loader)
    assert len(hook.found) == 8
    for seen, indices in hook.found:
        assert seen == indices


def test_micro_batches_end_when_the_next_one_is_used():
    model, optimizer = make()
    hook = recorder("on_step_end", on_train_batch_end=("batch_idx",))
    with hookline.attach(model, optimizer, hooks=[hook]):
        for i, (x, y) in enumerate(DataLoader(Pairs(), batch_size=3)):
            (F.mse_loss(model(x), y) / 2).backward()
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
    ends = [("on_train_batch_end", {"batch_idx": i}) for i in range(4)]
    assert hook.told == [*ends[:2], "on_step_end", *ends[2:], "on_step_end"]


def test_batches_of_a_validation_are_not_those_of_training():
    model, optimizer = make()
    hook = recorder(on_train_batch_start=("batch_idx",))
    with hookline.attach(model, optimizer, hooks=[hook]):
        for x, y in shuffled():
            train(model, optimizer, [(x, y)])
            with torch.no_grad():
                for x, _ in DataLoader(Pairs(), batch_size=6):
                    model(x)
    assert [told["batch_idx"] for told in told_in(hook, "on_train_batch_start")] == [0, 1, 2, 3]


def test_of_several_loaders_the_one_is_meant_whose_batch_the_model_gets():
    model, optimizer = make()
    hook = recorder(on_train_batch_start=("batch", "dataloader_idx"))
    first, second = (DataLoader(dataset, batch_size=3) for dataset in (PAIRS, Pairs()))
    with hookline.attach(model, optimizer, hooks=[hook]):
        for (x, y), (other, _) in zip(first, second, strict=True):
            train(model, optimizer, [(x.view(3, 8), y)])
            starts = told_in(hook, "on_train_batch_start")
            assert starts[-1]["batch"][0] is x
            train(model, optimizer, [(other, y)])
            starts = told_in(hook, "on_train_batch_start")
            assert starts[-1]["batch"][0] is other
            assert [start["dataloader_idx"] for start in starts[-2:]] == [0, 1]


def test_what_cannot_be_told_apart_is_not_provided():
    """Both loaders deliver, and the model gets a copy, as on another device."""
    model, optimizer = make()
    first, second = DataLoader(Pairs(), batch_size=3), DataLoader(Pairs(), batch_size=3)
    with (
        pytest.raises(NotSuppliedError, match=r"cannot be told from others.*session\.batches"),
        hookline.attach(model, optimizer, hooks=[recorder(on_before_forward=("batch",))]),
    ):
        for (x, y), _ in zip(first, second, strict=True):
            train(model, optimizer, [(x.clone(), y)])


def prefetched(loader):
    """Yield batches, and load the next one before that."""
    batches = iter(loader)
    ahead = next(batches)
    for following in batches:
        yield ahead
        ahead = following
    yield ahead


def test_a_loader_that_is_read_ahead_gives_the_batch_that_is_used():
    model, optimizer = make()
    hook = recorder(on_train_batch_start=("batch", "batch_idx"))
    with hookline.attach(model, optimizer, hooks=[hook]):
        for x, y in prefetched(shuffled()):
            train(model, optimizer, [(x, y)])
            assert told_in(hook, "on_train_batch_start")[-1]["batch"][0] is x
    assert [told["batch_idx"] for told in told_in(hook, "on_train_batch_start")] == [0, 1, 2, 3]
    with (
        pytest.raises(NotSuppliedError, match="cannot be told from others"),
        hookline.attach(model, optimizer, hooks=[hook]),
    ):
        for x, y in prefetched(shuffled()):
            train(model, optimizer, [(x.clone(), y)])


def test_batches_that_cannot_be_told_any_more_are_not_provided_from_then_on(caplog):
    model, optimizer = make()
    hook = recorder("on_step_end", on_train_batch_start=("batch_idx",))
    with hookline.attach(model, optimizer, hooks=[hook]):
        train(model, optimizer, shuffled())
        for x, y in prefetched(shuffled()):
            train(model, optimizer, [(x.clone(), y)])
    assert len(told_in(hook, "on_train_batch_start")) == 4
    assert hook.told.count("on_step_end") == 8
    assert caplog.text.count("cannot be told from others any more") == 1


def test_the_session_has_precedence():
    model, optimizer = make()
    hook = recorder(on_train_batch_start=("dataloader_name", "batch_idx"))
    with hookline.attach(model, optimizer, hooks=[hook]) as session:
        train(model, optimizer, session.batches(shuffled(), name="own", idx=2))
    assert told_in(hook, "on_train_batch_start") == [
        {"dataloader_name": "own", "batch_idx": i} for i in range(4)
    ]


def test_loaders_are_watched_only_while_batches_are_needed():
    gc.collect()  # sessions of other tests
    before = _BaseDataLoaderIter.__next__, _BaseDataLoaderIter._next_index
    model, optimizer = make()
    with hookline.attach(model, optimizer, hooks=[recorder("on_step_end")]) as session:
        assert (_BaseDataLoaderIter.__next__, _BaseDataLoaderIter._next_index) == before
        session.add_hook(recorder(on_before_forward=("batch",)), "late")
        assert _BaseDataLoaderIter.__next__ is not before[0]
        session.disable_hook("late")
        assert (_BaseDataLoaderIter.__next__, _BaseDataLoaderIter._next_index) == before
        assert not model._forward_pre_hooks
        session.enable_hook("late")
    assert (_BaseDataLoaderIter.__next__, _BaseDataLoaderIter._next_index) == before
    assert not model._forward_pre_hooks


def read(session, name):
    lines = (session.run.path / "metrics.jsonl").read_text().splitlines()
    return [r["value"] for r in map(json.loads, lines) if r["name"] == name]


def test_waiting_for_data_is_measured_in_an_unchanged_loop(tmp_path):
    class Slow(Pairs):
        def __getitem__(self, index):
            time.sleep(0.01)
            return super().__getitem__(index)

    model, optimizer = make()
    with hookline.attach(model, optimizer, runs=tmp_path) as session:
        train(model, optimizer, DataLoader(Slow(), batch_size=3))
    events = (session.run.path / "events.jsonl").read_text().splitlines()
    (end,) = [event for event in map(json.loads, events) if event["kind"] == "end"]
    assert 0.02 < end["times"]["data"] < 1.0  # of some batches


# -- tokens ---------------------------------------------------------------------------------------


class Speaker(nn.Module):
    """As a small GPT: tokens and positions."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(10, 8), nn.Embedding(6, 8)
        self.head = nn.Linear(8, 10)

    def forward(self, ids, targets=None):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        logits = self.head(x)
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


def speak(model, optimizer, steps=3, accumulate=2):
    """As nanoGPT's loop: batches come from a function, and two of them make a step."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for _ in range(accumulate):
            ids = torch.randint(10, (4, 6), generator=generator)
            _, loss = model(ids, ids)
            (loss / accumulate).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            model(ids)


def speaker():
    torch.manual_seed(0)
    model = Speaker()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_tokens_are_counted_where_the_embedding_gets_them(tmp_path):
    plain, optimizer = speaker()
    speak(plain, optimizer)
    model, optimizer = speaker()
    hook = recorder(on_step_end=("tokens_seen",))
    with hookline.attach(model, optimizer, hooks=[hook], runs=tmp_path) as session:
        speak(model, optimizer)
        session.save_checkpoint(tmp_path / "saved", wait=True)
    assert same(weights(model), weights(plain))
    assert [told["tokens_seen"] for told in told_in(hook, "on_step_end")] == [48, 96, 144]
    assert not model.tokens._forward_pre_hooks
    resumed = hookline.attach(model, optimizer, hooks=[hook])
    resumed.load_checkpoint(tmp_path / "saved")
    with resumed:
        speak(model, optimizer, steps=1)
    assert told_in(hook, "on_step_end")[-1] == {"tokens_seen": 192}


def test_tokens_per_second_are_recorded_between_samples_but_not_across_a_load(
    tmp_path, monkeypatch
):
    clock, model_and_optimizer = FakeClock(monkeypatch, record), speaker()

    class Samples(hookline.Hook):
        def on_step_end(self, step):
            clock.wait(2**step)
            session.loop.record._sampler.sample = {}

    with hookline.attach(*model_and_optimizer, hooks=[Samples()], runs=tmp_path) as session:
        speak(*model_and_optimizer, steps=3)
        session.save_checkpoint(tmp_path / "saved", wait=True)
        speak(*model_and_optimizer, steps=1)
        session.load_checkpoint(tmp_path / "saved")
        speak(*model_and_optimizer, steps=2)
    run = hookline.open_run(session.run.path)
    seen = {row["step"]: row["value"] for row in run.metrics("train/tokens_seen")}
    rates = {row["step"]: row["value"] for row in run.metrics("train/tokens_per_second")}
    assert seen == {1: 48, 2: 96, 3: 144, 4: 192, 5: 240}
    assert rates == {2: 48 / 4, 3: 48 / 8, 5: 48 / 32}


def test_tokens_of_a_compiled_model_are_counted_in_its_inputs():
    model, optimizer = speaker()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    hook = recorder(on_step_end=("tokens_seen",))
    with hookline.attach(compiled, optimizer, hooks=[hook]):
        speak(compiled, optimizer, steps=2)
    assert [told["tokens_seen"] for told in told_in(hook, "on_step_end")] == [48, 96]


def test_tokens_are_counted_once_if_the_batch_has_them():
    model, optimizer = speaker()
    data = [(torch.ones(2, 6, dtype=torch.long),) for _ in range(6)]
    hook = recorder(on_step_end=("tokens_seen",))
    with hookline.attach(model, optimizer, hooks=[hook]):
        for (ids,) in DataLoader(data, batch_size=3):
            model(ids[:, 0], ids[:, 0])[1].backward()
            optimizer.step()
    assert [told["tokens_seen"] for told in told_in(hook, "on_step_end")] == [36, 72]


def test_vectors_of_labels_are_not_tokens():
    model = nn.Embedding(10, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(NotSuppliedError, match="tokens=lambda batch"),
        hookline.attach(model, optimizer, hooks=[recorder(on_step_end=("tokens_seen",))]),
    ):
        model(torch.arange(5)).sum().backward()
        optimizer.step()


def test_a_function_that_counts_tokens_needs_batches():
    model, optimizer = make()
    with (
        pytest.raises(NotSuppliedError, match=r"tokens=…\) has no effect"),
        hookline.attach(model, optimizer, tokens=lambda batch: 1),
    ):
        train(model, optimizer, batches(1))
    hook = recorder(on_step_end=("tokens_seen",))
    with hookline.attach(model, optimizer, hooks=[hook], tokens=lambda batch: 5):
        train(model, optimizer, shuffled())
    assert [told["tokens_seen"] for told in told_in(hook, "on_step_end")] == [5, 10, 15, 20]


def test_an_embedding_that_is_called_twice_in_a_forward_counts_its_tokens_once():
    class Twice(nn.Module):
        """As an encoder and a decoder that share their embedding."""

        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(8, 4)

        def forward(self, tokens):
            return self.embedding(tokens) + self.embedding(tokens.flip(1))

    model = Twice()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = recorder(on_step_end=("tokens_seen",))
    with hookline.attach(model, optimizer, hooks=[hook]):
        for _ in range(2):
            model(torch.zeros(2, 3, dtype=torch.long)).square().mean().backward()
            optimizer.step()
    assert told_in(hook, "on_step_end") == [{"tokens_seen": 6}, {"tokens_seen": 12}]
