"""Computing the loss of a batch, checking that it is finite, and counting tokens."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch.nn import functional as F

from hookline.arguments import show_value
from hookline.errors import TrainingError
from hookline.loop.event_context import EventContext
from hookline.tensors.nested import describe_structure

log = logging.getLogger("hookline")
_NO_METRICS: Mapping[str, Any] = MappingProxyType({})
_TARGETS = ("labels", "targets", "target", "label", "y")


class LossComputer:
    """Computes the loss of a batch, and further metrics.

    In this order: `step_fn(model, batch)`, which returns a loss or a mapping with `loss` and
    further metrics; `loss_fn(outputs, targets)`; the loss that the model returns itself, as `.loss`
    or `["loss"]`; for batches of inputs and targets, cross-entropy for integer targets and mean
    squared error for others. In cross-entropy, the classes are the second dimension of the outputs,
    or the last one, as in a language model's (batch, tokens, vocabulary).
    """

    def __init__(
        self,
        step_fn: Callable[..., Any] | None,
        loss_fn: Callable[..., Any] | None,
        announce: Callable[[str], None],
    ) -> None:
        self.step_fn = step_fn
        self.loss_fn = loss_fn
        self._announce = announce
        self._announced_default = False

    def __call__(
        self, model: torch.nn.Module, batch: Any
    ) -> tuple[torch.Tensor, Mapping[str, Any]]:
        """Return the loss, a tensor with one element, and further metrics."""
        if self.step_fn is not None:
            return _checked(self.step_fn(model, batch), "step_fn")
        if isinstance(batch, (tuple, list)) and len(batch) == 2:
            inputs, targets = batch
            outputs = model(inputs)
            if self.loss_fn is None:
                return self._default_loss(outputs, targets), _NO_METRICS
            loss = _observable(self.loss_fn)(outputs, targets)
            if type(loss) is torch.Tensor and not loss.ndim:
                return loss, _NO_METRICS
            return _checked(loss, "loss_fn")[0], _NO_METRICS
        if isinstance(batch, Mapping):
            return self._from_mapping(model, batch)
        raise TrainingError(
            f"Cannot compute the loss of this batch: {describe_structure(batch)}. "
            "Expected (inputs, targets), or a mapping; or give step_fn(model, batch)."
        )

    def _from_mapping(
        self, model: torch.nn.Module, batch: Mapping[str, Any]
    ) -> tuple[torch.Tensor, Mapping[str, Any]]:
        if self.loss_fn is None:
            outputs = model(**batch)
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
            loss = getattr(outputs, "loss", None) if loss is None else loss
            if loss is None:
                raise TrainingError(
                    f"The model returned no loss for {describe_structure(batch)}, but "
                    f"{describe_structure(outputs)}. "
                    "Expected `.loss` or ['loss']; or give loss_fn or step_fn."
                )
            return _checked(loss, "the model")
        key = next((name for name in _TARGETS if name in batch), None)
        if key is None:
            raise TrainingError(
                f"loss_fn(outputs, targets) needs targets, but the batch has none of "
                f"{', '.join(_TARGETS)}: {describe_structure(batch)}. Give step_fn(model, batch)."
            )
        outputs = model(**{name: value for name, value in batch.items() if name != key})
        loss = _observable(self.loss_fn)(outputs, batch[key])
        return _checked(loss, "loss_fn")[0], _NO_METRICS

    def _default_loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        if not (isinstance(outputs, torch.Tensor) and isinstance(targets, torch.Tensor)):
            raise _no_default(outputs, targets, "one of them is not a tensor")
        is_integer = not targets.is_floating_point()
        if not self._announced_default:
            self._announced_default = True
            name = "cross-entropy" if is_integer else "the mean squared error"
            self._announce(
                f"No loss function was given: using {name}, because the targets are "
                f"{targets.dtype}."
            )
        if not is_integer:
            if outputs.shape != targets.shape:
                raise _no_default(outputs, targets, "the mean squared error needs the same shape")
            return F.mse_loss(outputs, targets)
        return F.cross_entropy(_classes_second(outputs, targets), targets.long())


def _observable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of torch.nn.functional as an observer has replaced it there, or itself."""
    current: Any = getattr(F, str(getattr(function, "__name__", "")), None)
    return current if getattr(current, "__wrapped__", None) is function else function


