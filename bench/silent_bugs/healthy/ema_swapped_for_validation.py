"""An EMA of the weights that is swapped in for validation and swapped out afterwards."""

from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F


class EMA:
    def __init__(self, model, decay=0.95):
        self.model, self.decay = model, decay
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self):
        for name, parameter in self.model.named_parameters():
            self.shadow[name].mul_(self.decay).add_(parameter, alpha=1 - self.decay)

    @contextmanager
    @torch.no_grad()
    def applied(self):
        kept = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            parameter.copy_(self.shadow[name])
        try:
            yield
        finally:
            for name, parameter in self.model.named_parameters():
                parameter.copy_(kept[name])


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 6))
        self.decoder = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 30))

    def forward(self, x):
        return self.decoder(self.encoder(x))


@torch.no_grad()
def validate(model, x):
    model.eval()
    error = F.mse_loss(model(x), x).item()
    model.train()
    return error


def main():
    torch.manual_seed(0)
    basis = torch.randn(5, 30)
    test = torch.randn(300, 5) @ basis
    model = AutoEncoder()
    ema = EMA(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(1, 101):
        x = torch.randn(64, 5) @ basis
        loss = F.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update()
        if step % 20 == 0:
            plain = validate(model, test)
            with ema.applied():
                smooth = validate(model, test)
            print(f"step {step}: loss {loss.item():.3f}, val {plain:.3f}, val of EMA {smooth:.3f}")


if __name__ == "__main__":
    main()
