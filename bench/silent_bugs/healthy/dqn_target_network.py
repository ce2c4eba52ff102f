"""Deep Q-learning on a corridor with a replay buffer and a target network that is copied."""

import copy
import random
from collections import deque

import torch
from torch import nn
from torch.nn import functional as F

LENGTH, GAMMA, BATCH = 8, 0.9, 64


def encode(position):
    return F.one_hot(torch.tensor(position), LENGTH).float()


def move(position, action):
    position = max(0, position - 1) if action == 0 else position + 1
    done = position == LENGTH - 1
    return position, 1.0 if done else -0.01, done


class QNetwork(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.features = nn.Linear(LENGTH, hidden)
        self.value = nn.Linear(hidden, 1)
        self.advantage = nn.Linear(hidden, 2)

    def forward(self, x):
        x = F.relu(self.features(x))
        advantage = self.advantage(x)
        return self.value(x) + advantage - advantage.mean(dim=1, keepdim=True)


def learn(online, target, optimizer, buffer):
    states, actions, rewards, following, done = zip(*random.sample(buffer, BATCH), strict=True)
    q = online(torch.stack(states)).gather(1, torch.tensor(actions)[:, None]).squeeze(1)
    with torch.no_grad():
        best = online(torch.stack(following)).argmax(1, keepdim=True)
        future = target(torch.stack(following)).gather(1, best).squeeze(1)
        goal = torch.tensor(rewards) + GAMMA * future * (1 - torch.tensor(done).float())
    loss = F.smooth_l1_loss(q, goal)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def greedy_length(online):
    position, count, done = 0, 0, False
    while not done and count < 50:
        with torch.no_grad():
            action = online(encode(position)[None]).argmax().item()
        position, _, done = move(position, action)
        count += 1
    return count


def main():
    random.seed(0)
    torch.manual_seed(0)
    online = QNetwork()
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.RMSprop(online.parameters(), lr=2e-3)
    buffer = deque(maxlen=500)
    position, updates = 0, 0
    for move_number in range(700):
        epsilon = max(0.1, 1 - move_number / 400)
        if random.random() < epsilon:
            action = random.randrange(2)
        else:
            with torch.no_grad():
                action = online(encode(position)[None]).argmax().item()
        following, reward, done = move(position, action)
        buffer.append((encode(position), action, reward, encode(following), done))
        position = random.randrange(LENGTH - 1) if done else following
        if len(buffer) >= BATCH and move_number % 6 == 0:
            loss = learn(online, target, optimizer, buffer)
            updates += 1
            if updates % 10 == 0:
                target.load_state_dict(online.state_dict())
                print(f"update {updates}: loss {loss:.5f}, epsilon {epsilon:.2f}")
    print(f"moves of the greedy policy: {greedy_length(online)} (best {LENGTH - 1})")


if __name__ == "__main__":
    main()
