"""A trainer with Accelerate: alone, and in two processes that `accelerate launch` has started."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate_launch import TWO, launch
from distributed_training import loaders, train
from test_strategies import ORDER_OF_SUMS, assert_close, records
from torch import nn

import hookline
from hookline import AccelerateTrainer, ModelCheckpoint, Trainer, TrainerConfig, TrainingError

SCRIPT = Path(__file__).parents[1] / "support" / "accelerated_training.py"
LOSS = nn.functional.mse_loss
NET = """
import torch

def batches():
    return [(torch.ones(2, 8), torch.ones(2, 4)) for _ in range(6)]
"""
TRAINING = """
trainer: {strategy: accelerate, max_epochs: 1, precision: bf16}
model: {class_path: torch.nn.Linear, init_args: {in_features: 8, out_features: 4}}
optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}
data: {train: net.batches}
"""


def reset_accelerate() -> None:
    """Forget what Accelerators share in a process."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.fixture(autouse=True)
def _own_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")  # plugins set it for the whole process
    reset_accelerate()
    yield
    reset_accelerate()


def make_parts(dropout: float = 0.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = nn.Linear(8, 16), nn.Dropout(dropout), nn.ReLU(), nn.Linear(16, 4)
    model = nn.Sequential(*layers)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def make(kind: Any = AccelerateTrainer, folder: Path | None = None, **more: Any) -> Any:
    arguments = {name: more.pop(name) for name in ("accelerator", "schedulers") if name in more}
    model, optimizer = more.pop("parts", None) or make_parts()
    settings = {"seed": 3, "clip_norm": 0.5, "progress": "off", "runs": folder}
    config = TrainerConfig(**(settings | more))
    return kind(config, model, optimizer, loss_fn=LOSS, **arguments)


def weights(trainer: Trainer) -> list[Any]:
    return [value.tolist() for value in trainer.model.state_dict().values()]


# -- in one process --------------------------------------------------------------------------------


def test_alone_it_trains_like_the_trainer_bit_for_bit() -> None:
    expected = weights(make(Trainer, accumulate=4).fit(loaders()[0]))
    sync: list[bool] = []

    class Watch(hookline.Hook):
        def on_before_forward(self, trainer: Trainer) -> None:
            sync.append(trainer.accelerator.sync_gradients)

    trainer = make(accumulate=4)
    trainer.add_hook(Watch())
    assert weights(trainer.fit(loaders()[0])) == expected
    assert sync == [*[False, False, False, True] * 4, False, True]
    # A second trainer, with a model and an optimizer that the Accelerator has prepared before.
    again = make(parts=(trainer.model, trainer.optimizers[0]), accelerator=trainer.accelerator)
    again.fit(loaders()[0])
    assert again.step == 5


def test_all_ways_to_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make_parts()
    options = {"loss_fn": LOSS, "runs": None, "progress": "off"}
    got = hookline.get_trainer("accelerate", model, loaders()[0], optimizer, "cpu", **options)
    assert type(got) is AccelerateTrainer
    got.train()
    assert got.step == 18
    own = Accelerator()
    assert make(Trainer, accelerator=own).accelerator is own
    assert make(Trainer, strategy="accelerate").accelerator is not None
    assert make(Trainer).accelerator is None
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # as `accelerate launch` does
    assert make(Trainer).accelerator is not None
    with pytest.raises(TrainingError, match="strategy='ddp', which does not use an Accelerator"):
        make(strategy="ddp")
    with pytest.raises(hookline.ArgumentError, match=r"expected an accelerate\.Accelerator"):
        make(accelerator="mine")


def test_accumulation_and_precision_come_from_the_accelerator() -> None:
    expected = weights(make(Trainer, accumulate=3).fit(loaders()[0]))
    accelerator = Accelerator(gradient_accumulation_steps=3, mixed_precision="bf16")
    trainer = make(accelerator=accelerator)
    assert (trainer.config.accumulate, trainer.config.precision) == (3, "bf16")
    kinds: list[torch.dtype] = []
    trainer.model[0].register_forward_hook(lambda *call: kinds.append(call[2].dtype))
    trainer.fit(loaders()[0])
    assert set(kinds) == {torch.bfloat16}
    for value, other in zip(weights(trainer), expected, strict=True):
        torch.testing.assert_close(torch.tensor(value), torch.tensor(other), rtol=0, atol=0.02)
    with pytest.raises(TrainingError, match=r"accumulate=2, but .*accumulation_steps=3"):
        make(accelerator=accelerator, accumulate=2)
    with pytest.raises(TrainingError, match=r"precision='fp32', but .*mixed_precision='bf16'"):
        make(accelerator=accelerator, precision="fp32")
    with pytest.raises(TrainingError, match="cannot be started: AcceleratorState has already"):
        make(precision="fp32")


@pytest.mark.parametrize("seedable", [False, True])
@pytest.mark.parametrize("prepared", [False, True])
def test_a_resumed_run_is_bit_identical(tmp_path: Path, prepared: bool, seedable: bool) -> None:
    results = []
    for name, limits in {"whole": [30], "parts": [22, 30]}.items():
        for limit in limits:
            config = DataLoaderConfiguration(use_seedable_sampler=seedable)
            accelerator = Accelerator(dataloader_config=config)
            data: Any = loaders()[0]
            data = accelerator.prepare(data) if prepared else data
            options = {"accelerator": accelerator, "max_steps": limit, "parts": make_parts(0.3)}
            trainer = make(folder=tmp_path / name, **options)
            trainer.add_hook(ModelCheckpoint(every_n_steps=22))
            found = sorted((tmp_path / name).iterdir()) if limits[0] < limit else [None]
            trainer.fit(data, resume_from=found[0])
        results.append(weights(trainer))
    assert results[0] == results[1]


def test_a_trigger_stops_training() -> None:
    class Trigger(hookline.Hook):
        def on_step_end(self, trainer: Trainer, step: int) -> None:
            if step == 4:
                trainer.accelerator.set_trigger()

    trainer = make()
    trainer.add_hook(Trigger())
    trainer.fit(loaders()[0])
    assert (trainer.step, trainer.status) == (4, "stopped")
    assert trainer.stop_reason == "accelerator.set_trigger() was called"


def test_the_scaler_is_the_accelerators_and_a_skipped_step_is_known() -> None:
    """Accelerate has fp16 on GPUs only: its scaler is put in place as it would be there."""
    accelerator = Accelerator()
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    accelerator.state._mixed_precision, accelerator.native_amp = "fp16", False
    skipped: list[Any] = []
    norms: list[float] = []
    stepped: list[bool] = []

    class Overflow(hookline.Hook):
        intervenes = True

        def on_before_optimizer_step(self, model: nn.Module, step: int) -> None:
            norm = torch.linalg.vector_norm(model[0].weight.grad).item()
            norms.append(norm)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                batch[1].fill_(1e38)

        def on_step_skipped(self, trainer: Trainer, reason: str) -> None:
            skipped.append((trainer.step, reason, trainer.accelerator.optimizer_step_was_skipped))

        def on_after_optimizer_step(self, trainer: Trainer) -> None:
            stepped.append(trainer.accelerator.optimizer_step_was_skipped)

    model, optimizer = make_parts()
    config = TrainerConfig(progress="off", runs=None, clip_norm=0.5, on_nan="continue")
    with pytest.raises(TrainingError, match="no fp16 on the CPU"):
        AccelerateTrainer(config, model, optimizer, accelerator=accelerator)
    accelerator.state._mixed_precision = "bf16"
    trainer = AccelerateTrainer(config, model, optimizer, loss_fn=LOSS, accelerator=accelerator)
    trainer.add_hook(Overflow())
    trainer.fit(loaders()[0])
    assert skipped == [(3, "the scaler found non-finite gradients", True)]
    assert trainer.step == 17
    assert stepped == [False] * 17
    finite = [norm for norm in norms if norm == norm]
    assert len(finite) == 17
    assert max(finite) < 0.51  # unscaled and clipped
    assert trainer.state_dict()["scaler"]["scale"] == 2.0**3


def test_several_optimizers_and_a_prepared_scheduler() -> None:
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[1], 5)
    _, first, prepared = accelerator.prepare(model, optimizers[0], scheduler)
    options = {"schedulers": [prepared], "accelerator": accelerator}
    trainer = make(parts=(model, [first, optimizers[1]]), **options)
    trainer.fit(loaders()[0])
    assert [type(one).__name__ for one in trainer.optimizers] == ["SGD", "SGD"]
    assert trainer.schedulers == [scheduler]
    assert optimizers[1].param_groups[0]["lr"] == pytest.approx(0.1 * 0.1**3)


