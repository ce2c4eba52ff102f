"""One training, written for every loop that hooks run in, in one process or in several.

The model, the data and their order, the optimizer, accumulation, clipping and validation are the
same in all of them: two epochs of three steps, two batches each. Several processes share each
batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hookline

BATCHES, BATCH_SIZE, ACCUMULATE, EPOCHS, MAX_NORM = 6, 4, 2, 2, 0.5


class Head(nn.Linear):
    """The last layer, of a type of its own: its name is another one in a LightningModule."""


class Net(nn.Module):
    """A regression; with targets it returns the loss, as Hugging Face wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.Tanh())
        self.head = Head(8, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        outputs = self.head(self.body(x))
        if labels is None:
            return outputs
        return {"loss": F.mse_loss(outputs, labels), "outputs": outputs}


def make_model() -> Net:
    torch.manual_seed(0)
    return Net()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def count_ranks() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def make_loader(n: int = BATCHES, seed: int = 1, *, shared: bool = False) -> DataLoader[Any]:
    """Return a loader, with the batch size of one process.

    Args:
        n: the number of batches of all processes.
        seed: of the data.
        shared: whether it gives only the samples of this process; else the loop shares them.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n * BATCH_SIZE, 3, generator=generator)
    data = TensorDataset(x, 3 * x.sum(1, keepdim=True))
    is_part = shared and count_ranks() > 1
    sampler: Any = DistributedSampler(data, shuffle=False) if is_part else None
    return DataLoader(data, batch_size=BATCH_SIZE // count_ranks(), sampler=sampler)


def shard(model: nn.Module, **options: Any) -> nn.Module:
    """Shard the parameters with FSDP2."""
    if not isinstance(next(model.parameters()), DTensor):
        fully_shard(model.body, **options)  # type: ignore[arg-type]
        fully_shard(model, **options)
    return model


def in_trainer(hooks: list[Any], folder: Path, **fields: Any) -> tuple[nn.Module, Any]:
    model = make_model()
    config = hookline.TrainerConfig(
        max_epochs=EPOCHS,
        accumulate=ACCUMULATE,
        clip_norm=MAX_NORM,
        runs=str(folder / "runs"),
        progress="off",
        seed=None,
        **fields,
    )
    trainer = hookline.Trainer(
        config, model, make_optimizer(model), loss_fn=F.mse_loss, hooks=hooks
    )
    trainer.fit(make_loader(), val_loaders=make_loader(2, seed=2))
    return model, trainer


def in_accelerate_trainer(hooks: list[Any], folder: Path) -> tuple[nn.Module, Any]:
    from accelerate import Accelerator

    model = make_model()
    trainer = hookline.AccelerateTrainer(
        hookline.TrainerConfig(
            max_epochs=EPOCHS, clip_norm=MAX_NORM, runs=str(folder / "runs"), progress="off"
        ),
        model,
        make_optimizer(model),
        loss_fn=F.mse_loss,
        accelerator=Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE),
        hooks=hooks,
    )
    trainer.fit(make_loader(), val_loaders=make_loader(2, seed=2))
    return model, trainer


def in_bare_loop(
    hooks: list[Any], folder: Path, wrap: Callable[[nn.Module], nn.Module] = lambda model: model
) -> tuple[nn.Module, Any]:
    model = wrap(make_model())
    optimizer = make_optimizer(model)
    with hookline.attach(model, optimizer, hooks=hooks, runs=folder / "runs") as session:
        for _ in range(EPOCHS):
            with session.epoch():
                for i, (x, y) in enumerate(session.batches(make_loader(shared=True))):
                    session.backward(F.mse_loss(model(x), y), accumulate=ACCUMULATE)
                    if (i + 1) % ACCUMULATE == 0:
                        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
                        optimizer.step()
                        optimizer.zero_grad()
                    if session.should_stop:
                        return model, session
                with session.validation():
                    for x, y in session.batches(make_loader(2, seed=2, shared=True)):
                        with torch.no_grad():
                            session.log("loss", F.mse_loss(model(x), y))
    return model, session


class OwnOptimizer:
    """Behaves like an optimizer, and is none of torch's."""

    def __init__(self, model: nn.Module) -> None:
        self._inner = make_optimizer(model)
        self.param_groups = self._inner.param_groups
        self.zero_grad = self._inner.zero_grad

    def step(self) -> None:
        type(self._inner).step.__wrapped__(self._inner)  # type: ignore[attr-defined]  # no hooks

    def state_dict(self) -> Any:
        return self._inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._inner.load_state_dict(state)


def as_written(
    hooks: list[Any],
    folder: Path,
    *,
    own: bool = False,
    given: bool = True,
    scaled: bool = False,
    compiled: bool = False,
    named: bool = False,
    rates: bool = False,
) -> tuple[nn.Module, Any]:
    """A loop that loads, divides, clips and steps by itself; the session has epochs only.

    Args:
        hooks: the hooks.
        folder: for the run.
        own: whether the optimizer is not torch's.
        given: whether `attach` gets the optimizer.
        scaled: whether it steps through a scaler that `attach` is not given.
        compiled: whether the model is compiled in place.
        named: whether model and optimizer have names.
        rates: whether another optimizer, of no parameter that changes, steps in every second step.
    """
    model = make_model()
    if compiled:
        model.compile(backend="eager")
    optimizer: Any = OwnOptimizer(model) if own else make_optimizer(model)
    slow = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    parts: list[Any] = [model, optimizer] if given else [model]
    if named:
        parts = [{"net": model}, {"net": optimizer}]
    options: dict[str, Any] = {}
    if rates:
        parts, options = [model, [optimizer, slow]], {"step_of": optimizer}
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, enabled=scaled)
    with hookline.attach(*parts, hooks=hooks, runs=folder / "runs", **options) as session:
        for _ in range(EPOCHS):
            with session.epoch():
                for i, (x, y) in enumerate(make_loader()):
                    scaler.scale(F.mse_loss(model(x), y) / ACCUMULATE).backward()
                    if (i + 1) % ACCUMULATE == 0:
                        scaler.unscale_(optimizer) if scaled else None
                        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
                        scaler.step(optimizer) if scaled else optimizer.step()
                        scaler.update() if scaled else None
                        optimizer.zero_grad()
                        if rates and session.step % 2 == 0:
                            slow.step()
                with session.validation():
                    for x, y in session.batches(make_loader(2, seed=2)):
                        with torch.no_grad():
                            session.log("loss", F.mse_loss(model(x), y))
    return model, session


