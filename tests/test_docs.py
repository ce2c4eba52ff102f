"""The documentation matches the code: examples run, print what is shown, and name what exists.

The Python blocks of one page run in order, in one namespace. A text block right after a Python
block is what that block prints; numbers with a decimal point, spaces and line breaks may differ.
"""

from __future__ import annotations

import ast
import gc
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(r"^(?P<indent> *)```(?P<kind>[\w-]*)")


@dataclass
class Block:
    """A fenced block: its language, its text, and the number of its first line."""

    kind: str
    text: str
    line: int
    end: int


def blocks_of(page: Path) -> Iterator[Block]:
    lines = page.read_text(encoding="utf-8").split("\n")
    i = 0
    while i < len(lines):
        fence = FENCE.match(lines[i])
        i += 1
        if fence is None:
            continue
        first, indent = i, len(fence["indent"])
        while lines[i].strip() != "```":
            i += 1
        text = "\n".join(line[indent:] for line in lines[first:i])
        i += 1
        yield Block(fence["kind"], text, first + 1, i)


def words(text: str) -> list[str]:
    """Split output into words; all numbers with a decimal point are equal."""
    return re.sub(r"-?\d+\.\d+(e[+-]?\d+)?", "#", text).split()


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


PYTHON_PAGES = [page for page in PAGES if any(b.kind == "python" for b in blocks_of(page))]
COMMANDS = [
    pytest.param(command, id=f"{name_of(page)}:{block.line + i} {command}")
    for page in PAGES
    for block in blocks_of(page)
    if block.kind in ("bash", "console", "sh")
    for i, line in enumerate(block.text.split("\n"))
    if (command := line.removeprefix("$ ").split("#")[0].strip())
]


@pytest.fixture
def quick() -> Iterator[None]:
    """Use one thread, as the models are small, and collect no garbage of loaded libraries."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(before)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("page", PYTHON_PAGES, ids=name_of)
def test_the_code_of_a_page_runs_and_prints_what_it_shows(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": page.stem}
    blocks = list(blocks_of(page))
    lines = page.read_text(encoding="utf-8").split("\n")
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        if block.kind != "python":
            continue
        where = f"{name_of(page)}:{block.line}"
        # With empty lines before it, line numbers in a traceback are those of the page.
        code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
        capsys.readouterr()
        try:
            exec(code, names)
        except Exception as error:
            error.add_note(f"in the block at {where}")
            raise
        printed = capsys.readouterr().out
        if following is not None and following.kind == "text":
            between = lines[block.end : following.line - 2]
            if not "".join(between).strip():
                assert words(printed) == words(following.text), f"{where} prints:\n{printed}"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_is_shown_exists(command: str) -> None:
    program, *arguments = shlex.split(command)
    if program == "make":
        done = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    elif program == "pip" and arguments[0] == "install":
        _check_pip(arguments[1:])
    elif program == "python":
        done = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
    elif "/" in program:
        assert (ROOT / program).exists()
    else:
        pytest.fail(f"No rule says how to check `{command}`: add one here.")


def _check_pip(arguments: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for word in arguments:
        if word in ("-e", "--editable"):
            continue
        target = re.fullmatch(r"\.(?:\[(?P<extras>[\w,-]+)\])?", word)
        assert target, f"pip install {word}: Hookline is installed from the checkout"
        for extra in (target["extras"] or "").split(","):
            assert not extra or extra in project["optional-dependencies"]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_says_what_it_is(page: Path) -> None:
    known = {"python", "text", "bash", "console", "sh", "yaml", "toml"}
    unknown = [f"{name_of(page)}:{b.line - 1}" for b in blocks_of(page) if b.kind not in known]
    assert not unknown, f"blocks without a language are not checked: {unknown}"


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_to_files_lead_somewhere(name: str) -> None:  # mkdocs checks those within docs/
    text = (ROOT / name).read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert not missing


def test_every_page_is_at_most_2000_words_of_text() -> None:
    generated = {"configuration_reference.md", "trainer_config.md"}
    long = [
        f"{name_of(page)}: {words_in} words"
        for page in sorted((ROOT / "docs").glob("*.md"))
        if page.name not in generated
        and (words_in := len(page.read_text(encoding="utf-8").split())) > 2000
    ]
    assert not long, f"split these pages, one topic each: {long}"


# -- the call paths of CONTRIBUTING ----------------------------------------------------------------


def call_paths() -> dict[str, str]:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.split("## Call paths")[1].split("\n## ")[0]
    _, *paths = re.split(r"^### ", section, flags=re.MULTILINE)
    return {path.split("\n")[0]: path for path in paths}


def names_in(tree: ast.AST, prefix: str = "") -> set[str]:
    found = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found |= {prefix + node.name, *names_in(node, f"{prefix}{node.name}.")}
    return found


def test_contributing_shows_three_call_paths_as_numbered_lists() -> None:
    paths = call_paths()
    assert len(paths) == 3
    for title, path in paths.items():
        steps = re.findall(r"^(\d+)\. ", path, re.MULTILINE)
        assert steps == [str(i + 1) for i in range(len(steps))], title
        assert len(steps) >= 5, title


def test_every_name_in_the_call_paths_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    entries = re.findall(r"`([\w/]+\.py)(?::([\w.]+))?`", text.split("## Call paths")[1])
    assert len(entries) > 15
    missing = []
    for path, name in entries:
        file = ROOT / "src" / "hookline" / path
        if not file.exists() or (
            name and name not in names_in(ast.parse(file.read_text(encoding="utf-8")))
        ):
            missing.append(f"{path}:{name}")
    assert not missing
