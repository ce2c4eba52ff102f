"""Edit: changes the outputs of modules."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Literal, Self

import torch

from hookline.errors import ConfigError, ProbeError
from hookline.hook import Rank
from hookline.options import BuiltIn
from hookline.probes.attachment import Attachment
from hookline.probes.call import Call
from hookline.probes.captured_state import CapturedState, shape_text
from hookline.probes.nested_paths import Part, get_at, parse_index, set_at
from hookline.probes.probe import Probe

__all__ = ["Edit"]

Operation = Literal["replace", "scale", "ablate", "add", "patch"]


class Edit(BuiltIn, Probe):
    """Replaces, scales, ablates, adds to or patches the outputs of modules, with gradients.

    It needs `enable_intervention=True`: an edit changes what is trained and measured. A change of
    `edit.active` takes effect with the next step, or outside of training with the model's next
    forward: a backward that is still to come needs what its forward computed, also where activation
    checkpointing computes it again. Run that backward before detaching the edit.

    Args:
        modules: Whose outputs to change, as for every probe; None for none, only taps.
        operation: `replace` by `value`; `scale` by the factor `value`; `ablate` to zero or, with
            `value="mean"`, to the mean over all dimensions but the last; `add` `value` times
            `coefficient`; `patch` with a captured `value`.
        value: A tensor that can be broadcast to the output; a number; for `replace` also a function
            of the output, which gets a copy; for `patch` a captured state.
        coefficient: The factor of `add`.
        at: An index into the tensor, such as `(slice(None), -1)` or, as text, `":, -1"`; None for
            all of it.
        part: Which tensor, if a module returns several: a position, a key, or a list of these from
            the outside in; None for the first.
        taps: Which of the values that `hookline.tap` names to change, too.
        enable_intervention: The permission to change training.
    """

    cost = "The computation of the edit itself, at each call of its modules."
    hookline_rank = Rank.CONTROL
    critical = True
    intervenes = True
    edits = True
    wants_before = False  # unless it is attached outside of training
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
                "An edit changes the outputs of modules. Allow it with enable_intervention=True."
            )
        super().__init__(modules, taps)
        self._operation: Operation = operation
        self._value = _check_value(operation, value, part)
        self._coefficient = coefficient
        self._at = None if at is None else parse_index(at, "at")
        self._part = part
        self._converted: dict[Any, tuple[int, torch.Tensor]] = {}
        self._active = self._requested = True
        self.hookline_options = {
            **self.hookline_options,
            "modules": _describe(modules),
            "value": _describe(value),
            "at": _describe(at),
        }

    @classmethod
    def replace(cls, modules: Any, value: Any, **options: Any) -> Self:
        """Replace the output by a tensor, a number, or what a function returns for it."""
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
        """Replace the output by one captured before: a `CapturedState` or a tensor."""
        return cls(modules, "patch", source, **options)

    @property
    def active(self) -> bool:
        """Whether it acts. A change takes effect with the next step or, elsewhere, forward."""
        return self._requested

    @active.setter
    def active(self, active: bool) -> None:
        self._requested = bool(active)

    @property
    def is_active(self) -> bool:
        """Whether it acts now."""
        return self._active

    def forward_start(self) -> None:
        """Outside of training, apply a change of `active`."""
        if self.attachment is None or self.attachment.context is None:
            self._apply_request()

    def before(self, call: Call) -> None:
        """Apply a change of `active` if the call of the module is a forward of its own."""
        switched = self._active != self._requested and not call.recomputed
        if switched and self.attachment is not None and self.attachment.is_alone(call.module):
            self._apply_request()

    def on_step_end(self) -> None:
        """Apply a change of `active`: no backward is still to come."""
        self._apply_request()

    def _apply_request(self) -> None:
        if self._active != self._requested:
            self._active = self._requested
            if self.attachment is not None:
                self.attachment.refresh()

    def attach(self, *args: Any, **kwargs: Any) -> Attachment:
        """Attach the edit to a model; it acts from now on."""
        if self.attachment is None:
            self._apply_request()
        self.wants_before = kwargs.get("context") is None  # training waits for the step
        return super().attach(*args, **kwargs)

    def after(self, call: Call) -> Any:
        """Return what replaces the output of a module."""
        if not self._active:
            return None
        path, x = get_at(call.output, self._part, call.name)
        return set_at(call.output, path, self._edit(x, call.name))

    def compiled_edit(self, name: str) -> Callable[[Any, torch.Tensor], Any]:
        """Return the edit as a function that can be compiled."""

        def edit(output: Any, is_active: torch.Tensor) -> Any:
            path, x = get_at(output, self._part, name)
            return set_at(output, path, torch.where(is_active, self._edit(x, name), x))

        return edit

    def _edit(self, x: torch.Tensor, name: str) -> torch.Tensor:
        if self._at is None:
            return self._operate(x, name, x)
        try:
            selected = x[self._at]
        except (IndexError, RuntimeError, TypeError) as error:
            raise ProbeError(
                f"at={_describe(self._at)} does not fit the output of '{name}', which is "
                f"{shape_text(x)}: {error}"
            ) from error
        result = x.clone()
        result[self._at] = self._operate(selected, name, x)
        return result

    def _operate(self, x: torch.Tensor, name: str, full: torch.Tensor) -> torch.Tensor:
        """Return what replaces `x`, the selected part of the full tensor."""
        value = self._value
        if self._operation == "ablate":
            if value == "zero":
                return _replace(x, torch.zeros_like(x))
            # A copy: an expanded tensor cannot be changed in place further on.
            return x.mean(dim=tuple(range(x.dim() - 1)), keepdim=True).expand_as(x).clone()
        if self._operation == "scale":
            return torch.mul(x, self._convert(value, x, name))
        if self._operation == "add":
            return torch.add(x, self._coefficient * self._convert(value, x, name))
        if self._operation == "replace" and callable(value):
            new = _check_result(value(x.clone()), x, name)  # it may work in place
            return new if new.requires_grad or not x.requires_grad else _replace(x, new)
        if isinstance(value, CapturedState):
            value = get_at(value.output, self._part, f"the captured {value.module}")[1]
        if self._operation == "patch" and self._at is not None and value.shape == full.shape:
            value = value[self._at]
        return _replace(x, self._convert(value, x, name))

    def _convert(self, value: Any, x: torch.Tensor, name: str) -> Any:
        """Return a value with the dtype and on the device of `x`; a tensor is converted once."""
        if not isinstance(value, torch.Tensor):
            return value if self._operation in ("scale", "add") else x.new_full((), value)
        _check_fit(value, x, name, self._operation)
        if value.dtype == x.dtype and value.device == x.device:
            return value
        if value.requires_grad or torch.compiler.is_compiling():
            return value.to(x.device, x.dtype)
        key = (x.device, x.dtype, value.shape, value.data_ptr())
        version, converted = self._converted.get(key, (-1, value))
        if version != value._version:
            converted = value.to(x.device, x.dtype, non_blocking=True)
            self._converted = {key: (value._version, converted)}
        return converted


def _check_value(operation: Operation, value: Any, part: Part) -> Any:
    is_valid = isinstance(value, int | float | torch.Tensor) and not isinstance(value, bool)
    expected = "a number or a tensor"
    if operation == "ablate":
        value = "zero" if value is None else value
        is_valid = isinstance(value, str) and value in ("zero", "mean")
        expected = "'zero' or 'mean'"
    elif operation == "replace":
        is_valid = is_valid or callable(value)
        expected = "a tensor, a number or a function"
    elif operation == "patch":
        is_valid = isinstance(value, torch.Tensor | CapturedState)
        expected = "a captured state or a tensor"
        if isinstance(value, CapturedState):
            captured = get_at(value.output, part, f"the captured {value.module}")[1]
            value = captured if captured.is_inference() else value
    if not is_valid:
        raise ConfigError(
            f"Edit: '{operation}' needs {expected} as its value, not {_describe(value)}."
        )
    if isinstance(value, torch.Tensor) and value.is_inference():
        with torch.inference_mode(False):
            return value.clone()  # autograd cannot use tensors of inference mode
    return value


def _check_fit(value: torch.Tensor, x: torch.Tensor, name: str, operation: str) -> None:
    try:
        shape = torch.broadcast_shapes(value.shape, x.shape)
    except RuntimeError:
        shape = None
    can_convert = value.dtype == x.dtype or (
        value.is_floating_point() and x.is_floating_point() and not x.is_complex()
    )
    if shape != x.shape or not can_convert:
        raise ProbeError(
            f"The value to {operation} at '{name}' does not fit: it is {shape_text(value)}, and "
            f"the output there is {shape_text(x)}."
        )


def _replace(x: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return a value that replaces `x`, whose gradient is then zero.

    `x` stays in the graph, so what computed it gets zero gradients and not None. `0 * x + new`
    would be NaN where `x` is not finite, and `new` itself might be changed in place further on.
    """
    return x.clone().copy_(new)


