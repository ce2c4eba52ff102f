"""Saving and loading the states of hooks."""

import json

import pytest
import torch

import hookline
from hookline import Hook, HookFailedError, HookManager, HookStateError


class Mean(Hook):
    """Has a state that a resumed run needs."""

    def __init__(self, name=None):
        super().__init__(name)
        self.total = 0.0

    def on_step_end(self, loss):
        self.total += loss

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]


class Plain(Hook):
    def on_step_end(self, step):
        pass


class Broken(Mean):
    def state_dict(self):
        raise RuntimeError("cannot save")

    def load_state_dict(self, state):
        raise KeyError("total")


def test_states_are_saved_and_loaded_by_name():
    saved = HookManager([Mean("a"), Mean("b")])
    saved.get_hook("a").total = 1.0
    saved.get_hook("b").total = 2.0
    states = json.loads(json.dumps(saved.state_dict()))
    assert states == {"a": {"total": 1.0}, "b": {"total": 2.0}}

    resumed = HookManager([Mean("b"), Mean("a")])
    report = resumed.load_state_dict(states)
    assert (resumed.get_hook("a").total, resumed.get_hook("b").total) == (1.0, 2.0)
    assert (report.missing, report.orphaned) == ((), ())


def test_a_hook_without_a_saved_state_is_reported(caplog):
    manager = HookManager([Mean("old"), Mean("new"), Plain()])
    report = manager.load_state_dict({"old": {"total": 1.0}})
    assert report.missing == ("new",)
    assert report.orphaned == ()
    (record,) = caplog.records
    assert "new" in record.getMessage()
    assert record.levelname == "WARNING"
    assert manager.get_hook("old").total == 1.0


def test_a_state_without_a_hook_is_reported(caplog):
    report = HookManager([Mean("a")]).load_state_dict({"a": {"total": 1.0}, "gone": {}})
    assert report.orphaned == ("gone",)
    assert report.missing == ()
    (record,) = caplog.records
    assert "gone" in record.getMessage()


def test_a_hook_that_is_a_module_saves_its_weights():
    class Probe(torch.nn.Module, Hook):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(1))

        def on_step_end(self, step):
            pass

    saved, resumed = HookManager([Probe()]), HookManager([Probe()])
    with torch.no_grad():
        saved.get_hook("probe").scale.fill_(5.0)
    resumed.load_state_dict(saved.state_dict())
    assert resumed.get_hook("probe").scale.item() == 5.0


def test_a_hook_that_cannot_save_does_not_keep_the_others_from_saving(caplog):
    manager = HookManager([Broken(), Mean()])
    assert manager.state_dict() == {"mean": {"total": 0.0}}
    assert "'broken' failed in" in caplog.records[0].getMessage()
    assert "state_dict" in caplog.records[0].getMessage()
    assert caplog.records[0].exc_info
    assert manager.summary().failures == {"broken": 1}


def test_a_critical_hook_that_cannot_save_stops_training():
    manager = HookManager()
    manager.add_hook(Broken(), strict=True)
    with pytest.raises(HookFailedError, match=r"'broken' failed in .*state_dict") as caught:
        manager.state_dict()
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_the_error_names_the_hook_that_cannot_load_its_state():
    manager = HookManager([Broken("resumer")])
    with pytest.raises(HookStateError, match=r"'resumer' \(Broken\).*KeyError: 'total'") as caught:
        manager.load_state_dict({"resumer": {}})
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_resumed_run_disables_what_the_user_disabled_but_tries_failed_hooks_again(tmp_path):
    def trainer():
        broken, idle = Hook("broken"), Hook("idle")
        broken.on_step_end = lambda step: 1 / 0
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = {"runs": tmp_path, "progress": "off", "max_epochs": 1}
        return hookline.Trainer(
            config, model, optimizer, loss_fn=torch.nn.MSELoss(), hooks=[broken, idle]
        )

    def status(trainer):
        return {info.name: info.status for info in trainer.hooks.describe()[:2]}

    data = [(torch.ones(2, 2), torch.ones(2, 1))] * 4
    first, resumed = trainer(), trainer()
    first.disable_hook("idle")
    first.fit(data)
    assert status(first) == {"broken": "failed", "idle": "disabled"}
    resumed.fit(data, resume_from=first.save_checkpoint(tmp_path / "saved"))  # nothing is left
    assert status(resumed) == {"broken": "enabled", "idle": "disabled"}
