"""SimCLR: two noisy views of each sample, all other samples of the batch are negatives."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32)
        )
        self.projector = nn.Sequential(nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x):
        features = self.backbone(x)
        return features, F.normalize(self.projector(features), dim=1)


def augment(x):
    mask = (torch.rand_like(x) > 0.2).float()
    return x * mask + 0.1 * torch.randn_like(x)


def nt_xent(a, b, temperature=0.2):
    n = len(a)
    z = torch.cat([a, b])
    similarity = z @ z.T / temperature
    similarity.fill_diagonal_(float("-inf"))
    positives = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
    return F.cross_entropy(similarity, positives)


def nearest_neighbour_accuracy(model, x, y):
    model.eval()
    with torch.no_grad():
        features = F.normalize(model(x)[0], dim=1)
    model.train()
    similarity = features @ features.T
    similarity.fill_diagonal_(-1)
    return (y[similarity.argmax(1)] == y).float().mean().item()


def main():
    torch.manual_seed(0)
    centres = torch.randn(8, 32)
    y = torch.randint(0, 8, (1024,))
    x = centres[y] + 0.8 * torch.randn(1024, 32)
    loader = DataLoader(TensorDataset(x), batch_size=128, shuffle=True, drop_last=True)
    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    for epoch in range(10):
        for (batch,) in loader:
            _, first = model(augment(batch))
            _, second = model(augment(batch))
            loss = nt_xent(first, second)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
        accuracy = nearest_neighbour_accuracy(model, x, y)
        print(f"epoch {epoch}: loss {loss.item():.3f}, nearest neighbour {accuracy:.3f}")


if __name__ == "__main__":
    main()
