"""Train a small GPT on the text of Python's help, in a hand-written loop with a hook.

    python examples/bare_loop.py --steps 300 --seed 0

Three lines are about hooks: two imports, and the `with` around the loop.
"""

import argparse
import hashlib
import math
import sys
import time
from pydoc_data.topics import topics

import torch
from hooks import Report
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention, softmax

import hookline

BATCH, CONTEXT, WIDTH, HEADS, BLOCKS = 24, 64, 96, 4, 3
PEAK_LR, WARM_UP, CLIP = 3e-3, 20, 1.0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.token = nn.Embedding(vocabulary, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens, targets=None):
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits, None
        return logits, cross_entropy(logits.flatten(0, 1), targets.flatten())


def load_batch(data, generator):
    """Return pieces of the text, and the same pieces shifted by one character."""
    starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,), generator=generator).tolist()
    pieces = torch.stack([data[start : start + CONTEXT + 1] for start in starts])
    return pieces[:, :-1], pieces[:, 1:]


@torch.no_grad()
def evaluate(model, data):
    generator = torch.Generator().manual_seed(0)  # the same batches every time
    model.eval()
    losses = [model(*load_batch(data, generator))[1] for _ in range(8)]
    model.train()
    return torch.stack(losses).mean().item()


@torch.no_grad()
def generate(model, prompt, length, generator):
    tokens = prompt
    for _ in range(length):
        logits, _ = model(tokens[:, -CONTEXT:])
        probabilities = softmax(logits[:, -1] / 0.7, dim=-1)
        tokens = torch.cat(
            [tokens, torch.multinomial(probabilities, 1, generator=generator)], dim=1
        )
    return tokens[0].tolist()


def main():
    options = argparse.ArgumentParser(description="Train a small GPT on Python's own help.")
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args()

    torch.set_num_threads(1)  # more threads do not speed up a model this small
    torch.manual_seed(args.seed)
    text = " ".join(" ".join(topics[name] for name in sorted(topics)).split())
    letters = sorted(set(text))
    number = {letter: i for i, letter in enumerate(letters)}
    data = torch.tensor([number[letter] for letter in text])
    train, val = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
    generator = torch.Generator().manual_seed(args.seed)

    model = GPT(len(letters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95))

    def lr_factor(step):
        warm = min(1.0, (step + 1) / WARM_UP)
        return warm * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / args.steps)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)
    print(f"{len(text):,} characters, {len(letters)} different ones")
    print(f"validation loss before: {evaluate(model, val):.3f}")
    start = time.perf_counter()

    with hookline.attach(model, optimizer, hooks=[Report()]):
        for _ in range(args.steps):
            tokens, targets = load_batch(train, generator)
            _, loss = model(tokens, targets)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            scheduler.step()

    print(f"\nvalidation loss after: {evaluate(model, val):.3f}")
    print(f"{args.steps} steps in {time.perf_counter() - start:.1f} s")
    generated = generate(model, train[:1].view(1, 1), 160, generator)
    print("\n" + "".join(letters[i] for i in generated) + "\n")
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print(f"weights: {hashlib.sha256(weights).hexdigest()[:16]}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
