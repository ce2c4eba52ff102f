"""Stochastic weight averaging with AveragedModel, SWALR and update_bn."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset


def network():
    return nn.Sequential(
        nn.Linear(16, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 4)
    )


def moons(n, projection):
    y = torch.randint(0, 4, (n,))
    angle = torch.rand(n) * 3 + y * 1.57
    point = torch.stack([angle.cos() * (1 + y / 2), angle.sin() * (1 + y / 2)], 1)
    return TensorDataset(point @ projection + 0.2 * torch.randn(n, 16), y)


def evaluate(model, data):
    was_training = model.training
    model.eval()
    with torch.no_grad():
        x, y = data.tensors
        result = F.cross_entropy(model(x), y).item()
    model.train(was_training)
    return result


def main(epochs=8, swa_start=5):
    torch.manual_seed(0)
    projection = torch.randn(2, 16)
    train, test = moons(800, projection), moons(400, projection)
    loader = DataLoader(train, batch_size=64, shuffle=True)
    model = network()
    averaged = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    swa_schedule = SWALR(optimizer, swa_lr=0.05, anneal_epochs=1)
    for epoch in range(epochs):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        if epoch >= swa_start:
            averaged.update_parameters(model)
            swa_schedule.step()
        else:
            cosine.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}, test {evaluate(model, test):.3f}")
    update_bn(loader, averaged)
    print(f"averaged: test {evaluate(averaged, test):.3f}")


if __name__ == "__main__":
    main()
