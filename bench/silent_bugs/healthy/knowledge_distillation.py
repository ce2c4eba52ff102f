"""Distillation: a small student learns from a larger teacher in eval without gradients."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def conv_net(width):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Flatten(),
        nn.Linear(2 * width * 16, 6),
    )


class Distiller(nn.Module):
    def __init__(self, teacher, student, temperature=3.0, weight=0.7):
        super().__init__()
        self.teacher, self.student = teacher, student
        self.temperature, self.weight = temperature, weight
        self.teacher.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        self.teacher.eval()
        return self

    def loss(self, x, y):
        logits = self.student(x)
        with torch.no_grad():
            goal = F.softmax(self.teacher(x) / self.temperature, dim=1)
        log_probs = F.log_softmax(logits / self.temperature, dim=1)
        soft = F.kl_div(log_probs, goal, reduction="batchmean") * self.temperature**2
        return self.weight * soft + (1 - self.weight) * F.cross_entropy(logits, y)


def images(n, prototypes):
    y = torch.randint(0, len(prototypes), (n,))
    return TensorDataset(prototypes[y] + torch.randn(n, 1, 8, 8), y)


@torch.no_grad()
def accuracy(model, data):
    x, y = data.tensors
    return (model.eval()(x).argmax(1) == y).float().mean().item()


def main():
    torch.manual_seed(0)
    prototypes = 0.8 * torch.randn(6, 1, 8, 8)
    train, test = images(768, prototypes), images(300, prototypes)
    loader = DataLoader(train, batch_size=64, shuffle=True)
    teacher = conv_net(16)
    optimizer = torch.optim.Adam(teacher.parameters(), lr=2e-3)
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(teacher(x), y).backward()
            optimizer.step()
    print(f"teacher: accuracy {accuracy(teacher, test):.3f}")

    distiller = Distiller(teacher, conv_net(4))
    optimizer = torch.optim.Adam(distiller.student.parameters(), lr=4e-3)
    for epoch in range(5):
        distiller.train()
        for x, y in loader:
            loss = distiller.loss(x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        result = accuracy(distiller.student, test)
        print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy of the student {result:.3f}")


if __name__ == "__main__":
    main()
