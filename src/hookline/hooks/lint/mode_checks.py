"""Rule 4, mode: training in train mode, evaluation in eval mode, and back."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from hookline.hooks.lint.finding import Check
from hookline.hooks.lint.repeated_call import RepeatableCall
from hookline.hooks.lint.torch_watch import LoadedBatch, LossCall, ModuleCall
from hookline.hooks.lint.training_view import ParameterPlace
from hookline.tensors.nested import tensors_in
from hookline.tensors.sharded import stored_values

_SAMPLE = 8


def depends_on_mode(module: nn.Module) -> bool:
    """Return whether a module computes something else in eval mode."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    return isinstance(module, _BatchNorm) and module.track_running_stats


class TrainingInEvalMode(Check):
    """The model is trained in eval mode: dropout is off, and BatchNorm keeps old statistics.

    It stays in eval mode after an evaluation. Or it was made in eval mode, as by `from_pretrained`
    of transformers: this is a warning.

    Bug:
        model.eval()
        evaluate(model)
        train_one_epoch(model)  # model.train() is missing
    Fix: Call `model.train()` before training goes on. To freeze parts, put these into eval mode.
    Ignore: When training is to run without dropout.
    """

    def setup(self) -> None:
        self._trained: set[nn.Module] = set()  # were in train mode in a step
        self._evaluated: set[nn.Module] = set()  # were called in eval mode without a backward
        self._called: list[nn.Module] = []  # in eval mode, since the latest backward
        self._in_eval: list[nn.Module] = []  # in the latest backward

    def on_model_call(self, call: ModuleCall) -> None:
        if not call.has_gradients and not call.module.training:
            self._evaluated.add(call.module)

    def on_after_forward(self, outputs: Any) -> None:
        """Note forwards in eval mode: all but the last before a backward are evaluations."""
        in_eval = [model for model in self.view.models if not model.training]
        if in_eval:
            self._evaluated.update(self._called)
            self._called = in_eval

    def on_before_backward(self, loss: Any) -> None:
        self._in_eval = [model for model in self.view.models if not model.training]
        if self._called:
            if not self._in_eval:
                self._evaluated.update(self._called)
            self._called = []
        self._trained.update(model for model in self.view.models if model.training)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for model in self._in_eval:
            was_trained = model in self._trained and model in self._evaluated
            is_first = not self._trained and self.view.steps_seen <= 2
            if (was_trained or is_first) and _trains(optimizer, model):
                self._find(model, was_trained=was_trained)
        if self._evaluated:
            self._evaluated = {model for model in self._evaluated if not model.training}

    def _find(self, model: nn.Module, *, was_trained: bool) -> None:
        quiet = [m for m in model.modules() if depends_on_mode(m) and not m.training]
        how = "was in train mode, was evaluated in eval mode, and is now"
        if not was_trained:
            how = "is from the start"
            quiet = [module for module in quiet if isinstance(module, _DropoutNd)]
            optimized = self.view.optimized()
            if not all(p.requires_grad and id(p) in optimized for p in model.parameters()):
                return  # a part of it is frozen
        if quiet:
            self.find(
                self.view.module_names.get(model) or "the model",
                f"It {how} trained in eval mode, with {len(quiet)} modules of dropout or "
                "BatchNorm.",
                severity="error" if was_trained else "warning",
            )


def _trains(optimizer: Any, model: nn.Module) -> bool:
    own = {id(parameter) for parameter in model.parameters()}
    return any(id(p) in own for group in optimizer.param_groups for p in group["params"])


