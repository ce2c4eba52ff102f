"""`hookline demo`: a small GPT learns to write like Python's help, watched by three hooks.

To read as an example: `run_demo` is the training, the hooks stand right before it, and the model
and its text after it.
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
from torch.nn.utils import get_total_norm
from torch.utils.data import DataLoader, TensorDataset

from hookline.config.trainer_config import TrainerConfig
from hookline.context import Metrics
from hookline.hook import Hook
from hookline.trainer.trainer import Trainer

__all__ = ["run_demo"]

BATCH, CONTEXT, WIDTH, HEADS, BLOCKS = 48, 32, 96, 4, 2
PEAK_LR, WARM_UP, CLIP = 7e-3, 20, 1.0
PROMPT, WRITTEN, TEMPERATURE = "The ", 200, 0.7
VALIDATIONS, GRADIENT_LOOKS = 10, 30  # about so many, however many steps there are

console = Console(highlight=False, soft_wrap=True)  # NO_COLOR and pipes are respected


class ValidationCurve(Hook):
    """Keeps each validation loss, and adds a metric: it is displayed and recorded as the rest."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []

    def on_validation_end(self, step: int, metrics: Metrics) -> None:
        """Note the loss, and say what it is in bits."""
        loss = float(metrics["val/loss"])
        metrics["val/bits_per_char"] = loss / math.log(2)
        self.points.append((step, loss))


