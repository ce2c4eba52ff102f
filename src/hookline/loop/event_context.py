"""The event context: where a training loop stands, the source of the arguments of all events.

A driver writes it, dispatchers read it. What a driver provides is a plain attribute. What it does
not provide is absent, and reading it calls the driver's `absent`, which raises the error that says
what to do. Expensive values (a norm, the state mapping, the context of a step) are made when a
hook asks for them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from operator import attrgetter
from typing import Any

import torch

from hookline.context import LazyFloat, Metrics, NotProvided, State, StepContext
from hookline.errors import LoopError, NotProvidedError
from hookline.loop.means import Means
from hookline.tensors.norms import global_norm
from hookline.updates.gradients import Gradients, NamedParameters

_warn_once = cache(logging.getLogger("hookline").warning)  # in each process


class EventContext:
    """The arguments of events, as attributes.

    Args:
        trainer: what hooks get as `trainer`.
        absent: called with the name of an attribute that the driver has not provided. It raises, or
            returns a value to use instead.

    Attributes:
        step: completed optimizer steps.
        step_in_progress: the number of the step that is being made.
        evaluating: whether the loop validates.
        generating: whether the model generates, which is no training forward.
        means: of the epoch.
        validated: the metrics of the epoch's last validation.
        latest_loss: of the latest batch or step; None before the first.
        norms: of gradients before clipping or the step, by optimizer, where they may change then.
        leaves_gradients: whether an optimizer's step leaves its gradients as they are, by number.
        optimizer_names: the names of the optimizers, if they have any.
        stepped: the optimizers of the step, if not all of them step at the same time; () for all.
        clipped_norm: of all gradients before clipping; None if it is not known.
        norm_is_agreed: whether all ranks compute the norm, because a hook of one of them asks for
            it; None unless gradients are sharded.
        agreed_norm: what they have computed in this step.
    """

    loss: Any
    epoch: int
    batch: Any
    batch_idx: int
    dataloader_idx: int
    dataloader_name: str
    tokens_seen: int
    config: Any
    run: Any

    def __init__(self, trainer: Any, absent: Callable[[str], Any]) -> None:
        self.trainer = trainer
        self.absent = absent
        self.status = "training"
        self.step = 0
        self.step_in_progress = 1
        self.optimizer_idx = 0
        self.outputs: Any = None
        self.reason = ""
        self.exception: BaseException | None = None
        self.checkpoint_path: Any = None
        self.skipped = False
        self.evaluating = self.generating = False
        self.means = Means()
        self.validated: dict[str, Any] = {}
        self.latest_loss: Any = None
        self.extra: dict[str, Any] = {}  # further metrics of the batch
        self.event_metrics: Metrics | None = None  # None: made from the loss and `extra`
        self.used_lr: Any = None
        self.made_gradients: Gradients | None = None
        self.observation: Any = None
        self.norms: dict[int, torch.Tensor] = {}
        self.leaves_gradients: dict[int, bool] = {}
        self._versions_before: dict[int, Versions] = {}
        self.optimizer_names: tuple[str, ...] = ()
        self.stepped: tuple[int, ...] = ()
        self.clipped_norm: torch.Tensor | None = None
        self.norm_is_agreed: bool | None = None
        self.agreed_norm: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:  # only called for what is absent
        absent = self.__dict__.get("absent")
        if absent is None or name.startswith("_"):
            raise AttributeError(name)
        return absent(name)

    def known(self, name: str) -> Any:
        """Return what the driver has provided; None if it has not."""
        return self.__dict__.get(name)

    def provide(self, name: str, value: Any) -> None:
        """Provide a value; None takes it away."""
        if value is None:
            self.__dict__.pop(name, None)
        else:
            self.__dict__[name] = value

    def connect(self, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        """Set what is trained; some drivers know it only when training starts."""
        self.model = model
        self.optimizers = optimizers
        if optimizers:
            self.optimizer = optimizers[0]
            self.named = NamedParameters(model, optimizers)

    def restart(self) -> None:
        """Begin another run with the same objects."""
        self.status, self.exception, self.evaluating = "training", None, False
        self.step, self.step_in_progress = 0, 1

    # -- values that are made when they are read --------------------------------------------------

    @property
    def gradients(self) -> Gradients:
        """The gradients of the optimizer that steps, as updates get them."""
        if self.made_gradients is None:
            self.made_gradients = Gradients(self.named[self.optimizer_idx])
        return self.made_gradients

    @property
    def activations(self) -> Any:
        """The model's outputs, as forward hooks get them."""
        return self.observation.activations

    @property
    def metrics(self) -> Metrics:
        """The metrics of the event; those of a batch are made when they are read."""
        if self.event_metrics is None:
            self.event_metrics = Metrics({"loss": self.loss, **self.extra})
        return self.event_metrics

    @property
    def lr(self) -> Any:
        """The learning rate that this step uses, of the first optimizer."""
        lr = self.used_lr
        if lr is None:
            lr = self.read_lr()
        if lr is None:
            raise LoopError("The optimizer has no 'lr' in its param_groups.")
        return lr

    def read_lr(self, i: int = 0) -> Any:
        """Return an optimizer's learning rate as it is now; None if it has none."""
        lr = self.optimizers[i].param_groups[0].get("lr")
        # A copy, because schedulers change the tensor in place.
        return LazyFloat(lr.detach().clone()) if isinstance(lr, torch.Tensor) else lr

    @property
    def ctx(self) -> StepContext:
        """The step, as one object."""
        return StepContext(
            step=self.step,
            loss=self._field("loss"),
            grad_norm=self.grad_norm,
            lr=self.lr,
            tokens_seen=self._field("tokens_seen"),
            model=self.model,
            optimizer=self.optimizer,
            skipped=self.skipped,
        )

    def _field(self, name: str) -> Any:
        """Return a field of `ctx`; without a value, one whose access raises the error."""
        try:
            return getattr(self, name)
        except NotProvidedError as error:
            return NotProvided(str(error))

    @property
    def state(self) -> State:
        """The state mapping: model, epoch, losses, status."""
        known: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "device": device_of(self.model),
        }
        absent: dict[str, str] = {}
        readers: dict[str, Callable[[], Any]] = {
            "current_epoch": lambda: self.epoch,
            "current_batch_idx": lambda: self.batch_idx,
            "latest_loss": lambda: self._loss_of_state(self.latest_loss),
            "avg_loss": lambda: self._loss_of_state(self.means.mean("train/loss")),
        }
        for key, read in readers.items():
            try:
                known[key] = read()
            except NotProvidedError as error:
                absent[key] = str(error)
        known |= {"model_params": self.model_params, "status": self.status}
        return State(known, absent)

    def _loss_of_state(self, loss: Any) -> Any:
        if loss is None:
            return self.absent("loss")
        return loss if isinstance(loss, LazyFloat) else LazyFloat(loss)

    @cached_property
    def model_params(self) -> int:
        """The number of the model's parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    # -- the norm of the gradients ----------------------------------------------------------------

    @property
    def grad_norm(self) -> LazyFloat:
        """The norm of all gradients, before clipping if the loop's clipping is known."""
        norm = self.norm()
        number = LazyFloat(norm)
        if not norm.is_cpu and type(loss := self.__dict__.get("loss")) is LazyFloat:
            loss.read_with(number)  # reading both waits for the device once
        return number

    def norm(self) -> torch.Tensor:
        """Return the norm of all gradients, on the device."""
        if self.clipped_norm is not None:
            return self.clipped_norm
        if self.norm_is_agreed is None:
            return self.compute_norm()
        if self.agreed_norm is None:  # reading a value must not start a collective
            _warn_once(
                "A hook that came within a step asks for the norm of sharded gradients. All "
                "processes compute it from the next step on. In this step it gets NaN."
            )
            return torch.tensor(math.nan)
        return self.agreed_norm

    def compute_norm(self) -> torch.Tensor:
        """Compute the norm of all gradients. If they are sharded, all ranks have to call this."""
        if not self.norms:
            is_single = len(self.optimizers) == 1
            return global_norm(gradients_of(self.optimizer) if is_single else self.all_gradients())
        norms = [
            self.norms[i] if i in self.norms else global_norm(gradients_of(self.optimizers[i]))
            for i in self._optimizers_of_step()
        ]
        return norms[0] if len(norms) == 1 else global_norm(norms)

    def keep_norm(self, i: int) -> None:
        """Compute the norm before an optimizer steps, if the step may change its gradients.

        Some optimizers compute in them: Muon, SGD with Nesterov momentum and `foreach`. Whether one
        does is seen in its first step. The others have their norm computed when it is read.
        """
        if self.leaves_gradients.get(i):
            return
        optimizer = self.optimizers[i]
        if i not in self.norms:
            self.norms[i] = norm_or_nan(lambda: global_norm(gradients_of(optimizer)))
        if i not in self.leaves_gradients:
            self._versions_before[i] = gradient_versions(optimizer)

    def note_step(self, i: int) -> None:
        """Note whether an optimizer that has stepped has changed its gradients."""
        if before := self._versions_before.pop(i, None):
            self.leaves_gradients[i] = gradient_versions(self.optimizers[i]) == before

    def prepare_norm(self) -> None:
        """Compute the norm of sharded gradients, if a hook of any rank asks for it."""
        if self.norm_is_agreed:
            known = self.clipped_norm
            self.agreed_norm = norm_or_nan(self.compute_norm) if known is None else known

    def all_gradients(self) -> list[torch.Tensor]:
        """Return the gradients of the parameters of all optimizers that step in this step."""
        optimizers = [self.optimizers[i] for i in self._optimizers_of_step()]
        return [gradient for optimizer in optimizers for gradient in gradients_of(optimizer)]

    def _optimizers_of_step(self) -> Sequence[int]:
        return self.stepped or range(len(self.optimizers))


