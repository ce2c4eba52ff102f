"""Fine-tuning a small detector-like network with BatchNorm kept in eval."""

import torch
from torch import nn
from torch.nn import functional as F


def conv_bn(inputs, outputs, stride=1):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


class Localizer(nn.Module):
    """Predicts the position of a bright square."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(conv_bn(1, 12), conv_bn(12, 24, 2), conv_bn(24, 24, 2))
        self.box = nn.Linear(24 * 16, 2)

    def forward(self, x):
        return self.box(self.backbone(x).flatten(1))


def squares(n, background):
    position = torch.randint(0, 13, (n, 2))
    images = background + 0.2 * torch.randn(n, 1, 16, 16)
    for image, (row, column) in zip(images, position.tolist(), strict=True):
        image[0, row : row + 4, column : column + 4] += 2.0
    return images, position.float() / 12


def freeze_batchnorm(model):
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
            module.weight.requires_grad = False
            module.bias.requires_grad = False


def train(model, optimizer, steps, size, background, frozen):
    model.train()
    if frozen:
        freeze_batchnorm(model)
    total = 0.0
    for step in range(1, steps + 1):
        images, boxes = squares(size, background)
        loss = F.smooth_l1_loss(model(images), boxes, beta=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        if step % 10 == 0:
            print(f"step {step}: loss {total / 10:.4f}")
            total = 0.0


def error(model, background):
    model.eval()
    with torch.no_grad():
        images, boxes = squares(200, background)
        return (model(images) - boxes).abs().mean().item()


def main():
    torch.manual_seed(0)
    model = Localizer()
    train(model, torch.optim.Adam(model.parameters(), lr=2e-3), 40, 64, 0.0, frozen=False)
    print(f"pretrained: error {error(model, 0.15):.3f}")
    freeze_batchnorm(model)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trainable, lr=1e-3)
    train(model, optimizer, 80, 2, 0.15, frozen=True)  # batches of two: too few for statistics
    print(f"fine-tuned: error {error(model, 0.15):.3f}")


if __name__ == "__main__":
    main()
