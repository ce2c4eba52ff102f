"""Rule 8, no leaks: outputs depend on what they may depend on, and on nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hookline.hooks.lint.finding import Check, in_due_steps
from hookline.hooks.lint.repeated_call import RepeatableCall
from hookline.hooks.lint.token_labels import (
    aligned,
    are_targets,
    is_shifted_by,
    other_tokens,
    token_ids,
    token_inputs,
)
from hookline.hooks.lint.torch_watch import LoadedBatch
from hookline.hooks.lint.training_view import TrainingView
from hookline.tensors.nested import tensors_in

_REMOVED = 2  # columns of padding
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
    if first.shape != second.shape or not first.numel():
        return torch.full((), torch.nan)
    change = (first - second).abs().float()
    if where is not None:
        change = change.where(where.view(*where.shape, *[1] * (change.ndim - where.ndim)), 0)
    return change.max() / first.abs().max().clamp(min=1e-12)


class Comparison:
    """Outputs of a call before and after a change of its inputs.

    Attributes:
        before: the outputs for the inputs as they are.
        after: the outputs for the changed inputs.
    """

    def __init__(self, before: Tensor, again: Tensor | None, after: Tensor) -> None:
        self.before, self.after = before, after
        self._repeats = repeats(before, again)
        is_narrow = before.dtype in (torch.float16, torch.bfloat16)
        self._limit = 1e-2 if is_narrow else 1e-4

    def change(self, where: Tensor | None = None, rows: slice | None = None) -> Tensor:
        """Return the largest change, as a part of the largest output.

        It is 0 if it is within rounding, or if the model draws random numbers. `where` selects
        samples or tokens, `rows` a range of tokens.
        """
        rows = rows or slice(None)
        part = difference(
            self.before[:, rows] if self.before.ndim > 1 else self.before,
            self.after[:, rows] if self.after.ndim > 1 else self.after,
            where,
        )
        return part.where(self._repeats & (part > self._limit), 0)


def compare_tokens(call: RepeatableCall, ids: Tensor, changed: Tensor) -> Comparison | None:
    """Call the model with other tokens, and return the outputs of tokens, if it has such."""
    before = token_outputs(call.outputs, ids)
    if before is None:
        return None
    after = token_outputs(call.run_with(lambda x: changed if x is ids else x), ids)
    again = token_outputs(call.repeated_outputs, ids)
    return None if after is None else Comparison(before, again, after)


def change_later(call: RepeatableCall, ids: Tensor) -> tuple[Comparison | None, int]:
    """Change the tokens from the middle on; return the outputs, and where the middle is."""
    middle = ids.shape[1] // 2
    if "later" not in call.shared:
        changed = torch.cat([ids[:, :middle], other_tokens(ids)[:, middle:]], 1)
        call.shared["later"] = compare_tokens(call, ids, changed)
    return call.shared["later"], middle


def attention_names(view: TrainingView) -> list[str]:
    """Return the names of attention modules, or the class of the model if it has none."""
    found = [n for m, n in view.module_names.items() if "ttention" in type(m).__name__ and n]
    return found or [type(view.models[0]).__name__]


def repeats(outputs: Tensor, again: Tensor | None) -> Tensor:
    """Return whether equal calls with other random numbers have given the same."""
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
    Fix: Mask the attention: `is_causal=True`, or a mask whose upper triangle is excluded.
    Ignore: When the model may look ahead on purpose.
    """

    is_active = True

    def on_repeat(self, call: RepeatableCall) -> None:
        ids = token_ids(call.inputs)
        compared, middle = change_later(call, ids) if ids is not None else (None, 0)
        if ids is None or compared is None:
            return
        others = token_inputs(call.inputs)[1:]  # a translation may see its whole source
        targets = [aligned(target, ids) for target in call.targets]
        for target in (each for each in targets if each is not None):
            width = min(middle, target.shape[1])
            change = compared.change(target[:, :width] >= 0, slice(width))
            is_next = is_shifted_by(1, target, ids) & are_targets(others, call.targets)
            self.read([is_next, change], self._judge, middle)

    def _judge(self, numbers: list[float], middle: int) -> None:
        is_next, part = numbers
        if is_next and part > 0:
            self.find(
                attention_names(self.view),
                f"The labels are the next tokens, but changing tokens from position {middle} on "
                f"changed outputs before it, by {part:.2g} of the largest output.",
            )


class OutputDependsOnOtherSamples(Check):
    """In eval mode, the output for a sample depends on the other samples of its batch.

    A dimension is mixed up: attention, softmax or normalisation runs over the batch. Results then
    differ with the batch size, and with the order of the data.

    Bug:
        nn.TransformerEncoderLayer(64, 4)  # wants (tokens, samples, features)
        encoder(x)  # of shape (samples, tokens, features)
    Fix: Say `batch_first=True`, or look for a `dim=0`.
    Ignore: When the samples of a batch belong together.
    """

    is_active = True

    def setup(self) -> None:
        self._batch_size: int | None = None

    @in_due_steps
    def on_batch_loaded(self, loaded: LoadedBatch) -> None:
        self._batch_size = getattr(loaded.loader, "batch_size", None)

    def on_repeat(self, call: RepeatableCall) -> None:
        """Reverse the batch, and replace all samples by the first one."""
        first = next(iter(call.inputs.values()), None)
        if first is None or first.ndim < 2 or len(first) < 2:
            return
        samples = len(first)
        before = sample_outputs(call.outputs, samples)
        if before is None or not self._has_rows_of_samples(call, first, before):
            return
        again = sample_outputs(call.repeated_outputs, samples)
        repeated = call.run_with(lambda x: _rows(x, samples, [0] * samples))
        permuted = call.run_with(lambda x: _rows(x, samples, list(reversed(range(samples)))))
        alone, turned = sample_outputs(repeated, samples), sample_outputs(permuted, samples)
        if alone is not None and turned is not None:
            same = before[:1].expand(before.shape)
            pairs = [(before.flip(0), turned), (before[:1], alone[:1]), (same, before)]
            changes = [Comparison(x, x, y).change() for x, y in pairs]
            self.read([repeats(before, again), *changes], self._judge, samples)

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

    def _judge(self, numbers: list[float], samples: int) -> None:
        is_repeated, unlike, part, spread = numbers
        if is_repeated and part and spread and not unlike:
            self.find(
                type(self.view.models[0]).__name__,
                f"In eval mode, the output for a sample changed by {part:.2g} of the largest "
                f"output when the other {samples - 1} samples of its batch were replaced.",
            )


