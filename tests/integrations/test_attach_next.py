"""The next training run is found and attached, in bare loops and in libraries."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import hookline
from hookline.errors import ArgumentError, LoopError, NotSuppliedError, StopTraining
from hookline.integrations.library_session import LibrarySession
from hookline.integrations.scripts.loop_watch import PATIENCE
from hookline.integrations.scripts.script_hooks import ScriptHooks
from hookline.integrations.scripts.startup.sitecustomize import watch

CALL, INIT = nn.Module.__call__, torch.optim.Optimizer.__init__


class Losses(hookline.Hook):
    """Keeps what it sees."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.models: list[Any] = []

    def on_train_start(self, model):
        self.models.append(model)

    def on_step_end(self, loss: float):
        self.losses.append(loss)


class Forwards(hookline.Hook):
    """Counts the forwards that it sees."""

    count = 0

    def on_before_forward(self):
        self.count += 1


class NeedsEpochs(hookline.Hook):
    def on_epoch_end(self, epoch): ...


class StopsAt3(hookline.Hook):
    def on_step_end(self, trainer, step):
        if step == 3:
            trainer.stop("enough")


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    gc.collect()  # optimizers of other tests are not trained here
    yield
    assert nn.Module.__call__ is CALL
    assert torch.optim.Optimizer.__init__ is INIT
    assert not _global_optimizer_pre_hooks
    assert not _global_optimizer_post_hooks
    assert not [each for each in sys.meta_path if "sitecustomize" in type(each).__module__]


def net(width: int = 4) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))


def data(steps: int) -> list[torch.Tensor]:
    torch.manual_seed(2)
    return list(torch.randn(steps, 8, 4))


def train(model: Any, optimizer: Any, steps: int = 5) -> list[float]:
    losses = []
    for x in data(steps):
        loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for model in models for p in model.parameters()], 0.05)


# -- attach_next ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_made_before", [True, False])
def test_what_trains_next_is_attached_from_its_first_step_on(is_made_before: bool) -> None:
    plain = net()
    expected = train(plain, sgd(plain))
    model, seen, forwards = net(), Losses(), Forwards()
    optimizer = sgd(model) if is_made_before else None
    with hookline.attach_next(hooks=[seen, forwards]) as following:
        assert following.session is None
        optimizer = optimizer or sgd(model)
        with torch.no_grad():
            model(torch.ones(1, 4))  # an evaluation before training
        assert following.session is None
        assert train(model, optimizer) == expected
        assert following.session is not None
    assert seen.losses == pytest.approx(expected)
    assert forwards.count == len(expected)
    assert following.session.has_ended
    assert following.session.model is model
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_only_the_next_training_run_is_attached() -> None:
    seen = Losses()
    following = hookline.attach_next(hooks=[seen])
    for _ in range(2):
        model = net()
        train(model, sgd(model))
    assert len(seen.losses) == 5
    assert following.session is not None
    following.session.detach()


def test_attach_next_can_be_cancelled_and_checks_its_options_at_once() -> None:
    seen = Losses()
    following = hookline.attach_next(hooks=[seen])
    following.cancel()
    model = net()
    train(model, sgd(model))
    assert following.session is None
    with pytest.raises(ArgumentError, match="on_stop"):
        hookline.attach_next(hooks=[seen], on_stop="explode")
    with pytest.raises(TypeError, match="hoks"):
        hookline.attach_next(hooks=[seen], hoks=[])


def test_hooks_that_do_not_get_what_they_need_raise_before_the_first_step() -> None:
    model = net()
    before = [p.clone() for p in model.parameters()]
    with (
        pytest.raises(NotSuppliedError, match=r"NeedsEpochs.* needs"),
        hookline.attach_next(hooks=[NeedsEpochs()]),
    ):
        train(model, sgd(model))
    assert all(map(torch.equal, model.parameters(), before))


# -- bare loops -----------------------------------------------------------------------------------


