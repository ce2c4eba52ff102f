"""Models with adapters of PEFT: hooks, checkpoints, resuming, and the export of averages."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import hookline

TOKENS = torch.arange(8 * 6).reshape(8, 6) % 32


def make_base() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 32, "n_positions": 8}
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLMLoss"}
    return GPT2LMHeadModel(GPT2Config(**sizes, **tokens))


def make_config() -> LoraConfig:
    return LoraConfig(
        r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1, task_type="CAUSAL_LM"
    )


def make_model() -> PeftModel:
    return get_peft_model(make_base(), make_config())


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def step(model: Any, optimizer: torch.optim.Optimizer, first: int) -> None:
    tokens = TOKENS[first : first + 2]
    optimizer.zero_grad()
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return copy.deepcopy(model.state_dict())


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def train(model: Any, hooks: list[hookline.Hook], **options: Any) -> hookline.Session:
    optimizer = make_optimizer(model)
    torch.manual_seed(1)
    with hookline.attach(model, optimizer, hooks=hooks, **options) as session:
        for first in range(0, 8, 2):
            step(model, optimizer, first)
    return session


def averages(validate_with: bool = False) -> hookline.EMA:
    return hookline.EMA(decay=0.5, every_n_steps=1, validate_with=validate_with)


def test_peft_saves_and_loads_the_average_of_an_adapter(tmp_path: Path) -> None:
    model, ema = make_model(), averages()
    train(model, [ema])
    model.save_pretrained(str(tmp_path), state_dict=ema.averaged_state_dict())
    averaged = make_model()
    ema.apply_to(averaged)
    loaded = PeftModel.from_pretrained(make_base(), str(tmp_path))
    assert_same(averaged.state_dict(), loaded.state_dict())


def test_hooks_do_not_change_how_an_adapter_is_trained(tmp_path: Path) -> None:
    plain = make_model()
    optimizer = make_optimizer(plain)
    torch.manual_seed(1)
    for first in range(0, 8, 2):
        step(plain, optimizer, first)
    model = make_model()
    hooks = [hookline.GradientMonitor(), averages(), hookline.probes.Monitor("**.c_attn.lora_A.*")]
    session = train(model, hooks, runs=tmp_path)
    assert_same(plain.state_dict(), model.state_dict())
    assert session.hooks.summary().failures == {}
    names = {row["name"] for row in hookline.open_run(session.run.path).metrics()}
    assert any("lora_A" in name for name in names)


def test_a_bare_loop_with_an_adapter_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    whole = make_model()
    ema = averages()
    train(whole, [ema], runs=tmp_path / "whole")
    model = make_model()
    optimizer = make_optimizer(model)
    torch.manual_seed(1)
    with hookline.attach(model, optimizer, hooks=[averages()], runs=tmp_path / "runs") as session:
        for first in (0, 2):
            step(model, optimizer, first)
        session.save_checkpoint(tmp_path / "saved", wait=True)
    resumed, again = make_model(), averages()
    optimizer = make_optimizer(resumed)
    with hookline.attach(resumed, optimizer, hooks=[again], runs=tmp_path / "runs") as session:
        loaded = session.load_checkpoint(tmp_path / "saved")
        for first in range(2 * loaded.step, 8, 2):
            step(resumed, optimizer, first)
    assert_same(whole.state_dict(), resumed.state_dict())
    assert_same(ema.averaged_state_dict(), again.averaged_state_dict())


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return len(TOKENS)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": TOKENS[index], "labels": TOKENS[index]}


def fit(folder: Path, *hooks: hookline.Hook, resume: Path | None = None) -> Any:
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        per_device_train_batch_size=2,
        learning_rate=0.01,
        save_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    torch.manual_seed(1)
    trainer = Trainer(make_model(), arguments, train_dataset=Rows())
    hookline.attach(trainer, hooks=list(hooks), runs=folder / "runs")
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


def test_a_hugging_face_training_with_an_adapter_is_resumed_with_its_average(
    tmp_path: Path,
) -> None:
    ema = averages()
    whole = fit(tmp_path, ema)
    again = averages()
    resumed = fit(tmp_path, again, resume=tmp_path / "checkpoint-2")
    assert_same(weights(whole.model), weights(resumed.model))
    assert_same(ema.averaged_state_dict(), again.averaged_state_dict())
