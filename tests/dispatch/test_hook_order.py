"""The order in which hooks are called."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hookline import Hook, HookManager, OrderError
from hookline.hook import HookGroup


class User(Hook):
    calls = None

    def on_step_end(self):
        if self.calls is not None:
            self.calls.append(self)


def in_group(group):
    return type(f"{group.name.title()}Hook", (User,), {"hookline_group": group})


def called(manager):
    """Return the names in the order in which the hooks are called."""
    User.calls = []
    try:
        manager.fire("on_step_end")
        names = {id(manager.get_hook(name)): name for name in manager.list_hooks()}
        return [names[id(hook)] for hook in User.calls]
    finally:
        User.calls = None


def test_built_ins_come_after_the_users_hooks_and_writers_come_last():
    manager = HookManager()
    for group in (HookGroup.WRITER, HookGroup.CHECKPOINT, HookGroup.CONTROL, HookGroup.MONITOR):
        manager.add_hook(in_group(group)(), group.name.lower())
    manager.add_hook(User(), "late user")
    expected = ["late user", "monitor", "control", "checkpoint", "writer"]
    assert called(manager) == manager.list_hooks() == expected


def test_a_contradiction_raises_an_error_that_names_the_hooks():
    manager = HookManager([User("a"), User("b")])
    with pytest.raises(OrderError, match=r"'new' cannot come after 'b' and before 'a'"):
        manager.add_hook(User(), "new", after="b", before="a")
    assert called(manager) == ["a", "b"]


def test_a_cycle_raises_an_error_and_changes_nothing():
    manager = HookManager([User("a")])
    manager.add_hook(User(), "b", after="a")
    with pytest.raises(OrderError, match=r"'b', 'a' is a cycle|'a', 'b' is a cycle"):
        manager.add_hook(User(), "a", after="b", replace=True)
    assert called(manager) == manager.list_hooks() == ["a", "b"]


def test_a_hook_with_another_placed_next_to_it_can_be_removed_and_added_again():
    manager = HookManager([first := User("a")])
    manager.add_hook(User(), "b", after="a")
    manager.remove_hook("a")
    manager.add_hook(first)
    assert sorted(called(manager)) == ["a", "b"]


@st.composite
def registrations(draw):
    """Draw hooks of any group, some placed next to earlier ones."""
    count = draw(st.integers(1, 9))
    chosen = []
    for i in range(count):
        others = st.none() | st.sampled_from([f"h{j}" for j in range(i)]) if i else st.none()
        chosen.append((draw(st.sampled_from(HookGroup)), draw(others), draw(others)))
    return chosen


@given(registrations())
def test_every_accepted_placement_holds_and_an_error_changes_nothing(chosen):
    manager = HookManager()
    wishes = []
    for i, (group, before, after) in enumerate(chosen):
        known = manager.list_hooks()
        before = before if before in known else None
        after = after if after in known else None
        try:
            manager.add_hook(in_group(group)(), f"h{i}", before=before, after=after)
        except OrderError:
            assert before is not None
            assert after is not None
            assert manager.list_hooks() == known
            continue
        wishes.append((f"h{i}", group, before, after))
        rest = [name for name in manager.list_hooks() if name != f"h{i}"]
        assert rest == known  # no other hook moves
    order = manager.list_hooks()
    assert called(manager) == order
    for name, _, before, after in wishes:
        assert before is None or order.index(name) < order.index(before)
        assert after is None or order.index(name) > order.index(after)
    free = [(group, i) for i, (_, group, b, a) in enumerate(wishes) if b is None and a is None]
    in_place = [n for n in order if next(w[2:] for w in wishes if w[0] == n) == (None, None)]
    assert in_place == [wishes[i][0] for _, i in sorted(free)]


@given(registrations(), st.randoms(use_true_random=False))
def test_any_hook_can_be_removed_at_any_time(chosen, rng):
    manager = HookManager()
    for i, (group, before, after) in enumerate(chosen):
        try:
            manager.add_hook(
                in_group(group)(),
                f"h{i}",
                before=before if before in manager else None,
                after=after if after in manager else None,
            )
        except OrderError:
            continue
    names = manager.list_hooks()
    rng.shuffle(names)
    for name in names:
        manager.remove_hook(name)
        assert name not in manager
    assert manager.list_hooks() == []