def _check_result(new: Any, x: torch.Tensor, name: str) -> torch.Tensor:
    """Return what a user's function returned; raise if it does not fit."""
    if not isinstance(new, torch.Tensor) or new.shape != x.shape or new.dtype != x.dtype:
        got = shape_text(new) if isinstance(new, torch.Tensor) else f"a {type(new).__name__}"
        raise ProbeError(
            f"The function that replaces the output of '{name}' returned {got}. Expected: "
            f"{shape_text(x)}."
        )
    return new


def _describe(value: Any) -> Any:
    """Return a value for the run's manifest: a tensor as its shape and a hash."""
    if isinstance(value, CapturedState):
        return {
            "captured": value.module,
            "probe": value.probe,
            "step": value.step,
            "call": value.call,
            "tensors": [_describe(tensor) for tensor in value.tensors()],
        }
    if isinstance(value, torch.Tensor):
        return f"{shape_text(value)} sha256:{_hash(value)}"
    if isinstance(value, torch.nn.Module):
        return f"{type(value).__name__}(…)"
    if isinstance(value, tuple | list | set | frozenset):
        return [_describe(item) for item in value]
    if isinstance(value, slice):
        start, stop = ("" if end is None else end for end in (value.start, value.stop))
        return f"{start}:{stop}" + ("" if value.step is None else f":{value.step}")
    if value is Ellipsis:
        return "..."
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return getattr(value, "__qualname__", None) or repr(value)


def _hash(tensor: torch.Tensor) -> str:
    """Return a hash of the values. This waits for the device."""
    data = tensor.detach().cpu().contiguous().view(-1)
    values = bytes(data.view(torch.uint8).untyped_storage()) if data.numel() else b""
    return hashlib.sha256(values).hexdigest()[:16]
