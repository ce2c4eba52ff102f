"""The same events and the same training loop in pluggy, Ignite, Lightning and Hugging Face.

Every peer gets do-nothing callbacks in its own way of writing them, and has switched off what it
does besides: logging, checkpoints, progress bars, gradient clipping. Peers that are not installed
are left out, with a line that says so.
"""

from __future__ import annotations

import importlib.util
import logging
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch.nn.functional import mse_loss

import hookline
from bench.data import Batches
from bench.harness import Candidate, block

__all__ = ["NAMES", "events", "loops"]

_MODULES = {
    "pluggy": "pluggy",
    "Ignite": "ignite",
    "Lightning": "lightning",
    "Hugging Face": "transformers",
}
NAMES = tuple(_MODULES)


@cache
def _installed(name: str) -> bool:
    wanted = [_MODULES[name], *(["accelerate"] if name == "Hugging Face" else [])]
    missing = [module for module in wanted if importlib.util.find_spec(module) is None]
    if missing:
        print(f"{name} is skipped: {', '.join(missing)} is not installed (bench/requirements.txt).")
        return False
    if name == "Lightning":
        import lightning.pytorch  # noqa: F401 (it sets the level itself when imported)

        for logger in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
            logging.getLogger(logger).setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", module="lightning")
        warnings.filterwarnings("ignore", module="torch.utils.data")
    if name == "Hugging Face":
        from transformers.utils import logging as hf_logging

        hf_logging.set_verbosity_error()
    return True


# -- one event ------------------------------------------------------------------------------------


def events(*, hooks: int, loops: int, listening: bool = True) -> dict[str, Candidate]:
    """Return candidates that fire one event: seconds per hook that listens, else per event.

    Args:
        hooks: how many are registered.
        loops: how often a block fires.
        listening: whether they implement the event.
    """
    makers: dict[str, Callable[[int, bool], tuple[str, dict[str, Any]]]] = {
        "pluggy": _pluggy_event,
        "Ignite": _ignite_event,
        "Lightning": _lightning_event,
        "Hugging Face": _hugging_face_event,
    }
    candidates = {}
    for name, make in makers.items():
        if _installed(name):
            statement, names = make(hooks, listening)
            units = hooks if listening and hooks else 1
            candidates[name] = block(statement, loops=loops, units=units, **names)
    return candidates


def _pluggy_event(hooks: int, listening: bool) -> tuple[str, dict[str, Any]]:
    import pluggy

    spec, impl = pluggy.HookspecMarker("bench"), pluggy.HookimplMarker("bench")

    class Spec:
        @spec
        def on_step_end(self, step: int, loss: float) -> None: ...

        @spec
        def on_epoch_end(self, epoch: int) -> None: ...

    class OnStepEnd:
        @impl
        def on_step_end(self, step: int, loss: float) -> None: ...

    class OnEpochEnd:
        @impl
        def on_epoch_end(self, epoch: int) -> None: ...

    manager = pluggy.PluginManager("bench")
    manager.add_hookspecs(Spec)
    for _ in range(hooks):
        manager.register(OnStepEnd() if listening else OnEpochEnd())
    return "hook.on_step_end(step=step, loss=loss)", {"hook": manager.hook, "step": 1, "loss": 0.5}


def _ignite_event(hooks: int, listening: bool) -> tuple[str, dict[str, Any]]:
    from ignite.engine import Engine, Events

    engine = Engine(lambda engine, batch: None)
    event = Events.ITERATION_COMPLETED if listening else Events.EPOCH_COMPLETED
    for _ in range(hooks):
        engine.add_event_handler(event, _ignite_handler())
    return "fire(event)", {"fire": engine._fire_event, "event": Events.ITERATION_COMPLETED}


def _lightning_event(hooks: int, listening: bool) -> tuple[str, dict[str, Any]]:
    from lightning.pytorch.trainer.call import _call_callback_hooks

    trainer = _lightning_trainer()
    trainer.strategy.connect(_lightning_module())
    # A callback that does not implement the event inherits an empty method, which is called.
    trainer.callbacks = [_lightning_callback(listening) for _ in range(hooks)]
    statement = "fire(trainer, 'on_train_batch_end', None, None, 0)"
    return statement, {"fire": _call_callback_hooks, "trainer": trainer}


def _hugging_face_event(hooks: int, listening: bool) -> tuple[str, dict[str, Any]]:
    from transformers.trainer_callback import CallbackHandler, TrainerControl, TrainerState

    callbacks = [_hugging_face_callback(listening) for _ in range(hooks)]
    handler = CallbackHandler(callbacks, None, None, None, None)
    names = {"handler": handler, "state": TrainerState(), "control": TrainerControl()}
    return "handler.on_step_end(None, state, control)", names


