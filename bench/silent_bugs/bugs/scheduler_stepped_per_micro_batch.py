"""Denoising network trained with Accelerate and gradient accumulation."""

import argparse
import warnings

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore", category=UserWarning)


class Denoiser(nn.Module):
    def __init__(self, dim=16, width=64):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU())
        self.inp = nn.Linear(dim, width)
        self.mid = nn.Linear(width, width)
        self.out = nn.Linear(width, dim)

    def forward(self, x, t):
        h = F.silu(self.inp(x) + self.time(t))
        return self.out(F.silu(self.mid(h)) + h)


def noise_batch(x):
    t = torch.rand(len(x), 1)
    noise = torch.randn_like(x)
    return torch.sqrt(1 - t) * x + torch.sqrt(t) * noise, t, noise


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--max-steps", type=int, default=60)
    args = parser.parse_args()

    torch.manual_seed(22)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.accumulate)
    data = torch.randn(960, 4) @ torch.randn(4, 16) / 2
    loader = DataLoader(TensorDataset(data), batch_size=16, shuffle=True)
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: max(0.0, 1 - s / args.max_steps)
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    step, used = 0, []
    while step < args.max_steps:
        for (x,) in loader:
            with accelerator.accumulate(model):
                noisy, t, noise = noise_batch(x)
                loss = F.mse_loss(model(noisy, t), noise)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    used.append(optimizer.param_groups[0]["lr"])
                optimizer.step()
                if accelerator.sync_gradients or not args.fixed:
                    scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                if step % 5 == 0:
                    print(f"step {step} loss {loss.item():.4f} lr {used[-1]:.6f}")
                if step == args.max_steps:
                    break

    idle = sum(lr == 0 for lr in used)
    print(f"evidence: lr at step 10 {used[9]:.6f}, optimizer steps with lr 0: {idle}")


if __name__ == "__main__":
    main()
