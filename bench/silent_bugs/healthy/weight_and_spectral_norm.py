"""Parametrizations: weight norm in the encoder, spectral norm in the decoder."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            weight_norm(nn.Linear(24, 48)), nn.ELU(), weight_norm(nn.Linear(48, 16)), nn.ELU()
        )
        self.decoder = nn.Sequential(
            spectral_norm(nn.Linear(16, 48)), nn.ELU(), spectral_norm(nn.Linear(48, 24))
        )
        self.gain = nn.Parameter(torch.ones(24))

    def forward(self, x):
        return self.gain * self.decoder(self.encoder(x))


def main():
    torch.manual_seed(0)
    basis = torch.randn(6, 24) / 2
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0)
    test = torch.randn(200, 6) @ basis
    for step in range(1, 101):
        x = torch.randn(64, 6) @ basis
        loss = F.mse_loss(model(x + 0.1 * torch.randn_like(x)), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            model.eval()
            with torch.no_grad():
                error = F.mse_loss(model(test), test).item()
                largest = torch.linalg.matrix_norm(model.decoder[0].weight, 2).item()
            model.train()
            print(f"step {step}: loss {loss:.3f}, test {error:.3f}, spectral norm {largest:.3f}")


if __name__ == "__main__":
    main()
