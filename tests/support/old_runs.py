"""Training runs that an earlier version wrote half of, for `test_old_runs.py` to continue.

    python tests/support/old_runs.py FOLDER    # writes `FOLDER/<loop>/`

Each of these folders has what a process left behind that ended in the middle of an epoch, and
`expected.safetensors`, the weights and averages at the end of a run that was not interrupted.

The arithmetic is exact on every machine: small integers as data, double precision, and powers of
two for the learning rate, momentum, dropout and decay. The random numbers are torch's.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from every_loop import count_ranks, shard, use_fsdp_on_cpu
from rank_checks import run_ranks
from safetensors.torch import save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from warm_processes import run_warm

import hookline

EPOCHS, BATCHES, BATCH_SIZE, ACCUMULATE = 2, 8, 4, 2
STEPS_PER_EPOCH = BATCHES // ACCUMULATE
SAVED, INTERRUPTED = 2, 3  # steps, of eight


class Net(nn.Module):
    """A linear regression with dropout; with labels it returns the loss, as Hugging Face wants."""

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Dropout(dropout), nn.Linear(4, 2, bias=False))
        self.head = nn.Linear(2, 1, bias=False)
        self.to(torch.float64)
        with torch.no_grad():
            self.body[1].weight.copy_(torch.tensor([[1, 0, -1, 0], [0, 1, 0, -1]]) / 2)
            self.head.weight.copy_(torch.tensor([[1, 1]]))
        self.head.weight.requires_grad = False  # a product of two weights has too many digits

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        outputs = self.head(self.body(x))
        if labels is None:
            return outputs
        return {"loss": squared_error(outputs, labels), "outputs": outputs}


def squared_error(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs - labels).square().mean()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=1 / 8, momentum=1 / 2)


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-1, 2, (BATCHES * BATCH_SIZE, 4), generator=generator).double()
    return TensorDataset(x, x.sum(1, keepdim=True))


def make_loader(*, own_part: bool = False, shuffle: bool = False) -> DataLoader[Any]:
    data = make_data()
    is_part = own_part and count_ranks() > 1
    sampler: Any = DistributedSampler(data, shuffle=False) if is_part else None
    size = BATCH_SIZE // count_ranks()
    return DataLoader(data, batch_size=size, sampler=sampler, shuffle=shuffle)


class Interrupt(hookline.Hook):
    """Ends the process in the middle of the first epoch, as a kill does."""

    def __init__(self) -> None:
        self.at = int(os.environ.get("INTERRUPTED_STEP", "0"))

    def on_step_end(self, step: int) -> None:
        if step == self.at:
            os._exit(0)


class Counter(hookline.Hook):
    """Has state of its own: the steps that it has seen."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step_end(self, step: int) -> None:
        self.steps.append(step)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": list(self.steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = list(state["steps"])


Hooks = list[hookline.Hook]
Loop = Callable[[Hooks, Path, bool], nn.Module]
"""Trains with hooks and writes into a folder, or continues what is there; returns the model."""


def in_trainer(hooks: Hooks, folder: Path, resume: bool, **fields: Any) -> nn.Module:
    model = Net()
    config = hookline.TrainerConfig(
        max_epochs=EPOCHS,
        accumulate=ACCUMULATE,
        runs=str(folder / "runs"),
        progress="off",
        seed=0,
        checkpoints={"background": False},
        **fields,
    )
    saving = hookline.ModelCheckpoint(every_n_steps=SAVED, save_top_k=-1)
    optimizer = make_optimizer(model)
    trainer = hookline.Trainer(
        config, model, optimizer, loss_fn=squared_error, hooks=[*hooks, saving], name="old"
    )
    trainer.fit(make_loader(shuffle=True), resume_from="auto" if resume else None)
    return model


