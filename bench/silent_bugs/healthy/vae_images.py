"""A variational autoencoder on small binary images; the KL term is warmed up from zero."""

import torch
from torch import nn
from torch.nn import functional as F


class VAE(nn.Module):
    def __init__(self, latent=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU())
        self.mean, self.log_var = nn.Linear(64, latent), nn.Linear(64, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, x):
        hidden = self.encoder(x)
        mean, log_var = self.mean(hidden), self.log_var(hidden)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        return self.decoder(z).view_as(x), mean, log_var


def bars(n):
    images = torch.zeros(n, 8, 8)
    rows, columns = torch.randint(0, 7, (n,)), torch.randint(0, 7, (n,))
    for image, row, column in zip(images, rows.tolist(), columns.tolist(), strict=True):
        image[row : row + 2] = 1
        image[:, column] = 1
    return images


def elbo(logits, x, mean, log_var, beta):
    reconstruction = F.binary_cross_entropy_with_logits(logits, x, reduction="sum") / len(x)
    kl = -0.5 * (1 + log_var - mean.pow(2) - log_var.exp()).sum() / len(x)
    return reconstruction + beta * kl, reconstruction, kl


def main():
    torch.manual_seed(0)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    test = bars(200)
    for step in range(1, 121):
        beta = min(1.0, (step - 1) / 80)
        x = bars(64)
        loss, reconstruction, kl = elbo(*_order(model(x), x), beta)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            model.eval()
            with torch.no_grad():
                _, test_reconstruction, _ = elbo(*_order(model(test), test), 1.0)
            model.train()
            print(
                f"step {step}: loss {loss.item():.2f} = {reconstruction.item():.2f} + "
                f"{beta:.2f} * {kl.item():.2f}, test {test_reconstruction.item():.2f}"
            )


def _order(outputs, x):
    logits, mean, log_var = outputs
    return logits, x, mean, log_var


if __name__ == "__main__":
    main()
