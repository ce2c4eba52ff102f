"""FSDP2 trainings in two processes, started by `test_sharded_checkpoints.py` with torchrun."""

from __future__ import annotations

import faulthandler
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from distributed_training import RANK, Once, loaders
from torch import nn
from torch.distributed.tensor import DTensor

import hookline
from hookline import ModelCheckpoint, Trainer, TrainerConfig
from hookline.errors import CheckpointError

LONG = "a_module_with_a_name_that_is_longer_than_what_paths_in_the_state_have_of_it_" * 3
SAVED, LAST = 4, 9  # steps
FSDP = {"strategy": "fsdp", "fsdp": {"wrap": ["Linear"]}}


class Tied(nn.Module):
    """A model with tied weights, long names, and a bias of which rank 1 has nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 5)
        self.add_module(LONG, nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 1)))  # 228 characters
        self.last = nn.Linear(8, 5, bias=False)
        self.last.weight = self.first.weight
        self.out = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()
        long = getattr(self, LONG)(hidden)
        return self.out(torch.cat([hidden + self.last(x), long], dim=1))


class Loaded(hookline.Hook):
    """Keeps the values of the trainer after a checkpoint was loaded."""

    def __init__(self) -> None:
        self.values: Any = None

    def on_checkpoint_load(self, trainer: Trainer) -> None:
        self.values = values_of(trainer)


def values_of(trainer: Trainer) -> dict[str, Any]:
    """Return weights, averages and optimizer states, all of them whole."""
    values = {f"model.{name}": value for name, value in trainer.model.state_dict().items()}
    states = trainer.optimizers[0].state_dict()["state"]
    values |= {f"optimizer.{i}.{key}": v for i, one in states.items() for key, v in one.items()}
    averages = trainer.hooks.get_hook("ema").state_dict()["averages"]
    values |= {f"ema.{name}": value for name, value in averages.items()}
    # The average is a plain tensor until training starts, if it was read as a whole.
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in values.items()
    }


def make(folder: Path, accelerator: Any = None, **fields: Any) -> tuple[Trainer, dict[str, Any]]:
    """Return a trainer, and where it keeps its values after the step that is saved."""
    torch.manual_seed(0)
    model = Tied()
    wrap = {"wrap": ["out", f"{LONG}.*"]}  # tied weights have to be in one unit
    fields = {**fields, "fsdp": wrap} if fields.get("strategy") == "fsdp" else fields
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings = {"max_steps": LAST, "seed": 3, "progress": "off", "runs": folder}
    config = TrainerConfig(**(settings | fields))
    mse = nn.functional.mse_loss
    trainer = Trainer(config, model, optimizer, loss_fn=mse, accelerator=accelerator)
    trainer.add_hook(hookline.EMA(decay=0.9))
    trainer.add_hook(ModelCheckpoint(every_n_steps=SAVED, save_top_k=-1, monitor=None))
    kept: dict[str, Any] = {}
    keep = Once(RANK, SAVED, lambda trainer: kept.update(values_of(trainer)))
    trainer.add_hook(keep, after="ema")
    return trainer, kept


def checkpoint_of(folder: Path) -> Path:
    (path,) = folder.glob(f"2*/checkpoints/*step={SAVED}")
    return path


def resume(path: Path, folder: Path, **fields: Any) -> dict[str, Any]:
    """Return the values after loading a checkpoint, and after training on."""
    trainer, _ = make(folder, **fields)
    loaded = Loaded()
    trainer.add_hook(loaded)
    trainer.fit(loaders()[0], resume_from=path)
    return {"loaded": loaded.values, "end": values_of(trainer)}


def train(folder: Path, **fields: Any) -> dict[str, Any]:
    """Return the values of the step that is saved, and of the last one."""
    trainer, kept = make(folder, **fields)
    trainer.fit(loaders()[0])
    return {"saved": kept, "end": values_of(trainer)}


def read_parts(folder: Path) -> dict[str, Any]:
    """Return what each rank reads; and a file of rank 1 that is damaged."""
    from hookline.trainer.continuation import read_checkpoint

    trainer, _ = make(folder / "runs", **FSDP)
    path = checkpoint_of(folder / "two")
    checkpoint = read_checkpoint(trainer, path)
    states = checkpoint.state["optimizers"][0]["state"][0]
    averages = checkpoint.state["hooks"]["ema"]["averages"]
    read = [*checkpoint.model.values(), states["exp_avg"], averages["first.weight"]]
    damaged = folder / "damaged"
    if RANK == 1:
        shutil.copytree(path, damaged)
        data = bytearray((damaged / "model-1.safetensors").read_bytes())
        data[-1] ^= 1
        (damaged / "model-1.safetensors").write_bytes(data)
    torch.distributed.barrier()
    try:
        read_checkpoint(trainer, damaged)
    except CheckpointError as error:
        message = str.__str__(str(error))  # not of a class of its own, which torch.load refuses
        return {"sharded": [isinstance(value, DTensor) for value in read], "error": message}
    return {}


def fork(folder: Path) -> dict[str, Any]:
    """A new run from the checkpoint of two ranks; what each rank reads; and a damaged file."""
    from hookline.loop import state as loop_state

    trainer, _ = make(folder / "fork", **FSDP)
    load, load_optimizer = loop_state.load_weights, loop_state.load_optimizer
    read: list[Any] = []

    def keep_weights(model: nn.Module, weights: Any) -> None:
        read.extend(weights.values())
        load(model, weights)

    def keep_optimizer(optimizer: torch.optim.Optimizer, state: Any) -> None:
        read.extend(one["exp_avg"] for one in state["state"].values())
        load_optimizer(optimizer, state)

    loop_state.load_weights, loop_state.load_optimizer = keep_weights, keep_optimizer
    trainer.fit(loaders()[0], fork_from=checkpoint_of(folder / "two"))
    loop_state.load_weights, loop_state.load_optimizer = load, load_optimizer
    message = ""
    try:
        make(folder / "fork", **FSDP)[0].fit(loaders()[0], fork_from=folder / "damaged")
    except CheckpointError as error:
        message = str.__str__(str(error))
    sharded = [isinstance(value, DTensor) for value in read]
    return {"sharded": sharded, "error": message, "end": values_of(trainer)}


def make_accelerator() -> Any:
    """Return an Accelerator with an FSDP2 plugin, which it uses on GPUs only: its state is set."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    return accelerator


