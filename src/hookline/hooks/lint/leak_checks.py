"""Rule 8, no leaks: outputs depend on what they may depend on, and on nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hookline.hooks.lint.finding import Check
from hookline.hooks.lint.repeated_call import RepeatableCall
from hookline.hooks.lint.token_labels import (
    aligned,
    are_targets,
    is_any_shifted_by,
    is_shifted_by,
    other_tokens,
    token_ids,
    token_inputs,
)
from hookline.hooks.lint.torch_watch import LoadedBatch
from hookline.hooks.lint.training_view import TrainingView
from hookline.tensors.nested import tensors_in

_DOCUMENT_NAMES = ("document_ids", "document_id", "doc_ids", "doc_id", "seq_idx", "sequence_ids")


def token_outputs(outputs: Any, ids: Tensor) -> Tensor | None:
    """Return the outputs for tokens as (samples, tokens, features), or None."""
    samples, tokens = ids.shape
    for tensor in tensors_in(outputs):
        if tensor.is_floating_point() and tensor.ndim == 3 and tensor.shape[:2] == ids.shape:
            return tensor
        if tensor.is_floating_point() and tensor.ndim == 2 and len(tensor) == samples * tokens:
            return tensor.reshape(samples, tokens, -1)
    return None


def sample_outputs(outputs: Any, samples: int) -> Tensor | None:
    """Return the outputs that have a row for each sample, or None."""
    for tensor in tensors_in(outputs):
        if tensor.is_floating_point() and tensor.ndim >= 1 and len(tensor) == samples:
            return tensor
    return None


def difference(first: Tensor, second: Tensor, where: Tensor | None = None) -> Tensor:
    """Return the largest difference, as a part of the largest value; `where` selects rows."""
    if first.shape != second.shape:
        return torch.full((), torch.nan)
    change = (first - second).abs().float()
    if where is not None:
        change = change.where(where.view(*where.shape, *[1] * (change.ndim - where.ndim)), 0)
    return change.max() / first.abs().max().clamp(min=1e-12)


def is_changed(part: float, outputs_dtype: torch.dtype) -> bool:
    """Return whether a difference is more than rounding; NaN is none."""
    return part > (1e-2 if outputs_dtype in (torch.float16, torch.bfloat16) else 1e-4)


def repeats(outputs: Tensor, again: Tensor | None) -> Tensor:
    """Return whether two equal calls have given the same."""
    if again is None or again.shape != outputs.shape:
        return torch.zeros((), dtype=torch.bool, device=outputs.device)
    return (outputs == again).all()


class OutputDependsOnLaterToken(Check):
    """A language model sees the tokens that it is to predict.

    Where labels are the inputs shifted by one, the output at a position may depend on the tokens up
    to it. If a later token changes it, the causal mask is missing or wrong: the loss falls quickly,
    and generated text is nonsense.

    Bug:
        F.scaled_dot_product_attention(q, k, v)  # is_causal=True is missing

    Fix:
        Mask the attention: `is_causal=True`, or a mask whose upper triangle is excluded.

    Ignore:
        When the model may look ahead on purpose.
    """

    id = "output-depends-on-later-token"
    rule = 8
    is_active = True

    def on_repeat(self, view: TrainingView, call: RepeatableCall) -> None:
        """Change the second half of the tokens and compare the outputs of the first."""
        ids = token_ids(call.inputs)
        found = None if ids is None else _change_later(call, ids)
        if ids is None or found is None:
            return
        before, after, middle = found
        others = token_inputs(call.inputs)[1:]  # a translation may see its whole source
        targets = [aligned(target, ids) for target in call.targets]
        for target in (each for each in targets if each is not None):
            width = min(middle, target.shape[1])
            has_label = target[:, :width] >= 0
            view.read(
                [
                    is_shifted_by(1, target, ids) & are_targets(others, call.targets),
                    repeats(before, token_outputs(call.repeated_outputs, ids)),
                    difference(before[:, :width], after[:, :width], has_label),
                ],
                self._judge,
                view,
                before.dtype,
                middle,
            )

    def _judge(
        self, numbers: list[float], view: TrainingView, dtype: torch.dtype, middle: int
    ) -> None:
        is_next, is_repeated, part = numbers
        if is_next and is_repeated and is_changed(part, dtype):
            self.find(
                view,
                "the model",
                f"Its labels are the next tokens, but changing tokens from position {middle} on "
                f"changed outputs before it, by {part:.2g} of the largest output.",
                "Mask the attention so that no position sees a later one (is_causal=True), and "
                "look for other mixing over time: convolutions, normalisation, pooling.",
            )


def _change_later(call: RepeatableCall, ids: Tensor) -> tuple[Tensor, Tensor, int] | None:
    """Return outputs before and after a change of the tokens from the middle on."""
    before = token_outputs(call.outputs, ids)
    if before is None:
        return None
    middle = ids.shape[1] // 2
    changed = torch.cat([ids[:, :middle], other_tokens(ids)[:, middle:]], 1)
    after = token_outputs(call.run_with(lambda x: changed if x is ids else x), ids)
    return None if after is None else (before, after, middle)


class LabelsNotShifted(Check):
    """A language model learns to repeat its input.

    It is causal, sees each token, and has this token as the label: copying is enough.

    Bug:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    Fix:
        Compare the output at each position with the next token: `logits[:, :-1]` and
        `tokens[:, 1:]`.

    Ignore:
        When the model is to copy.
    """

    id = "labels-not-shifted"
    rule = 9
    is_active = True

    def on_repeat(self, view: TrainingView, call: RepeatableCall) -> None:
        """Compare labels with tokens, and see that the model is causal and sees each token."""
        ids = token_ids(call.inputs)
        found = None if ids is None else _change_later(call, ids)
        if ids is None or found is None:
            return
        before, after, middle = found
        here = slice(middle, middle + 1)
        tensors = [
            is_any_shifted_by(0, call.targets, ids) & ~is_any_shifted_by(1, call.targets, ids),
            repeats(before, token_outputs(call.repeated_outputs, ids)),
            difference(before[:, :middle], after[:, :middle]),
            difference(before[:, here], after[:, here]),
        ]
        view.read(tensors, self._judge, view, before.dtype)

    def _judge(self, numbers: list[float], view: TrainingView, dtype: torch.dtype) -> None:
        is_same, is_repeated, earlier, here = numbers
        is_causal = not is_changed(earlier, dtype) and is_changed(here, dtype)
        if is_same and is_repeated and is_causal:
            self.find(
                view,
                "cross_entropy",
                "Every label is the input token at the same position, and no output depends on a "
                "later token: the model learns to copy.",
                "Shift the labels by one: compare logits[:, :-1] with tokens[:, 1:].",
            )


class OutputDependsOnOtherSamples(Check):
    """In eval mode, the output for a sample depends on the other samples of its batch.

    A dimension is mixed up: attention, softmax or normalisation runs over the batch. Results then
    differ with the batch size, and with the order of the data.

    Bug:
        nn.TransformerEncoderLayer(64, 4)  # wants (tokens, samples, features)
        encoder(x)  # of shape (samples, tokens, features)

    Fix:
        Say `batch_first=True`, or look for a `dim=0`.

    Ignore:
        When the samples of a batch belong together.
    """

    id = "output-depends-on-other-samples"
    rule = 8
    is_active = True

    def __init__(self, report: Any) -> None:
        super().__init__(report)
        self._batch_size: int | None = None

    def on_batch_loaded(self, view: TrainingView, loaded: LoadedBatch) -> None:
        """Note how many samples a loader puts together."""
        if view.is_due:
            self._batch_size = getattr(loaded.loader, "batch_size", None)

    def on_repeat(self, view: TrainingView, call: RepeatableCall) -> None:
        """Reverse the batch, and replace all samples by the first one."""
        first = next(iter(call.inputs.values()), None)
        if first is None or first.ndim < 2 or len(first) < 2:
            return
        samples = len(first)
        before = sample_outputs(call.outputs, samples)
        if before is None or not self._has_rows_of_samples(call, first, before):
            return
        repeated = call.run_with(lambda x: _rows(x, samples, [0] * samples))
        reversed_rows = list(reversed(range(samples)))
        permuted = call.run_with(lambda x: _rows(x, samples, reversed_rows))
        alone, turned = sample_outputs(repeated, samples), sample_outputs(permuted, samples)
        if alone is not None and turned is not None:
            tensors = [
                repeats(before, sample_outputs(call.repeated_outputs, samples)),
                difference(before.flip(0), turned),
                difference(before[:1], alone[:1]),
                difference(before[:1].expand(before.shape), before),
            ]
            view.read(tensors, self._judge, view, before.dtype, samples)

    def _has_rows_of_samples(self, call: RepeatableCall, first: Tensor, outputs: Tensor) -> bool:
        """Return whether the rows are samples for sure: not the nodes of a graph, or time."""
        samples = len(first)
        inputs = call.inputs.values()
        if any(x.ndim == 1 and len(x) == samples and not x.is_floating_point() for x in inputs):
            return False  # may say which graph a node belongs to
        if not any(len(target) == samples for target in call.targets if target.ndim):
            return False
        if self._batch_size == samples:
            return True
        is_tokens = not first.is_floating_point()
        return outputs.ndim <= 2 and (first.ndim >= 3 or is_tokens)

    def _judge(
        self, numbers: list[float], view: TrainingView, dtype: torch.dtype, samples: int
    ) -> None:
        is_repeated, unlike, part, spread = numbers
        is_permuted = not is_changed(unlike, dtype) and is_changed(spread, dtype)
        if is_repeated and is_permuted and is_changed(part, dtype):
            self.find(
                view,
                "the model",
                f"In eval mode, the output for a sample changed by {part:.2g} of the largest "
                f"output when the other {samples - 1} samples of its batch were replaced.",
                "Look for attention, softmax or normalisation over the batch dimension "
                "(batch_first, dim=0).",
            )


def _rows(tensor: Tensor, samples: int, rows: list[int]) -> Tensor:
    return tensor[rows] if tensor.ndim and len(tensor) == samples else tensor


class OutputDependsOnPadding(Check):
    """What is masked as padding changes the outputs.

    The mask is not used, has the wrong sign, or gets lost. The result then depends on how long the
    other sequences of a batch are.

    Bug:
        def forward(self, ids, attention_mask):
            return self.encoder(self.embed(ids))  # the mask is not given on

    Fix:
        Give the mask to the attention. `src_key_padding_mask` of torch is True at padding,
        `attention_mask` of transformers is 1 at tokens.

    Ignore:
        When the mask does not mean padding.
    """

    id = "output-depends-on-padding"
    rule = 8
    is_active = True

    def on_repeat(self, view: TrainingView, call: RepeatableCall) -> None:
        """Change the tokens that are masked."""
        ids = token_ids(call.inputs)
        mixes = (nn.modules.conv._ConvNd, nn.RNNBase)
        if ids is None or any(isinstance(module, mixes) for module in view.model.modules()):
            return  # neighbours of padding see it there, which is usual
        for name, mask in call.inputs.items():
            if "mask" in name and mask.shape == ids.shape:
                self._change(view, call, ids, name, mask)

    def _change(
        self, view: TrainingView, call: RepeatableCall, ids: Tensor, name: str, mask: Tensor
    ) -> None:
        is_padding = mask.bool() if "padding" in name else ~mask.bool()
        changed = torch.where(is_padding, other_tokens(ids), ids)
        outputs = call.run_with(lambda x: changed if x is ids else x)
        before, after = token_outputs(call.outputs, ids), token_outputs(outputs, ids)
        again, where = token_outputs(call.repeated_outputs, ids), ~is_padding
        if before is None:
            before, after = (sample_outputs(each, len(ids)) for each in (call.outputs, outputs))
            again, where = sample_outputs(call.repeated_outputs, len(ids)), where.any(1)
        if before is None or after is None:
            return
        tensors = [
            repeats(before, again),
            difference(before, after, where),
            is_padding.sum(),
            _is_like_padding(is_padding, ids),
        ]
        view.read(tensors, self._judge, view, before.dtype, name)

    def _judge(
        self, numbers: list[float], view: TrainingView, dtype: torch.dtype, name: str
    ) -> None:
        is_repeated, part, count, is_alike = numbers
        if is_repeated and count and is_alike and is_changed(part, dtype):
            self.find(
                view,
                name,
                f"Changing the {count:.0f} tokens that '{name}' masks changed outputs of other "
                f"tokens, by {part:.2g} of the largest output.",
                "Give the mask to the attention and the pooling, with the sign that they expect.",
            )


def _is_like_padding(is_padding: Tensor, ids: Tensor) -> Tensor:
    """Return whether this is one token, at one end of all sequences."""
    token = torch.where(is_padding, ids, -1).max()
    is_one_token = ((ids == token) | ~is_padding).all() & ((ids != token) & ~is_padding).any()
    steps = is_padding[:, 1:].int() - is_padding[:, :-1].int()
    return is_one_token & ((steps >= 0).all() | (steps <= 0).all())


class PackedDocumentsAttendToEachOther(Check):
    """Documents that are packed into one sequence see each other.

    Position numbers restart, or documents are numbered, so each is meant to be seen alone. If a
    change of the first document changes the outputs of the next, the mask of documents is missing.

    Bug:
        model(ids, position_ids=restarting)  # attention is causal over the whole sequence

    Fix:
        Use attention with a mask by document (block-diagonal), or its variable-length form.

    Ignore:
        When documents are meant to see those before them.
    """

    id = "packed-documents-attend-to-each-other"
    rule = 8
    is_active = True

    def on_repeat(self, view: TrainingView, call: RepeatableCall) -> None:
        """Change the first document of each sequence."""
        ids = token_ids(call.inputs)
        documents = None if ids is None else _documents(call.inputs, ids)
        before = None if ids is None else token_outputs(call.outputs, ids)
        if ids is None or documents is None or before is None:
            return
        name, number = documents
        is_first = number == number[:, :1]
        changed = torch.where(is_first, other_tokens(ids), ids)
        outputs = call.run_with(lambda x: changed if x is ids else x)
        after = token_outputs(outputs, ids)
        if after is not None:
            tensors = [
                repeats(before, token_outputs(call.repeated_outputs, ids)),
                difference(before, after, ~is_first),
                (~is_first).sum(),
            ]
            view.read(tensors, self._judge, view, before.dtype, name)

    def _judge(
        self, numbers: list[float], view: TrainingView, dtype: torch.dtype, name: str
    ) -> None:
        is_repeated, part, count = numbers
        if is_repeated and count and is_changed(part, dtype):
            self.find(
                view,
                name,
                f"Changing the first document of each sequence changed outputs of the {count:.0f} "
                f"tokens of later documents, by {part:.2g} of the largest output.",
                "Mask the attention by document, or use its variable-length form.",
            )


def _documents(inputs: dict[str, Tensor], ids: Tensor) -> tuple[str, Tensor] | None:
    """Return what tells documents apart, and the number of each token's document."""
    for name, tensor in inputs.items():
        if tensor.shape == ids.shape and not tensor.is_floating_point():
            if name in _DOCUMENT_NAMES:
                return name, tensor
            if name in ("position_ids", "positions"):
                return name, (tensor == 0).cumsum(1)
    return None


LEAK_CHECKS = (
    OutputDependsOnLaterToken,
    OutputDependsOnOtherSamples,
    OutputDependsOnPadding,
    PackedDocumentsAttendToEachOther,
    LabelsNotShifted,
)
