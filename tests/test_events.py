"""The event table, compared with the design's table, which is repeated here."""

import importlib.util
import re
import runpy
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from warm_processes import WarmParent

import hookline
from hookline.events import COMMON, EVENTS, LOOP_MAP, NAMES, find_event

ROOT = Path(__file__).resolve().parent.parent

EVERYWHERE = ["trainer", "model", "optimizer", "optimizers", "config", "state"]
EVERYWHERE += ["epoch", "step", "tokens_seen", "status", "run"]

BATCH = "batch batch_idx dataloader_idx(loader_idx) dataloader_name(loader_name)"

# event | also called | own arguments, with their aliases in parentheses
DESIGN = f"""
on_train_start            | on_train_begin                |
on_epoch_start            | on_epoch_begin                | epoch
on_train_batch_start      | on_batch_start on_batch_begin | {BATCH}
on_before_forward         |                               | batch
on_after_forward          |                               | outputs
on_before_backward        |                               | loss
on_after_backward         |                               |
on_gradients_ready        |                               | optimizer_idx
on_gradient_clip          |                               | grad_norm optimizer_idx
on_before_optimizer_step  | on_pre_optimizer_step         | optimizer_idx
on_after_optimizer_step   |                               | optimizer_idx
on_step_skipped           |                               | reason optimizer_idx
on_train_batch_end        | on_batch_end                  | {BATCH} metrics loss
on_step_end               |                               | ctx loss grad_norm lr
on_validation_start       | on_eval_start on_eval_begin   | epoch
on_validation_batch_start | on_eval_batch_start           | {BATCH}
on_validation_batch_end   | on_eval_batch_end             | {BATCH} metrics loss
on_validation_end         | on_eval_end                   | epoch metrics
on_epoch_end              |                               | epoch metrics
on_checkpoint_save        |                               | checkpoint_path(path) step
on_checkpoint_load        |                               | checkpoint_path(path) step
on_exception              |                               | exception
on_train_end              | on_training_end               |
"""


def design_rows():
    for line in DESIGN.strip().splitlines():
        name, aliases, arguments = (cell.strip() for cell in line.split("|"))
        own = {}
        for argument in arguments.split():
            real, _, rest = argument.partition("(")
            own[real] = tuple(rest.rstrip(")").split(",")) if rest else ()
        yield name, tuple(aliases.split()), own


ROWS = list(design_rows())


def test_the_events_are_those_of_the_design_in_its_order():
    assert list(EVENTS) == [name for name, _, _ in ROWS]


@pytest.mark.parametrize(("name", "aliases", "own"), ROWS, ids=lambda row: str(row)[:40])
def test_an_event_is_as_in_the_design_and_a_method_of_the_base_class(name, aliases, own):
    event = EVENTS[name]
    assert event.aliases == aliases
    assert {argument.name: argument.aliases for argument in event.own} == own
    names = {*own, *EVERYWHERE}
    also = {alias for group in own.values() for alias in group}
    assert set(event.arguments) == names
    assert set(event.parameters) == names | also
    for method in (name, *aliases):
        assert find_event(method) is event
        assert getattr(hookline.Hook(), method)(1, two=2) is None


def test_names_are_unique_and_common_arguments_those_of_the_design():
    assert list(NAMES) == [name for row in ROWS for name in (row[0], *row[1])]
    assert [argument.name for argument in COMMON] == EVERYWHERE


def test_schedules_apply_to_per_step_events_only():
    always = {name for name, event in EVENTS.items() if not event.per_step}
    assert always == {
        "on_train_start",
        "on_epoch_start",
        "on_validation_start",
        "on_validation_batch_start",
        "on_validation_batch_end",
        "on_validation_end",
        "on_epoch_end",
        "on_checkpoint_save",
        "on_checkpoint_load",
        "on_exception",
        "on_train_end",
    }


# The map shows one training run. It has "batches" for the batches of validation and "checkpoint"
# for saving and loading, which have no fixed place in the loop.
NOT_DRAWN = {
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_checkpoint_save",
    "on_checkpoint_load",
}


def test_the_loop_map_names_the_events_that_exist_and_only_those():
    drawn = re.findall(r"\bon_\w+", LOOP_MAP)
    assert set(drawn) == set(EVENTS) - NOT_DRAWN
    assert len(drawn) == len(set(drawn))


def test_the_loop_map_has_the_events_in_the_order_of_the_table():
    # The last line has on_train_end, and before it on_exception.
    drawn = re.findall(r"\bon_\w+", LOOP_MAP)
    in_table = [name for name in EVENTS if name not in NOT_DRAWN and name != "on_exception"]
    assert [name for name in drawn if name != "on_exception"] == in_table


# -- files that are generated from the table -------------------------------------------------------


@pytest.fixture
def project(tmp_path, generate):
    """Copy the files that the generator reads and writes."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("images"))
    for name in ("CONTRIBUTING.md", "pyproject.toml", "mkdocs.yml"):
        shutil.copy(ROOT / name, tmp_path / name)
    generate(tmp_path)  # independent of concurrent changes in the work tree
    return tmp_path


def read_files(root):
    files = [path for path in root.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {path: path.read_bytes() for path in files}


def run_generator(root, *options):
    """Generate with the code in a folder, in a process that has imported other libraries only."""
    forget_hookline()
    sys.path[:0] = [f"{root}/tools", f"{root}/src"]
    sys.argv = ["generate.py", *options]
    with suppress_success():
        runpy.run_path(f"{root}/tools/generate.py", run_name="__main__")
    forget_hookline()  # so that the next process, too, starts without it


def forget_hookline():
    for name in [name for name in sys.modules if name.partition(".")[0] == "hookline"]:
        del sys.modules[name]


@contextmanager
def suppress_success():
    try:
        yield
    except SystemExit as ended:
        if ended.code:
            raise


@pytest.fixture(scope="module")
def generate(tmp_path_factory):
    """Return a function that runs the generator: importing what it needs takes ten seconds."""
    folder = tmp_path_factory.mktemp("logs")
    with WarmParent() as parent:

        def generate(root, *options):
            log = folder / f"{len(list(folder.iterdir()))}.txt"
            process = parent.start(run_generator, root, *options, log=log)
            return process.wait(120), process.output

        yield generate


def test_the_generated_files_are_up_to_date(generate):
    assert generate(ROOT, "--check") == (0, "")


def test_a_changed_table_is_detected_and_then_written_to_every_file(project, generate):
    assert generate(project, "--check") == (0, "")
    events = project / "src/hookline/events.py"
    text = events.read_text(encoding="utf-8")
    events.write_text(text.replace('"on_training_end"', '"on_finish"'), encoding="utf-8")

    before = read_files(project)
    code, output = generate(project, "--check")
    assert code == 1
    for name in ("hook.py", "events.md"):
        assert name in output
    assert read_files(project) == before  # checking changes no file

    assert generate(project)[0] == 0
    assert generate(project, "--check") == (0, "")
    for name in ("src/hookline/hook.py", "docs/events.md"):
        assert "on_finish" in (project / name).read_text(encoding="utf-8")
        assert "on_training_end" not in (project / name).read_text(encoding="utf-8")


def test_only_the_text_between_the_markers_is_rewritten(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    spec = importlib.util.spec_from_file_location("generate", ROOT / "tools" / "generate.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- start -->\nold\n<!-- end -->\nafter\n", encoding="utf-8")
    assert tool.rewritten(page, "<!-- start", "<!-- end", "new\n") == (
        "before\n<!-- start -->\n\nnew\n\n<!-- end -->\nafter\n"
    )
