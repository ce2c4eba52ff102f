"""Rule 13, precision and life: autocast applies, and no layer is dead or constant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from hookline.hooks.lint.finding import Check
from hookline.hooks.lint.torch_watch import LossCall, ModuleCall
from hookline.hooks.lint.training_view import TrainingView
from hookline.tensors.nested import tensors_in
from hookline.tensors.sharded import stored_values

_MIN_FEATURES = 4
_DEAD_STEPS = 3
_CONSTANT_STEPS = 4
_EXPERT_STEPS = 8


class AutocastNotApplied(Check):
    """Autocast is on where the loss is computed, but every layer ran in float32.

    The forward is outside of the region, or a region within it switches autocast off. Training is
    as slow, and takes as much memory, as without it.

    Bug:
        outputs = model(x)
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_fn(outputs, y)

    Fix:
        Call the model within the region, in the same thread.

    Ignore:
        When only the loss is to use autocast.
    """

    id = "autocast-not-applied"
    rule = 13

    def __init__(self, report: Any) -> None:
        super().__init__(report)
        self._where = ""  # autocast was on
        self._full: list[str] = []  # layers that gave float32
        self._has_low = False

    def on_module_call(self, view: TrainingView, call: ModuleCall) -> None:
        """Note the types that layers return."""
        if not call.has_gradients:
            return
        if isinstance(call.module, nn.Linear | _ConvNd) and isinstance(call.output, Tensor):
            if call.module.weight.dtype == call.output.dtype == torch.float32:
                self._full.append(call.name)
            else:
                self._has_low = True
        elif call.module in view.models:
            tensor = next(iter(tensors_in(call.output)), None)
            self._ask(view, tensor, "the call of the model")

    def on_loss_call(self, view: TrainingView, call: LossCall) -> None:
        """Note that autocast is on."""
        if call.has_gradients:
            self._ask(view, call.input, "the loss")

    def on_before_backward(self, view: TrainingView, loss: Any) -> None:
        """Note that autocast is on."""
        self._ask(view, loss, "backward")

    def _ask(self, view: TrainingView, tensor: Tensor | None, where: str) -> None:
        if view.is_due and tensor is not None and torch.is_autocast_enabled(tensor.device.type):
            self._where = self._where or where

    def on_step_end(self, view: TrainingView) -> None:
        """Judge the layers of the step."""
        where, full, has_low = self._where, self._full, self._has_low
        self._where, self._full, self._has_low = "", [], False
        if where and full and not has_low:
            names = list(dict.fromkeys(full))
            self.find(
                view,
                names,
                f"Autocast was on around {where}, but all {len(names)} linear and convolution "
                f"layers returned float32.",
                "Call the model within torch.autocast, and look for regions with enabled=False.",
            )


class DeadLayer(Check):
    """All outputs of a layer are negative, and its gradient is exactly zero.

    A ReLU after it gives 0 for every sample, so nothing comes back: the layer never learns again.
    Its bias is wrong, it is initialised with zeros, or a step was too large.

    Bug:
        nn.init.constant_(layer.bias, -100.0)

    Fix:
        Look at the initialisation and the learning rate; use a ReLU that leaks.

    Ignore:
        When the layer is not to be trained yet.
    """

    id = "dead-layer"
    rule = 13

    def __init__(self, report: Any) -> None:
        super().__init__(report)
        self._largest: dict[str, list[Tensor]] = {}
        self._modules: dict[str, nn.Module] = {}
        self._in_a_row: dict[str, int] = {}  # steps, of layers whose outputs were all negative
        self._gradients: dict[str, Tensor] = {}

    def on_module_call(self, view: TrainingView, call: ModuleCall) -> None:
        """Measure the largest output of layers."""
        module, output = call.module, call.output
        is_layer = isinstance(module, nn.Linear | _ConvNd | _BatchNorm)
        if not is_layer or not call.has_gradients or not isinstance(output, Tensor):
            return
        dim = -1 if isinstance(module, nn.Linear) else min(1, output.ndim - 1)
        if output.numel() and output.shape[dim] >= _MIN_FEATURES and module.weight is not None:
            self._largest.setdefault(call.name, []).append(output.detach().max())
            self._modules[call.name] = module

    def on_before_optimizer_step(self, view: TrainingView, optimizer: Any) -> None:
        """Measure the gradients of layers whose outputs were negative before."""
        for name, count in self._in_a_row.items() if view.is_due else ():
            weight = self._modules[name].weight if name in self._modules else None
            if count and isinstance(weight, Tensor) and weight.grad is not None:
                self._gradients[name] = stored_values(weight.grad).abs().max()

    def on_step_end(self, view: TrainingView) -> None:
        """Read what was measured."""
        for name, largest in self._largest.items():
            gradient = self._gradients.get(name)
            tensors = largest if gradient is None else [gradient, *largest]
            view.read(tensors, self._judge, view, name, gradient is not None)
        self._largest, self._gradients, self._modules = {}, {}, {}

    def _judge(
        self, numbers: list[float], view: TrainingView, name: str, has_gradient: bool
    ) -> None:
        gradient, largest = (numbers[0], numbers[1:]) if has_gradient else (None, numbers)
        count = self._in_a_row.get(name, 0)
        if max(largest) > 0 or (count and gradient != 0):
            self._in_a_row[name] = 0
            return
        self._in_a_row[name] = count + 1
        if self._in_a_row[name] >= _DEAD_STEPS:
            self.find(
                view,
                name,
                f"None of its outputs was positive in {_DEAD_STEPS} steps in a row (the largest is "
                f"{max(largest):.3g}), and its gradient was exactly zero.",
                "Look at its initialisation, the learning rate, and the scale of its inputs.",
            )


class ConstantOutput(Check):
    """The model gives the same output for all samples.

    Its inputs differ, so something on the way removes them: a softmax over one element, a dead
    layer, a multiplication by zero.

    Bug:
        nn.Sequential(nn.Linear(64, 1), nn.Softmax(dim=1))  # always 1

    Fix:
        Follow a batch through the model, and look where its samples become equal.

    Ignore:
        When the output is not to depend on the input.
    """

    id = "constant-output"
    rule = 13

    def __init__(self, report: Any) -> None:
        super().__init__(report)
        self._in_a_row = 0

    def on_module_call(self, view: TrainingView, call: ModuleCall) -> None:
        """Compare the outputs of all samples with that of the first one."""
        if not call.has_gradients or call.module not in view.models or view.steps_seen < 2:
            return
        inputs = [x for x in tensors_in((call.args, call.kwargs)) if x.ndim]
        samples = len(inputs[0]) if inputs else 0
        outputs = [x.detach() for x in tensors_in(call.output) if x.is_floating_point()]
        if samples < 4 or not outputs or any(not x.ndim or len(x) != samples for x in outputs):
            return
        tensors = [
            (inputs[0] != inputs[0][:1]).any(),
            torch.stack([(x != x[:1]).any() for x in outputs]).any(),
            outputs[0].abs().max(),
            outputs[0].float().mean(),
        ]
        view.read(tensors, self._judge, view, samples)

    def _judge(self, numbers: list[float], view: TrainingView, samples: int) -> None:
        inputs_differ, outputs_differ, largest, mean = numbers
        is_constant = inputs_differ and not outputs_differ and largest > 0
        self._in_a_row = self._in_a_row + 1 if is_constant else 0
        if self._in_a_row >= _CONSTANT_STEPS:
            self.find(
                view,
                "the model",
                f"Its outputs were the same for all {samples} samples of a batch (mean {mean:.3g}) "
                f"in {_CONSTANT_STEPS} steps in a row, though the inputs differ.",
                "Look where samples become equal: a softmax over one element, or a dead layer.",
            )


@dataclass(frozen=True, eq=False)
class _Experts:
    """The experts that a router chooses from: modules, or a tensor with one part for each."""

    name: str
    router: nn.Module
    count: int
    weights: list[nn.Parameter]

    def gradients(self) -> Tensor | None:
        """Return the largest gradient of each expert."""
        found = [None if p.grad is None else stored_values(p.grad).abs() for p in self.weights]
        if len(found) == 1:
            return None if found[0] is None else found[0].flatten(1).amax(1)
        known = next((each for each in found if each is not None), None)
        if known is None:
            return None
        return torch.stack([known.new_zeros(()) if g is None else g.max() for g in found])


class OneLiveExpert(Check):
    """A router sends all tokens to the same expert.

    The others get no gradient, so the model has the capacity of one expert.

    Bug:
        index = gate(x).argmax(-1)  # chosen without a gradient, and without a loss for balance

    Fix:
        Multiply the output of an expert by its probability, and add a loss that balances experts.

    Ignore:
        When experts are trained one after the other.
    """

    id = "one-live-expert"
    rule = 13
    severity = "warning"

    def __init__(self, report: Any) -> None:
        super().__init__(report)
        self._groups: list[_Experts] = []
        self._tokens: dict[nn.Module, int] = {}
        self._alive: dict[str, tuple[int, int]] = {}  # the expert, and for how many steps

    def on_train_start(self, view: TrainingView) -> None:
        """Find routers and their experts."""
        names = view.module_names
        for parent, name in names.items():
            for router in parent.children():
                if isinstance(router, nn.Linear) and router.out_features > 1:
                    self._groups += _experts_of(parent, name, router)

    def on_module_call(self, view: TrainingView, call: ModuleCall) -> None:
        """Count the tokens of a router."""
        if self._groups and call.has_gradients and isinstance(call.output, Tensor):
            tokens = call.output.numel() // max(1, call.output.shape[-1] if call.output.ndim else 1)
            self._tokens[call.module] = tokens

    def on_before_optimizer_step(self, view: TrainingView, optimizer: Any) -> None:
        """Measure the gradients of experts."""
        for group in self._groups if view.is_due else ():
            gradients = group.gradients()
            if gradients is not None and self._tokens.get(group.router, 0) >= 4 * group.count:
                view.read([gradients], self._judge, view, group)
        self._tokens = {}

    def _judge(self, numbers: list[Any], view: TrainingView, group: _Experts) -> None:
        alive = [index for index, gradient in enumerate(numbers[0]) if gradient]
        last, count = self._alive.get(group.name, (-1, 0))
        if len(alive) != 1:
            self._alive[group.name] = (-1, 0)
            return
        count = count + 1 if alive[0] == last else 1
        self._alive[group.name] = (alive[0], count)
        if count >= _EXPERT_STEPS:
            self.find(
                view,
                group.name,
                f"Only expert {alive[0]} of {group.count} had a gradient, in {count} steps in a "
                f"row.",
                "Look at the router, multiply each expert's output by its probability, and add a "
                "loss that balances experts.",
            )


def _experts_of(parent: nn.Module, name: str, router: nn.Linear) -> list[_Experts]:
    """Return the experts in a module that has a router."""
    count, found = router.out_features, []
    for child_name, child in parent.named_children():
        if "expert" in child_name and isinstance(child, nn.ModuleList) and len(child) == count:
            weights = [next((p for p in each.parameters()), None) for each in child]
            if all(weight is not None and weight.requires_grad for weight in weights):
                known = [weight for weight in weights if weight is not None]
                found.append(_Experts(f"{name}.{child_name}".strip("."), router, count, known))
    for parameter_name, parameter in parent.named_parameters():
        is_stacked = "expert" in parameter_name and parameter.ndim == 3
        if is_stacked and len(parameter) == count and parameter.requires_grad:
            whole = f"{name}.{parameter_name}".strip(".")
            found.append(_Experts(whole, router, count, [parameter]))
            break
    return found


PRECISION_CHECKS = (AutocastNotApplied, DeadLayer, ConstantOutput, OneLiveExpert)
