"""Sessions that are interrupted by Ctrl-C at random moments: counts what is left behind.

    python tests/support/interrupted_sessions.py 300 /tmp/runs

Each session is attached, entered, used for a step and left, in a loop with every kind of hook.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.utils import clip_grad

import hookline
from hookline.probes import Capture, Edit

_CLIPS = ("clip_grad_norm_", "clip_grad_value_", "_get_total_norm", "_clip_grads_with_norm_")
_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks"),
)


class Counts(hookline.Hook):
    """Counts steps, and asks for what makes a session watch everything."""

    def __init__(self) -> None:
        self.steps = 0

    def on_after_forward(self, outputs: Any) -> None:
        pass

    def on_step_end(self, loss: float, grad_norm: float) -> None:
        self.steps += 1


class Doubles(hookline.UpdateHook):
    """Doubles gradients."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, gradients: Any) -> Any:
        self.calls += 1
        return {name: 2 * gradient for name, gradient in gradients.items()}


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    scaler = torch.amp.GradScaler("cpu")
    return model, torch.optim.SGD(model.parameters(), lr=0.0), scaler


def make_hooks() -> list[hookline.Hook]:
    edit = Edit("0", "scale", 0.5, enable_intervention=True)
    return [edit, Capture("2"), Doubles(), Counts()]


def describe(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scaler: Any = None) -> Any:
    """Return everything that a session changes in a process."""
    module_hooks = {
        (name, attribute): list(getattr(module, attribute).values())
        for name, module in model.named_modules()
        for attribute in _HOOKS
        if getattr(module, attribute)
    }
    own_methods = [name for name, module in model.named_modules() if "__getstate__" in vars(module)]
    steps: Any = optimizer
    functions = [getattr(clip_grad, name) for name in _CLIPS]
    cells = [function.__code__.co_freevars.index("func") for function in functions]
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD)
    return {
        "modules": module_hooks,
        "copies": own_methods,
        "optimizer": [
            *steps._optimizer_step_pre_hooks.values(),
            *steps._optimizer_step_post_hooks.values(),
        ],
        "scaler": sorted(set(vars(scaler)) & {"step", "unscale_"}) if scaler is not None else [],
        "clips": [
            function.__closure__[i].cell_contents
            for function, i in zip(functions, cells, strict=True)
        ],
        "backward": torch.autograd._engine_run_backward,  # type: ignore[attr-defined]
        "signals": [signal.getsignal(number) for number in signals],
        "output": model(torch.ones(1, 4)).tolist(),
    }


other_threads: set[threading.Thread] = set()  # which other tests have left


def find_threads(seconds: float = 2.0) -> list[str]:
    """Return the threads of Hookline that do not end soon."""
    names: list[str] = []
    for _ in range(round(seconds / 0.01)):
        own = set(threading.enumerate()) - other_threads
        names = [each.name for each in own if each.name.startswith("hookline")]
        if not names:
            break
        time.sleep(0.01)
    return names


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
    """Train for one step, as loops do it."""
    loss = F.mse_loss(model(torch.ones(3, 4)), torch.zeros(3, 2))
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def use_session(model: Any, optimizer: Any, scaler: Any, runs: Path | None) -> None:
    """Attach hooks, train for a step, and leave."""
    with hookline.attach(
        model, optimizer, hooks=make_hooks(), scaler=scaler, runs=runs, report=False
    ):
        step(model, optimizer, scaler)


def interrupt_after(seconds: float, runs: Path | None) -> tuple[bool, dict[str, Any]]:
    """Use a session and send SIGINT after this time; return whether it came, and what is left."""
    model, optimizer, scaler = make()
    before = describe(model, optimizer, scaler)
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    interrupted = False
    try:
        timer.start()
        use_session(model, optimizer, scaler, runs)
        timer.join()
        time.sleep(0.01)
    except KeyboardInterrupt:
        interrupted = True
    timer.join()
    after = describe(model, optimizer, scaler)
    left = {name: after[name] for name in before if after[name] != before[name]}
    if threads := find_threads():
        left["threads"] = threads
    return interrupted, left


def main(count: int, folder: Path) -> int:
    generator = random.Random(0)
    for _ in range(3):  # imports
        use_session(*make(), folder)
    start = time.perf_counter()
    use_session(*make(), folder)
    longest = 1.2 * (time.perf_counter() - start)
    interrupts = failures = 0
    for i in range(count):
        seconds = longest * generator.random()
        interrupted, left = interrupt_after(seconds, folder if i % 2 else None)
        interrupts += interrupted
        failures += bool(left)
        if left:
            print(f"after {1000 * seconds:.2f} ms: {left}")
    print(f"{interrupts} of {count} sessions were interrupted, {failures} left something behind")
    return failures


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2])) > 0)
