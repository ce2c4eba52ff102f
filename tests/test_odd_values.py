"""Odd values given to what takes a value: it works, or an error of Hookline is raised.

Parameters are read from signatures and configurations, so that new ones are tried, too. A sample is
tried; `make soak` tries a larger one.
"""

from __future__ import annotations

import contextlib
import inspect
import io
from collections.abc import Callable, Iterator
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

import hookline
from hookline import probes
from hookline.cli.app import app
from hookline.config.hook_names import BUILT_INS, PROBES, load_hook_class
from hookline.config.trainer_config import CheckpointConfig, MixConfig
from hookline.config_files import load_training
from hookline.errors import HooklineError
from hookline.options import get_options
from hookline.runs import Run, diff_runs, open_run, read_records

# -- values ----------------------------------------------------------------------------------------


class Color(Enum):
    """An enum."""

    RED = "red"


ODD_VALUES: dict[str, Callable[[], Any]] = {  # made anew, because some can be used only once
    "None": lambda: None,
    "True": lambda: True,
    "-1": lambda: -1,
    "2**63": lambda: 2**63,
    "10**400": lambda: 10**400,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "1e308": lambda: 1e308,
    "complex": lambda: 1j,
    "empty text": lambda: "",
    "space": lambda: " ",
    "NUL": lambda: "\0",
    "escape sequence": lambda: "\x1b[31m\u202e\n",
    "long text": lambda: "a" * 10**6,
    "path up": lambda: "../x",
    "pattern": lambda: "[(*?{",
    "bytes": lambda: b"x",
    "[]": list,
    "{}": dict,
    "[None]": lambda: [None],
    "{1: 2}": lambda: {1: 2},
    "object": object,
    "lambda": lambda: lambda: 0,
    "class": lambda: Color,
    "nn.Module": lambda: nn.Identity(),
    "tensor of 3": lambda: torch.ones(3),
    "empty tensor": lambda: torch.empty(0),
    "meta tensor": lambda: torch.empty((), device="meta"),
    "numpy float": lambda: np.float32(0.5),
    "generator": lambda: (i for i in range(3)),
    "enum member": lambda: Color.RED,
}


# -- calls -----------------------------------------------------------------------------------------

Calls = Iterator[tuple[str, Callable[[Any], Any]]]


class Watch(hookline.Hook):
    """A hook that observes."""

    def on_step_end(self, step: int, loss: float) -> None:
        """Do nothing."""


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))


def make_loader() -> list[Any]:
    return [(torch.ones(2, 2), torch.zeros(2, 1)) for _ in range(3)]


def make_trainer(**options: Any) -> hookline.Trainer:
    """Return a trainer for two steps."""
    model = make_model()
    arguments: dict[str, Any] = {
        "config": {"max_steps": 2, "max_epochs": 2, "runs": None, "progress": "off"},
        "model": model,
        "optimizers": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss_fn": nn.functional.mse_loss,
    }
    return hookline.Trainer(**{**arguments, **options})


def train(*hooks: Any, **options: Any) -> None:
    make_trainer(hooks=list(hooks), **options).fit(make_loader(), make_loader())


def in_session(action: Callable[[Any], Any] = lambda session: None, **options: Any) -> None:
    """Train two steps in a bare loop, and do something between them."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    arguments = {"model": model, "optimizer": optimizer, "hooks": [Watch()], "runs": None}
    with hookline.attach(**{**arguments, **options}) as session:
        for step in range(2):
            model(torch.ones(2, 2)).sum().backward()
            optimizer.step()
            if not step:
                action(session)
            optimizer.zero_grad()


def vary(name: str, function: Any, valid: Any = dict, of: Any = None) -> Calls:
    """Yield a call for each parameter of a function; the others have valid values."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    for parameter in inspect.signature(of or function).parameters.values():
        if parameter.kind in named and parameter.name != "self":
            key = parameter.name
            yield f"{name}({key}=…)", lambda v, key=key: function(**{**valid(), key: v})


REQUIRED_OPTIONS: dict[str, dict[str, Any]] = {
    "upload": {"destination": "/nowhere/else"},
    "time_limit": {"limit": 100},
    "mask": {"patterns": ["*"]},
    "scale": {"factor": 1.0},
    "clip_norm": {"max_norm": 1.0},
    "clip_value": {"max_value": 1.0},
    "capture": {"modules": "0"},
    "monitor": {"modules": "0"},
    "debug_probe": {"modules": "0"},
    "edit": {"modules": "0", "operation": "scale", "value": 1.0, "enable_intervention": True},
    "notification": {"webhook_url": "http://127.0.0.1:9/x"},
}
_NOT_RUN = ("notification", "heartbeat", "upload", "console_log")


