"""Learn a dynamics model from transitions that a simulator produced."""

import sys

import numpy as np
import torch
from torch import nn

FIXED = "--fixed" in sys.argv


class Pendulum:
    """The observation is written into one array, which step() returns."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.observation = np.zeros(3, dtype=np.float32)
        self.reset()

    def _write(self):
        self.observation[:] = np.cos(self.angle), np.sin(self.angle), self.speed
        return self.observation

    def reset(self):
        self.angle, self.speed = self.rng.uniform(-3, 3), self.rng.uniform(-1, 1)
        return self._write()

    def step(self, torque):
        self.speed += 0.15 * float(torque) - 0.3 * np.sin(self.angle)
        self.speed = float(np.clip(self.speed, -4, 4))
        self.angle += 0.2 * self.speed
        return self._write()


class Replay:
    def __init__(self, capacity):
        self.capacity, self.items, self.next = capacity, [], 0

    def add(self, observation, action, following):
        item = (observation, action, following)
        if len(self.items) < self.capacity:
            self.items.append(item)
        else:
            self.items[self.next] = item
        self.next = (self.next + 1) % self.capacity

    def sample(self, n, rng):
        chosen = [self.items[i] for i in rng.integers(len(self.items), size=n)]
        columns = zip(*chosen, strict=True)
        return tuple(torch.from_numpy(np.stack(column)) for column in columns)


def main():
    torch.manual_seed(0)
    rng = np.random.default_rng(1)
    env, replay = Pendulum(2), Replay(800)
    model = nn.Sequential(
        nn.Linear(4, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 3)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    observation = env.reset()
    for step in range(1, 101):
        for _ in range(8):
            action = rng.uniform(-2, 2, size=1).astype(np.float32)
            if FIXED:
                observation = observation.copy()
            following = env.step(action[0])
            replay.add(observation, action, following.copy() if FIXED else following)
            observation = following
        states, actions, targets = replay.sample(32, rng)
        loss = (model(torch.cat([states, actions], 1)) - (targets - states)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.5f}")
    different = len({item[0].tobytes() for item in replay.items})
    print(f"evidence: different observations in the memory {different} of {len(replay.items)}")


if __name__ == "__main__":
    main()
