"""DP-SGD: per-sample gradients from `torch.func`, clipped, noised, and written into `.grad`.

There is no `backward()` and no `zero_grad()`: each step assigns fresh gradients.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

STEPS, BATCH, CLIP, NOISE = 50, 64, 1.0, 0.4


def main():
    torch.manual_seed(0)
    centers = torch.randn(5, 12) * 1.5
    y = torch.randint(5, (2000,))
    x = centers[y] + torch.randn(2000, 12)
    model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def sample_loss(params, one_x, one_y):
        return F.cross_entropy(functional_call(model, params, (one_x[None],)), one_y[None])

    per_sample = vmap(grad(sample_loss), in_dims=(None, 0, 0))
    for step in range(STEPS):
        rows = torch.randint(len(x), (BATCH,))
        params = {name: p.detach() for name, p in model.named_parameters()}
        grads = per_sample(params, x[rows], y[rows])
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
        scale = (CLIP / norms).clamp(max=1.0)
        for name, p in model.named_parameters():
            total = torch.einsum("b,b...->...", scale, grads[name])
            p.grad = (total + NOISE * CLIP * torch.randn_like(p)) / BATCH
        optimizer.step()
        if step % 10 == 9:
            with torch.no_grad():
                loss = F.cross_entropy(model(x), y)
            print(f"step {step + 1} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
