"""VQ-VAE: straight-through gradients, a codebook that is a moving average of its inputs."""

import torch
from torch import nn
from torch.nn import functional as F


class Quantizer(nn.Module):
    def __init__(self, codes=24, width=8, decay=0.9):
        super().__init__()
        self.decay = decay
        self.register_buffer("codebook", torch.randn(codes, width))
        self.register_buffer("counts", torch.ones(codes))
        self.register_buffer("sums", self.codebook.clone())

    def forward(self, z):
        distance = torch.cdist(z.detach(), self.codebook)
        index = distance.argmin(1)
        chosen = self.codebook[index]
        if self.training:
            self.update(z.detach(), index)
        commitment = F.mse_loss(z, chosen)
        return z + (chosen - z).detach(), commitment, index

    @torch.no_grad()
    def update(self, z, index):
        hot = F.one_hot(index, len(self.codebook)).float()
        self.counts.lerp_(hot.sum(0), 1 - self.decay)
        self.sums.lerp_(hot.T @ z, 1 - self.decay)
        total = self.counts.sum()
        smooth = (self.counts + 1e-3) / (total + len(self.counts) * 1e-3) * total
        self.codebook.copy_(self.sums / smooth[:, None])


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 8))
        self.quantizer = Quantizer()
        self.decoder = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 16))

    def forward(self, x):
        z, commitment, index = self.quantizer(self.encoder(x))
        return self.decoder(z), commitment, index


def main():
    torch.manual_seed(0)
    centres = 2 * torch.randn(12, 16)

    def sample(n):
        return centres[torch.randint(0, 12, (n,))] + 0.2 * torch.randn(n, 16)

    model = VQVAE()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0)
    for step in range(1, 111):
        x = sample(96)
        out, commitment, index = model(x)
        loss = F.mse_loss(out, x) + 0.25 * commitment
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}, codes in use {index.unique().numel()}")
    model.eval()
    with torch.no_grad():
        x = sample(300)
        print(f"test error {F.mse_loss(model(x)[0], x).item():.3f}, variance {x.var().item():.3f}")


if __name__ == "__main__":
    main()
