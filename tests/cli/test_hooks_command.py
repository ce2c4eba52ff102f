"""`hookline hooks`, `hookline events`, completion and `--debug`, as a user meets them."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import run_hookline, run_in_process

import hookline as library
from hookline.config.hook_names import BUILT_INS, PROBES, load_hook_class
from hookline.config.registry import HookRegistry
from hookline.events import COMMON, EVENTS, LOOP_MAP


def hookline(
    *arguments: str, cwd: Path | None = None, path: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    if path is not None:
        variables["PYTHONPATH"] = str(path)
    if not variables:
        return run_in_process(*arguments, cwd=cwd)
    return run_hookline(*arguments, cwd=cwd, **variables)


def printed_json(*arguments: str, **options: Any) -> Any:
    done = hookline(*arguments, **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# -- hookline hooks -------------------------------------------------------------------------------


def test_all_hooks_are_listed_with_kind_and_purpose_in_groups() -> None:
    done = hookline("hooks")
    assert done.returncode == 0, done.stderr
    for name in {**BUILT_INS, **PROBES}:
        kind = load_hook_class(name)
        purpose = (kind.__doc__ or "").partition("\n")[0]
        line = rf"^  {name} +{kind.hookline_kind} +{re.escape(purpose)}"
        assert re.search(line, done.stdout, re.MULTILINE), name
    headings = [line for line in done.stdout.splitlines() if line and line[0] != " "]
    assert headings[0] == "Monitor training"
    assert "Transform gradients" in headings
    assert "hookline hooks show NAME" in headings[-1]
    assert "\x1b" not in done.stdout


# -- hookline hooks show --------------------------------------------------------------------------


def test_a_hook_is_shown_with_options_events_cost_and_examples() -> None:
    done = hookline("hooks", "show", "early_stopping")
    assert done.returncode == 0, done.stderr
    for text in (
        "early_stopping: Stops training when a metric has not improved",
        "patience: int",
        "monitor: str (default 'val/loss')",
        "on_validation_end",
        library.EarlyStopping.hookline_cost,
        "trainer.add_hook(hookline.EarlyStopping(",
        "- name: early_stopping",
    ):
        assert text in done.stdout, text


def test_every_example_can_be_pasted() -> None:
    from hookline.cli.hook_facts import describe_hook
    from hookline.config.hook_names import known_hooks

    for name, known in known_hooks().items():
        facts = describe_hook(known)
        registry = HookRegistry(yaml.safe_load(facts["yaml"]))
        assert registry.list_hooks() == [name]
        manager = library.HookManager()
        exec(facts["python"], {"trainer": manager})
        assert manager.list_hooks() == [name]
        given = registry.get_hook(name).hookline_options
        assert repr(given) == repr(manager.get_hook(name).hookline_options)
        json.dumps(facts)


def test_a_hook_of_ones_own_is_shown_by_its_class_path(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import hookline\n"
        "class Mine(hookline.Hook):\n"
        "    '''Does it.'''\n"
        "    def __init__(self, often: int, names: list[str], what): pass\n"
        "    def on_step_end(self, loss, step): pass\n"
    )
    facts = printed_json("hooks", "show", "mine.Mine", "--json", cwd=tmp_path)
    assert facts["purpose"] == "Does it."
    assert facts["events"] == [{"event": "on_step_end", "asks": ["loss", "step"]}]
    python = "from mine import Mine\n\ntrainer.add_hook(Mine(often=1, names=[], what='…'))"
    assert facts["python"] == python
    assert "It only observes" in hookline("hooks", "show", "mine.Mine", cwd=tmp_path).stdout


def test_a_hook_that_could_not_be_registered_says_why(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import hookline\nclass Mine(hookline.Hook):\n    def on_step_edn(self): pass\n"
    )
    done = hookline("hooks", "show", "mine.Mine", cwd=tmp_path)
    assert done.returncode == 1
    assert "Mine.on_step_edn is not an event. Did you mean 'on_step_end'?" in done.stderr


# -- hookline events ------------------------------------------------------------------------------


def test_all_events_are_listed_with_their_arguments_and_the_loop() -> None:
    done = hookline("events")
    assert done.returncode == 0, done.stderr
    for event in EVENTS.values():
        assert f"\n  {event.name}" in done.stdout
        assert event.doc in done.stdout
        assert all(alias in done.stdout for alias in event.aliases)
    words = done.stdout.split()
    assert all(argument.name in words for argument in COMMON)
    assert " ".join(LOOP_MAP.split()) in " ".join(words)


# -- the command as a whole -----------------------------------------------------------------------


def complete(*words: str) -> list[str]:
    line = " ".join(["hookline", *words])
    variables = {
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words)),
        "_HOOKLINE_COMPLETE": "complete_bash",
    }
    done = hookline(**variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_names_of_hooks_and_commands_are_completed() -> None:
    assert complete("hooks", "show", "grad") == [
        "gradient_monitor",
        "gradient_noise_scale",
    ]
    assert complete("hooks", "show", "early") == ["early_stopping"]
    assert "events" in complete("ev")


def test_what_nobody_expected_is_a_line_that_says_where_and_how_to_see_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hookline.events.LOOP_MAP", None)
    done = hookline("events")
    assert (done.returncode, done.stdout) == (1, "")
    assert "Traceback" not in done.stderr
    assert re.search(r"^hookline: AttributeError: .*hooks_command\.py, line \d+", done.stderr)
    assert "For the traceback, run: hookline --debug events" in done.stderr
    for words in (["--debug", "events"], ["events", "--debug"]):
        done = hookline(*words)
        assert done.returncode == 1
        assert "Traceback (most recent call last)" in done.stderr
        assert "AttributeError" in done.stderr


PAGE = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text(encoding="utf-8")


def test_the_page_names_every_command_and_only_those() -> None:
    from typer.main import get_command

    from hookline.cli.app import app

    whole: Any = get_command(app)
    commands = set()
    for name, command in whole.commands.items():
        commands.add(name)
        commands |= {f"{name} {inner}" for inner in getattr(command, "commands", {})}
    rows = re.findall(r"^\| `hookline ([a-z]+(?: [a-z]+)?)", PAGE, re.MULTILINE)
    assert set(rows) == commands
    shown = re.findall(r"^hookline ([a-z]+)", PAGE, re.MULTILINE)
    assert set(shown) <= set(whole.commands)
