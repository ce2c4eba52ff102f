"""Lint changes nothing: random models and loops end with the same weights, bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hookline

LAYERS = ["linear", "dropout", "batch norm", "layer norm", "tied", "list", "half frozen"]


class Random(nn.Module):
    """A network with the layers that it is told."""

    def __init__(self, kinds: list[str], is_checkpointed: bool) -> None:
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.stem = nn.Linear(6, 8)
        made: dict[str, Any] = {
            "linear": lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU()),
            "dropout": lambda: nn.Dropout(0.3),
            "batch norm": lambda: nn.BatchNorm1d(8),
            "layer norm": lambda: nn.LayerNorm(8),
            "half frozen": lambda: nn.Linear(8, 8).requires_grad_(False),
        }
        shared = nn.Linear(8, 8)
        self.hidden = [nn.Linear(8, 8)]  # in no optimizer
        self.body = nn.ModuleList(
            shared if kind == "tied" else made.get(kind, nn.Identity)() for kind in kinds
        )
        self.uses_list = "list" in kinds
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.body:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
        return self.head(self.hidden[0](x) if self.uses_list else x)


def train(case: dict[str, Any], hooks: list[Any]) -> tuple[list[Tensor], Tensor]:
    """Return the weights and buffers after training, and the state of the random generator."""
    torch.manual_seed(case["seed"])
    model: Any = Random(case["layers"], case["checkpointed"])
    seen: list[Any] = []
    if case["user hook"]:
        model.stem.register_forward_hook(lambda *args: seen.append(len(seen)))
    called = torch.compile(model, backend="eager") if case["compiled"] else model
    kind = getattr(torch.optim, case["optimizer"])
    optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=0.05)
    session = hookline.attach(called, optimizer, hooks=hooks, runs=None) if hooks else None
    for step in range(5):
        for _ in range(case["micro-batches"]):
            x, y = torch.randn(6, 6), torch.randint(0, 3, (6,))
            (F.cross_entropy(called(x), y) / case["micro-batches"]).backward()
        if case["clipped"]:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if case["zeroed"]:
            optimizer.zero_grad()
        if step == 2:
            model.eval()
            with torch.no_grad():
                called(x)
            model.train(case["restored"])
    if session is not None:
        session.detach()
    return [tensor.clone() for tensor in model.state_dict().values()], torch.get_rng_state()


CASES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 99),
        "layers": st.lists(st.sampled_from(LAYERS), max_size=4),
        "optimizer": st.sampled_from(["SGD", "Adam", "AdamW", "RMSprop"]),
        "micro-batches": st.integers(1, 2),
        **dict.fromkeys(
            ["checkpointed", "compiled", "user hook", "clipped", "zeroed", "restored"],
            st.booleans(),
        ),
    }
)


@settings(max_examples=12, deadline=None)
@given(CASES)
def test_training_is_the_same_with_lint(case: dict[str, Any]) -> None:
    lint = hookline.Lint()
    plain, linted = train(case, []), train(case, [lint])
    assert all(torch.equal(a, b) for a, b in zip(plain[0], linted[0], strict=True))
    assert torch.equal(plain[1], linted[1])
    assert [why for why in lint.left_out.values() if "it failed (" in why] == []