def _classes_second(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the outputs with the classes in the second dimension, as torch expects them."""
    shape, expected = outputs.shape, targets.shape
    is_second = outputs.ndim == targets.ndim + 1 and shape[:1] + shape[2:] == expected
    is_last = outputs.ndim == targets.ndim + 1 and shape[:-1] == expected
    if is_second and is_last and outputs.ndim > 2:
        why = "the classes may be the second or the last dimension"
        raise _no_default(outputs, targets, why)
    if not is_second and not is_last:
        why = "cross-entropy needs one dimension more in the outputs, with the classes"
        raise _no_default(outputs, targets, why)
    return outputs if is_second else outputs.movedim(-1, 1)


def _no_default(outputs: Any, targets: Any, why: str) -> TrainingError:
    return TrainingError(
        f"There is no default loss: {why}, but the outputs are {describe_structure(outputs)} and "
        f"the targets {describe_structure(targets)}. Reshape one of them, or give "
        "loss_fn(outputs, targets) or step_fn(model, batch)."
    )


def _checked(result: Any, where: str) -> tuple[torch.Tensor, Mapping[str, Any]]:
    metrics: Mapping[str, Any] = _NO_METRICS
    loss = result
    if type(result) is not torch.Tensor and isinstance(result, Mapping):
        if "loss" not in result:
            raise TrainingError(
                f"{where} returned a mapping without 'loss': {describe_structure(result)}."
            )
        loss = result["loss"]
        metrics = {  # detached, because they are kept for longer than the graph
            name: value.detach() if isinstance(value, torch.Tensor) else value
            for name, value in result.items()
            if name != "loss"
        }
        for name, value in metrics.items():
            if not isinstance(name, str) or not _is_number(value):
                raise TrainingError(
                    f"{where} returned {describe_structure(value)} as the metric "
                    f"{show_value(name)}. Expected a name, and a number or a tensor with one "
                    "element: return the loss and numbers."
                )
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise TrainingError(
            f"{where} returned {describe_structure(loss)} as the loss. "
            "Expected a tensor with one element."
        )
    return loss, metrics


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):  # such as an array with several elements
        return isinstance(value, int)
    return not isinstance(value, str)


class LossCheck:
    """Checks losses as `on_nan` says; with "stop" and `deferred`, one batch later."""

    def __init__(self, on_nan: Literal["stop", "skip", "continue"], *, deferred: bool) -> None:
        self._on_nan, self._deferred = on_nan, deferred
        self._previous: tuple[torch.Tensor, Any, str] | None = None  # on the way to the CPU

    def check(self, loss: Any, place: str) -> str | TrainingError:
        """Return why the step is skipped ("" if not), or the error to raise after this batch.

        A deferred check raises for the batch before this one, so that at most one step is made on
        a loss that is not finite.
        """
        if self._on_nan == "skip":
            value = float(loss)  # waits for the device, as documented for this setting
            if not math.isfinite(value):
                text = "The loss is %s; the step is skipped, in %s."
                log.warning(text, value, place, extra={"own_rank": True})
                return f"the loss is {value}"
        elif self._on_nan == "stop":
            if not self._deferred:
                return "" if math.isfinite(loss) else _not_finite(loss, place)
            self.finish()  # waits for the loss of the batch before, not for this one
            event = None if loss.device.type == "cpu" else torch.Event(loss.device)
            self._previous = loss.to("cpu", non_blocking=True), event, place
            if event is not None:
                event.record()
        return ""

    def finish(self) -> None:
        """Check the loss that is left; this waits for the device."""
        if self._previous is None:
            return
        (loss, event, place), self._previous = self._previous, None
        if event is not None:
            event.synchronize()
        if not math.isfinite(value := loss.item()):
            raise _not_finite(value, place)


def _not_finite(loss: float, place: str) -> TrainingError:
    return TrainingError(
        f"The loss was {loss} in {place}. To continue anyway, set on_nan='skip' or 'continue'."
    )


def mean_loss(losses: list[Any]) -> Any:
    """Return the mean of a step's losses, on their device."""
    if isinstance(losses[0], torch.Tensor):
        return torch.stack([loss.float() for loss in losses]).mean()
    return sum(losses) / len(losses)


def mean_metrics(batches: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the means of a step's metrics, over the batches that have them."""
    if len(batches) == 1:
        return dict(batches[0])
    values: dict[str, list[Any]] = {}
    for metrics in batches:
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
    return {name: mean_loss(several) for name, several in values.items()}


class TokenCount:
    """Counts tokens, and provides `tokens_seen` in the context while every batch's are known."""

    def __init__(self, count_batch: Callable[[Any], int | None] | None) -> None:
        self.count_batch = count_batch  # None if the trainer does not count
        self.context: EventContext
        self.count, self.is_known = 0, True  # whether those of all batches could be counted
        self._has_warned = False

    def restart(self, count: int = 0) -> None:
        """Count from here."""
        self.count, self.is_known = count, True
        self.context.provide("tokens_seen", None if self.count_batch is None else count)

    def add(self, tokens: int | None) -> None:
        """Count a batch; None if its tokens are not known."""
        if tokens is not None:
            self.count += tokens
            if self.is_known:
                self.context.tokens_seen = self.count
        elif self.is_known:  # else it was said before: this is called for every batch
            self.is_known = False
            self.context.provide("tokens_seen", None)

    def read_absent(self, name: str) -> Any:
        """Return what the context does not have: the count as far as it is known, no loss yet."""
        if name == "loss":
            return None
        if name != "tokens_seen":
            raise AttributeError(f"The event context has no '{name}'.")
        if not self.is_known and not self._has_warned:
            self._has_warned = True
            log.warning(
                "A hook reads tokens_seen, which is not known for %s. Give Trainer(tokens_fn="
                "lambda batch: …), which returns the tokens of a batch. Hooks get %d.",
                describe_structure(self.context.batch),
                self.count,
            )
        return self.count
