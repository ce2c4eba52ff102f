"""Reaching what other libraries do not show: methods that are replaced, frames that are read.

Functions and methods are replaced while hooks are attached, and put back afterwards.
"""

from __future__ import annotations

import copy
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, Generic, TypeVar

T = TypeVar("T")


_patches: list[SharedPatch[Any]] = []  # they are few, and made once


class SharedPatch(Generic[T]):
    """Functions that are replaced while somebody listens, and put back when nobody does.

    A listener that is collected without having left does not listen any more. Reading needs no
    lock: the listeners are replaced as a whole.

    Args:
        targets: returns the objects and names of the attributes to replace for some listeners.
        replace: returns what a function is replaced by.
    """

    def __init__(
        self,
        targets: Callable[[Iterable[T]], Iterable[tuple[Any, str]]],
        replace: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        self._targets, self._replace = targets, replace
        self._lock = threading.RLock()  # a listener may be collected at any time
        self._references: tuple[weakref.ref[T], ...] = ()
        _patches.append(self)
        self._replaced: dict[tuple[int, str], tuple[Any, Any, Any]] = {}  # target, before, now

    def __iter__(self) -> Iterator[T]:
        for reference in self._references:
            if (listener := reference()) is not None:
                yield listener

    def __len__(self) -> int:
        return len(self._references)

    def add(self, listener: T) -> None:
        """Let somebody listen; once, also if this is called again."""
        with self._lock:
            if not any(other is listener for other in self):
                self._references = (*self._references, weakref.ref(listener, self._drop))
                self._change()

    def remove(self, listener: T) -> None:
        """Let somebody listen no more."""
        for reference in self._references:
            if reference() is listener:
                self._drop(reference)

    def put_back(self) -> None:
        """Put back what nobody needs any more, if nobody else has replaced it."""
        if not self._references and self._replaced:
            with self._lock:
                self._change()

    def _drop(self, reference: weakref.ref[T]) -> None:
        with self._lock:
            self._references = tuple(one for one in self._references if one is not reference)
            self._change()
        for other in _patches:  # that could not put back what this one had replaced since
            other.put_back()

    def _change(self) -> None:
        """Replace what the listeners need; put back the rest, unless others have replaced it.

        What others have replaced is put back when they have put back theirs.
        """
        targets = self._targets(self) if self._references else ()
        wanted = {(id(target), name): target for target, name in targets}
        for key in wanted.keys() - self._replaced.keys():
            original = getattr(wanted[key], key[1])
            self._replaced[key] = wanted[key], original, self._replace(original)
            setattr(wanted[key], key[1], self._replaced[key][2])
        for key in self._replaced.keys() - wanted.keys():
            target, original, replacement = self._replaced[key]
            if getattr(target, key[1], None) is replacement:
                setattr(target, key[1], original)
                del self._replaced[key]


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


def find_wrapper(target: Any, name: str) -> Callable[..., Any] | None:
    """Return the latest wrapper of a method, which takes what to call first; None without one."""
    own = vars(target).get(name)
    return own.func if isinstance(own, _Wrapper) else None


def _return_method(method: Any) -> Any:
    """Return what a pickled wrapper is replaced by."""
    return method


def calling_frames() -> Iterator[FrameType]:
    """Yield the frames of this thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def find_frame(function: Any) -> FrameType | None:
    """Return the frame of a function that is running in this thread; None if it is not."""
    return next((each for each in calling_frames() if each.f_code is function.__code__), None)
