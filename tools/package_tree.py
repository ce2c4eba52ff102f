"""The tree of the package: folders with the first line of their docstring, and their files."""

from __future__ import annotations

import ast
import textwrap
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "hookline"
WIDTH = 20


def tree() -> str:
    """Return the tree as a Markdown code block, in the order of the import layers."""
    lines = ["src/hookline/"]
    for layer in reversed(_layers()):
        path = PACKAGE / layer
        lines += _folder(path, 1) if path.is_dir() else [_line(path.with_suffix(".py"), 1)]
    return "\n".join(["```text", *lines, "```"])


def folders() -> str:
    """Return the folders alone, each with the first line of its docstring."""
    found = [PACKAGE / layer for layer in reversed(_layers()) if (PACKAGE / layer).is_dir()]
    lines = [f"  {path.name + '/':<14} {_purpose(path / '__init__.py')}" for path in found]
    return "\n".join(["```text", "src/hookline/", *lines, "```"])


def _layers() -> list[str]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    return list(next(one["layers"] for one in contracts if one["type"] == "layers"))


def _folder(path: Path, depth: int) -> list[str]:
    lines = [_line(path, depth)]
    inside = sorted(one for one in path.iterdir() if one.name != "__init__.py")
    names = " ".join(one.name for one in inside if one.suffix == ".py")
    indent = "  " * (depth + 1)
    lines += textwrap.wrap(names, 110, initial_indent=indent, subsequent_indent=indent)
    for one in inside:
        if (one / "__init__.py").is_file():
            lines += _folder(one, depth + 1)
    return lines


def _line(path: Path, depth: int) -> str:
    is_folder = path.is_dir()
    purpose = _purpose(path / "__init__.py" if is_folder else path)
    name = f"{path.name}/" if is_folder else path.name
    return f"{'  ' * depth}{name:<{WIDTH - 2 * depth}} {purpose}"


def _purpose(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0].rstrip(".:")
