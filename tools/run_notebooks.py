"""Run the notebooks and store what they print."""

from __future__ import annotations

import tempfile
from pathlib import Path

import nbclient
import nbformat

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        with tempfile.TemporaryDirectory() as folder:
            resources = {"metadata": {"path": folder}}
            nbclient.NotebookClient(notebook, timeout=300, resources=resources).execute()
        for cell in notebook.cells:
            cell.metadata.clear()  # times of the execution
        nbformat.write(notebook, path)
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