def _rows(tensor: Tensor, samples: int, rows: list[int]) -> Tensor:
    return tensor[rows] if tensor.ndim and len(tensor) == samples else tensor


class OutputDependsOnPadding(Check):
    """The padding at the end of sequences changes the outputs.

    A mask is missing, is not used, or has the wrong sign. Padding is recognised as one token at the
    end of the shorter sequences (which masks agree with), and some of it is removed.

    Bug:
        def forward(self, ids, attention_mask):
            return self.encoder(self.embed(ids))  # the mask is not passed on
    Fix: Give the mask to the attention. Masks of torch are True at padding, those of transformers
        1 at tokens.
    Ignore: When the last token does not mean padding.
    """

    is_active = True

    def on_repeat(self, call: RepeatableCall) -> None:
        """Remove columns at the end, and compare the sequences that have only padding there."""
        ids = token_ids(call.inputs)
        if ids is None or any(map(_sees_neighbours, self.view.model.modules())):
            return
        others = [x for x in call.inputs.values() if x.shape != ids.shape]
        # They may be indices into what is removed, which ends a process on an accelerator.
        is_risky = others and ids.device.type != "cpu"
        if is_risky or any(x.ndim > 1 for x in others) or ids.shape[1] <= 2 * _REMOVED:
            return
        is_end = ids == ids[:, -1].mode().values
        is_padding = is_end.flip(1).cumprod(1).flip(1).bool()
        lengths = (~is_padding).sum(1)
        is_between = (lengths > lengths.min()) & (lengths < lengths.max())
        alike = (is_end == is_padding).all() & is_between.any() & (lengths > 0).all()
        for mask in (x.bool() for name, x in call.inputs.items() if "mask" in name):
            alike &= (mask == is_padding).all() | (mask != is_padding).all()
        where = ~is_padding & is_padding[:, -_REMOVED:].all(1, keepdim=True)
        outputs = call.run_with(lambda x: x[:, :-_REMOVED] if x.shape == ids.shape else x)
        every, shorter = [call.outputs, call.repeated_outputs], ids[:, :-_REMOVED]
        before, again = (token_outputs(each, ids) for each in every)
        after = token_outputs(outputs, shorter)
        if before is None or again is None:
            before, again, after = (sample_outputs(each, len(ids)) for each in (*every, outputs))
            where = where.any(1)
        else:
            before, again, where = (x[:, :-_REMOVED] for x in (before, again, where))
        if before is not None and after is not None and before.shape == after.shape:
            change = Comparison(before, again, after).change(where)
            self.read([change, where.sum(), alike], self._judge)

    def _judge(self, numbers: list[float]) -> None:
        part, count, is_alike = numbers
        if count and is_alike and part > 0:
            self.find(
                type(self.view.models[0]).__name__,
                "Less padding changed outputs for what is no padding, by "
                f"{part:.2g} of the largest output ({count:.0f} were compared).",
            )


def _sees_neighbours(module: nn.Module) -> bool:
    """Return whether a module mixes tokens with their neighbours, so that padding is seen."""
    is_two_way = isinstance(module, nn.RNNBase) and module.bidirectional
    return is_two_way or isinstance(module, nn.modules.conv._ConvNd)


class PackedDocumentsAttendToEachOther(Check):
    """Documents that are packed into one sequence see each other.

    Position numbers restart, or documents are numbered, so each is meant to be seen alone. If a
    change of the first document changes the outputs of the next, the mask of documents is missing.

    Bug:
        model(ids, position_ids=restarting)  # attention is causal over the whole sequence
    Fix: Use attention with a mask by document (block-diagonal), or its variable-length form.
    Ignore: When documents are meant to see those before them.
    """

    is_active = True

    def on_repeat(self, call: RepeatableCall) -> None:
        ids = token_ids(call.inputs)
        documents = None if ids is None else _documents(call.inputs, ids)
        if ids is None or documents is None:
            return
        name, number = documents
        is_first = number == number[:, :1]
        changed = torch.where(is_first, other_tokens(ids), ids)
        compared = compare_tokens(call, ids, changed)
        if compared is not None:
            self.read([compared.change(~is_first), (~is_first).sum()], self._judge, name)

    def _judge(self, numbers: list[float], name: str) -> None:
        part, count = numbers
        if count and part > 0:
            self.find(
                [name, *attention_names(self.view)],
                f"Changing the first document of each sequence changed outputs of the {count:.0f} "
                f"tokens of later documents, by {part:.2g} of the largest output.",
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
