"""The same state saved by hookline, torch, torch.distributed.checkpoint, Lightning and others.

Every saver is used as its documentation says. `start` is what the training thread has to wait for
before it may change the weights again; `finish` waits until the save is complete.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.utils._pytree import tree_map_only

from hookline.checkpoint import CheckpointSaver, load_checkpoint

__all__ = ["SAVERS", "HooklineSaver", "Saver", "State", "make_savers"]

State = dict[str, Any]
"""`model` and `optimizer`, as their `state_dict` returns them."""


class Saver:
    """One way of saving; this one is `torch.save` with a sync."""

    is_durable = True
    """Whether the files are synced to the disk."""

    def start(self, state: State, path: Path) -> None:
        with path.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    def finish(self) -> None:
        pass

    def load(self, path: Path, like: State) -> State:
        """Return a saved state; `like` is a state with the same names and shapes."""
        state: State = torch.load(path, weights_only=True)
        return state

    def watch(self) -> Callable[[], bool]:
        """Return a function that returns whether the save is complete."""
        waiting = Thread(target=self.finish)
        waiting.start()
        return lambda: not waiting.is_alive()

    def close(self) -> None:
        pass


class HooklineSaver(Saver):
    def __init__(self) -> None:
        self.saver = CheckpointSaver()

    def prepare(self, state: State) -> None:
        self.saver.prepare(model=state["model"], state={"optimizer": state["optimizer"]})

    def start(self, state: State, path: Path) -> None:
        rest = {"optimizer": state["optimizer"]}
        self.saver.save([path], model=state["model"], state=rest, info={"step": 1})

    def finish(self) -> None:
        self.saver.wait()
        self._is_finished()

    def load(self, path: Path, like: State) -> State:
        checkpoint = load_checkpoint(path)
        return {"model": checkpoint.model, **checkpoint.state}

    def watch(self) -> Callable[[], bool]:
        return self._is_finished  # waiting for it would raise the priority of the write

    def _is_finished(self) -> bool:
        results = self.saver.finished()
        for result in results:
            if result.error is not None:
                raise result.error
        return bool(results)

    def close(self) -> None:
        self.saver.close()


class DcpSaver(Saver):
    """`torch.distributed.checkpoint`, which syncs the files but neither renames nor hashes."""

    def start(self, state: State, path: Path) -> None:
        dcp.save(state, checkpoint_id=path)

    def load(self, path: Path, like: State) -> State:
        state = _zeros(like)
        dcp.load(state, checkpoint_id=path)
        return state


class DcpAsyncSaver(DcpSaver):
    kind = AsyncCheckpointerType.THREAD

    def __init__(self) -> None:
        if not dist.is_initialized():
            store = tempfile.mkdtemp() + "/store"
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
            os.environ.setdefault("MASTER_ADDR", "localhost")
            os.environ.setdefault("MASTER_PORT", "29599")
        self._future: Any = None

    def start(self, state: State, path: Path) -> None:
        response = dcp.async_save(state, checkpoint_id=path, async_checkpointer_type=self.kind)
        staging = getattr(response, "staging_completion", None)
        if staging is not None:
            staging.result()
        self._future = getattr(response, "upload_completion", response)

    def finish(self) -> None:
        self._future.result()


class DcpProcessSaver(DcpAsyncSaver):
    kind = AsyncCheckpointerType.PROCESS


class TorchCheckpointingSaver(Saver):
    """`torch-checkpointing`; by default it writes with O_DIRECT, which failed on ext4."""

    is_durable = False

    def __init__(self) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager = CheckpointManager(CheckpointManager.Config(storage_config=storage))
        self._future: Any = None

    def start(self, state: State, path: Path) -> None:
        self._future = self._manager.save(str(path), state)
        self._manager._staging_future.result()  # what its `lock()` waits for

    def finish(self) -> None:
        self._future.result()

    def load(self, path: Path, like: State) -> State:
        state = _zeros(like)
        self._manager.load(str(path), into=state)
        return state

    def close(self) -> None:
        self._manager.close()


class LightningSaver(Saver):
    is_durable = False

    def __init__(self) -> None:
        from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

        self._io = AsyncCheckpointIO(TorchCheckpointIO())

    def start(self, state: State, path: Path) -> None:
        self._io.save_checkpoint(state, path)

    def finish(self) -> None:
        self._io.teardown()


def _zeros(state: State) -> State:
    zeros: State = tree_map_only(torch.Tensor, torch.zeros_like, state)
    return zeros


SAVERS: dict[str, tuple[str, Callable[[], Saver]]] = {
    "hookline": ("hookline", HooklineSaver),
    "torch.save": ("torch", Saver),
    "dcp.save": ("torch", DcpSaver),
    "dcp.async_save (thread)": ("torch", DcpAsyncSaver),
    "dcp.async_save (process)": ("torch", DcpProcessSaver),
    "torch-checkpointing": ("torch_checkpointing", TorchCheckpointingSaver),
    "AsyncCheckpointIO": ("lightning", LightningSaver),
}
"""The module that has to be installed, and how to create the saver."""


def make_savers() -> tuple[dict[str, Saver], dict[str, str]]:
    """Return the savers that work here, and why the others do not."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    savers: dict[str, Saver] = {}
    missing: dict[str, str] = {}
    small = {"model": {"w": torch.ones(4)}, "optimizer": {"state": {}, "param_groups": []}}
    for name, (module, create) in SAVERS.items():
        if importlib.util.find_spec(module) is None:
            missing[name] = "not installed (bench/requirements.txt)"
            continue
        try:
            saver = create()
            with tempfile.TemporaryDirectory() as folder:
                saver.start(small, Path(folder) / "checkpoint")
                saver.finish()
            savers[name] = saver
        except Exception as error:
            missing[name] = f"failed: {type(error).__name__}: {str(error).splitlines()[0][:80]}"
    return savers, missing
