"""Names from elsewhere, printed: escape sequences, line feeds and markup are shown, not obeyed."""

from __future__ import annotations

import contextlib
import html.parser
import io
import json
import logging
import pickle
import re
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import call_hookline
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from torch import nn

import hookline
from hookline.checkpoint import save_checkpoint
from hookline.cli import text_output
from hookline.dispatch import HookManager
from hookline.errors import ConfigError, HookFailedError, HooklineError, listed, nearest
from hookline.hooks.metric_lookup import log_or_print, require_metric
from hookline.printable import (
    escape_controls,
    message_lines,
    printable,
    printable_lines,
    printable_message,
)
from hookline.probes import DebugProbe
from hookline.runs import Run, open_run
from hookline.text_tables import format_table, join_some
from hookline.trainer.progress import BarProgress, PlainProgress

FAKE = "FAKE all checks passed"
MIXED = {  # several attacks in one name: what is printed of it must not contain any of them
    "controls": "\x1b[31mred\x1b[0m\x1b]8;;https://evil.example\x1b\\click\x1b]8;;\x1b\\"
    f"\x1b]52;c;cm0gLXJmIH4=\x07\x1b[2J\x1b[Hloss\r{FAKE}bad\b\b\bgood\x9b31mred\x9d52;c;eA==\x9c"
    "user\u202egnp.exe\u2066\u2069lo\u200bss\u200d\u2060\ufeff\u00adlo\x00ss\x7flo\udcffss",
    "lines": f"loss\n{FAKE}\n  {FAKE}\n\t{FAKE}\r\n    {FAKE}\u2028{FAKE}\x85{FAKE}\x0b{FAKE}\x0c",
    "html": "<script>alert(1)</script><img src=x onerror=alert(1)>&lt;\"' onmouseover='alert(1)'",
    "markup": "[red]x[/red][link=https://evil.example]y[/link]:smile:",
    "long": "x" * 1_000_000,
}
SHOWN = 8_000  # the longest line: several cells, each of them cut
# Escape sequences of our own: colours, and the line of the bar that is erased.
OWN = re.compile(r"\x1b\[[0-9;]*m|\x1b\[[?]25[hl]|\r\x1b\[K|\r\x1b\[2K|\r")


def assert_clean(text: str, lines: bool = True) -> None:
    """Check that a terminal shows the text as it is, and that no name makes a line of its own."""
    assert_visible(text)
    assert not re.search(f"^[ \t]*{FAKE}", text, re.MULTILINE)
    if lines:
        assert max(map(len, text.split("\n"))) < SHOWN


