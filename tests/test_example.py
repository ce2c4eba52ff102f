"""The example uses hooks in at most three lines, and trains the same weights without them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "bare_loop.py"
HOOK_MODULES = {"hookline", "hooks"}


class RemoveHooks(ast.NodeTransformer):
    """Remove the code that uses hooks, and collect its line numbers.

    This is: imports of hookline or of the hooks' module, and every statement that uses a name from
    there, or a name assigned from one. A `with` statement is replaced by its body.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.lines: set[int] = set()

    def _add_lines(self, first: int, last: int | None) -> None:
        self.lines.update(range(first, (last or first) + 1))

    def _uses_hooks(self, node: ast.AST) -> bool:
        used = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
        return bool(used & self.names)

    def _import(self, node: ast.Import | ast.ImportFrom) -> ast.AST | None:
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names]
        if not {module.split(".")[0] for module in modules} & HOOK_MODULES:
            return node
        self.names |= {alias.asname or alias.name for alias in node.names}
        self._add_lines(node.lineno, node.end_lineno)
        return None

    visit_Import = _import  # noqa: N815
    visit_ImportFrom = _import  # noqa: N815

    def visit_With(self, node: ast.With) -> ast.AST | list[ast.stmt]:
        if not any(self._uses_hooks(item) for item in node.items):
            return self.generic_visit(node)
        for item in node.items:
            if item.optional_vars is not None:
                self.names |= {
                    n.id for n in ast.walk(item.optional_vars) if isinstance(n, ast.Name)
                }
        self._add_lines(node.lineno, node.body[0].lineno - 1)
        self.generic_visit(node)
        return node.body

    def generic_visit(self, node: ast.AST) -> ast.AST:
        statements = (ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return)
        if isinstance(node, statements) and self._uses_hooks(node):
            if isinstance(node, ast.Assign):
                self.names |= {t.id for t in node.targets if isinstance(t, ast.Name)}
            self._add_lines(node.lineno, node.end_lineno)
            return ast.copy_location(ast.Pass(), node)
        return super().generic_visit(node)


@pytest.fixture(scope="module")
def without() -> tuple[str, set[int]]:
    """Return the example's text without hooks, and the numbers of the removed lines."""
    transformer = RemoveHooks()
    tree = transformer.visit(ast.parse(EXAMPLE.read_text(encoding="utf-8")))
    return ast.unparse(ast.fix_missing_locations(tree)), transformer.lines


def run(script: Path) -> dict[str, str]:
    """Return the printed values by the text before the first colon."""
    done = subprocess.run(
        [sys.executable, str(script), "--steps", "4", "--seed", "1"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    return {line.split(":")[0]: line.split(":")[-1].strip() for line in lines}


def test_hooks_are_at_most_three_lines_of_the_example(without: tuple[str, set[int]]) -> None:
    text, lines = without
    assert 0 < len(lines) <= 3, sorted(lines)
    code = text.split('"""', 2)[-1]  # the docstring may mention hooks
    assert "hook" not in code.lower()
    assert "loss.backward()" in code
    assert "optimizer.step()" in code


def test_the_example_trains_the_same_weights_without_hooks(
    without: tuple[str, set[int]], tmp_path: Path
) -> None:
    script = tmp_path / "without_hooks.py"
    script.write_text(without[0], encoding="utf-8")
    with_hooks, bare = run(EXAMPLE), run(script)
    assert with_hooks["weights"] == bare["weights"]
    assert with_hooks["validation loss after"] == bare["validation loss after"]
    assert "completed after 4 steps" in with_hooks
    assert "completed after 4 steps" not in bare