def in_bare_loop(
    hooks: Hooks,
    folder: Path,
    resume: bool,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> nn.Module:
    torch.manual_seed(7)
    model = wrap(Net())
    optimizer = make_optimizer(model)
    session = hookline.attach(model, optimizer, hooks=hooks, runs=folder / "runs", name="old")
    start = session.load_checkpoint() if resume else None
    with session:
        for epoch in range(EPOCHS):
            if start is not None and epoch < start.epoch:
                continue
            done = 0 if start is None else start.step - epoch * STEPS_PER_EPOCH
            with session.epoch():
                loader = make_loader(own_part=True)
                for i, (x, y) in enumerate(session.batches(loader)):
                    if i < done * ACCUMULATE:
                        continue
                    if start is not None:
                        start.restore_random_state()
                        start = None
                    session.backward(squared_error(model(x), y), accumulate=ACCUMULATE)
                    if (i + 1) % ACCUMULATE == 0:
                        optimizer.step()
                        optimizer.zero_grad()
                        if session.step == SAVED:
                            session.save_checkpoint(wait=True)
    return model


def in_transformers(
    hooks: Hooks, folder: Path, resume: bool, *, sharded: bool = False
) -> nn.Module:
    from transformers import Trainer, TrainingArguments

    class OwnTrainer(Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            if sharded:
                use_fsdp_on_cpu(self)

    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        x, y = zip(*samples, strict=True)
        return {"x": torch.stack(x), "labels": torch.stack(y)}

    model = Net()
    args = TrainingArguments(
        str(folder / "out"),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH_SIZE // count_ranks(),
        gradient_accumulation_steps=ACCUMULATE,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        logging_strategy="no",
        save_strategy="steps",
        save_steps=SAVED,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = OwnTrainer(
        model,
        args,
        train_dataset=make_data(),
        data_collator=collate,
        optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 1 / 8, "momentum": 1 / 2}),
    )
    hookline.attach(trainer, hooks=hooks, runs=folder / "runs", name="old")
    last = hookline.get_last_checkpoint(folder / "out") if resume else None
    trainer.train(resume_from_checkpoint=None if last is None else str(last))
    return model


def in_lightning(hooks: Hooks, folder: Path, resume: bool, *, strategy: str = "auto") -> nn.Module:
    import lightning.pytorch as lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torchdata.stateful_dataloader import StatefulDataLoader  # else an epoch begins anew

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(dropout=0.0)  # Lightning saves no random states

        def configure_model(self) -> None:
            if strategy == "fsdp":
                shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return squared_error(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return make_optimizer(self)

    module = Module()
    is_sharded = strategy == "fsdp"
    saving = ModelCheckpoint(folder / "saved", "{step}", every_n_train_steps=SAVED, save_top_k=-1)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accumulate_grad_batches=ACCUMULATE,
        accelerator="cpu",
        devices=count_ranks(),
        strategy=ModelParallelStrategy(count_ranks(), 1) if is_sharded else strategy,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
        callbacks=[saving],
    )
    hookline.attach(trainer, hooks=hooks, runs=folder / "runs", name="old")
    path = str(folder / "saved" / f"step={SAVED}.ckpt") if resume else None
    loader = StatefulDataLoader(make_data(), batch_size=BATCH_SIZE // count_ranks())
    if count_ranks() > 1:  # Lightning's own sampler would shuffle
        sampler = DistributedSampler(make_data(), shuffle=False)
        loader = StatefulDataLoader(make_data(), loader.batch_size, sampler=sampler)
    trainer.fit(module, loader, ckpt_path=path)
    return module.net


def in_ignite(hooks: Hooks, folder: Path, resume: bool) -> nn.Module:
    from ignite.engine import Engine, Events
    from ignite.engine.deterministic import DeterministicEngine
    from ignite.handlers import Checkpoint, DiskSaver

    model = Net(dropout=0.0)  # Ignite saves no random states
    optimizer = make_optimizer(model)

    def train(engine: Engine, batch: Any) -> None:
        x, y = batch
        (squared_error(model(x), y) / ACCUMULATE).backward()
        if engine.state.iteration % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()

    engine = DeterministicEngine(train)  # it skips the batches of before the checkpoint
    session = hookline.attach(
        engine,
        model=model,
        optimizer=optimizer,
        hooks=hooks,
        runs=folder / "runs",
        name="old",
        allow_missing=True,  # averages are for validation
    )
    objects = {"trainer": engine, "model": model, "optimizer": optimizer, "hooks": session}
    saver = Checkpoint(objects, DiskSaver(str(folder / "saved"), require_empty=False), n_saved=None)
    saved = SAVED * ACCUMULATE
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=saved), saver)
    if resume:
        path = folder / "saved" / f"checkpoint_{saved}.pt"
        Checkpoint.load_objects(objects, torch.load(path, weights_only=False))  # numpy's state
    engine.run(make_loader(), max_epochs=None if resume else EPOCHS)
    return model


