"""Random small models in random bare loops, to compare training with and without a hook.

A case is a dict of plain values: tests draw it with hypothesis, and ranks get it as JSON.
"""

from __future__ import annotations

import copy
import functools
import math
import os
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parametrizations, prune
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import hookline
from hookline.loop.random_state import random_state
from hookline.probes.capture import Capture
from hookline.probes.edit import Edit

WIDTH = 8
TOKENS = 6
CLASSES = 5
BATCH = 4


# -- layers: the same shape in and out, (batch, WIDTH) or (batch, TOKENS, WIDTH) -------------------


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.ndim == 3 else x[:, None]
        q, k, v = self.qkv(x).chunk(3, -1)
        p = self.dropout if self.training else 0.0
        return self.out(F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True))


class TorchAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x if x.ndim == 3 else x[:, None])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x if x.ndim == 3 else x[:, None])[0]


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Conv1d(1, 2, 3, padding=1), nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 1, WIDTH)
        return self.norm(self.layer(flat)).mean(1).reshape(x.shape)


class BatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.reshape(-1, WIDTH)).reshape(x.shape)


class Noisy(nn.Module):
    """Draws from all generators: torch's, Python's, numpy's."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x + 0.1 * torch.randn_like(x) * random.random() * float(np.random.rand())


class OwnGenerator(nn.Module):
    """Has a generator of its own, which cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 0.1 * torch.rand(x.shape, generator=self.generator))


class Counting(nn.Module):
    """Counts its calls in a buffer and in attributes, and changes with them."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.calls, self.history = 0, [0.0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.count += 1
        self.history.append(float(self.calls))
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * x.reshape(-1, WIDTH).mean(0)
        return x + self.mean * math.sin(self.calls) + 0.01 * self.count


class InPlace(nn.Module):
    """Changes its input, and what it returns, in place."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.9).relu_() + 1 if not x.is_leaf else x + 1


class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(WIDTH, 2))
        self.b = nn.Parameter(torch.zeros(2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a @ self.b


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        best = weights.argmax(-1, keepdim=True)
        parts = [(best == i) * weights[..., i, None] * e(x) for i, e in enumerate(self.experts)]
        return x + sum(parts)


class FakeQuantized(nn.Module):
    """Quantisation-aware training: observers with buffers, rounded weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.inputs, self.weights = FakeQuantize(), FakeQuantize()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.inputs(x), self.weights(self.layer.weight), self.layer.bias)


class Quantized(nn.Module):
    """A frozen layer with weights in int8, dequantised in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-90, 90, (WIDTH, WIDTH), dtype=torch.int8))
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.01))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.float() * self.scale[:, None])


