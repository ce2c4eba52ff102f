"""`hookline checkpoints` as a user meets it: real processes, what they print and how they end."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run_command, run_hookline, run_in_process
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

from hookline.checkpoint import CheckpointError, save_checkpoint, set_pointer
from hookline.checkpoint.export import export_weights
from hookline.runs import Run


def checkpoints(
    *arguments: str | int | Path, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return run_in_process("checkpoints", *arguments, cwd=cwd)


def printed(*arguments: str | int | Path, cwd: Path | None = None) -> str:
    done = checkpoints(*arguments, cwd=cwd)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    return done.stdout


def refused(*arguments: str | int | Path, code: int = 1, cwd: Path | None = None) -> str:
    done = checkpoints(*arguments, cwd=cwd)
    assert (done.returncode, done.stdout) == (code, "")
    assert len(done.stderr.splitlines()) == 1
    return done.stderr


class Tied(nn.Module):
    """A model whose output layer has the weights of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.inner = nn.Linear(3, 3).to(torch.bfloat16)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def averages(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.float() + 1 for name, value in model.named_parameters()}


LOSSES = {100: 3.0, 200: 1.0, 300: float("nan"), 400: 2.0, 500: 2.5}


class SavedRun:
    """A run that ended, with five checkpoints and one that was saved after a crash."""

    def __init__(self, folder: Path, status: str | None = "completed") -> None:
        self.root = folder
        self.run = Run.create(folder / "runs", config={}, seed=0, hooks=[])
        self.folder = self.run.path / "checkpoints"
        torch.manual_seed(0)
        self.model = Tied()
        for step, loss in LOSSES.items():
            self.save(f"step_{step:06d}", step, metrics={"val/loss": loss})
        self.save("crash", 550, emergency=True)
        set_pointer(self.folder, "last", self.folder / "step_000500")
        set_pointer(self.folder, "best", self.folder / "step_000200")
        if status is not None:
            self.run.close(status)

    def save(self, name: str, step: int, **info: Any) -> Path:
        optimizer = torch.optim.AdamW(self.model.parameters())
        state = {
            "optimizers": [optimizer.state_dict()],
            "hooks": {"ema": {"averages": averages(self.model), "updates": 3}},
            "step": step,
            "numbers": {1: (2, 3)},
        }
        info = {"step": step, "epoch": step // 200, "run_id": self.run.id, **info}
        weights = self.model.state_dict()
        return save_checkpoint(self.folder / name, model=weights, state=state, info=info)

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if path.is_dir())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    return SavedRun(tmp_path_factory.mktemp("saved"))


def copy_of(saved: SavedRun, folder: Path) -> Path:
    """Return a copy of the run's folder, to be changed."""
    return Path(shutil.copytree(saved.run.path, folder / saved.run.path.name))


def flip_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


# -- list -----------------------------------------------------------------------------------------


def test_checkpoints_are_listed_the_oldest_first(saved: SavedRun) -> None:
    done = run_hookline("checkpoints", "list", saved.run.id, cwd=saved.root)
    assert (done.returncode, done.stderr) == (0, "")
    heads, *rows = done.stdout.splitlines()
    assert heads.split() == ["checkpoint", "step", "epoch", "size", "age", "status", "metrics"]
    found = [re.split(r"  +", row) for row in rows]
    assert [row[0] for row in found] == [*(f"step_{step:06d}" for step in LOSSES), "crash"]
    assert found[1][1:3] == ["200", "1"]
    assert re.fullmatch(r"[\d.]+ kB", found[1][3])
    assert re.fullmatch(r"[\d.]+ (s|min \d\d s)", found[1][4])
    assert found[1][5:] == ["complete", "best", "val/loss 1"]
    assert found[2][5:] == ["complete", "val/loss nan"]
    assert found[4][5:] == ["complete", "last", "val/loss 2.5"]
    assert found[5][5:] == ["complete", "emergency"]
    ways = (saved.run.id[-6:], saved.run.path, saved.folder, saved.folder / "step_000100")
    for way in ways:
        told = json.loads(printed("list", way, "--json", cwd=saved.root))
        assert (told[1]["step"], told[1]["is_best"], told[1]["damage"]) == (200, True, None)
    assert (told[2]["metrics"], told[5]["is_emergency"]) == ({"val/loss": "NaN"}, True)


def test_damaged_checkpoints_are_listed_with_the_file(saved: SavedRun, tmp_path: Path) -> None:
    run = copy_of(saved, tmp_path)
    os.truncate(run / "checkpoints" / "step_000300" / "model.safetensors", 10)
    (run / "checkpoints" / "step_000400" / "manifest.json").unlink()
    text = printed("list", run)
    assert re.search(r"^step_000300 +damaged +model.safetensors has 10 by", text, re.MULTILINE)
    assert re.search(r"^step_000400 +damaged +manifest.json is missing", text, re.MULTILINE)
    found = json.loads(printed("list", run, "--json"))
    assert {one["name"] for one in found if one["damage"]} == {"step_000300", "step_000400"}