# -- what is refused -------------------------------------------------------------------------------


def test_unsupported_plugins_and_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator()
    for kind in ("DEEPSPEED", "MEGATRON_LM"):
        monkeypatch.setitem(AcceleratorState._shared_state, "distributed_type", _Kind(kind))
        with pytest.raises(TrainingError, match=r"uses (DeepSpeed|Megatron-LM), .*not support"):
            make(accelerator=accelerator)
    monkeypatch.undo()
    with monkeypatch.context() as patch:
        patch.setattr(
            accelerator.state, "parallelism_config", type("Config", (), {"tp_enabled": True})()
        )
        with pytest.raises(TrainingError, match=r"parallelism \(tp_size above 1\)"):
            make(accelerator=accelerator)

    class DeepSpeedEngine(nn.Linear):
        """As that of DeepSpeed, by its name."""

    engine = DeepSpeedEngine(8, 4)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
    for use in (Trainer, AccelerateTrainer):
        with pytest.raises(TrainingError, match="DeepSpeedEngine, which is not supported"):
            make(use, parts=(engine, optimizer))
    with pytest.raises(TrainingError, match="DeepSpeedEngine, which is not supported"):
        hookline.attach(engine, optimizer)


class _Kind:
    def __init__(self, value: str) -> None:
        self.value = value


