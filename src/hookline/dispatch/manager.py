"""HookManager: the hooks of one run. Registers, orders, fires, toggles, isolates, accounts.

It knows no trainer. Its clients (Hookline's trainer, a bare loop, somebody else's trainer) hand
it a source: any object that has the arguments of events as attributes. Firing an event is

    if live.on_step_end is not None:
        live.on_step_end(source)

one attribute load and one branch when nobody listens.

**While an event is being fired**, hooks may be added, removed and toggled, by hooks too. Who is
removed or disabled is not called any more, from that moment on; who is added or enabled is called
from the next firing on. A hook may fire events itself: they run at once, within the outer one.
**Threads**: any thread may fire, hooks run on the thread that fires; changes are taken one at a
time, and each takes effect as a whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

from hookline.dispatch.accounting import HookInfo, RunClock, Summary, make_gap
from hookline.dispatch.binding import bind
from hookline.dispatch.dispatcher import Dispatcher
from hookline.dispatch.entry import Entry, snake_case
from hookline.dispatch.failures import Failures
from hookline.dispatch.order import in_order
from hookline.dispatch.schedule import Schedule
from hookline.dispatch.settings import HookSettings
from hookline.dispatch.source import Given, given_by_position
from hookline.dispatch.states import StateReport, load_states, save_states
from hookline.errors import (
    NameTakenError,
    NotAHookError,
    NotSuppliedError,
    UnknownHookError,
    listed,
    nearest,
)
from hookline.events import EVENTS, NAMES, find_event
from hookline.hook import Hook

__all__ = ["HookManager"]


class HookManager:
    """The hooks of one run.

    Args:
        hooks: hooks to begin with, in this order.
        source: has the arguments of events as attributes; `fire` falls back to it.
        settings: how to treat failures and cost.
        on_change: called after hooks came, went or were toggled.
    """

    _by_rank = True  # users' hooks first, then built-ins

    def __init__(
        self,
        hooks: Iterable[Hook] | None = None,
        *,
        source: object | None = None,
        settings: HookSettings | None = None,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        self.live = SimpleNamespace(**dict.fromkeys(EVENTS))
        self.settings = settings or HookSettings()
        self.source = source
        self.on_change = on_change
        self._entries: list[Entry] = []  # in the order of registration
        self._order: list[Entry] = []  # in the order of calling
        self._lock = threading.RLock()
        self._dispatchers: dict[str, Dispatcher] = {}
        self._running: dict[str, WeakSet[Dispatcher]] = {name: WeakSet() for name in EVENTS}
        self._fired = dict.fromkeys(EVENTS, 0)
        self._failures = Failures(self.settings, self._quarantined)
        self._clock = RunClock(self.settings)
        self._gap = make_gap()
        self.register_hooks(hooks or ())

    # -- hooks come and go ------------------------------------------------------------------------

    def add_hook(
        self,
        hook: Hook,
        name: str | None = None,
        *,
        every: int = 1,
        sample_rate: float = 1.0,
        from_epoch: int = 0,
        before: str | None = None,
        after: str | None = None,
        enabled: bool = True,
        strict: bool = False,
        replace: bool = False,
    ) -> str:
        """Register a hook and return its name.

        Args:
            hook: an instance of a subclass of `Hook`.
            name: its name; without one, the name it was made with, else its class in snake_case.
            every: call it in each N-th step only.
            sample_rate: call it in this share of the steps only.
            from_epoch: call it from this epoch on only.
            before: call it directly before the hook of this name.
            after: call it directly after the hook of this name.
            enabled: False registers it switched off.
            strict: stop training when it fails, instead of going on without it.
            replace: take the place of a hook of the same name.
        """
        if not isinstance(hook, Hook):
            raise _not_a_hook(hook)
        bindings = bind(hook)
        schedule = Schedule(every, sample_rate, from_epoch)
        with self._lock:
            registered = next((e for e in self._entries if e.hook is hook), None)
            if registered is not None:
                raise NameTakenError(
                    f"This {type(hook).__name__} is registered already, as '{registered.name}'. "
                    "Make another instance, or remove it first."
                )
            for other in (before, after):
                if other is not None:
                    self._entry(other)
            entry = Entry(
                self._free_name(hook, name, replace),
                hook,
                bindings,
                schedule,
                before,
                after,
                enabled,
                strict,
            )
            old = next((e for e in self._entries if e.name == entry.name), None)
            entries = list(self._entries)
            if old is None:
                entries.append(entry)
            else:
                entries[entries.index(old)] = entry
            self._take(entries, changed=[entry] if old is None else [entry, old])
            return entry.name

    def register_hook(self, hook: Hook, name: str | None = None, **options: Any) -> str:
        """Another name for `add_hook`."""
        return self.add_hook(hook, name, **options)

    def register_hooks(self, hooks: Iterable[Hook]) -> list[str]:
        """Register several hooks in this order and return their names."""
        return [self.add_hook(hook) for hook in hooks]

    def remove_hook(self, name: str) -> Hook:
        """Take a hook out and return it. It is not called any more, from now on."""
        with self._lock:
            entry = self._entry(name)
            self._take([e for e in self._entries if e is not entry], changed=[entry])
            return entry.hook

    def clear_hooks(self) -> None:
        """Take all hooks out."""
        with self._lock:
            self._take([], changed=self._entries)

    def enable_hook(self, name: str) -> None:
        """Switch a hook on, from the next event on; this also ends its quarantine."""
        with self._lock:
            entry = self._entry(name)
            entry.enabled, entry.quarantined = True, False
            entry.streaks.clear()
            self._take(self._entries, changed=[entry])

    def disable_hook(self, name: str) -> None:
        """Switch a hook off. It stays registered, keeps its place and its state, costs nothing."""
        with self._lock:
            entry = self._entry(name)
            entry.enabled = False
            self._take(self._entries, changed=[entry])

    def get_hook(self, name: str) -> Hook:
        """Return the hook of this name."""
        return self._entry(name).hook

    def list_hooks(self) -> list[str]:
        """Return the names of all hooks in the order of calling, disabled ones included."""
        return [entry.name for entry in self._order]

    def __contains__(self, name: object) -> bool:
        return any(entry.name == name for entry in self._order)

    def __len__(self) -> int:
        return len(self._order)

    def __bool__(self) -> bool:
        return True  # a manager without hooks is still a manager

    def __iter__(self) -> Iterator[str]:
        return iter(self.list_hooks())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.list_hooks()})"

    def _entry(self, name: str) -> Entry:
        for entry in self._entries:
            if entry.name == name:
                return entry
        known = self.list_hooks()
        raise UnknownHookError(
            f"There is no hook '{name}'.{nearest(str(name), known)} There are: {listed(known)}."
        )

    def _free_name(self, hook: Hook, name: str | None, replace: bool) -> str:
        given = name if name is not None else hook.hookline_name
        taken = {entry.name for entry in self._entries}
        if given is not None:
            if not (isinstance(given, str) and given):
                raise ValueError(f"A hook's name is a word, not {given!r}.")
            if given in taken and not replace:
                raise NameTakenError(
                    f"The name '{given}' is taken. Give another with name=…, or say replace=True."
                )
            return given
        automatic = snake_case(type(hook).__name__)
        if replace or automatic not in taken:
            return automatic
        return next(
            free for i in range(2, len(taken) + 3) if (free := f"{automatic}_{i}") not in taken
        )

    def _take(self, entries: list[Entry], changed: Iterable[Entry]) -> None:
        """Make these the hooks, and let every event that changed be compiled anew when fired."""
        order = in_order(entries, by_rank=self._by_rank)  # may refuse; nothing has changed yet
        changed = list(changed)
        before = self._entries, self._order
        self._entries, self._order = list(entries), order
        self._renew_events_of(changed)
        if self.on_change is not None:
            try:
                self.on_change()
            except Exception:  # the client refuses: leave everything as it was
                self._entries, self._order = before
                self._renew_events_of(changed)
                raise

    def _renew_events_of(self, changed: list[Entry]) -> None:
        for event in {event for entry in changed for event in entry.bindings}:
            self._renew(event)
            for entry in changed:
                if not entry.active or entry not in self._order:
                    for dispatcher in self._running[event]:
                        dispatcher.blank(entry)

    # -- firing -----------------------------------------------------------------------------------

    def fire(self, event: str, /, **given: Any) -> None:
        """Fire an event by hand, with these arguments; what is missing comes from the source."""
        found = find_event(event)
        dispatch = getattr(self.live, found.name)
        source = Given(self, found, given)  # checks the names, also when nobody listens
        if dispatch is not None:
            dispatch(source)

    def __getattr__(self, name: str) -> Callable[..., None]:
        """A callable for each event and alias: `manager.on_epoch_end(epoch=3)`."""
        if name not in NAMES:
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}."
                + (nearest(name, NAMES) if name.startswith("on_") else "")
            )
        return partial(self._fire_by_position, name)

    def _fire_by_position(self, name: str, /, *values: Any, **given: Any) -> None:
        self.fire(name, **given_by_position(name, values), **given)

    def wanted(self, event: str, *, optional: bool = False) -> dict[str, list[str]]:
        """Return the arguments that active hooks ask for, each with the methods that ask.

        With `optional`, also what they take where it is known (defaults and `**kwargs`).
        """
        wanted: dict[str, list[str]] = {}
        for entry in self._listening(event):
            binding = entry.bindings[event]
            for argument in sorted(binding.takes if optional else binding.asks):
                wanted.setdefault(argument, []).append(f"{entry.name} ({binding.label})")
            if entry.schedule.from_epoch and binding.event.per_step:
                wanted.setdefault("epoch", []).append(f"{entry.name} (its from_epoch)")
        return wanted

    def listeners(self, event: str) -> list[str]:
        """Return the methods that are called for this event, in order, with their hooks' names."""
        return [f"{e.name} ({e.bindings[event].label})" for e in self._listening(event)]

    def _listening(self, event: str) -> list[Entry]:
        return [entry for entry in self._order if entry.active and event in entry.bindings]

    def _renew(self, event: str) -> None:
        """Put a stub where the event's dispatcher was: it compiles a new one when fired.

        Compiling late makes registering a thousand hooks take a thousand steps, not a million.
        """
        with self._lock:
            old = self._dispatchers.pop(event, None)
            if old is not None:
                old.fold()
                self._fired[event] += old.fired
            stub = partial(self._compile_and_fire, event) if self._listening(event) else None
            setattr(self.live, event, stub)

    def _compile_and_fire(self, event: str, src: object) -> None:
        with self._lock:
            if event not in self._dispatchers:
                entries = self._listening(event)
                dispatcher = Dispatcher(self, event, entries, self._fired[event])
                self._dispatchers[event] = dispatcher
                self._running[event].add(dispatcher)
                setattr(self.live, event, dispatcher.function if entries else None)
            self._clock.start_unless_running()
            function = self._dispatchers[event].function
        function(src)

    # -- failures ---------------------------------------------------------------------------------

    def hook_failed(
        self, entry: Entry, event: str, call: int, error: Exception
    ) -> Exception | None:
        """Treat a hook's exception; return what is to be raised after the others had their turn."""
        with self._lock:
            return self._failures.failed(entry, event, call, error)

    def hook_misses(self, event: str, src: object, error: NotSuppliedError) -> None:
        """Treat arguments that the loop has not supplied.

        Whoever fires by hand gets the error: the call is at fault. In a running loop the hooks
        that ask are quarantined at once, loudly, and the event goes on with the others.
        """
        with self._lock:
            by_hand = isinstance(src, Given)
            if by_hand or not self._failures.missed(self._listening(event), event, src):
                raise error
        dispatch = getattr(self.live, event)
        if dispatch is not None:
            dispatch(src)

    def _quarantined(self, entry: Entry) -> None:
        self._take(self._entries, changed=[entry])

    # -- cost -------------------------------------------------------------------------------------

    def run_started(self) -> None:
        """Start the clock that shares are measured against."""
        self._clock.start()

    def run_ended(self) -> None:
        """Stop that clock."""
        self._clock.stop()

    def next_sample(self, fired: int) -> int:
        """Say in how many firings the next one is timed; now and then look at the budget."""
        if self._clock.is_audit_due():
            self._clock.audit(self.summary())
        return self._gap(fired)

    def needs_clock(self, event: str) -> None:
        """Compile an event anew because one of its hooks turned out slow."""
        self._renew(event)

    def describe(self) -> list[HookInfo]:
        """Return each hook in the order of calling: kind, class, toggle, schedule, failures."""
        with self._lock:
            for dispatcher in self._dispatchers.values():
                dispatcher.fold()
            elapsed = self._clock.elapsed()
            return [entry.info(elapsed) for entry in self._order]

    def summary(self) -> Summary:
        """Return what the hooks did and cost so far; `print` shows it as a table."""
        return Summary(self._clock.elapsed(), tuple(self.describe()))

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the states of the hooks that keep one, by name, disabled ones included."""
        with self._lock:
            return save_states(self._order, self._failures)

    def load_state_dict(self, states: Mapping[str, Mapping[str, Any]]) -> StateReport:
        """Give hooks their states back; report hooks without one and states without a hook."""
        with self._lock:
            return load_states(self._order, states)


def _not_a_hook(thing: object) -> NotAHookError:
    if isinstance(thing, type) and issubclass(thing, Hook):
        return NotAHookError(
            f"{thing.__name__} is a class; a hook is an instance of it: {thing.__name__}()."
        )
    return NotAHookError(
        f"{thing!r} is a {type(thing).__name__}, not a hook. A hook inherits from hookline.Hook "
        "and has on_… methods: class MyHook(hookline.Hook)."
    )
