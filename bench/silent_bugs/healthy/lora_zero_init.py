"""LoRA: a frozen, pretrained MLP with low-rank updates whose second matrix starts at zero."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class LoRALinear(nn.Module):
    def __init__(self, base, rank=4, alpha=8.0):
        super().__init__()
        self.base = base
        for parameter in base.parameters():
            parameter.requires_grad = False
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.lora_a), self.lora_b) * self.scale


def add_lora(module, rank):
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            setattr(module, name, LoRALinear(child, rank))
        else:
            add_lora(child, rank)


def make_data(n, mixing):
    x = torch.randn(n, 16)
    return TensorDataset(x, (x @ mixing).argmax(1))


def accuracy(model, data):
    model.eval()
    x, y = data.tensors
    with torch.no_grad():
        result = (model(x).argmax(1) == y).float().mean().item()
    model.train()
    return result


def fit(model, data, optimizer, epochs, title):
    step = 0
    for _ in range(epochs):
        for x, y in DataLoader(data, batch_size=64, shuffle=True):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 10 == 0:
                print(f"{title} step {step}: loss {loss.item():.3f}")


def main():
    torch.manual_seed(0)
    mixing = torch.randn(16, 6)
    shifted = mixing + 0.7 * torch.randn(16, 6)
    model = nn.Sequential(
        nn.Linear(16, 64), nn.GELU(), nn.Sequential(nn.Linear(64, 64), nn.GELU()), nn.Linear(64, 6)
    )
    fit(model, make_data(1024, mixing), torch.optim.AdamW(model.parameters(), 3e-3), 2, "pretrain")

    add_lora(model, rank=4)
    trainable = [p for p in model.parameters() if p.requires_grad]
    print(f"{sum(p.numel() for p in trainable)} trainable weights")
    train, test = make_data(1024, shifted), make_data(512, shifted)
    print(f"before: accuracy {accuracy(model, test):.3f}")
    fit(model, train, torch.optim.AdamW(trainable, lr=3e-3, weight_decay=0.0), 4, "lora")
    print(f"after: accuracy {accuracy(model, test):.3f}")


if __name__ == "__main__":
    main()
