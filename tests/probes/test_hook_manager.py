"""The manager of probes on single modules, as document 004 describes it."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import threading
import weakref

import pytest
import torch
from loops import hooks_on
from torch import nn

from hookline.errors import (
    ArgumentError,
    ConfigError,
    NameTakenError,
    ObserverError,
    ProbeError,
    UnknownHookError,
)
from hookline.probes import Counts, HookManager, Probe, Probes


class Fails(Probe):
    def __init__(self, times=10**9):
        super().__init__("")
        self.left = times

    def after(self, call):
        if self.left:
            self.left -= 1
            raise ZeroDivisionError("of my own")


class Doubles(Probe):
    edits = True

    def after(self, call):
        return call.output * 2


# -- the example of the document


def test_the_example_runs_as_it_stands(capsys):
    hook_manager = HookManager()
    transformer_layer = nn.TransformerEncoderLayer(d_model=512, nhead=8)
    hook_id = hook_manager.register_capture_hook(
        module=transformer_layer,
        hook_id="encoder_layer_4",
        layer_idx=4,
        capture_input=True,
        capture_output=True,
    )
    out = transformer_layer(torch.ones(2, 1, 512))
    captured = hook_manager.get_captured_states(hook_id)
    print(f"Captured states: {len(captured)}")
    hook_manager.remove_hook(hook_id)

    assert capsys.readouterr().out == "Captured states: 1\n"
    assert hook_id == "encoder_layer_4"
    [state] = captured
    assert torch.equal(state.output, out)
    assert torch.equal(state["input"][0], torch.ones(2, 1, 512))
    assert (state.module, state.probe, state.layer_idx) == (hook_id, hook_id, 4)
    assert hooks_on(transformer_layer) == 0


# -- capture


def test_further_options_of_capture():
    layer = nn.Linear(2, 3)
    with HookManager() as manager:
        manager.register_capture_hook(layer, "a", gradient=True, select=0, dtype="float64")
        layer(torch.ones(4, 2)).sum().backward()
        [state] = manager.get_captured_states("a")
        assert (state.output.shape, state.output.dtype) == ((3,), torch.float64)
        assert torch.equal(state.gradient, torch.ones(3, dtype=torch.float64))
        with pytest.raises(ConfigError, match="Unknown option 'gradeint'"):
            manager.register_capture_hook(layer, "b", gradeint=True)
        assert manager.list_hooks() == ["a"]


# -- the constructor's arguments


def test_max_captured_states_is_over_all_hooks():
    layer, other = nn.Linear(2, 3), nn.Linear(2, 3)
    with HookManager(max_captured_states=4) as manager:
        manager.register_capture_hook(layer, "a")
        manager.register_capture_hook(other, "b")
        for i in range(2):
            layer(torch.full((1, 2), float(i)))
            other(torch.full((1, 2), float(i)))
        other(torch.ones(1, 2))
        counts = {hook_id: manager.get_hook(hook_id).counts for hook_id in "ab"}
        assert counts == {"a": Counts(2, 1, 1), "b": Counts(3, 3)}
        kept = [s.input[0][0, 0].item() for s in manager.get_captured_states("a")]
        assert kept == [1]


def test_cleanup_interval_is_the_captures_between_two_clean_ups():
    layer, kept = nn.Linear(2, 3), []
    with HookManager(max_captured_states=3, cleanup_interval=4) as manager:
        manager.register_capture_hook(layer, "a")
        for _ in range(9):
            layer(torch.ones(1, 2))
            kept.append(len(manager.get_captured_states("a")))
    assert kept == [1, 2, 3, 3, 4, 5, 6, 3, 4]


REGISTERED = {
    "capture": lambda manager, module: manager.register_capture_hook(module, "a", gradient=True),
    "monitoring": lambda manager, module: manager.register_monitoring_hook(
        module, "a", metrics=["mean", "dead", "forward_time_ms"]
    ),
    "debug": lambda manager, module: manager.register_debug_hook(module, "a", gradients=True),
    "edit": lambda manager, module: manager.register_probe(module, "a", Doubles("")),
}


@pytest.mark.parametrize("kind", REGISTERED)
def test_nothing_keeps_a_module_alive_after_its_hook_is_removed(kind):
    manager, module = Probes(enable_intervention=True), nn.Linear(2, 2)
    alive = weakref.ref(module)
    REGISTERED[kind](manager, module)
    module(torch.ones(1, 2)).sum().backward()
    manager.remove_hook("a")
    del module
    gc.collect()
    assert alive() is None
    manager.close()


def test_memory_limit_mb_is_over_all_hooks():
    layer, other = nn.Linear(256, 256), nn.Linear(256, 256)
    with HookManager(memory_limit_mb=1) as manager:
        manager.register_capture_hook(layer, "a", capture_input=False)
        manager.register_capture_hook(other, "b", capture_input=False)
        for _ in range(4):
            layer(torch.ones(256, 256))
            other(torch.ones(256, 256))
            assert manager.nbytes <= 2**20
        assert manager.nbytes == 2**20
        assert [len(manager.get_captured_states(one)) for one in "ab"] == [2, 2]


def test_edits_need_enable_intervention():
    layer, x = nn.Linear(2, 3), torch.ones(1, 2)
    plain = layer(x)
    with HookManager() as manager:
        with pytest.raises(ProbeError, match=r"HookManager|Probes\(enable_intervention=True\)"):
            manager.register_probe(layer, "twice", Doubles(""))
        assert torch.equal(layer(x), plain)
        assert manager.list_hooks() == []
    with HookManager(enable_intervention=True) as manager:
        manager.register_probe(layer, "twice", Doubles(""))
        assert torch.equal(layer(x), plain * 2)
    assert torch.equal(layer(x), plain)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_captured_states": 0},
        {"max_captured_states": 1.5},
        {"memory_limit_mb": -1},
        {"memory_limit_mb": "64"},
        {"memory_limit_mb": float("inf")},
        {"memory_limit_mb": float("nan")},
        {"enable_intervention": "no"},
        {"cleanup_interval": 0},
    ],
)
def test_arguments_that_do_not_fit(wrong):
    with pytest.raises((ArgumentError, ConfigError), match=next(iter(wrong))):
        HookManager(**wrong)


# -- monitoring and debugging


def test_a_monitoring_hook_has_the_default_statistics_or_those_asked_for():
    layer = nn.Linear(2, 3)
    with HookManager() as manager:
        manager.register_monitoring_hook(layer, "a")
        manager.register_monitoring_hook(layer, "b", metrics=["max"])
        out = layer(torch.randn(4, 2)).detach()
        numbers = manager.get_metrics("a")
        assert numbers["mean"] == pytest.approx(out.mean().item(), abs=1e-6)
        assert {"mean", "std"} <= set(numbers)
        assert manager.get_metrics("b") == {"max": pytest.approx(out.max().item())}
        with pytest.raises(ProbeError, match="'a' is a Monitor, which captures nothing"):
            manager.get_captured_states("a")


ALL_METRICS = ["mean", "std", "max", "histogram", "dead", "forward_time_ms", "memory"]


def test_metrics_are_of_the_calls_since_they_were_last_read():
    layer = nn.Linear(2, 3)
    with HookManager() as manager:
        manager.register_monitoring_hook(layer, "a", ALL_METRICS)
        outputs = torch.cat([layer(torch.randn(4, 2)).detach() for _ in range(3)])
        numbers = manager.get_metrics("a")
        assert set(numbers) == set(ALL_METRICS)
        assert numbers["mean"] == pytest.approx(outputs.mean().item(), abs=1e-6)
        assert manager.get_metrics("a") == {}
        last = layer(torch.randn(4, 2)).detach()
        assert manager.get_metrics("a")["max"] == pytest.approx(last.max().item())


def test_a_debug_hook_that_is_to_stop_is_not_isolated():
    layer = nn.Linear(2, 3)
    with HookManager() as manager:
        manager.register_debug_hook(layer, "a", action="stop")
        with pytest.raises(ProbeError, match="'a' found"):
            layer(torch.full((1, 2), float("nan")))
        with pytest.raises(ProbeError, match="'a' is a DebugProbe, which measures nothing"):
            manager.get_metrics("a")


def test_every_counts_the_calls_of_the_module():
    layer = nn.Linear(2, 3)
    with HookManager() as manager:
        manager.register_capture_hook(layer, "states", every=3)
        manager.register_monitoring_hook(layer, "numbers", ["max"], every=2)
        manager.register_debug_hook(layer, "findings", action="record", every=4)
        for i in range(1, 8):
            layer(torch.full((1, 2), float("nan" if i == 3 else i)))
        assert [s.input[0][0, 0].item() for s in manager.get_captured_states("states")[1:]] == [6]
        assert manager.get_metrics("numbers").keys() == {"max"}  # the third call was not measured
        assert manager.get_hook("findings").findings == []
        with pytest.raises(ValueError, match="every is 0"):
            manager.register_capture_hook(layer, "wrong", every=0)
        assert manager.list_hooks() == ["states", "numbers", "findings"]


# -- errors


def test_ids_that_are_taken_unknown_or_none():
    layer = nn.Linear(2, 3)
    with HookManager() as manager:
        manager.register_capture_hook(layer, "encoder")
        with pytest.raises(NameTakenError, match=r"'encoder' already.*remove_hook\('encoder'\)"):
            manager.register_capture_hook(layer, "encoder")
        there = hooks_on(layer)
        with pytest.raises(NameTakenError):
            manager.register_monitoring_hook(layer, "encoder")
        assert hooks_on(layer) == there
        unknown = [
            manager.remove_hook,
            manager.get_captured_states,
            manager.clear_captured_states,
            manager.enable_hook,
            manager.disable_hook,
            manager.get_metrics,
            manager.get_hook,
        ]
        for function in unknown:
            with pytest.raises(UnknownHookError, match=r"'encodr'. Did you mean 'encoder'\?"):
                function("encodr")
        for nothing in ("", None, 3):
            with pytest.raises(TypeError, match="expected a string that is not empty"):
                manager.register_capture_hook(layer, nothing)


# -- on exit


def test_on_exit_everything_is_removed_and_only_what_it_added():
    layer, called = nn.Linear(2, 3), []
    layer.register_forward_hook(lambda *args: called.append(1))
    layer.register_forward_pre_hook(lambda *args: None)
    before = dict(layer._forward_hooks), dict(layer._forward_pre_hooks)
    with HookManager() as outer:
        outer.register_capture_hook(layer, "a")
        with pytest.raises(ZeroDivisionError), HookManager() as manager:
            manager.register_capture_hook(layer, "a")
            manager.register_monitoring_hook(layer, "b")
            raise ZeroDivisionError
        assert manager.list_hooks() == []
        layer(torch.ones(1, 2))
        assert len(outer.get_captured_states("a")) == 1
    assert (layer._forward_hooks, layer._forward_pre_hooks) == before
    assert called == [1]


def test_hooks_are_toggled_and_listed():
    layer = nn.Linear(2, 3)
    with HookManager() as manager:
        manager.register_capture_hook(layer, "a")
        manager.register_monitoring_hook(layer, "b")
        manager.disable_hook("a")
        layer(torch.ones(1, 2))
        assert manager.get_captured_states("a") == []
        assert [(one.name, one.enabled) for one in manager.describe()] == [
            ("a", False),
            ("b", True),
        ]
        manager.enable_hook("a")
        layer(torch.ones(1, 2))
        assert len(manager.get_captured_states("a")) == 1
        assert manager.list_hooks() == ["a", "b"]
        assert manager.get_hook("a").states()
        assert repr(manager).startswith("<Probes: 'a', 'b', ")
        manager.clear_hooks()
        assert manager.list_hooks() == []
        assert manager


# -- failures


def test_a_failing_probe_does_not_fail_the_model_and_is_disabled_after_three(caplog):
    layer, x = nn.Linear(2, 3), torch.ones(1, 2)
    with HookManager() as manager, caplog.at_level(logging.ERROR, "hookline"):
        manager.register_probe(layer, "bad", Fails(4))
        manager.register_capture_hook(layer, "good")
        for _ in range(5):
            layer(x)
        assert len(manager.get_captured_states("good")) == 5
        bad = manager.describe()[0]
        assert (bad.failures, bad.enabled) == (3, False)
        assert bad.status not in ("enabled", "disabled")  # the same word as in a training run
        assert bad.last_error == "ZeroDivisionError: of my own"
        assert "The hook 'bad' failed in after (ZeroDivisionError: of my own)" in caplog.text
        assert "enable_hook('bad')" in caplog.text
        manager.enable_hook("bad")
        for _ in range(3):
            layer(x)
        assert (manager.describe()[0].failures, manager.describe()[0].enabled) == (4, True)


def test_what_must_not_be_isolated_is_not():
    layer, x = nn.Linear(2, 3), torch.ones(1, 2)

    class FailingEdit(Doubles):
        def after(self, call):
            raise ZeroDivisionError

    class Meddles(Doubles):
        edits = False

    with HookManager(enable_intervention=True) as manager:
        manager.register_probe(layer, "a", FailingEdit(""))
        with pytest.raises(ZeroDivisionError):
            layer(x)
        manager.remove_hook("a")
        manager.register_probe(layer, "a", Meddles(""))
        with pytest.raises(ProbeError, match="'a' returned a value for 'a'"):
            layer(x)
        manager.remove_hook("a")
        manager.register_capture_hook(layer, "a", select=lambda t: t.mul_(2))
        with pytest.raises(ObserverError):
            layer(x)


# -- threads


def test_threads_may_register_run_and_remove_at_once():
    layer = nn.Linear(2, 3)
    # The limit is for all hooks together: it must not drop what another thread is about to read.
    manager, errors = HookManager(max_captured_states=10_000), []

    def work(number):
        try:
            for i in range(40):
                hook_id = manager.register_capture_hook(layer, f"{number}.{i}")
                layer(torch.ones(1, 2))
                assert manager.get_captured_states(hook_id)
                manager.remove_hook(hook_id)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert hooks_on(layer) == 0
    assert (manager.list_hooks(), manager.nbytes) == ([], 0)


# -- modules that are not called, and copies


def test_on_exit_hooks_whose_module_was_not_called_are_named(caplog):
    called, around, off = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    with HookManager() as manager:
        manager.register_capture_hook(called, "called")
        manager.register_capture_hook(around, "around")
        manager.register_monitoring_hook(around, "around_too")
        manager.register_capture_hook(off, "off")
        manager.disable_hook("off")
        around.forward(called(torch.ones(1, 2)))
    assert "The probe 'around' saw no call of 'around'." in caplog.text
    assert "The probe 'around_too' saw no call of 'around_too'." in caplog.text
    assert "'called'" not in caplog.text
    assert "'off'" not in caplog.text


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"]
)
def test_a_copy_is_on_no_module_and_has_captured_nothing(copied):
    model = nn.Sequential(nn.Linear(2, 3))
    model.manager = HookManager(max_captured_states=2, enable_intervention=True)
    model.manager.register_capture_hook(model[0], "a")
    model(torch.ones(1, 2))
    other = copied(model)
    other(torch.ones(1, 2))
    assert other.manager.list_hooks() == []
    assert other.manager.enable_intervention
    assert len(model.manager.get_captured_states("a")) == 1
    other.manager.register_capture_hook(other[0], "a")
    for _ in range(3):
        other(torch.ones(1, 2))
    assert len(other.manager.get_captured_states("a")) == 2
    assert len(model.manager.get_captured_states("a")) == 1
    model.manager.close()
    other.manager.close()
