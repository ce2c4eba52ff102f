"""Rule 6, ties stay ties: a weight that two modules share stays one tensor."""

from __future__ import annotations

from torch import nn

from hookline.hooks.lint.finding import Check, in_due_steps
from hookline.hooks.lint.torch_watch import Place, tied_places
from hookline.hooks.lint.training_view import ParameterPlace, own_parameter
from hookline.tensors.sharded import stored_values

_MIN_ELEMENTS = 64  # fewer may be equal by chance


class WeightsUntied(Check):
    """Two modules that shared a weight have one each.

    An output layer is often tied to the embedding. Loading with `assign=True`, sharding each module
    or `to_empty` can make two tensors of it, which get different gradients and drift apart.

    Bug:
        model.head.weight = model.embedding.weight
        model.load_state_dict(state, assign=True)
    Fix: Tie the weights again after loading or wrapping, before the optimizer is made.
    Ignore: When the output layer is only initialised from the embedding.
    """

    def setup(self) -> None:
        self._tied: list[tuple[Place, Place]] = []

    def on_ties_emptied(self, tied: list[tuple[Place, Place]]) -> None:
        self._tied += tied

    def on_train_start(self) -> None:
        """Look for equal weights of an embedding and an output layer; note what is tied."""
        self._tied += tied_places(self.view.model)
        places = [place for place in self.view.parameters if place.attribute == "weight"]
        embeddings = [place for place in places if isinstance(place.module, nn.Embedding)]
        outputs = [place for place in places if isinstance(place.module, nn.Linear)]
        for embedding in embeddings:
            for output in outputs:
                if _may_be_tied(embedding, output):
                    one, two = stored_values(embedding.tensor), stored_values(output.tensor)
                    differs, varies = one.ne(two).any(), one.ne(one.flatten()[0]).any()
                    self.read([differs, varies], self._judge, embedding.name, output.name)

    def _judge(self, numbers: list[float], one: str, two: str) -> None:
        differs, varies = numbers
        if varies and not differs:
            self.find(
                [two, one],
                f"'{one}' and '{two}' began with the same values, but are two tensors that are "
                "trained apart.",
            )

    @in_due_steps
    def on_step_end(self) -> None:
        names = self.view.module_names if self._tied else {}
        for (one, attribute), (two, other) in self._tied:
            first, second = own_parameter(one, attribute), own_parameter(two, other)
            if None not in (first, second) and first is not second and one in names:
                shown = f"{names.get(two)}.{other}"
                self.find(
                    [shown, f"{names[one]}.{attribute}"],
                    f"'{shown}' was shared by two modules, and is not any more.",
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
