"""HookRunner: a loop that fires five events by hand."""

from types import SimpleNamespace

import pytest
import torch

from hookline import (
    Hook,
    HookRunner,
    SignatureError,
    StepContext,
    TrainingHook,
)
from hookline.hook import HookGroup


class Five(TrainingHook):
    """Listens to all five events, with the signatures of document 003."""

    def __init__(self):
        self.seen = []

    def on_train_begin(self, config):
        self.seen.append(("begin", config))

    def on_step_end(self, ctx: StepContext):
        self.seen.append(("step", ctx))

    def on_eval_end(self, metrics: dict[str, float], step: int):
        self.seen.append(("eval", metrics, step))

    def on_checkpoint_save(self, step: int, path: str):
        self.seen.append(("save", step, path))

    def on_train_end(self, step: int, tokens_seen: int):
        self.seen.append(("end", step, tokens_seen))


class Writer(Hook):
    hookline_group = HookGroup.WRITER

    def on_step_end(self):
        pass


def context(**changes):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"step": 3, "loss": 0.5, "grad_norm": 2.0, "lr": 0.1, "tokens_seen": 96}
    return StepContext(**{**given, "model": model, "optimizer": optimizer, **changes})


def named(*names):
    return [Hook(name) for name in names]


# -- five entry points -----------------------------------------------------------------------------


def test_a_loop_calls_the_five_entry_points_by_position():
    runner = HookRunner([hook := Five()])
    ctx = context()
    runner.on_train_begin("config")
    runner.on_step_end(ctx)
    runner.on_eval_end({"eval/loss": 1.0}, 3)
    runner.on_checkpoint_save(3, "checkpoints")
    runner.on_train_end(3, 96)
    assert hook.seen == [
        ("begin", "config"),
        ("step", ctx),
        ("eval", {"eval/loss": 1.0}, 3),
        ("save", 3, "checkpoints"),
        ("end", 3, 96),
    ]
    assert hook.seen[1][1] is ctx


def test_the_fields_of_the_context_can_be_asked_for_by_name():
    hook = Hook()
    seen = []
    hook.on_step_end = lambda model, optimizer, step, loss, grad_norm, lr, tokens_seen: seen.append(
        (model, optimizer, step, loss, grad_norm, lr, tokens_seen)
    )
    HookRunner([hook]).on_step_end(ctx := context())
    assert seen == [(ctx.model, ctx.optimizer, 3, 0.5, 2.0, 0.1, 96)]


def test_the_configuration_can_be_asked_for_in_every_later_event():
    hook = Hook()
    seen = []
    hook.on_step_end = lambda config, step: seen.append((config, step))
    runner = HookRunner([hook])
    runner.on_train_begin("config")
    runner.on_step_end(context())
    assert seen == [("config", 3)]


# -- empty -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("hooks", [None, [], ()])
def test_an_empty_runner_fires_nothing(hooks):
    runner = HookRunner(hooks)
    untouched = object()  # has none of the fields that a context has
    runner.on_train_begin(untouched)
    runner.on_step_end(untouched)
    runner.on_eval_end(untouched, untouched)
    runner.on_checkpoint_save(untouched, untouched)
    runner.on_train_end(untouched, untouched)
    assert not runner.hooks


# -- the list of hooks -----------------------------------------------------------------------------


def test_hooks_are_those_that_were_given_and_added():
    a, b, c = named("a", "b", "c")
    runner = HookRunner([a, b])
    assert runner.hooks == (a, b)
    runner.add_hook(c)
    assert runner.hooks == (a, b, c)
    assert runner.list_hooks() == ["a", "b", "c"]


def test_registering_a_hook_that_asks_for_what_a_runner_does_not_provide_raises_an_error():
    hook = Hook()
    hook.on_train_end = lambda trainer: None
    with pytest.raises(SignatureError, match=r"'trainer', which a HookRunner does not provide"):
        HookRunner([hook])


def test_a_runner_with_a_source_provides_its_attributes():
    hook = Hook()
    seen = []
    hook.on_train_end = lambda trainer, step: seen.append((trainer, step))
    HookRunner([hook], source=SimpleNamespace(trainer="mine")).on_train_end(3, 96)
    assert seen == [("mine", 3)]


def test_hooks_are_called_in_the_order_of_the_list():
    called = []
    hooks = [Writer("w"), *named("a", "b")]
    for hook in hooks:
        hook.on_step_end = lambda hook=hook: called.append(hook)
    runner = HookRunner(hooks)
    runner.on_step_end(context())
    assert called == hooks
