"""The manifest of a run: the code, the configuration, the hooks, the surroundings."""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loops import batches, make
from torch.nn import functional as F
from warm_processes import run_warm

import hookline
from hookline.runs import Run, open_run
from hookline.runs.environment import installed_packages, read_git_state
from hookline.runs.jsonable import canonical_json, config_hash


@pytest.fixture(autouse=True)
def _read_git_once() -> None:
    """Ask git each time, unlike in other files."""


def git(folder: Path, *words: str) -> str:
    options = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main")
    done = subprocess.run(
        ["git", *options, *words], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "train.py").write_text("lr = 0.1\n")
    (folder / ".gitignore").write_text("*.pyc\n")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "one")
    return folder


# -- code -----------------------------------------------------------------------------------------


def test_a_clean_repository_has_commit_and_branch_and_no_diff(repository: Path) -> None:
    (repository / "cache.pyc").write_text("ignored")
    facts = read_git_state(repository)
    assert facts == {
        "commit": git(repository, "rev-parse", "HEAD"),
        "branch": "main",
        "dirty": False,
        "diff_sha256": None,
        "untracked": 0,
        "folder": str(repository),
        "problem": None,
    }


def test_changed_files_make_it_dirty_and_the_hash_tells_changes_apart(repository: Path) -> None:
    hashes = []
    for text in ("lr = 0.2\n", "lr = 0.3\n", "lr = 0.2\n"):
        (repository / "train.py").write_text(text)
        facts = read_git_state(repository)
        assert facts["dirty"] is True
        hashes.append(facts["diff_sha256"])
    git(repository, "add", ".")  # staged or not is the same
    hashes.append(read_git_state(repository)["diff_sha256"])
    assert hashes[0] == hashes[2] == hashes[3] != hashes[1]
    assert len(hashes[0]) == 64


def test_the_hash_of_the_diff_does_not_depend_on_how_the_user_likes_diffs(
    repository: Path,
) -> None:
    (repository / "train.py").write_text("lr = 0.2\n")
    before = read_git_state(repository)["diff_sha256"]
    settings = {
        "diff.noprefix": "true",
        "color.ui": "always",
        "diff.context": "0",
        "diff.algorithm": "patience",
        "diff.external": "false",
        "diff.mnemonicPrefix": "true",
    }
    for name, value in settings.items():
        git(repository, "config", name, value)
    assert read_git_state(repository)["diff_sha256"] == before


def test_a_folder_within_a_repository_a_detached_head_and_a_git_hook(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = repository / "inner"
    inner.mkdir()
    git(repository, "checkout", "-q", "--detach")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))  # as git sets it for its hooks
    facts = read_git_state(inner)
    assert facts["commit"] is not None
    assert facts["branch"] is None


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("exec sleep 30", "TimeoutExpired"),
        ("echo 'fatal: detected dubious ownership' >&2; exit 128", "detected dubious ownership"),
        ("echo nonsense", "KeyError"),
    ],
)
def test_a_git_that_hangs_fails_or_talks_nonsense_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, problem: str
) -> None:
    from hookline.runs import environment as module

    (tmp_path / "git").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    if "sleep" in script:
        monkeypatch.setattr(module, "_GIT_SECONDS", 0.3)
    run = Run.create(tmp_path / "runs", config={}, seed=0, hooks=[])
    assert problem in run.manifest["git"]["problem"]
    run.close()


WRITES = """
import sys
from hookline.runs import Run
run = Run.create(sys.argv[1], config={}, seed=0, hooks=[])
print(run.manifest["git"]["commit"], run.manifest["git"]["folder"])
"""


def test_the_commit_is_that_of_the_program_and_else_of_the_working_folder(
    repository: Path, tmp_path: Path
) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    (repository / "train.py").write_text(WRITES)
    (tmp_path / "loose.py").write_text(WRITES)

    def said(*command: str | Path, cwd: Path) -> list[str]:
        words = [*map(str, command), str(tmp_path / "runs")]
        return run_warm(words, cwd=cwd, environment=os.environ).stdout.split()

    assert said(repository / "train.py", cwd=tmp_path) == [commit, str(repository)]
    assert said(tmp_path / "loose.py", cwd=repository) == [commit, str(repository)]
    assert said("-c", WRITES, cwd=repository) == [commit, str(repository)]
    assert said(tmp_path / "loose.py", cwd=tmp_path) == ["None", str(tmp_path)]


