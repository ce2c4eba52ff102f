"""Recording what a training run does, and the first difference between two recordings.

A recording is a list of facts by step, in the order in which training happens, and the state at the
end by dotted path. Values are digests, which are equal only if the values are equal bit for bit.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from hookline.hook import Hook
from hookline.loop.random_state import random_state
from hookline.tensors.name_patterns import module_class
from hookline.tensors.nested import named_tensors

_CHECKPOINT = "hookline_verify"
_NOT_COMPARED = ("run", "disabled", "classes")  # keys of a trainer's state
_POSITION = ("epoch", "batches", "now")  # keys of its position in the data
_RANDOM = "position.now"
_TRAINING = (_RANDOM, "model", "optimizers", "schedulers", "scaler", "step", "epoch", "round")
_ATOMS = (type(None), bool, int, str, bytes, torch.dtype, torch.device)


class Fact(NamedTuple):
    """One thing that training did in a step.

    Attributes:
        kind: "batch", "random", "module", "gradient", "loss" or "weight".
        name: of the loader, module, parameter or buffer.
        value: a digest, or several; of a module its class, its inputs and its outputs.
    """

    kind: str
    name: str
    value: Any


@dataclass
class Recording:
    """The record of a training run, from its first step to its last.

    Attributes:
        first_step: completed steps when it began.
        last_step: the last step that has ended.
        facts: by step; calls of modules and gradients only if they are traced.
        final: the state of the trainer and its model at the end, by dotted path.
        checkpoint: where it was interrupted.
        error: the error that ended it.
    """

    first_step: int = 0
    last_step: int = 0
    facts: dict[int, list[Fact]] = field(default_factory=dict)
    final: dict[str, str] = field(default_factory=dict)
    checkpoint: Path | None = None
    error: str | None = None
    exception: Exception | None = None


class Interruption(KeyboardInterrupt):
    """Ends training after a checkpoint, as a kill would."""


class RecordingHook(Hook):
    """Records a training run, and interrupts it after a checkpoint at the step `interrupt_at`.

    With `traces` it also records calls of modules, and gradients. `on_step` gets each step.
    """

    critical = True

    def __init__(
        self,
        interrupt_at: int | None = None,
        *,
        traces: bool = False,
        on_step: Callable[[int], object] | None = None,
    ) -> None:
        self.recording = Recording()
        self._interrupt_at = interrupt_at
        self._traces = traces
        self._on_step = on_step
        self._handles: list[Any] = []
        self._step = 1

    def on_train_start(self, model: torch.nn.Module, step: int) -> None:
        """Watch the modules."""
        self.recording.first_step = self.recording.last_step = step
        for name, module in model.named_modules() if self._traces else ():
            self._handles.append(module.register_forward_hook(self._watch(name), with_kwargs=True))

    def on_train_batch_start(
        self, trainer: Any, batch: Any, batch_idx: int, dataloader_name: str, step: int
    ) -> None:
        """Record the batch, and the random states before it."""
        self._step = step + 1
        self._add("batch", dataloader_name, (batch_idx, _digest_value(batch)))
        self._add("random", "", _digest_value(random_state(trainer.device)))

    def on_gradients_ready(self, model: torch.nn.Module) -> None:
        """Record the gradients before anything changes them."""
        self._add_gradients(model, "before updates")

    def on_before_optimizer_step(self, model: torch.nn.Module) -> None:
        """Record the gradients that the optimizer uses."""
        self._add_gradients(model, "after updates")

    def on_step_end(self, trainer: Any, model: torch.nn.Module, step: int, loss: float) -> None:
        """Record the loss and the weights, and save the checkpoint to resume from."""
        self.recording.last_step = step
        self._add("loss", "", repr(loss))
        for name, value in _tensors_of(model):
            self._add("weight", name, _digest_tensor(value))
        if step == self._interrupt_at:
            trainer.save_checkpoint(trainer.run.checkpoints / _CHECKPOINT)
        if self._on_step is not None:
            self._on_step(step)

    def on_checkpoint_save(self, path: Path) -> None:
        """Interrupt training once the checkpoint is durable."""
        if path.name.startswith(_CHECKPOINT):
            self.recording.checkpoint = path
            raise Interruption

    def on_train_end(self, trainer: Any, model: torch.nn.Module) -> None:
        """Record the final state."""
        for handle in self._handles:
            handle.remove()
        state = {k: v for k, v in trainer.state_dict().items() if k not in _NOT_COMPARED}
        state["position"] = {name: state["position"].get(name) for name in _POSITION}
        self.recording.final = _flatten_state({**state, "model": dict(_tensors_of(model))})

    def _add(self, kind: str, name: str, value: Any) -> None:
        self.recording.facts.setdefault(self._step, []).append(Fact(kind, name, value))

    def _watch(self, name: str) -> Callable[..., None]:
        def record(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if module.training and torch.is_grad_enabled():
                inputs, outputs = _digest_value((args, kwargs)), _digest_value(output)
                self._add("module", name, (module_class(module).__name__, inputs, outputs))

        return record

    def _add_gradients(self, model: torch.nn.Module, moment: str) -> None:
        for name, parameter in model.named_parameters() if self._traces else ():
            if parameter.grad is not None:
                self._add("gradient", name, (moment, _digest_tensor(parameter.grad)))


def _tensors_of(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


# -- comparison -----------------------------------------------------------------------------------


class Difference(NamedTuple):
    """The first difference between two recordings.

    Attributes:
        step: None if only the state at the end differs.
        fact: what differs in a step, in the first recording.
        other: the same in the second one; None if it has nothing there.
        text: describes it.
    """

    step: int | None
    fact: Fact | None
    other: Fact | None
    text: str


def compare(a: Recording, b: Recording) -> Difference | None:
    """Return the first difference in what training did, without the states of hooks.

    If one of the runs was resumed, only the steps after that are compared.
    """
    for one in (a, b):
        if one.error is not None:
            return Difference(None, None, None, f"training fails: {one.error}")
    last = min(a.last_step, b.last_step)
    for step in range(max(a.first_step, b.first_step) + 1, last + 1):
        ours, theirs = a.facts.get(step, []), b.facts.get(step, [])
        for fact, other in zip(ours, theirs, strict=False):
            if fact != other:
                return Difference(step, fact, other, _describe_fact(step, fact, other))
        if len(ours) != len(theirs):
            fact = max(ours, theirs, key=len)[min(len(ours), len(theirs))]
            return Difference(step, fact, None, f"step {step} has more batches in one of the runs")
    if a.last_step != b.last_step:
        text = f"one run ends after step {a.last_step}, the other after step {b.last_step}"
        return Difference(last + 1, None, None, text)
    names = _differing_paths(a, b, _TRAINING)
    if not names:
        return None
    name = "the random states" if names[0].startswith(_RANDOM) else f"'{names[0]}'"
    verb = "differ" if names[0].startswith(_RANDOM) else "differs"
    return Difference(None, None, None, f"{name} {verb} at the end")


def _describe_fact(step: int, fact: Fact, other: Fact) -> str:
    if fact.kind == "batch":
        return f"the loader '{fact.name}' gives another batch {fact.value[0]} in step {step}"
    if fact.kind == "random":
        return f"the random states differ before step {step}"
    if fact.kind == "loss":
        return f"the loss of step {step} is {fact.value} and {other.value}"
    return f"the {fact.kind} '{fact.name}' differs in step {step}"


def find_hook_differences(a: Recording, b: Recording) -> list[str]:
    """Return which values in the states of hooks differ at the end, by dotted path."""
    paths = _differing_paths(a, b, ("hooks",))
    return [path.removeprefix("hooks.") for path in paths]


def _differing_paths(a: Recording, b: Recording, sections: tuple[str, ...]) -> list[str]:
    prefixes = tuple(f"{section}." for section in sections)
    paths = [path for path in {**a.final, **b.final} if f"{path}.".startswith(prefixes)]
    return [path for path in paths if a.final.get(path) != b.final.get(path)]


# -- digests: texts that are equal only if the values are equal bit for bit -----------------------


@torch.no_grad()
def _digest_tensor(tensor: Tensor) -> str:
    """Return the type, the shape and a hash of a tensor's values; waits for its device."""
    values = tensor.detach()
    if values.layout is not torch.strided:
        values = values.to_dense()
    values = values.cpu().resolve_conj().resolve_neg().contiguous()
    size = values.numel() * values.element_size()
    memory: Any = (ctypes.c_char * size).from_address(values.data_ptr()) if size else b""
    kind = str(values.dtype).removeprefix("torch.")
    return f"{kind}{list(values.shape)} {xxhash.xxh3_64_hexdigest(memory)}"