def test_a_run_without_checkpoints_is_no_error(tmp_path: Path) -> None:
    run = Run.create(tmp_path, config={}, seed=0, hooks=[])
    run.close()
    assert "contains no checkpoints" in printed("list", run.path)
    assert json.loads(printed("list", run.path, "--json")) == []
    assert "contains no checkpoints" in refused("verify", run.path)


# -- verify ---------------------------------------------------------------------------------------


def test_a_checkpoint_is_chosen_by_name_step_pointer_and_folder(saved: SavedRun) -> None:
    for choice, name in (
        *(("best", "step_000200"), ("last", "step_000500"), ("300", "step_000300")),
        ("step_000400", "step_000400"),
    ):
        (found,) = json.loads(printed("verify", saved.run.path, "-c", choice, "--json"))
        assert found["name"] == name
    (found,) = json.loads(printed("verify", saved.folder / "crash", "--json"))
    assert found["name"] == "crash"
    error = refused("verify", saved.run.path, "--checkpoint", "step_000201")
    assert "There is no checkpoint 'step_000201'" in error
    assert "Did you mean 'step_000200'?" in error
    assert "'crash'" in error


def test_verifying_names_the_file_that_has_changed(saved: SavedRun, tmp_path: Path) -> None:
    text = printed("verify", saved.run.id, cwd=saved.root)
    assert "6 checkpoints verified, 0 damaged." in text
    run = copy_of(saved, tmp_path)
    flip_bit(run / "checkpoints" / "step_000200" / "state.safetensors")
    (run / "checkpoints" / "step_000300" / "manifest.json").write_text("{}")
    done = checkpoints("verify", run)
    assert done.returncode == 1
    assert re.search(r"step_000200 +state\.safetensors has changed", done.stdout)
    assert re.search(r"step_000300 +manifest\.json is not the manifest", done.stdout)
    assert re.search(r"step_000100 +ok", done.stdout)
    assert "6 checkpoints verified, 2 damaged." in done.stdout
    done = checkpoints("verify", run, "--json")
    assert done.returncode == 1
    damage = {one["name"]: one["damage"] for one in json.loads(done.stdout)}
    assert [name for name, text in damage.items() if text] == ["step_000200", "step_000300"]
    assert "1 checkpoint verified" in printed("verify", run, "-c", "last")


# -- export ---------------------------------------------------------------------------------------


def test_an_exported_file_is_plain_safetensors(saved: SavedRun, tmp_path: Path) -> None:
    file = tmp_path / "out" / "model.safetensors"
    text = printed("export", saved.run.id, "-c", "best", "-o", file, cwd=saved.root)
    assert re.search(r"^checkpoint +runs/.*/step_000200$", text, re.MULTILINE)
    assert re.search(r"^tied +head\.weight is embedding\.weight$", text, re.MULTILINE)
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    state = saved.model.state_dict()
    loaded = load_file(file)
    assert loaded.keys() == state.keys() - {"head.weight"}
    assert all(torch.equal(loaded[name], state[name]) for name in loaded)
    assert loaded["inner.weight"].dtype is torch.bfloat16
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt", "head.weight": "embedding.weight"}
    fresh = Tied()
    assert load_model(fresh, file) == (set(), [])
    assert torch.equal(fresh.head.weight, saved.model.head.weight)


