"""Rule 13, precision and life: autocast applies, and no layer is dead or constant."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from hookline.hooks.lint.finding import Check, in_due_steps
from hookline.hooks.lint.torch_watch import LossCall, ModuleCall
from hookline.hooks.lint.training_view import own_parameter
from hookline.tensors.nested import tensors_in
from hookline.tensors.sharded import stored_values

_MIN_FEATURES = 4
_DEAD_STEPS = 3
_EXPERT_STEPS = 8


class AutocastNotApplied(Check):
    """Autocast is on where the loss is computed, but every layer ran in float32.

    The forward is outside of the region, or a region within it switches autocast off. Training is
    as slow, and takes as much memory, as without it.

    Bug:
        outputs = model(x)
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_fn(outputs, y)
    Fix: Call the model within the region, in the same thread.
    Ignore: When only the loss is to use autocast.
    """

    def setup(self) -> None:
        self._where = ""  # autocast was on
        self._full: list[str] = []  # layers that gave float32
        self._has_low = False

    def on_module_call(self, call: ModuleCall) -> None:
        if not call.has_gradients:
            return
        if isinstance(call.module, nn.Linear | _ConvNd) and isinstance(call.output, Tensor):
            weight = own_parameter(call.module, "weight")
            if weight is not None and weight.dtype == call.output.dtype == torch.float32:
                self._full.append(call.name)
            else:
                self._has_low = True
        elif call.module in self.view.models:
            tensor = next(iter(tensors_in(call.output)), None)
            self._ask(tensor, "the call of the model")

    @in_due_steps
    def on_loss_call(self, call: LossCall) -> None:
        if call.has_gradients:
            self._ask(call.input, "the loss")

    @in_due_steps
    def on_before_backward(self, loss: Any) -> None:
        self._ask(loss, "backward")

    def _ask(self, tensor: Tensor | None, where: str) -> None:
        if tensor is not None and torch.is_autocast_enabled(tensor.device.type):
            self._where = self._where or where

    @in_due_steps
    def on_step_end(self) -> None:
        where, full, has_low = self._where, self._full, self._has_low
        self._where, self._full, self._has_low = "", [], False
        if where and full and not has_low:
            names = list(dict.fromkeys(full))
            self.find(
                names,
                f"Autocast was on around {where}, but all {len(names)} linear and convolution "
                f"layers returned float32.",
            )


class DeadLayer(Check):
    """All outputs of a layer are negative, and its gradient is exactly zero.

    A ReLU after it gives 0 for every sample, so nothing comes back: the layer never learns again.
    Its bias is wrong, it is initialised with zeros, or a step was too large.

    Bug:
        nn.init.constant_(layer.bias, -100.0)
    Fix: Look at the initialisation and the learning rate; use a ReLU that leaks.
    Ignore: When the layer is not to be trained yet.
    """

    def setup(self) -> None:
        self._largest: dict[str, list[Tensor]] = {}
        self._modules: dict[str, nn.Module] = {}
        self._in_a_row: dict[str, int] = {}  # steps, of layers whose outputs were all negative
        self._gradients: dict[str, Tensor] = {}

    def on_module_call(self, call: ModuleCall) -> None:
        module, output = call.module, call.output
        is_layer = isinstance(module, nn.Linear | _ConvNd | _BatchNorm)
        if not is_layer or not call.has_gradients or not isinstance(output, Tensor):
            return
        dim = -1 if isinstance(module, nn.Linear) else min(1, output.ndim - 1)
        has_weight = own_parameter(module, "weight") is not None
        if has_weight and output.numel() and output.shape[dim] >= _MIN_FEATURES:
            self._largest.setdefault(call.name, []).append(output.detach().max())
            self._modules[call.name] = module

    @in_due_steps
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for name, count in self._in_a_row.items():
            module = self._modules.get(name)
            weight = None if module is None else own_parameter(module, "weight")
            if count and weight is not None and weight.grad is not None:
                self._gradients[name] = stored_values(weight.grad).abs().max()

    @in_due_steps
    def on_step_end(self) -> None:
        for name, largest in self._largest.items():
            gradient = self._gradients.get(name)
            tensors = largest if gradient is None else [gradient, *largest]
            self.read(tensors, self._judge, name, gradient is not None)
        self._largest, self._gradients, self._modules = {}, {}, {}

    def _judge(self, numbers: list[float], name: str, has_gradient: bool) -> None:
        gradient, largest = (numbers[0], numbers[1:]) if has_gradient else (None, numbers)
        count = self._in_a_row.get(name, 0)
        if max(largest) > 0 or (count and gradient != 0):
            self._in_a_row[name] = 0
            return
        self._in_a_row[name] = count + 1
        if self._in_a_row[name] >= _DEAD_STEPS:
            self.find(
                name,
                f"None of its outputs was positive in {_DEAD_STEPS} steps in a row (the largest is "
                f"{max(largest):.3g}), and its gradient was exactly zero.",
            )


class OneLiveExpert(Check):
    """A router sends all tokens to the same expert.

    The others get no gradient, so the model has the capacity of one expert.

    Bug:
        index = gate(x).argmax(-1)  # chosen without a gradient, and without a loss for balance
    Fix: Multiply the output of an expert by its probability, and add a loss that balances experts.
    Ignore: When experts are trained one after the other.
    """

    severity = "warning"

    def setup(self) -> None:
        # The router of a group, and a weight of each expert.
        self._groups: dict[str, tuple[nn.Module, list[nn.Parameter]]] = {}
        self._tokens: dict[nn.Module, int] = {}  # by router, in the latest due step
        self._alive: dict[str, int] = {}

    def on_train_start(self) -> None:
        for parent, name in self.view.module_names.items():
            linears = [m for m in parent.modules() if isinstance(m, nn.Linear)]
            for key, child in parent.named_children():
                if "expert" in key and isinstance(child, nn.ModuleList) and len(child) > 1:
                    weights = [next(iter(each.parameters()), None) for each in child]
                    router = next((m for m in linears if m.out_features == len(child)), None)
                    known = [p for p in weights if p is not None and p.requires_grad]
                    if router is not None and len(known) == len(child):
                        self._groups[f"{name}.{key}".strip(".")] = router, known

    def on_module_call(self, call: ModuleCall) -> None:
        if self._groups and call.has_gradients and isinstance(call.output, Tensor):
            self._tokens[call.module] = call.output.numel()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """See which experts have gradients; one that was not called has none at all."""
        for name, (router, weights) in self._groups.items():
            known = [weight.grad is not None for weight in weights]
            if not any(known) or self._tokens.get(router, 0) < 4 * len(weights) ** 2:
                continue
            if sum(known) == 1 or not self.view.is_due:
                self._judge([[float(is_known) for is_known in known]], name)
            else:
                none = torch.zeros((), device=weights[0].device)
                grads: list[Any] = [weight.grad for weight in weights]
                found = [none if g is None else stored_values(g).abs().max() for g in grads]
                self.read([torch.stack(found)], self._judge, name)

    def _judge(self, numbers: list[Any], name: str) -> None:
        alive = [index for index, gradient in enumerate(numbers[0]) if gradient]
        is_same = len(alive) == 1 and self._alive.get(name) in (None, alive[0])
        self._alive[name] = alive[0] if len(alive) == 1 else -1
        if len(alive) != 1:
            self._alive.pop(name)
        if self.in_a_row(is_same, name) >= _EXPERT_STEPS:
            self.find(
                name,
                f"Only expert {alive[0]} of {len(numbers[0])} had a gradient, in {_EXPERT_STEPS} "
                "steps in a row.",
            )