def test_an_accelerator_that_does_not_see_the_other_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerator = Accelerator()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TrainingError, match=r"has 1 process, but .* 2 .*Accelerator\(cpu=True\)"):
        make(accelerator=accelerator)
    with pytest.raises(TrainingError, match=r"device='meta', but the Accelerator has .*'cpu'"):
        monkeypatch.delenv("WORLD_SIZE")
        make(accelerator=accelerator, device="meta")


def test_without_accelerate_the_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(TrainingError, match=r"pip install 'hookline\[accelerate\]'"):
        make()


# -- in two processes ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("accelerate")
    names = ("train", "decide", "resume", "accumulate", "prepared", "trigger", "fsdp")
    launch(str(SCRIPT), str(folder), *names, options=TWO)
    ranks = [
        {name: json.loads((folder / f"{name}-{rank}.json").read_text()) for name in names}
        for rank in (0, 1)
    ]
    return ranks, folder


def test_two_processes_train_like_one_with_twice_the_batches(both, tmp_path: Path) -> None:
    expected = train(tmp_path, accumulate=2)
    for rank in (rank["train"] for rank in both[0]):
        assert_close(rank["weights"], expected["weights"])
        assert rank["norms"] == pytest.approx(expected["norms"], rel=ORDER_OF_SUMS)
        assert rank["validated"] == pytest.approx(expected["validated"], rel=ORDER_OF_SUMS)
    first, second = (rank["train"] for rank in both[0])
    assert first["weights"] == second["weights"]
    assert first["run"] == second["run"]
    assert (first["on_main"], second["on_main"]) == (18, 0)
    values = [[row["value"] for row in records(f)] for f in (both[1] / "train", tmp_path)]
    assert values[0] == pytest.approx(values[1], rel=ORDER_OF_SUMS)


