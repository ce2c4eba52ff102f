"""HookRunner: a loop that fires five events by hand."""

from types import SimpleNamespace

import pytest
import torch

from hookline import (
    Hook,
    HookRunner,
    LazyFloat,
    NameTakenError,
    NotAHookError,
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


def test_the_five_entry_points_take_their_arguments_by_name_too():
    runner = HookRunner([hook := Five()])
    runner.on_train_begin(config="config")
    runner.on_step_end(ctx=context())
    runner.on_eval_end(metrics={}, step=3)
    runner.on_checkpoint_save(step=3, path="checkpoints")
    runner.on_train_end(step=3, tokens_seen=96)
    assert [call[0] for call in hook.seen] == ["begin", "step", "eval", "save", "end"]


def test_the_fields_of_the_context_can_be_asked_for_by_name():
    hook = Hook()
    seen = []
    hook.on_step_end = lambda model, optimizer, step, loss, grad_norm, lr, tokens_seen: seen.append(
        (model, optimizer, step, loss, grad_norm, lr, tokens_seen)
    )
    HookRunner([hook]).on_step_end(ctx := context())
    assert seen == [(ctx.model, ctx.optimizer, 3, 0.5, 2.0, 0.1, 96)]


def test_a_loss_that_a_hook_asks_for_as_a_lazy_number_is_read_on_first_use():
    reads = []
    loss = LazyFloat(lambda: reads.append("read") or 0.5)
    seen = []

    class Watch(Hook):
        def on_step_end(self, loss: LazyFloat):
            seen.append(loss)

    HookRunner([Watch()]).on_step_end(context(loss=loss))
    assert reads == []
    assert seen[0] == 0.5
    assert reads == ["read"]


def test_the_configuration_can_be_asked_for_in_every_later_event():
    hook = Hook()
    seen = []
    hook.on_step_end = lambda config, step: seen.append((config, step))
    runner = HookRunner([hook])
    runner.on_train_begin("config")
    runner.on_step_end(context())
    assert seen == [("config", 3)]


def test_a_second_training_run_has_its_own_configuration():
    hook = Hook()
    seen = []
    hook.on_step_end = lambda config: seen.append(config)
    runner = HookRunner([hook])
    for config in ("first", "second"):
        runner.on_train_begin(config)
        runner.on_step_end(context())
        runner.on_train_end(3, 96)
    assert seen == ["first", "second"]


def test_a_schedule_counts_the_steps_of_the_context():
    runner = HookRunner()
    runner.add_hook(hook := Five(), every=2)
    for step in range(1, 6):
        runner.on_step_end(context(step=step))
    assert [ctx.step for _, ctx in hook.seen] == [2, 4]


def test_a_failing_hook_does_not_stop_the_loop():
    hook = Hook("failing")
    hook.on_step_end = lambda: 1 / 0
    runner = HookRunner([hook, five := Five()])
    runner.on_step_end(context())
    assert len(five.seen) == 1
    assert runner.summary().failures == {"failing": 1}


def test_the_share_of_a_run_is_measured_from_begin_to_end():
    runner = HookRunner([Five()])
    runner.on_train_begin(None)
    runner.on_step_end(context())
    runner.on_train_end(3, 96)
    first = runner.summary()
    assert first.seconds > 0
    assert runner.summary().seconds == first.seconds


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
    assert runner.hooks == []
    assert not runner.hooks


def test_an_event_that_no_hook_listens_to_is_not_fired():
    runner = HookRunner([Writer()])
    runner.on_eval_end(None, None)
    assert runner.dispatchers.on_validation_end is None
    assert runner.dispatchers.on_step_end is not None


# -- hooks as a list -------------------------------------------------------------------------------


def test_hooks_is_the_list_that_was_given():
    hooks = named("a", "b")
    runner = HookRunner(hooks)
    assert runner.hooks == hooks
    assert list(runner.hooks) == hooks
    assert len(runner.hooks) == 2
    assert runner.hooks[0] is hooks[0]
    assert runner.hooks[-1] is hooks[1]
    assert runner.hooks[:1] == hooks[:1]
    assert hooks[1] in runner.hooks
    assert runner.hooks != hooks[:1]
    assert runner.hooks == HookRunner(hooks).hooks
    assert repr(runner.hooks) == repr(hooks)


def test_an_appended_hook_is_called():
    runner = HookRunner()
    runner.hooks.append(hook := Five())
    runner.on_step_end(context())
    assert len(hook.seen) == 1


def test_a_deleted_hook_is_not_called_any_more():
    runner = HookRunner([hook := Five()])
    del runner.hooks[0]
    runner.on_step_end(context())
    assert hook.seen == []
    assert runner.hooks == []


def test_hooks_can_be_inserted_extended_popped_removed_and_cleared():
    a, b, c, d, e = named(*"abcde")
    runner = HookRunner([a, b])
    runner.hooks.insert(0, c)
    runner.hooks.insert(-1, d)
    assert runner.hooks == [c, a, d, b]
    runner.hooks.extend([e])
    assert runner.hooks.pop() is e
    runner.hooks.remove(a)
    assert runner.hooks == [c, d, b]
    assert runner.hooks.index(b) == 2
    runner.hooks.clear()
    assert runner.hooks == []


def test_the_list_keeps_its_order_when_the_neighbour_of_an_inserted_hook_is_removed():
    a, b, new = named("a", "b", "new")
    runner = HookRunner([a, b])
    runner.hooks.insert(0, new)
    runner.hooks.remove(a)
    assert runner.hooks == [new, b]


def test_an_item_of_the_list_can_be_replaced():
    a, b, c, new = named("a", "b", "c", "new")
    runner = HookRunner([a, b, c])
    runner.hooks[1] = new
    assert runner.hooks == [a, new, c]


def test_a_slice_can_be_assigned_and_deleted():
    a, b, c, d, e = named(*"abcde")
    runner = HookRunner([a, b, c])
    runner.hooks[1:2] = [d, e]
    assert runner.hooks == [a, d, e, c]
    runner.hooks[:] = [c, a]
    assert runner.hooks == [c, a]
    del runner.hooks[:1]
    assert runner.hooks == [a]


def test_the_whole_list_can_be_assigned():
    a, b = named("a", "b")
    runner = HookRunner([a])
    runner.hooks = [b, a]
    assert runner.hooks == [b, a]


def test_a_list_can_be_reversed():
    a, b, c = named("a", "b", "c")
    runner = HookRunner([a, b, c])
    runner.hooks.reverse()
    assert runner.hooks == [c, b, a]


def test_adding_to_the_list_does_not_change_the_others():
    runner = HookRunner()
    runner.add_hook(Five(), "mine", every=10)
    runner.disable_hook("mine")
    runner.hooks += [Hook("new")]
    mine, new = runner.describe()
    assert (mine.name, mine.schedule, mine.enabled) == ("mine", "every 10", False)
    assert new.name == "new"


@pytest.mark.parametrize("index", [0, slice(None), slice(0, 1)])
def test_an_assignment_that_raises_changes_nothing(index):
    a, b = named("a", "b")
    runner = HookRunner([a, b])
    with pytest.raises(NotAHookError):
        runner.hooks[index] = 3 if index == 0 else [Hook("new"), 3]
    assert runner.hooks == [a, b]


def test_the_same_hook_twice_in_an_assigned_list_raises_an_error():
    new, old = Five(), Five()
    runner = HookRunner([old])
    with pytest.raises(NameTakenError):
        runner.hooks[:] = [new, new]
    assert runner.hooks == [old]


def test_a_hook_can_replace_one_of_the_same_name():
    old, new = Hook("a"), Hook("a")
    runner = HookRunner([old])
    runner.hooks = [new]
    assert runner.hooks == [new]
    assert runner.list_hooks() == ["a"]


def test_hooks_can_be_added_to_a_reordered_list():
    a, b, c = named("a", "b", "c")
    runner = HookRunner([a])
    runner.add_hook(b, after="a")
    runner.hooks.reverse()
    runner.add_hook(c)
    assert runner.hooks == [b, a, c]


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


def test_only_hooks_can_be_put_into_the_list():
    runner = HookRunner()
    with pytest.raises(TypeError, match=r"hookline\.Hook"):
        runner.hooks.append(print)
    with pytest.raises(IndexError):
        runner.hooks[3]


def test_the_order_is_that_of_the_list_also_with_built_ins():
    writer, five, other = Writer(), Five(), Writer()
    runner = HookRunner([writer, five])
    assert runner.hooks == [writer, five]
    runner.hooks.insert(1, other)
    assert runner.hooks == [writer, other, five]


def test_hooks_are_called_in_the_order_of_the_list():
    called = []
    hooks = [Writer("w"), *named("a", "b")]
    for hook in hooks:
        hook.on_step_end = lambda hook=hook: called.append(hook)
    runner = HookRunner(hooks)
    runner.on_step_end(context())
    runner.hooks[:] = hooks[::-1]
    runner.on_step_end(context())
    assert called == [*hooks, *hooks[::-1]]
