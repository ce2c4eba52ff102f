"""Packages that a config file may name, and who may allow more."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import pytest
import torch

from hookline import ConfigError
from hookline.config.hook_names import load_object
from hookline.config_files import FileError, load_training
from hookline.config_files.trust import (
    Trust,
    find_import_folder,
    find_project,
    find_trusted_packages,
)


def _functional_names() -> set[str]:
    """The functions of `torch.nn.functional` that it documents."""
    own = ("torch.nn.functional", "torch", "torch._C._nn")
    return {
        name
        for name, function in vars(torch.nn.functional).items()
        if not name.startswith("_")
        and isinstance(function, FunctionType | BuiltinFunctionType)
        and function.__module__ in own
        and function.__doc__
    }


def problem(path: str, folder: Path, *packages: str) -> str | None:
    """Why a class path is not trusted."""
    trust = Trust(folder, packages)
    found = trust.find_problem(path)
    if found is None:
        try:
            found = trust.find_target_problem(path, load_object(path))
        except LookupError as error:
            found = str(error)
    return found


# -- torch and hookline ---------------------------------------------------------------------------


def test_documented_functions_may_be_named(tmp_path: Path) -> None:
    documented = _functional_names()
    assert documented > {"cross_entropy", "mse_loss", "conv2d", "softmax", "interpolate", "pad"}
    for name in documented:
        assert problem(f"torch.nn.functional.{name}", tmp_path) is None, name


def test_other_names_in_the_module_of_functions_are_refused(tmp_path: Path) -> None:
    others = set(vars(torch.nn.functional)) - _functional_names()
    assert {"has_torch_function", "boolean_dispatch", "handle_torch_function"} <= others
    for name in others:
        target = getattr(torch.nn.functional, name)
        if not (isinstance(target, type) and target.__module__ == "torch.nn.functional"):
            assert problem(f"torch.nn.functional.{name}", tmp_path) is not None, name


@pytest.mark.parametrize(
    "path",
    re.findall(
        r"\S+",
        """
        torch.nn.Linear torch.nn.modules.linear.Linear torch.nn.Embedding.from_pretrained
        torch.nn.Parameter torch.nn.utils.rnn.PackedSequence
        torch.nn.parallel.DistributedDataParallel torch.optim.AdamW torch.optim.Adafactor
        torch.optim.lr_scheduler.OneCycleLR torch.optim.swa_utils.SWALR
        torch.utils.data.DataLoader torch.utils.data.TensorDataset
        torch.utils.data.WeightedRandomSampler torch.utils.data.distributed.DistributedSampler
        torch.utils.data.default_collate hookline.EarlyStopping
        hookline.hooks.monitoring.lr_monitor.LRMonitor hookline.probes.Capture
        hookline.updates.ClipNorm
        """,
    ),
)
def test_classes_for_training_may_be_named(tmp_path: Path, path: str) -> None:
    assert problem(path, tmp_path) is None


@pytest.mark.parametrize(
    "path",
    re.findall(
        r"\S+",
        """
        torch.load torch.save torch.compile torch.from_file torch.hub.load
        torch.ops.load_library torch.classes.load_library torch.jit.load
        torch.package.PackageImporter torch.serialization.load
        torch.utils.cpp_extension.load_inline torch.utils.model_zoo.load_url
        torch.utils.data.datapipes.iter.FileOpener
        torch.utils.data.IterDataPipe.register_function torch.utils.data.get_worker_info
        torch.multiprocessing.spawn torch.distributed.run.main torch.nn.init.normal_
        torch.nn.modules.module.register_module_forward_hook torch.nn.modules.module.Any
        torch.nn.modules.container.islice torch.nn.parallel.distributed.inspect.getsource
        torch.nn._reduction.get_enum torch.nn.Module._call_impl torch.nn.Module.mro
        torch.utils.data.dataloader.os.system hookline.open_run hookline.Trainer hookline.attach
        hookline.Hook hookline.hooks.checkpointing.upload.Path
        hookline.EarlyStopping.follows_registration hookline.probes.tap hookline.cli.app.main
        hookline.runs.environment.subprocess.run hookline.config.hook_names.load_object
        """,
    ),
)
def test_what_loads_files_or_runs_code_is_refused(tmp_path: Path, path: str) -> None:
    assert problem(path, tmp_path) is not None


def test_of_all_names_in_torch_only_those_defined_there_are_trusted(tmp_path: Path) -> None:
    """Every name of every imported module of torch, whatever it stands for."""
    packages = ("torch.nn", "torch.optim", "torch.utils.data")
    trusted = 0
    for name, module in sorted(sys.modules.items()):
        if not name.startswith("torch.") or not isinstance(module, ModuleType):
            continue
        if Trust(tmp_path).find_problem(f"{name}.x") is not None:
            continue
        for attribute, target in list(vars(module).items()):
            path = f"{name}.{attribute}"
            if not attribute.isidentifier() or problem(path, tmp_path) is not None:
                continue
            trusted += 1
            is_function = attribute in _functional_names() or attribute.startswith("default_")
            assert is_function or target.__module__.startswith(packages), path
            assert ".datapipes" not in str(target.__module__)
    assert trusted > 300


# -- the project ----------------------------------------------------------------------------------


def test_packages_of_an_environment_in_the_projects_folder_are_not_the_projects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / ".venv" / "lib" / "python3.13" / "site-packages"
    source = tmp_path / "src"
    for folder, name in ((site, "installed_part"), (source, "own_part")):
        folder.mkdir(parents=True)
        (folder / f"{name}.py").write_text("def make(): pass\n")
        monkeypatch.syspath_prepend(folder)
    assert "is not trusted" in str(problem("installed_part.make", tmp_path))
    assert "installed_part" not in sys.modules
    assert problem("own_part.make", tmp_path) is None
    monkeypatch.delitem(sys.modules, "own_part")


def test_the_interpreter_in_the_projects_folder_is_not_the_projects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    library = tmp_path / "env" / "lib" / "python3.13"
    library.mkdir(parents=True)
    (library / "some_library.py").write_text("def make(): pass\n")
    monkeypatch.syspath_prepend(library)
    assert "is not trusted" in str(problem("some_library.make", tmp_path))


def test_the_project_is_that_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, downloads = tmp_path / "project", tmp_path / "downloads"
    for folder in (project / "configs" / "deep", downloads):
        folder.mkdir(parents=True)
        (folder / "train.yaml").touch()
    (downloads / "pyproject.toml").touch()
    monkeypatch.chdir(project / "configs")
    assert find_project() == project / "configs"
    (project / "pyproject.toml").touch()
    assert find_project() == project
    inside, outside = project / "configs" / "deep" / "train.yaml", downloads / "train.yaml"
    assert find_import_folder(inside, project) == inside.parent
    assert find_import_folder(outside, project) == project / "configs"


def test_a_shared_folder_is_no_project_of_what_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "shared" / "mine"
    inner.mkdir(parents=True)
    (tmp_path / "shared" / "pyproject.toml").write_text('[tool.hookline]\ntrust = ["*"]\n')
    monkeypatch.chdir(inner)
    assert find_project() == tmp_path / "shared"
    (tmp_path / "shared").chmod(0o777)
    assert find_project() == inner
    (tmp_path / "shared").chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path / "shared"))
    assert find_project() == inner

    monkeypatch.chdir(tmp_path / "shared")  # the home folder: what is below is not one project
    assert find_import_folder(inner / "train.yaml", tmp_path / "shared") == tmp_path / "shared"


# -- further packages -----------------------------------------------------------------------------


def test_the_caller_the_environment_and_the_project_trust_packages(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.hookline]\ntrust = ["d", "a"]\n')
    variables = {"HOOKLINE_TRUST": "b, c.d,"}
    assert find_trusted_packages(["a"], tmp_path, variables) == ("a", "b", "c.d", "d")
    (tmp_path / "pyproject.toml").write_text("[tool.other]\ntrust = 3\n")
    assert find_trusted_packages([], tmp_path, {}) == ()


@pytest.mark.parametrize(
    ("given", "variable", "settings", "message"),
    [
        (["a b"], "", "", "trust has 'a b'"),
        ([], "a/../b", "", "HOOKLINE_TRUST has 'a/../b'"),
        ([], "", '[tool.hookline]\ntrust = "numpy"', "tool.hookline.trust is 'numpy'"),
        ([], "", "[tool.hookline]\ntrust = [1]", "tool.hookline.trust is [1]"),
        ([], "", "[tool.hookline", "cannot be read"),
    ],
)
def test_what_is_no_package_is_an_error(
    tmp_path: Path, given: list[Any], variable: str, settings: str, message: str
) -> None:
    (tmp_path / "pyproject.toml").write_text(settings)
    with pytest.raises(ConfigError) as caught:
        find_trusted_packages(given, tmp_path, {"HOOKLINE_TRUST": variable})
    assert message in str(caught.value)


CONFIG = """
model: {class_path: torch.nn.Linear, init_args: {in_features: 2, out_features: 2}}
data:
  train: {class_path: torch.utils.data.ConcatDataset, init_args: {datasets: [[1, 2]]}}
optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}
loss_fn: math.dist
trainer: {runs: null, progress: "off"}
"""


def test_a_trusted_package_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.yaml").write_text(CONFIG)
    with pytest.raises(FileError, match=r"'math\.dist' is not trusted"):
        load_training("train.yaml")
    for trust in (["math"], "math"):
        assert load_training("train.yaml", trust=trust).trainer.loss_fn is not None
    Path("pyproject.toml").write_text('[tool.hookline]\ntrust = ["math"]\n')
    assert load_training("train.yaml").trainer.loss_fn is not None
    Path("pyproject.toml").unlink()
    monkeypatch.setenv("HOOKLINE_TRUST", "math")
    assert load_training("train.yaml").trainer.loss_fn is not None


def test_a_link_that_the_user_names_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("real.txt").write_text(CONFIG)
    Path("train.yaml").symlink_to("real.txt")
    assert load_training("train.yaml", trust=["math"]).source == "train.yaml"
