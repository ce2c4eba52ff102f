"""Federated averaging: each round, copies of the model train on their own data and are averaged.

The server's model has no optimizer at all, and each client's optimizer is new in each round.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

ROUNDS, CLIENTS, LOCAL_STEPS = 4, 3, 4


def train_locally(server, x, y):
    client = copy.deepcopy(server)
    optimizer = torch.optim.SGD(client.parameters(), lr=0.1)
    for _ in range(LOCAL_STEPS):
        rows = torch.randint(len(x), (32,))
        loss = F.cross_entropy(client(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return client.state_dict(), loss.item()


def main():
    torch.manual_seed(0)
    centers = torch.randn(6, 20)
    server = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 6))
    shards = []
    for client in range(CLIENTS):
        favourite = torch.randint(2, (400,)) + 2 * client  # each client sees mostly two classes
        y = torch.where(torch.rand(400) < 0.6, favourite, torch.randint(6, (400,)))
        shards.append((centers[y] + torch.randn(400, 20), y))
    for number in range(ROUNDS):
        results = [train_locally(server, x, y) for x, y in shards]
        states = [state for state, _ in results]
        mean = {k: torch.stack([s[k] for s in states]).mean(0) for k in states[0]}
        server.load_state_dict(mean)
        losses = " ".join(f"{loss:.3f}" for _, loss in results)
        with torch.no_grad():
            right = sum((server(x).argmax(1) == y).float().mean().item() for x, y in shards)
        print(f"round {number} client losses {losses} accuracy {right / CLIENTS:.3f}")


if __name__ == "__main__":
    main()
