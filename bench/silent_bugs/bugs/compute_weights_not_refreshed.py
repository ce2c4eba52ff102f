"""bfloat16 training of a language model with float32 main weights in the optimizer."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

FIXED = "--fixed" in sys.argv
VOCAB, DIM, CONTEXT = 27, 48, 8
STEPS, BATCH = 80, 32


def make_text(length=6000):
    words = ["loop", "hook", "tensor", "grad", "step", "batch", "epoch", "loss", "layer", "train"]
    gen = torch.Generator().manual_seed(5)
    text = []
    while len(text) < length:
        word = words[torch.randint(0, len(words), (1,), generator=gen).item()]
        text += [ord(c) - ord("a") + 1 for c in word] + [0]
    return torch.tensor(text[:length])


class CharModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.hidden = nn.Linear(CONTEXT * DIM, 96)
        self.norm = nn.LayerNorm(96)
        self.head = nn.Linear(96, VOCAB)

    def forward(self, ids):
        x = self.embed(ids).flatten(1)
        return self.head(self.norm(F.gelu(self.hidden(x))))


class MainWeightOptimizer:
    """Holds float32 main weights; the model computes in bfloat16."""

    def __init__(self, model, make):
        self.model_params = [p for p in model.parameters() if p.requires_grad]
        self.main_params = [p.detach().float().clone() for p in self.model_params]
        self.inner = make(self.main_params)

    def zero_grad(self):
        for p in self.model_params:
            p.grad = None

    def _grads_to_main(self):
        for main, p in zip(self.main_params, self.model_params, strict=True):
            main.grad = None if p.grad is None else p.grad.float()

    def _main_to_model(self):
        if not FIXED:
            return
        with torch.no_grad():
            for main, p in zip(self.main_params, self.model_params, strict=True):
                p.copy_(main)

    def step(self):
        self._grads_to_main()
        self.inner.step()
        self._main_to_model()


def get_batch(text, gen):
    starts = torch.randint(0, len(text) - CONTEXT - 1, (BATCH,), generator=gen)
    x = torch.stack([text[s : s + CONTEXT] for s in starts.tolist()])
    y = torch.stack([text[s + CONTEXT] for s in starts.tolist()])
    return x, y


def main():
    torch.manual_seed(11)
    text = make_text()
    gen = torch.Generator().manual_seed(0)
    model = CharModel().to(torch.bfloat16)
    optimizer = MainWeightOptimizer(model, lambda ps: torch.optim.AdamW(ps, lr=2e-3))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer.inner, STEPS)

    for step in range(1, STEPS + 1):
        x, y = get_batch(text, gen)
        loss = F.cross_entropy(model(x).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")

    gap = max(
        (main - p.float()).abs().max().item()
        for main, p in zip(optimizer.main_params, optimizer.model_params, strict=True)
    )
    print(f"evidence: largest gap between main and compute weights {gap:.5f}")


if __name__ == "__main__":
    main()
