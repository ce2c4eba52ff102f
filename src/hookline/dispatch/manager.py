"""HookManager: the hooks of one run. Registers, orders, fires, toggles, isolates, accounts.

It does not depend on a trainer. A client (Hookline's trainer, a bare loop, another library's
trainer) passes an event context: any object that has the arguments of events as attributes.
Firing an event is

    if dispatchers.on_step_end is not None:
        dispatchers.on_step_end(context)

which is one attribute load and one branch when no hook listens.

Hooks may be added, removed and toggled while an event is being fired, also by hooks. A removed or
disabled hook is not called any more, even in that event; an added or enabled hook is called from
the next event on. A hook may fire events itself; they run at once, nested in the outer one.

Any thread may fire events, and hooks run on that thread. Changes are serialized by a lock, and
each takes effect as a whole.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast, get_args

from hookline.arguments import check_flag, check_instance, check_name, read_items, show_value
from hookline.dispatch.accounting import HookInfo, HookStatus, RunClock, Summary
from hookline.dispatch.binding import bind, no_event_text
from hookline.dispatch.calling_hook import guard_calls
from hookline.dispatch.dispatcher import DispatcherTable
from hookline.dispatch.entry import (
    Entry,
    choose_name,
    choose_ranks,
)
from hookline.dispatch.event_arguments import EventArguments, make_event_method
from hookline.dispatch.failures import FailureHandler
from hookline.dispatch.order import check_order, find_place, registration_order
from hookline.dispatch.settings import HookLike, HookSettings, Registration, Schedule
from hookline.errors import (
    ArgumentError,
    HookStateError,
    NameTakenError,
    NotProvidedError,
    RegistrationError,
    UnknownHookError,
    listed,
    nearest,
)
from hookline.events import FLOWS, NAMES, find_event
from hookline.hook import Hook, Ranks, as_hook
from hookline.printable import filter_log_records

log = logging.getLogger("hookline")


@dataclass(frozen=True)
class StateReport:
    """The mismatches found when states were loaded.

    `missing` are hooks without a saved state, `orphaned` are saved states without a hook.
    """

    missing: tuple[str, ...] = ()
    orphaned: tuple[str, ...] = ()


class HookManager:
    """The hooks of one run.

    Args:
        hooks: hooks to register, in this order; `every(…)` gives one a schedule.
        source: has the arguments of events as attributes; `fire` takes from it those not given.
        settings: how to treat failures and cost.
        on_change: called after hooks were added, removed or toggled; if it raises, the change is
            undone.
    """

    _by_group = True  # users' hooks first, then built-ins

    def __init__(
        self,
        hooks: Iterable[HookLike] | HookManager | None = None,
        *,
        source: object | None = None,
        settings: HookSettings | None = None,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        check_instance("settings", settings, HookSettings | None, "HookSettings or None")
        check_instance("on_change", on_change, Callable | None, "a function or None")
        filter_log_records()
        self.settings = settings or HookSettings()
        self.source = source
        self.raise_on_missing_args = False
        self.on_change = on_change
        self._entries: list[Entry] = []  # in calling order
        self._removed: dict[str, HookInfo] = {}
        self._roles: set[str] = set(get_args(Ranks))  # of this process: alone it has all
        self._lock = threading.RLock()
        self._clock = RunClock(self.settings)
        self._table = DispatcherTable(self, self._lock, self._clock)
        self.dispatchers: Any = self._table.dispatchers
        self.failures = FailureHandler(self.settings, self._apply_status)
        self.register_hooks(() if hooks is None else hooks)

    # -- registration -----------------------------------------------------------------------------

    def add_hook(
        self,
        hook: Hook | Callable[..., Any],
        name: str | None = None,
        *,
        kind: str | None = None,
        every: int | None = None,
        sample_rate: float = 1.0,
        from_epoch: int = 0,
        before: str | None = None,
        after: str | None = None,
        enabled: bool = True,
        strict: bool = False,
        ranks: Ranks | None = None,
        replace: bool = False,
    ) -> str:
        """Register a hook and return its name.

        Args:
            hook: an instance of a subclass of `Hook`, or a function, with `kind`.
            name: the hook's name; by default the name it was created with, or its class in
                snake_case.
            kind: the kind of a function: "forward" or "update".
            every: call it in steps N, 2N, 3N … only. A built-in with an option `every` takes it
                instead of that option's default.
            sample_rate: call it in this fraction of the steps only.
            from_epoch: call it from this epoch on only.
            before: call it directly before the hook of this name.
            after: call it directly after the hook of this name.
            enabled: False registers it disabled.
            strict: stop training when it fails, instead of continuing without it.
            ranks: in which processes it is called, "all", "main" or "local_main"; by default what
                its class says.
            replace: replace a hook of the same name.
        """
        for option, text in (("kind", kind), ("before", before), ("after", after)):
            if text is not None:
                check_name(f"add_hook(…, {option}=…)", text)
        for option, flag in (("enabled", enabled), ("strict", strict), ("replace", replace)):
            check_flag(f"add_hook(…, {option}=…)", flag)
        with self._lock:
            entry = self._make_entry(as_hook(hook, kind), name, replace)
            if kind is not None and kind != entry.hook.hookline_kind:
                raise RegistrationError(
                    f"'{entry.name}' is of kind '{entry.hook.hookline_kind}', not '{kind}'. "
                    f"The kinds are: {listed(['loop', 'probe', *FLOWS])}."
                )
            entry.schedule = Schedule(1 if every is None else every, sample_rate, from_epoch)
            entry.every = every
            if every is not None and entry.hook.hookline_follow(every):
                entry.schedule = Schedule(1, sample_rate, from_epoch)
            entry.before, entry.after, entry.strict = before, after, strict
            entry.status = "enabled" if enabled else "disabled"
            entry.ranks = choose_ranks(entry, ranks)
            entry.is_here = entry.ranks in self._roles
            for other in (before, after):
                if other is not None:
                    self._entry(other)
            old = next((e for e in self._entries if e.name == entry.name), None)
            entries = [e for e in self._entries if e is not old]
            if old is not None and before is after is None:
                entry.before, entry.after = old.before, old.after
                entries.insert(self._entries.index(old), entry)
            else:
                entries.insert(find_place(entry, entries, by_group=self._by_group), entry)
                if old is not None:
                    check_order(entries)
            self._apply(entries, changed=[entry] if old is None else [entry, old])
            is_unused = not entry.bindings and entry.hook.hookline_kind == "loop"
            if is_unused and (text := no_event_text(entry.hook)):
                log.warning("%s", text)
            return entry.name

    register_hook = add_hook

    def set_process(self, *, is_main: bool, is_local_main: bool) -> None:
        """Say which process of the run this is: hooks are called in those of their `ranks`."""
        with self._lock:
            self._roles = {"all", *["main"] * is_main, *["local_main"] * is_local_main}
            changed = [e for e in self._entries if e.is_here != (e.ranks in self._roles)]
            for entry in changed:
                entry.is_here = entry.ranks in self._roles
            if changed:
                self._apply(self._entries, changed)

    def silence(self) -> None:
        """Call no hook any more, whatever is added or enabled: this process was forked.

        It takes no lock, since another thread of the parent may have held it.
        """
        self._lock = threading.RLock()
        self._table.silence(self._lock)
        self._roles = set()
        for entry in self._entries:
            entry.is_here = False
            self._table.deactivate(entry)

    def register_hooks(self, hooks: Iterable[HookLike] | HookManager) -> list[str]:
        """Register several hooks in this order and return their names.

        Those of another manager keep their names, schedules, order and status.
        """
        if isinstance(hooks, HookManager):
            hooks = hooks._registrations()  # noqa: SLF001 - of its class
        if isinstance(hooks, Hook):
            message = f"hooks takes a list of hooks. Write hooks=[{type(hooks).__name__}(…)]."
            raise ArgumentError(message)
        items = map(self._read_item, read_items("hooks", hooks, "a list of hooks"))
        return [self.add_hook(item.hook, **item.options) for item in items]

    def _registrations(self) -> list[Registration]:
        """Return the hooks so that another manager can register them as they are."""
        entries = registration_order(self._entries)
        return [Registration(e.hook, {"name": e.name, **e.registration()}) for e in entries]

    def _read_item(self, item: Any) -> Registration:
        return item if isinstance(item, Registration) else Registration(item)

    def remove_hook(self, name: str) -> Hook:
        """Remove a hook and return it. It is not called any more, not even in this event."""
        with self._lock:
            entry = self._entry(name)
            self._apply([e for e in self._entries if e is not entry], changed=[entry])
            return entry.hook

    def clear_hooks(self) -> None:
        """Remove all hooks."""
        with self._lock:
            self._apply([], changed=self._entries)

    def enable_hook(self, name: str) -> None:
        """Enable a hook from the next event on, also one that was disabled after failures."""
        with self._lock:
            entry = self._entry(name)
            self._set_status(entry, "enabled")
            entry.failure_streaks.clear()

    def disable_hook(self, name: str) -> None:
        """Disable a hook. It stays registered, keeps its place and its state, and costs nothing."""
        with self._lock:
            self._set_status(self._entry(name), "disabled")

    def get_hook(self, name: str) -> Hook:
        """Return the hook of this name."""
        return self._entry(name).hook

    def of_kind(self, kind: str) -> list[tuple[str, Hook, bool]]:
        """Return the hooks of a kind, in order: name, hook, and whether it is enabled."""
        return [(e.name, e.hook, e.enabled) for e in self._entries if e.hook.hookline_kind == kind]

    def list_hooks(self) -> list[str]:
        """Return the names of all hooks in calling order, disabled ones included."""
        return [entry.name for entry in self._entries]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and any(entry.name == name for entry in self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __bool__(self) -> bool:
        return True  # also without hooks

    def __iter__(self) -> Iterator[str]:
        return iter(self.list_hooks())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.list_hooks()})"

    def __reduce__(self) -> Any:
        """Copy or pickle the hooks with their names and schedules, for a loop that is to come."""
        return partial(HookManager, settings=self.settings), (self._registrations(),)

    def _entry(self, name: str) -> Entry:
        for entry in self._entries:
            if isinstance(name, str) and entry.name == name:
                return entry
        hint = nearest(name, self.list_hooks()) if isinstance(name, str) else ""
        raise UnknownHookError(
            f"There is no hook {show_value(name)}.{hint} There are: {listed(self.list_hooks())}."
        )

    def _make_entry(self, hook: Hook, name: str | None = None, replace: bool = False) -> Entry:
        registered = next((entry for entry in self._entries if entry.hook is hook), None)
        if registered is not None:
            raise NameTakenError(
                f"This {type(hook).__name__} is registered already, as '{registered.name}'. "
                "Create another instance, or remove it first."
            )
        taken = {entry.name for entry in self._entries}
        return Entry(choose_name(hook, name, taken, replace), hook, bind(hook))

    def _set_status(self, entry: Entry, status: HookStatus) -> None:
        before, entry.status = entry.status, status
        try:
            self._apply_status(entry)
        except BaseException:
            entry.status = before
            self._undo_change(self._entries, [entry])
            raise

    def _apply_status(self, entry: Entry) -> None:
        self._apply(self._entries, changed=[entry])

    def _apply(self, entries: list[Entry], changed: Iterable[Entry]) -> None:
        """Set the entries and have the events of the changed ones compiled again."""
        changed = list(changed)
        before, self._entries = self._entries, list(entries)
        self._invalidate(changed)
        if self.on_change is not None:
            try:
                self.on_change()
            except BaseException:
                self._undo_change(before, changed)
                raise
        for entry in changed:
            if entry not in self._entries and entry in before:
                self._removed[entry.name] = entry.removed(self._removed.get(entry.name))
        names = {entry.name for entry in self._entries}
        for entry in self._entries:  # drop references to hooks that were removed
            entry.before = entry.before if entry.before in names else None
            entry.after = entry.after if entry.after in names else None

    def _undo_change(self, before: list[Entry], changed: list[Entry]) -> None:
        """Set the entries as they were, also for who was told of some of the change."""
        self._entries = before
        self._invalidate(changed)
        if self.on_change is not None:
            with suppress(Exception):  # the first error matters more, and is raised
                self.on_change()

    def _invalidate(self, changed: list[Entry]) -> None:
        for event in {event for entry in changed for event in entry.bindings}:
            self._table.invalidate(event)
        for entry in changed:
            if not entry.enabled or entry not in self._entries:
                self._table.deactivate(entry)

    # -- firing -----------------------------------------------------------------------------------

    def fire(self, event: str, /, **arguments: Any) -> None:
        """Fire an event with these arguments; the manager's source provides the others."""
        found = find_event(event)
        dispatch = getattr(self.dispatchers, found.name)
        context = EventArguments(self, found, arguments)  # checks names even if no hook listens
        if dispatch is not None:
            dispatch(context)

    if TYPE_CHECKING:  # the methods that are added below: `manager.on_epoch_end(epoch=3)`

        def __getattr__(self, name: str) -> Callable[..., None]: ...

    def required_arguments(self, event: str, *, optional: bool = False) -> dict[str, list[str]]:
        """Return the arguments that enabled hooks require, each with the methods that do.

        With `optional`, also those that they take if available (defaults and `**kwargs`).
        """
        methods: dict[str, list[str]] = {}
        for entry in self.listening(event):
            binding = entry.bindings[event]
            for argument in sorted(binding.accepted if optional else binding.required):
                methods.setdefault(argument, []).append(f"{entry.name} ({binding.label})")
            if entry.schedule.from_epoch and binding.event.per_step:
                methods.setdefault("epoch", []).append(f"{entry.name} (its from_epoch)")
        return methods

    def listeners(self, event: str, *, needed: bool = False) -> list[str]:
        """Return the methods that are called for an event, in order, with their hooks' names.

        With `needed`, without those of hooks for which the event is optional.
        """
        return [
            f"{e.name} ({e.bindings[event].label})"
            for e in self.listening(event)
            if not (needed and event in e.hook.hookline_optional_events)
        ]

    def listening(self, event: str) -> list[Entry]:
        """Return the entries of the hooks that are called for an event."""
        check_instance("event", event, str, "the name of an event")
        return [entry for entry in self._entries if entry.enabled and event in entry.bindings]

    def guard(self, name: str) -> Callable[..., Any]:
        """Return a function that calls another on behalf of a hook: isolated, counted and timed.

        For calls that are not events, such as those of a probe.
        """
        return guard_calls(self._entry(name), self.handle_failure)

    def is_scheduled(self, name: str) -> bool:
        """Return whether a hook is called only in some steps."""
        return self._entry(name).schedule != Schedule()

    def is_due(self, name: str) -> bool:
        """Return whether a hook is due in the step in progress, for calls that are not events.

        Raises:
            NotProvidedError: the loop does not provide what the schedule needs.
        """
        schedule, source = self._entry(name).schedule, cast(Any, self.source)
        epoch = source.epoch if schedule.from_epoch else 0
        return schedule.is_due(name, source.step_in_progress, epoch)

    # -- failures ---------------------------------------------------------------------------------

    def handle_failure(
        self, entry: Entry, event: str, call: int, error: Exception
    ) -> Exception | None:
        """Handle a hook's exception; return the error to raise after the other hooks, if any."""
        with self._lock:
            return self.failures.handle_failure(entry, event, call, error)

    def handle_missing_args(
        self, entries: Sequence[Entry], event: str, context: object, error: NotProvidedError
    ) -> Exception | None:
        """Disable the hooks that require an argument which the loop does not provide.

        Return the error to raise after the other hooks, if any. The error is raised at once if
        the event was fired by hand, because the caller can add the argument, and with
        `raise_on_missing_args`, which loops set until their first step.
        """
        if isinstance(context, EventArguments):
            raise error
        with self._lock:
            return self.failures.handle_missing_args(
                entries, event, context, raise_error=self.raise_on_missing_args
            )

    # -- cost -------------------------------------------------------------------------------------

    def run_started(self) -> None:
        """Start the clock that the hooks' shares of the run refer to."""
        self._clock.start()

    def run_ended(self) -> None:
        """Stop that clock."""
        self._clock.stop()

    def describe(self) -> list[HookInfo]:
        """Return a `HookInfo` for each hook, in calling order."""
        with self._lock:
            self._table.update_counts()
            elapsed = self._clock.elapsed()
            return [entry.info(elapsed) for entry in self._entries]

    def statuses(self) -> dict[str, HookStatus]:
        """Return the status of each hook by name: "enabled", "disabled", or "failed"."""
        with self._lock:
            return {entry.name: entry.status for entry in self._entries}

    def summary(self) -> Summary:
        """Return what hooks did and cost so far, removed ones too; `print` shows a table."""
        with self._lock:
            elapsed = self._clock.elapsed()
            removed = [
                replace(info, share=info.seconds / elapsed if elapsed else 0.0)
                for info in self._removed.values()
                if info.calls or info.failures
            ]
            return Summary(elapsed, (*self.describe(), *removed))

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the states of the hooks that have one, by name, disabled ones included.

        A hook whose `state_dict` fails is omitted, or stops training if it is critical.
        """
        states: dict[str, dict[str, Any]] = {}
        with self._lock:
            for entry in self._entries:
                if not entry.has_state:
                    continue
                try:
                    states[entry.name] = entry.hook.state_dict()
                except Exception as error:  # isolated like every call of a hook
                    fatal = self.failures.handle_failure(entry, "state_dict", 0, error)
                    if fatal is not None:
                        raise fatal from error
        return states

    def load_state_dict(self, states: Mapping[str, Mapping[str, Any]]) -> StateReport:
        """Load the hooks' states; return hooks without a state and states without a hook.

        Raises:
            HookStateError: a hook's `load_state_dict` failed.
        """
        if not isinstance(states, Mapping):
            raise HookStateError(
                "Expected what state_dict() returned, a mapping from hook names to states, "
                f"not a {type(states).__name__}."
            )
        with self._lock:
            stateful = {entry.name: entry for entry in self._entries if entry.has_state}
            for name, entry in stateful.items():
                if name in states:
                    _load_state(entry, states[name])
        report = StateReport(
            tuple(name for name in stateful if name not in states),
            tuple(name for name in states if name not in stateful),
        )
        if report.missing:
            log.warning("No saved state for these hooks, they start anew: %s", report.missing)
        if report.orphaned:
            log.warning("Saved states without a hook (removed or renamed?): %s", report.orphaned)
        return report


def _load_state(entry: Entry, state: Mapping[str, Any]) -> None:
    try:
        entry.hook.load_state_dict(state)
    except Exception as error:
        raise HookStateError(
            f"The hook '{entry.name}' ({type(entry.hook).__name__}) could not load its saved "
            f"state: {type(error).__name__}: {error}"
        ) from error


# Methods instead of __getattr__, which would slow down every attribute access of the class.
for _name in NAMES:
    setattr(HookManager, _name, make_event_method(_name))
