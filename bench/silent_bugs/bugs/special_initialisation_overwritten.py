"""A gated recurrent mixer for long copies: its decay gates start with slow forgetting."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

FIXED = "--fixed" in sys.argv
SYMBOLS, DELAY = 8, 40


class GatedMemory(nn.Module):
    """A bank of leaky averages with time scales from 2 to 64 steps."""

    def __init__(self, width):
        super().__init__()
        self.value = nn.Linear(width, width)
        self.decay = nn.Linear(width, width)
        self.output = nn.Linear(width, width)
        self.reset_decay()

    @torch.no_grad()
    def reset_decay(self):
        scales = torch.logspace(0.3, 1.8, self.decay.out_features)
        keep = 1 - 1 / scales
        self.decay.bias.copy_(torch.log(keep / (1 - keep)))
        self.decay.weight.mul_(0.1)

    def forward(self, x):
        keep, value = torch.sigmoid(self.decay(x)), self.value(x)
        state, outputs = torch.zeros_like(value[:, 0]), []
        value = (1 - keep.square()).sqrt() * value
        for t in range(x.shape[1]):
            state = keep[:, t] * state + value[:, t]
            outputs.append(state)
        return self.output(torch.stack(outputs, 1))


class Model(nn.Module):
    def __init__(self, width=32, layers=2):
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS + 1, width)
        self.layers = nn.ModuleList(GatedMemory(width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.head = nn.Linear(width, SYMBOLS)
        self.apply(self.init_weights)
        if FIXED:
            for layer in self.layers:
                layer.reset_decay()

    @staticmethod
    def init_weights(module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02 * 8)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.5)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.head(x[:, -1])


def recall_batch(generator, size=32):
    """The first symbol has to be named after a row of blanks."""
    first = torch.randint(0, SYMBOLS, (size, 1), generator=generator)
    blanks = torch.full((size, DELAY), SYMBOLS)
    return torch.cat([first, blanks], 1), first[:, 0]


def main():
    torch.manual_seed(18)
    generator = torch.Generator().manual_seed(19)
    model = Model()
    gates = [layer.decay.bias.detach().clone() for layer in model.layers]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    for step in range(1, 71):
        tokens, target = recall_batch(generator)
        loss = F.cross_entropy(model(tokens), target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    slowest = torch.sigmoid(torch.cat(gates)).max().item()
    print(f"evidence: the slowest gate starts with a time scale of {1 / (1 - slowest):.1f} steps")


if __name__ == "__main__":
    main()
