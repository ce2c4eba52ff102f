"""The dispatch alone: an event that nobody, ten hooks or a thousand other hooks listen to.

The place in a loop where an event is fired is `if live.on_step_end is not None: …`, and that is
what is measured here, inlined in the timed loop as it would be in a training loop. Arguments of the
direct calls are local variables: nothing that is written by hand can be faster.
"""

from __future__ import annotations

import hookline
from bench import peers
from bench.harness import Candidate, Rounds, Row, block, interleave

__all__ = ["run"]

FIRE = "if live.on_step_end is not None: live.on_step_end(src)"
TEN = 10


class Plain:
    """The least that can be asked: an ordinary object with an attribute that is None."""

    def __init__(self) -> None:
        self.on_step_end = None


class Source:
    """Stands for the loop: has the arguments of events as attributes."""

    def __init__(self) -> None:
        self.step = 1
        self.loss = 0.5


def run(*, quick: bool) -> list[Row]:
    rounds = 60 if quick else 300
    return [*_no_hook(rounds), *_ten_hooks(rounds), *_a_thousand_others(rounds)]


def _no_hook(rounds: int) -> list[Row]:
    runner = hookline.HookRunner(None)
    empty = {"loops": 10_000, "src": Source()}
    measured = interleave(
        {
            "plain": block(*[FIRE] * TEN, live=Plain(), **empty),
            "hookline": block(*[FIRE] * TEN, live=hookline.HookManager().dispatchers, **empty),
            "method": block(*["do.nothing(ctx)"] * TEN, loops=10_000, do=Nothing(), ctx=None),
            "runner": block(*["do.on_step_end(ctx)"] * TEN, loops=10_000, do=runner, ctx=None),
            **peers.events(hooks=0, loops=500),
        },
        rounds=rounds,
    )
    return [
        Row(
            "one event, no hook, over one attribute load and one branch",
            measured.ratio("hookline", "plain"),
            "×",
            limit=1.25,
            note=f"hookline {_ns(measured, 'hookline')}, the same line on a plain object "
            f"{_ns(measured, 'plain')}",
            peers=_peers(measured),
        ),
        Row(
            "HookRunner.on_step_end(ctx), no hook, over a method that does nothing",
            measured.ratio("runner", "method"),
            "×",
            note=f"hookline {_ns(measured, 'runner')}, the empty method {_ns(measured, 'method')}",
        ),
    ]


def _ten_hooks(rounds: int) -> list[Row]:
    manager = hookline.HookManager(_listeners())
    hooks = _listeners()
    named = {f"h{i}": hook for i, hook in enumerate(hooks)}
    direct = [f"{name}.on_step_end(step, loss)" for name in named]
    looped = "for hook in hooks: hook.on_step_end(step, loss)"
    arguments = {"step": 1, "loss": 0.5}
    # Each round fires 20,000 times, the rounds together millions of times on one manager: timed
    # firings (one in about 250) have the share in it that they have in production.
    candidates: dict[str, Candidate] = {
        "direct": block(*direct, loops=20_000, **named, **arguments),
        "loop": block(looped, loops=20_000, units=TEN, hooks=hooks, **arguments),
        "hookline": block(FIRE, loops=20_000, units=TEN, live=manager.dispatchers, src=Source()),
        **peers.events(hooks=TEN, loops=500),
    }
    measured = interleave(candidates, rounds=rounds)
    return [
        Row(
            "one event, ten hooks, per hook, over a direct method call",
            measured.ratio("hookline", "direct"),
            "×",
            limit=1.5,
            note=f"hookline {_ns(measured, 'hookline')}, ten direct calls written out "
            f"{_ns(measured, 'direct')}, a for loop over the hooks {_ns(measured, 'loop')}",
            peers=_peers(measured),
        ),
        Row(
            "    the same over a for loop that calls the hooks",
            measured.ratio("hookline", "loop"),
            "×",
        ),
    ]


def _a_thousand_others(rounds: int) -> list[Row]:
    crowd = hookline.HookManager(OnEpochEnd() for _ in range(1000))
    empty = {"loops": 10_000, "src": Source()}
    measured = interleave(
        {
            "none": block(*[FIRE] * TEN, live=hookline.HookManager().dispatchers, **empty),
            "hookline": block(*[FIRE] * TEN, live=crowd.dispatchers, **empty),
            **peers.events(hooks=1000, loops=5, listening=False),
        },
        rounds=max(20, rounds // 4),
    )
    return [
        Row(
            "1,000 hooks that do not implement the event, over no hook at all",
            measured.ratio("hookline", "none"),
            "×",
            limit=1.1,
            note=f"hookline {_ns(measured, 'hookline')}, without hooks {_ns(measured, 'none')}",
            peers=_peers(measured),
        )
    ]


class Nothing:
    def nothing(self, ctx: object) -> None:
        pass


class OnEpochEnd(hookline.Hook):
    def on_epoch_end(self, epoch: int) -> None:
        pass


def _listeners() -> list[hookline.Hook]:
    """Ten hooks of ten classes, as hooks are."""

    def on_step_end(self: object, step: int, loss: float) -> None:
        pass

    return [type(f"Hook{i}", (hookline.Hook,), {"on_step_end": on_step_end})() for i in range(TEN)]


def _ns(measured: Rounds, name: str) -> str:
    return f"{measured.time(name) * 1e9:.1f} ns"


def _peers(measured: Rounds) -> dict[str, str]:
    return {
        name: f"{measured.time(name) * 1e9:,.0f} ns" for name in peers.NAMES if name in measured
    }