class DropoutInEvaluation(Check):
    """The model is evaluated in train mode.

    Dropout or BatchNorm make the validation loss worse and random, and BatchNorm learns the
    statistics of validation data.

    Bug:
        with torch.no_grad():
            val_loss = F.cross_entropy(model(x), y)  # model.eval() is missing
    Fix: Call `model.eval()` before an evaluation and `model.train()` after it.
    Ignore: When the randomness of dropout is what is measured.
    """

    def setup(self) -> None:
        self._outputs: list[tuple[int, torch.Size]] = []  # of the latest evaluation: where they are
        self._inputs: list[Any] = []  # of the latest evaluation, weakly
        self._trained: list[Any] = []  # of the latest training forward, weakly
        self._trained_labels: tuple[int, ...] = ()
        self._count = 0  # of evaluated batches
        self._is_left_out = False  # this evaluation does something else
        self._loader: Any = None  # that has delivered the latest batch
        self._trained_loaders: weakref.WeakSet[Any] = weakref.WeakSet()

    def on_batch_loaded(self, loaded: LoadedBatch) -> None:
        self._loader = loaded.loader

    def on_batch_trained(self) -> None:
        if self._loader is not None:
            self._trained_loaders.add(self._loader)

    def on_model_call(self, call: ModuleCall) -> None:
        """Note evaluations in train mode; a training forward ends them."""
        self._outputs = []
        if call.has_gradients and not self.view.is_evaluating:
            if self._count:
                self._judge()
            self._trained, self._is_left_out = _weakly(_tensors_of(call)), False
            self._inputs = []
        elif call.module.training:
            inputs = _tensors_of(call)
            # Several draws of dropout for one batch.
            self._is_left_out |= _are_same(self._inputs, inputs)
            self._inputs = _weakly(inputs)
            self._outputs = [(_memory(x), x.shape) for x in tensors_in(call.output)]
            if self._loader is not None and self._loader not in self._trained_loaders:
                self._count += 1  # a batch of data that are never trained on

    def on_loss_call(self, call: LossCall) -> None:
        labels = call.target.shape
        if call.has_gradients and not self.view.is_evaluating:
            self._trained_labels = labels
        elif any(_may_give(*output, call.input) for output in self._outputs):
            self._count += 1
            # The loss of a training batch, as in a line search; or one that chooses samples.
            inputs = [reference() for reference in self._inputs]
            is_batch = labels == self._trained_labels and _are_same(self._trained, inputs)
            self._is_left_out |= is_batch or call.options.get("reduction", "mean") == "none"

    def on_train_end(self) -> None:
        self._judge()

    def _judge(self) -> None:
        count, self._count = self._count, 0
        is_left_out, self._is_left_out = self._is_left_out, False
        names = self.view.module_names.items() if count and not is_left_out else ()
        active = [name for m, name in names if m.training and depends_on_mode(m)]
        if active:
            self.find(
                active,
                f"The model was evaluated without gradients while it was in train mode, with "
                f"{count} batches: dropout or BatchNorm were active.",
            )


def _may_give(memory: int, shape: torch.Size, tensor: Tensor) -> bool:
    """Return whether a tensor is an output, a part of it, or a copy with as many features."""
    is_part = tensor.numel() <= shape.numel() and not tensor.requires_grad
    has_features = is_part and tensor.ndim > 1 and tensor.shape[-1:] == shape[-1:]
    return memory == _memory(tensor) or has_features


def _tensors_of(call: ModuleCall) -> list[Tensor]:
    """Return the tensors among the arguments of a call."""
    if not call.kwargs and all(isinstance(value, Tensor) for value in call.args):
        return list(call.args)
    return list(tensors_in((call.args, call.kwargs)))


def _weakly(tensors: list[Tensor]) -> list[Any]:
    return [weakref.ref(tensor) for tensor in tensors]


def _are_same(references: list[Any], tensors: list[Any]) -> bool:
    """Return whether these are the same tensors, or views of the same memory."""
    old = [reference() for reference in references]
    if not old or len(old) != len(tensors):
        return False
    return all(
        a is not None and b is not None and a.shape == b.shape and a.data_ptr() == b.data_ptr()
        for a, b in zip(old, tensors, strict=True)
    )


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class DropoutIgnoresEvalMode(Check):
    """Dropout is active in eval mode.

    `F.dropout` and `F.scaled_dot_product_attention` do not know the mode of the module that calls
    them: they drop whenever they are told to, so that evaluation is random.

    Bug:
        F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
    Fix: `dropout_p=self.dropout if self.training else 0.0`; `F.dropout(x, p, self.training)`.
    Ignore: When predictions are meant to be random (MC dropout).
    """

    is_active = True

    def on_repeat(self, call: RepeatableCall) -> None:
        seen = _DropoutCalls()
        with seen:
            call.run()
        if seen.names:
            self.find(
                list(dict.fromkeys(seen.names)),
                f"In eval mode, {len(seen.names)} calls within a forward of the model dropped "
                "values.",
            )