class Script:
    """Attaches to all that is trained, as `hookline run` does in its process."""

    def __init__(self, *hooks: Callable[[], Any], **options: Any) -> None:
        self.seen: list[Losses] = []
        self.sessions: list[Any] = []
        self._make = hooks or (self._add,)
        self.hooks = ScriptHooks(
            lambda _: {"hooks": [make() for make in self._make], "runs": None},
            loop_options={"on_stop": "raise"},
            on_attach=self.sessions.append,
            **options,
        )

    def _add(self) -> Losses:
        self.seen.append(Losses())
        return self.seen[-1]

    def __enter__(self) -> Script:
        self._hook = sys.excepthook
        self._undo = watch(lambda _: self.hooks)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.excepthook = self._hook
        self._undo()
        self.hooks.stop()
        for session in self.sessions:
            session.detach()


def test_a_second_training_run_ends_the_first_session() -> None:
    with Script() as script:
        for _ in range(2):
            model = net()
            torch.optim.Adam(model.parameters())  # thrown away
            train(model, sgd(model))
        assert [session.has_ended for session in script.sessions] == [True, False]
    assert [len(seen.losses) for seen in script.seen] == [5, 5]


def test_a_gan_is_attached_when_all_of_its_models_are_known(capsys: Any) -> None:
    with Script() as script:
        generator, critic = nn.Linear(2, 4), nn.Linear(4, 1)
        optimizers = sgd(critic), sgd(generator)
        for _ in range(4):
            fake = generator(torch.randn(8, 2))
            critic(fake.detach()).mean().backward()
            optimizers[0].step()
            (-critic(fake).mean()).backward()
            optimizers[1].step()
            for each in optimizers:
                each.zero_grad()
    [session] = script.sessions
    assert list(session.model) == [generator, critic]
    assert tuple(session.optimizers) == optimizers
    assert session.step == 3
    assert "Hooks are called from step 2 of Linear, Linear with SGD, SGD on" in (
        capsys.readouterr().err
    )


def test_an_optimizer_that_never_steps_is_left_out_and_may_train_later() -> None:
    with Script() as script:
        first, second = net(), net(8)
        used, later = sgd(first), sgd(second)
        train(first, used, PATIENCE + 5)
        assert [s.model for s in script.sessions] == [first]
        assert script.sessions[0].step == 5
        train(second, later, 5)
        assert [s.model for s in script.sessions] == [first, second]
    assert script.sessions[1].step == 4  # its first step was not foreseen


def test_parts_of_a_model_that_are_called_one_by_one_are_models() -> None:
    with Script() as script:
        encoder, decoder = nn.Linear(4, 3), nn.Linear(3, 1)
        train(lambda x: decoder(encoder(x)), sgd(encoder, decoder))
    [session] = script.sessions
    assert list(session.model) == [encoder, decoder]
    assert session.step == 4


def test_a_part_that_is_called_before_its_model_is_no_model_of_its_own() -> None:
    with Script() as script:
        model = net()
        optimizer = sgd(model)
        model[0](torch.ones(1, 4))
        train(model, optimizer)
    [session] = script.sessions
    assert session.model is model
    assert session.step == 4


def test_an_optimizer_that_was_thrown_away_is_not_waited_for() -> None:
    gc.disable()
    try:
        with Script() as script:
            model = net()
            cycle: list[Any] = [sgd(model)]
            cycle.append(cycle)
            del cycle
            train(model, sgd(model))
    finally:
        gc.enable()
    assert [session.step for session in script.sessions] == [5]


def test_tensors_of_no_module_are_left_alone(capsys: Any) -> None:
    with Script() as script:
        image = torch.zeros(4, requires_grad=True)
        optimizer = torch.optim.SGD([image], 0.1)
        for _ in range(PATIENCE + 3):
            (image - 1).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        script.hooks.report(is_settled=False)
    assert script.sessions == []
    assert "Of the optimizers (SGD), no module with their parameters was called" in (
        capsys.readouterr().err
    )


def test_a_closure_is_attached_before_its_second_step() -> None:
    def run() -> tuple[list[float], nn.Module]:
        model = net()
        optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=4)
        losses = []
        for x in data(4):

            def closure(x: torch.Tensor = x) -> Any:
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
        return losses, model

    expected, plain = run()
    with Script() as script:
        losses, model = run()
    assert losses == expected
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert script.seen[0].losses == pytest.approx(expected[1:])


def test_a_lazily_built_model_is_attached_when_it_has_parameters() -> None:
    with Script() as script:
        model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))
        train(model, torch.optim.SGD(model.parameters(), 0.1))
    assert [session.step for session in script.sessions] == [4]


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