class ProbeView:
    """The context as probes read it: what the loop has not provided is None."""

    def __init__(self, context: EventContext) -> None:
        self._context = context

    trainer = property(attrgetter("_context.trainer"))
    step = property(attrgetter("_context.step"))
    step_in_progress = property(attrgetter("_context.step_in_progress"))

    @property
    def epoch(self) -> Any:
        """The epoch; None if it is not known."""
        return self._context.known("epoch")

    @property
    def evaluating(self) -> bool:
        """Whether observing probes see nothing: the loop validates, or the model generates."""
        context = self._context
        return context.evaluating or context.generating


def norm_or_nan(compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return a norm that hooks ask for later; NaN if torch cannot compute it: the loop goes on."""
    try:
        return compute()
    except Exception:
        _warn_once("The norm of the gradients cannot be computed: hooks get NaN.", exc_info=True)
        return torch.tensor(math.nan)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def gradients_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the gradients that an optimizer's parameters have."""
    gradients: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (gradient := parameter.grad) is not None:
                gradients.append(gradient)
    return gradients


Versions = tuple[tuple[int, int], ...]
"""For each gradient the tensor's id, and how often it was changed in place."""


def gradient_versions(optimizer: torch.optim.Optimizer) -> Versions:
    """Return a value that differs after a gradient was changed in place or replaced."""
    versions: list[tuple[int, int]] = []
    for group in optimizer.param_groups:  # without further calls, because each backward needs it
        for parameter in group["params"]:
            if (gradient := parameter.grad) is not None:
                is_plain = type(gradient) is torch.Tensor
                own = (id(gradient), gradient._version) if is_plain else version_of(gradient)
                versions.append(own)
    return tuple(versions)


def have_gradients_changed(before: Versions, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a gradient was changed in place or replaced; the first one decides."""
    count = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (gradient := parameter.grad) is not None:
                if count == len(before) or version_of(gradient) != before[count]:
                    return True
                count += 1
    return count != len(before)


def version_of(gradient: torch.Tensor) -> tuple[int, int]:
    """Return a gradient's entry in `Versions`; FSDP2 adds to the local shard."""
    if type(gradient) is torch.Tensor:
        return id(gradient), gradient._version
    return id(gradient), getattr(gradient, "_local_tensor", gradient)._version


_TORCH_ZERO_GRAD = torch.optim.Optimizer.zero_grad


def zero_grad(optimizer: torch.optim.Optimizer) -> None:
    """Do what `optimizer.zero_grad()` does, about 10 µs faster, without torch's profiling.

    An optimizer that overrides `zero_grad` has its own method called.
    """
    if type(optimizer).zero_grad is not _TORCH_ZERO_GRAD or "zero_grad" in optimizer.__dict__:
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def device_of(model: torch.nn.Module) -> torch.device:
    """Return the device of a model's first parameter; the CPU if it has none."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device
