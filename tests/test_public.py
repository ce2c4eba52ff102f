"""The public surface: what `import hookline` offers, and what it costs."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import hookline

PACKAGES = ["checkpoint", "config_files", "probes", "runs", "trainer", "updates"]


def names_for_type_checkers(package):
    """Return the names that a package imports or assigns under `if TYPE_CHECKING:`."""
    tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    names = [alias.name for node in block.body for alias in getattr(node, "names", ())]
    return names + [target.id for node in block.body for target in getattr(node, "targets", ())]


def test_what_type_checkers_see_is_what_can_be_imported():
    stub = ast.parse(Path(hookline.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    names = [alias.name for node in stub.body for alias in getattr(node, "names", ())]
    names += [target.id for node in stub.body for target in getattr(node, "targets", ())]
    assert sorted([*hookline.__all__, "config_files", "probes", "updates"]) == sorted(names)
    assert all(getattr(hookline, name) is not None for name in names)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_offers_the_names_that_type_checkers_see(name):
    package = importlib.import_module(f"hookline.{name}")
    eager = {"runs": {"RunError"}, "checkpoint": {"CheckpointError"}}.get(name, set())
    assert set(package.__all__) == {*names_for_type_checkers(package), *eager}
    assert all(getattr(package, name) is not None for name in package.__all__)


@pytest.mark.parametrize("name", [f"hookline.{name}" for name in PACKAGES])
def test_dir_lists_the_public_names_before_they_are_used(name):
    code = (
        f"import {name} as package; import sys; sys.exit(dir(package) != sorted(package.__all__))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", PACKAGES)
def test_a_name_that_a_package_does_not_have_is_an_attribute_error(name):
    package = importlib.import_module(f"hookline.{name}")
    with pytest.raises(AttributeError, match=f"'hookline.{name}' has no attribute 'Trainr'"):
        _ = package.Trainr


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
    errors = [getattr(hookline, name) for name in hookline.__all__ if name.endswith("Error")]
    assert all(issubclass(error, hookline.HooklineError) for error in errors)


def test_dir_shows_public_packages_too():
    code = "import hookline; print(*dir(hookline)); hookline.config_files.load_training"
    shown = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert shown == sorted([*hookline.__all__, "config_files", "probes", "updates"])


def test_every_lazy_package_is_tested():
    modules = pkgutil.walk_packages(hookline.__path__, "hookline.")
    packages = [importlib.import_module(module.name) for module in modules if module.ispkg]
    lazy = {package.__name__ for package in packages if hasattr(package, "__getattr__")}
    assert lazy == {f"hookline.{name}" for name in PACKAGES}