@pytest.mark.parametrize("kind", ["wrapped", "in place", "step"])
def test_nothing_is_compiled_that_would_not_have_been(kind: str) -> None:
    def compilations() -> tuple[int, list[torch.Tensor]]:
        torch._dynamo.reset()
        graphs: list[Any] = []

        def backend(graph: Any, inputs: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        model = Own()
        optimizer = sgd(model)
        called: Any = model
        if kind == "wrapped":
            called = torch.compile(model, backend=backend, fullgraph=True)
        elif kind == "in place":
            model.compile(backend=backend, fullgraph=True)
        else:
            called = torch.compile(lambda x: model(x), backend=backend, fullgraph=True)
        with torch.no_grad():
            called(torch.ones(8, 4))
        train(called, optimizer, 3)
        return len(graphs), list(model.parameters())

    expected, plain = compilations()
    with Script() as script:
        found, trained = compilations()
    torch._dynamo.reset()
    assert found == expected
    assert all(map(torch.equal, trained, plain))
    assert [session.step for session in script.sessions] == ([] if kind == "step" else [3])


def test_scheduler_and_scaler_are_found() -> None:
    with Script() as script:
        model = net()
        scaler = torch.amp.GradScaler("cpu")
        optimizer = sgd(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        losses = []
        for x in data(3):
            losses.append(model(x).pow(2).mean())
            scaler.scale(losses[-1]).backward()
            assert script.sessions[0].scaler is scaler  # before its first step
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
    [session] = script.sessions
    assert script.seen[0].losses == pytest.approx([loss.item() for loss in losses])
    assert set(map(id, session.schedulers)) == {id(scheduler), id(plateau)}
    assert session.step == 3


def test_the_script_goes_on_where_hooks_cannot_be_attached(capsys: Any, caplog: Any) -> None:
    model = net()
    expected = train(model, sgd(model))

    def fails() -> Any:
        raise ValueError("no such device")

    with Script(fails) as script:
        model = net()
        assert train(model, sgd(model)) == expected
    assert script.sessions == []
    message = "No hooks are attached to Sequential with SGD, and the script goes on without them."
    assert f"hookline: {message} ValueError: no such device" in capsys.readouterr().err
    with Script(NeedsEpochs, Losses) as script:
        model = net()
        assert train(model, sgd(model)) == expected
    assert script.sessions[0].step == 5
    assert "NeedsEpochs" in caplog.text  # is warned about; the other hook is called
    assert len(script.sessions[0].hooks.get_hook("losses").losses) == 5


class NeedsArgument(nn.Linear):
    def parameters(self, what: str) -> Any:  # type: ignore[override]
        return super().parameters()


@dataclass
class Unhashable(torch.optim.SGD):
    params: Any

    def __post_init__(self) -> None:
        super().__init__(self.params, 0.05)


@pytest.mark.parametrize("kind", ["module", "optimizer"])
def test_what_cannot_be_watched_is_left_alone(kind: str, capsys: Any) -> None:
    model = NeedsArgument(4, 1) if kind == "module" else net()
    parameters = list(nn.Module.parameters(model))
    before = [p.clone() for p in parameters]
    for strict in (False, True):
        with Script(strict=strict) as script, suppress(TypeError):
            made = torch.optim.SGD(parameters, 0.05) if kind == "module" else Unhashable(parameters)
            train(model, made)
            assert not strict
        assert script.sessions == []
    assert capsys.readouterr().err.count("No hooks are attached to this loop") == 1
    assert not any(map(torch.equal, parameters, before))


def test_strict_raises_before_the_first_step() -> None:
    model = net()
    with Script(NeedsEpochs, strict=True), pytest.raises(NotSuppliedError):
        train(model, sgd(model))
    assert all(map(torch.equal, model.parameters(), net().parameters()))


def test_a_hook_that_stops_raises_in_the_step() -> None:
    model = net()
    with Script(StopsAt3) as script, pytest.raises(StopTraining, match=r"step 3 \(enough\)"):
        train(model, sgd(model))
    assert script.sessions[0].step == 3


def test_hooklines_own_trainer_is_left_alone(tmp_path: Path) -> None:
    with Script() as script:
        model = net()
        trainer = hookline.Trainer(
            {"max_steps": 2, "runs": None, "progress": False},
            model,
            sgd(model),
            loss_fn=lambda outputs, batch: outputs.mean(),
            step_fn=None,
        )
        trainer.fit([(x, x.sum(1, keepdim=True)) for x in data(2)])
    assert script.sessions == []


# -- trainers of libraries ------------------------------------------------------------------------


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((4,), i / 8), "labels": torch.ones(1)}


class ReturnsLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.mse_loss(self.net(x), labels)}