class Cached(nn.Module):
    """Keeps a tensor of the last call, with its graph cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        if self.last is not None and self.last.shape == out.shape:
            out = out + 0.1 * self.last
        self.last = out.detach()
        return out


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.layer(x).chunk(2, -1)
        return F.dropout(a, 0.1, self.training) * b.sigmoid()


def _pruned() -> nn.Module:
    return prune.l1_unstructured(nn.Linear(WIDTH, WIDTH), "weight", 0.3)


def _frozen() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH).requires_grad_(False)


def _zeros() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    nn.init.zeros_(layer.weight)
    return layer


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()),
    "relu": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
    "dropout": lambda: nn.Dropout(0.3),
    "batch norm": BatchNorm,
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "convolution": Convolution,
    "attention": Attention,
    "torch attention": TorchAttention,
    "recurrent": Recurrent,
    "experts": Experts,
    "low rank": LowRank,
    "noisy": Noisy,
    "own generator": OwnGenerator,
    "counting": Counting,
    "in place": InPlace,
    "fake quantized": FakeQuantized,
    "quantized": Quantized,
    "cached": Cached,
    "two outputs": TwoOutputs,
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "pruned": _pruned,
    "frozen": _frozen,
    "zeros": _zeros,
    "shared": nn.Identity,  # the same layer in each place
    "unused": nn.Identity,  # a layer that is not called
    "in a list": nn.Identity,  # that is no ModuleList
}


class RandomNet(nn.Module):
    """A network with the layers that a case names, for features or for tokens."""

    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        self.case = case
        shared = nn.Linear(WIDTH, WIDTH)
        names = case["layers"]
        self.body = nn.ModuleList(shared if n == "shared" else LAYERS[n]() for n in names)
        self.unused = nn.Linear(WIDTH, WIDTH) if "unused" in names else None
        self.hidden = [nn.Linear(WIDTH, WIDTH)] if "in a list" in names else []
        self.is_text = case["data"] == "tokens"
        classes = TOKENS * CLASSES if self.is_text else CLASSES
        sparse = case.get("sparse", False)
        self.stem = (
            nn.Embedding(classes, WIDTH, sparse=sparse) if self.is_text else nn.Linear(6, WIDTH)
        )
        self.head = nn.Linear(WIDTH, classes, bias=False)
        if self.is_text and case["tied"]:
            self.head.weight = self.stem.weight

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        out = self.stem(x)
        kind = self.case["checkpointing"]
        for layer in self.body:
            is_old = kind == "reentrant"
            out = checkpoint(layer, out, use_reentrant=is_old) if kind else layer(out)
        for layer in self.hidden:
            out = layer(out)
        if not self.is_text and out.ndim == 3:
            out = out.mean(1)
        logits = self.head(out)
        if labels is None:
            return logits
        return {"logits": logits, "loss": loss_of(logits, labels, self.is_text)}


def loss_of(logits: Tensor, labels: Tensor, is_text: bool) -> Tensor:
    if not is_text:
        return F.cross_entropy(logits, labels)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def make_batch(case: dict[str, Any]) -> tuple[Tensor, Tensor]:
    if case["data"] == "tokens":
        ids = torch.randint(0, TOKENS * CLASSES, (BATCH, TOKENS))
        return ids, ids.clone()
    return torch.randn(BATCH, 6), torch.randint(0, CLASSES, (BATCH,))


# -- hooks of others -------------------------------------------------------------------------------


class CountingHook(hookline.Hook):
    """Draws nothing and changes nothing, and counts what it sees."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_after_forward(self, outputs: Any) -> None:
        self.seen.append("forward")

    def on_before_backward(self) -> None:
        self.seen.append("backward")

    def on_gradients_ready(self) -> None:
        self.seen.append("gradients")

    def on_step_end(self, step: int) -> None:
        self.seen.append(f"step {step}")


OTHERS: dict[str, Callable[[], Any]] = {
    "counting": CountingHook,
    "ema": lambda: hookline.EMA(decay=0.9),
    "clip": lambda: hookline.ClipNorm(0.5),
    "noise": lambda: hookline.Noise(0.01),
    "centralize": hookline.Centralize,
    "gradient monitor": lambda: hookline.GradientMonitor(log_frequency=1),
    "activation stats": hookline.ActivationStats,
    "capture": lambda: Capture("head"),
    "edit": lambda: Edit("head", operation="scale", value=1.01, enable_intervention=True),
    "debug": hookline.DebugHook,
}


# -- training --------------------------------------------------------------------------------------


def make_optimizers(case: dict[str, Any], model: nn.Module) -> list[Any]:
    kind, options = OPTIMIZERS[case["optimizer"]]
    trained = [p for p in model.parameters() if p.requires_grad]
    if case["two optimizers"] and len(trained) > 1:
        return [kind(trained[:1], **options), kind(trained[1:], **options)]
    return [kind(trained, **options)]


OPTIMIZERS: dict[str, Any] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "plain sgd": (torch.optim.SGD, {"lr": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "fused adamw": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
    "lbfgs": (torch.optim.LBFGS, {"lr": 0.1, "max_iter": 2}),
    "zero": (torch.optim.SGD, {"lr": 0.0}),
}

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "": lambda _: None,
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 6),
    "warm-up": lambda o: lr_scheduler.LambdaLR(o, lambda step: min(1.0, step / 3)),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
}