def test_what_one_process_decides_happens_in_both(both) -> None:
    for rank in both[0]:
        decided, triggered = rank["decide"], rank["trigger"]
        assert (decided["stop"]["steps"], decided["stop"]["status"]) == (5, "stopped")
        assert (decided["skip"]["steps"], len(decided["skip"]["skipped"])) == (8, 1)
        assert decided["save"]["saved"] == ["mine"]
        assert decided["toggle"]["hooks"]["on_main"] == "disabled"
        assert (triggered["stopped"]["steps"], triggered["stopped"]["status"]) == (5, "stopped")
        assert (triggered["checked"]["steps"], triggered["checked"]["found"]) == (9, 1)


def test_resumed_runs_of_two_processes_are_bit_identical(both) -> None:
    for rank in both[0]:
        for name in ("resume", "prepared"):  # also with loaders that the user has prepared
            whole, parts = rank[name]["whole"], rank[name]["parts"]
            assert whole["weights"] == parts["weights"]
            assert whole["losses"][-len(parts["losses"]) :] == parts["losses"]
            assert whole["norms"][-1] == parts["norms"][-1]
        assert rank["prepared"]["parts"]["counter"] == 12  # registered for checkpointing
    assert both[0][0]["prepared"]["whole"]["weights"] == both[0][1]["prepared"]["whole"]["weights"]


def test_what_the_user_has_prepared_is_used(both) -> None:
    for rank in both[0]:
        whole = rank["prepared"]["whole"]
        assert (whole["is_own"], whole["accumulate"], whole["models"]) == (True, 2, 1)
        assert whole["samples"] == 2 * 33  # gather_for_metrics drops what was added to a batch
        assert whole["lr"] == pytest.approx(0.01 * 0.1**6)  # two steps of the scheduler for each


def test_gradients_are_reduced_once_per_step(both) -> None:
    first, second = (rank["accumulate"] for rank in both[0])
    reduced = [False, False, True, False, False, True, True]
    for strategy in ("accelerate", "ddp"):
        one, other = first[f"{strategy} known"], second[f"{strategy} known"]
        same = [a == b for a, b in zip(one["gradients"], other["gradients"], strict=True)]
        assert same == reduced
        assert one["weights"] == other["weights"]
        # Without a length, nobody knows which batch ends the last step.
        one, other = first[f"{strategy} streamed"], second[f"{strategy} streamed"]
        assert one["gradients"] == other["gradients"]
        assert one["weights"] == other["weights"]
        assert one["steps"] == 3
    assert first["accelerate known"]["sync"] == reduced
    assert first["accelerate known"]["weights"] == first["ddp known"]["weights"]


def test_an_fsdp2_plugin_shards_the_model(both) -> None:
    for rank in (rank["fsdp"] for rank in both[0]):
        assert "FSDP plugin on the CPU, where Accelerate ignores it" in rank["refused"]
        assert rank["kinds"] == ["DTensor"]
        assert rank["sync"] == [*[False, True] * 4, True]
    from accelerated_training import make as make_alone
    from accelerated_training import parts

    model, optimizer, _ = parts()
    alone, watch = make_alone(None, model, optimizer, accumulate=4, strategy="single")
    alone.fit(*loaders())
    expected = {name: value.tolist() for name, value in alone.model.state_dict().items()}
    for rank in (rank["fsdp"] for rank in both[0]):
        assert_close(rank["weights"], expected)
        assert rank["norms"] == pytest.approx(watch.norms, rel=ORDER_OF_SUMS)


def test_a_config_file_under_accelerate_launch(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "train.yaml").write_text(TRAINING)
    launch("-m", "hookline", "train", "train.yaml", options=TWO, cwd=tmp_path)
    (run,) = (tmp_path / "runs").iterdir()
    opened = hookline.open_run(run)
    assert opened.status == "completed"
    assert opened.overview()["steps"] == 3  # of 6 batches, 2 in each
    assert opened.manifest["config"]["trainer"]["precision"] == "bf16"
