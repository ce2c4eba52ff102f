"""Schedules: in which steps a registered hook is called."""

from types import SimpleNamespace

import pytest
import torch
from every_loop import LOOPS

import hookline
from hookline import Hook, HookManager, NotProvidedError, Schedule, every


class Watch(Hook):
    def __init__(self):
        self.steps = []
        self.batches = []
        self.others = []

    def on_train_batch_start(self, batch_idx):
        self.batches.append(("start", batch_idx))

    def on_train_batch_end(self, batch_idx):
        self.batches.append(("end", batch_idx))

    def on_step_end(self, step):
        self.steps.append(step)

    def on_epoch_end(self, epoch):
        self.others.append(epoch)


def steps_seen(count=1000, name="watch", **schedule):
    manager = HookManager()
    manager.add_hook(hook := Watch(), name, **schedule)
    for step in range(1, count + 1):
        manager.fire("on_step_end", step=step, epoch=step // 100)
    return hook.steps


def test_every_calls_a_hook_in_each_nth_step():
    assert steps_seen(every=250) == [250, 500, 750, 1000]
    assert steps_seen(3) == [1, 2, 3]


def test_a_hook_is_called_from_an_epoch_on():
    assert steps_seen(from_epoch=9) == list(range(900, 1001))


def test_sampling_chooses_about_its_share_of_the_steps():
    seen = steps_seen(10_000, sample_rate=0.1)
    assert 800 < len(seen) < 1200
    assert len({step % 10 for step in seen}) == 10  # not periodic


def test_a_scheduled_hook_gets_all_events_that_are_not_per_step():
    manager = HookManager()
    manager.add_hook(hook := Watch(), every=1000, sample_rate=0.01, from_epoch=50)
    for epoch in range(3):
        manager.fire("on_epoch_end", epoch=epoch)
    assert hook.others == [0, 1, 2]


def test_a_hook_gets_all_events_of_a_step_or_none():
    """With two batches per step; during a step, `step` still counts the completed ones."""
    loop = SimpleNamespace(step=0, step_in_progress=1, batch_idx=0, epoch=0)
    manager = HookManager(source=loop)
    manager.add_hook(third := Watch(), "every", every=3)
    manager.add_hook(sampled := Watch(), "sampled", sample_rate=0.5)
    for batch in range(60):
        loop.batch_idx = batch
        manager.fire("on_train_batch_start")
        manager.fire("on_train_batch_end")
        if batch % 2:
            loop.step += 1
            manager.fire("on_step_end")
            loop.step_in_progress += 1
    assert third.steps == list(range(3, 31, 3))
    assert 0 < len(sampled.steps) < 30
    for hook in (third, sampled):
        both = [b for step in hook.steps for b in (2 * step - 2, 2 * step - 1)]
        assert hook.batches == [(end, b) for b in both for end in ("start", "end")]


def test_a_loop_that_does_not_provide_the_step_gets_an_error_that_names_the_schedule():
    manager = HookManager()
    hook = Hook()
    hook.on_step_end = lambda: None
    manager.add_hook(hook, every=2)
    with pytest.raises(NotProvidedError, match=r"'step', which a schedule asks for"):
        manager.fire("on_step_end")


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "10", float("nan")])
def test_every_must_be_a_whole_number_from_one(value):
    with pytest.raises(ValueError, match="every is"):
        HookManager().add_hook(Watch(), every=value)


@pytest.mark.parametrize("value", [0, -0.1, 1.01, True, "0.1", None, float("nan")])
def test_a_sample_rate_must_be_a_share(value):
    with pytest.raises(ValueError, match="sample_rate is"):
        HookManager().add_hook(Watch(), sample_rate=value)


@pytest.mark.parametrize("value", [-1, 0.5, False, "3", None])
def test_from_epoch_must_be_a_whole_number_from_zero(value):
    with pytest.raises(ValueError, match="from_epoch is"):
        HookManager().add_hook(Watch(), from_epoch=value)


def test_a_schedule_describes_itself():
    assert str(Schedule()) == "always"
    assert str(Schedule(100, 0.1, 10)) == "every 100, sample 0.1, from epoch 10"


