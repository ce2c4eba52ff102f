"""Domain-adversarial training: a layer that turns the gradient round on purpose."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 50


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.strength * grad, None


def main():
    torch.manual_seed(0)
    centers = torch.randn(4, 16) * 1.5
    shift = torch.randn(16)
    encoder = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 24), nn.ReLU())
    labels_head, domain_head = nn.Linear(24, 4), nn.Linear(24, 1)
    modules = nn.ModuleList([encoder, labels_head, domain_head])
    optimizer = torch.optim.Adam(modules.parameters(), lr=3e-3)
    for step in range(STEPS):
        y = torch.randint(4, (64,))
        source = centers[y] + torch.randn(64, 16)
        target = centers[torch.randint(4, (64,))] + shift + torch.randn(64, 16)  # no labels
        features = encoder(torch.cat([source, target]))
        domain = domain_head(Reverse.apply(features, 0.3 * step / STEPS)).squeeze(-1)
        label_loss = F.cross_entropy(labels_head(features[:64]), y)
        is_target = torch.cat([torch.zeros(64), torch.ones(64)])
        domain_loss = F.binary_cross_entropy_with_logits(domain, is_target)
        optimizer.zero_grad()
        (label_loss + domain_loss).backward()
        optimizer.step()
        if step % 10 == 9:
            print(f"step {step + 1} label {label_loss.item():.4f} domain {domain_loss.item():.4f}")


if __name__ == "__main__":
    main()
