"""Named values within a model's code, for probes to see and edit.

    x = hookline.tap(x, "attn.scores")

`tap` returns what it is given. A tap cannot know which model it stands in, so each probe with taps
says when its model's outermost call begins and ends, in each thread, and sees what is named in
between. In a compiled model taps are nothing as long as no probe asks for any; then all of them
become operators that look at a switch, so that toggling compiles nothing again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from hookline.errors import ConfigError, ProbeError, listed, nearest
from hookline.probes import compiled
from hookline.probes.module_selection import _glob
from hookline.probes.recomputation import is_recomputing, recomputes

if TYPE_CHECKING:
    from hookline.probes.attachment import Attachment, Site

__all__ = ["Taps", "tap"]

T = TypeVar("T")

_on = False  # whether any probe asks for taps: all that a tap looks at otherwise
_all: tuple[weakref.ref[Taps], ...] = ()
"""In the order of attaching. A model that nobody needs any more goes, with its probes on it."""
_LOCK = threading.RLock()  # a model may be collected at any time
_INSIDE = threading.local()  # `.now`: whose models are being called in this thread


def tap(x: T, name: str) -> T:
    """Name a value that is no module's output, for probes with `taps=[name]`. Returns the value.

    Args:
        x: The value: a tensor, or tensors in tuples, dicts and so on.
        name: Its name. The same one may occur several times in a forward: `call.index` counts.
    """
    if not _on:
        return x
    if torch.compiler.is_compiling():
        return _trace(x, name)
    return _show(x, name)


class Taps:
    """What one attachment wants to see of the named values in its model.

    Args:
        attachment: Whose they are.
        patterns: Names, or globs as for modules: `*` stands for one part of a name, `**` for any
            number of parts.
        make: Makes the site of a name.
    """

    def __init__(
        self, attachment: Attachment, patterns: Iterable[str], make: Callable[[str], Site]
    ) -> None:
        self.attachment = attachment
        self.patterns = check_taps(patterns)
        self.on = False
        self.seen: set[str] = set()  # every name that occurred, wanted or not
        self._make = make
        self._sites: dict[str, Site | None] = {}
        self._elsewhere: set[str] = set()  # wanted names that occurred outside of the model, too
        self._modules: set[int] | None = None

    # -- on and off -------------------------------------------------------------------------------

    def attach(self) -> None:
        """See what is named from now on."""
        self._switch(on=True)
        _register(self)

    def detach(self, *, for_good: bool = False) -> None:
        """See nothing. What was compiled keeps its operators, and so its place, until the end."""
        self._switch(on=False)
        if for_good or not any(site.compiled for site in self._wanted()):
            _unregister(self, id(self))
            self.leave()
            for site in self._wanted():
                site.detach()

    def _switch(self, *, on: bool) -> None:
        self.on = on
        for site in self._wanted():
            site.on = on

    # -- the outermost call of the model ----------------------------------------------------------

    def enter(self) -> None:
        """The model's forward begins, in this thread."""
        now = getattr(_INSIDE, "now", None)
        if now is None:
            now = _INSIDE.now = set()
        now.add(self)
        _note_editing(self, inside=True)

    def leave(self) -> None:
        """It is over."""
        getattr(_INSIDE, "now", set[Taps]()).discard(self)
        _note_editing(self, inside=False)

    # -- what occurs ------------------------------------------------------------------------------

    def site(self, name: str) -> Site | None:
        """Return the site of a name, if it is wanted."""
        if name not in self._sites:
            wanted = any(_matches(pattern, name) for pattern in self.patterns)
            site = self._make(name) if wanted else None
            if site is not None:
                site.on = self.on
            self._sites[name] = site
        return self._sites[name]

    def wants(self, name: str, inside: bool, again: bool) -> Site | None:
        """Return the site of a name that occurs now, if this attachment is to see it."""
        if inside and not again:
            self.seen.add(name)
        site = self.site(name) if self.on else None
        if site is None:
            return None
        if again:
            return site if self._sees_again(site) else None
        if not inside:
            self._elsewhere.add(name)
        return site if inside else None

    @property
    def silent(self) -> list[str]:
        """The patterns that nothing has occurred for."""
        fired = [site.name for site in self._wanted() if site.fired]
        return [p for p in self.patterns if not any(_matches(p, name) for name in fired)]

    def hint(self) -> str:
        """Say what occurred instead, for what did not."""
        if not self.seen:
            return "No hookline.tap was reached at all."
        close = "".join(nearest(pattern, self.seen) for pattern in self.silent)
        return f"Named there: {listed(sorted(self.seen))}.{close}"

    def _wanted(self) -> list[Site]:
        return [site for site in list(self._sites.values()) if site is not None]

    def _sees_again(self, site: Site) -> bool:
        """Whether a recomputation is of this model: an edit has to be applied in it once more."""
        probe, root = self.attachment.probe, self.attachment.root
        if not (probe.edits or probe.wants_recomputed) or root is None:
            return False
        if self._modules is None:
            self._modules = {id(module) for module in root.modules()}
        ours = recomputes(self._modules)
        if ours is None:  # a function without any module was checkpointed
            ours = site.fired
            others = [taps for taps in _there() if taps is not self and taps._has_seen(site.name)]
            if ours and probe.edits and (others or site.name in self._elsewhere):
                raise ProbeError(
                    f"'{site.name}' is named in several models, and is recomputed now, by "
                    "activation checkpointing, in a function that shows no module: it cannot be "
                    "told whose it is. Checkpoint a module instead, or give each its own name."
                )
        return ours

    def _has_seen(self, name: str) -> bool:
        return name in self.seen and self.attachment.root is not None