def test_a_file_is_replaced_only_when_asked(saved: SavedRun, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_text("mine")
    for out in (file, tmp_path):  # into a folder, as model.safetensors
        error = refused("export", saved.run.path, "-o", out, code=2)
        assert f"'{file}' exists" in error
        assert "--force" in error
    assert file.read_text() == "mine"
    with pytest.raises(CheckpointError, match="exists"):
        export_weights(saved.folder / "step_000100", file)
    printed("export", saved.run.path, "-o", tmp_path, "--force")
    assert load_file(file)


def test_an_export_changes_no_checkpoint(saved: SavedRun, tmp_path: Path) -> None:
    path = saved.folder / "step_000100"
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(CheckpointError, match="is a checkpoint"):
        export_weights(path, path / "model.safetensors", replace=True)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_the_average_is_exported_in_the_weights_dtypes(saved: SavedRun, tmp_path: Path) -> None:
    done = export_weights(saved.folder / "step_000100", tmp_path / "ema", averaged=True)
    loaded, expected = load_file(done.path), averages(saved.model)
    assert loaded.keys() == expected.keys()
    assert loaded["inner.weight"].dtype is torch.bfloat16
    assert torch.equal(loaded["embedding.weight"], expected["embedding.weight"])
    plain = save_checkpoint(tmp_path / "plain", model={"w": torch.ones(2)}, state={}, info={})
    with pytest.raises(CheckpointError, match="no EMA hook has saved it"):
        export_weights(plain, tmp_path / "x", averaged=True)
    state = {"hooks": {"ema": {"averages": {"v": torch.ones(2)}}}}
    other = save_checkpoint(tmp_path / "other", model={"w": torch.ones(2)}, state=state, info={})
    with pytest.raises(CheckpointError, match="lack 'v'"):
        export_weights(other, tmp_path / "x", averaged=True)


def test_names_of_wrapped_models_are_exported_without_the_prefix(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    weights = {f"module._orig_mod.{name}": value for name, value in model.state_dict().items()}
    path = save_checkpoint(tmp_path / "a", model=weights, state={}, info={})
    assert load_file(export_weights(path, tmp_path / "x").path).keys() == {"0.weight", "0.bias"}
    mixed = {"module.w": torch.ones(2), "head.w": torch.ones(2)}
    path = save_checkpoint(tmp_path / "b", model=mixed, state={}, info={})
    assert load_file(export_weights(path, tmp_path / "y").path).keys() == mixed.keys()


def test_what_a_file_cannot_contain_is_said(tmp_path: Path) -> None:
    weights: dict[str, Any] = {"w": torch.ones(2), "layer._extra_state": {"scale": 2}}
    path = save_checkpoint(tmp_path / "a", model=weights, state={}, info={})
    assert export_weights(path, tmp_path / "x").left_out == ["layer._extra_state"]
    weights = {"w": torch.ones(2, dtype=torch.complex128)}
    path = save_checkpoint(tmp_path / "b", model=weights, state={}, info={})
    with pytest.raises(CheckpointError, match=r"torch\.complex128"):
        export_weights(path, tmp_path / "y")
    assert not (tmp_path / "y").exists()


def test_a_failed_export_leaves_nothing(saved: SavedRun, tmp_path: Path) -> None:
    run = copy_of(saved, tmp_path)
    flip_bit(run / "checkpoints" / "step_000500" / "model.safetensors")
    done = run_hookline("checkpoints", "export", run, "-o", tmp_path / "x.safetensors")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    error = done.stderr
    assert "model.safetensors has changed since it was written" in error
    assert "'step_000400'" in error
    (tmp_path / "file").write_text("")
    assert "could not be written" in refused(
        "export", run, "-c", 100, "-o", tmp_path / "file" / "x"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([run.name, "file"])


def test_transformers_loads_an_exported_model_with_tied_weights(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=9)
    model = transformers.GPT2LMHeadModel(config)
    path = save_checkpoint(tmp_path / "a", model=model.state_dict(), state={}, info={})
    export_weights(path, tmp_path / "model.safetensors")
    config.save_pretrained(tmp_path)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    state = model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())
    assert loaded.lm_head.weight is loaded.transformer.wte.weight


# -- the command itself ---------------------------------------------------------------------------


def test_only_exporting_imports_torch(saved: SavedRun) -> None:
    run = str(saved.run.path)
    commands = [
        ["list", run],
        ["verify", run],
    ]
    script = (
        "import sys, hookline.cli.app as app\n"
        f"for words in {commands!r}:\n"
        "    sys.argv = ['hookline', 'checkpoints', *words]\n"
        "    try: app.main()\n"
        "    except SystemExit as end: assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = run_command(sys.executable, "-c", script)
    assert done.returncode == 0, done.stderr


def test_an_unknown_run_is_one_line(saved: SavedRun) -> None:
    assert "There is no run 'zzz' in runs." in refused("list", "zzz", cwd=saved.root)


def save_steps(folder: Path, *steps: int, **info) -> None:
    for step in steps:
        name = "crash" if info else "step"
        save_checkpoint(
            folder / f"{name}_{step}",
            model={},
            state={},
            info={"step": step, "metrics": {}, **info},
        )


def test_a_step_means_the_checkpoint_that_a_run_can_resume_from(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    save_steps(tmp_path, 2, 3, emergency=True)
    for step in (2, 4):
        info = {"step": step, "weights_only": True}
        save_checkpoint(tmp_path / f"weights_{step}", model={}, state={}, info=info)
    for step, name in (("1", "step_1"), ("2", "step_2"), ("3", "crash_3"), ("4", "weights_4")):
        (found,) = json.loads(printed("verify", tmp_path, "-c", step, "--json"))
        assert found["name"] == name
