"""Image classifier trained with Ignite engines."""

import argparse

import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class SmallResNet(nn.Module):
    def __init__(self, classes=4, width=12):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.drop = nn.Dropout(0.3)
        self.fc = nn.Linear(width * 4, classes)

    def forward(self, x):
        x = F.relu(self.bn1(self.stem(x)))
        x = x + F.relu(self.bn2(self.conv1(x)))
        return self.fc(self.drop(F.adaptive_avg_pool2d(x, 2).flatten(1)))


def shapes(count, brightness, seed):
    gen = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (count,), generator=gen)
    images = 0.4 * torch.randn(count, 1, 12, 12, generator=gen) + brightness
    for image, label in zip(images, labels.tolist(), strict=True):
        r, c = divmod(label, 2)
        image[0, 6 * r : 6 * r + 5, 6 * c : 6 * c + 5] += 1.0
    return TensorDataset(images, labels)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(80)

    train_loader = DataLoader(shapes(480, 0.0, 0), batch_size=32, shuffle=True)
    valid_loader = DataLoader(shapes(160, 1.5, 1), batch_size=32)
    model = SmallResNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def train_step(engine, batch):
        model.train()
        x, y = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def valid_step(engine, batch):
        if args.fixed:
            model.eval()
        x, y = batch
        with torch.no_grad():
            return (model(x).argmax(1) == y).float().mean().item()

    trainer = Engine(train_step)
    evaluator = Engine(valid_step)
    hits, shifts = [], []

    @evaluator.on(Events.ITERATION_COMPLETED)
    def collect(engine):
        hits.append(engine.state.output)

    @trainer.on(Events.ITERATION_COMPLETED(every=10))
    def log(engine):
        print(f"step {engine.state.iteration} loss {engine.state.output:.4f}")

    @trainer.on(Events.EPOCH_COMPLETED)
    def validate(engine):
        hits.clear()
        before = model.bn1.running_mean.clone()
        evaluator.run(valid_loader)
        shifts.append((model.bn1.running_mean - before).abs().max().item())
        print(f"epoch {engine.state.epoch} accuracy {sum(hits) / len(hits):.3f}")

    trainer.run(train_loader, max_epochs=4)
    print(f"evidence: running mean moved during evaluation by {max(shifts):.5f}")


if __name__ == "__main__":
    main()
