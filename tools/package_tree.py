"""The tree of the package: its folders with the first line of their docstring."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "hookline"


def folders() -> str:
    """Return the folders alone, each with the first line of its docstring."""
    found = [PACKAGE / layer for layer in reversed(_layers()) if (PACKAGE / layer).is_dir()]
    lines = [f"  {path.name + '/':<14} {_purpose(path / '__init__.py')}" for path in found]
    return "\n".join(["```text", "src/hookline/", *lines, "```"])


def _layers() -> list[str]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    return list(next(one["layers"] for one in contracts if one["type"] == "layers"))


def _purpose(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0].rstrip(".:")
