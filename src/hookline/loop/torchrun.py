"""The torchrun that has started this process: its command, its failures; no process group."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

_CONNECT = timedelta(seconds=5)
_reported: list[str] = []  # the files that the first error of this process was written to


def describe_launch() -> list[str]:
    """Return the words before `hookline` in a command that starts as many processes as now."""
    nodes = os.environ.get("GROUP_WORLD_SIZE", "1")
    local = os.environ.get("LOCAL_WORLD_SIZE")
    if local is None or os.environ.get("WORLD_SIZE", "1") == "1":
        return []
    return ["torchrun", *["--nnodes", nodes] * (nodes != "1"), "--nproc_per_node", local, "-m"]


def is_first_failure(error: BaseException) -> bool:
    """Tell torchrun about the error that ends this process; return whether no other had one.

    One failure usually makes all processes fail: the first one is the cause. Without torchrun's
    store nothing is known about the others, and True is returned.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return True
    import torch.distributed

    report_error(error)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        stores: Any = torch.distributed
        store = stores.TCPStore(address, port, is_master=False, timeout=_CONNECT)
        store = stores.PrefixStore(f"hookline/failures/{attempt}", store)
        return bool(store.add("count", 1) == 1)
    except (KeyError, ValueError, RuntimeError):  # there is no such store, or it has ended
        return True


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