# -- a training loop ------------------------------------------------------------------------------


def loops(*, hooks: int, steps: int, warmup: int) -> dict[str, Candidate]:
    """Return candidates that train for so many steps, each with so many do-nothing callbacks."""
    makers = {"Ignite": _ignite, "Lightning": _lightning, "Hugging Face": _hugging_face}
    return {
        name: partial(_timed, train, hooks, steps, warmup)
        for name, train in makers.items()
        if _installed(name)
    }


def hosts(make_hooks: Callable[[], list[Any]], *, steps: int, warmup: int) -> dict[str, Candidate]:
    """Return candidates that train in each host with hooks attached by Hookline."""
    makers = {"Ignite": _ignite, "Lightning": _lightning, "Hugging Face": _hugging_face}
    return {
        name: partial(_timed, train, 0, steps, warmup, make_hooks)
        for name, train in makers.items()
        if _installed(name)
    }


def _timed(
    train: Callable[..., None],
    hooks: int,
    steps: int,
    warmup: int,
    make_hooks: Callable[[], list[Any]] = list,
) -> float:
    batches = Batches(steps, warmup, ("x", "labels") if train is _hugging_face else None)
    train(batches, hooks, make_hooks())
    return batches.seconds_per_step


def _model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def _ignite(batches: Batches, hooks: int, attached: Sequence[Any] = (), **options: Any) -> None:
    from ignite.engine import Engine, Events

    model, optimizer = _model()

    def step(engine: Engine, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        x, y = batch
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        loss.backward()
        optimizer.step()

    engine = Engine(step)
    for event in (Events.ITERATION_STARTED, Events.ITERATION_COMPLETED):
        for _ in range(hooks):
            engine.add_event_handler(event, _ignite_handler())
    if attached:
        hookline.attach(engine, model=model, optimizer=optimizer, hooks=attached, **options)
    engine.run(batches, max_epochs=1)


def _ignite_handler() -> Callable[[Any], None]:
    def handler(engine: Any) -> None:
        pass

    return handler


def _lightning(batches: Batches, hooks: int, attached: Sequence[Any] = (), **options: Any) -> None:
    trainer = _lightning_trainer(callbacks=[_lightning_callback(True) for _ in range(hooks)])
    if attached:
        hookline.attach(trainer, hooks=attached, **options)
    trainer.fit(_lightning_module(), train_dataloaders=batches)


def _lightning_trainer(**options: Any) -> Any:
    from lightning import Trainer

    return Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def _lightning_module() -> Any:
    from lightning import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.optimizer = _model()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            return mse_loss(self.model(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.optimizer

    return Module()


@cache
def _lightning_callbacks() -> tuple[type, type]:
    from lightning import Callback

    class Listening(Callback):
        def on_train_batch_start(self, *args: Any) -> None: ...

        def on_train_batch_end(self, *args: Any) -> None: ...

    return Callback, Listening


def _lightning_callback(listening: bool) -> Any:
    return _lightning_callbacks()[listening]()


def _hugging_face(
    batches: Batches, hooks: int, attached: Sequence[Any] = (), **options: Any
) -> None:
    from transformers import PrinterCallback, Trainer, TrainingArguments

    model, optimizer = _model()

    class WithLoss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor]:
            return (mse_loss(self.model(x), labels),)

    class OurTrainer(Trainer):
        def get_train_dataloader(self) -> Any:
            return batches

    with tempfile.TemporaryDirectory() as folder:
        trainer = OurTrainer(
            WithLoss(),
            TrainingArguments(
                folder,
                num_train_epochs=1,
                use_cpu=True,
                disable_tqdm=True,
                logging_strategy="no",
                logging_nan_inf_filter=False,
                save_strategy="no",
                report_to=[],
                max_grad_norm=0.0,
            ),
            train_dataset=batches,
            optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)),
            callbacks=[_hugging_face_callback(True) for _ in range(hooks)],
        )
        trainer.remove_callback(PrinterCallback)
        if attached:
            hookline.attach(trainer, hooks=attached, **options)
        trainer.train()


@cache
def _hugging_face_callbacks() -> tuple[type, type]:
    from transformers import TrainerCallback

    class Listening(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...

    return TrainerCallback, Listening


def _hugging_face_callback(listening: bool) -> Any:
    return _hugging_face_callbacks()[listening]()
