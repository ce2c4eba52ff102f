"""Named values within a model's code, for probes to see and edit.

    x = hookline.tap(x, "attn.scores")

`tap` returns its argument. It does not know which model it is in, so each probe with taps notes
when its model's outermost call begins and ends, in each thread, and sees what is named in between.
A compiled model has nothing at a tap until a probe with taps is attached. Then all taps become
operators that check whether the probe is enabled, so that toggling does not recompile. Edits of
taps are not compiled: they raise an error there.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from hookline.arguments import check_name, show_value
from hookline.errors import ConfigError, ProbeError, listed, nearest
from hookline.probes import compiled
from hookline.probes.call import Site, is_recomputing
from hookline.tensors.name_patterns import matches_glob

if TYPE_CHECKING:
    from hookline.probes.attachment import Attachment

T = TypeVar("T")

_enabled = False  # whether any probe has taps: all that `tap` checks otherwise
_registered: tuple[weakref.ref[Taps], ...] = ()
"""In the order of their calls. Weak: a model is freed together with the probes on it."""
_LOCK = threading.RLock()  # reentrant: garbage collection may unregister at any time
_INSIDE = threading.local()  # `.now`: the taps of the models that are being called in this thread


def tap(x: T, name: str) -> T:
    """Name a value in a model's code, for probes with `taps=[name]`, and return it.

    Args:
        x: The value: a tensor, or tensors in tuples, dicts and so on.
        name: Its name. It may occur several times in a forward: `call.index` counts.
    """
    if not _enabled:
        return x
    if torch.compiler.is_compiling():
        return _trace(x, name)
    return _notify(x, name)


class Taps:
    """The named values that one attachment sees in its model: names, or globs as for modules."""

    def __init__(self, attachment: Attachment, patterns: Iterable[str]) -> None:
        self.attachment = attachment
        self.patterns = tuple(patterns)
        self.seen: set[str] = set()  # all names that occurred
        self._sites: dict[str, Site | None] = {}
        self._elsewhere: set[str] = set()  # matching names that also occurred outside of the model

    def attach(self) -> None:
        """See named values from now on."""
        _register(self)

    def detach(self, *, permanently: bool = False) -> None:
        """See nothing. What was compiled keeps its operators, so it stays registered."""
        if permanently or not any(site.compiled for site in self._matched()):
            _unregister(self, id(self))
            self.leave()
            for site in self._matched():
                site.detach()

    def enter(self) -> None:
        """Note that the model's forward begins in this thread."""
        now = getattr(_INSIDE, "now", None)
        if now is None:
            now = _INSIDE.now = set()
        now.add(self)

    def leave(self) -> None:
        """Note that the model's forward has ended."""
        getattr(_INSIDE, "now", set[Taps]()).discard(self)

    def site(self, name: str) -> Site | None:
        """Return the site of a name, if a pattern matches it."""
        if name not in self._sites:
            wanted = any(_matches(pattern, name) for pattern in self.patterns)
            self._sites[name] = Site(self.attachment, name, None) if wanted else None
        return self._sites[name]

    def find(self, name: str, inside: bool, recomputed: bool) -> Site | None:
        """Return the site of a name that occurs now, `inside` a call of the model or not."""
        if inside and not recomputed:
            self.seen.add(name)
        site = self.site(name) if self.attachment.enabled else None
        if site is None:
            return None
        if recomputed:
            return site if self._edits_again(site) else None
        if not inside:
            self._elsewhere.add(name)
        return site if inside else None

    @property
    def unmatched(self) -> list[str]:
        """The patterns that no name has matched."""
        matched = [site.name for site in self._matched() if site.was_called]
        return [p for p in self.patterns if not any(_matches(p, name) for name in matched)]

    def hint(self) -> str:
        """Return a sentence on the names that did occur."""
        if not self.seen:
            return "No hookline.tap was reached."
        suggestions = "".join(nearest(pattern, self.seen) for pattern in self.unmatched)
        return f"The names there are {listed(sorted(self.seen))}.{suggestions}"

    def _matched(self) -> list[Site]:
        return [site for site in list(self._sites.values()) if site is not None]

    def _edits_again(self, site: Site) -> bool:
        """Return whether an edit is applied again in a recomputation, whose model is not known."""
        if not (self.attachment.probe.edits and site.was_called):
            return False
        if site.name in self._elsewhere:
            raise ProbeError(
                f"'{site.name}' is also named outside of the model's forward, and activation "
                "checkpointing recomputes it without telling for which of them. Give each tap its "
                "own name, or do not checkpoint it."
            )
        return True


def check_taps(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names or globs of taps; raise if they are invalid."""
    names = (names,) if isinstance(names, str) else tuple(names)
    for name in names:
        if not (isinstance(name, str) and name):
            raise ConfigError(f"taps must be names or globs, not {show_value(name)}.")
    return names


def _notify(x: T, name: str) -> T:
    if type(name) is not str:
        check_name("tap(x, name)", name)
    recomputed = is_recomputing()
    now = getattr(_INSIDE, "now", ())
    for taps in _live_taps():
        site = taps.find(name, taps in now, recomputed)
        if site is not None:
            new = site.after((), {}, x)
            x = x if new is None else new
    return x


# -- in compiled models ---------------------------------------------------------------------------

_NAMES: list[str] = []  # the compiled names, by number: operators take no strings


def _trace(x: T, name: str) -> T:
    compiled.observe(compiled.find_tensors(x), _number(name))
    return x


def _number(name: str) -> int:
    """Return a name's number. It is negative, unlike those of sites."""
    if name not in _NAMES:
        _NAMES.append(name)
    return -1 - _NAMES.index(name)


# What `torch.compiler.assume_constant_result` does, without importing the compiler.
cast(Any, _number)._dynamo_marked_constant = True


def _notify_compiled(number: int, tensors: list[torch.Tensor], gradients: int) -> None:
    if number >= 0 or is_recomputing():
        return
    name = _NAMES[-1 - number]
    now = getattr(_INSIDE, "now", ())
    for taps in _live_taps():
        site = taps.find(name, taps in now, recomputed=False)
        if site is not None:
            site.after_compiled(tensors, gradients)


compiled.listeners.append(_notify_compiled)


def _live_taps() -> Iterator[Taps]:
    for reference in _registered:
        taps = reference()
        if taps is not None:
            yield taps


def _register(taps: Taps) -> None:
    number = id(taps)
    with _LOCK:
        if taps not in _live_taps():
            reference = weakref.ref(taps, lambda freed: _unregister(freed, number))
            _set_registered([*_registered, reference])


def arrange_taps(several: Sequence[Taps]) -> None:
    """Have these taps notified in this order."""
    with _LOCK:
        ours = [reference for reference in _registered if reference() in several]
        ordered = sorted(ours, key=lambda reference: several.index(cast(Taps, reference())))
        if ordered != ours:
            _set_registered([*(one for one in _registered if one not in ours), *ordered])


def _unregister(removed: Taps | weakref.ref[Taps], number: int) -> None:
    with _LOCK:
        _set_registered([one for one in _registered if one is not removed and one() is not removed])


def _set_registered(references: list[weakref.ref[Taps]]) -> None:
    global _registered, _enabled
    _registered, _enabled = tuple(references), bool(references)


def _matches(pattern: str, name: str) -> bool:
    return pattern == name or matches_glob(pattern, name)
