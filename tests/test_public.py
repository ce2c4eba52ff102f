"""The public surface: what `import hookline` offers, and what it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hookline

NAMES = {
    "BaseTrainer",
    "CheckpointError",
    "ConfigError",
    "RunError",
    "GenericTrainer",
    "HooksConfig",
    "SimpleTrainer",
    "Trainer",
    "TrainerConfig",
    "TrainingError",
    "get_trainer",
    "EVENTS",
    "Hook",
    "HookFailedError",
    "HookInfo",
    "HookManager",
    "HookRunner",
    "HookSettings",
    "HookStateError",
    "HooklineError",
    "LazyFloat",
    "LoopError",
    "Metrics",
    "NameTakenError",
    "NotAHookError",
    "NotSuppliedError",
    "OrderError",
    "RegistrationError",
    "Schedule",
    "Session",
    "SignatureError",
    "StateReport",
    "StepContext",
    "Summary",
    "TrainerHooks",
    "TrainingHook",
    "UnknownEventError",
    "UnknownHookError",
    "__version__",
    "attach",
    "CheckpointHook",
    "ConsoleLogHook",
    "DebugHook",
    "EMA",
    "EarlyStopping",
    "ForwardHook",
    "GradientMonitor",
    "Heartbeat",
    "JSONLogHook",
    "LRMonitor",
    "LoggingHook",
    "ModelCheckpoint",
    "NotificationHook",
    "ObserverError",
    "ProbeError",
    "RuntimeProfile",
    "TimeLimit",
    "TorchProfiler",
    "UpdateHook",
    "UploadHook",
    "HookRegistry",
    "open_run",
    "probe",
    "tap",
    "ActivationStats",
    "AGC",
    "Centralize",
    "ClipNorm",
    "ClipValue",
    "EMAFilter",
    "Identity",
    "Mask",
    "Noise",
    "Scale",
    "SkipNonfinite",
}


def test_the_public_names_are_these():
    assert set(hookline.__all__) == set(dir(hookline)) == NAMES
    assert all(getattr(hookline, name) is not None for name in NAMES)


def test_names_of_other_systems_are_the_same_object():
    assert hookline.TrainerHooks is hookline.TrainingHook is hookline.Hook


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'hookline' has no attribute 'Trainr'"):
        _ = hookline.Trainr


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import hookline", "torch"),
        ("from hookline import Hook, HookManager, HookRunner, StepContext", "torch"),
        ("from hookline import attach", "torch._dynamo"),
        ("from hookline import attach", "torch.distributed.tensor"),
    ],
)
def test_importing_loads_no_more_than_it_needs(statement, unwanted):
    code = f"{statement}; import sys; sys.exit({unwanted!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_hooks_of_the_typing_file_run_as_well_as_they_check():
    import torch
    from user_hooks import use

    model = torch.nn.Linear(2, 2)
    use(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_every_error_is_a_hookline_error():
    errors = [getattr(hookline, name) for name in NAMES if name.endswith("Error")]
    assert all(issubclass(error, hookline.HooklineError) for error in errors)