def _digest_value(value: Any) -> str:
    """Return a hash of a nested value, such as a batch or random states."""
    if isinstance(value, Tensor):
        return _digest_tensor(value)
    return xxhash.xxh3_64_hexdigest(repr(_flatten_state(value)).encode())  # `repr` escapes


def _flatten_state(value: Any) -> dict[str, str]:
    """Return a nested value as text by dotted path: numbers in full, tensors as digests."""
    return dict(_flatten(value, "", depth=0))


def _flatten(value: Any, name: str, depth: int) -> Iterator[tuple[str, str]]:
    prefix = f"{name}." if name else ""
    if isinstance(value, Tensor):
        yield name, _digest_tensor(value)
    elif isinstance(value, float):
        yield name, "nan" if value != value else value.hex()
    elif isinstance(value, _ATOMS):
        yield name, repr(value)
    elif isinstance(value, torch.Generator):
        yield name, _digest_tensor(value.get_state())
    elif isinstance(value, Mapping) and depth < 20:
        yield name, f"{len(value)} keys"
        for key, inner in list(value.items()):
            yield from _flatten(inner, f"{prefix}{key}", depth + 1)
    elif isinstance(value, list | tuple | deque) and depth < 20:
        yield name, f"{len(value)} items"
        for i, inner in enumerate(list(value)):
            yield from _flatten(inner, f"{prefix}{i}", depth + 1)
    elif hasattr(value, "__array__") and hasattr(value, "dtype"):
        array: Any = value  # of numpy
        yield name, f"{array.dtype}{list(array.shape)} {xxhash.xxh3_64_hexdigest(array.tobytes())}"
    else:
        for inner_name, tensor in named_tensors(value, name):
            yield inner_name, _digest_tensor(tensor)
