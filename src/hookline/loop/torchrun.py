"""The torchrun that has started this process: its command, its failures; no process group."""

from __future__ import annotations

import os

_reported: list[str] = []  # the files that the first error of this process was written to


def describe_launch() -> list[str]:
    """Return the words before `hookline` in a command that starts as many processes as now."""
    nodes = os.environ.get("GROUP_WORLD_SIZE", "1")
    local = os.environ.get("LOCAL_WORLD_SIZE")
    if local is None or os.environ.get("WORLD_SIZE", "1") == "1":
        return []
    return ["torchrun", *["--nnodes", nodes] * (nodes != "1"), "--nproc_per_node", local, "-m"]


def report_error(error: BaseException) -> None:
    """Tell torchrun which error ends this process: it shows that of the process that failed first.

    Later errors of the process are consequences of the first one.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None or file in _reported:
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    _reported.append(file)
    get_error_handler().record_exception(error)
