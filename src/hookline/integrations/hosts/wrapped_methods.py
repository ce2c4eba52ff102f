"""WrappedMethods: methods of a host's objects that are replaced while hooks are attached."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

__all__ = ["WrappedMethods"]


class WrappedMethods:
    """Methods that are replaced on single objects, until they are put back.

        wrapped = WrappedMethods()
        wrapped.wrap(trainer, "train", self._train)  # gets `train`, then its arguments
        wrapped.restore()

    Several sessions may wrap the same method, and put it back in any order. What a user had set on
    the object is put back, too. A copy or pickle of the object has the method that was wrapped.
    """

    def __init__(self) -> None:
        self._wrappers: list[tuple[Any, str, _Wrapper]] = []

    def wrap(
        self,
        target: Any,
        name: str,
        wrapper: Callable[..., Any],
        on_copy: Callable[[], None] | None = None,
    ) -> None:
        """Replace a method on this object only; `wrapper` gets the method and its arguments.

        `on_copy` is called when the object is copied or pickled.
        """
        own = vars(target)
        replacement = _Wrapper(wrapper, getattr(target, name))
        replacement.hides_own, replacement.on_copy = name in own, on_copy
        own[name] = replacement
        self._wrappers.append((target, name, replacement))

    def restore(self) -> None:
        """Put the methods back, as far as nobody else has wrapped them since."""
        for target, name, replacement in self._wrappers:
            replacement.is_active = False
            own = vars(target)
            while isinstance(top := own.get(name), _Wrapper) and not top.is_active:
                if top.hides_own:
                    own[name] = top.args[0]
                else:
                    del own[name]
        self._wrappers.clear()


class _Wrapper(functools.partial[Any]):
    """A wrapper that is called with the method it replaces.

    Attributes:
        is_active: whether it was not put back.
        hides_own: whether the object had this method as an attribute of its own.
        on_copy: called when it is copied or pickled.
    """

    is_active = True
    hides_own = False
    on_copy: Callable[[], None] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._own_method(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _return_method, (self._own_method(),)

    def _own_method(self) -> Any:
        if self.on_copy is not None:
            self.on_copy()
        return self.args[0]


def _return_method(method: Any) -> Any:
    """Return what a pickled wrapper is replaced by."""
    return method
