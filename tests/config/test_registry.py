"""HookRegistry: hooks from a configuration, names and packages, toggles, and calls by hand."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from loops import batches, make

import hookline
from hookline import ConfigError, HooksConfig, Trainer, TrainerConfig
from hookline.config.hook_items import make_hook
from hookline.config.hook_names import (
    load_class,
)
from hookline.config.registry import HookRegistry


class Looks(hookline.ForwardHook):
    seen: ClassVar[list] = []

    def __init__(self, label="looks"):
        self.label = label

    def __call__(self, activations):
        Looks.seen.append((self.label, activations.mean().item()))


class Times(hookline.UpdateHook):
    def __init__(self, factor=2.0):
        self.factor = factor

    def __call__(self, gradients):
        return {name: gradient * self.factor for name, gradient in gradients.items()}


class Plus(hookline.UpdateHook):
    def __init__(self, number=1.0):
        self.number = number

    def __call__(self, gradients):
        return {name: gradient + self.number for name, gradient in gradients.items()}


class Scheduled(hookline.Hook):
    """Has an option that is also a key of the registration."""

    def __init__(self, every=7):
        self.mine = every

    def on_step_end(self):
        pass


class Broken(hookline.Hook):
    def __init__(self):
        raise ZeroDivisionError("no")


LOOKS, TIMES, PLUS = (f"{__name__}.{one}" for one in ("Looks", "Times", "Plus"))
CONFIG = {
    "hooks": {
        "update": [{"name": TIMES, "factor": 3.0}, PLUS],
        "forward": [
            {"name": LOOKS, "enabled": False},
            {"name": LOOKS, "label": "b", "as": "second"},
        ],
        "loop": ["lr_monitor", {"name": "ema", "decay": 0.5}],
        "probes": [{"name": "capture", "modules": "first"}],
    }
}


@pytest.fixture(autouse=True)
def _nothing_seen():
    Looks.seen.clear()


# -- from a configuration -------------------------------------------------------------------------


def test_hooks_of_all_kinds_come_from_a_configuration_in_its_order():
    registry = HookRegistry(CONFIG)
    kinds = {kind: [n for n, _, _ in registry.of_kind(kind)] for kind in ("loop", "forward")}
    assert kinds == {"loop": ["lr_monitor", "ema"], "forward": ["looks", "second"]}
    assert [n for n, _, _ in registry.of_kind("update")] == ["times", "plus"]
    assert [n for n, _, _ in registry.of_kind("probe")] == ["capture"]
    assert registry.get_hook("ema").hookline_options["decay"] == 0.5
    assert registry.get_hook("times").factor == 3.0
    assert registry.get_hook("second").label == "b"


def test_the_inner_mapping_a_list_and_a_hooks_config_do_as_well():
    inner = HookRegistry(CONFIG["hooks"])
    assert inner.list_hooks() == HookRegistry(CONFIG).list_hooks()
    flat = HookRegistry({"hooks": [PLUS, {"name": LOOKS}, "lr_monitor"]})
    assert sorted(flat.list_hooks()) == ["looks", "lr_monitor", "plus"]
    fields = HooksConfig(
        enable_lr_monitor=True, hook_classes=[PLUS], hook_configs={PLUS: {"number": 4}}
    )
    registry = HookRegistry(fields)
    assert registry.list_hooks() == ["plus", "lr_monitor"]
    assert registry.get_hook("plus").number == 4


@pytest.mark.parametrize("config", [None, {}, {"hooks": None}, {"hooks": {}}, {"loop": None}])
def test_a_configuration_without_hooks_is_an_empty_registry(config):
    assert HookRegistry(config).list_hooks() == []


def test_it_takes_what_a_manager_takes():
    settings = hookline.HookSettings(max_failures=1)
    changes = []
    registry = HookRegistry(
        CONFIG,
        hooks=[hookline.Hook("mine")],
        source="a source",
        settings=settings,
        on_change=lambda: changes.append(1),
    )
    assert isinstance(registry, hookline.HookManager)
    assert registry.list_hooks()[0] == "mine"
    assert registry.settings is settings
    assert registry.source == "a source"
    assert len(changes) == 8


def test_the_settings_of_a_hooks_config_are_used_unless_others_are_given():
    config = HooksConfig(continue_on_hook_error=False)
    assert HookRegistry(config).settings.isolate is False
    assert HookRegistry(config, settings=hookline.HookSettings()).settings.isolate is True


def test_schedules_and_places_belong_to_the_registration():
    registry = HookRegistry(
        [
            {"name": "logging", "every": 5, "from_epoch": 2, "sample_rate": 0.5},
            {"name": "ema", "before": "logging", "strict": True},
        ]
    )
    assert registry.list_hooks() == ["ema", "logging"]
    ema, monitor = registry.describe()
    assert monitor.schedule == "every 5, sample 0.5, from epoch 2"
    assert ema.critical
    assert not monitor.critical


def test_what_the_class_itself_takes_is_its_own_option_unless_options_stand_apart():
    path = f"{__name__}.Scheduled"
    registry = HookRegistry(
        [
            {"name": path, "every": 3},
            {"name": path, "every": 3, "init_args": {"every": 9}},
            {"class_path": path, "init_args": {"every": 9}, "name": "named"},
            {"class_path": path, "as": "named_too"},
        ]
    )
    assert registry.get_hook("scheduled").mine == 3
    assert registry.get_hook("scheduled_2").mine == 9
    schedules = [one.schedule for one in registry.describe()]
    assert schedules == ["always", "every 3", "always", "always"]
    assert registry.list_hooks()[2:] == ["named", "named_too"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hook": {"loop": []}}, "Unknown section 'hook' of hooks. Did you mean 'hooks'?"),
        ({"hooks": {"foward": []}}, "Did you mean 'forward'? The sections are: loop, forward"),
        ({"hooks": {"loop": "ema"}}, "'hooks.loop' is 'ema'; expected a list of hooks."),
        ({"hooks": 3}, "'hooks' is 3; expected a list of hooks."),
        ({"loop": [3]}, "hooks.loop[0]: 3 is a int, not a hook."),
        (
            {"loop": [{"nam": "ema"}]},
            "'name' is missing; expected a hook's name or class path. Did you",
        ),
        ({"loop": [{"name": 3}]}, "'name' is 3; expected a non-empty string."),
        ({"loop": [{"name": "ema", "enabled": "no"}]}, "'enabled' is 'no'; expected true or false"),
        (
            {"loop": [{"name": "ema", "decai": 0.5}]},
            "EMA: Unknown option 'decai'. Did you mean 'decay'?",
        ),
        ({"loop": [{"name": "ema", "decay": 2.0}]}, "EMA: 'decay' is 2.0."),
        ({"loop": [{"name": "ema", "init_args": 3}]}, "'init_args' is 3; expected a mapping."),
        (
            {"loop": [{"name": "ema", "init_args": {"decay": 0.5}, "decay": 0.4}]},
            "'decay' is given inside and beside 'init_args'. Keep one.",
        ),
        (
            {"loop": [{"name": "a", "class_path": "x.Y", "as": "b"}]},
            "'name' and 'as' both name the hook",
        ),
        ({"loop": [{"name": "logging", "every": 0}]}, "every is 0; expected a whole number"),
        ({"loop": [{"name": "ema", "after": "emma"}]}, "There is no hook 'emma'."),
        ({"loop": ["ema", {"name": "lr_monitor", "as": "ema"}]}, "The name 'ema' is taken."),
        ({"forward": ["ema"]}, "hooks.forward[0]: 'ema' is of kind 'loop'. Move it to 'loop'."),
        ({"probes": [{"name": "edit", "modules": "x"}]}, "enable_intervention=True"),
        ({"loop": [f"{__name__}.Broken"]}, "could not be created with {} (ZeroDivisionError: no)."),
        ({"loop": [f"{__name__}.Loks"]}, "has no 'Loks'. Did you mean 'Looks'?"),
        ({"loop": ["torch.nn.Linear"]}, "'torch.nn.Linear' is not a hook"),
        ({"loop": ["nowhere.at.All"]}, "'nowhere.at.All': There is no module 'nowhere'."),
        ({"loop": [".x"]}, "'.x': It is not a class path"),
    ],
)
def test_what_does_not_fit_is_said_with_its_place(config, message):
    with pytest.raises(ConfigError) as error:
        HookRegistry(config)
    assert message in str(error.value)


def test_several_mistakes_are_said_at_once_and_nothing_is_registered():
    registry = HookRegistry({"loop": ["ema"]})
    registry.remove_hook("ema")
    before = dict(registry._removed)
    bad = {"loop": ["lr_monitr", "ema", {"name": "json_log", "everry": 1}], "forward": ["ema"]}
    with pytest.raises(ConfigError) as error:
        registry.add_configured(bad)
    lines = str(error.value).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "hooks.loop[0]",
        "hooks.loop[2]",
        "hooks.forward[0]",
    ]
    assert registry.list_hooks() == []
    assert registry._removed == before


# -- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gradient_moniter", "Unknown hook 'gradient_moniter'. Did you mean 'gradient_monitor'?"),
        ("GradientMonitor", "Did you mean 'gradient_monitor'?"),
        ("", "'name' is ''; expected a non-empty string."),
    ],
)
def test_an_unknown_name_is_an_error_with_the_nearest(name, message):
    with pytest.raises(ConfigError) as error:
        make_hook(name, {})
    assert message in str(error.value)


def test_a_module_with_an_error_of_its_own_is_named(tmp_path, monkeypatch):
    (tmp_path / "half_written.py").write_text("def f(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"'half_written' could not be imported \(SyntaxError"):
        load_class("half_written.Hook")


# -- toggles --------------------------------------------------------------------------------------


def test_hooks_are_toggled_by_name():
    registry = HookRegistry(CONFIG)
    gradients = {"w": torch.ones(2)}
    assert registry.call_update_hooks(gradients)["w"].tolist() == [4.0, 4.0]
    registry.disable_hook("times")
    assert registry.call_update_hooks(gradients)["w"].tolist() == [2.0, 2.0]
    registry.enable_hook("times")
    assert registry.call_update_hooks(gradients)["w"].tolist() == [4.0, 4.0]


# -- calls by hand --------------------------------------------------------------------------------


def test_forward_hooks_see_activations_in_order_and_only_if_enabled():
    registry = HookRegistry(CONFIG)
    registry.call_forward_hooks(torch.full((2,), 3.0))
    assert Looks.seen == [("b", 3.0)]
    registry.enable_hook("looks")
    Looks.seen.clear()
    registry.call_forward_hooks(torch.full((2,), 4.0))
    assert Looks.seen == [("looks", 4.0), ("b", 4.0)]
    assert {one.name: one.calls for one in registry.describe()}["second"] == 2


def test_a_forward_hook_gets_detached_activations_and_may_not_change_them():
    seen = []

    def look(activations):
        seen.append(activations.requires_grad)

    def spoil(activations):
        activations.add_(1)

    registry = HookRegistry()
    registry.add_hook(look, kind="forward")
    activations = torch.ones(2, requires_grad=True) * 2
    registry.call_forward_hooks(activations)
    assert seen == [False]
    registry.add_hook(spoil, kind="forward")
    with pytest.raises(hookline.ObserverError, match="changed the activations in place"):
        registry.call_forward_hooks(activations)


def test_forward_hooks_get_what_they_ask_for_besides():
    seen = []

    def look(activations, step, model):
        seen.append((step, model))

    class Source:
        model = "the source's"

    registry = HookRegistry(source=Source())
    registry.add_hook(look, kind="forward")
    registry.call_forward_hooks(torch.ones(2), step=5)
    assert seen == [(5, "the source's")]
    with pytest.raises(hookline.NotProvidedError, match="without 'step'"):
        registry.call_forward_hooks(torch.ones(2))
    with pytest.raises(hookline.UnknownEventError, match="no argument 'stepp'"):
        registry.call_forward_hooks(torch.ones(2), stepp=1)


def test_an_update_may_leave_out_gradients_or_put_them_into_the_mapping():
    def one(gradients):
        return {"a": gradients["a"] * 2}

    def other(gradients):
        gradients["b"] = gradients["b"] * 5

    def drops(gradients):
        del gradients["a"]

    registry = HookRegistry()
    for function in (one, drops, other):
        registry.add_hook(function, kind="update")
    result = registry.call_update_hooks({"a": torch.ones(1), "b": torch.ones(1)})
    assert (result["a"].item(), result["b"].item()) == (2.0, 5.0)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"c": torch.ones(1)}, "a gradient for 'c', but it was not given one"),
        ({"a": torch.ones(2)}, "has shape [2]; expected [1]"),
        ({"a": torch.ones(1).double()}, "has dtype torch.float64; expected torch.float32"),
        ({"a": 3.0}, "is a float; expected a tensor"),
        (3, "not a int"),
    ],
)
def test_what_an_update_may_not_return_ends_training_with_the_reason(returned, message):
    registry = HookRegistry()
    registry.add_hook(lambda gradients: returned, "odd", kind="update")
    with pytest.raises(hookline.HookFailedError) as error:
        registry.call_update_hooks({"a": torch.ones(1)})
    assert message in str(error.value.__cause__)


def test_a_trainer_takes_a_configuration_of_its_hooks():
    config = {
        "forward": [{"name": "activation_stats", "log_interval": 1}],
        "update": [{"name": "scale", "factor": 0.0}, {"name": "noise", "enabled": False}],
    }
    model, optimizer = make()
    before = [parameter.clone() for parameter in model.parameters()]
    trainer = Trainer(
        TrainerConfig(runs=None, progress="off"), model, optimizer, hooks={"hooks": config}
    )
    assert trainer.hooks.list_hooks() == ["activation_stats", "scale", "noise", "identity"]
    trainer.fit(batches(2))
    pairs = zip(model.parameters(), before, strict=True)
    assert all(torch.equal(now, then) for now, then in pairs)
    with pytest.raises(ConfigError, match="scael"):
        Trainer(None, model, optimizer, hooks={"update": ["scael"]})


# -- in a loop ------------------------------------------------------------------------------------


def quiet() -> TrainerConfig:
    return TrainerConfig(runs=None, progress="off")


def test_a_trainers_mapping_has_hooks_as_a_file_has_them():
    model, optimizer = make()
    fields = {"runs": None, "progress": "off"}
    sections = {"forward": ["activation_stats"], "update": [{"name": "scale", "factor": 0.5}]}
    trainer = Trainer({**fields, "hooks": sections}, model, optimizer)
    assert trainer.hooks.list_hooks() == ["activation_stats", "scale", "identity"]
    mixed = {"loop": [{"name": "time_limit", "limit": "1h"}], "enable_lr_monitor": True}
    trainer = Trainer({**fields, "hooks": mixed}, model, optimizer)
    assert trainer.hooks.list_hooks() == ["lr_monitor", "time_limit", "identity"]
    trainer = Trainer({**fields, "hooks": ["lr_monitor", "centralize"]}, model, optimizer)
    assert trainer.hooks.list_hooks() == ["centralize", "lr_monitor", "identity"]


def test_an_unknown_section_in_a_trainers_mapping_is_an_error_with_the_nearest():
    model, optimizer = make()
    with pytest.raises(ConfigError, match=r"Unknown section 'foward' of hooks\. Did you mean 'for"):
        Trainer({"hooks": {"foward": ["activation_stats"]}}, model, optimizer)
    with pytest.raises(ConfigError, match="Did you mean 'enable_lr_monitor'"):
        Trainer({"hooks": {"enable_lr_moniter": True}}, model, optimizer)
    with pytest.raises(ConfigError, match="expected a list of hooks"):
        Trainer({"hooks": "lr_monitor"}, model, optimizer)


def test_identity_is_called_where_it_was_registered_and_once():
    model, optimizer = make()
    updates = {"update": ["identity", {"name": "scale", "factor": 0.5}]}
    trainer = Trainer(quiet(), model, optimizer, hooks=updates)
    assert trainer.hooks.list_hooks() == ["identity", "scale"]
    trainer = Trainer(quiet(), model, optimizer)
    trainer.add_hook(hookline.Scale(0.5))
    assert trainer.hooks.list_hooks() == ["scale", "identity"]
    trainer.add_hook(hookline.Identity(), "same")
    trainer.add_hook(hookline.Centralize())
    assert trainer.hooks.list_hooks() == ["scale", "same", "centralize"]
    trainer.add_hook(hookline.Identity())
    assert trainer.hooks.list_hooks() == ["scale", "same", "centralize", "identity"]
