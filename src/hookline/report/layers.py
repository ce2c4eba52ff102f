"""Series of layers: `<group>/<layer>/<measure>`, such as `gradients/blocks.0.fc.weight/norm`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from hookline.report.sampling import SampledSeries

_OTHER_GROUPS = frozenset(
    ("train", "val", "eval", "lr", "momentum", "weight_decay", "time", "system", "profile", "ranks")
)
VANISHING, EXPLODING = 1e-7, 1e3  # norms, as GradientMonitor warns of them
VANISHING_SHARE, EXPLODING_SHARE = 1e-4, 1e4  # of the median layer, as gradient_flow marks them

Layers = dict[str, str]  # the series of each layer


def group_layers(names: Iterable[str]) -> dict[str, dict[str, Layers]]:
    """Return the series of several layers, by group, measure and layer, in their order."""
    groups: dict[str, dict[str, Layers]] = {}
    for name in names:
        group, *middle = name.split("/")
        if group in _OTHER_GROUPS:
            continue
        if group == "grad_norm" and middle:  # `grad_norm/<layer>`
            middle.append("norm")
        if len(middle) >= 2 and middle[0] != "total":  # that of all layers together
            layer, measure = "/".join(middle[:-1]), middle[-1]
            groups.setdefault(group, {}).setdefault(measure, {})[layer] = name
    several = {
        group: {measure: layers for measure, layers in measures.items() if len(layers) > 1}
        for group, measures in groups.items()
    }
    return {group: measures for group, measures in several.items() if measures}


def order_layers(layers: Layers, parameter_names: Sequence[str]) -> tuple[Layers, str]:
    """Return the series of layers in the model's order and `model`, if the order is known.

    Otherwise return them as they are, in the order of their first values, and `record`.
    """
    places: dict[str, int] = {}  # of parameters, and of the modules that have them
    for i, name in enumerate(map(str, parameter_names)):
        for end in (j for j, letter in enumerate(f"{name}.") if letter == "."):
            places.setdefault(name[:end], i)
    if not layers.keys() <= places.keys():
        return layers, "record"
    return {name: layers[name] for name in sorted(layers, key=places.__getitem__)}, "model"


def find_gradient_norms(groups: Mapping[str, Mapping[str, Layers]]) -> tuple[str, Layers] | None:
    """Return the group with the norms of gradients, and their series; None if there is none."""
    for group in ("gradients", "grad_norm"):
        if "norm" in groups.get(group, {}):
            return group, groups[group]["norm"]
    return None


def find_bad_gradients(
    layers: Layers, series: Mapping[str, SampledSeries]
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Return layers whose gradients vanish, explode, or are not finite: two norms, and a step.

    A layer's norm is the median of the last quarter of its finite values. It vanishes below 1e-7,
    or below 1e-4 of the median layer; it explodes above 1e3, or above 1e4 of the median layer. The
    step is the first one with a value that is not finite.
    """
    norms: dict[str, float] = {}
    for layer, name in layers.items():
        if means := series[name].means:
            norms[layer] = statistics.median(means[-max(1, len(means) // 4) :])
    typical = statistics.median(norms.values()) if norms else 0.0
    low = max(VANISHING, VANISHING_SHARE * typical)
    high = min(EXPLODING, EXPLODING_SHARE * typical) if typical else EXPLODING
    vanishing = {layer: norm for layer, norm in norms.items() if norm < low}
    exploding = {layer: norm for layer, norm in norms.items() if norm > high}
    first_steps = {
        layer: series[name].not_finite_steps[0]
        for layer, name in layers.items()
        if series[name].not_finite
    }
    return vanishing, exploding, first_steps