# -- configuration --------------------------------------------------------------------------------

numbers = st.integers() | st.floats(allow_nan=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
configs = st.dictionaries(st.text(), values, max_size=6)


def shuffled(value: Any) -> Any:
    """The same meaning, written in another way."""
    if isinstance(value, dict):
        return {key: shuffled(inner) for key, inner in reversed(value.items())}
    if isinstance(value, list):
        return tuple(shuffled(inner) for inner in value)
    if type(value) is int and abs(value) < 2**53:
        return float(value)
    return value


@given(configs)
def test_the_same_meaning_has_the_same_hash_whatever_the_order_of_keys(config: Any) -> None:
    assert config_hash(config) == config_hash(shuffled(config))


def test_the_hash_stays_what_it_is_from_version_to_version() -> None:
    config = {"b": [1, 2.5, True, None], "a": {"é": "x"}}
    assert canonical_json(config) == '{"a":{"é":"x"},"b":[1,2.5,true,null]}'
    assert config_hash(config).startswith("9b7698d168ab")


def test_booleans_numbers_and_words_are_told_apart() -> None:
    assert len({config_hash({"a": value}) for value in (1, True, "1", None, [1], 1.5)}) == 6


@dataclass
class Options:
    lr: float = 0.1
    layers: int = 2


@pytest.mark.parametrize(
    "config", [Options(), SimpleNamespace(layers=2, lr=0.1), argparse.Namespace(layers=2, lr=0.1)]
)
def test_a_configuration_of_another_class_has_the_hash_of_its_fields(config: Any) -> None:
    assert config_hash(config) == config_hash({"lr": 0.1, "layers": 2})


# -- surroundings ---------------------------------------------------------------------------------


def test_versions_packages_platform_devices_and_process_are_told(tmp_path: Path) -> None:
    run = Run.create(tmp_path, config={}, seed=0, hooks=[], device="cpu")
    found = json.loads((run.path / "manifest.json").read_text())
    run.close()
    assert found["packages"]["pytest"] == pytest.__version__
    assert found["packages"] == installed_packages()
    assert list(found["packages"]) == sorted(found["packages"])
    assert len(found["packages_sha256"]) == 64
    devices = found["devices"]
    assert (devices["used"], devices["cpus"]) == ("cpu", os.cpu_count())
    assert devices["threads"] == torch.get_num_threads()
    assert devices["cuda"] == torch.cuda.device_count()
    (part,) = found["attempts"]
    assert part["pid"] == os.getpid()
    assert part["git"] == found["git"]
    assert "packages" not in part


def test_a_manifest_tells_the_seed_that_torch_was_given(tmp_path: Path) -> None:
    torch.manual_seed(77)
    run = Run.create(tmp_path, config={}, seed=None, hooks=[])
    run.close()
    assert (run.manifest["seed"], run.manifest["torch_seed"]) == (None, 77)


# -- the trainer's manifest -----------------------------------------------------------------------


class Watch(hookline.Hook):
    def on_step_end(self, step: int) -> None:
        pass


class Stops(hookline.Hook):
    def __init__(self, after: int) -> None:
        self.after = after

    def on_step_end(self, trainer: Any, step: int) -> None:
        if step == self.after:
            trainer.save_checkpoint()
            trainer.stop("enough")


def trainer(runs: Path | None, *hooks: hookline.Hook, **options: Any) -> hookline.Trainer:
    config = hookline.TrainerConfig(runs=runs, progress="off", seed=3, **options)
    return hookline.Trainer(config, *make(), loss_fn=F.mse_loss, hooks=hooks)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith("Run ")]