def hook_calls(folder: Path) -> Calls:
    """Yield the options of all hooks, probes and updates, and what managers take."""
    for name in (*BUILT_INS, *PROBES):
        made: Any = load_hook_class(name)
        for option in get_options(made):

            def construct(v: Any, made: Any = made, name: str = name, option: str = option) -> Any:
                return made(**{**REQUIRED_OPTIONS.get(name, {}), option: v})

            yield f"{made.__name__}({option}=…)", construct
            if name not in _NOT_RUN:
                text = f"fit with {made.__name__}({option}=…)"
                yield text, lambda v, construct=construct: train(construct(v))
    manager = hookline.HookManager

    def add(**options: Any) -> None:
        made = manager([Watch("other")])
        made.add_hook(**{"hook": Watch(), **options})
        made.describe()
        made.fire("on_step_end", step=1, loss=1.0, step_in_progress=1, epoch=0)

    yield from vary("HookManager", manager)
    yield from vary("HookManager.add_hook", add, of=manager.add_hook)
    for method in ("remove_hook", "enable_hook", "disable_hook", "get_hook", "load_state_dict"):
        own = f"HookManager.{method}(…)"
        yield own, lambda v, method=method: getattr(manager([Watch("other")]), method)(v)
    yield from vary("HookSettings", hookline.HookSettings)
    yield from vary("Schedule", hookline.Schedule)
    for key in ("name", "class_path", "enabled", "init_args", "every", "before", "unknown"):
        item = f"HookRegistry([{{{key}: …}}])"
        yield item, lambda v, key=key: hookline.HookRegistry([{"name": "logging", key: v}])


def config_calls(folder: Path) -> Calls:
    """Yield the fields of configurations."""
    for made in (hookline.TrainerConfig, hookline.HooksConfig, MixConfig, CheckpointConfig):
        for field in made.model_fields:
            own = f"{made.__name__}({field}=…)"
            yield own, lambda v, made=made, field=field: made(**{field: v})
    for field in hookline.TrainerConfig.model_fields:

        def use(value: Any, field: str = field) -> None:
            base = {"max_steps": 2, "progress": "off", "runs": None}
            trainer = make_trainer(config={**base, field: value})
            if field != "runs":
                trainer.config.max_steps = 2
                trainer.fit(make_loader(), make_loader())

        yield f"fit with TrainerConfig({field}=…)", use


def loop_calls(folder: Path) -> Calls:
    """Yield the arguments of trainers and sessions, and of their methods."""
    yield from vary("Trainer", lambda **options: train(**options), of=hookline.Trainer)
    fit = lambda **options: make_trainer().fit(**{"loaders": make_loader(), **options})  # noqa: E731
    yield from vary("Trainer.fit", fit, of=hookline.Trainer.fit)
    yield "Trainer.fit([batch …])", lambda v: fit(loaders=[v])
    yield "loss_fn returns …", lambda v: train(loss_fn=lambda *a: v)
    yield "tokens_fn returns …", lambda v: train(tokens_fn=lambda batch: v)
    yield from vary("attach", in_session, of=hookline.attach)
    recorded = partial(in_session, runs=folder / "bare")
    yield "attach(hparams={'a': …})", lambda v: recorded(hparams={"a": v})
    valid: dict[str, dict[str, Any]] = {
        **{"log": {"name": "a", "value": 1.0}, "log_dict": {}, "stop": {}},
        **{"skip_optimizer_step": {}, "save_checkpoint": {"path": folder / "saved"}},
        **{"add_hook": {"hook": Watch("second")}, "remove_hook": {}, "register_for_checkpoint": {}},
    }
    for method, arguments in valid.items():
        for owner in (hookline.Session, hookline.Trainer):
            of = getattr(owner, method)

            def call(owner: type = owner, method: str = method, **options: Any) -> None:
                if owner is hookline.Session:
                    recorded(lambda session: getattr(session, method)(**options))
                else:
                    getattr(make_trainer(), method)(**options)

            yield from vary(f"{owner.__name__}.{method}", call, partial(dict, arguments), of)
    yield "Session.batches([…])", lambda v: in_session(lambda s: list(s.batches([v])))
    yield "Session.backward(…)", lambda v: in_session(lambda s: s.backward(v))
    yield from vary("verify", hookline.verify, lambda: {"make_trainer": _verified, "steps": 2})
    yield "verify(lambda: …)", lambda v: hookline.verify(lambda: v, 2)


def _verified() -> Any:
    return make_trainer(), make_loader()


