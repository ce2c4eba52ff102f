"""A tracker of Acme's."""

from __future__ import annotations

from pathlib import Path


class LinesTracker:
    """Writes one line for each value.

    Args:
        file: where to.
    """

    def __init__(self, file: str = "lines.txt") -> None:
        self.file = Path(file)

    def start(self, run):
        return {"file": str(self.file)}

    def log(self, values):
        with self.file.open("a") as file:
            file.writelines(f"{value.step} {value.name} {value.value}\n" for value in values)

    def finish(self, status):
        with self.file.open("a") as file:
            file.write(f"{status}\n")
