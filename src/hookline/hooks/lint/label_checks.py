"""Rule 9, labels: they have the shape, the position and the range that the loss expects."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from hookline.hooks.lint.finding import Check
from hookline.hooks.lint.token_labels import aligned, is_shifted_by
from hookline.hooks.lint.torch_watch import LossCall, ModuleCall
from hookline.hooks.lint.training_view import TrainingView

_ELEMENTWISE = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
_STEPS_IN_A_ROW = 3
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

    Fix:
        Give both the same shape: `model(x).squeeze(1)`, or `y.unsqueeze(1)`.

    Ignore:
        When all pairs are meant to be compared.
    """

    id = "target-broadcast"
    rule = 9

    def __init__(self, report: Any) -> None:
        super().__init__(report)
        self._output: Any = None

    def on_loss_call(self, view: TrainingView, call: LossCall) -> None:
        """Compare the shapes."""
        if call.name in _ELEMENTWISE and call.has_gradients:
            first, second = call.input.shape, call.target.shape
            if len(first) != len(second) and _is_outer(first, second):
                self._find(view, call.name, first, second)

    def on_after_forward(self, view: TrainingView, outputs: Any) -> None:
        """Keep the operation that has computed the output."""
        is_column = isinstance(outputs, Tensor) and outputs.ndim == 2 and outputs.shape[1] == 1
        self._output = outputs.grad_fn if is_column and view.is_due else None

    def on_before_backward(self, view: TrainingView, loss: Any) -> None:
        """Look for `((output - labels) ** 2).mean()`, where no loss function is called."""
        output, self._output = self._output, None
        node = getattr(loss, "grad_fn", None)
        for names in (("MeanBackward0", "SumBackward0"), ("PowBackward0", "AbsBackward0")):
            if output is None or node is None or node.name() not in names:
                return
            node = node.next_functions[0][0]
        if node is None or node.name() != "SubBackward0":
            return
        operands = [function for function, _ in node.next_functions]
        if output in operands and None in operands:
            rows = output._input_metadata[0].shape[0]  # noqa: SLF001
            shape = node._input_metadata[0].shape  # noqa: SLF001
            if rows > 1 and tuple(shape) == (rows, rows):
                self._find(view, "the difference in the loss", (rows, 1), (rows,))

    def _find(self, view: TrainingView, subject: str, first: Any, second: Any) -> None:
        self.find(
            view,
            subject,
            f"An output of shape {tuple(first)} is compared with labels of shape {tuple(second)}: "
            f"both are broadcast, so that every output meets every label.",
            "Give both the same shape, with squeeze(1) of the output or unsqueeze(1) of the "
            "labels.",
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

    Fix:
        Look at the labels of a batch where they are masked.

    Ignore:
        When batches without a label are expected.
    """

    id = "all-labels-ignored"
    rule = 9

    def __init__(self, report: Any) -> None:
        super().__init__(report)
        self._used: list[Tensor] = []
        self._count = 0
        self._in_a_row = 0

    def on_loss_call(self, view: TrainingView, call: LossCall) -> None:
        """Count the labels that are used."""
        if call.has_gradients and view.is_due and has_class_labels(call):
            self._used.append(is_label_used(call).sum())
            self._count += call.target.numel()

    def on_step_end(self, view: TrainingView) -> None:
        """Judge the labels of the step together."""
        if self._used:
            view.read(self._used, self._judge, view, self._count)
        self._used, self._count = [], 0

    def _judge(self, used: list[float], view: TrainingView, count: int) -> None:
        self._in_a_row = 0 if any(used) or not count else self._in_a_row + 1
        if self._in_a_row == 2:
            self.find(
                view,
                "cross_entropy",
                f"All {count} labels were ignored, in two steps in a row.",
                "Look at the labels of a batch where they are masked with ignore_index.",
            )


class ProbabilitiesIntoCrossEntropy(Check):
    """`cross_entropy` gets probabilities instead of logits.

    It applies a softmax itself. A second one bounds the differences between classes to 1, so that
    the loss can hardly fall and gradients are tiny.

    Bug:
        loss = F.cross_entropy(model(x).softmax(dim=1), y)

    Fix:
        Give it the outputs of the last layer.

    Ignore:
        Never seen on purpose.
    """

    id = "probabilities-into-cross-entropy"
    rule = 9

    def __init__(self, report: Any) -> None:
        super().__init__(report)
        self._in_a_row = 0

    def on_loss_call(self, view: TrainingView, call: LossCall) -> None:
        """Look at what has computed the input, and at its rows."""
        if call.name != "cross_entropy" or not call.has_gradients or not view.is_due:
            return
        operation = last_operation(call.input)
        dim = _class_dimension(call)
        if operation == "LogSoftmax" or call.input.shape[dim] < 2 or not call.input.numel():
            return
        values = call.input.detach()
        away = (values.sum(dim, dtype=torch.float32) - 1).abs().max()
        view.read([values.min(), values.max(), away], self._judge, view, operation)

    def _judge(self, numbers: list[float], view: TrainingView, operation: str) -> None:
        low, high, away = numbers
        is_distribution = low >= 0 and away < 1e-2
        self._in_a_row = self._in_a_row + 1 if is_distribution else 0
        is_known = operation in ("Softmax", "Sigmoid") and low >= 0 and high <= 1
        if is_known or self._in_a_row >= _STEPS_IN_A_ROW:
            how = f"a {operation.lower()}" if is_known else "values that are not negative, sum 1"
            self.find(
                view,
                "cross_entropy",
                f"Its input is the result of {how} (from {low:.3g} to {high:.3g}), and it applies "
                f"a softmax itself.",
                "Give cross_entropy the logits: remove the softmax or sigmoid before it.",
            )


class NllWithoutLogProbabilities(Check):
    """`nll_loss` or `kl_div` gets something else than log-probabilities.

    They take the logarithms of probabilities. Of logits or probabilities, the loss falls without
    limit or means nothing.

    Bug:
        loss = F.nll_loss(model(x), y)  # the model returns logits

    Fix:
        Apply `log_softmax` before, or use `cross_entropy`.

    Ignore:
        When `nll_loss` is used to pick elements of something else.
    """

    id = "nll-without-log-probabilities"
    rule = 9

    def on_loss_call(self, view: TrainingView, call: LossCall) -> None:
        """Add the probabilities of each row."""
        if not call.has_gradients or not view.is_due:
            return
        if call.name == "kl_div" and last_operation(call.input) == "Softmax":
            self._find(view, call.name, "the result of a softmax")
        is_mean = call.options.get("reduction", "mean") == "mean"
        if call.name == "nll_loss" and is_mean and call.input.numel():
            sums = call.input.detach().float().logsumexp(_class_dimension(call))
            view.read([sums.max()], self._judge, view)

    def _judge(self, numbers: list[float], view: TrainingView) -> None:
        if 0.05 < numbers[0] < math.inf:
            total = f"{math.exp(min(numbers[0], 700.0)):.3g}"
            self._find(
                view, "nll_loss", f"no logarithm of probabilities: they would sum to {total}"
            )

    def _find(self, view: TrainingView, name: str, what: str) -> None:
        self.find(
            view,
            name,
            f"Its input is {what}.",
            "Give it log-probabilities: log_softmax of the logits (for nll_loss, cross_entropy of "
            "the logits is the same).",
        )


class SigmoidBeforeBceWithLogits(Check):
    """`binary_cross_entropy_with_logits` gets the result of a sigmoid.

    It applies a sigmoid itself. With two, no output is below 0.5.

    Bug:
        loss = F.binary_cross_entropy_with_logits(torch.sigmoid(model(x)), y)

    Fix:
        Remove the sigmoid, or use `binary_cross_entropy`.

    Ignore:
        Never seen on purpose.
    """

    id = "sigmoid-before-bce-with-logits"
    rule = 9

    def on_loss_call(self, view: TrainingView, call: LossCall) -> None:
        """Look at what has computed the input."""
        if call.name == "binary_cross_entropy_with_logits" and call.has_gradients and view.is_due:
            operation = last_operation(call.input)
            if operation in ("Sigmoid", "Softmax"):
                self.find(
                    view,
                    call.name,
                    f"Its input is the result of a {operation.lower()}, and it applies a sigmoid "
                    f"itself.",
                    f"Remove the {operation.lower()} before the loss, or use binary_cross_entropy.",
                )


class CrossEntropyOfOneClass(Check):
    """`cross_entropy` gets one logit per sample.

    The softmax of one logit is 1: the loss is 0 whatever the model says, and so is the gradient.

    Bug:
        head = nn.Linear(64, 1)
        loss = F.cross_entropy(head(x), y)

    Fix:
        Use `binary_cross_entropy_with_logits`, or one output per class.

    Ignore:
        Never seen on purpose.
    """

    id = "cross-entropy-of-one-class"
    rule = 9

    def on_loss_call(self, view: TrainingView, call: LossCall) -> None:
        """Look at the number of classes."""
        shape = call.input.shape
        if call.name != "cross_entropy" or not call.has_gradients or len(shape) < 2:
            return
        if shape[1] == 1 and call.target.numel() > 1:
            self.find(
                view,
                "cross_entropy",
                f"Its input has the shape {tuple(shape)}: with one class the loss is 0 for every "
                f"output.",
                "Use binary_cross_entropy_with_logits, or a last layer with one output per class.",
            )


class LabelsShiftedTwice(Check):
    """A language model learns the token after the next one.

    The labels were shifted in the data, and once more in the model or loss.

    Bug:
        model(input_ids=tokens[:, :-1], labels=tokens[:, 1:])  # the model shifts labels itself

    Fix:
        Shift in one place. Models of transformers want `labels=input_ids`.

    Ignore:
        When the model is to predict two tokens ahead.
    """

    id = "labels-shifted-twice"
    rule = 9

    def __init__(self, report: Any) -> None:
        super().__init__(report)
        self._tokens = EmbeddedTokens()
        self._shifts: list[Tensor] = []

    def on_module_call(self, view: TrainingView, call: ModuleCall) -> None:
        """Keep the tokens of the latest forward."""
        self._tokens.see(call)

    def on_loss_call(self, view: TrainingView, call: LossCall) -> None:
        """Compare the labels with the tokens."""
        found = self._tokens.labelled(call)
        if found is not None:
            self._shifts += [is_shifted_by(count, *found) for count in range(4)]

    def on_step_end(self, view: TrainingView) -> None:
        """Judge all losses of the step together: some models predict several tokens."""
        if self._shifts:
            view.read(self._shifts, self._judge, view)
        self._shifts = []
        self._tokens.forget()

    def _judge(self, numbers: list[float], view: TrainingView) -> None:
        is_same, is_next, is_second, is_third = (any(numbers[i::4]) for i in range(4))
        if is_second and not (is_same or is_next or is_third):
            self.find(
                view,
                "cross_entropy",
                "Every label is the input token two positions later.",
                "Shift the labels in one place only: in the data, or in the model.",
            )


class EndTokenNeverTrained(Check):
    """The end token is also the padding token, and its labels are ignored.

    The model never learns to stop: it generates until the limit.

    Bug:
        tokenizer.pad_token = tokenizer.eos_token
        labels[labels == tokenizer.pad_token_id] = -100  # the real end, too

    Fix:
        Use a padding token of its own, or keep the label of the first end token of each sequence.

    Ignore:
        When the model is not to learn where a text ends.
    """

    id = "end-token-never-trained"
    rule = 9

    def __init__(self, report: Any) -> None:
        super().__init__(report)
        self._tokens = EmbeddedTokens()
        self._seen = 0
        self._ends: set[float] = set()

    def on_train_start(self, view: TrainingView) -> None:
        """Note the end token, where the model has one."""
        for model in view.models:
            end = getattr(getattr(model, "config", None), "eos_token_id", None)
            self._ends.update(end if isinstance(end, list) else [] if end is None else [end])

    def on_module_call(self, view: TrainingView, call: ModuleCall) -> None:
        """Keep the tokens of the latest forward."""
        self._tokens.see(call)

    def on_loss_call(self, view: TrainingView, call: LossCall) -> None:
        """Count the tokens at the ends of sequences, and their labels."""
        found = self._tokens.labelled(call)
        if found is None or found[0].shape[0] < 2:
            return
        target, ids = found
        width = min(target.shape[1], ids.shape[1] - 1)
        labels, later = target[:, :width], ids[:, 1 : width + 1]
        is_used = is_label_used(call).reshape(target.shape)[:, :width]
        end = ids[0, -1]
        is_end = ids == end
        trailing = is_end.flip(1).long().cumprod(1).sum(1)
        last = (is_used * torch.arange(width, device=ids.device)).argmax(1)
        last_labels = labels.gather(1, last[:, None])
        view.read(
            [
                end,
                (ids[:, -1] == end).all() & is_used.any() & (trailing.max() > 1),
                ((later == labels) | ~is_used).all(),
                (is_used & (later == end)).any(),
                trailing.min(),
                (last_labels == last_labels[0]).all(),
            ],
            self._judge,
            view,
        )

    def on_step_end(self, view: TrainingView) -> None:
        """Forget the tokens."""
        self._tokens.forget()

    def _judge(self, numbers: list[float], view: TrainingView) -> None:
        end, is_padded, is_next, is_trained, shortest, has_other_end = numbers
        if not is_next or has_other_end:
            return
        if is_trained:
            self._seen = -math.inf  # type: ignore[assignment]
        is_known = end in self._ends
        if is_padded and (shortest == 1 or is_known):
            self._seen += 1
        if self._seen >= _STEPS_IN_A_ROW:
            self.find(
                view,
                "cross_entropy",
                f"Every sequence ends with the token {end:.0f}, which is also the padding, and all "
                f"its labels are ignored (in {self._seen} batches).",
                "Use another token for padding, or keep the label of the first end token.",
            )


class FirstLossTooHigh(Check):
    """The first loss of a classifier is far above that of guessing.

    A new model knows nothing: its cross entropy is about ln C for C classes. A much larger one says
    that its last layer is initialised with weights that are too large, so that it is certain and
    wrong. The first steps only undo that.

    Bug:
        nn.init.normal_(head.weight, std=1.0)

    Fix:
        Initialise the last layer with small weights, such as a standard deviation of 0.02.

    Ignore:
        When the model was trained before, on other classes.
    """

    id = "first-loss-too-high"
    rule = 9
    severity = "warning"

    def __init__(self, report: Any) -> None:
        super().__init__(report)
        self._layers: dict[Any, tuple[str, nn.Linear]] = {}  # by the node of the output

    def on_module_call(self, view: TrainingView, call: ModuleCall) -> None:
        """Note the linear layers of the first step."""
        is_first = view.step == 1 and view.steps_seen == 1 and call.has_gradients
        if is_first and type(call.module) is nn.Linear and isinstance(call.output, Tensor):
            self._layers[call.output.grad_fn] = (call.name, call.module)

    def on_loss_call(self, view: TrainingView, call: LossCall) -> None:
        """Compare the loss with that of guessing, if a linear layer gave the logits."""
        if not self._layers or not call.has_gradients:
            return
        nodes = [node for node in operations(call.input) if node in self._layers]
        name, layer = self._layers[nodes[0]] if nodes else ("", None)
        classes = call.input.shape[_class_dimension(call)]
        is_mean = call.options.get("reduction", "mean") == "mean"
        if layer is None or not has_class_labels(call) or classes < 3 or not is_mean:
            return
        parameters = view.model.named_parameters(remove_duplicate=False)
        uses = sum(parameter is layer.weight for _, parameter in parameters)
        if call.name == "cross_entropy" and uses == 1:
            spread = layer.weight.detach().std() * math.sqrt(layer.in_features)
            view.read([call.result.detach(), spread], self._judge, view, name, classes)

    def on_step_end(self, view: TrainingView) -> None:
        """Forget the layers."""
        self._layers = {}

    def _judge(self, numbers: list[float], view: TrainingView, name: str, classes: int) -> None:
        loss, spread = numbers
        guessing = math.log(classes)
        if 3 * guessing + 3 < loss < math.inf and spread > 3:
            self.find(
                view,
                name,
                f"The first loss is {loss:.3g}, and that of guessing among {classes} classes "
                f"{guessing:.3g}. The weights of the last layer are {spread:.2g} times as large as "
                f"1/sqrt(inputs).",
                "Initialise the last layer with smaller weights, and look at what initialises it.",
            )


class EmbeddedTokens:
    """The tokens of the latest forward in a step: what the largest embedding got."""

    def __init__(self) -> None:
        self._ids: Tensor | None = None
        self._size = 0

    def see(self, call: ModuleCall) -> None:
        """Keep the input of an embedding."""
        module, ids = call.module, call.args[0] if call.args else None
        if not isinstance(module, nn.Embedding) or not isinstance(ids, Tensor):
            return
        is_tokens = ids.ndim == 2 and ids.shape[1] >= 4 and call.has_gradients
        if is_tokens and module.num_embeddings >= self._size:
            self._ids, self._size = ids, module.num_embeddings

    def labelled(self, call: LossCall) -> tuple[Tensor, Tensor] | None:
        """Return the labels of these tokens, and the tokens; None if they do not match."""
        if self._ids is None or not call.has_gradients or not has_class_labels(call):
            return None
        target = aligned(call.target, self._ids)
        return None if target is None else (target, self._ids)

    def forget(self) -> None:
        """Forget the tokens, after a step."""
        self._ids, self._size = None, 0


LABEL_CHECKS = (
    TargetBroadcast,
    AllLabelsIgnored,
    ProbabilitiesIntoCrossEntropy,
    NllWithoutLogProbabilities,
    SigmoidBeforeBceWithLogits,
    CrossEntropyOfOneClass,
    LabelsShiftedTwice,
    EndTokenNeverTrained,
    FirstLossTooHigh,
)
