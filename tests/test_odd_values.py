"""Odd values given to everything that takes a value: it works, or an error of Hookline is raised.

    export PYTHONPATH=tests/support
    python tests/test_odd_values.py                  # every value for every call
    python tests/test_odd_values.py -n 10 attach     # ten values, calls whose names contain a text

Tests try a sample, `make soak` a larger one.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import math
import random
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_loop import LOOPS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from odd_values import ODD_VALUES, Call, Raw, calls, train, try_value
from typer.testing import CliRunner

import hookline
from hookline.cli.app import app
from hookline.config_files import load_training
from hookline.errors import TrainingError
from hookline.files import FileLimits
from hookline.hooks.metric_lookup import metric_value
from hookline.loop.processes import SingleProcessGroup
from hookline.loop.rank_sync import StepRecords


def try_quietly(call: Call, value: str) -> Raw | None:
    """Give a value to a call without output."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return try_value(call, value)


@pytest.fixture(scope="module")
def all_calls(tmp_path_factory):
    folder = tmp_path_factory.mktemp("odd")
    with contextlib.chdir(folder):
        made = calls(folder)
        yield lambda: made  # hypothesis would print a list


@settings(
    max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
@given(number=st.integers(0, 10**6), value=st.sampled_from(sorted(ODD_VALUES)))
def test_an_odd_value_works_or_raises_a_clear_error(all_calls, number, value):
    made = all_calls()
    assert try_quietly(made[number % len(made)], value) is None


KNOWN = [
    ("attach(settings=…)", "{}"),
    ("attach with a run(runs=…)", "0"),
    ("attach(stop_grace=…)", "space"),
    ("attach(tags=…)", "-1"),
    ("verify(resume_from=…)", "path up"),
    ("HookManager(settings=…)", "{}"),
    ("HookManager.add_hook(before=…)", "[]"),
    ("HookSettings(max_failures=…)", "None"),
    ("HookRegistry.call_update_hooks(…)", "None"),
    ("GradientMonitor(percentiles=…)", "generator"),
    ("TrainerConfig(hooks=…)", "deep list"),
    ("Trainer(config=…)", "huge dict"),
    ("Trainer(hparams=…)", "-10**5000"),
    ("Trainer(tags=…)", "0"),
    ("Trainer.fit(resume_from=…)", "empty text"),
    ("Session.log(value=…)", "10**400"),
    ("Session.batches(…)", "0"),
    ("Run.rewind(…)", "inf"),
    ("Run.log_metrics(metrics=…)", "space"),
    ("open_run(…)", "object"),
    ("get_last_checkpoint(…)", "surrogate"),
    ("read_records(…)", "surrogate"),
    ("probe()[…]", "[None]"),
    ("a probe sees tap(x, …)", "[]"),
    ("tokens_fn returns …", "[]"),
    ("fit with Noise(gamma=…)", "2**63"),  # took forever
    ("NotificationHook(webhook_url=…)", "-10**5000"),
    ("NotificationHook(webhook_url=…)", "[text]"),
    ("Trainer.add_hook(name=…) in a hook", "long text"),
    ("Trainer.add_hook(name=…) in a hook", "str subclass"),
    ("verify(make_trainer=…)", "class"),
    ("verify(watch=…)", "tensor of 3"),
    ("verify(lambda: …)", "()"),
    ("load_training(…)", "None"),
    ("load_training(path, …)", "bytes"),
    ("fit with Mask(patterns=…)", "[text]"),
    ("fit with Edit(at=…)", "list in itself"),
    ("fit with Edit(at=…)", "sparse tensor"),
    ("Trainer.fit([batch …])", "enum member"),
    ("probe()['0'][…]", "True"),
    ("probe()['0'][…]", "module"),
    ("Run.log_metrics(epoch=…)", "-10**5000"),
    ("Run.close(error=…)", "-10**5000"),
    ("Metrics(…)", "0"),
    ("Metrics()[…]", "failing everything"),
    ("Metrics()[…]", "-10**5000"),
    ("fit with Capture(modules=…)", "deep list"),
    ("fit with Capture(select=…)", "tensor with grad"),
    ("fit with Capture(select=…)", "failing everything"),
    ("Capture(memory_limit_mb=…)", "1e308"),
    ("DebugProbe(conditions=…)", "failing everything"),
    ("Edit(value=…)", "-10**5000"),
    ("HookRegistry([{init_args: …}])", "huge dict"),
    ("TrainerConfig(seed=…)", "-10**5000"),
    ("fit with TrainerConfig(clip_value=…)", "1e308"),
    ("fit with TrainerConfig(seed=…)", "10**400"),
    ("fit with TrainerConfig(seed=…)", "enum member"),
    ("fit with MixConfig(length=…)", "2**63"),
    ("Trainer(config=…)", "{1: 2}"),
    ("Trainer(schedulers=…)", "failing everything"),
    ("fit of Trainer(loss_fn=…)", "lambda"),
    ("fit of Trainer(loss_fn=…)", "nn.Module"),
    ("fit of Trainer(tokens_fn=…)", "lambda"),
    ("get_trainer(kind=…)", "numpy array"),
    ("get_trainer(kind=…)", "failing eq"),
    ("get_trainer(device=…)", "failing repr"),
    ("Trainer.fit(resume_from=…)", "long text"),
    ("step_fn returns a metric …", "numpy array"),
    ("attach(checkpoints=…)", "dict in itself"),
    ("attach with a run(runs=…)", "str subclass"),
    ("Session.clip(max_norm=…)", "empty tensor"),
    ("Session.clip(max_norm=…)", "complex tensor"),
    ("Session.clip(max_norm=…)", "meta tensor"),
    ("Session.batches(name=…)", "numpy array"),
    ("Session.batches(name=…)", "tensor of 3"),
    ("Session.backward(accumulate=…)", "10**400"),
    ("probe(every=…)", "numpy objects"),
    ("probe(every=…)", "sparse tensor"),
    ("probe()['0'][…]", "failing everything"),
    ("Probes.register_edit_hook(value=…)", "meta tensor"),
    ("Edit sees an output …", "dict in itself"),
    ("open_run(runs=…)", "str subclass"),
    ("get_last_checkpoint(…)", "long text"),
    ("read_records(…)", "str subclass"),
    ("Metrics(a=…)", "-10**5000"),
    ("Metrics(a=…)", "meta tensor"),
    ("Metrics(a=…)", "deep list"),
    ("verify(make_trainer=…)", "nn.Module"),
]


@pytest.mark.parametrize(("name", "value"), KNOWN)
def test_values_that_once_raised_something_else(all_calls, name, value):
    (call,) = (call for call in all_calls() if call.name == name)
    assert try_quietly(call, value) is None


@pytest.mark.parametrize(
    ("make_hook", "number"),
    [
        (lambda number: hookline.ClipNorm(max_norm=number), np.float32(0.5)),
        (lambda number: hookline.EarlyStopping(patience=number), np.int64(3)),
        (lambda number: hookline.EarlyStopping(min_delta=number), np.float16(0.5)),
        (lambda number: hookline.ConsoleLogHook(log_every_n_batches=number), np.int64(3)),
    ],
)
def test_a_number_of_numpy_is_a_number(make_hook, number):
    train(make_hook(number))


def test_an_error_names_the_argument():
    with pytest.raises(hookline.ArgumentError, match=r"load_training\(…, trust=…\)"):
        load_training("train.yaml", trust=3)  # type: ignore[arg-type]
    with pytest.raises(hookline.ArgumentError, match=r"load_training\(path\)"):
        load_training(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["--resume=", "--from=", "--resume= "])
def test_an_empty_run_on_the_command_line_is_not_the_current_folder(option):
    result = CliRunner().invoke(app, ["train", "train.yaml", option])
    assert result.exit_code == 2
    assert "is empty" in result.output


def test_a_message_can_be_printed_whatever_is_in_it():
    error = hookline.HooklineError(f"'{'a' * 10**6}' \ud800. Do something else.")
    assert len(str(error)) < 2000
    assert str(error).encode().endswith(rb"\ud800. Do something else.")


@pytest.mark.parametrize("value", ["x", "-1", "", "1e9", "9" * 5000])
def test_an_invalid_limit_in_the_environment_is_a_clear_error(value, monkeypatch):
    monkeypatch.setenv("HOOKLINE_MAX_LINE_BYTES", value)
    with pytest.raises(hookline.ConfigError, match="HOOKLINE_MAX_LINE_BYTES"):
        FileLimits.from_environment()


def main() -> int:
    """Try the values, print what is raw, and return how many distinct exceptions were."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", type=int, default=len(ODD_VALUES), help="values for each call")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("words", nargs="*", help="texts that names of calls contain")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    found: Counter[tuple[str, str, str]] = Counter()
    tried = 0
    chosen = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for call in calls(Path(folder)):
            if options.words and not any(word in call.name for word in options.words):
                continue
            for name in chosen.sample(list(ODD_VALUES), options.n):
                tried += 1
                raw = try_quietly(call, name)
                if raw is not None:
                    key = raw.problem, raw.kind, raw.place
                    if not found[key]:
                        print(f"{raw.kind} in {raw.place} ({raw.problem})", flush=True)
                        print(f"    {raw.call} with {raw.value}: {raw.text[:150]}", flush=True)
                    found[key] += 1
    print(f"{tried} values: {sum(found.values())} raw exceptions, {len(found)} distinct")
    return len(found)


if __name__ == "__main__":
    raise SystemExit(bool(main()))


@pytest.mark.parametrize("name", LOOPS)
def test_an_integer_above_the_largest_float_ends_no_loop(name, tmp_path):
    class Large(hookline.Hook):
        def on_step_end(self, trainer: Any) -> None:
            trainer.log("large", 10**320)
            trainer.log("own/large", -(10**320))

    model, _ = LOOPS[name]([Large(), hookline.LoggingHook()], tmp_path)
    plain, _ = LOOPS[name]([], tmp_path / "plain")
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )
    (run,) = (tmp_path / "runs").iterdir()
    assert hookline.open_run(run).manifest["status"] == "completed"


def test_a_hook_that_monitors_an_integer_above_the_largest_float_names_the_value():
    with pytest.raises(TrainingError, match=r"'large', which is 1000.*, above the largest float"):
        metric_value({"large": 10**320}, "large", "EarlyStopping")


def test_values_of_several_processes_may_have_an_integer_above_the_largest_float():
    records = StepRecords(SingleProcessGroup())
    records.add(1, 0, "large", 10**320)
    assert records.own_values() == [(1, 0, "large", math.inf)]