def _note(seen: list[Any], *args: Any) -> None:
    seen.append(len(seen))


class Training:
    """A bare loop, as a case says.

    Args:
        case: what to train, and how.
        hooks: attached to the loop, with those of others that the case names; None: no session.
        wrap: makes what is trained of the model, as DDP does.
    """

    def __init__(
        self,
        case: dict[str, Any],
        hooks: list[Any] | None,
        wrap: Callable[[nn.Module], nn.Module] | None = None,
    ) -> None:
        self.case = case
        torch.manual_seed(case["seed"])
        random.seed(case["seed"])
        np.random.seed(case["seed"])
        model: Any = RandomNet(case).to(getattr(torch, case["dtype"]))
        self.model = model
        self.called = model if wrap is None else wrap(model)
        self.seen: list[Any] = []
        if case["user hooks"]:
            model.head.register_forward_hook(functools.partial(_note, self.seen))
            model.stem.register_full_backward_hook(functools.partial(_note, self.seen))
        self.optimizers = make_optimizers(case, self.called)
        if case["compiled"]:
            self.called = torch.compile(self.called, backend=case["compiled"])
        self.average = AveragedModel(model) if case["averaged"] else None
        self.scheduler = SCHEDULERS[case["scheduler"]](self.optimizers[0])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if case["scaled"] else None
        self.losses: list[float] = []
        self.hooks = hooks
        torch.manual_seed(case["seed"] + 1 + int(os.environ.get("RANK", "0")))  # of the data

    def run(self, steps: int = 5) -> None:
        if self.hooks is None:
            self._train(steps)
            return
        others = [OTHERS[name]() for name in self.case["others"]]
        optimizers = self.optimizers if len(self.optimizers) > 1 else self.optimizers[0]
        hooks = [*others, *self.hooks]
        with hookline.attach(self.called, optimizers, hooks=hooks, runs=None) as session:
            self._train(steps, session)
        self.seen += [each for hook in others for each in getattr(hook, "seen", ())]

    def _batches(self) -> Iterator[Any]:
        if not self.case["loader"]:
            while True:
                yield make_batch(self.case)
        pairs = [make_batch(self.case) for _ in range(3)]
        data = TensorDataset(*(torch.cat(each) for each in zip(*pairs, strict=True)))
        loader = DataLoader(data, batch_size=BATCH, shuffle=True, drop_last=True)
        while True:
            yield from loader

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        dtype = getattr(torch, self.case["dtype"])
        x = x.to(dtype) if x.is_floating_point() else x
        kind = self.case["autocast"]
        context: Any = nullcontext()
        if kind:
            context = torch.autocast("cpu", dtype=getattr(torch, kind))
        with context:
            if self.case["loss in model"]:
                return self.called(x, labels=y)["loss"]
            return loss_of(self.called(x), y, self.case["data"] == "tokens")

    def _train(self, steps: int, session: Any = None) -> None:
        batches = self._batches()
        for step in range(steps):
            for optimizer in self.optimizers:
                if self.case["lbfgs"]:
                    batch = next(batches)
                    self.losses.append(
                        float(optimizer.step(functools.partial(self._closure, batch)))
                    )
                    continue
                self._backward(batches)
                self._step(optimizer)
            if self.scheduler is not None:
                self.scheduler.step()
            if self.average is not None:
                self.average.update_parameters(self.model)
            if step == 2 and self.case["in between"]:
                self._between(session)

    def _closure(self, batch: Any) -> Tensor:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = self._loss(batch)
        loss.backward()
        return loss

    def _backward(self, batches: Iterator[Any]) -> None:
        if self.case["zeroed"]:
            for each in self.optimizers:
                each.zero_grad(set_to_none=self.case["zeroed"] == "none")
        for _ in range(self.case["micro-batches"]):
            loss = self._loss(next(batches)) / self.case["micro-batches"]
            self.losses.append(float(loss.detach()))
            scaled = loss if self.scaler is None else self.scaler.scale(loss)
            scaled.backward(retain_graph=self.case["retain"])

    def _step(self, optimizer: Any) -> None:
        kind = self.case["clipped"]
        if self.scaler is not None and kind == "norm":
            self.scaler.unscale_(optimizer)
        if kind == "norm":
            clip_grad_norm_(self.called.parameters(), 0.5)
        elif kind == "value":
            clip_grad_value_(self.called.parameters(), 0.1)
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()

    def _between(self, session: Any) -> None:
        """Do what loops do between steps."""
        kind = self.case["in between"]
        x, y = make_batch(self.case)
        if kind == "validation":
            self.called.eval()
            with torch.no_grad() if session is None else session.validation(), torch.no_grad():
                self.losses.append(float(self._loss((x, y)).detach()))
            self.called.train()
        elif kind == "forgotten train":
            self.called.eval()
            with torch.inference_mode():
                self._loss((x, y))
        elif kind == "copy":
            self.losses.append(
                sum(float(p.detach().sum()) for p in copy.deepcopy(self.model).parameters())
            )
        elif kind == "load":
            self.model.load_state_dict(copy.deepcopy(self.model.state_dict()))
            for each in self.optimizers:
                each.load_state_dict(copy.deepcopy(each.state_dict()))
        elif kind == "grad":
            loss = self._loss((x, y))
            trained = [p for p in self.called.parameters() if p.requires_grad]
            grads = torch.autograd.grad(loss, trained, allow_unused=True)
            self.losses.append(sum(float(g.to_dense().sum()) for g in grads if g is not None))
        elif kind == "new optimizer":
            for old in self.optimizers:
                old.param_groups[0]["lr"] *= 0.5
        elif kind == "freeze":
            self.model.head.requires_grad_(False)

    def state(self) -> list[Any]:
        """Return everything that a hook could have changed, as comparable values."""
        tensors = {f"model {k}": v for k, v in self.model.state_dict().items()}
        named = self.model.named_parameters()
        tensors |= {f"grad {k}": p.grad for k, p in named if p.grad is not None}
        if self.average is not None:
            tensors |= {f"average {k}": v for k, v in self.average.state_dict().items()}
        for i, optimizer in enumerate(self.optimizers):
            tensors |= _tensors_of(f"optimizer {i}", optimizer.state_dict())
        values = [(name, _bytes(tensor)) for name, tensor in tensors.items()]
        modules = [
            (name, m.training, len(m._forward_hooks), len(m._backward_hooks), sorted(vars(m)))
            for name, m in self.model.named_modules()
        ]
        counts = [
            (n, m.calls, m.history) for n, m in self.model.named_modules() if hasattr(m, "calls")
        ]
        own = [m.generator.get_state() for m in self.model.modules() if hasattr(m, "generator")]
        states = random_state(torch.device("cpu"))
        generators = [states["python"], states["numpy"], _bytes(states["torch"]), *map(_bytes, own)]
        return [values, modules, counts, repr(generators), self.losses, self.seen, self._flags()]

    def _flags(self) -> list[Any]:
        return [(p.requires_grad, p.is_leaf, p.grad is None) for p in self.model.parameters()]


def _tensors_of(name: str, value: Any) -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        return {name: value}
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    elif isinstance(value, float | int):
        return {name: torch.tensor(float(value), dtype=torch.float64)}
    return {k: v for key, each in items for k, v in _tensors_of(f"{name} {key}", each).items()}


def _bytes(tensor: Tensor) -> tuple[Any, ...]:
    """Return what is in a tensor, bit for bit: NaN is equal to NaN."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[operator]
    if local.is_sparse:
        local = local.to_dense()
    flat = local.detach().contiguous().reshape(-1)
    return str(tensor.dtype), tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes()
