"""Train a sparse autoencoder; the encoder starts as the transposed decoder."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

FIXED = "--fixed" in sys.argv
DIM, FEATURES = 32, 96
STEPS, BATCH = 100, 64


class KernelAdam(torch.optim.Optimizer):
    """Adam in flat memory, as a fused kernel sees it."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)

    def _update(self, p, group):
        state = self.state[p]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros(p.numel())
            state["exp_avg_sq"] = torch.zeros(p.numel())
        state["step"] += 1
        beta1, beta2 = group["betas"]
        memory = p.contiguous().view(-1)
        grad = p.grad.contiguous().view(-1)
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        size = group["lr"] / (1 - beta1 ** state["step"])
        root = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt().add_(group["eps"])
        memory.addcdiv_(state["exp_avg"], root, value=-size)
        if FIXED and not p.is_contiguous():
            p.copy_(memory.view(p.shape))


class SparseAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = nn.Linear(FEATURES, DIM, bias=True)
        self.encoder = nn.Linear(DIM, FEATURES, bias=True)
        with torch.no_grad():
            self.decoder.weight.copy_(F.normalize(torch.randn(DIM, FEATURES), dim=0))
        self.encoder.weight = nn.Parameter(self.decoder.weight.detach().clone().t())
        nn.init.zeros_(self.encoder.bias)

    def forward(self, x):
        code = F.relu(self.encoder(x - self.decoder.bias))
        return self.decoder(code), code


def activations(gen, dictionary):
    codes = torch.rand(BATCH, dictionary.shape[0], generator=gen)
    codes = codes * (torch.rand(codes.shape, generator=gen) < 0.06)
    return codes @ dictionary


def main():
    torch.manual_seed(9)
    gen = torch.Generator().manual_seed(1)
    dictionary = F.normalize(torch.randn(120, DIM, generator=gen), dim=1)
    model = SparseAutoencoder()
    optimizer = KernelAdam(model.parameters(), lr=3e-3)
    start = model.encoder.weight.detach().clone()

    for step in range(1, STEPS + 1):
        x = activations(gen, dictionary)
        output, code = model(x)
        reconstruction = (output - x).pow(2).sum(-1).mean()
        loss = reconstruction + 0.02 * code.abs().sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            alive = (code > 0).any(0).float().mean().item()
            print(f"step {step} loss {loss.item():.4f} alive {alive:.2f}")

    change = (model.encoder.weight.detach() - start).abs().max().item()
    print(f"evidence: largest change of encoder.weight {change:.6f}")


if __name__ == "__main__":
    main()