def check_taps(names: Iterable[str]) -> tuple[str, ...]:
    """Return names of taps; raise if they are none."""
    names = (names,) if isinstance(names, str) else tuple(names)
    for name in names:
        if not (isinstance(name, str) and name):
            raise ConfigError(f"A tap is chosen by its name or a glob, not by {name!r}.")
    return names


# -- in eager models ------------------------------------------------------------------------------


def _show(x: T, name: str) -> T:
    again = is_recomputing()
    now = getattr(_INSIDE, "now", ())
    for taps in _there():
        site = taps.wants(name, taps in now, again)
        if site is not None:
            new = site.after((), {}, x)
            x = x if new is None else new
    return x


# -- in compiled models ---------------------------------------------------------------------------

_EDITING: dict[int, weakref.ref[Taps]] = {}  # those that edit, by number
_editing_now: tuple[int, ...] = ()
"""Those whose model is being called, in whatever thread. Dynamo guards it: what was compiled for a
model with an edit is not used for another one that shares the code."""
_NAMES: list[str] = []  # names that were compiled, each with a number: operators take no words


def _trace(x: T, name: str) -> T:
    """What dynamo traces instead of calling probes: first the edits, then an operator that sees."""
    for number in _editing_now:
        editing, tensors = _EDITING[number](), compiled.find_tensors(x)
        if editing is not None and tensors and _edits(number, name):
            attachment = editing.attachment
            edit = attachment.probe.compiled_edit(name)
            if edit is not None:
                x = edit(x, attachment.flag.to(tensors[0].device))
    compiled.observe(compiled.find_tensors(x), _number(name))
    return x


def _edits(number: int, name: str) -> bool:
    """Whether these taps want this name."""
    editing = _EDITING[number]()
    return editing is not None and editing.site(name) is not None


def _number(name: str) -> int:
    """Return a name's number, which is negative: those of sites are not."""
    if name not in _NAMES:
        _NAMES.append(name)
    return -1 - _NAMES.index(name)


# What `torch.compiler.assume_constant_result` does, without importing the compiler.
for _function in (_edits, _number):
    cast(Any, _function)._dynamo_marked_constant = True


def _saw(number: int, tensors: list[torch.Tensor], gradients: int) -> None:
    if number >= 0 or is_recomputing():
        return
    name = _NAMES[-1 - number]
    now = getattr(_INSIDE, "now", ())
    for taps in _there():
        site = taps.wants(name, taps in now, again=False)
        if site is not None:
            site.after_compiled(tensors, gradients)


compiled.listeners.append(_saw)


# -- who is there ---------------------------------------------------------------------------------


def _there() -> Iterator[Taps]:
    for one in _all:
        taps = one()
        if taps is not None:
            yield taps


def _register(taps: Taps) -> None:
    global _all, _on
    number = id(taps)
    with _LOCK:
        if all(one() is not taps for one in _all):
            there = weakref.ref(taps, lambda gone: _unregister(gone, number))
            _all = (*_all, there)
            if taps.attachment.probe.edits:
                _EDITING[number] = there
        _on = True


def _unregister(gone: Taps | weakref.ref[Taps], number: int) -> None:
    global _all, _on
    with _LOCK:
        _EDITING.pop(number, None)
        _all = tuple(one for one in _all if one is not gone and one() is not gone)
        _on = bool(_all)


def _note_editing(taps: Taps, *, inside: bool) -> None:
    global _editing_now
    if taps.attachment.probe.edits:
        with _LOCK:
            now = {*_editing_now, id(taps)} if inside else {*_editing_now} - {id(taps)}
            _editing_now = tuple(number for number in _EDITING if number in now)


def _matches(pattern: str, name: str) -> bool:
    return pattern == name or _glob(pattern, name)
