"""Two stages: Adam with a high rate, then a new SGD optimizer with other parameters on purpose."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class AutoencoderClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
        self.decoder = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 32))
        self.classifier = nn.Linear(8, 4)


def dataset(n, centres):
    y = torch.randint(0, 4, (n,))
    return TensorDataset(centres[y] + 0.7 * torch.randn(n, 32), y)


def stage(name, loader, optimizer, loss_fn, epochs):
    step = 0
    for _ in range(epochs):
        for x, y in loader:
            loss = loss_fn(x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 8 == 0:
                print(f"{name} step {step}: loss {loss.item():.3f}")


def main():
    torch.manual_seed(0)
    centres = torch.randn(4, 32)
    loader = DataLoader(dataset(960, centres), batch_size=60, shuffle=True)
    model = AutoencoderClassifier()

    def reconstruction(x, _):
        return F.mse_loss(model.decoder(model.encoder(x)), x)

    def classification(x, y):
        return F.cross_entropy(model.classifier(model.encoder(x)), y)

    optimizer = torch.optim.Adam(
        [*model.encoder.parameters(), *model.decoder.parameters()], lr=3e-3
    )
    stage("reconstruction", loader, optimizer, reconstruction, epochs=3)
    optimizer = torch.optim.SGD(
        [
            {"params": model.encoder.parameters(), "lr": 0.005},
            {"params": model.classifier.parameters(), "lr": 0.05},
        ],
        momentum=0.9,
    )
    stage("classification", loader, optimizer, classification, epochs=3)
    x, y = dataset(400, centres).tensors
    model.eval()
    with torch.no_grad():
        accuracy = (model.classifier(model.encoder(x)).argmax(1) == y).float().mean()
    print(f"accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