def assert_visible(text: str) -> None:
    odd = {c for c in set(text) if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
    assert odd <= {"\n", "\t"}, f"{[hex(ord(char)) for char in odd]} are printed"


class Tags(html.parser.HTMLParser):
    """The tags of a page, which have no attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.text = set[str](), ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert not attrs
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def hook_line(*words: str | Path, cwd: Path | None = None) -> str:
    """Return what a command prints on both streams."""
    return call_hookline(*words, cwd=cwd)[1]


@contextlib.contextmanager
def logged() -> Iterator[io.StringIO]:
    """Collect what a program that has configured logging prints."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger("hookline")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield stream
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


# -- files ----------------------------------------------------------------------------------------


def describe(name: str) -> dict[str, Any]:
    """Return fields of a manifest with a name wherever one can be."""
    loader = {"class": name, "length": 3, "batch_size": 2}
    return {
        "name": name,
        "tags": [name, *[name[:50]] * 200],
        "git": {"commit": name, "branch": name, "remote": name},
        "config_hash": name,
        "hooks": [{"name": name, "options": {name: name}}, *[{"name": name[:50]}] * 200],
        "versions": {name: name, **{f"package{i}": "1" for i in range(200)}},
        "parent": {"run_id": name, "step": name},
        "training": {
            "model": {"class": name, "parameters": 3},
            "optimizers": [{"class": name, "groups": [{"lr": name}]}],
            "schedulers": [{"class": name}],
            "loaders": {name: loader},
            "hparams": {name: name, **{f"option{i}": name[:50] for i in range(200)}},
        },
    }


class Folder:
    """A folder of runs: one with the name in its manifest and its metrics, and a plain one."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.name = root, name
        config = {name: name, "nested": {name: [name, 1]}}
        run = Run.create(root / "runs", config=config, hooks=[], seed=0)
        for step in range(1, 4):
            run.log(step, 0, name, 1.0)
            run.log(step, 0, "train/loss", 1.0)
        for i in range(100):
            run.log(3, 0, f"{name[:50]}{i}", 1.0)
        run.log(3, 0, "note", name, kind="text")
        run.close("error", f"ValueError: {name}")
        manifest = json.loads((run.path / "manifest.json").read_text())
        fields = describe(name.encode(errors="replace").decode())  # others are not JSON
        (run.path / "manifest.json").write_text(json.dumps({**manifest, **fields}))
        with (run.path / "metrics.jsonl").open("a", encoding="utf-8", errors="ignore") as file:
            file.write(f'{{"name": {name[:50]}\n' * 30)
        checkpoints = run.path / "checkpoints"
        model = {name.encode(errors="replace").decode(): torch.ones(2)}
        for step in (1, 2):
            info = {"step": step, "metrics": {name: 1.0}, "run_id": run.id}
            path = checkpoints / f"step_{step}"
            save_checkpoint(path, model=model, state={name: {name: 1}}, info=info)
        damaged = checkpoints / f"step_3{file_name(name)}"
        save_checkpoint(damaged, model=model, state={}, info={"step": 3})
        (damaged / "model.safetensors").write_bytes(b"")
        self.run = run.path
        plain = Run.create(root / "runs", config={"plain": 1}, hooks=[], seed=0)
        plain.close("completed", None)
        self.plain = plain.path


def file_name(name: str) -> str:
    """Return a name as far as a file can have it."""
    short = name.replace("/", "").replace("\x00", "")
    return short.encode(errors="surrogateescape")[:150].decode(errors="surrogateescape")


@pytest.fixture(scope="module", params=MIXED)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("names"), MIXED[request.param])


COMMANDS: dict[str, Callable[[Folder], list[Any]]] = {
    "runs": lambda f: ["runs"],
    "runs show": lambda f: ["runs", "show", f.run],
    "runs diff": lambda f: ["runs", "diff", f.run, f.plain],
    "checkpoints list": lambda f: ["checkpoints", "list", f.run],
    "checkpoints verify": lambda f: ["checkpoints", "verify", f.run],
    "checkpoints export": lambda f: ["checkpoints", "export", f.run, "--force"],
}


@pytest.mark.soak(every=3)
@pytest.mark.parametrize("command", COMMANDS)
def test_names_in_files_are_printed_clean(folder: Folder, command: str) -> None:
    text = hook_line(*COMMANDS[command](folder), cwd=folder.root)
    assert len(text.splitlines()) < 700
    assert_clean(text)


@pytest.mark.soak(every=2)
@pytest.mark.parametrize("command", ["runs show", "runs diff", "checkpoints list"])
def test_names_are_clean_and_markup_is_literal_on_a_terminal(
    folder: Folder, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_output, "terminal_width", lambda: 80)
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = OWN.sub("", hook_line(*COMMANDS[command](folder), cwd=folder.root))
    assert f"\n{FAKE}" not in text
    assert_clean(re.sub(r"\n {2,}", " ", text))  # the parts of a long line are indented
    if "[red]" in folder.name:
        assert folder.name in text


def test_opened_runs_are_shown_clean(folder: Folder) -> None:
    run = open_run(folder.run)
    assert_clean(repr(run))
    assert_clean(str(run))
    assert "\n" not in repr(run)
    assert "… and" in str(run)


def test_html_has_no_tags_of_a_name(folder: Folder) -> None:
    page = Tags(open_run(folder.run)._repr_html_())
    assert page.tags == {"pre"}
    assert_clean(page.text, lines=False)
    assert len(page.text) < 60_000
    if "script" in folder.name:
        assert folder.name in page.text


# -- folders and arguments ------------------------------------------------------------------------

ARGUMENTS: dict[str, Callable[[str], list[Any]]] = {
    "command": lambda name: [name],
    "option": lambda name: ["runs", f"--{name}"],
    "run": lambda name: ["runs", "show", f"x{name}"],
    "runs folder": lambda name: ["runs", "--runs", f"x{name}"],
    "run of checkpoints": lambda name: ["checkpoints", "list", f"x{name}"],
    "hook": lambda name: ["hooks", "show", f"x{name}"],
    "class": lambda name: ["hooks", "show", f"torch.nn.{name}"],
    "number": lambda name: ["demo", "--steps", name],
    "file": lambda name: ["check", f"x{name}.yaml"],
    "python file": lambda name: ["check", f"x{name}.py"],
    "python function": lambda name: ["check", f"x{name}.py:make"],
    "override": lambda name: ["check", "train.yaml", name],
    "override's key": lambda name: ["check", "train.yaml", f"x{name}=1"],
    "written file": lambda name: ["schema", "--out", f"missing/x{name}"],
    "resumed run": lambda name: ["train", "train.yaml", "--resume", f"x{name}"],
}


@pytest.mark.soak(every=4)
@pytest.mark.parametrize("place", ARGUMENTS)
@pytest.mark.parametrize("key", MIXED)
def test_arguments_in_messages_are_clean(key: str, place: str, tmp_path: Path) -> None:
    name = MIXED[key].replace("\x00", "")  # the system passes none
    name = name if key != "long" else name[:100_000]  # nor this
    text = hook_line(*ARGUMENTS[place](name), cwd=tmp_path)
    assert text
    assert_clean(text)


@pytest.mark.soak(every=3)
@pytest.mark.parametrize("key", MIXED)
def test_names_of_folders_in_files_and_in_programs_are_clean(key: str, tmp_path: Path) -> None:
    name = f"x{file_name(MIXED[key])}"
    run = Run.create(tmp_path / name, config={}, hooks=[], seed=0)
    run.close("completed", None)
    renamed = run.path.rename(tmp_path / name / name)
    assert_clean(hook_line("runs", "show", renamed))
    assert_clean(hook_line("checkpoints", "list", renamed))
    (renamed / "manifest.json").unlink()
    assert_clean(hook_line("runs", "show", renamed))
    tree = {name: 1, "trainer": {name: 1}, "hooks": [name]}
    (tmp_path / "train.json").write_text(json.dumps(tree))
    assert_clean(hook_line("check", "train.json", cwd=tmp_path))
    program = f"def make():\n    raise RuntimeError({MIXED[key][:2000]!r})\n"
    (tmp_path / "train.py").write_text(program)
    assert_clean(hook_line("train", "train.py:make", cwd=tmp_path))


# -- training -------------------------------------------------------------------------------------


class Failing(hookline.Hook):
    """A hook whose exception has a name in it."""

    def __init__(self, name: str) -> None:
        self.text = name

    def on_step_end(self) -> None:
        raise ValueError(self.text)


@pytest.mark.parametrize("key", MIXED)
def test_failing_hooks_are_reported_clean(key: str) -> None:
    name = MIXED[key]
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with logged() as log, hookline.attach(model, optimizer, hooks=[]) as session:
        session.hooks.add_hook(Failing(name), name=name)
        for _ in range(3):
            model(torch.ones(1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        session.stop(name)
    assert "DISABLED" in log.getvalue()
    if key not in ("lines", "long"):  # a traceback has the whole text of the exception
        assert_clean(log.getvalue())


def errors(name: str) -> Iterator[Callable[[], object]]:
    """Return calls that raise errors with the name in them."""
    manager = HookManager([])
    yield lambda: manager.get_hook(name)
    yield lambda: manager.add_hook(Failing(""), before=name)
    yield lambda: hookline.HookRegistry({"loop": [name]})
    yield lambda: hookline.HookRegistry({"loop": [{"name": "ema", name: 1}, {"name": name}]})
    yield lambda: require_metric({name: 1.0}, f"x{name}", "EarlyStopping")
    yield lambda: require_metric(
        {f"{name[:500]}{i}": 1.0 for i in range(100)}, "x", "EarlyStopping"
    )
    yield lambda: hookline.TrainerConfig.from_dict({name: 1})
    yield lambda: hookline.EarlyStopping(**{name: 1})
    yield lambda: open_run(f"x{name}".replace("\x00", ""))
    yield lambda: hookline.probe(nn.Linear(1, 1), [f"x{name}"]).__enter__()


@pytest.mark.soak(every=3)
@pytest.mark.parametrize("i", range(len(list(errors("x")))))
@pytest.mark.parametrize("key", MIXED)
def test_errors_are_clean(key: str, i: int) -> None:
    with pytest.raises(Exception) as error:  # noqa: PT011 - which one is not the question
        list(errors(MIXED[key]))[i]()
    if isinstance(error.value, HooklineError):
        assert_clean(str(error.value))


@pytest.mark.parametrize("key", MIXED)
def test_probes_are_shown_clean(key: str) -> None:
    name = MIXED[key].replace(".", "")
    model = nn.Sequential()
    model.add_module(name, nn.Linear(1, 1))
    with hookline.probe(model, [name]) as results, DebugProbe("*", "dead").attach(model) as debug:
        with logged() as log:
            (model(torch.zeros(1)) * 0).sum().backward()
        assert_clean(log.getvalue())
        with pytest.raises(KeyError) as error:
            results[f"x{name}"]
        assert_clean(str(error.value))
    del debug


@pytest.mark.parametrize("key", MIXED)
def test_progress_is_clean(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    stream, name = io.StringIO(), MIXED[key]
    for display in (
        PlainProgress(stream),
        BarProgress(Console(file=stream, force_terminal=True, width=80)),
    ):
        display.start(epochs=1, steps=None)
        display.validation({name: 1.0}, 0, 3)
        display.say(f"run {name}")
        display.end("stopped", None, name)
    assert_clean(OWN.sub("", stream.getvalue() + capsys.readouterr().out))


@pytest.mark.parametrize("key", MIXED)
def test_hooks_print_metrics_clean(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = MIXED[key]
    hook = hookline.ConsoleLogHook()
    hook.on_validation_end(step=1, metrics={name: name, f"{name}2": 1.0})
    hook.on_train_end(step=1, status=name)
    log_or_print(f"EarlyStopping: {name} is 1")
    assert_clean(capsys.readouterr().out)
    with logged() as log:
        logging.getLogger("hookline").warning("%s: %s: %s", name, ValueError(name), Path(name))
        logging.getLogger("hookline").warning(f"The name {name}")
        logging.getLogger("hookline.training").warning("%s", name)
    assert_clean(log.getvalue())


# -- functions ------------------------------------------------------------------------------------

TEXT = st.text(st.characters(codec=None)) | st.sampled_from([n[:500] for n in MIXED.values()])


@given(TEXT, st.integers(0, 300))
def test_printable_text_is_clean_and_short(text: str, limit: int) -> None:
    shown = printable(text, limit)
    assert len(shown) <= max(limit, 1)
    assert "\n" not in shown
    assert_visible(_without_signs(shown))
    assert printable(shown, limit) == shown


@given(TEXT)
def test_escaping_changes_only_what_is_not_visible(text: str) -> None:
    assert_visible(_without_signs(escape_controls(text)))
    assert_visible(_without_signs(printable_message(text)))
    lines = printable_lines(text, 3, 10).split("\n")
    assert len(lines) <= 4
    assert max(map(len, lines[:3])) <= 10
    if text.isascii() and text.isprintable():
        assert escape_controls(text) == text


def _without_signs(text: str) -> str:
    """Leave out joiners, and signs of other scripts that are visible although they are controls."""
    signs = "\u0600-\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd\u200c\u200d"
    return re.sub(f"[{signs}]", "", text)


@given(st.lists(st.tuples(TEXT, TEXT, TEXT), max_size=20))
def test_columns_are_aligned_by_their_width_on_the_terminal(rows: list[tuple[str, ...]]) -> None:
    table = format_table(("a", "b", "c"), rows, limit=10)
    lines = table.split("\n")
    assert_visible(_without_signs(table))
    assert len(lines) == min(len(rows), 10) + 1 + (len(rows) > 10)
    width = max([1, *(cell_len(printable(row[0])) for row in rows[:10])])
    for line, row in zip(lines[1:], rows[:10], strict=False):
        first = printable(row[0])
        assert line.startswith(first.rstrip())
        if printable(row[1]).strip():
            start = first + " " * (width - cell_len(first) + 2)
            assert line.startswith(start + printable(row[1]).rstrip())


def test_lists_in_messages_are_short() -> None:
    assert listed(["a", "b"]) == "'a', 'b'"
    assert listed([]) == "none"
    assert listed(map(str, range(32))).endswith("'29' and 2 more")
    assert nearest("x" * 1_000_000, ["x" * 1_000_001]) == ""
    assert join_some(range(5), 3) == "0, 1, 2, … and 2 more"


def test_the_lines_of_an_exception_are_kept_and_marked() -> None:
    assert str(HookFailedError("first\nsecond\x1b[2J")) == "first\n  | second\\x1b[2J"


def test_only_own_lines_are_lines_of_a_message() -> None:
    own = message_lines("Problems:", "one", "two\n  of a name")
    assert own == "Problems:\n  one\n  two\\n  of a name"
    assert str(HooklineError(own)) == own
    assert str(ConfigError(str(HooklineError(own)))) == own
    assert str(HooklineError("one\n  of a name", "two")) == "one\\n  of a name\ntwo"
    assert str(pickle.loads(pickle.dumps(HooklineError(own)))) == own
    assert message_lines("All:", own, "last") == f"All:\n  Problems:{own[9:]}\n  last"
    assert message_lines(*range(500)).endswith("\n  199\n  … and 300 more lines")


def test_the_stored_values_are_not_changed(folder: Folder) -> None:
    assert open_run(folder.run).manifest["name"] == folder.name.encode(errors="replace").decode()
    assert len(open_run(folder.run).checkpoints()) == 2
