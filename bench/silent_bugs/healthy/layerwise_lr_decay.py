"""Layer-wise lr decay over a small transformer encoder, no weight decay for norms and biases."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

DEPTH, WIDTH, VOCAB, LENGTH = 3, 32, 20, 12


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.1, batch_first=True, norm_first=True)
            for _ in range(DEPTH)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


def depth_of(name):
    if name.startswith(("tokens", "positions")):
        return 0
    if name.startswith("layers."):
        return int(name.split(".")[1]) + 1
    return DEPTH + 1


def param_groups(model, lr, decay=0.5, weight_decay=0.05):
    groups = {}
    for name, parameter in model.named_parameters():
        depth, plain = depth_of(name), parameter.ndim < 2
        group = groups.setdefault(
            (depth, plain),
            {
                "params": [],
                "lr": lr * decay ** (DEPTH + 1 - depth),
                "weight_decay": 0.0 if plain else weight_decay,
            },
        )
        group["params"].append(parameter)
    return list(groups.values())


def data(n):
    ids = torch.randint(0, VOCAB, (n, LENGTH))
    return TensorDataset(ids, ((ids < 5).sum(1) > 2).long())


@torch.no_grad()
def accuracy(model, dataset):
    model.eval()
    ids, labels = dataset.tensors
    result = (model(ids).argmax(1) == labels).float().mean().item()
    model.train()
    return result


def main():
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(param_groups(model, lr=5e-3))
    print(f"{len(optimizer.param_groups)} groups")
    train, test = data(1280), data(400)
    for epoch in range(4):
        for step, (ids, labels) in enumerate(DataLoader(train, batch_size=64, shuffle=True)):
            loss = F.cross_entropy(model(ids), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                print(f"epoch {epoch} step {step}: loss {loss.item():.3f}")
        print(f"epoch {epoch}: accuracy {accuracy(model, test):.3f}")


if __name__ == "__main__":
    main()
