"""Mutated config files: each is a clear error or a trainer, and never another exception."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from hookline import HooklineError
from hookline.config_files import load_training

PROJECT = """
import torch
from torch import nn
from hookline import Hook

class FuzzNet(nn.Module):
    def __init__(self, width: int = 4, act=None, bias=True):
        super().__init__()
        if not 0 < width < 65:
            raise ValueError(f"width is {width}")
        self.first, self.second = nn.Linear(8, width, bias=bias), nn.Linear(width, 4)
        self.act = nn.ReLU() if act is None else act

    def forward(self, x):
        return self.second(self.act(self.first(x)))

class Points(torch.utils.data.Dataset):
    def __init__(self, count: int = 8):
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, i):
        return torch.zeros(8), torch.zeros(4)

def batches(count: int = 2):
    return [(torch.zeros(2, 8), torch.zeros(2, 4)) for _ in range(count)]

class Watch(Hook):
    def __init__(self, threshold: float = 1.0, names: tuple = ()):
        self.threshold, self.names = threshold, names
    def on_step_end(self, loss):
        pass
"""

VALID: dict[str, Any] = {
    "seed": 1,
    "model": {
        "class_path": "fuzz_project.FuzzNet",
        "init_args": {"width": 4, "act": {"class_path": "torch.nn.GELU", "init_args": {}}},
    },
    "data": {
        "train": {
            "points": {
                "class_path": "fuzz_project.Points",
                "init_args": {"count": 8},
                "loader": {"batch_size": 2, "shuffle": True},
            },
            "batches": {"class_path": "fuzz_project.batches"},
        },
        "val": "fuzz_project.batches",
    },
    "optimizer": [
        {
            "class_path": "torch.optim.AdamW",
            "init_args": {"lr": 0.01, "betas": [0.9, 0.99]},
            "params": ["first"],
            "groups": [{"params": ["first.bias"], "lr": 0.1}],
        },
        {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}, "params": ["second.*"]},
    ],
    "scheduler": {
        "class_path": "torch.optim.lr_scheduler.StepLR",
        "init_args": {"step_size": 2},
        "optimizer": 1,
    },
    "loss_fn": {"class_path": "torch.nn.functional.mse_loss", "init_args": {"reduction": "sum"}},
    "trainer": {
        "max_epochs": 1,
        "precision": "fp32",
        "clip_norm": 1.0,
        "optimizer_every": [1, 2],
        "loaders": {"order": "weighted", "weights": {"points": 1, "batches": 2}},
        "runs": None,
        "hooks": {"enable_lr_monitor": True, "hook_classes": ["fuzz_project.Watch"]},
    },
    "hooks": {
        "loop": [
            {"name": "early_stopping", "patience": 2, "monitor": "val/loss", "every": 1},
            {"class_path": "fuzz_project.Watch", "init_args": {"threshold": 2}, "as": "mine"},
            "console_log",
        ],
        "update": [{"name": "clip_norm", "max_norm": 1.0, "enabled": False, "every": 3}],
        "probes": [{"name": "monitor", "modules": ["first"]}],
    },
}

PATHS = ["torch.nn.Linear", "torch.nn", "os.system", "fuzz_project.FuzzNet", "fuzz_project.batches"]
ODD_TEXT = ["", ".", "a.", "a..b", "${", "${NO_SUCH}", "${A:1}", "$${x}", "__class__.__init__", "*"]
REFERENCES = ["${seed}", "${model}", "${optimizer.0.init_args.lr}", "x${trainer.max_epochs}"]
NUMBERS = [0, 1, -1, 3, 64, 2**70, 0.5, 1e-300, float("nan"), float("inf"), 10**400]


def scalars() -> st.SearchStrategy[Any]:
    return st.one_of(
        st.none(),
        st.booleans(),
        st.sampled_from(NUMBERS),
        st.sampled_from(ODD_TEXT + PATHS + REFERENCES),
        st.text(max_size=8),
    )


def values() -> st.SearchStrategy[Any]:
    made = st.fixed_dictionaries({"class_path": scalars()}, optional={"init_args": scalars()})
    keys = st.one_of(st.text(max_size=5), st.sampled_from(["name", "class_path", "init_args"]))
    return st.one_of(
        scalars(),
        made,
        st.recursive(
            scalars(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
            max_leaves=5,
        ),
        st.integers(1, 60).map(_deep),
    )


def _deep(depth: int) -> Any:
    value: Any = "x"
    for i in range(depth):
        value = {"class_path": value} if i % 3 == 0 else [value] if i % 3 == 1 else {"k": value}
    return value


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Each container in a tree, with each of its keys."""
    keys = range(len(tree)) if isinstance(tree, list) else list(tree)
    for key in keys:
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from places(tree[key])


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    tree = copy.deepcopy(VALID)
    for _ in range(draw(st.integers(1, 3))):
        found = list(places(tree))
        if not found:
            break
        holder, key = draw(st.sampled_from(found))
        change = draw(st.sampled_from(["drop", "rename", "replace", "replace", "wrap", "swap"]))
        if change == "drop":
            del holder[key]
        elif change == "rename" and isinstance(holder, dict):
            name = draw(st.sampled_from([key[:-1], key + "s", key.upper(), "x", "", "a.b"]))
            holder[name] = holder.pop(key)
        elif change == "wrap":
            holder[key] = draw(
                st.sampled_from([[holder[key]], {"x": holder[key]}, str(holder[key])])
            )
        elif change == "swap":
            other, name = draw(st.sampled_from(found))
            holder[key] = copy.deepcopy(other.get(name) if isinstance(other, dict) else other)
        else:
            holder[key] = draw(values())
    return tree


def settled(count: int) -> Any:
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "fuzz_project.py").write_text(PROJECT)
    return folder


def outcome(file: Path, text: str) -> str:
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    said = f"a trainer from {file.name}"
    try:
        load_training(file, project=file.parent)
    except HooklineError as error:
        said = str(error)
    assert file.name in said or "command line" in said
    return "a trainer" if said.startswith("a trainer from") else "an error"


def test_what_is_mutated_here_is_valid(project: Path) -> None:
    training = load_training(_write(project / "valid.json", VALID), project=project)
    assert training.trainer.hooks.list_hooks()[:2] == ["watch", "mine"]
    training.fit()
    assert training.trainer.status == "completed"


def _write(file: Path, tree: Any) -> Path:
    file.write_text(json.dumps(tree))
    return file


@pytest.mark.slow
@settled(700)
@given(tree=mutated())
def test_a_mutated_configuration_is_an_error_or_a_trainer(
    project: Path, tree: dict[str, Any]
) -> None:
    event(outcome(project / "mutated.json", json.dumps(tree)))
