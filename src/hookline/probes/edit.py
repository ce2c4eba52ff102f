"""Edit: changes the inputs or outputs of modules."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, Literal, Self, TypeAlias

import torch
from pydantic import NonNegativeInt
from torch import nn

from hookline.arguments import describe_value, read_attribute, show_value
from hookline.errors import ConfigError, ProbeError, listed
from hookline.hook import HookGroup
from hookline.options import BuiltIn
from hookline.probes.attention import FunctionWatch, find_projection
from hookline.probes.call import Call
from hookline.probes.capture import Calls, Capture, ProbeResults
from hookline.probes.extractor import parse_index
from hookline.probes.probe import Probe
from hookline.probes.store import CapturedState, shape_text
from hookline.tensors.nested import rebuild_mapping, rebuild_sequence

_MAX_DEPTH = 20  # a container may be within itself

Part: TypeAlias = int | str | list[int | str] | tuple[int | str, ...] | None
"""The path to a tensor: a position, a key or an attribute, or several; None for the first."""
Operation = Literal["replace", "scale", "ablate", "add", "patch"]


class Edit(BuiltIn, Probe):
    """Replaces, scales, ablates, adds to or patches outputs or inputs of modules, with gradients.

    It needs `enable_intervention=True`: an edit changes what is trained and measured. Run backward
    before the edit is detached, as at the end of a block, `with edit.attach(model): …`: activation
    checkpointing computes the forward again, and needs the edit for that.

    Args:
        modules: Whose outputs to change, as for every probe; None for none, only taps.
        operation: `replace` by `value`; `scale` by the factor `value`; `ablate` to zero or, with
            `value="mean"`, to the mean over all dimensions but the last; `add` `value` times
            `coefficient`; `patch` with a captured `value`.
        value: A tensor that can be broadcast to the output; a number; for `replace` also a function
            of the output, which gets a copy; for `patch` what `hookline.probe` returned (each
            module gets the last call of the module with its name, or of the only one captured),
            the calls of one module, a captured state or a tensor.
        coefficient: The factor of `add`.
        at: An index into the tensor, such as `(slice(None), -1)` or, as text, `":, -1"`; None for
            all of it.
        part: Which tensor, if a module returns several: a position, a key, or a list of these from
            the outside in; None for the first. Of the input: a position, or a keyword.
        taps: Which of the values that `hookline.tap` names to change, too.
        enable_intervention: The permission to change training.
        where: Whether to change the `"output"` of the modules or their `"input"`, before they run.
        head: The number of a head, from 0: the modules are attention modules of torch or
            transformers, and what changes is the slice of this head in the input of their output
            projection. `patch` then needs a tensor: this input, or the slice.
    """

    cost = "The computation of the edit itself, at each call of its modules."
    hookline_group = HookGroup.CONTROL
    critical = True
    intervenes = True
    edits = True
    wants_before = False  # unless it edits inputs
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
        where: Literal["output", "input"] = "output",
        head: NonNegativeInt | None = None,
    ) -> None:
        if not enable_intervention:
            raise ProbeError(
                "An edit changes the outputs of modules. Allow it with enable_intervention=True."
            )
        super().__init__(modules, taps)
        if head is not None:
            if taps or part is not None:
                raise ConfigError("Edit: head is for attention modules, without taps and part.")
            where = "input"  # of the output projection
        if where == "input" and taps:
            raise ConfigError("Edit: a tap has no input. Use where='output' for taps.")
        self._head = head
        self._heads: dict[str, int] = {}  # of each attention module
        self._multi_head: set[str] = set()  # those of torch, which call no projection
        self._where = where
        self.wants_before = self.edits_input = where == "input"
        self._part = _input_path(part) if self.edits_input else part
        self._operation: Operation = operation
        self._value = self._check_value(value)
        self._coefficient = coefficient
        self._at: Any = ... if at is None else parse_index(at, "at")
        self.hookline_options = {
            **self.hookline_options,
            "modules": _describe(modules),
            "value": _describe(self._value),
            "at": _describe(at),
            "where": where,
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
        """Replace the output by one captured before: by `hookline.probe`, or a tensor."""
        return cls(modules, "patch", source, **options)

    def before(self, call: Call) -> Any:
        """Return what replaces the arguments of a module, if the edit is of inputs."""
        if not self.edits_input or call.compiled:
            return None
        if call.name in self._multi_head:
            assert isinstance(call.module, nn.MultiheadAttention)
            edit = partial(self._edit, name=call.name)
            call.saved = _ProjectionInput(call.module.out_proj.weight, edit)
            call.saved.start(call.module)
            return None
        return self._edit_within((call.args, dict(call.kwargs)), call.name)

    def choose(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the model's modules to edit; raise if there is no captured state for one."""
        chosen = super().choose(model)
        for name in chosen:
            self._value_for(name)
        if self._head is None:
            return chosen
        return {name: self._find_projection(name, module) for name, module in chosen.items()}

    def _find_projection(self, name: str, module: nn.Module) -> nn.Module:
        """Return the module whose input is edited for a head of an attention module."""
        projection, heads = find_projection(name, module)
        if self._head is not None and self._head >= heads:
            raise ConfigError(f"Edit: head={self._head}, but '{name}' has {heads} heads, from 0.")
        self._heads[name] = heads
        if isinstance(module, nn.MultiheadAttention):  # passes the weight to a function
            self._multi_head.add(name)
            return module
        return projection

    def after(self, call: Call) -> Any:
        """Return what replaces the output of a module."""
        if isinstance(call.saved, _ProjectionInput):
            call.saved.stop()
            if not call.saved.was_called:
                raise ProbeError(
                    f"The edit of head {self._head} of '{call.name}' has changed nothing: no call "
                    "was seen of torch's `linear` with the weight of its `out_proj`."
                )
        return None if self.edits_input else self._edit_within(call.output, call.name)

    def _edit_within(self, value: Any, name: str) -> Any:
        """Return an output, or `(args, kwargs)`, with the edited tensor."""
        path, x = _get_at(value, self._part, self._subject(name))
        return _set_at(value, path, self._edit(x, name))

    def _subject(self, name: str) -> str:
        return f"{self._where} of '{name}'"

    def compiled_edit(self, name: str) -> Callable[[Any, torch.Tensor], Any]:
        """Return the edit as a function that can be compiled."""

        def edit(value: Any, is_active: torch.Tensor) -> Any:
            if name in self._multi_head:
                raise ProbeError(
                    f"'{name}' is a compiled nn.MultiheadAttention, whose heads cannot be edited. "
                    "Compile the model without it, or do not compile."
                )
            path, x = _get_at(value, self._part, self._subject(name))
            return _set_at(value, path, torch.where(is_active, self._edit(x, name), x))

        return edit

    def _edit(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Return a tensor with what replaces its elements at head and index; without, all of it."""
        if self._at is ... and self._head is None:
            return self._operate(x, name, x)
        of_head = self._slice_head(x, name)
        try:
            selected = of_head[self._at]
        except (IndexError, RuntimeError, TypeError) as error:
            raise ProbeError(
                f"at={_describe(self._at)} does not fit the {self._subject(name)}, which is "
                f"{shape_text(of_head)}: {error}"
            ) from error
        result = x.clone()
        self._slice_head(result, name)[self._at] = self._operate(selected, name, x)
        return result

    def _slice_head(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Return the slice of the head, a view; without a head the tensor."""
        if self._head is None:
            return x
        width = x.shape[-1] // self._heads[name]
        return x[..., self._head * width : (self._head + 1) * width]

    def _operate(self, x: torch.Tensor, name: str, full: torch.Tensor) -> torch.Tensor:
        """Return what replaces `x`, the selected part of the full tensor."""
        value = self._value_for(name)
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
            new = _check_result(value(x.clone()), x, self._subject(name))  # it may work in place
            return new if new.requires_grad or not x.requires_grad else _replace(x, new)
        if self._operation == "patch" and value.shape == full.shape:  # captured as a whole
            value = self._slice_head(value, name)[self._at]
        return _replace(x, self._convert(value, x, name))

    def _convert(self, value: Any, x: torch.Tensor, name: str) -> Any:
        """Return a value with the dtype and on the device of `x`."""
        if not isinstance(value, torch.Tensor):
            return value if self._operation in ("scale", "add") else x.new_full((), value)
        _check_fit(value, x, name, self._operation, self._where)
        return value.to(x.device, x.dtype, non_blocking=True)

    def _check_value(self, value: Any) -> Any:
        """Return the value, or for `patch` the values by the names of modules."""
        operation, expected = self._operation, "a number or a tensor"
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_valid = is_number or isinstance(value, torch.Tensor)
        if operation == "ablate":
            value = "zero" if value is None else value
            is_valid = isinstance(value, str) and value in ("zero", "mean")
            expected = "'zero' or 'mean'"
        elif operation == "replace":
            is_valid = is_valid or callable(value)
            expected = "a tensor, a number or a function"
        elif operation == "patch":
            expected = "the input of the output projection, a tensor,"
            if self._head is None:
                value = self._captured_tensors(value)
                expected = "what hookline.probe returned, a captured state or a tensor"
            is_valid = isinstance(value, torch.Tensor | _ByName)
        if not is_valid:
            raise ConfigError(
                f"Edit: '{operation}' needs {expected} as its value, not {describe_value(value)}."
            )
        if isinstance(value, torch.Tensor) and value.is_inference():  # autograd cannot use it
            with torch.inference_mode(False):
                return value.clone()
        return value

    def _captured_tensors(self, source: Any) -> Any:
        """Return the tensor to patch with, or those of the last call of each captured module."""
        if isinstance(source, ProbeResults):
            source = source.capture
        if isinstance(source, Capture):
            found = _ByName((name, self._captured_tensor(source[name][-1])) for name in source)
            if not found:
                raise ProbeError("Edit: nothing was captured to patch with. Call the model first.")
            return found
        if isinstance(source, Calls):
            source = source[-1]
        return self._captured_tensor(source) if isinstance(source, CapturedState) else source

    def _captured_tensor(self, state: CapturedState) -> torch.Tensor:
        captured = (state.input, state.kwargs) if self.edits_input else state.output
        if captured is None or (self.edits_input and state.input is state.kwargs is None):
            raise ProbeError(
                f"The {self._where} of '{state.module}' was not captured. Capture it with "
                f"{self._where}=True."
            )
        return _get_at(captured, self._part, f"captured {self._where} of '{state.module}'")[1]

    def _value_for(self, name: str) -> Any:
        value = self._value
        if not isinstance(value, _ByName):
            return value
        if name in value:
            return value[name]
        if len(value) == 1:
            return next(iter(value.values()))
        raise ProbeError(
            f"There is no captured state of '{name}' to patch it with. There are states of "
            f"{listed(value)}. Choose one: results['{next(iter(value))}']."
        )


class _ProjectionInput(FunctionWatch):
    """Edits the input of the output projection of `nn.MultiheadAttention`, in one call of it."""

    def __init__(self, weight: torch.Tensor, edit: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._weight, self._edit = weight, edit
        self.was_called = False

    def see(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function; the projection with another input."""
        if func is nn.functional.linear and len(args) > 1 and args[1] is self._weight:
            self.was_called = True
            args = (self._edit(args[0]), *args[1:])
        return func(*args, **kwargs)


class _ByName(dict[str, Any]):
    """The tensors to patch modules with, by the modules' names."""


def _input_path(part: Part) -> Part:
    """Return the path within `(args, kwargs)`: positions are in the first, names in the second."""
    if part is None:
        return None
    path = tuple(part) if isinstance(part, list | tuple) else (part,)
    return (0 if isinstance(path[0], int) else 1, *path)


def _check_fit(value: torch.Tensor, x: torch.Tensor, name: str, operation: str, where: str) -> None:
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
            f"the {where} there is {shape_text(x)}."
        )


def _replace(x: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return a value that replaces `x`, whose gradient is then zero.

    `x` stays in the graph, so what computed it gets zero gradients and not None. `0 * x + new`
    would be NaN where `x` is not finite, and `new` itself might be changed in place further on.
    """
    return x.clone().copy_(new)


def _check_result(new: Any, x: torch.Tensor, subject: str) -> torch.Tensor:
    """Return what a user's function returned; raise if it does not fit."""
    if not isinstance(new, torch.Tensor) or new.shape != x.shape or new.dtype != x.dtype:
        got = shape_text(new) if isinstance(new, torch.Tensor) else f"a {type(new).__name__}"
        raise ProbeError(
            f"The function that replaces the {subject} returned {got}. Expected: {shape_text(x)}."
        )
    return new


def _describe(value: Any) -> Any:
    """Return a value for the run's manifest: a tensor as its shape and a hash."""
    if isinstance(value, _ByName):
        return {name: _describe(tensor) for name, tensor in value.items()}
    if isinstance(value, torch.Tensor):
        return f"{shape_text(value)}{_describe_hash(value)}"
    if type(value) in (tuple, list):
        return [_describe(item) for item in value]
    if isinstance(value, nn.Module):
        return f"{type(value).__name__}(…)"
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return read_attribute(value, "__qualname__") or show_value(value)


def _describe_hash(tensor: torch.Tensor) -> str:
    """Return a hash of the values, for the record. This waits for the device."""
    try:
        data = tensor.detach().cpu().contiguous().view(-1)
        values = bytes(data.view(torch.uint8).untyped_storage()) if data.numel() else b""
    except (RuntimeError, NotImplementedError):  # sparse, quantized, of a subclass
        return f" {str(tensor.layout).removeprefix('torch.')} (no hash)"
    return f" sha256:{hashlib.sha256(values).hexdigest()[:16]}"


# -- a tensor within an input or output; can be compiled -------------------------------------------


def _get_at(value: Any, part: Part, subject: str) -> tuple[tuple[Any, ...], torch.Tensor]:
    """Return the path to a tensor within a value, and the tensor.

    `subject` is what the value is, for messages: "output of 'blocks.0'".
    """
    if part is None:
        path = _find_first(value)
        if path is None:
            raise ProbeError(
                f"The {subject} is a {type(value).__name__} without any tensor. There is nothing "
                "to edit."
            )
    else:
        path = tuple(part) if isinstance(part, list | tuple) else (part,)
    found = value
    for key in path:
        found = _get_item(found, key, subject)
    if not isinstance(found, torch.Tensor):
        raise ProbeError(
            f"part={show_value(part)} of the {subject} is a {type(found).__name__}, not a tensor."
        )
    return path, found


def _set_at(output: Any, path: tuple[Any, ...], new: torch.Tensor) -> Any:
    """Return a copy of the output with another tensor at the end of the path."""
    if not path:
        return new
    key, rest = path[0], path[1:]
    if isinstance(output, tuple | list):
        at = key % len(output)
        items = [_set_at(item, rest, new) if i == at else item for i, item in enumerate(output)]
        if type(output) is tuple:
            return tuple(items)
        return items if type(output) is list else rebuild_sequence(output, items)
    if isinstance(output, Mapping):
        pairs = {k: _set_at(item, rest, new) if k == key else item for k, item in output.items()}
        return pairs if type(output) is dict else rebuild_mapping(output, pairs)
    changed = copy(output)
    object.__setattr__(changed, key, _set_at(getattr(output, key), rest, new))  # also if frozen
    return changed


def _find_first(value: Any, depth: int = 0) -> tuple[Any, ...] | None:
    if isinstance(value, torch.Tensor):
        return ()
    if depth == _MAX_DEPTH:
        return None
    if isinstance(value, tuple | list):
        items: list[tuple[Any, Any]] = list(enumerate(value))
    elif isinstance(value, Mapping):
        items = list(value.items())
    elif is_dataclass(value) and not isinstance(value, type):
        items = [(f.name, getattr(value, f.name, None)) for f in fields(value)]
    else:
        return None
    for key, inner in items:
        path = _find_first(inner, depth + 1)
        if path is not None:
            return (key, *path)
    return None


def _get_item(value: Any, key: Any, subject: str) -> Any:
    if isinstance(value, Mapping) and key in value:
        return value[key]
    if isinstance(value, tuple | list):
        if isinstance(key, int) and -len(value) <= key < len(value):
            return value[key]
    elif isinstance(key, str) and not isinstance(value, torch.Tensor) and hasattr(value, key):
        return getattr(value, key)
    size = f" of {len(value)}" if isinstance(value, Mapping | tuple | list) else ""
    raise ProbeError(
        f"The {subject} has no part {show_value(key)}: it is a {type(value).__name__}{size}."
    )
