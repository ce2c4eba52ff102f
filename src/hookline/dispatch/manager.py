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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakSet

from hookline.dispatch.accounting import HookInfo, RunClock, Summary, Tally, make_gap
from hookline.dispatch.arguments import Given, given_by_position
from hookline.dispatch.binding import bind
from hookline.dispatch.dispatcher import Dispatcher
from hookline.dispatch.entry import Entry, RemovedEntry, free_name
from hookline.dispatch.failures import Failures
from hookline.dispatch.hook_settings import HookSettings
from hookline.dispatch.hook_states import StateReport, load_states, save_states
from hookline.dispatch.order import check_wishes, place_of
from hookline.dispatch.schedule import Schedule
from hookline.errors import (
    NameTakenError,
    NotAHookError,
    NotSuppliedError,
    RegistrationError,
    UnknownHookError,
    listed,
    nearest,
)
from hookline.events import EVENTS, FLOWS, NAMES, find_event
from hookline.hook import Hook, as_hook

__all__ = ["HookManager"]


class Dispatchers:
    """For each event what to call with the source when it happens; None when nobody listens."""

    __slots__ = (*EVENTS, *FLOWS)

    def __init__(self) -> None:
        for event in self.__slots__:
            setattr(self, event, None)


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
        self.dispatchers: Any = Dispatchers()
        self.settings = settings or HookSettings()
        self.source = source
        self.refuses_what_is_not_supplied = False
        self.on_change = on_change
        self._order: list[Entry] = []  # in the order of calling
        self._gone: dict[str, RemovedEntry] = {}  # what removed hooks did and cost
        self._lock = threading.RLock()
        self._by_event: dict[str, Dispatcher] = {}
        self._running: dict[str, WeakSet[Dispatcher]] = {
            name: WeakSet() for name in Dispatchers.__slots__
        }
        self._fired = dict.fromkeys(Dispatchers.__slots__, 0)
        self._failures = Failures(self.settings, self._quarantined)
        self._clock = RunClock(self.settings)
        self._gap = make_gap()
        self.register_hooks(hooks or ())

    # -- hooks come and go ------------------------------------------------------------------------

    def add_hook(
        self,
        hook: Hook | Callable[..., Any],
        name: str | None = None,
        *,
        kind: str | None = None,
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
            hook: an instance of a subclass of `Hook`, or a function, with `kind`.
            name: its name; without one, the name it was made with, else its class in snake_case.
            kind: what a function is: "forward" or "update".
            every: call it in each N-th step only.
            sample_rate: call it in this share of the steps only.
            from_epoch: call it from this epoch on only.
            before: call it directly before the hook of this name.
            after: call it directly after the hook of this name.
            enabled: False registers it switched off.
            strict: stop training when it fails, instead of going on without it.
            replace: take the place of a hook of the same name.
        """
        with self._lock:
            entry = self._make_entry(as_hook(hook, kind), name, replace)
            if kind is not None and kind != entry.hook.hookline_kind:
                raise RegistrationError(
                    f"'{entry.name}' is of kind '{entry.hook.hookline_kind}', not '{kind}'. "
                    f"The kinds are: {listed(['loop', 'probe', *FLOWS])}."
                )
            entry.schedule = Schedule(every, sample_rate, from_epoch)
            entry.before, entry.after = before, after
            entry.enabled, entry.strict = enabled, strict
            for other in (before, after):
                if other is not None:
                    self._entry(other)
            old = next((e for e in self._order if e.name == entry.name), None)
            order = [e for e in self._order if e is not old]
            if old is not None and before is after is None:
                entry.before, entry.after = old.before, old.after
                order.insert(self._order.index(old), entry)
            else:
                order.insert(place_of(entry, order, by_rank=self._by_rank), entry)
                if old is not None:
                    check_wishes(order)
            self._take(order, changed=[entry] if old is None else [entry, old])
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
            self._take([e for e in self._order if e is not entry], changed=[entry])
            return entry.hook

    def clear_hooks(self) -> None:
        """Take all hooks out."""
        with self._lock:
            self._take([], changed=self._order)

    def enable_hook(self, name: str) -> None:
        """Switch a hook on, from the next event on; this also ends its quarantine."""
        with self._lock:
            entry = self._entry(name)
            self._switch(entry, enabled=True)
            entry.streaks.clear()

    def disable_hook(self, name: str) -> None:
        """Switch a hook off. It stays registered, keeps its place and its state, costs nothing."""
        with self._lock:
            entry = self._entry(name)
            self._switch(entry, enabled=False, quarantined=entry.quarantined)

    def get_hook(self, name: str) -> Hook:
        """Return the hook of this name."""
        return self._entry(name).hook

    def of_kind(self, kind: str) -> list[tuple[str, Hook, bool]]:
        """Return the hooks of a kind, in order: name, hook, and whether it is called."""
        return [(e.name, e.hook, e.active) for e in self._order if e.hook.hookline_kind == kind]

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
        for entry in self._order:
            if entry.name == name:
                return entry
        known = self.list_hooks()
        raise UnknownHookError(
            f"There is no hook '{name}'.{nearest(str(name), known)} There are: {listed(known)}."
        )

    def _make_entry(
        self,
        hook: Hook,
        name: str | None = None,
        replace: bool = False,
        taken: set[str] | None = None,
    ) -> Entry:
        if not isinstance(hook, Hook):
            raise _not_a_hook(hook)
        registered = next((entry for entry in self._order if entry.hook is hook), None)
        if registered is not None:
            raise NameTakenError(
                f"This {type(hook).__name__} is registered already, as '{registered.name}'. "
                "Make another instance, or remove it first."
            )
        if taken is None:
            taken = {entry.name for entry in self._order}
        return Entry(free_name(hook, name, taken, replace), hook, bind(hook))

    def _switch(self, entry: Entry, *, enabled: bool, quarantined: bool = False) -> None:
        before = entry.enabled, entry.quarantined
        entry.enabled, entry.quarantined = enabled, quarantined
        try:
            self._take(self._order, changed=[entry])
        except Exception:
            entry.enabled, entry.quarantined = before
            self._renew_events_of([entry])
            raise

    def _take(self, order: list[Entry], changed: Iterable[Entry]) -> None:
        """Make these the hooks, and let every event that changed be compiled anew when fired."""
        changed = list(changed)
        before, self._order = self._order, list(order)
        self._renew_events_of(changed)
        if self.on_change is not None:
            try:
                self.on_change()
            except Exception:  # the client refuses: leave everything as it was
                self._order = before
                self._renew_events_of(changed)
                raise
        for entry in changed:
            if entry not in self._order and entry in before:
                self._gone[entry.name] = entry.gone(self._gone.get(entry.name))
        names = {entry.name for entry in self._order}
        for entry in self._order:  # a wish about a hook that is gone is void
            entry.before = entry.before if entry.before in names else None
            entry.after = entry.after if entry.after in names else None

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
        dispatch = getattr(self.dispatchers, found.name)
        source = Given(self, found, given)  # checks the names, also when nobody listens
        if dispatch is not None:
            dispatch(source)

    if TYPE_CHECKING:  # the methods that are added below: `manager.on_epoch_end(epoch=3)`

        def __getattr__(self, name: str) -> Callable[..., None]: ...

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

    def listeners(self, event: str, *, needed: bool = False) -> list[str]:
        """Return the methods that are called for this event, in order, with their hooks' names.

        With `needed`, without those of hooks that can do without it.
        """
        return [
            f"{e.name} ({e.bindings[event].label})"
            for e in self._listening(event)
            if not (needed and event in e.hook.hookline_optional_events)
        ]

    def _listening(self, event: str) -> list[Entry]:
        return [entry for entry in self._order if entry.active and event in entry.bindings]

    def _renew(self, event: str) -> None:
        """Put a stub where the event's dispatcher was: it compiles a new one when fired.

        Compiling late makes registering a thousand hooks take a thousand steps, not a million.
        """
        with self._lock:
            old = self._by_event.pop(event, None)
            if old is not None:
                old.fold()
                self._fired[event] += old.fired
            stub = partial(self._compile_and_fire, event) if self._listening(event) else None
            setattr(self.dispatchers, event, stub)

    def _compile_and_fire(self, event: str, src: object) -> None:
        with self._lock:
            if event not in self._by_event:
                entries = self._listening(event)
                if not entries:
                    return  # the last one went between the look-up and the call
                dispatcher = Dispatcher(self, event, entries, self._fired[event])
                self._by_event[event] = dispatcher
                self._running[event].add(dispatcher)
                setattr(self.dispatchers, event, dispatcher.function)
            self._clock.start_unless_running()
            function = self._by_event[event].function
        function(src)

    def guard(self, name: str) -> Callable[..., Any]:
        """Return what calls a function on behalf of a hook: isolated, counted and timed.

        For what is not called by an event, such as a probe.
        """
        entry = self._entry(name)
        tallies = entry.tallies

        def guarded(function: Callable[..., Any], *args: Any) -> Any:
            where = function.__name__  # each has its own failures in a row, as events do
            tally = tallies.get(where)
            if tally is None:
                tally = tallies.setdefault(where, Tally(clocked=True, rare=True))
            tally.calls += 1
            begin = perf_counter_ns()
            try:
                return function(*args)
            except Exception as error:
                fatal = self.hook_failed(entry, where, tally.calls, error)
                if fatal is not None:
                    raise fatal from error
                return None
            finally:
                tally.add(perf_counter_ns() - begin)

        return guarded

    def is_scheduled(self, name: str) -> bool:
        """Whether there are steps that this hook does not see."""
        return self._entry(name).schedule != Schedule()

    def is_due(self, name: str) -> bool:
        """Whether a hook sees the step in progress: for what is not called by an event.

        Where the loop has not told what the schedule needs, that is an error.
        """
        schedule, source = self._entry(name).schedule, cast(Any, self.source)
        step = source.step_in_progress
        return (
            not step % schedule.every
            and not (schedule.from_epoch and source.epoch < schedule.from_epoch)
            and schedule.samples(name, step)
        )

    # -- failures ---------------------------------------------------------------------------------

    def hook_failed(
        self, entry: Entry, event: str, call: int, error: Exception
    ) -> Exception | None:
        """Treat a hook's exception; return what is to be raised after the others had their turn."""
        with self._lock:
            return self._failures.failed(entry, event, call, error)

    def hook_misses(
        self, entries: Sequence[Entry], event: str, src: object, error: NotSuppliedError
    ) -> Exception | None:
        """Treat hooks that ask for what the loop has not supplied.

        Whoever fires by hand gets the error: the call is at fault. So does a loop that has not
        taken its first step. Later the hooks that ask are quarantined at once, loudly.
        """
        if isinstance(src, Given):
            raise error
        with self._lock:
            refuse = self.refuses_what_is_not_supplied
            return self._failures.misses(entries, event, src, refuse=refuse)

    def resume_dispatch(self, event: str, src: object) -> None:
        """Go on with an event in which nobody was called because somebody's argument is missing."""
        dispatch = getattr(self.dispatchers, event)
        if dispatch is not None:
            dispatch(src)

    def _quarantined(self, entry: Entry) -> None:
        self._take(self._order, changed=[entry])

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

    def calls_of(self, entry: Entry, event: str) -> int:
        """How often a hook was called for an event."""
        with self._lock:
            for dispatcher in self._running[event]:
                dispatcher.fold()
            return entry.tallies[event].calls

    def describe(self) -> list[HookInfo]:
        """Return each hook in the order of calling: kind, class, toggle, schedule, failures."""
        with self._lock:
            for dispatchers in self._running.values():
                for dispatcher in dispatchers:
                    dispatcher.fold()
            elapsed = self._clock.elapsed()
            return [entry.info(elapsed) for entry in self._order]

    def summary(self) -> Summary:
        """Return what hooks did and cost so far, removed ones too; `print` shows a table."""
        with self._lock:
            elapsed = self._clock.elapsed()
            gone = [gone.info(elapsed) for gone in self._gone.values()]
            gone = [info for info in gone if info.calls or info.failures]
            return Summary(elapsed, (*self.describe(), *gone))

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the states of the hooks that keep one, by name, disabled ones included."""
        with self._lock:
            return save_states(self._order, self._failures)

    def load_state_dict(self, states: Mapping[str, Mapping[str, Any]]) -> StateReport:
        """Give hooks their states back; report hooks without one and states without a hook."""
        with self._lock:
            return load_states(self._order, states)


def _event_method(name: str) -> Callable[..., None]:
    def fire_event(self: HookManager, *values: Any, **given: Any) -> None:
        self.fire(name, **given_by_position(name, values), **given)

    fire_event.__name__ = name
    fire_event.__doc__ = f"Fire `{NAMES[name]}` by hand, with these arguments."
    return fire_event


# Real methods, not __getattr__: a class that has it loads each of its attributes the slow way.
for _name in NAMES:
    setattr(HookManager, _name, _event_method(_name))


def _not_a_hook(thing: object) -> NotAHookError:
    if isinstance(thing, type) and issubclass(thing, Hook):
        return NotAHookError(
            f"{thing.__name__} is a class; a hook is an instance of it: {thing.__name__}()."
        )
    return NotAHookError(
        f"{thing!r} is a {type(thing).__name__}, not a hook. A hook inherits from hookline.Hook "
        "and has on_… methods: class MyHook(hookline.Hook). A function is one with kind='forward' "
        "or kind='update'."
    )
