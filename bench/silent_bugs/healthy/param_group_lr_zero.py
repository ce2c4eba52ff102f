"""Two groups: the embedding has lr 0 for the first stage on purpose, later a small one."""

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, WIDTH = 50, 24


class BagOfWords(nn.Module):
    def __init__(self, pretrained):
        super().__init__()
        self.embedding = nn.EmbeddingBag.from_pretrained(pretrained, freeze=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, ids):
        return self.mlp(self.embedding(ids))


def batch(topics, size=64):
    label = torch.randint(0, 3, (size,))
    return torch.multinomial(topics[label], 15, replacement=True), label


def main():
    torch.manual_seed(0)
    topics = torch.softmax(1.5 * torch.randn(3, VOCAB), dim=1)
    model = BagOfWords(torch.randn(VOCAB, WIDTH))
    optimizer = torch.optim.Adam(
        [
            {"params": model.mlp.parameters(), "lr": 3e-3},
            {"params": model.embedding.parameters(), "lr": 0.0, "name": "pretrained"},
        ]
    )
    for step in range(1, 101):
        if step == 61:
            optimizer.param_groups[1]["lr"] = 3e-4
        ids, label = batch(topics)
        loss = F.cross_entropy(model(ids), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            rates = [group["lr"] for group in optimizer.param_groups]
            print(f"step {step}: loss {loss.item():.3f}, lr {rates}")
    ids, label = batch(topics, 500)
    with torch.no_grad():
        print(f"accuracy {(model.eval()(ids).argmax(1) == label).float().mean():.3f}")


if __name__ == "__main__":
    main()