LOOPS: dict[str, Loop] = {
    "trainer": in_trainer,
    "bare_loop": in_bare_loop,
    "transformers": in_transformers,
    "lightning": in_lightning,
    "ignite": in_ignite,
}

LOOPS_OF_RANKS: dict[str, Loop] = {
    "trainer_ddp": partial(in_trainer, strategy="ddp"),
    "trainer_fsdp": partial(in_trainer, strategy="fsdp", fsdp={"wrap": ["Sequential"]}),
    "bare_loop_ddp": partial(in_bare_loop, wrap=DistributedDataParallel),
    "bare_loop_fsdp": partial(in_bare_loop, wrap=shard),
    "transformers_ddp": in_transformers,
    "lightning_ddp": partial(in_lightning, strategy="ddp"),
    "lightning_fsdp": partial(in_lightning, strategy="fsdp"),
}
ALL_LOOPS = LOOPS | LOOPS_OF_RANKS


def train(loop: Loop, folder: Path, *, resume: bool) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Train; return the weights and averages at the end, and the steps that a hook has seen."""
    averages, counter = hookline.EMA(decay=0.5, warmup=False, every_n_steps=1), Counter()
    model = loop([averages, counter, Interrupt()], folder, resume)
    found = {"weights": dict(model.state_dict()), "averages": averages.state_dict()["averages"]}
    ended = {
        f"{kind} {name.removeprefix('module.')}": value.detach().clone()
        for kind, values in hookline.full_tensor(found).items()
        for name, value in values.items()
    }
    return ended, counter.steps


def continue_runs(folder: Path, *names: str) -> None:
    """Train to the end from what is in a folder; in it, write what each loop ended with."""
    for name in names:
        own = folder / name
        ended, steps = train(ALL_LOOPS[name], own, resume=(own / "runs").exists())
        if not dist.is_initialized() or dist.get_rank() == 0:
            save_file(ended, own / "ended.safetensors")
            (own / "steps.json").write_text(json.dumps(steps))


def start(folder: Path, *names: str, **variables: str) -> None:
    """Train in processes of their own."""
    script = Path(__file__).with_name("old_runs_training.py")
    with mock.patch.dict(os.environ, variables):
        if names[0] in LOOPS_OF_RANKS:
            run_ranks(script, folder, *names, imports=["transformers.trainer"])
            return
        done = run_warm([str(script), str(folder), *names], environment=os.environ, seconds=300)
    assert done.returncode == 0, done.stderr


def write(folder: Path) -> None:
    """Write half a run of each loop, and what a whole one ends with."""
    for name in ALL_LOOPS:
        with tempfile.TemporaryDirectory() as whole:
            start(Path(whole), name)
            start(folder, name, INTERRUPTED_STEP=str(INTERRUPTED))
            ended = Path(whole) / name / "ended.safetensors"
            shutil.copy(ended, folder / name / "expected.safetensors")
        for manifest in (folder / name / "runs").glob("*/manifest.json"):
            manifest.write_text(json.dumps(without_machine(json.loads(manifest.read_text()))))


def without_machine(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest without the paths and packages of the machine that wrote it."""
    for described in (manifest, *manifest["attempts"]):
        described["command"] = ["python", "train.py"]
        described["git"] = described["git"] | {"folder": None}
    return manifest | {"packages": {}}


if __name__ == "__main__":
    write(Path(sys.argv[1]))
