"""Rule 6, ties stay ties: a weight that two modules share stays one tensor."""

from __future__ import annotations

from typing import Any

from torch import nn

from hookline.hooks.lint.finding import Check
from hookline.hooks.lint.training_view import ParameterPlace, TrainingView
from hookline.tensors.sharded import stored_values

_MIN_ELEMENTS = 64  # fewer may be equal by chance


class WeightsUntied(Check):
    """Two modules that shared a weight have one each.

    An output layer is often tied to the embedding: both are one tensor. Loading with `assign=True`,
    wrapping or sharding each module, or `to_empty` can make two tensors of it. They start with the
    same values, get different gradients and drift apart; the model has more parameters than it
    should, and a checkpoint keeps only one of them.

    Bug:
        model.head.weight = model.embedding.weight
        model.load_state_dict(state, assign=True)

    Fix:
        Tie the weights again after loading or wrapping, before the optimizer is made.

    Ignore:
        When the output layer is only initialised from the embedding.
    """

    id = "weights-untied"
    rule = 6

    def __init__(self, report: Any) -> None:
        super().__init__(report)
        self._tied: dict[str, tuple[nn.Module, str, nn.Module, str]] = {}

    def on_train_start(self, view: TrainingView) -> None:
        """Look for equal weights of an embedding and an output layer; note what is tied."""
        self._tied = _find_ties(view)
        places = [place for place in view.parameters if place.attribute == "weight"]
        embeddings = [place for place in places if isinstance(place.module, nn.Embedding)]
        outputs = [place for place in places if isinstance(place.module, nn.Linear)]
        for embedding in embeddings:
            for output in outputs:
                if _may_be_tied(embedding, output):
                    one, two = stored_values(embedding.tensor), stored_values(output.tensor)
                    differs, varies = one.ne(two).any(), one.ne(one.flatten()[0]).any()
                    view.read([differs, varies], self._judge, view, embedding.name, output.name)

    def _judge(self, numbers: list[float], view: TrainingView, one: str, two: str) -> None:
        differs, varies = numbers
        if varies and not differs:
            self.find(
                view,
                [two, one],
                f"'{one}' and '{two}' began with the same values, but are two tensors that are "
                "trained apart.",
                f"Tie them after loading or wrapping the model, before the optimizer is made: "
                f"give the module of '{two}' the parameter '{one}'.",
            )

    def on_step_end(self, view: TrainingView) -> None:
        """Compare the ties with those at the start."""
        if not view.is_due:
            return
        for name, (one, attribute, two, other) in self._tied.items():
            if getattr(one, attribute, None) is not getattr(two, other, None):
                self.find(
                    view,
                    name,
                    f"'{name}' was shared by two modules when training began, and is not any more.",
                    "Do not replace the parameter of one module during training; load values into "
                    "it instead (assign=False).",
                )


def _may_be_tied(one: ParameterPlace, two: ParameterPlace) -> bool:
    a, b = one.tensor, two.tensor
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and a.device == b.device
        and a.numel() >= _MIN_ELEMENTS
        and (a.requires_grad or b.requires_grad)
        and type(a) is type(b)
    )


def _find_ties(view: TrainingView) -> dict[str, tuple[nn.Module, str, nn.Module, str]]:
    """Return the parameters that two modules have, by name."""
    first: dict[int, tuple[nn.Module, str]] = {}
    found: dict[str, tuple[nn.Module, str, nn.Module, str]] = {}
    names = {id(place.tensor): place.name for place in view.parameters}
    for module in view.model.modules():
        for attribute, tensor in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(tensor) in names:
                if id(tensor) in first:
                    found[names[id(tensor)]] = (*first[id(tensor)], module, attribute)
                else:
                    first[id(tensor)] = (module, attribute)
    return found


TIE_CHECKS = (WeightsUntied,)
