"""Odd values for trees of JSON, and places in such trees to put them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

ODD: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["../x", "$", "t0", "0x7ff8", "model.safetensors", "float", "tensor"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=4) | st.sampled_from(["$", "v", "dtype", "shape", "size", "step"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)
KINDS = st.sampled_from(
    (
        *("int", "float", "complex", "str", "bytes", "tuple", "Size", "set", "frozenset", "dict"),
        *("OrderedDict", "Counter", "dtype", "device", "tensor", "numpy", "ndarray", "x"),
    )
)
TAGGED = st.fixed_dictionaries(
    {"$": KINDS, "v": ODD},
    optional={"dtype": ODD | st.sampled_from(["<i8", "|O"]), "shape": ODD},
)


def paths_in(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the places of all values in a tree."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    return [at, *(place for key, inner in items for place in paths_in(inner, (*at, key)))]


def put(tree: Any, place: tuple[Any, ...], value: Any) -> Any:
    """Replace the value at a place; return the tree."""
    if not place:
        return value
    inner = tree
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return tree
