"""`hookline demo`: train a small GPT on the text of Python's help, with hooks.

This file is also an example: two hooks of its own come first, then the run in `run_demo`,
then the data and the model.
"""

from __future__ import annotations

import hashlib
import math
import textwrap
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hookline.config.trainer_config import TrainerConfig
from hookline.context import Metrics
from hookline.hook import Hook
from hookline.hooks.lint.lint_hook import Lint
from hookline.hooks.monitoring.gradient_monitor import GradientMonitor
from hookline.hooks.monitoring.lr_monitor import LRMonitor
from hookline.hooks.monitoring.outlier_monitor import OutlierMonitor
from hookline.printable import printable
from hookline.runs.location import shorten_path
from hookline.trainer.trainer import Trainer

BATCH, CONTEXT, WIDTH, HEADS, BLOCKS = 48, 32, 96, 4, 2
PEAK_LR, WARM_UP, CLIP = 7e-3, 20, 1.0
PROMPT, GENERATED, TEMPERATURE = "The ", 200, 0.7
VALIDATIONS = 10  # about so many, independent of the steps

console = Console(
    highlight=False, markup=False, emoji=False, soft_wrap=True
)  # NO_COLOR and pipes are respected


class ValidationCurve(Hook):
    """Keeps each validation loss, and adds a metric that is displayed and logged like others."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []

    def on_validation_end(self, step: int, metrics: Metrics) -> None:
        """Keep the loss, and add it in bits per character."""
        loss = float(metrics["val/loss"])
        metrics["val/bits_per_char"] = loss / math.log(2)
        self.points.append((step, loss))


class CheckpointAtEnd(Hook):
    """Saves a checkpoint when training has completed."""

    critical = True  # a failure to save raises an error

    def __init__(self) -> None:
        self.path: Path | None = None

    def on_train_end(self, trainer: Trainer, status: str) -> None:
        """Save, unless training was interrupted."""
        if status == "completed":
            self.path = trainer.save_checkpoint()


def make_trainer(
    steps: int = 400, out: Path = Path("runs"), seed: int = 0
) -> tuple[Trainer, DataLoader[Any], DataLoader[Any]]:
    """Return the demo's trainer with its data to train and to validate on."""
    torch.manual_seed(seed)
    text = _text()
    model = GPT(len(text.letters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _lr_factor(step, steps))
    config = TrainerConfig(
        max_epochs=None,
        max_steps=steps,
        clip_norm=CLIP,
        validate_every_epochs=None,
        validate_every_steps=math.ceil(steps / VALIDATIONS),
        sanity=True,  # adds a point before training
        seed=seed,
        runs=out,
    )
    trainer = Trainer(
        config, model, optimizer, scheduler, loss_fn=_loss, tokens_fn=lambda batch: batch[0].numel()
    )
    trainer.add_hook(ValidationCurve())
    trainer.add_hook(CheckpointAtEnd())
    often = math.ceil(steps / 40)  # what the report draws layer by layer
    trainer.add_hook(GradientMonitor(every=often))
    trainer.add_hook(OutlierMonitor(every=often))
    trainer.add_hook(LRMonitor())
    trainer.add_hook(Lint())
    return trainer, *_loaders(text.data, seed)


def run_demo(*, steps: int, out: Path, seed: int) -> None:
    """Train for a number of optimizer steps, and print the results."""
    torch.set_num_threads(1)  # faster than two for a model this small, and the same everywhere
    trainer, train, val = make_trainer(steps, out, seed)
    model, text = trainer.model, _text()
    _introduce(model, text, steps, seed)
    _show_text("Text generated before training", _generate(model, text, seed))
    try:
        trainer.fit(train, val)
    except KeyboardInterrupt:
        if trainer.run is not None:
            place = shorten_path(trainer.run.path)
            console.print(printable(f"The interrupted run is in {place}", 1000))
        raise

    hooks: dict[str, Any] = {name: trainer.hooks.get_hook(name) for name in trainer.hooks}
    _show_curve(hooks["validation_curve"].points)
    _show_text("Text generated after training", _generate(model, text, seed))
    _show_files(trainer.run.path, hooks["checkpoint_at_end"].path)


# -- output ---------------------------------------------------------------------------------------


def _show_heading(title: str) -> None:
    console.print(title, style="bold cyan")


def _introduce(model: nn.Module, text: Text, steps: int, seed: int) -> None:
    size = sum(parameter.numel() for parameter in model.parameters())
    _show_heading("A small GPT learns to write like Python's help")
    console.print(
        f"  {size:,} parameters in {BLOCKS} blocks; {len(text.data):,} characters, "
        f"{len(text.letters)} different ones; {steps} step{'' if steps == 1 else 's'}, seed {seed}"
    )


def _show_text(title: str, generated: str) -> None:
    _show_heading(f"\n{title}")
    lines = textwrap.wrap(generated, 76, break_on_hyphens=False)
    console.print(textwrap.indent("\n".join(lines), "  ") + "\n")


def _show_curve(points: list[tuple[int, float]]) -> None:
    _show_heading("\nValidation loss, kept by the hook validation_curve")
    losses = [loss for _, loss in points]
    for step, loss in points:
        bar, note = "#" * round(40 * loss / max(losses)), "  best" if loss == min(losses) else ""
        console.print(f"  step {step:>5}  {loss:6.3f}  {bar}{note}")


def _show_files(run: Path, checkpoint: Path) -> None:
    digest = hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()
    files = {
        "run": shorten_path(run),
        "checkpoint": shorten_path(checkpoint),
        "weights": f"{digest[:16]} (of the file's sha256; the same for the same options)",
        "metrics": "metrics.jsonl in the run: every loss and gradient norm, one per line",
        "source": __file__,
    }
    if (report := run / "report.html").is_file():
        files["report"] = f"{shorten_path(report)} (open it in a browser)"
    for name, value in files.items():
        console.print(printable(f"{name:10}  {value}", 1000))


# -- data -----------------------------------------------------------------------------------------


class Text(NamedTuple):
    """A text as token ids, and the character of each id."""

    data: Tensor
    letters: list[str]


def _text() -> Text:
    """Return the texts of `help()`, which are a part of every Python installation."""
    text = " ".join(" ".join(topics[name] for name in sorted(topics)).split())
    letters = sorted(set(text))
    number = {letter: i for i, letter in enumerate(letters)}
    return Text(torch.tensor([number[letter] for letter in text]), letters)


def _loaders(data: Tensor, seed: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return loaders of the first nine tenths, shuffled, and of a quarter of the last tenth."""
    border = len(data) * 9 // 10
    order = torch.Generator().manual_seed(seed)
    train = DataLoader(_pieces(data[:border]), BATCH, shuffle=True, drop_last=True, generator=order)
    return train, DataLoader(_pieces(data[border:], every=4), BATCH)


def _pieces(data: Tensor, every: int = 1) -> TensorDataset:
    """Return pieces of the text, and the same pieces shifted by one character as targets."""
    pieces = data.unfold(0, CONTEXT + 1, CONTEXT + 1)[::every]
    return TensorDataset(pieces[:, :-1], pieces[:, 1:])


@torch.no_grad()
def _generate(model: nn.Module, text: Text, seed: int) -> str:
    """Return text generated by the model, without advancing torch's global generator."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([[text.letters.index(letter) for letter in PROMPT]])
    for _ in range(GENERATED):
        logits = model(tokens[:, -CONTEXT:])[:, -1]
        probabilities = F.softmax(logits / TEMPERATURE, dim=-1)
        next_token = torch.multinomial(probabilities, 1, generator=generator)
        tokens = torch.cat([tokens, next_token], dim=1)
    return "".join(text.letters[int(token)] for token in tokens[0])


# -- model ----------------------------------------------------------------------------------------


class GPT(nn.Module):
    """A transformer that predicts the next character."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        options: Any = {"activation": "gelu", "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, **options)
            for _ in range(BLOCKS)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        for table, std in ((self.token, 0.3), (self.position, 0.3), (self.head, 0.02)):
            nn.init.normal_(table.weight, std=std)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next character at each position."""
        length = tokens.shape[1]
        x = self.token(tokens) + self.position.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _lr_factor(step: int, steps: int) -> float:
    """Return the factor of the peak learning rate: linear warm-up, then cosine decay to a tenth."""
    warm = min(1.0, (step + 1) / min(WARM_UP, steps))
    return warm * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / steps)))