def accelerate(folder: Path) -> dict[str, Any]:
    trained = train(folder / "accelerate", accelerator=make_accelerator())
    path = checkpoint_of(folder / "accelerate")
    again = resume(path, folder / "again", accelerator=make_accelerator())
    return {**trained, "again": again, "files": sorted(file.name for file in path.iterdir())}


def save_slowly(folder: Path) -> None:
    """A training whose second save takes long, for a signal during it; or that run, resumed."""
    from hookline.checkpoint.saver import CheckpointWriter

    runs = list(folder.glob("2*"))
    torch.distributed.init_process_group("gloo")
    torch.distributed.barrier()
    write_file, saves = CheckpointWriter._write_file, []

    def write_slowly(self: CheckpointWriter, file: Path, data: memoryview) -> str:
        if file.name.startswith("state") and file.suffix == ".safetensors":
            saves.append(file)
            if len(saves) == 2:
                print("in flight", flush=True)
                time.sleep(float(os.environ["SLEEP"]))
        return write_file(self, file, data)

    if not runs:
        CheckpointWriter._write_file = write_slowly  # type: ignore[method-assign]
    trainer, _ = make(folder, max_steps=40 if runs else None, max_epochs=100_000, **FSDP)
    trainer.fit(loaders()[0], resume_from=runs[0] if runs else None)
    print("end", RANK, trainer.status, trainer.step, flush=True)


def main() -> None:
    faulthandler.dump_traceback_later(240, exit=True)  # all ranks may wait for each other for ever
    folder, name = Path(sys.argv[1]), sys.argv[2]
    if name != "all":
        globals()[name](folder / name)
        return
    results = {
        "two": train(folder / "two", **FSDP),
        "from_one": resume(checkpoint_of(folder / "one"), folder / "from_one", **FSDP),
        "read_parts": read_parts(folder),
        "fork": fork(folder),
        "accelerate": accelerate(folder),
    }
    torch.save(results, folder / f"results-{RANK}.pt")


if __name__ == "__main__":
    main()
