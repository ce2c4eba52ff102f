"""torchdata's StatefulDataLoader is resumed through its own state."""

from __future__ import annotations

import pytest
import torch
from loops import batches
from resume_checks import dataset, resume_equals
from torch.utils.data import IterableDataset

pytest.importorskip("torchdata")
from torchdata.stateful_dataloader import StatefulDataLoader

# torchdata calls a function of torch that is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


class Stream8(IterableDataset):
    """An iterable-style dataset with a state."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < 8:
            self.at += 1
            yield batches(8)[self.at - 1]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.soak(every=2)
@pytest.mark.parametrize("at", [3, 6, 9])
@pytest.mark.parametrize(
    ("kind", "workers"),
    [("global", 0), ("generator", 0), ("generator", 1), ("persistent", 1), ("iterable", 0)],
)
def test_a_stateful_loader_is_restored_by_its_own_state(tmp_path, kind, workers, at):
    def loader():
        torch.manual_seed(4)  # it draws the seed of its sampler when it is made
        if kind == "iterable":
            return StatefulDataLoader(Stream8(), batch_size=None, num_workers=workers)
        return StatefulDataLoader(
            dataset(),
            batch_size=4,
            shuffle=True,
            generator=torch.Generator().manual_seed(2) if kind == "generator" else None,
            num_workers=workers,
            persistent_workers=kind == "persistent",
        )

    assert resume_equals(tmp_path, loader, at)