# -- in a list of hooks ----------------------------------------------------------------------------


class Steps(Hook):
    def __init__(self):
        self.seen = []

    def on_step_end(self, step):
        self.seen.append(step)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_list_of_hooks_has_schedules_in_every_loop(loop, tmp_path):
    items = [
        every(2, often := Steps(), name="often"),
        every(4, {"name": "lr_monitor"}),
        {"name": "gradient_monitor", "every": 3, "as": "norms"},
        "early_stopping",
        all_steps := Steps(),
    ]
    _, driver = LOOPS[loop](items, tmp_path)
    assert (often.seen, all_steps.seen) == ([2, 4, 6], [1, 2, 3, 4, 5, 6])
    found = {hook.name: hook.schedule for hook in driver.hooks.describe()}
    wanted = {"often": "every 2", "lr_monitor": "every 4", "norms": "every 3", "steps": "always"}
    assert {**wanted, "early_stopping": "always"}.items() <= found.items()


def test_an_unknown_name_or_option_in_a_list_is_an_error():
    with pytest.raises(hookline.ConfigError, match="Did you mean 'lr_monitor'"):
        hookline.HookRegistry(hooks=["lr_monitr"])
    with pytest.raises(hookline.ConfigError, match="Unknown option 'evry'"):
        hookline.HookRegistry(hooks=[{"name": "lr_monitor", "evry": 2}])
    with pytest.raises(TypeError, match="evry"):
        HookManager([every(2, Steps(), evry=3)])
    with pytest.raises(hookline.NotAHookError, match="is a int, not a hook"):
        hookline.HookRegistry(hooks=[every(2, 3)])


# -- built-ins with an option `every` of their own -------------------------------------------------


def logged_steps(tmp_path, *hooks, steps=12, of="gradients"):
    """Return the steps in which the hooks of a bare loop logged values with this prefix."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hookline.attach(model, optimizer, hooks=list(hooks), runs=tmp_path) as session:
        for _ in range(steps):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        path = session.run.path
    rows = hookline.open_run(path).metrics()
    return sorted({row["step"] for row in rows if row["name"].startswith(f"{of}/")})


@pytest.mark.parametrize(
    "item",
    [
        lambda: every(4, hookline.GradientMonitor()),
        lambda: every(4, "gradient_monitor"),
        lambda: every(4, {"name": "gradient_monitor", "init_args": {"param_filter": ["weight"]}}),
        lambda: {"name": "gradient_monitor", "every": 4},
        lambda: hookline.GradientMonitor(every=4),
        lambda: every(4, hookline.GradientMonitor(log_frequency=4)),
    ],
)
def test_the_schedule_of_a_registration_replaces_the_default_of_a_built_in(item, tmp_path):
    assert logged_steps(tmp_path, item()) == [4, 8, 12]


def test_a_hook_that_counts_calls_itself_follows_its_registration(capsys):
    manager = HookManager()
    manager.add_hook(average := hookline.EMA(decay=0.5), every=3)
    manager.add_hook(console := hookline.ConsoleLogHook(), every=3)
    manager.add_hook(each := hookline.GradientMonitor(), every=1)
    assert (average.every, console.every, each.every) == (3, 3, 1)
    assert [info.schedule for info in manager.describe()] == ["every 3", "always", "every 3"]
    for step in range(1, 8):
        manager.fire("on_step_end", step=step, loss=1.0, trainer=None)
    printed = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert printed == ["1", "4", "7"]  # it starts with the first


@pytest.mark.parametrize(
    "register",
    [
        lambda: HookManager([every(10, hookline.GradientMonitor(every=20))]),
        lambda: HookManager([every(10, hookline.GradientMonitor(log_frequency=20))]),
        lambda: HookManager().add_hook(hookline.GradientMonitor(20), every=10),
        lambda: hookline.HookRegistry(
            hooks=[{"name": "gradient_monitor", "log_frequency": 20, "every": 10}]
        ),
    ],
)
def test_two_schedules_that_differ_are_an_error_that_names_both(register):
    with pytest.raises(hookline.HooklineError, match=r"every=20.*every=10.*[Gg]ive one"):
        register()
