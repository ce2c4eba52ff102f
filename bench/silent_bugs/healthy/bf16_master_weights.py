"""bfloat16 weights and gradients, float32 master weights in the optimizer, copied after a step."""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class MasterWeights:
    """Keeps a float32 copy of each parameter; only the copies are in the optimizer."""

    def __init__(self, model):
        self.model_weights = list(model.parameters())
        self.masters = [p.detach().float().clone().requires_grad_() for p in self.model_weights]

    def take_gradients(self):
        for master, weight in zip(self.masters, self.model_weights, strict=True):
            master.grad = weight.grad.float()
            weight.grad = None

    @torch.no_grad()
    def give_back(self):
        for master, weight in zip(self.masters, self.model_weights, strict=True):
            weight.copy_(master)


def main():
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 4)).requires_grad_(False)
    model = nn.Sequential(nn.Linear(12, 32), Block(32), Block(32), nn.Linear(32, 4))
    model = model.to(torch.bfloat16)
    weights = MasterWeights(model)
    optimizer = torch.optim.AdamW(weights.masters, lr=1e-3, weight_decay=0.01)
    for step in range(1, 121):
        x = torch.randn(128, 12)
        prediction = model(x.to(torch.bfloat16)).float()
        loss = F.mse_loss(prediction, 3 * teacher(x))
        loss.backward()
        weights.take_gradients()
        optimizer.step()
        optimizer.zero_grad()
        weights.give_back()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
