"""HooksConfig: built-ins by field, further hooks by class path or name, and how failures count."""

import logging

import pytest
from loops import batches, make

import hookline
from hookline import GenericTrainer, HooksConfig, TrainerConfig, get_trainer
from hookline.config.hook_names import BUILT_INS, load_hook_class
from hookline.options import get_options


def trainer_with(tmp_path, **fields):
    config = TrainerConfig(runs=tmp_path, progress="off", hooks=HooksConfig(**fields))
    return GenericTrainer(config, *make())


@pytest.mark.parametrize(
    ("field", "options_field", "options", "name"),
    [
        ("enable_logging_hook", None, {}, "logging"),
        (
            "enable_gradient_monitor",
            "gradient_monitor_config",
            {
                "log_frequency": 100,
                "log_histogram": True,
                "log_norm": True,
                "param_filter": ["first", "second"],
                "percentiles": [10, 50, 90],
            },
            "gradient_monitor",
        ),
        (
            "enable_model_checkpoint_hook",
            "model_checkpoint_config",
            {
                "save_top_k": 3,
                "monitor": "val/loss",
                "mode": "min",
                "save_last": True,
                "save_on_train_epoch_end": False,
                "filename": "epoch_{epoch}_loss_{val/loss:.2f}",
                "auto_insert_metric_name": False,
            },
            "model_checkpoint",
        ),
        (
            "enable_early_stopping_hook",
            "early_stopping_config",
            {
                "monitor": "val/loss",
                "patience": 10,
                "mode": "min",
                "min_delta": 0.0001,
                "check_on_train_epoch_end": False,
                "strict": True,
                "verbose": True,
            },
            "early_stopping",
        ),
        (
            "enable_lr_monitor",
            "lr_monitor_config",
            {"log_momentum": True, "log_weight_decay": True, "frequency": "epoch"},
            "lr_monitor",
        ),
    ],
)
def test_a_field_adds_its_hook_with_its_options(tmp_path, field, options_field, options, name):
    fields = {options_field: options} if options_field else {}
    assert trainer_with(tmp_path, **fields).hooks.list_hooks() == ["identity"]
    trainer = trainer_with(tmp_path, **{field: True}, **fields)
    assert trainer.hooks.list_hooks() == [name, "identity"]
    assert trainer.hooks.describe()[0].options.items() >= options.items()
    trainer.fit(batches(2), val_loaders=batches(1))
    assert trainer.status == "completed"
    assert trainer.hooks.summary().failures == {}


def test_users_hooks_come_first_and_built_ins_in_their_order(tmp_path):
    trainer = trainer_with(
        tmp_path,
        enable_logging_hook=True,
        enable_gradient_monitor=True,
        enable_model_checkpoint_hook=True,
        enable_early_stopping_hook=True,
        enable_lr_monitor=True,
        hook_classes=["ema", "user_hooks.Lifecycle"],
        hook_configs={"ema": {"decay": 0.9}},
    )
    trainer.hook_manager.register_hook(hookline.Hook("mine"))
    assert trainer.hooks.list_hooks() == [
        "lifecycle",
        "mine",
        "ema",
        "gradient_monitor",
        "lr_monitor",
        "early_stopping",
        "model_checkpoint",
        "logging",
        "identity",
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"enable_early_stopping_hook": True, "early_stopping_config": {"patiance": 3}},
            "EarlyStopping: Unknown option 'patiance'. Did you mean 'patience'?",
        ),
        (
            {"hook_classes": ["user_hooks.Lifecycle"], "hook_configs": {"user_hooks.Life": {}}},
            "options for 'user_hooks.Life', which is not in hook_classes. Did you mean",
        ),
        (
            {
                "hook_classes": ["user_hooks.Lifecycle"],
                "hook_configs": {"user_hooks.Lifecycle": {"treshold": 1.0}},
            },
            "Lifecycle: Unknown option 'treshold'. Did you mean 'threshold'?",
        ),
        ({"hook_classes": ["notification"]}, "NotificationHook has no URL to post to"),
        ({"enable_lr_monitr": True}, "Did you mean 'enable_lr_monitor'?"),
    ],
)
def test_what_does_not_fit_is_said_before_training(tmp_path, fields, message):
    with pytest.raises(hookline.ConfigError) as error:
        trainer_with(tmp_path, **fields)
    assert message in str(error.value)


class Fails(hookline.Hook):
    def on_step_end(self):
        raise ZeroDivisionError("a bug")


def test_continue_on_hook_error_decides_whether_a_failing_hook_ends_training(tmp_path):
    trainer = trainer_with(tmp_path)
    trainer.add_hook(Fails())
    assert trainer.fit(batches(2)).status == "completed"
    trainer = trainer_with(tmp_path, continue_on_hook_error=False)
    trainer.add_hook(Fails())
    with pytest.raises(ZeroDivisionError):
        trainer.fit(batches(2))


@pytest.mark.parametrize("said", [True, False])
def test_log_hook_errors_decides_whether_failures_are_logged_and_all_are_counted(
    tmp_path, caplog, said
):
    trainer = trainer_with(tmp_path, log_hook_errors=said)
    trainer.add_hook(Fails())
    with caplog.at_level(logging.ERROR, "hookline"):
        trainer.fit(batches(2))
    assert ("a bug" in caplog.text) == said
    assert trainer.hooks.summary().failures == {"fails": 2}


def test_the_three_hooks_of_small_trainers_are_added_by_a_call_each(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, optimizer = make()
    trainer = get_trainer("simple", model, batches(4), optimizer, "cpu", progress="off")
    trainer.add_console_logging(log_every_n_batches=2)
    trainer.add_json_logging(log_every_n_batches=100)
    trainer.add_checkpointing(save_every_n_epochs=1)
    assert trainer.hooks.list_hooks() == ["checkpoint", "console_log", "json_log", "identity"]
    trainer.disable_hook("json_log")
    trainer.enable_hook("json_log")
    trainer.train()
    assert "loss" in capsys.readouterr().out
    assert (trainer.run.path / "checkpoints" / "last").is_file()
    assert trainer.hooks.summary().failures == {}
    trainer.remove_hook("console_log")
    assert trainer.hooks.list_hooks() == ["checkpoint", "json_log", "identity"]


@pytest.mark.parametrize("name", BUILT_INS)
def test_every_built_in_explains_its_purpose_its_options_and_its_cost(name):
    kind = load_hook_class(name)
    assert kind.__doc__
    assert kind.hookline_cost
    assert [one.name for one in get_options(kind).values() if not one.text] == []
    assert hookline.HookManager  # and it is public
    assert getattr(hookline, kind.__name__) is kind


def test_the_settings_of_hooks_are_validated_like_all_fields() -> None:
    settings = hookline.HookSettings(max_failures=7)
    assert HooksConfig(settings=settings).manager_settings() == settings
    assert HooksConfig(settings={"max_failures": 7}).manager_settings() == settings
    config = HooksConfig(settings={"isolate": False}, log_hook_errors=False)
    assert config.manager_settings() == hookline.HookSettings(isolate=False, log_errors=False)
    wrong = {"hooks": {"settings": {"max_failure": 1, "max_failures": 0, "budget": -1.0}}}
    with pytest.raises(hookline.ConfigError) as error:
        TrainerConfig(**wrong)
    said = str(error.value)
    assert "Unknown field 'hooks.settings.max_failure'. Did you mean 'max_failures'?" in said
    assert "'hooks.settings.max_failures' is 0. Input should be greater than 0." in said
    assert "'hooks.settings.budget' is -1.0." in said
