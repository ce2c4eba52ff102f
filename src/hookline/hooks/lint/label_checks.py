"""Rule 9, labels: they have the shape, the position and the range that the loss expects."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from hookline.hooks.lint.finding import Check, in_due_steps
from hookline.hooks.lint.leak_checks import change_later
from hookline.hooks.lint.loss_graph import LossGraph
from hookline.hooks.lint.repeated_call import RepeatableCall
from hookline.hooks.lint.token_labels import aligned, is_any_shifted_by, is_shifted_by, token_ids
from hookline.hooks.lint.torch_watch import LossCall, ModuleCall

_ELEMENTWISE = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
_STEPS_IN_A_ROW = 3
_MAX_NODES = 2000
_VIEWS = (
    *("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Transpose", "Permute", "T"),
    *("Select", "Slice", "Index", "ToCopy", "Clone", "Alias"),
)


def operations(tensor: Tensor) -> list[Any]:
    """Return the nodes that computed a tensor: those of views and copies, and one before them."""
    found: list[Any] = []
    node = tensor.grad_fn
    while node is not None:
        found.append(node)
        if _operation(node) not in _VIEWS or not node.next_functions:
            break
        node = node.next_functions[0][0]
    return found


def last_operation(tensor: Tensor) -> str:
    """Return the name of the operation that computed a tensor, behind views and copies."""
    nodes = operations(tensor)
    return _operation(nodes[-1]) if nodes else ""


def _operation(node: Any) -> str:
    return str(node.name()).partition("Backward")[0]


def has_class_labels(call: LossCall) -> bool:
    """Return whether the labels are the numbers of classes."""
    is_classes = call.name in ("cross_entropy", "nll_loss")
    return is_classes and not call.target.is_floating_point()


def is_label_used(call: LossCall) -> Tensor:
    """Return which labels are not ignored."""
    return call.target.ne(call.options.get("ignore_index", -100))


def _class_dimension(call: LossCall) -> int:
    return 1 if call.input.ndim > 1 else 0


class TargetBroadcast(Check):
    """A loss compares each output with the labels of all samples.

    Outputs of shape (N, 1) and labels of shape (N) are broadcast to (N, N): the model learns the
    mean of the labels.

    Bug:
        loss = F.mse_loss(model(x), y)  # (32, 1) and (32,)
    Fix: Give both the same shape: `model(x).squeeze(1)`, or `y.unsqueeze(1)`.
    Ignore: When all pairs are meant to be compared.
    """

    def setup(self) -> None:
        self._output: Any = None

    @in_due_steps
    def on_loss_call(self, call: LossCall) -> None:
        if call.name in _ELEMENTWISE and call.has_gradients:
            first, second = call.input.shape, call.target.shape
            if len(first) != len(second) and _is_outer(first, second):
                self._find(call.name, first, second)

    @in_due_steps
    def on_after_forward(self, outputs: Any) -> None:
        is_column = isinstance(outputs, Tensor) and outputs.ndim == 2 and outputs.shape[1] == 1
        self._output = outputs.grad_fn if is_column else None

    @in_due_steps
    def on_before_backward(self, loss: Any) -> None:
        output, self._output = self._output, None
        if output is None or getattr(loss, "grad_fn", None) is None:
            return
        rows = output._input_metadata[0].shape[0]  # noqa: SLF001
        for node in LossGraph(loss, _MAX_NODES).nodes:
            operands = [function for function, _ in node.next_functions]
            if node.name() == "SubBackward0" and output in operands and None in operands:
                shape = node._input_metadata[0].shape  # noqa: SLF001
                if rows > 1 and tuple(shape) == (rows, rows):
                    self._find("the difference in the loss", (rows, 1), (rows,))

    def _find(self, subject: str, first: Any, second: Any) -> None:
        self.find(
            subject,
            f"An output of shape {tuple(first)} is compared with labels of shape {tuple(second)}: "
            f"both are broadcast, so that every output meets every label.",
        )


def _is_outer(first: torch.Size, second: torch.Size) -> bool:
    """Return whether the same number of elements is broadcast to more."""
    if first.numel() != second.numel() or first.numel() < 2:
        return False
    try:
        return torch.broadcast_shapes(first, second) not in (first, second)
    except RuntimeError:
        return False


class AllLabelsIgnored(Check):
    """No label of a step is used: all are `ignore_index`.

    The mean of nothing is NaN, their sum 0: nothing is learnt, or everything is lost.

    Bug:
        labels[attention_mask == 1] = -100  # meant: == 0
    Fix: Look at the labels of a batch where they are masked.
    Ignore: When batches without a label are expected.
    """

    def setup(self) -> None:
        self._used: list[Tensor] = []
        self._count = 0

    @in_due_steps
    def on_loss_call(self, call: LossCall) -> None:
        if call.has_gradients and has_class_labels(call):
            self._used.append(is_label_used(call).sum())
            self._count += call.target.numel()

    @in_due_steps
    def on_step_end(self) -> None:
        if self._used:
            self.read(self._used, self._judge, self._count)
        self._used, self._count = [], 0

    def _judge(self, used: list[float], count: int) -> None:
        if self.in_a_row(count and not any(used)) == 2:
            self.find("cross_entropy", f"All {count} labels were ignored, in two steps in a row.")


class ProbabilitiesIntoCrossEntropy(Check):
    """`cross_entropy` or `binary_cross_entropy_with_logits` gets probabilities instead of logits.

    It applies a softmax or sigmoid itself. A second one bounds the differences between classes to
    1, so that the loss can hardly fall and gradients are tiny.

    Bug:
        loss = F.cross_entropy(model(x).softmax(dim=1), y)
    Fix: Give it the outputs of the last layer.
    Ignore: Never seen on purpose.
    """

    @in_due_steps
    def on_loss_call(self, call: LossCall) -> None:
        takes_logits = call.name in ("cross_entropy", "binary_cross_entropy_with_logits")
        operation = last_operation(call.input) if takes_logits and call.has_gradients else ""
        if operation in ("Softmax", "Sigmoid"):
            self.find(
                call.name,
                f"Its input is the result of a {operation.lower()}, and it applies one itself.",
            )


class NllWithoutLogProbabilities(Check):
    """`nll_loss` or `kl_div` gets something else than log-probabilities.

    They take the logarithms of probabilities. Of logits or probabilities, the loss falls without
    limit or means nothing.

    Bug:
        loss = F.nll_loss(model(x), y)  # the model returns logits
    Fix: Apply `log_softmax` before, or use `cross_entropy`.
    Ignore: When `nll_loss` is used to pick elements of something else.
    """

    @in_due_steps
    def on_loss_call(self, call: LossCall) -> None:
        if not call.has_gradients:
            return
        if call.name == "kl_div" and last_operation(call.input) == "Softmax":
            self._find(call.name, "the result of a softmax")
        is_mean = call.options.get("reduction", "mean") == "mean"
        if call.name == "nll_loss" and is_mean and call.input.numel():
            sums = call.input.detach().float().logsumexp(_class_dimension(call))
            self.read([sums.max()], self._judge)

    def _judge(self, numbers: list[float]) -> None:
        if 0.05 < numbers[0] < math.inf:
            total = f"{math.exp(min(numbers[0], 700.0)):.3g}"
            self._find("nll_loss", f"no logarithm of probabilities: they would sum to {total}")

    def _find(self, name: str, what: str) -> None:
        self.find(name, f"Its input is {what}.")


class LabelsShiftedTwice(Check):
    """A language model learns the token after the next one.

    The labels were shifted in the data, and once more in the model or loss.

    Bug:
        model(input_ids=tokens[:, :-1], labels=tokens[:, 1:])  # the model shifts labels itself
    Fix: Shift in one place. Models of transformers want `labels=input_ids`.
    Ignore: When the model is to predict two tokens ahead.
    """

    def setup(self) -> None:
        self._tokens = EmbeddedTokens()
        self._shifts: list[Tensor] = []

    def on_module_call(self, call: ModuleCall) -> None:
        self._tokens.see(call)

    @in_due_steps
    def on_loss_call(self, call: LossCall) -> None:
        found = self._tokens.labelled(call)
        if found is not None:
            self._shifts += [is_shifted_by(count, *found) for count in range(4)]

    @in_due_steps
    def on_step_end(self) -> None:
        """Judge all losses of the step together: some models predict several tokens."""
        if self._shifts:
            self.read(self._shifts, self._judge)
        self._shifts = []
        self._tokens.forget()

    def _judge(self, numbers: list[float]) -> None:
        is_same, is_next, is_second, is_third = (any(numbers[i::4]) for i in range(4))
        if is_second and not (is_same or is_next or is_third):
            self.find("cross_entropy", "Every label is the input token two positions later.")


class LabelsNotShifted(Check):
    """A language model learns to repeat its input.

    It is causal, sees each token, and has this token as the label: copying is enough.

    Bug:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    Fix: Compare the output at each position with the next token: `logits[:, :-1]` and `tokens[:,
        1:]`.
    Ignore: When the model is to copy.
    """

    is_active = True

    def on_repeat(self, call: RepeatableCall) -> None:
        """Compare labels with tokens, and see that the model is causal and sees each token."""
        ids = token_ids(call.inputs)
        compared, middle = change_later(call, ids) if ids is not None else (None, 0)
        if ids is None or compared is None:
            return
        same, later = (is_any_shifted_by(count, call.targets, ids) for count in (0, 1))
        earlier, here = (
            compared.change(rows=r) for r in (slice(middle), slice(middle, middle + 1))
        )
        self.read([same & ~later, earlier, here], self._judge)

    def _judge(self, numbers: list[float]) -> None:
        is_same, earlier, here = numbers
        if is_same and here and not earlier:
            self.find(
                "cross_entropy",
                "Every label is the input token at the same position, and no output depends on a "
                "later token: the model learns to copy.",
            )


class EndTokenNeverTrained(Check):
    """The end token is also the padding token, and its labels are ignored.

    The model never learns to stop: it generates until the limit.

    Bug:
        tokenizer.pad_token = tokenizer.eos_token
        labels[labels == tokenizer.pad_token_id] = -100  # the real end, too
    Fix: Use a padding token of its own, or keep the label of the first end token of each sequence.
    Ignore: When the model is not to learn where a text ends.
    """

    def setup(self) -> None:
        self._tokens = EmbeddedTokens()
        self._seen = 0.0

    def on_module_call(self, call: ModuleCall) -> None:
        self._tokens.see(call)

    @in_due_steps
    def on_loss_call(self, call: LossCall) -> None:
        found = self._tokens.labelled(call)
        if found is None or found[0].shape[0] < 2:
            return
        target, ids = found
        width = min(target.shape[1], ids.shape[1] - 1)
        labels, later = target[:, :width], ids[:, 1 : width + 1]
        is_used = is_label_used(call).reshape(target.shape)[:, :width]
        end = ids[0, -1]
        trailing = (ids == end).flip(1).long().cumprod(1).sum(1)  # end tokens of each sequence
        last = (is_used * torch.arange(width, device=ids.device)).argmax(1)
        last_labels = labels.gather(1, last[:, None])
        # Padding comes up to the longest sequence, which has one; a template may close each text
        # with another token, which then ends generation.
        is_padded = (trailing.min() == 1) & (trailing.max() > 1) & is_used.any()
        is_next = ((later == labels) | ~is_used).all() & (last_labels != last_labels[0]).any()
        self.read([end, is_padded, is_next, (is_used & (later == end)).any()], self._judge)

    @in_due_steps
    def on_step_end(self) -> None:
        self._tokens.forget()

    def _judge(self, numbers: list[float]) -> None:
        end, is_padded, is_next, is_trained = numbers
        if is_next:
            self._seen += -math.inf if is_trained else is_padded
        if self._seen >= _STEPS_IN_A_ROW:
            self.find(
                "cross_entropy",
                f"Every sequence ends with the token {end:.0f}, which is also the padding, and all "
                f"its labels are ignored (in {self._seen:.0f} batches).",
            )


class FirstLossTooHigh(Check):
    """The first loss of a classifier is far above that of guessing.

    A new model knows nothing: its cross entropy is about ln C for C classes. A much larger one says
    that its last layer is initialised with weights that are too large, so that it is certain and
    wrong. The first steps only undo that.

    Bug:
        nn.init.normal_(head.weight, std=1.0)
    Fix: Initialise the last layer with small weights, such as a standard deviation of 0.02.
    Ignore: When the model was trained before, on other classes.
    """

    severity = "warning"

    def setup(self) -> None:
        self._layers: dict[Any, tuple[str, nn.Linear]] = {}  # by the node of the output

    def on_module_call(self, call: ModuleCall) -> None:
        is_first = self.view.step == 1 and self.view.steps_seen == 1 and call.has_gradients
        if is_first and type(call.module) is nn.Linear and isinstance(call.output, Tensor):
            self._layers[call.output.grad_fn] = (call.name, call.module)

    @in_due_steps
    def on_loss_call(self, call: LossCall) -> None:
        if not self._layers or not call.has_gradients:
            return
        nodes = [node for node in operations(call.input) if node in self._layers]
        name, layer = self._layers[nodes[0]] if nodes else ("", None)
        classes = call.input.shape[_class_dimension(call)]
        is_mean = call.options.get("reduction", "mean") == "mean"
        if layer is None or not has_class_labels(call) or classes < 3 or not is_mean:
            return
        if call.name == "cross_entropy":
            spread = layer.weight.detach().std() * math.sqrt(layer.in_features)
            self.read([call.result.detach(), spread], self._judge, name, classes)

    @in_due_steps
    def on_step_end(self) -> None:
        self._layers = {}

    def _judge(self, numbers: list[float], name: str, classes: int) -> None:
        loss, spread = numbers
        guessing = math.log(classes)
        if 3 * guessing + 3 < loss < math.inf and spread > 3:
            self.find(
                name,
                f"The first loss is {loss:.3g}, and that of guessing among {classes} classes "
                f"{guessing:.3g}. The weights of the last layer are {spread:.2g} times as large as "
                f"1/sqrt(inputs).",
            )


class EmbeddedTokens:
    """The tokens of the latest forward in a step, among all that embeddings got."""

    def __init__(self) -> None:
        self._ids: dict[nn.Embedding, Tensor] = {}  # in the order of their calls

    def see(self, call: ModuleCall) -> None:
        """Keep the input of an embedding."""
        module, ids = call.module, call.args[0] if call.args else None
        if not isinstance(module, nn.Embedding) or not isinstance(ids, Tensor):
            return
        if ids.ndim == 2 and ids.shape[1] >= 4 and call.has_gradients:
            self._ids.pop(module, None)
            self._ids[module] = ids

    def labelled(self, call: LossCall) -> tuple[Tensor, Tensor] | None:
        """Return the labels of tokens, and these tokens; None if none match.

        Tokens, not their positions, are embedded by as many vectors as there are classes, or by
        the largest embedding.
        """
        if not self._ids or not call.has_gradients or not has_class_labels(call):
            return None
        classes = call.input.shape[_class_dimension(call)]
        sizes = {module: module.num_embeddings for module in reversed(self._ids)}
        for module in sorted(sizes, key=lambda m: (sizes[m] != classes, -sizes[m])):
            target = aligned(call.target, self._ids[module])
            if target is not None:
                return target, self._ids[module]
        return None

    def forget(self) -> None:
        """Forget the tokens, after a step."""
        self._ids = {}
