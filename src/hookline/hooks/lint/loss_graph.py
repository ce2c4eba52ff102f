"""The autograd graph of a loss: the parameters that it reaches, and what lies before them."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class LossGraph:
    """The nodes from a loss to its leaves.

    Attributes:
        is_complete: whether all nodes are known, and none of them stands for a compiled graph.
        leaves: the tensors whose gradients backward computes, by `id`.
        nodes: all nodes; the inputs of a node come before it.
    """

    def __init__(self, loss: Tensor, limit: int = 5000) -> None:
        self.is_complete = True
        self.leaves: dict[int, Tensor] = {}
        self.nodes: list[Any] = []
        self._parents: dict[Any, list[Any]] = {}
        self._leaf_nodes: dict[int, Any] = {}
        self._walk(loss.grad_fn, limit)

    def _walk(self, root: Any, limit: int) -> None:
        seen: set[Any] = set()
        stack = [(root, False)] if root is not None else []
        while stack:
            node, is_done = stack.pop()
            if is_done:
                self.nodes.append(node)
                continue
            if node in seen:
                continue
            seen.add(node)
            stack.append((node, True))
            self._look_at(node)
            for child in inputs_of(node):
                self._parents.setdefault(child, []).append(node)
                stack.append((child, False))
            if len(seen) > limit:
                self.is_complete = False
                return

    def _look_at(self, node: Any) -> None:
        variable = getattr(node, "variable", None)
        if variable is not None and not node.next_functions:
            self.leaves[id(variable)] = variable
            self._leaf_nodes[id(variable)] = node
        if "Compiled" in node.name():
            self.is_complete = False

    def reached_after(self, trained: set[int]) -> set[int]:
        """Return the leaves that are used together with what was computed from others.

        A weight of the second layer is used together with the output of the first one. So is a
        bias with the weight of its own layer.
        """
        has_trained: dict[Any, bool] = {}
        for node in self.nodes:
            own = id(getattr(node, "variable", None)) in trained
            has_trained[node] = own or any(has_trained.get(c, False) for c in inputs_of(node))
        return {key for key, node in self._leaf_nodes.items() if self._is_after(node, has_trained)}

    def _is_after(self, node: Any, has_trained: dict[Any, bool]) -> bool:
        pending, seen = [node], {node}
        while pending:
            child = pending.pop()
            for parent in self._parents.get(child, ()):
                if len(parent.next_functions) > 1:
                    if any(has_trained[each] for each in inputs_of(parent) if each is not child):
                        return True
                elif parent not in seen:
                    seen.add(parent)
                    pending.append(parent)
        return False


def inputs_of(node: Any) -> list[Any]:
    """Return the nodes whose outputs a node has used."""
    return [child for child, _ in node.next_functions if child is not None]
