"""Policy optimisation with clipped ratios: a small policy writes strings and is rewarded."""

import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

FIXED = "--fixed" in sys.argv


@dataclass
class Config:
    vocabulary: int = 10
    length: int = 8
    group: int = 48
    rounds: int = 25
    inner_steps: int = 2
    temperature: float = 0.6
    clip: float = 0.2
    lr: float = 4e-3


class Policy(nn.Module):
    def __init__(self, cfg: Config, width: int = 32):
        super().__init__()
        self.embedding = nn.Embedding(cfg.vocabulary + 1, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, cfg.vocabulary)
        nn.init.normal_(self.head.weight, std=0.5)

    def forward(self, tokens, state=None):
        hidden, state = self.rnn(self.embedding(tokens), state)
        return self.head(hidden), state


class RolloutEngine:
    """Samples strings and returns the log-probabilities of the sampling distribution."""

    def __init__(self, policy: Policy, cfg: Config, seed: int):
        self.policy, self.cfg = policy, cfg
        self.generator = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def generate(self):
        token = torch.full((self.cfg.group, 1), self.cfg.vocabulary)
        state, tokens, log_probs = None, [token], []
        for _ in range(self.cfg.length):
            logits, state = self.policy(token, state)
            log_p = F.log_softmax(logits[:, -1] / self.cfg.temperature, -1)
            token = torch.multinomial(log_p.exp(), 1, generator=self.generator)
            tokens.append(token)
            log_probs.append(log_p.gather(1, token))
        return torch.cat(tokens, 1), torch.cat(log_probs, 1)


def reward(strings):
    """Share of neighbours that go up by one."""
    body = strings[:, 1:]
    return (body[:, 1:] == body[:, :-1] + 1).float().mean(1)


def trainer_log_probs(policy, strings, cfg):
    logits, _ = policy(strings[:, :-1])
    if FIXED:
        logits = logits / cfg.temperature
    return F.log_softmax(logits, -1).gather(2, strings[:, 1:, None])[..., 0]


def policy_loss(log_probs, old, advantage, clip):
    ratio = (log_probs - old).exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    return -torch.minimum(ratio * advantage, clipped * advantage).mean()


def main():
    cfg = Config()
    torch.manual_seed(28)
    policy = Policy(cfg)
    engine = RolloutEngine(policy, cfg, seed=29)
    optimizer = torch.optim.Adam(policy.parameters(), lr=cfg.lr)
    gaps = []
    for number in range(cfg.rounds):
        strings, old = engine.generate()
        score = reward(strings)
        advantage = ((score - score.mean()) / (score.std() + 1e-4))[:, None]
        for inner in range(cfg.inner_steps):
            log_probs = trainer_log_probs(policy, strings, cfg)
            if inner == 0:
                gaps.append((log_probs.detach() - old).abs().mean().item())
            loss = policy_loss(log_probs, old, advantage, cfg.clip)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
        if number % 5 == 0:
            print(f"round {number} loss {loss.item():.4f} reward {score.mean().item():.3f}")
    mean = sum(gaps) / len(gaps)
    print(f"evidence: log-probabilities of the same weights differ by {mean:.6f} on average")


if __name__ == "__main__":
    main()
