"""EMA: an exponential moving average of the weights, for validation and export."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from hookline.checkpoint.atomic_files import sync
from hookline.checkpoint.tensor_files import write_tensors
from hookline.errors import TrainingError, listed
from hookline.hook import Rank
from hookline.options import BuiltIn

__all__ = ["EMA"]

log = logging.getLogger("hookline")

_USUAL_WARMUP = 10

# All tensors in one call.
_lerp = torch._foreach_lerp_  # pyright: ignore[reportPrivateImportUsage]
_copy = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]


class EMA(BuiltIn):
    """Keeps an exponential moving average of the weights, and validates with it.

    Every N completed steps, `average = d * average + (1 - d) * weights` with `d = decay ** N`, on
    the device: the average reaches as far back as one that is updated in every step. Training
    itself is the same, bit for bit. For validation the average is put into the model, and the
    training weights come back after it, also when validation fails. Checkpoints always hold the
    training weights as the model's, and the average as this hook's state: while the average is in
    the model, `model.state_dict()` gives the training weights.

    Order: users' hooks come first. So in `on_validation_start` they still see the training weights
    and in `on_validation_end` still the average; built-in hooks after it see the opposite, and
    what happens in between (batches, probes) always sees the average. To let another hook see it
    in `on_validation_start` too, register with `before=`.

    `export(path)` writes a model with the averaged weights, `apply_to(model)` copies them.

    Parameters that do not require a gradient are not averaged until they do; tied ones are averaged
    once. The average of float16 and bfloat16 parameters is kept in float32.

    Args:
        decay: how much of the average stays in each step.
        warmup: the first updates use a smaller decay, at most `(1 + n) / (w + n)` after n updates,
            so that the initial weights are forgotten soon: w is this number, or 10 for True.
        every_n_steps: update after every N-th step.
        validate_with: put the average into the model for validation.
        include_buffers: average floating-point buffers (running statistics) too; else those of the
            model are used.
    """

    critical = True  # it holds the training weights while the average is in the model
    intervenes = True  # in validation
    hookline_rank = Rank.MONITOR
    cost = (
        "One fused pass over the weights per update, a second copy of the trained weights in "
        "memory, and a third during validation."
    )

    def __init__(
        self,
        decay: Annotated[float, Field(ge=0, lt=1)] = 0.999,
        warmup: bool | PositiveInt = True,
        every_n_steps: PositiveInt = 10,
        validate_with: bool = True,
        include_buffers: bool = False,
    ) -> None:
        self._decay = decay**every_n_steps
        self._warmup = _USUAL_WARMUP if warmup is True else int(warmup)
        self._every = every_n_steps
        self._include_buffers = include_buffers
        if not validate_with:  # then nothing is demanded of validation either
            self.on_validation_start = None  # type: ignore[method-assign, assignment]
            self.on_validation_end = None  # type: ignore[method-assign, assignment]
        self._model: nn.Module | None = None
        self._averages: dict[str, Tensor] = {}
        self._live: dict[str, Tensor] = {}
        self._waiting: dict[str, Tensor] = {}  # frozen: not averaged yet
        self._training_weights: dict[str, Tensor] | None = None
        self._handle: Any = None
        self._runs = self._stepped = self._resumed = False
        self.updates = self._steps = 0

    # -- events -----------------------------------------------------------------------------------

    def on_train_start(self, model: nn.Module) -> None:
        """Begin with the weights as they are, or with the average that was loaded."""
        self._take_out()
        if not self._resumed:
            self._averages, self.updates, self._steps = {}, 0, 0
        self._follow(model)
        self._runs = True

    def on_before_optimizer_step(self) -> None:
        """See which parameters are trained now, and that it is the training weights that step."""
        for name in [name for name, tensor in self._waiting.items() if tensor.requires_grad]:
            self._begin(name, self._waiting.pop(name))  # it had not changed: its own average
        if self._training_weights is not None:
            log.warning(
                "A validation did not end, and training went on with the averaged weights. The "
                "training weights are back now; this step's gradients are those of the average."
            )
            self._take_out()

    def on_after_optimizer_step(self) -> None:
        """A step that is skipped does not get here."""
        self._stepped = True

    def on_step_end(self) -> None:
        """Update the average."""
        if not self._stepped:
            return
        self._stepped = False
        self._steps += 1
        if self._steps % self._every == 0:
            self._update()

    def on_validation_start(self) -> None:
        """Put the average into the model."""
        self._take_out()  # of a validation that never ended
        self._put_in()

    def on_validation_end(self) -> None:
        """Give the model its training weights back."""
        self._take_out()

    def on_exception(self) -> None:
        """The same, when validation failed."""
        self._take_out()

    def on_train_end(self) -> None:
        """The same, however it ended."""
        self._take_out()
        self._runs = self._resumed = False

    # -- for users --------------------------------------------------------------------------------

    def averaged_state_dict(self) -> dict[str, Any]:
        """Return the model's `state_dict` with the average in the place of the weights."""
        model = self._followed()
        state = dict(model.state_dict())
        cast: dict[str, Tensor] = {}  # tied parameters stay one tensor
        for name, first in _names(model, self._include_buffers).items():
            if name in state and first in self._averages:
                average = self._averages[first]
                cast.setdefault(first, average.detach().to(state[name].dtype, copy=True))
                state[name] = cast[first]
        return state

    def apply_to(self, model: nn.Module) -> None:
        """Copy the averaged weights, and all else of the model's state, into another model."""
        _unwrapped(model).load_state_dict(self.averaged_state_dict())

    def export(self, path: str | Path) -> Path:
        """Write a model with the averaged weights, as safetensors; return where.

        Args:
            path: the file; after a kill it is there as a whole, or as it was before.
        """
        path = Path(path)
        state = {n: v for n, v in self.averaged_state_dict().items() if isinstance(v, Tensor)}
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".tmp-{path.name}")
        try:
            write_tensors(temporary, state)
            sync(temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        return path

    # -- the average ------------------------------------------------------------------------------

    def _follow(self, model: nn.Module) -> None:
        """Average this model's weights from now on."""
        self._model = model = _unwrapped(model)
        self._live, self._waiting = {}, {}
        known = dict(_tensors(model, self._include_buffers))
        unknown = [name for name in self._averages if name not in known]
        if unknown:
            raise TrainingError(
                f"The average that was loaded has {listed(unknown[:5])}, which the model does not "
                "have. Resume with the model of the run."
            )
        for name, tensor in known.items():
            if (
                name in self._averages
                or tensor.requires_grad
                or not isinstance(tensor, nn.Parameter)
            ):
                self._begin(name, tensor)
            else:
                self._waiting[name] = tensor

    @torch.no_grad()
    def _begin(self, name: str, tensor: Tensor) -> None:
        """Average one tensor: from the value that was loaded, or from its own."""
        dtype = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype
        loaded = self._averages.get(name)
        if loaded is not None and loaded.shape != tensor.shape:
            raise TrainingError(
                f"The average of '{name}' that was loaded has the shape {tuple(loaded.shape)}, the "
                f"model's has {tuple(tensor.shape)}. Resume with the model of the run."
            )
        source = tensor.detach() if loaded is None else loaded
        self._averages[name] = source.to(tensor.device, dtype, copy=True)
        self._live[name] = tensor

    @torch.no_grad()
    def _update(self) -> None:
        decay = self._decay
        if self._warmup:
            decay = min(decay, (1 + self.updates) / (self._warmup + self.updates))
        averages = [self._averages[name] for name in self._live]
        weights = [
            tensor if tensor.dtype == average.dtype else tensor.to(average.dtype)
            for tensor, average in zip(self._live.values(), averages, strict=True)
        ]
        if averages:
            _lerp(averages, weights, 1 - decay)
        self.updates += 1

    @torch.no_grad()
    def _put_in(self) -> None:
        if self._model is None or not self._live:
            return
        kept = {name: tensor.detach().clone() for name, tensor in self._live.items()}
        swap = partial(self._save_training_weights)  # torch marks it, and a method takes no mark
        self._handle = self._model.register_state_dict_post_hook(swap)
        self._training_weights = kept
        _copy(list(self._live.values()), [self._averages[n] for n in self._live])

    @torch.no_grad()
    def _take_out(self) -> None:
        kept = self._training_weights
        if kept is None:
            return
        _copy([self._live[name] for name in kept], list(kept.values()))
        self._training_weights = None
        self._handle.remove()
        self._handle = None

    def _save_training_weights(
        self, model: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any
    ) -> None:
        """Whoever saves the model while the average is in it gets the training weights."""
        for name, first in _names(model, self._include_buffers).items():
            kept = (self._training_weights or {}).get(first)
            if kept is not None and prefix + name in state:
                state[prefix + name] = kept

    def _followed(self) -> nn.Module:
        if self._model is None:
            raise TrainingError("There is no average yet: training has not started.")
        return self._model

    # -- resuming ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the averages and how many updates they had."""
        return {"averages": dict(self._averages), "updates": self.updates, "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take them back; they go where the weights are when training starts."""
        self._take_out()
        self._averages = dict(state["averages"])
        self.updates, self._steps = int(state["updates"]), int(state["steps"])
        if self._runs and self._model is not None:
            self._follow(self._model)
        self._resumed = True


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return what `torch.compile` wrapped: the names of its parameters are the model's own."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def _tensors(model: nn.Module, buffers: bool) -> list[tuple[str, Tensor]]:
    """What can be averaged, tied tensors once, under their first names."""
    found: list[tuple[str, Tensor]] = list(model.named_parameters())
    found += model.named_buffers() if buffers else ()
    return [(n, t) for n, t in found if t.is_floating_point() or t.is_complex()]


def _names(model: nn.Module, buffers: bool) -> dict[str, str]:
    """Every name, of tied tensors too, with the first name of the tensor."""
    first = {id(tensor): name for name, tensor in _tensors(model, buffers)}
    every: list[tuple[str, Tensor]] = list(model.named_parameters(remove_duplicate=False))
    every += model.named_buffers(remove_duplicate=False) if buffers else ()
    return {name: first[id(tensor)] for name, tensor in every if id(tensor) in first}
