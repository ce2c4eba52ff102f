"""Edit: changes what flows through a model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Literal, Self

import torch

from hookline.errors import ConfigError, ProbeError
from hookline.hook import Rank
from hookline.options import BuiltIn
from hookline.probes.attachment import Attachment, Call
from hookline.probes.captured_state import CapturedState
from hookline.probes.nested_paths import Part, find, put
from hookline.probes.probe import Probe
from hookline.probes.tensor_index import as_index

__all__ = ["Edit"]

Operation = Literal["replace", "scale", "ablate", "add", "patch"]


class Edit(BuiltIn, Probe):
    """Replaces, scales, ablates, adds to or patches what modules return. Gradients flow through it.

    It needs `enable_intervention=True`: an edit changes what is trained and measured. Switched by
    `edit.active`, it acts from the next step on, or outside of training from the model's next
    forward on: a backward that is still to come sees what its forward saw, also where activation
    checkpointing computes it again. Run that backward before the edit is detached.

    Args:
        modules: Whose outputs to change, as for every probe; None for none, only taps.
        operation: What to do: `replace` by `value`; `scale` by the factor `value`; `ablate`, to
            zero or, with `value="mean"`, to the mean over all dimensions but the last; `add`
            `value`, times `coefficient`; `patch` with `value` from an earlier capture.
        value: A tensor, which has to fit the output or to stretch to it; a number; for `replace`
            also a function of the output, which gets a copy; for `patch` a captured state.
        coefficient: What `add` multiplies its value by.
        at: Where in the tensor: an index such as `(slice(None), -1)`, or as text, `":, -1"`; None
            for all of it.
        part: Which tensor, where a module returns several: a position, a key, or a list of these
            from the outside in; None for the first.
        taps: Which of the values that `hookline.tap` names to change, too.
        enable_intervention: The permission.
    """

    cost = "What the edit itself computes, at each call of its modules."
    hookline_rank = Rank.CONTROL
    critical = True
    intervenes = True
    edits = True
    wants_input = False
    probe_name = "edit"

    def __init__(
        self,
        modules: Any = None,
        operation: Operation = "replace",
        value: Any = None,
        coefficient: float = 1.0,
        at: Any = None,
        part: Part = None,
        taps: str | list[str] | tuple[str, ...] = (),
        enable_intervention: bool = False,
    ) -> None:
        if not enable_intervention:
            raise ProbeError(
                "An edit changes what flows through the model. Allow it with "
                "enable_intervention=True."
            )
        super().__init__(modules, (taps,) if isinstance(taps, str) else taps)
        self._operation: Operation = operation
        self._value = _check_value(operation, value, part)
        self._coefficient = coefficient
        self._at = None if at is None else as_index(at)
        self._part = part
        self._fitting: dict[Any, tuple[int, torch.Tensor]] = {}
        self._active = self._wished = True
        self.hookline_options = {
            **self.hookline_options,
            "modules": _described(modules),
            "value": _described(value),
            "at": _described(at),
        }

    # -- in short ---------------------------------------------------------------------------------

    @classmethod
    def replace(cls, modules: Any, value: Any, **options: Any) -> Self:
        """Replace the output by a tensor, a number, or what a function makes of it."""
        return cls(modules, "replace", value, **options)

    @classmethod
    def scale(cls, modules: Any, factor: Any, **options: Any) -> Self:
        """Multiply the output."""
        return cls(modules, "scale", factor, **options)

    @classmethod
    def ablate(cls, modules: Any, to: Literal["zero", "mean"] = "zero", **options: Any) -> Self:
        """Set the output to zero, or to its mean over all dimensions but the last."""
        return cls(modules, "ablate", to, **options)

    @classmethod
    def add(cls, modules: Any, vector: Any, coefficient: float = 1.0, **options: Any) -> Self:
        """Add a vector, times a coefficient."""
        return cls(modules, "add", vector, coefficient, **options)

    @classmethod
    def patch(cls, modules: Any, source: Any, **options: Any) -> Self:
        """Put in what was captured before: a `CapturedState` or a tensor."""
        return cls(modules, "patch", source, **options)

    # -- on and off -------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether it acts. A change waits for the next step, or outside of training, forward."""
        return self._wished

    @active.setter
    def active(self, on: bool) -> None:
        self._wished = bool(on)

    @property
    def acts(self) -> bool:
        """Whether it acts now."""
        return self._active

    def began(self) -> None:
        """The model's next forward begins."""
        if self.attachment is None or self.attachment.context is None:
            self._settle()

    def before(self, call: Call) -> None:
        """A module is about to run; outside of training that may be a forward of its own."""
        switched = self._active != self._wished and not call.recomputed
        if switched and self.attachment is not None and self.attachment.is_alone(call.module):
            self._settle()

    def on_step_end(self) -> None:
        """A step is done: no backward is still to come."""
        self._settle()

    def _settle(self) -> None:
        if self._active != self._wished:
            self._active = self._wished
            if self.attachment is not None:
                self.attachment.refresh()

    def attach(self, *args: Any, **kwargs: Any) -> Attachment:
        """Put the edit on a model; it acts from now on."""
        if self.attachment is None:
            self._settle()
        self.wants_before = kwargs.get("context") is None  # in training it waits for the step
        return super().attach(*args, **kwargs)

    # -- what it does -----------------------------------------------------------------------------

    def after(self, call: Call) -> Any:
        """A module has run: return what to use instead of its output."""
        return self._edited(call.output, call.name) if self._active else None

    def compiled_edit(self, name: str) -> Callable[[Any, torch.Tensor], Any]:
        """The same, for a compiled model."""

        def edit(output: Any, on: torch.Tensor) -> Any:
            way, x = find(output, self._part, name)
            return put(output, way, torch.where(on, self._computed(x, name), x))

        return edit

    def _edited(self, output: Any, name: str) -> Any:
        way, x = find(output, self._part, name)
        return put(output, way, self._computed(x, name))

    def _computed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        if self._at is None:
            return self._operate(x, name, x)
        chosen = _chosen(x, self._at, name)
        result = x.clone()
        result[self._at] = self._operate(chosen, name, x)
        return result

    def _operate(self, x: torch.Tensor, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return what takes the place of `x`, which is the chosen piece of the whole tensor."""
        value = self._value
        if self._operation == "ablate":
            if value == "zero":
                return _instead(x, torch.zeros_like(x))
            # A copy: in one that is only stretched, nothing after it could be changed in place.
            return x.mean(dim=tuple(range(x.dim() - 1)), keepdim=True).expand_as(x).clone()
        if self._operation == "scale":
            scaled: torch.Tensor = x * self._fit(value, x, name)
            return scaled
        if self._operation == "add":
            added: torch.Tensor = x + self._coefficient * self._fit(value, x, name)
            return added
        if self._operation == "replace" and callable(value):
            new = _checked(value(x.clone()), x, name)  # it may work in place
            return new if new.requires_grad or not x.requires_grad else _instead(x, new)
        if isinstance(value, CapturedState):
            value = find(value.output, self._part, f"the captured {value.module}")[1]
        if self._operation == "patch" and self._at is not None and value.shape == whole.shape:
            value = value[self._at]
        return _instead(x, self._fit(value, x, name))

    def _fit(self, value: Any, x: torch.Tensor, name: str) -> Any:
        """Return a value as it can be computed with `x`: its dtype and device, brought once."""
        if not isinstance(value, torch.Tensor):
            return value if self._operation in ("scale", "add") else x.new_full((), value)
        _check_fit(value, x, name, self._operation)
        if value.dtype == x.dtype and value.device == x.device:
            return value
        if value.requires_grad or torch.compiler.is_compiling():
            return value.to(x.device, x.dtype)
        key = (x.device, x.dtype, value.shape, value.data_ptr())
        version, fitting = self._fitting.get(key, (-1, value))
        if version != value._version:
            fitting = value.to(x.device, x.dtype, non_blocking=True)
            self._fitting = {key: (value._version, fitting)}
        return fitting


def _check_value(operation: Operation, value: Any, part: Part) -> Any:
    number_or_tensor = isinstance(value, int | float | torch.Tensor) and not isinstance(value, bool)
    if operation == "ablate":
        value = "zero" if value is None else value
        good = isinstance(value, str) and value in ("zero", "mean")
        expected = "'zero' or 'mean'"
    elif operation == "replace":
        good, expected = number_or_tensor or callable(value), "a tensor, a number or a function"
    elif operation == "patch":
        good = isinstance(value, torch.Tensor | CapturedState)
        expected = "a captured state or a tensor"
        if isinstance(value, CapturedState):
            captured = find(value.output, part, f"the captured {value.module}")[1]
            value = captured if captured.is_inference() else value
    else:
        good, expected = number_or_tensor, "a number or a tensor"
    if not good:
        raise ConfigError(
            f"Edit: '{operation}' needs {expected} as its value, not {_described(value)}."
        )
    if isinstance(value, torch.Tensor) and value.is_inference():
        with torch.inference_mode(False):
            return value.clone()  # that of inference mode cannot be used where gradients are
    return value


def _check_fit(value: torch.Tensor, x: torch.Tensor, name: str, operation: str) -> None:
    try:
        stretched = torch.broadcast_shapes(value.shape, x.shape)
    except RuntimeError:
        stretched = None
    same_kind = value.dtype == x.dtype or (
        value.is_floating_point() and x.is_floating_point() and not x.is_complex()
    )
    if stretched != x.shape or not same_kind:
        raise ProbeError(
            f"The value to {operation} at '{name}' does not fit: it is {_shape(value)}, and the "
            f"output there is {_shape(x)}."
        )


def _instead(x: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return a value in the place of `x`, whose gradient is zero then.

    It stays in the graph: what came before is trained as with any other output, by zeros. Neither
    `0 * x` would do, which is NaN for what is not finite, nor the value itself, which somebody may
    change in place further on.
    """
    return x.clone().copy_(new)


def _checked(new: Any, x: torch.Tensor, name: str) -> torch.Tensor:
    """Return what a user's function made of the output."""
    if not isinstance(new, torch.Tensor) or new.shape != x.shape or new.dtype != x.dtype:
        seen = _shape(new) if isinstance(new, torch.Tensor) else f"a {type(new).__name__}"
        raise ProbeError(
            f"The function that replaces the output of '{name}' returned {seen}; expected was "
            f"{_shape(x)}."
        )
    return new


def _chosen(x: torch.Tensor, at: Any, name: str) -> torch.Tensor:
    try:
        return x[at]
    except (IndexError, RuntimeError, TypeError) as error:
        raise ProbeError(
            f"at={_described(at)} does not fit the output of '{name}', which is {_shape(x)}: "
            f"{error}"
        ) from error


def _shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _described(value: Any) -> Any:
    """Return a value as the manifest can have it: a tensor as its shape and a hash."""
    if isinstance(value, CapturedState):
        return {
            "captured": value.module,
            "probe": value.probe,
            "step": value.step,
            "call": value.call,
            "tensors": [_described(tensor) for tensor in value.tensors()],
        }
    if isinstance(value, torch.Tensor):
        return f"{_shape(value)} sha256:{_hash(value)}"
    if isinstance(value, torch.nn.Module):
        return f"{type(value).__name__}(…)"
    if isinstance(value, tuple | list | set | frozenset):
        return [_described(one) for one in value]
    if isinstance(value, slice):
        return f"{_end(value.start)}:{_end(value.stop)}" + (
            "" if value.step is None else f":{value.step}"
        )
    if value is Ellipsis:
        return "..."
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return getattr(value, "__qualname__", None) or repr(value)


def _end(number: Any) -> str:
    return "" if number is None else str(number)


def _hash(tensor: torch.Tensor) -> str:
    """What tells tensors with other values apart. This waits for the device, once."""
    raw = tensor.detach().cpu().contiguous().view(-1)
    data = raw.view(torch.uint8) if raw.numel() else raw
    return hashlib.sha256(bytes(data.untyped_storage()) if raw.numel() else b"").hexdigest()[:16]
