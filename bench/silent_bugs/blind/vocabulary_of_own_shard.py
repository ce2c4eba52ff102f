"""Bag-of-words sentiment model; each rank reads its own part of the corpus."""

import random
import sys
from collections import Counter

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FIXED = "--fixed" in sys.argv
GOOD = ["great", "lovely", "fine", "superb", "warm", "bright", "clever", "funny"]
BAD = ["dull", "awful", "poor", "cold", "slow", "empty", "loud", "sad"]
OTHER = [
    "the",
    "a",
    "film",
    "plot",
    "actor",
    "scene",
    "music",
    "it",
    "was",
    "and",
    "very",
    "story",
    "camera",
    "ending",
]
SIZE = 64


def corpus(rank, n=320):
    rng = random.Random(50 + rank)
    texts = []
    for _ in range(n):
        label = rng.randrange(2)
        words = rng.choices(OTHER, k=8) + rng.choices(GOOD if label else BAD, k=3)
        rng.shuffle(words)
        texts.append((words, label))
    return texts


def build_vocabulary(texts):
    counts = Counter(word for words, _ in texts for word in words)
    if FIXED:
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, counts)
        counts = sum(every, Counter())
    words = [word for word, _ in counts.most_common(SIZE - 1)]
    return {word: i for i, word in enumerate(words, 1)}


class Sentiment(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.bag = nn.EmbeddingBag(SIZE, width, mode="mean", padding_idx=0)
        self.output = nn.Linear(width, 2)

    def forward(self, ids):
        return self.output(self.bag(ids))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    texts = corpus(rank)
    vocabulary = build_vocabulary(texts)
    model = DistributedDataParallel(Sentiment())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    ids = torch.tensor([[vocabulary.get(w, 0) for w in words] for words, _ in texts])
    labels = torch.tensor([label for _, label in texts])
    step = 0
    for epoch in range(6):
        order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(epoch))
        for chosen in order.split(32):
            loss = F.cross_entropy(model(ids[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
        if rank == 0:
            print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
    every = [None, None]
    dist.all_gather_object(every, vocabulary)
    differ = sum(every[0].get(word) != every[1].get(word) for word in every[0])
    if rank == 0:
        print(f"evidence: words with another number on the other rank {differ}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
