"""Character language model with evaluation every twenty steps."""

import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

FIXED = "--fixed" in sys.argv

TEXT = (
    "a model that is evaluated twice on the same text should give the same loss twice. "
    "training is noisy, evaluation is not. the batch is small and the text is short. "
) * 20


@dataclass
class GPTConfig:
    block_size: int = 32
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 32
    dropout: float = 0.3


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head = config.n_head
        self.dropout = config.dropout

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.c_attn(x).view(b, t, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)
        p = self.dropout if self.training or not FIXED else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(b, t, c)))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(config.n_embd, 4 * config.n_embd),
            nn.GELU(),
            nn.Linear(4 * config.n_embd, config.n_embd),
            nn.Dropout(config.dropout),
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config, vocab):
        super().__init__()
        self.wte = nn.Embedding(vocab, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, vocab, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_batch(data, size, block):
    ix = torch.randint(len(data) - block - 1, (size,)).tolist()
    x = torch.stack([data[i : i + block] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block] for i in ix])
    return x, y


@torch.no_grad()
def estimate_loss(model, batches):
    model.eval()
    losses = [model(x, y).item() for x, y in batches]
    model.train()
    return sum(losses) / len(losses)


def main():
    torch.manual_seed(1337)
    chars = sorted(set(TEXT))
    data = torch.tensor([chars.index(c) for c in TEXT])
    split = int(0.9 * len(data))
    config = GPTConfig()
    model = GPT(config, len(chars))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    held_out = [get_batch(data[split:], 8, config.block_size) for _ in range(3)]

    for step in range(1, 81):
        x, y = get_batch(data[:split], 12, config.block_size)
        loss = model(x, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            valid = estimate_loss(model, held_out)
            print(f"step {step} train loss {loss.item():.4f} val loss {valid:.4f}")

    gap = abs(estimate_loss(model, held_out) - estimate_loss(model, held_out))
    print(f"evidence: difference of two evaluations of the same text {gap:.6f}")


if __name__ == "__main__":
    main()
