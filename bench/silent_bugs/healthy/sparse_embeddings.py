"""Matrix factorization with sparse embeddings: SparseAdam for them, Adam for the rest."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Recommender(nn.Module):
    def __init__(self, users, items, width=4):
        super().__init__()
        self.user = nn.Embedding(users, width, sparse=True)
        self.item = nn.Embedding(items, width, sparse=True)
        nn.init.normal_(self.user.weight, std=0.3)
        nn.init.normal_(self.item.weight, std=0.3)
        self.mlp = nn.Sequential(nn.Linear(2 * width, 32), nn.ReLU(), nn.Linear(32, 1))
        self.mean = nn.Parameter(torch.tensor(3.0))

    def forward(self, user, item):
        u, i = self.user(user), self.item(item)
        extra = self.mlp(torch.cat([u, i], dim=1)).squeeze(1)
        return self.mean + (u * i).sum(1) + extra


def ratings(n, users, items):
    taste, kind = torch.randn(users, 2), torch.randn(items, 2)
    user, item = torch.randint(0, users, (n,)), torch.randint(0, items, (n,))
    score = 3 + (taste[user] * kind[item]).sum(1) + 0.1 * torch.randn(n)
    return TensorDataset(user, item, score)


def main():
    torch.manual_seed(0)
    data = ratings(6000, users=60, items=40)
    train, test = torch.utils.data.random_split(data, [5500, 500])
    model = Recommender(60, 40)
    sparse = torch.optim.SparseAdam([model.user.weight, model.item.weight], lr=5e-2)
    dense = torch.optim.Adam([*model.mlp.parameters(), model.mean], lr=5e-3)
    for epoch in range(5):
        model.train()
        for step, (user, item, score) in enumerate(DataLoader(train, 250, shuffle=True)):
            loss = F.mse_loss(model(user, item), score)
            sparse.zero_grad()
            dense.zero_grad()
            loss.backward()
            sparse.step()
            dense.step()
            if step % 8 == 0:
                print(f"epoch {epoch} step {step}: loss {loss.item():.3f}")
        model.eval()
        with torch.no_grad():
            user, item, score = test[:]
            print(f"epoch {epoch}: test {F.mse_loss(model(user, item), score).item():.3f}")


if __name__ == "__main__":
    main()