def in_accelerate_loop(hooks: list[Any], folder: Path) -> tuple[nn.Module, Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model = make_model()
    prepared, optimizer, loader = accelerator.prepare(model, make_optimizer(model), make_loader())
    with hookline.attach(prepared, optimizer, hooks=hooks, runs=folder / "runs") as session:
        for _ in range(EPOCHS):
            with session.epoch():
                for x, y in session.batches(loader):
                    with accelerator.accumulate(prepared):
                        accelerator.backward(F.mse_loss(prepared(x), y))
                        if accelerator.sync_gradients:
                            accelerator.clip_grad_norm_(prepared.parameters(), MAX_NORM)
                        optimizer.step()
                        optimizer.zero_grad()
                    if session.should_stop:
                        return model, session
                with session.validation():
                    for x, y in session.batches(make_loader(2, seed=2, shared=True)):
                        with torch.no_grad():
                            session.log("loss", F.mse_loss(prepared(x), y))
    return model, session


def use_fsdp_on_cpu(trainer: Any) -> None:
    """Set the state of the trainer's Accelerator as it is on GPUs: on CPUs it would use DDP."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    state = trainer.accelerator.state
    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False
    )
    trainer.is_fsdp_enabled = True


def in_transformers(
    hooks: list[Any],
    folder: Path,
    *,
    sharded: bool = False,
    resume: str | None = None,
    **saving: Any,
) -> tuple[nn.Module, Any]:
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            if sharded:
                use_fsdp_on_cpu(self)

        def _get_train_sampler(self, *args: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        x, y = zip(*samples, strict=True)
        return {"x": torch.stack(x), "labels": torch.stack(y)}

    model = make_model()
    args = TrainingArguments(
        str(folder / "out"),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH_SIZE // count_ranks(),
        per_device_eval_batch_size=BATCH_SIZE // count_ranks(),
        gradient_accumulation_steps=ACCUMULATE,
        max_grad_norm=MAX_NORM,
        lr_scheduler_type="constant",
        eval_strategy="epoch",
        logging_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        **(saving or {"save_strategy": "no"}),
    )
    trainer = InOrder(
        model,
        args,
        train_dataset=make_loader().dataset,
        eval_dataset=make_loader(2, seed=2).dataset,
        data_collator=collate,
        optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    )
    session = hookline.attach(trainer, hooks=hooks, runs=folder / "runs")
    trainer.train(resume_from_checkpoint=resume)
    return model, session


def in_lightning(
    hooks: list[Any],
    folder: Path,
    *,
    strategy: str = "auto",
    mesh: tuple[int, int] | None = None,
    resume: str | None = None,
    **saving: Any,
) -> tuple[nn.Module, Any]:
    """Train in Lightning; `mesh` has the sizes of its two dimensions, for FSDP2."""
    import lightning.pytorch as lightning
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()

        def configure_model(self) -> None:
            if strategy == "fsdp":
                shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return F.mse_loss(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = F.mse_loss(self.net(batch[0]), batch[1])
            self.log("val_loss", loss, batch_size=len(batch[0]), sync_dist=True)
            return loss

        def configure_optimizers(self) -> Any:
            return make_optimizer(self)

    module = Module()
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=MAX_NORM,
        num_sanity_val_steps=0,
        accelerator="cpu",
        devices=count_ranks(),
        strategy=ModelParallelStrategy(*mesh or (count_ranks(), 1))
        if strategy == "fsdp"
        else strategy,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
        **(saving or {"enable_checkpointing": False}),
    )
    session = hookline.attach(trainer, hooks=hooks, runs=folder / "runs")
    # Shared here: Lightning's own sampler for several processes shuffles the training data.
    loaders = make_loader(shared=True), make_loader(2, seed=2, shared=True)
    trainer.fit(module, *loaders, ckpt_path=resume)
    return module.net, session


def in_ignite(hooks: list[Any], folder: Path) -> tuple[nn.Module, Any]:
    import ignite.distributed as idist
    from ignite.engine import Engine, Events
    from ignite.metrics import Loss

    model = idist.auto_model(make_model())
    optimizer = idist.auto_optim(make_optimizer(model))
    loader, val_loader = (
        idist.auto_dataloader(loader.dataset, batch_size=BATCH_SIZE, shuffle=False)
        for loader in (make_loader(), make_loader(2, seed=2))
    )

    def train(engine: Engine, batch: Any) -> None:
        x, y = batch
        (F.mse_loss(model(x), y) / ACCUMULATE).backward()
        if engine.state.iteration % ACCUMULATE == 0:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()

    def evaluate(engine: Engine, batch: Any) -> Any:
        with torch.no_grad():
            return model(batch[0]), batch[1]

    trainer, evaluator = Engine(train), Engine(evaluate)
    Loss(F.mse_loss).attach(evaluator, "loss")
    session = hookline.attach(
        trainer,
        model=model,
        optimizer=optimizer,
        evaluator=evaluator,
        hooks=hooks,
        runs=folder / "runs",
    )
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda _: evaluator.run(val_loader))
    trainer.run(loader, max_epochs=EPOCHS)
    return model, session


LOOPS: dict[str, Callable[[list[Any], Path], tuple[nn.Module, Any]]] = {
    "trainer": in_trainer,
    "bare loop": in_bare_loop,
    "accelerate trainer": in_accelerate_trainer,
    "accelerate loop": in_accelerate_loop,
    "transformers": in_transformers,
    "lightning": in_lightning,
    "ignite": in_ignite,
}
"""The loops, in one process."""

LOOPS_AS_WRITTEN: dict[str, Callable[[list[Any], Path], tuple[nn.Module, Any]]] = {
    "data is noticed": as_written,
    "different rates": partial(as_written, rates=True),
    "own optimizer": partial(as_written, own=True),
    "named": partial(as_written, named=True),
    "late optimizer": partial(as_written, given=False),
    "scaler": partial(as_written, scaled=True),
    "compiled in place": partial(as_written, compiled=True),
}
"""Bare loops in which `attach` finds by itself what happens."""

LOOPS_OF_RANKS: dict[str, Callable[[list[Any], Path], tuple[nn.Module, Any]]] = {
    "trainer with ddp": partial(in_trainer, strategy="ddp"),
    "trainer with fsdp": partial(in_trainer, strategy="fsdp", fsdp={"wrap": ["Sequential"]}),
    "accelerate trainer": in_accelerate_trainer,
    "bare loop with ddp": partial(in_bare_loop, wrap=DistributedDataParallel),
    "bare loop with fsdp": partial(in_bare_loop, wrap=shard),
    "accelerate loop": in_accelerate_loop,
    "transformers with ddp": in_transformers,
    "transformers with fsdp": partial(in_transformers, sharded=True),
    "lightning with ddp": partial(in_lightning, strategy="ddp"),
    "lightning with fsdp": partial(in_lightning, strategy="fsdp"),
    "ignite": in_ignite,
}
"""The loops and strategies, in several processes."""

MISSING = {
    "transformers": {"on_before_backward"},
    "ignite": {"on_before_backward"},
    "accelerate loop": {"on_before_backward"},  # the Accelerator runs backward
}
"""Events that a loop does not give, also in several processes; hooks that need them are refused."""


def missing_events(name: str) -> set[str]:
    """Return the events that a loop of these names does not give."""
    return MISSING.get(name.partition(" with ")[0], set())