@pytest.mark.parametrize("error", [OSError("no report"), KeyboardInterrupt()])
def test_a_critical_failure_at_the_end_of_training_is_how_the_run_ended(
    tmp_path: Path, error: BaseException
) -> None:
    class Report(hookline.Hook):
        critical = True

        def on_train_end(self) -> None:
            raise error

    training = trainer(tmp_path, Report())
    with pytest.raises((hookline.HooklineError, KeyboardInterrupt)):
        training.fit(batches(1))
    (folder,) = tmp_path.iterdir()
    run = open_run(folder)
    status = "error" if isinstance(error, OSError) else "interrupted"
    assert run.status == run.manifest["attempts"][-1]["status"] == training.status == status
    assert run.events("end")[0]["status"] == status
    assert str(error) in run.manifest["last_error"]


def test_a_trainers_manifest_names_each_hook_with_its_options(tmp_path: Path) -> None:
    from hookline.hook import HookGroup
    from hookline.options import BuiltIn

    class Reports(BuiltIn):
        """Says something.

        Args:
            frequency: how often.
        """

        hookline_group = HookGroup.MONITOR

        def __init__(self, frequency: int = 10) -> None:
            self.frequency = frequency

        def on_step_end(self) -> None:
            pass

    one = trainer(tmp_path, Reports(frequency=5))
    one.add_hook(Watch(), "eyes", every=2, enabled=False)
    one.fit(batches(1))
    first, second, _ = one.run.manifest["hooks"]
    assert first["name"] == "eyes"
    assert first["class"] == f"{__name__}.Watch"
    assert (first["kind"], first["enabled"], first["options"]) == ("loop", False, {})
    assert "2" in first["schedule"]
    assert (second["name"], second["enabled"]) == ("reports", True)
    assert second["options"]["frequency"] == 5
    assert one.run.manifest["devices"]["used"] == "cpu"
    parts = {name: one.run.manifest[name] for name in ("config", "hooks", "training")}
    assert one.run.manifest["config_hash"] == config_hash(parts)