def other_calls(folder: Path) -> Calls:
    """Yield the arguments of probes, runs and values."""

    def probe(**options: Any) -> None:
        model = options.get("model", make_model())
        with hookline.probe(**{"model": model, "which": "0", **options}) as results:
            make_model()(torch.ones(1, 2))
        repr(results)

    yield from vary("probe", probe, of=hookline.probe)
    yield "probe()[…]", lambda v: hookline.probe(make_model(), "0")[v]
    yield "tap(x, …)", lambda v: hookline.tap(torch.ones(1), v)
    yield from vary("Probes", probes.Probes)
    yield from vary("gradient_flow", probes.gradient_flow, lambda: {"model": make_model()})

    def writing(action: Callable[[Run], Any]) -> None:
        run = Run.create(folder / "written", config={}, seed=0, hooks=[])
        try:
            action(run)
        finally:
            run.close()

    log = lambda **options: writing(lambda run: run.log(**options))  # noqa: E731
    row = lambda: {"step": 1, "epoch": 0, "name": "a", "value": 1.0}  # noqa: E731
    yield from vary("Run.log", log, row, of=Run.log)
    yield (
        "Run.log_metrics({'a': …})",
        lambda v: writing(lambda run: run.log_metrics(1, 0, {"a": v})),
    )
    yield "Run.event(field=…)", lambda v: writing(lambda run: run.event("a", field=v))
    yield "Run.rewind(…)", lambda v: writing(lambda run: run.rewind(v))
    yield "Run.close(error=…)", lambda v: writing(lambda run: run.close("error", v))
    yield "open_run(…)", open_run
    yield "get_last_checkpoint(…)", hookline.get_last_checkpoint
    yield "read_records(…)", lambda v: list(read_records(v))
    yield "diff_runs(…, …)", lambda v: diff_runs(v, v)
    yield "LazyFloat(…)", hookline.LazyFloat
    yield "Metrics(…)", hookline.Metrics
    yield "Metrics()[…]", lambda v: hookline.Metrics(a=1.0)[v]
    yield "load_training(…)", load_training
    yield "load_training(path, …)", lambda v: load_training(folder / "train.yaml", v)


def try_value(name: str, function: Callable[[Any], Any], value: str) -> None:
    """Give a value to a call; raise what it raises, unless that is a clear error of Hookline."""
    made, message = ODD_VALUES[value](), "it worked"
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            function(made)
    except HooklineError as error:
        message = str(error)
    assert len(message.encode()) < 2000


@pytest.fixture(scope="module")
def all_calls(tmp_path_factory):
    folder = tmp_path_factory.mktemp("odd")
    with contextlib.chdir(folder):
        several = (hook_calls, config_calls, loop_calls, other_calls)
        made = [call for part in several for call in part(folder)]
        yield lambda: made  # hypothesis would print a list


@settings(
    max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
@given(number=st.integers(0, 10**6), value=st.sampled_from(sorted(ODD_VALUES)))
def test_an_odd_value_works_or_raises_a_clear_error(all_calls, number, value):
    made = all_calls()
    try_value(*made[number % len(made)], value)


KNOWN = [
    ("attach(settings=…)", "{}"),
    ("attach(tags=…)", "-1"),
    ("HookManager.add_hook(before=…)", "[]"),
    ("HookSettings(max_failures=…)", "None"),
    ("GradientMonitor(percentiles=…)", "generator"),
    ("fit with TrainerConfig(clip_value=…)", "1e308"),
    ("Trainer(config=…)", "{1: 2}"),
    ("Trainer(loss_fn=…)", "lambda"),
    ("Trainer.fit(resume_from=…)", "empty text"),
    ("Trainer.fit([batch …])", "enum member"),
    ("Session.log(value=…)", "10**400"),
    ("Run.rewind(…)", "inf"),
    ("open_run(…)", "object"),
    ("get_last_checkpoint(…)", "NUL"),
    ("probe()[…]", "[None]"),
    ("tokens_fn returns …", "[]"),
    ("fit with Noise(gamma=…)", "2**63"),  # took forever
    ("verify(make_trainer=…)", "class"),
    ("verify(watch=…)", "tensor of 3"),
    ("load_training(…)", "None"),
    ("Metrics()[…]", "object"),
]


@pytest.mark.parametrize(("name", "value"), KNOWN)
def test_values_that_once_raised_something_else(all_calls, name, value):
    (call,) = (call for call in all_calls() if call[0] == name)
    try_value(*call, value)


@pytest.mark.parametrize(
    ("make_hook", "number"),
    [
        (lambda number: hookline.ClipNorm(max_norm=number), np.float32(0.5)),
        (lambda number: hookline.EarlyStopping(patience=number), np.int64(3)),
        (lambda number: hookline.EarlyStopping(min_delta=number), np.float16(0.5)),
    ],
)
def test_a_number_of_numpy_is_a_number(make_hook, number):
    train(make_hook(number))


def test_an_error_names_the_argument():
    with pytest.raises(hookline.ArgumentError, match=r"load_training\(…, trust=…\)"):
        load_training("train.yaml", trust=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["--resume=", "--from=", "--resume= "])
def test_an_empty_run_on_the_command_line_is_not_the_current_folder(option):
    result = CliRunner().invoke(app, ["train", "train.yaml", option])
    assert result.exit_code == 2
    assert "is empty" in result.output


def test_a_message_can_be_printed_whatever_is_in_it():
    error = hookline.HooklineError(f"'{'a' * 10**6}' \ud800. Do something else.")
    assert len(str(error)) < 2000
    assert str(error).encode().endswith(rb"\ud800. Do something else.")
