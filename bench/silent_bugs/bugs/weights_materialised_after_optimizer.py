"""Train an autoencoder whose weights are first made on the meta device."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "--fixed" in sys.argv
INPUT, HIDDEN, CODE = 64, 48, 8
EPOCHS, BATCH = 5, 50


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(INPUT, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CODE))
        self.decoder = nn.Sequential(nn.Linear(CODE, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, INPUT))

    def forward(self, x):
        return self.decoder(self.encoder(x))


def materialise(model, device="cpu"):
    model.to_empty(device=device)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    return model


def configure(model):
    groups = [
        {"params": model.encoder.parameters(), "lr": 2e-3},
        {"params": model.decoder.parameters(), "lr": 4e-3},
    ]
    return torch.optim.Adam(groups)


def evaluate(model, loader):
    model.eval()
    total = 0.0
    with torch.no_grad():
        for (x,) in loader:
            total += (model(x) - x).pow(2).mean().item()
    model.train()
    return total / len(loader)


def main():
    torch.manual_seed(1)
    factors = torch.randn(CODE, INPUT)
    data = torch.randn(1000, CODE) @ factors / CODE**0.5
    train_loader = DataLoader(TensorDataset(data[:900]), batch_size=BATCH, shuffle=True)
    valid_loader = DataLoader(TensorDataset(data[900:]), batch_size=BATCH)

    with torch.device("meta"):
        model = AutoEncoder()
    if FIXED:
        materialise(model)
        optimizer = configure(model)
    else:
        optimizer = configure(model)
        materialise(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    step = 0
    for epoch in range(EPOCHS):
        for (x,) in train_loader:
            optimizer.zero_grad()
            loss = (model(x) - x).pow(2).mean()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 6 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
        print(f"epoch {epoch} validation {evaluate(model, valid_loader):.4f}")

    moved = sum((p.detach() - before[n]).abs().sum().item() for n, p in model.named_parameters())
    print(f"evidence: sum of all changes of the weights {moved:.4f}")


if __name__ == "__main__":
    main()