class GradientNorms(Hook):
    """Records how large the gradients of each part of the model are, before they are clipped."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def on_gradients_ready(self, trainer: Trainer, model: nn.Module) -> None:
        """Measure each part; nothing is read from the device here."""
        norms = {name: _gradient_norm(part) for name, part in _parts(model).items()}
        trainer.log_dict({f"grad_norm/{name}": norm for name, norm in norms.items()})
        self.seen.append(norms)


class CheckpointAtEnd(Hook):
    """Saves a checkpoint when training has done all its steps."""

    critical = True  # a checkpoint that fails is an error, not a line in the log

    def __init__(self) -> None:
        self.path: Path | None = None

    def on_train_end(self, trainer: Trainer, status: str) -> None:
        """Save, unless training was interrupted."""
        if status == "completed":
            self.path = trainer.save_checkpoint()


def run_demo(*, steps: int, out: Path, seed: int) -> None:
    """Train, and show what came of it.

    Args:
        steps: how many optimizer steps.
        out: the folder that gets the run's folder.
        seed: the same seed gives the same weights.
    """
    torch.set_num_threads(1)  # faster than two for a model this small, and the same everywhere
    torch.manual_seed(seed)
    text = _text()
    model = GPT(len(text.letters))
    _introduce(model, text, steps, seed)
    _show_text("Written before training", _write(model, text, seed))

    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    config = TrainerConfig(
        max_epochs=None,
        max_steps=steps,
        clip_norm=CLIP,
        validate_every_epochs=None,
        validate_every_steps=math.ceil(steps / VALIDATIONS),
        sanity=True,  # the curve begins before training
        seed=seed,
        runs=out,
    )
    trainer = Trainer(
        config, model, optimizer, scheduler, loss_fn=_loss, tokens_fn=lambda batch: batch[0].numel()
    )
    curve, gradients, checkpoint = ValidationCurve(), GradientNorms(), CheckpointAtEnd()
    trainer.add_hook(curve)
    trainer.add_hook(gradients, every=math.ceil(steps / GRADIENT_LOOKS))
    trainer.add_hook(checkpoint)

    train, val = _loaders(text.data, seed)
    try:
        trainer.fit(train, val)
    except KeyboardInterrupt:
        if trainer.run is not None:
            console.print(f"\nWhat was recorded until now is in {trainer.run.path}")
        raise

    _show_curve(curve.points)
    _show_gradients(gradients.seen)
    _show_text("Written after training", _write(model, text, seed))
    _show_what_is_left(trainer.run.path, checkpoint.path)


# -- what is shown --------------------------------------------------------------------------------


def _heading(title: str) -> None:
    console.print(f"\n{title}", style="bold cyan", markup=False)


def _introduce(model: nn.Module, text: Text, steps: int, seed: int) -> None:
    size = sum(parameter.numel() for parameter in model.parameters())
    console.print("A small GPT learns to write like Python's help", style="bold cyan")
    console.print(
        f"  {size:,} parameters in {BLOCKS} blocks; {len(text.data):,} characters, "
        f"{len(text.letters)} different ones; {steps} step{'' if steps == 1 else 's'}, seed {seed}"
    )


def _show_text(title: str, written: str) -> None:
    _heading(title)
    lines = textwrap.wrap(written, 76, break_on_hyphens=False)
    console.print(textwrap.indent("\n".join(lines), "  ") + "\n", markup=False)


def _show_curve(points: list[tuple[int, float]]) -> None:
    _heading("Validation loss, kept by the hook validation_curve")
    most = max(loss for _, loss in points)
    best = min(loss for _, loss in points)
    for step, loss in points:
        mark = "  best" if loss == best else ""
        console.print(f"  step {step:>5}  {loss:6.3f}  {'#' * round(40 * loss / most)}{mark}")


def _show_gradients(seen: list[dict[str, Tensor]]) -> None:
    _heading("Gradient norm of each part, recorded by the hook gradient_norms")
    third = math.ceil(len(seen) / 3)
    console.print(f"  {'':10}  first third  last third   (means)")
    for name in seen[0]:
        early, late = (
            _mean(norms[name] for norms in part) for part in (seen[:third], seen[-third:])
        )
        console.print(f"  {name:10}  {early:11.3f}  {late:10.3f}")


def _show_what_is_left(run: Path, checkpoint: Path | None) -> None:
    left = {"run": str(run)}
    if checkpoint is not None:
        digest = hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()
        left |= {
            "checkpoint": str(checkpoint),
            "weights": f"{digest[:16]} (of the file's sha256; the same options give it again)",
        }
    left["look at"] = "metrics.jsonl in the run: every loss and gradient norm, one in a line"
    left["the hooks"] = __file__
    for name, value in left.items():
        console.print(f"{name:10}  {value}", markup=False)


# -- the text -------------------------------------------------------------------------------------


class Text(NamedTuple):
    """A text as numbers, and the letters that they stand for."""

    data: Tensor
    letters: list[str]


def _text() -> Text:
    """What `help()` knows: it comes with every Python."""
    text = " ".join(" ".join(topics[name] for name in sorted(topics)).split())
    letters = sorted(set(text))
    number = {letter: i for i, letter in enumerate(letters)}
    return Text(torch.tensor([number[letter] for letter in text]), letters)


def _loaders(data: Tensor, seed: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """The first nine tenths to train on, shuffled; of the last one, a quarter to validate."""
    border = len(data) * 9 // 10
    order = torch.Generator().manual_seed(seed)
    train = DataLoader(_pieces(data[:border]), BATCH, shuffle=True, drop_last=True, generator=order)
    return train, DataLoader(_pieces(data[border:], every=4), BATCH)


def _pieces(data: Tensor, every: int = 1) -> TensorDataset:
    """Pieces of the text, and the same pieces one letter further."""
    pieces = data.unfold(0, CONTEXT + 1, CONTEXT + 1)[::every]
    return TensorDataset(pieces[:, :-1], pieces[:, 1:])


@torch.no_grad()
def _write(model: nn.Module, text: Text, seed: int) -> str:
    """Let the model write; training's own random numbers stay as they are."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([[text.letters.index(letter) for letter in PROMPT]])
    for _ in range(WRITTEN):
        logits = model(tokens[:, -CONTEXT:])[:, -1]
        chances = F.softmax(logits / TEMPERATURE, dim=-1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=generator)], dim=1)
    return "".join(text.letters[int(token)] for token in tokens[0])


# -- the model ------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention to what came before, then a small network; both add to what flows through."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return what flows on."""
        batch, length, _ = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        added: Tensor = self.down(F.gelu(self.up(self.norm_2(x))))
        return x + added


class GPT(nn.Module):
    """A transformer that says, after each letter, which letter comes next."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        for table, std in ((self.token, 0.3), (self.position, 0.3), (self.head, 0.02)):
            nn.init.normal_(table.weight, std=std)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next letter, after each letter."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _rate(step: int, steps: int) -> float:
    """The share of the peak learning rate: it warms up, then falls along a cosine to a tenth."""
    warm = min(1.0, (step + 1) / min(WARM_UP, steps))
    return warm * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / steps)))


def _parts(model: nn.Module) -> dict[str, nn.Module]:
    """The model's parts as they are shown: its children, and each block for itself."""
    parts: dict[str, nn.Module] = {}
    for name, child in model.named_children():
        inner = child.named_children() if isinstance(child, nn.ModuleList) else [("", child)]
        parts.update((f"{name}.{index}".rstrip("."), part) for index, part in inner)
    return parts


def _gradient_norm(part: nn.Module) -> Tensor:
    return get_total_norm([p.grad for p in part.parameters() if p.grad is not None])


def _mean(values: Any) -> float:
    return float(torch.stack(list(values)).mean())
