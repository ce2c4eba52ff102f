"""The undocumented parts of other libraries that Hookline uses are listed, and are there."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from ignite.engine import Engine
from ignite.handlers import Checkpoint
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import Strategy
from transformers import Trainer
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import rotate_checkpoints

import hookline

SOURCE = Path(hookline.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "integration_internals.md"

OF_ACCELERATE = {"_optimizers", "_custom_objects", "_is_overflow", "_is_accelerate_prepared"}
OWN = {"_context", "_getframe"}
"""Private names of Hookline's own session, and of Python."""


def private_names(file: Path) -> set[str]:
    """Return the private attributes that code reads or sets on anything but `self`."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        name = None
        if isinstance(node, ast.Attribute) and not _is_own(node.value):
            name = node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
        if name is not None and name.startswith("_") and not name.startswith("__"):
            found.add(name)
    return found


def _is_own(node: ast.expr) -> bool:
    is_super = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "super"
    return is_super or getattr(node, "id", "") in ("self", "cls")


def test_the_integrations_use_no_other_private_attributes() -> None:
    integrations = SOURCE / "integrations"
    files = [*integrations.glob("*.py")]
    names = set[str]().union(*map(private_names, files))
    assert names - OWN == {"_torchdynamo_orig_callable"}  # torch's
    files = [*(SOURCE / "trainer" / "strategies").glob("acceler*.py")]
    assert set[str]().union(*map(private_names, files)) == OF_ACCELERATE


def test_accelerate_has_what_is_used() -> None:
    model = torch.nn.Linear(1, 1)
    accelerator = Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    assert accelerator._optimizers == [optimizer]
    assert accelerator._custom_objects == []
    assert prepared._is_accelerate_prepared is True
    assert isinstance(optimizer, AcceleratedOptimizer)
    optimizer._is_overflow = True
    assert optimizer.step_was_skipped is True


def test_ignite_has_the_variables_that_are_read() -> None:
    code = Checkpoint.__call__.__code__
    assert {"self", "filename"} <= {*code.co_varnames, *code.co_cellvars}
    assert "checkpoint" in inspect.signature(Checkpoint.load_objects).parameters


def test_the_wrapped_methods_are_there() -> None:
    for name in ("train", "training_step", "evaluate", "prediction_step", "save_model"):
        assert callable(getattr(Trainer, name))
    assert callable(CallbackHandler.on_log)
    assert "on_log" in Trainer.log.__code__.co_names
    assert list(inspect.signature(Trainer.train).parameters)[1] == "resume_from_checkpoint"
    parameters = list(inspect.signature(rotate_checkpoints).parameters)
    assert parameters[:3] == ["output_dir", "save_total_limit", "best_model_checkpoint"]
    assert callable(LightningTrainer.save_checkpoint)
    assert callable(Strategy.remove_checkpoint)
    assert callable(Engine.run)
    assert AsyncCheckpointIO(TorchCheckpointIO()).checkpoint_io is not None


def test_the_page_lists_them() -> None:
    page = PAGE.read_text()
    used = ("filename", "load_objects", "prediction_step", "save_checkpoint", "rotate_checkpoints")
    for name in (*OF_ACCELERATE, *used):
        assert name in page, name


def test_an_attached_iteration_costs_few_calls() -> None:
    class Nothing(hookline.Hook):
        def on_before_optimizer_step(self) -> None: ...

        def on_step_end(self, step: int) -> None: ...

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls: list[str] = []

    def count(frame: Any, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and ("/src/hookline/" in name or name.startswith("<hook")):
            calls.append(frame.f_code.co_qualname)

    def batches() -> Iterator[torch.Tensor]:
        for i in range(70):  # the first calls of hooks are timed
            sys.setprofile(count if i == 65 else None)
            yield torch.ones(1, 2)

    def step(engine: Engine, batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

    engine = Engine(step)
    hookline.attach(engine, model=model, optimizer=optimizer, hooks=[Nothing()], runs=None)
    engine.run(batches(), epoch_length=70)
    assert len(calls) <= 15, calls