class _DropoutCalls(TorchFunctionMode):
    """Notes the names of the functions that drop values."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            p = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
            is_active = p > 0
        else:
            given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
            is_active = (
                func in _DROPOUTS and given.get("training", True) and given.get("p", 0.5) > 0
            )
        if is_active:
            self.names.append(func.__name__)
        return func(*args, **kwargs)


_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout)


class DropoutSwitchedOff(Check):
    """An evaluation has set a probability of dropout to 0, for the rest of training.

    Bug:
        if not self.training:
            self.dropout_p = 0.0  # and nobody sets it back
    Fix: Leave the setting as it is: `p = self.dropout_p if self.training else 0.0`.
    Ignore: When dropout is to end with the first evaluation.
    """

    def setup(self) -> None:
        self._settings: list[tuple[str, nn.Module, str, float]] = []  # name, where, and the value
        self._has_evaluated = False

    def on_train_start(self) -> None:
        for module, name in self.view.module_names.items():
            for attribute, value in vars(module).items():
                is_dropout = "drop" in attribute or (isinstance(module, _DropoutNd))
                if is_dropout and type(value) is float and 0 < value < 1:
                    self._settings.append((f"{name}.{attribute}", module, attribute, value))

    def on_model_call(self, call: ModuleCall) -> None:
        self._has_evaluated |= not call.module.training

    def on_before_backward(self, loss: Any) -> None:
        gone = []
        for i, (name, module, attribute, value) in enumerate(self._settings):
            now = module.__dict__.get(attribute, value)
            if now == value:
                continue
            if now == 0 and module.training and self._has_evaluated:
                gone.append(name)
            else:
                self._settings[i] = (name, module, attribute, now)
        if not gone:
            self._has_evaluated = False  # what changes from now on has another reason
            self._counts.clear()
        elif self.in_a_row(gone) == 2:
            self.find(gone, f"{len(gone)} of these became 0 in an evaluation, and still are.")


class AveragedWeightsNotRestored(Check):
    """Training goes on with the weights that were put in for an evaluation.

    Averaged weights (EMA, SWA) were copied into the model, which was then evaluated. They were not
    replaced by the trained ones afterwards: each evaluation throws training back.

    Bug:
        ema.copy_to(model.parameters())
        evaluate(model)  # ema.restore(...) is missing
    Fix: Copy the trained weights back after the evaluation, or evaluate a copy of the model.
    Ignore: When training is meant to go on from other weights.
    """

    severity = "warning"

    def setup(self) -> None:
        self._watched: ParameterPlace | None = None
        self._stepped: Tensor | None = None  # a sample after the latest step
        self._evaluated: Tensor | None = None
        self._steps_compared = 0
        self._is_changed_otherwise = False

    def on_train_start(self) -> None:
        optimized = self.view.optimized()
        for place in self.view.parameters:
            is_plain = place.tensor.ndim > 1 and place.tensor.is_contiguous()
            if id(place.tensor) in optimized and is_plain:
                self._watched = place

    def _copy(self, place: ParameterPlace) -> Tensor:
        """Return the first elements, cheap enough for each step."""
        return stored_values(place.tensor).reshape(-1)[:_SAMPLE].clone()

    def on_after_optimizer_step(self, optimizer: Any) -> None:
        self._evaluated = None
        if self._watched is not None:
            self._stepped = self._copy(self._watched)

    def on_model_call(self, call: ModuleCall) -> None:
        stepped, watched = self._stepped, self._watched
        if stepped is None or watched is None or self._is_changed_otherwise:
            return
        if not call.has_gradients:
            self._evaluated = self._copy(watched)
            return
        evaluated = self._evaluated
        self._evaluated = self._stepped = None
        if evaluated is not None:
            now = self._copy(watched)
            tensors = [(evaluated != stepped).sum(), (now != evaluated).sum()]
            self.read(tensors, self._judge, watched.name, len(now))
        elif self.view.is_due:
            now = self._copy(watched)
            self.read([(now != stepped).sum()], self._judge_step)

    def _judge_step(self, numbers: list[float]) -> None:
        """Note whether somebody changes weights between steps: clipping, masks, slow weights."""
        self._steps_compared += 1
        self._is_changed_otherwise |= bool(numbers[0])

    def on_checkpoint_load(self, *args: Any) -> None:
        """Forget the sample: training goes back to a checkpoint, or a new stage begins."""
        self._stepped = None

    on_optimizer_made = on_file_loaded = on_checkpoint_load

    def on_state_loaded(self, target: Any, state: Any) -> None:
        if not isinstance(target, nn.Module):
            self._stepped = None

    def _judge(self, numbers: list[float], name: str, count: int) -> None:
        replaced, changed = numbers
        if replaced and not changed and self._steps_compared and not self._is_changed_otherwise:
            self.find(
                name,
                f"{replaced:.0f} of {count} sampled weights were replaced before an evaluation, "
                f"and training goes on with the replaced ones.",
            )
