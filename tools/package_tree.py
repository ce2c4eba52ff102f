"""The tree of the package: each file or folder with the first line of its docstring."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "hookline"
WIDTH = 28


def tree() -> str:
    """Return the tree as a Markdown code block, in the order of the import layers."""
    lines = ["src/hookline/", _line("__init__.py", _purpose(PACKAGE / "__init__.py"), 1)]
    for layer in reversed(_layers()):
        path = PACKAGE / layer
        lines += _folder(path, 1) if path.is_dir() else [_file(path.with_suffix(".py"), 1)]
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
    lines = [_line(f"{path.name}/", _purpose(path / "__init__.py"), depth)]
    for inside in sorted(path.iterdir(), key=lambda one: (one.is_dir(), one.name)):
        if (inside / "__init__.py").is_file():
            lines += _folder(inside, depth + 1)
        elif inside.suffix == ".py" and inside.name != "__init__.py":
            lines.append(_file(inside, depth + 1))
    return lines


def _file(path: Path, depth: int) -> str:
    return _line(path.name, _purpose(path), depth)


def _line(name: str, purpose: str, depth: int) -> str:
    return f"{'  ' * depth}{name:<{WIDTH - 2 * depth}} {purpose}".rstrip()


def _purpose(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0].rstrip(".:")
