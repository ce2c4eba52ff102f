"""Recording what a training run does, to compare it with another one."""

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
from hookline.tensors.module_classes import module_class
from hookline.tensors.nested import named_tensors

_CHECKPOINT = "hookline_verify"
_NOT_COMPARED = ("run", "disabled", "classes")  # keys of a trainer's state
_POSITION = ("epoch", "batches", "now")  # keys of its position in the data
_ATOMS = (type(None), bool, int, str, bytes, torch.dtype, torch.device)


class BatchRecord(NamedTuple):
    """A batch that was trained on, and the random states before it."""

    step: int  # in progress
    loader: str
    batch_idx: int
    batch: str
    random: str


class StepRecord(NamedTuple):
    """The loss of a step, and each parameter and buffer after it."""

    loss: float
    weights: dict[str, str]


class ModuleCall(NamedTuple):
    """A call of a module in training, in the order in which calls return."""

    step: int
    name: str
    kind: str
    inputs: str
    outputs: str


@dataclass
class Recording:
    """The record of a training run, from its first step to its last.

    `final` is the state of the trainer and its model at the end, by dotted path; `attributes` are
    those of users' hooks, without flags, which may say that the hook was resumed. If traced,
    `gradients` has each parameter's, by step and moment ("ready", "used").
    """

    first_step: int = 0
    batches: list[BatchRecord] = field(default_factory=list)
    steps: dict[int, StepRecord] = field(default_factory=dict)
    modules: list[ModuleCall] = field(default_factory=list)
    gradients: dict[tuple[int, str], dict[str, str]] = field(default_factory=dict)
    final: dict[str, str] = field(default_factory=dict)
    attributes: dict[str, dict[str, str]] = field(default_factory=dict)
    stateful_hooks: set[str] = field(default_factory=set)
    checkpoint: Path | None = None
    error: str | None = None
    exception: Exception | None = None

    @property
    def last_step(self) -> int:
        """The last step that was recorded."""
        return max(self.steps, default=self.first_step)


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
        self.recording.first_step = step
        self._step = step + 1
        for name, module in model.named_modules() if self._traces else ():
            self._handles.append(
                module.register_forward_hook(self._watch(name), with_kwargs=True, always_call=False)
            )

    def on_train_batch_start(
        self, trainer: Any, batch: Any, batch_idx: int, dataloader_name: str, step: int
    ) -> None:
        """Record the batch."""
        self._step = step + 1
        random = _digest_value(random_state(trainer.device))
        record = BatchRecord(step + 1, dataloader_name, batch_idx, _digest_value(batch), random)
        self.recording.batches.append(record)

    def on_gradients_ready(self, model: torch.nn.Module) -> None:
        """Record the gradients before anything changes them."""
        self._record_gradients(model, "ready")

    def on_before_optimizer_step(self, model: torch.nn.Module) -> None:
        """Record the gradients that the optimizer uses."""
        self._record_gradients(model, "used")

    def on_step_end(self, trainer: Any, model: torch.nn.Module, step: int, loss: float) -> None:
        """Record the weights, and save the checkpoint to resume from."""
        weights = {name: _digest_tensor(value) for name, value in _tensors_of(model)}
        self.recording.steps[step] = StepRecord(loss, weights)
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
        recording = self.recording
        state = {k: v for k, v in trainer.state_dict().items() if k not in _NOT_COMPARED}
        state["position"] = {name: state["position"].get(name) for name in _POSITION}
        recording.final = _flatten_state({**state, "model": dict(_tensors_of(model))})
        for name in trainer.hooks.list_hooks():
            hook = trainer.hooks.get_hook(name)
            if hook is not self and not type(hook).__module__.startswith("hookline."):
                values = {k: v for k, v in vars(hook).items() if not isinstance(v, bool)}
                recording.attributes[name] = _flatten_state(values, plain_only=True)
        recording.stateful_hooks = set(state["hooks"]) & set(recording.attributes)

    def _watch(self, name: str) -> Callable[..., None]:
        def record(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if module.training and torch.is_grad_enabled():
                inputs, outputs = _digest_value((args, kwargs)), _digest_value(output)
                call = ModuleCall(self._step, name, module_class(module).__name__, inputs, outputs)
                self.recording.modules.append(call)

        return record

    def _record_gradients(self, model: torch.nn.Module, moment: str) -> None:
        if self._traces:
            self.recording.gradients[self._step, moment] = {
                name: _digest_tensor(parameter.grad)
                for name, parameter in model.named_parameters()
                if parameter.grad is not None
            }


def _tensors_of(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


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


def _flatten_state(value: Any, *, plain_only: bool = False) -> dict[str, str]:
    """Return a nested value as text by dotted path: numbers in full, tensors as digests.

    With `plain_only`, other objects are omitted, instead of including the tensors in them.
    """
    return dict(_flatten(value, "", plain_only, depth=0))


def _flatten(value: Any, name: str, plain_only: bool, depth: int) -> Iterator[tuple[str, str]]:
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
            yield from _flatten(inner, f"{prefix}{key}", plain_only, depth + 1)
    elif isinstance(value, list | tuple | deque) and depth < 20:
        yield name, f"{len(value)} items"
        for i, inner in enumerate(list(value)):
            yield from _flatten(inner, f"{prefix}{i}", plain_only, depth + 1)
    elif hasattr(value, "__array__") and hasattr(value, "dtype"):
        array: Any = value  # of numpy
        yield name, f"{array.dtype}{list(array.shape)} {xxhash.xxh3_64_hexdigest(array.tobytes())}"
    elif not plain_only:
        for inner_name, tensor in named_tensors(value, name):
            yield inner_name, _digest_tensor(tensor)
