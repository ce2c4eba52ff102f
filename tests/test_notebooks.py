"""The notebooks run from top to bottom, and show what they printed."""

from __future__ import annotations

from pathlib import Path

import nbclient
import nbformat
import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_there_are_two_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["activation_patching", "bare_loop"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    shown = [bool(cell.outputs) for cell in notebook.cells if cell.cell_type == "code"]
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=resources).execute()
    printed = [bool(cell.outputs) for cell in notebook.cells if cell.cell_type == "code"]
    assert shown == printed, "the stored notebook was not executed: see CONTRIBUTING.md"
    assert any(printed)
