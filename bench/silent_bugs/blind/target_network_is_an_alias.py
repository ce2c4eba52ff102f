"""Q-learning with a target network and a replay memory on a grid."""

import copy
import random
import sys
from collections import deque

import torch
import torch.nn.functional as F
from torch import nn

FIXED = "--fixed" in sys.argv
SIDE, ACTIONS, GAMMA, SYNC = 4, 4, 0.9, 25
MOVES = [(0, 1), (1, 0), (0, -1), (-1, 0)]


class QNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(SIDE * SIDE, 48), nn.ReLU(), nn.Linear(48, ACTIONS))

    def forward(self, cell):
        return self.layers(F.one_hot(cell, SIDE * SIDE).float())


def move(cell, action):
    row, column = divmod(cell, SIDE)
    row = min(max(row + MOVES[action][0], 0), SIDE - 1)
    column = min(max(column + MOVES[action][1], 0), SIDE - 1)
    new = row * SIDE + column
    done = new == SIDE * SIDE - 1
    return new, 1.0 if done else -0.05, done


class Agent:
    def __init__(self):
        self.online = QNetwork()
        self.target = copy.deepcopy(self.online) if FIXED else self.online
        self.optimizer = torch.optim.Adam(self.online.parameters(), lr=2e-3)
        self.memory = deque(maxlen=2000)

    def act(self, cell, epsilon):
        if random.random() < epsilon:
            return random.randrange(ACTIONS)
        with torch.no_grad():
            return self.online(torch.tensor([cell])).argmax().item()

    def learn(self):
        batch = random.sample(self.memory, 64)
        cell, action, reward, new, done = (
            torch.tensor(column) for column in zip(*batch, strict=True)
        )
        with torch.no_grad():
            bootstrap = self.target(new).max(1).values * (~done)
        q = self.online(cell).gather(1, action[:, None]).squeeze(1)
        loss = F.smooth_l1_loss(q, reward + GAMMA * bootstrap)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def main():
    random.seed(0)
    torch.manual_seed(0)
    agent = Agent()
    cell, lag = 0, 0.0
    for step in range(1, 121):
        for _ in range(4 if step > 1 else 100):
            action = agent.act(cell, epsilon=max(0.1, 1 - step / 60))
            new, reward, done = move(cell, action)
            agent.memory.append((cell, action, reward, new, done))
            cell = random.randrange(SIDE * SIDE - 1) if done else new
        loss = agent.learn()
        with torch.no_grad():
            cells = torch.arange(SIDE * SIDE)
            lag = max(lag, (agent.online(cells) - agent.target(cells)).abs().max().item())
        if step % SYNC == 0:
            agent.target.load_state_dict(agent.online.state_dict())
        if step % 10 == 0:
            print(f"step {step} loss {loss:.4f}")
    print(f"evidence: largest distance between target and online network {lag:.4f}")


if __name__ == "__main__":
    main()
