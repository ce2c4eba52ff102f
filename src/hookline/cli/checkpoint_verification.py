"""Verifying checkpoints on the command line, with a progress bar in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hookline.checkpoint.checkpoint_lookup import verify_checkpoint

__all__ = ["verify_all"]


def verify_all(paths: Sequence[Path]) -> dict[Path, str | None]:
    """Return what is damaged in each checkpoint, while a bar in the terminal shows the progress."""
    sizes = {
        path: sum(file.stat().st_size for file in path.glob("*") if file.is_file())
        for path in paths
    }
    with _progress_bar(sum(sizes.values())) as advance:
        return {path: verify_checkpoint(path, advance) for path in paths}


@contextmanager
def _progress_bar(total: int) -> Generator[Callable[[int], object], None, None]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True)
    columns = ("Verifying", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=total)
        yield lambda size: progress.advance(task, size)