def described(
    runs: Path, *, lr: float = 0.1, step_size: int = 3, batch_size: int = 4, **attributes: Any
) -> hookline.Trainer:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    groups = [{"params": model[0].parameters(), "lr": lr}, {"params": model[1].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size)
    data = torch.utils.data.TensorDataset(torch.randn(8, 3), torch.randn(8, 1))
    config = hookline.TrainerConfig(runs=runs, progress="off", seed=3)
    hooks = attributes.pop("hooks", ())
    made = hookline.Trainer(config, model, optimizer, scheduler, loss_fn=F.mse_loss, hooks=hooks)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made.fit(torch.utils.data.DataLoader(data, batch_size=batch_size), [data[:]])


def test_the_manifest_says_what_a_training_from_python_consists_of(tmp_path: Path) -> None:
    labels = {"hparams": {"width": 2, "api_key": "hush"}, "name": "base", "tags": ["a", "b"]}
    run = open_run(described(tmp_path, **labels).run.path)
    training = run.manifest["training"]
    counts = {"parameters": 11, "trainable": 11}
    assert training["model"] == {"class": "torch.nn.modules.container.Sequential", **counts}
    (optimizer,) = training["optimizers"]
    assert optimizer["class"] == "torch.optim.sgd.SGD"
    first, second = optimizer["groups"]
    assert (first["lr"], first["momentum"], first["parameters"]) == (0.1, 0.9, 8)
    assert (second["lr"], second["momentum"], second["parameters"]) == (0.5, 0.9, 3)
    (scheduler,) = training["schedulers"]
    assert scheduler == {
        **{"class": "torch.optim.lr_scheduler.StepLR", "optimizer": 0},
        **{"step_size": 3, "gamma": 0.1},
    }
    loader = {"class": "torch.utils.data.dataloader.DataLoader", "batch_size": 4, "length": 2}
    assert training["loaders"] == {"train": loader}
    assert training["val_loaders"] == {"val": {"class": "list", "batch_size": None, "length": 1}}
    assert training["hparams"] == {"width": 2, "api_key": "***"}
    assert (run.manifest["name"], run.manifest["tags"]) == ("base", ["a", "b"])
    assert (run.overview()["name"], run.overview()["tags"]) == ("base", ["a", "b"])
    for line in (
        *("name        base", "tags        a, b", "model       Sequential, 11 parameters"),
        *("optimizer   SGD, lr 0.1, 0.5", "scheduler   StepLR", "hparams     width=2, api_key=***"),
        "train data  DataLoader, 2 batches of 4",
    ):
        assert line in str(run).splitlines()


def test_the_hash_covers_what_makes_a_training_from_python(tmp_path: Path) -> None:
    def hash_of(**options: Any) -> str:
        found: str = described(tmp_path, **options).run.manifest["config_hash"]
        return found

    base = hash_of()
    assert hash_of() == base
    assert hash_of(name="another", tags=["x"]) == base  # they only label it
    others = {
        hash_of(lr=0.2),
        hash_of(step_size=4),
        hash_of(batch_size=2),
        hash_of(hparams={"width": 2}),
        hash_of(hooks=[Watch()]),
    }
    assert len(others - {base}) == 5


def test_the_hash_of_a_resumed_run_does_not_depend_on_how_far_it_was(tmp_path: Path) -> None:
    def scheduled(*hooks: hookline.Hook) -> hookline.Trainer:
        model, optimizer = make()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        config = hookline.TrainerConfig(runs=tmp_path, progress="off", scheduler_every="step")
        return hookline.Trainer(
            config,
            model,
            optimizer,
            scheduler,
            loss_fn=F.mse_loss,
            hooks=hooks,
        )

    first = scheduled(Stops(2)).fit(batches(4))
    again = scheduled(Stops(99)).fit(batches(4), resume_from=first.run.path)
    before, after = again.run.manifest["attempts"]
    assert before["config_hash"] == after["config_hash"]
    assert "training" not in before


def test_a_session_describes_its_model_and_optimizers(tmp_path: Path) -> None:
    for lr in (0.1, 0.2):
        model, _ = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        hookline.attach(model, optimizer, runs=tmp_path).__enter__().detach()
    a, b = (open_run(path) for path in sorted(tmp_path.iterdir()))
    assert hookline.runs.diff_runs(a, b)["config"] == {"optimizers.0.groups.0.lr": [0.1, 0.2]}
    assert a.manifest["config_hash"] != b.manifest["config_hash"]


def test_one_line_at_the_start_says_what_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "hookline"):
        one = trainer(tmp_path, Watch())
        one.add_hook(Watch(), "off", enabled=False)
        one.fit(batches(2))
    (line,) = told(caplog)
    manifest = one.run.manifest
    assert line.startswith(f"Run {one.run.id} starts: ")
    assert manifest["git"]["commit"] in line  # the tests' own repository
    assert f"config hash {manifest['config_hash']}" in line
    assert line.endswith("hooks: watch (enabled), off (disabled), identity (enabled)")


def test_a_resumed_run_tells_what_each_part_had(tmp_path: Path) -> None:
    first = trainer(tmp_path, Stops(2), max_epochs=1).fit(batches(4))
    again = trainer(tmp_path, Stops(99), Watch(), max_epochs=2)
    again.fit(batches(4), resume_from=first.run.path)
    manifest = open_run(first.run.path).manifest
    assert again.run.id == first.run.id == manifest["run_id"]
    assert manifest["config"]["max_epochs"] == 2  # what it went on with
    assert [hook["name"] for hook in manifest["hooks"]] == ["stops", "watch", "identity"]
    before, after = manifest["attempts"]
    assert before["config"]["max_epochs"] == 1
    assert [hook["name"] for hook in before["hooks"]] == ["stops", "identity"]
    assert before["config_hash"] != after["config_hash"] == manifest["config_hash"]
    assert "packages" not in before  # they were the same
    assert (before["status"], after["status"]) == ("stopped", "completed")
    assert manifest["created"] == before["started"] < after["started"]


def test_a_part_that_was_killed_is_told_as_lost_when_the_run_goes_on(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import os, signal, sys
        from hookline.runs import Run
        run = Run.create(sys.argv[1], config={}, seed=0, hooks=[])
        run.log(1, 0, "x", 1.0)
        run.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    (path,) = tmp_path.iterdir()
    assert open_run(path).status == "lost"
    run = Run.open(path, resume=True)
    first, second = run.manifest["attempts"]
    run.close()
    assert (first["status"], second["status"]) == ("lost", "training")
    assert first["started"] < first["ended"] <= second["started"]
