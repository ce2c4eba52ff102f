"""All built-in hooks: options that are checked, and remembered."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, PositiveInt

import hookline
from hookline import ConfigError
from hookline.config.hook_names import BUILT_INS, load_class, load_hook_class
from hookline.hook import HookGroup
from hookline.options import BuiltIn, get_options


class TunedHook(BuiltIn):
    """Does nothing.

    Args:
        monitor: what to look at,
            in two lines.
        mode: which is better.
        patience: how often.
        share: a part.
    """

    hookline_group = HookGroup.MONITOR
    cost = "Next to nothing."

    def __init__(
        self,
        monitor: str = "val/loss",
        *,
        mode: Literal["min", "max"] = "min",
        patience: PositiveInt = 3,
        share: Annotated[float, Field(gt=0, lt=1)] | None = None,
        anything: Any = None,
    ) -> None:
        self.made_with = monitor, mode, patience, share, anything

    def on_step_end(self) -> None: ...


ALL = {"monitor": "val/loss", "mode": "min", "patience": 3, "share": None, "anything": None}


def test_options_are_given_as_they_are_and_remembered() -> None:
    hook = TunedHook("train/loss", patience=7)
    assert hook.made_with == ("train/loss", "min", 7, None, None)
    assert hook.hookline_options == ALL | {"monitor": "train/loss", "patience": 7}


def test_an_unknown_option_names_the_nearest_and_all_there_are() -> None:
    with pytest.raises(hookline.ConfigError) as error:
        TunedHook(patiance=3)  # type: ignore[call-arg]
    assert "TunedHook: Unknown option 'patiance'. Did you mean 'patience'?" in str(error.value)
    assert "monitor, mode, patience, share, anything" in str(error.value)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"mode": "least"}, "'mode' is 'least'. Input should be 'min' or 'max'"),
        ({"patience": 0}, "'patience' is 0. Input should be greater than 0"),
        ({"share": 1.5}, "'share' is 1.5. Input should be less than 1"),
        ({"patience": "3"}, "'patience' is '3'. Write the number without quotes"),
        ({"monitor": 3}, "'monitor' is 3. Input should be a valid string"),
    ],
)
def test_a_value_that_is_not_valid_is_named_with_what_is(
    options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(hookline.ConfigError) as error:
        TunedHook(**options)
    assert expected in str(error.value)


def test_all_problems_are_said_at_once() -> None:
    with pytest.raises(hookline.ConfigError) as error:
        TunedHook(mode="least", patience=-1)  # type: ignore[arg-type]
    assert "'mode'" in str(error.value)
    assert "'patience'" in str(error.value)


def test_options_are_described_from_the_code() -> None:
    options = get_options(TunedHook)
    assert list(options) == ["monitor", "mode", "patience", "share", "anything"]
    assert options["monitor"].text == "what to look at, in two lines."
    assert options["mode"].default == "min"
    assert not options["mode"].required


def test_the_automatic_name_of_a_built_in_lacks_the_word_hook() -> None:
    manager = hookline.HookManager()
    assert [manager.add_hook(TunedHook()), manager.add_hook(TunedHook())] == ["tuned", "tuned_2"]


def test_numbers_from_the_device_are_taken_lazily() -> None:
    for path in BUILT_INS.values():
        kind = load_class(path)
        for name, method in vars(kind).items():
            if name.startswith("on_") and name != "on_before_backward":  # it has the loss's tensor
                annotations = method.__annotations__
                for number in {"loss", "grad_norm", "lr"} & annotations.keys():
                    assert "LazyFloat" in annotations[number], f"{path}.{name}: {number}"


OTHER_NAMES = {
    "gradient_monitor": "log_frequency",
    "debug": "every_n_steps",
    "ema": "every_n_steps",
    "model_checkpoint": "every_n_steps",
    "lr_monitor": "frequency",
    "console_log": "log_every_n_batches",
    "json_log": "log_every_n_batches",
    "checkpoint": "save_every_n_epochs",
    "activation_stats": "log_interval",
    "attention_monitor": "log_frequency",
}


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_every_is_an_option_under_two_names_and_a_manifest_has_one(name):
    hook_class = load_hook_class(name)
    other = OTHER_NAMES[name]
    first, second = hook_class(every=7), hook_class(**{other: 7})
    assert first.hookline_options == second.hookline_options
    assert first.hookline_options[other] == 7
    with pytest.raises(ConfigError, match=f"'every' and '{other}' are the same option"):
        hook_class(**{other: 7}, every=7)