class Epochs(Losses):
    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[int] = []

    def on_epoch_end(self, epoch):
        self.epochs.append(epoch)


def run_hugging_face(folder: Path, **options: Any) -> nn.Module:
    from transformers import Trainer, TrainingArguments

    class Own(Trainer):
        def train(self, *args: Any, **kwargs: Any) -> Any:
            return super().train(*args, **kwargs)

    kind = Own if options.pop("is_overridden", False) else Trainer
    settings: dict[str, Any] = {"num_train_epochs": 2, "per_device_train_batch_size": 4}
    settings |= {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    arguments = TrainingArguments(str(folder), **settings, **options)
    trainer = kind(model=ReturnsLoss(), args=arguments, train_dataset=Rows())
    assert trainer.train().global_step == 4
    return trainer.model


def run_overridden(folder: Path) -> nn.Module:
    return run_hugging_face(folder, is_overridden=True)


def run_lightning(folder: Path) -> nn.Module:
    import lightning.pytorch as lightning
    from torch.utils.data import DataLoader

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any) -> torch.Tensor:
            return F.mse_loss(self.net(batch["x"]), batch["labels"])

        def configure_optimizers(self) -> Any:
            return sgd(self)

    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", default_root_dir=folder, **quiet)
    model = Module()
    trainer.fit(model, DataLoader(Rows(), 4))
    assert trainer.global_step == 4
    return model


def run_ignite(folder: Path) -> nn.Module:
    from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
    from ignite.metrics import Loss

    model = net()
    trainer = create_supervised_trainer(model, sgd(model), F.mse_loss)
    evaluator = create_supervised_evaluator(model, {"loss": Loss(F.mse_loss)})
    pairs = [(x, x.sum(1, keepdim=True)) for x in data(2)]
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(pairs))
    assert trainer.run(pairs, max_epochs=2).iteration == 4
    gc.collect()  # the engines refer to each other
    return model


LIBRARIES = [run_hugging_face, run_overridden, run_lightning, run_ignite]


@pytest.mark.parametrize("run", LIBRARIES)
def test_trainers_of_libraries_have_epochs_and_the_same_weights(run: Any, tmp_path: Path) -> None:
    plain = run(tmp_path)
    with Script(Epochs) as script:
        models = [run(tmp_path) for _ in range(2)]
    assert [session.step for session in script.sessions] == [4, 4]
    hook = script.sessions[0].hooks.get_hook("epochs")
    assert hook.epochs == [0, 1]
    assert len(hook.losses) == 4
    for model in models:
        assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_the_other_engine_of_an_ignite_script_validates(tmp_path: Path) -> None:
    class Validations(hookline.Hook):
        def __init__(self) -> None:
            self.values: list[float] = []

        def on_validation_end(self, metrics):
            self.values.append(metrics["val/loss"])

    with Script(Validations) as script:
        run_ignite(tmp_path)
    assert len(script.sessions[0].hooks.get_hook("validations").values) == 2


@pytest.mark.parametrize("run", LIBRARIES)
def test_trainers_go_on_where_hooks_cannot_be_attached(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def connect(self: Any, *args: Any, **kwargs: Any) -> None:
        raise LoopError("the model is too strange")

    plain = run(tmp_path)
    monkeypatch.setattr(LibrarySession, "connect", connect)
    with Script(Epochs):
        model = run(tmp_path)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert "goes on without them. the model is too strange" in capsys.readouterr().err
    with Script(Epochs, strict=True), pytest.raises(LoopError, match="too strange"):
        run(tmp_path)


def test_a_trainer_that_searches_its_batch_size_has_no_hooks(tmp_path: Path, capsys: Any) -> None:
    with Script(Epochs) as script:
        run_hugging_face(tmp_path, auto_find_batch_size=True)
    assert script.sessions == []
    assert "auto_find_batch_size" in capsys.readouterr().err
