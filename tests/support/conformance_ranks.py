"""Run by `torchrun` with two ranks: the hooks of `conformance.py` in all loops and strategies.

Each rank writes what its hooks saw, by loop.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conformance import HalveHead, Norms, SignalsAlone, StopsAlone, run
from every_loop import LOOPS_OF_RANKS, in_lightning, in_transformers, missing_events
from rank_checks import check_in_all_ranks

import hookline
from hookline.integrations import session_state as host_state
from hookline.tensors.full_tensor import full_tensor
from hookline.tensors.sharded import is_sharded


def run_loops() -> None:
    """Train in one loop after the other, in the same process group."""
    folder, *chosen = sys.argv[1:]
    found = {}
    for name in chosen or LOOPS_OF_RANKS:
        begun = time.monotonic()
        loop, own = LOOPS_OF_RANKS[name], Path(folder) / name.replace(" ", "_")
        found[name] = run(loop, own, HalveHead(), name=name, missing=missing_events(name))
        _, stopped = loop([StopsAlone()], own)
        found[name]["stopped"] = stopped.step, stopped.status
        norms = Norms()
        loop([norms, hookline.EMA(decay=0.5)], own)
        found[name]["norms beside averages"] = norms.seen
        if dist.get_rank() == 0:
            print(f"{name}: {time.monotonic() - begun:.1f} s", flush=True)
    if not chosen:
        refuse_separate_models(Path(folder))
        found["signal"] = preempt_one_rank(Path(folder) / "signal")
        found["language model"] = train_language_model(Path(folder) / "language_model")
        found["sharded checkpoints"] = resume_sharded(Path(folder) / "sharded_checkpoints")
        found["sharded Lightning"] = resume_sharded_lightning(Path(folder) / "sharded_lightning")
    torch.save(found, Path(folder) / f"{dist.get_rank()}.pt")


def refuse_separate_models(folder: Path) -> None:
    """A LightningModule that is sharded over one process only is refused before the first step."""
    with pytest.raises(hookline.LoopError, match="2 processes train, and each has a model of its"):
        in_lightning([Norms()], folder, strategy="fsdp", mesh=(1, 2))


def preempt_one_rank(folder: Path) -> tuple[int, str, str | None]:
    """Train in Hugging Face's trainer until one of the processes gets a signal."""
    _, session = in_transformers([SignalsAlone()], folder, save_strategy="epoch")
    last = hookline.get_last_checkpoint(folder / "out")
    return session.step, session.status, getattr(last, "name", None)


def resume_sharded(folder: Path) -> dict[str, Any]:
    """Train with FSDP2 in Hugging Face's trainer, and once more from its first checkpoint."""
    saving = {"save_strategy": "steps", "save_steps": 2}
    first = folder / "out" / "checkpoint-2"
    found = {
        name: train_sharded(in_transformers, folder, sharded=True, resume=resume, **saving)
        for name, resume in (("whole", None), ("resumed", str(first)))
    }
    for each in found.values():
        each["last"] = getattr(hookline.get_last_checkpoint(folder / "out"), "name", None)
    found["saved"] = (host_state.load(first) or {})["hooks"]["ema"]
    return found


def resume_sharded_lightning(folder: Path) -> dict[str, Any]:
    """Train with FSDP2 in Lightning's trainer, and once more from the end of its first epoch."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    found = {}
    for name, resume in (("whole", None), ("resumed", str(folder / "whole" / "epoch=0.ckpt"))):
        saving = ModelCheckpoint(folder / name, "{epoch}", save_top_k=-1)
        options: dict[str, Any] = {"strategy": "fsdp", "resume": resume, "callbacks": [saving]}
        found[name] = train_sharded(in_lightning, folder, **options)
    return found


def train_sharded(loop: Any, folder: Path, **options: Any) -> dict[str, Any]:
    """Train a sharded model with averages, which are sharded, too; return what is left."""
    hook = hookline.EMA(decay=0.5)
    model, session = loop([hook], folder, **options)
    averages = hook.state_dict()["averages"]
    return {
        "are sharded": all(map(is_sharded, averages.values())),
        "averages": full_tensor(averages),
        "weights": full_tensor(dict(model.state_dict())),
        "ended": (session.step, session.status, hook.updates),
    }


def train_language_model(folder: Path) -> dict[str, Any]:
    """Train a small GPT-2 with checkpoints, in Hugging Face's trainer."""
    sys.path.append(str(Path(__file__).parents[1] / "integrations"))
    from test_transformers import Watch, make_trainer, records

    watch, saving = Watch(), {"save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer(folder / "out", bf16=False, ddp_backend="gloo", **saving)
    session = hookline.attach(trainer, hooks=[watch], runs=folder / "runs")
    trainer.train()
    return {
        "losses": watch.losses,
        "norms": watch.norms,
        "records": records(session, "train/loss") if dist.get_rank() == 0 else None,
        "log": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "last": getattr(hookline.get_last_checkpoint(folder / "out"), "name", None),
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for library in ("transformers", "lightning.pytorch"):
        logging.getLogger(library).setLevel(logging.ERROR)
    check_in_all_ranks(run_loops)
