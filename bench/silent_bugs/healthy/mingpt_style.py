"""A GPT that learns to sort, with a Trainer class and callbacks, prompt positions masked by -1."""

import time
from collections import defaultdict

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from torch.utils.data.dataloader import DataLoader


class SortDataset(Dataset):
    def __init__(self, split, length=5, digits=4):
        self.split, self.length, self.digits = split, length, digits

    def __len__(self):
        return 2000

    def __getitem__(self, idx):
        while True:
            inputs = torch.randint(self.digits, (self.length,))
            belongs = "test" if hash(tuple(inputs.tolist())) % 4 == 0 else "train"
            if belongs == self.split:
                break
        whole = torch.cat([inputs, inputs.sort()[0]])
        x, y = whole[:-1].clone(), whole[1:].clone()
        y[: self.length - 1] = -1
        return x, y


class Attention(nn.Module):
    def __init__(self, width, heads, block):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("bias", torch.tril(torch.ones(block, block)))

    def forward(self, x):
        n, length, width = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        att = q @ k.transpose(-2, -1) / (width // self.heads) ** 0.5
        att = att.masked_fill(self.bias[:length, :length] == 0, float("-inf")).softmax(-1)
        return self.proj((self.dropout(att) @ v).transpose(1, 2).reshape(n, length, width))


class GPT(nn.Module):
    def __init__(self, vocab, block, width=48, heads=4, layers=2):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, width), nn.Embedding(block, width)
        self.att = nn.ModuleList(Attention(width, heads, block) for _ in range(layers))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )
        self.ln = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers + 1))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, idx, targets=None):
        x = self.tok(idx) + self.pos(torch.arange(idx.size(1)))
        for i, (att, mlp) in enumerate(zip(self.att, self.mlp, strict=True)):
            x = x + att(self.ln[2 * i](x))
            x = x + mlp(self.ln[2 * i + 1](x))
        logits = self.head(self.ln[-1](x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


class Trainer:
    def __init__(self, model, dataset, max_iters=100, batch_size=48, lr=2e-3):
        self.model, self.dataset = model, dataset
        self.max_iters, self.batch_size = max_iters, batch_size
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))
        self.callbacks = defaultdict(list)

    def run(self):
        loader = DataLoader(
            self.dataset,
            sampler=torch.utils.data.RandomSampler(
                self.dataset, replacement=True, num_samples=10**9
            ),
            batch_size=self.batch_size,
        )
        self.model.train()
        self.iter_num = 0
        started = time.time()
        for x, y in loader:
            _, self.loss = self.model(x, y)
            self.model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.iter_num += 1
            self.elapsed = time.time() - started
            for callback in self.callbacks["on_batch_end"]:
                callback(self)
            if self.iter_num >= self.max_iters:
                break


@torch.no_grad()
def exact(model, dataset, n=50):
    model.eval()
    right = 0
    for i in range(n):
        x, y = dataset[i]
        sequence = x[: dataset.length][None]
        for _ in range(dataset.length):
            following = model(sequence)[0][:, -1].argmax(-1, keepdim=True)
            sequence = torch.cat([sequence, following], dim=1)
        right += torch.equal(sequence[0, dataset.length :], y[dataset.length - 1 :])
    model.train()
    return right / n


def main():
    torch.manual_seed(0)
    train, test = SortDataset("train"), SortDataset("test")
    trainer = Trainer(GPT(train.digits, 2 * train.length - 1), train)

    def show(t):
        if t.iter_num % 10 == 0:
            print(f"iter {t.iter_num}: loss {t.loss.item():.3f}")

    trainer.callbacks["on_batch_end"].append(show)
    trainer.run()
    print(f"sorted without error {exact(trainer.model, test):.2f}")


if __name__ == "__main__":
    main()
