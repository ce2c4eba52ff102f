"""float16 autocast with a GradScaler: the first scale is too large, so first steps are skipped."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(20, 64), nn.Linear(64, 64), nn.Linear(64, 5)])

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


def dataset(n, centres):
    y = torch.randint(0, len(centres), (n,))
    return TensorDataset(centres[y] + 1.2 * torch.randn(n, 20), y)


def main():
    torch.manual_seed(0)
    centres = torch.randn(5, 20)
    loader = DataLoader(dataset(1024, centres), batch_size=64, shuffle=True)
    x_test, y_test = dataset(300, centres).tensors
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26, growth_interval=30)
    skipped, step = 0, 0
    for _ in range(5):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skipped += scaler.get_scale() < before
            step += 1
            if step % 10 == 0:
                scale = scaler.get_scale()
                print(f"step {step}: loss {loss.item():.3f}, scale {scale:.0f}, skipped {skipped}")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        print(f"accuracy {(model.eval()(x_test).argmax(1) == y_test).float().mean():.3f}")


if __name__ == "__main__":
    main()
