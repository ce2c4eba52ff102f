"""Quantization-aware training: fake-quantized weights and activations, straight-through."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class FakeQuantize(nn.Module):
    """Eight bits per tensor; the range is observed in training and fixed after `freeze`."""

    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))
        self.observe = True

    def forward(self, x):
        if self.observe and self.training:
            now = x.detach().abs().max()
            self.largest.copy_(torch.where(self.largest == 0, now, 0.9 * self.largest + 0.1 * now))
        scale = float(self.largest.clamp(min=1e-6)) / 127
        return torch.fake_quantize_per_tensor_affine(x, scale, 0, -128, 127)


class QuantLinear(nn.Linear):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.quant_x, self.quant_w = FakeQuantize(), FakeQuantize()

    def forward(self, x):
        return F.linear(self.quant_x(x), self.quant_w(self.weight), self.bias)


def freeze(model):
    for module in model.modules():
        if isinstance(module, FakeQuantize):
            module.observe = False


def data(n, centres):
    y = torch.randint(0, len(centres), (n,))
    return TensorDataset(centres[y] + torch.randn(n, 16), y)


def main():
    torch.manual_seed(0)
    centres = torch.randn(6, 16)
    train, test = data(960, centres), data(400, centres)
    model = nn.Sequential(
        QuantLinear(16, 64), nn.ReLU(), QuantLinear(64, 64), nn.ReLU(), QuantLinear(64, 6)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(6):
        model.train()
        if epoch == 4:
            freeze(model)
        for x, y in DataLoader(train, batch_size=64, shuffle=True):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            x, y = test.tensors
            accuracy = (model(x).argmax(1) == y).float().mean().item()
        print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
