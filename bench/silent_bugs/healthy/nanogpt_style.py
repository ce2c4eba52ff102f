"""A GPT loop in the style of small research repositories: cosine with warm-up, random crops."""

import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

eval_interval, eval_iters, max_iters = 20, 4, 60
batch_size, accumulation = 12, 2
learning_rate, min_lr, warmup_iters = 4e-3, 4e-4, 10
grad_clip = 1.0
text = " ".join(f"{a} plus {b} is {a + b}." for a in range(20) for b in range(20))


@dataclass
class GPTConfig:
    block_size: int = 32
    vocab_size: int = 32
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 48
    dropout: float = 0.0


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.n_head, self.dropout = config.n_head, config.dropout

    def forward(self, x):
        n, length, width = x.size()
        q, k, v = (
            part.view(n, length, self.n_head, -1).transpose(1, 2)
            for part in self.c_attn(x).split(width, dim=2)
        )
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(n, length, width))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
                "ln_f": nn.LayerNorm(config.n_embd),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight
        self.apply(self._init)

    def _init(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, idx, targets=None):
        t = self.transformer
        x = t["wte"](idx) + t["wpe"](torch.arange(idx.size(1)))
        for block in t["h"]:
            x = block(x)
        x = t["ln_f"](x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self, weight_decay):
        decay = [p for p in self.parameters() if p.dim() >= 2]
        nodecay = [p for p in self.parameters() if p.dim() < 2]
        groups = [
            {"params": decay, "weight_decay": weight_decay},
            {"params": nodecay, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.99))


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


def main():
    torch.manual_seed(1337)
    chars = sorted(set(text))
    data = torch.tensor([chars.index(c) for c in text])
    n = int(0.9 * len(data))
    splits = {"train": data[:n], "val": data[n:]}
    config = GPTConfig(vocab_size=len(chars))
    model = GPT(config)
    optimizer = model.configure_optimizers(0.1)
    ctx = nullcontext()

    def get_batch(split):
        source = splits[split]
        ix = torch.randint(len(source) - config.block_size, (batch_size,)).tolist()
        x = torch.stack([source[i : i + config.block_size] for i in ix])
        y = torch.stack([source[i + 1 : i + 1 + config.block_size] for i in ix])
        return x, y

    @torch.no_grad()
    def estimate_loss():
        out = {}
        model.eval()
        for split in splits:
            losses = [model(*get_batch(split))[1].item() for _ in range(eval_iters)]
            out[split] = sum(losses) / len(losses)
        model.train()
        return out

    x, y = get_batch("train")
    for iter_num in range(max_iters + 1):
        lr = get_lr(iter_num)
        for group in optimizer.param_groups:
            group["lr"] = lr
        if iter_num % eval_interval == 0:
            losses = estimate_loss()
            print(f"step {iter_num}: train loss {losses['train']:.3f}, val {losses['val']:.3f}")
        for _ in range(accumulation):
            with ctx:
                _, loss = model(x, y)
                loss = loss / accumulation
            x, y = get_batch("train")
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if iter_num % 5 == 0:
            print(f"iter {iter_num}: loss {loss.item() * accumulation:.3f}, lr {lr:.5f}")


if __name__ == "__main__":
    main()
