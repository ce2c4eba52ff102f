"""Probes: probes on single modules, each with an id, and one store for what they capture."""

from __future__ import annotations

import bdb
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from hookline.errors import (
    ConfigError,
    HookFailedError,
    NameTakenError,
    ProbeError,
    UnknownHookError,
    listed,
    nearest,
)
from hookline.probes.attachment import Attachment
from hookline.probes.capture import Capture, bytes_of
from hookline.probes.captured_state import CapturedState
from hookline.probes.probe import Probe
from hookline.probes.store import Counts, Policy, Store

if TYPE_CHECKING:
    from hookline.probes.edit import Operation

__all__ = ["HookManager", "ProbeInfo", "Probes"]

log = logging.getLogger("hookline")

P = TypeVar("P", bound=Probe)
Kind = Literal["capture", "monitoring", "debug", "edit", "probe"]

_MAX_FAILURES = 3  # in a row, as in trainers
_FATAL = (bdb.BdbQuit, HookFailedError)


@dataclass(frozen=True)
class ProbeInfo:
    """One hook of a manager, as it stands."""

    id: str
    kind: Kind
    module: str
    """The class of the module that it is on."""
    enabled: bool
    failures: int
    last_error: str | None
    captured: Counts | None
    """What became of its states; None for what captures nothing."""


class Probes:
    """Puts probes on modules and takes them off again, each under an id of its own.

    A context manager: on exit everything is taken off that was put on, and freed. Safe to use from
    several threads. A probe that fails does not fail the model: it is logged, counted, and after
    three failures in a row disabled. An edit that fails, and a state that does not fit with
    `policy="error"`, does fail it.

    Args:
        max_captured_states: How many states to keep for each hook; None for any number.
        cleanup_interval: Captures of a hook between two clean-ups of its number of states: in
            between there may be up to `cleanup_interval - 1` more.
        memory_limit_mb: How many megabytes (of 1024² bytes) to keep, over all hooks; it always
            holds. None for any number.
        enable_intervention: Whether hooks may edit what flows through modules.
        policy: What happens to what does not fit: `"drop_oldest"`, `"sample"`, `"spill"` (to disk)
            or `"error"`.
        folder: Where `"spill"` writes; by default the system's folder for temporary files.

    Example:
        >>> layer = torch.nn.Linear(2, 3)
        >>> with Probes() as probes:
        ...     hook_id = probes.register_capture_hook(layer, "layer_4", layer_idx=4)
        ...     _ = layer(torch.ones(1, 2))
        ...     [state] = probes.get_captured_states(hook_id)
        >>> state.output.shape
        torch.Size([1, 3])
    """

    def __init__(
        self,
        max_captured_states: int | None = 1000,
        cleanup_interval: int = 1,
        memory_limit_mb: float | None = 1024,
        enable_intervention: bool = False,
        policy: Policy = "drop_oldest",
        folder: str | None = None,
    ) -> None:
        _check(max_captured_states, memory_limit_mb, enable_intervention)
        limit = bytes_of(memory_limit_mb)
        self.enable_intervention = enable_intervention
        self._limits = (max_captured_states, limit, policy, cleanup_interval, folder)
        self._begin()

    def _begin(self) -> None:
        self._store = Store(*self._limits)
        self._hooks: dict[str, _Entry] = {}
        self._lock = threading.RLock()
        self._closed = False

    # -- registering ------------------------------------------------------------------------------

    def register_capture_hook(
        self,
        module: torch.nn.Module,
        hook_id: str,
        layer_idx: int | None = None,
        capture_input: bool = True,
        capture_output: bool = True,
        **options: Any,
    ) -> str:
        """Keep what goes into a module and comes out of it.

        Args:
            module: The module.
            hook_id: A name for the hook, not yet taken. The states have it as their `module`.
            layer_idx: The layer's number, for the states.
            capture_input: Whether to keep the arguments, those by keyword too.
            capture_output: Whether to keep what the module returns.
            options: What `Capture` takes besides: `gradient`, `device`, `dtype`, `select` …

        Returns:
            The id.
        """
        took = {"layer_idx": layer_idx, "input": capture_input, "output": capture_output}
        options = {**took, "kwargs": capture_input, "store": self._store, **options}
        return self._register(module, hook_id, "capture", lambda: Capture(module, **options))

    def register_monitoring_hook(
        self, module: torch.nn.Module, hook_id: str, metrics: Any = None, **options: Any
    ) -> str:
        """Measure what a module returns.

        Args:
            module: The module.
            hook_id: A name for the hook, not yet taken.
            metrics: The names of statistics, as `Monitor` has them; None for its default ones.
            options: What `Monitor` takes besides.

        Returns:
            The id; `get_metrics` has the numbers.
        """

        def make() -> Probe:
            from hookline.probes.monitor import Monitor

            return Monitor(module, metrics=metrics, **options)

        return self._register(module, hook_id, "monitoring", make)

    def register_debug_hook(
        self, module: torch.nn.Module, hook_id: str, conditions: Any = None, **options: Any
    ) -> str:
        """Check what a module returns.

        Args:
            module: The module.
            hook_id: A name for the hook, not yet taken.
            conditions: What to look for, as `Debug` has it; None for values that are not finite.
            options: What `Debug` takes besides, such as `action`.

        Returns:
            The id; `get_findings` has what was found.
        """

        def make() -> Probe:
            from hookline.probes.debug_probe import Debug

            return Debug(module, conditions=conditions, **options)

        return self._register(module, hook_id, "debug", make)

    def register_edit_hook(
        self,
        module: torch.nn.Module,
        hook_id: str,
        operation: Operation = "replace",
        value: Any = None,
        **options: Any,
    ) -> str:
        """Edit what a module returns. Needs a manager with `enable_intervention=True`.

        Args:
            module: The module.
            hook_id: A name for the hook, not yet taken.
            operation: `"replace"`, `"scale"`, `"ablate"`, `"add"` or `"patch"`.
            value: By what, as `Edit` has it.
            options: What `Edit` takes besides: `at`, `part`, `coefficient`.

        Returns:
            The id.
        """

        def make() -> Probe:
            from hookline.probes.edit import Edit

            return Edit(module, operation, value, enable_intervention=True, **options)

        return self._register(module, hook_id, "edit", make)

    def register_probe(self, module: torch.nn.Module, hook_id: str, probe: Probe) -> str:
        """Put a probe of your own on a module.

        Args:
            module: The module; what the probe itself says of modules is not looked at.
            hook_id: A name for the hook, not yet taken.
            probe: The probe.

        Returns:
            The id.
        """
        if not isinstance(probe, Probe):
            raise ProbeError(f"'{hook_id}': a Probe is needed, not a {type(probe).__name__}.")
        if probe.attachment is not None:
            raise ProbeError(f"'{hook_id}': this probe is on a module already. Make another one.")
        return self._register(module, hook_id, "probe", lambda: probe)

    def _register(
        self, module: torch.nn.Module, hook_id: str, kind: Kind, make: Callable[[], Probe]
    ) -> str:
        with self._lock:
            self._check_new(module, hook_id)
            if kind == "edit":
                self._allow_edit(hook_id)
            probe = make()
            if probe.edits:
                self._allow_edit(hook_id)
            probe.probe_name = hook_id
            entry = _Entry(hook_id, kind, probe, module)
            # Without a root: each call of the module is a forward of its own.
            probe.attachment = Attachment(probe, {hook_id: module}, guard=self._guard(entry))
            self._hooks[hook_id] = entry
            probe.attachment.on()
        return hook_id

    def _check_new(self, module: Any, hook_id: Any) -> None:
        if self._closed:
            raise ProbeError("These probes are closed. Make a new manager.")
        if not isinstance(hook_id, str) or not hook_id:
            raise ProbeError(f"A hook_id is a text that is not empty, not {hook_id!r}.")
        if not isinstance(module, torch.nn.Module):
            raise ProbeError(
                f"'{hook_id}': a hook is put on a torch.nn.Module, not on {_described(module)}."
            )
        if hook_id in self._hooks:
            raise NameTakenError(
                f"There is a hook '{hook_id}' already. Choose another hook_id, or remove it first: "
                f"remove_hook('{hook_id}')."
            )

    def _allow_edit(self, hook_id: str) -> None:
        if not self.enable_intervention:
            raise ProbeError(
                f"'{hook_id}' would change what flows through the module, and that is not allowed "
                f"here. If you mean it: {type(self).__name__}(enable_intervention=True)."
            )

    # -- removing and toggling --------------------------------------------------------------------

    def remove_hook(self, hook_id: str) -> None:
        """Take a hook off its module, and free what it captured."""
        with self._lock:
            entry = self._entry(hook_id)
            del self._hooks[hook_id]
        entry.probe.detach()
        entry.free()

    def clear_hooks(self) -> None:
        """Remove all hooks."""
        with self._lock:
            for hook_id in list(self._hooks):
                self.remove_hook(hook_id)

    def enable_hook(self, hook_id: str) -> None:
        """Let a hook see calls again, also one that was disabled because it failed."""
        with self._lock:
            entry = self._entry(hook_id)
            entry.in_a_row.clear()
            entry.attachment.on()

    def disable_hook(self, hook_id: str) -> None:
        """Let a hook see no calls; what it captured stays."""
        with self._lock:
            self._entry(hook_id).attachment.off()

    def close(self) -> None:
        """Remove everything, for good."""
        with self._lock:
            self._closed = True
            self._tell_silent()
            self.clear_hooks()
            self._store.close()

    def _tell_silent(self) -> None:
        on = [entry for entry in self._hooks.values() if entry.attachment.enabled]
        silent = [entry.id for entry in on if entry.attachment.silent]
        if silent:
            log.warning(
                "No call was seen of the module of %s. %s",
                listed(silent),
                self._hooks[silent[0]].attachment.likely_cause(silent),
            )

    def __enter__(self) -> Probes:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- what there is ----------------------------------------------------------------------------

    def get_captured_states(self, hook_id: str) -> list[CapturedState]:
        """Return what a capture hook has kept, oldest first."""
        return self._of_kind(hook_id, Capture, "captures nothing").states()

    def clear_captured_states(self, hook_id: str | None = None) -> None:
        """Free what a capture hook has kept, or all of them; capturing goes on."""
        if hook_id is not None:
            self._of_kind(hook_id, Capture, "captures nothing").clear()
            return
        with self._lock:
            for entry in self._hooks.values():
                if isinstance(entry.probe, Capture):
                    entry.probe.clear()

    def get_metrics(self, hook_id: str) -> dict[str, float]:
        """Return the numbers of a monitoring hook, by the names of its statistics."""
        from hookline.probes.monitor import Monitor

        numbers = self._of_kind(hook_id, Monitor, "measures nothing").report()
        return dict(numbers.get(hook_id, {}))

    def report(self) -> dict[str, dict[str, float]]:
        """Return the numbers of all monitoring hooks, by id."""
        return {one.id: self.get_metrics(one.id) for one in self.describe() if _monitors(one)}

    def get_findings(self, hook_id: str) -> list[Any]:
        """Return what a debug hook has found."""
        from hookline.probes.debug_probe import Debug

        return list(self._of_kind(hook_id, Debug, "checks nothing").findings)

    def get_hook(self, hook_id: str) -> Probe:
        """Return the probe with this id."""
        return self._entry(hook_id).probe

    def list_hooks(self) -> list[str]:
        """Return the ids of all hooks, disabled ones too, in the order of registration."""
        with self._lock:
            return list(self._hooks)

    def describe(self) -> list[ProbeInfo]:
        """Return what is known of each hook."""
        with self._lock:
            return [entry.info() for entry in self._hooks.values()]

    @property
    def nbytes(self) -> int:
        """The bytes that captured states keep in memory, exactly."""
        return self._store.nbytes

    def __contains__(self, hook_id: object) -> bool:
        return hook_id in self._hooks

    def __len__(self) -> int:
        return len(self._hooks)

    def __bool__(self) -> bool:
        return True  # also without hooks

    def __iter__(self) -> Iterator[str]:
        return iter(self.list_hooks())

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {listed(self.list_hooks())}, {self.nbytes} bytes>"

    def _entry(self, hook_id: str) -> _Entry:
        with self._lock:
            if hook_id not in self._hooks:
                near = nearest(str(hook_id), self._hooks)
                raise UnknownHookError(
                    f"There is no hook {hook_id!r}.{near} There are: {listed(self._hooks)}."
                )
            return self._hooks[hook_id]

    def _has(self, entry: _Entry) -> bool:
        return self._hooks.get(entry.id) is entry

    def _of_kind(self, hook_id: str, kind: type[P], otherwise: str) -> P:
        entry = self._entry(hook_id)
        if not isinstance(entry.probe, kind):
            article = "an" if entry.kind == "edit" else "a"
            raise ProbeError(f"'{hook_id}' is {article} {entry.kind} hook and {otherwise}.")
        return entry.probe

    # -- copies -----------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """A copy is on no module and has captured nothing."""
        begun = ("_store", "_hooks", "_lock", "_closed")
        return {name: value for name, value in self.__dict__.items() if name not in begun}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    # -- failures ---------------------------------------------------------------------------------

    def _guard(self, entry: _Entry) -> Callable[..., Any]:
        """What calls a probe: it isolates and counts."""

        def guard(function: Callable[..., Any], *args: Any) -> Any:
            if not self._has(entry):
                return None
            try:
                returned = function(*args)
            except _FATAL:
                raise
            except Exception as error:
                # What a probe says at the end of a forward is what it has found.
                found = function == entry.probe.forward_end and isinstance(error, ProbeError)
                if entry.probe.edits or found:
                    raise
                self._failed(entry, function.__name__, error)
                return None
            if entry.in_a_row:
                entry.in_a_row.pop(function.__name__, None)
            if not self._has(entry):  # removed meanwhile, by another thread
                entry.free()
            return returned

        return guard

    def _failed(self, entry: _Entry, where: str, error: Exception) -> None:
        with self._lock:
            entry.failures += 1
            in_a_row = entry.in_a_row[where] = entry.in_a_row.get(where, 0) + 1
            entry.last_error = f"{type(error).__name__}: {error}"
            log.error(
                "The hook '%s' failed (%s); the model goes on.",
                entry.id,
                entry.last_error,
                exc_info=error,
            )
            if in_a_row >= _MAX_FAILURES and entry.attachment.enabled:
                entry.attachment.off()
                log.error(
                    "The hook '%s' is DISABLED: it failed %d times in a row. enable_hook('%s') "
                    "lets it back.",
                    entry.id,
                    in_a_row,
                    entry.id,
                )


HookManager = Probes


@dataclass(slots=True, eq=False)
class _Entry:
    """One hook of a manager."""

    id: str
    kind: Kind
    probe: Probe
    module: torch.nn.Module
    failures: int = 0
    in_a_row: dict[str, int] = field(default_factory=dict[str, int])  # by what failed
    last_error: str | None = None

    @property
    def attachment(self) -> Attachment:
        attachment = self.probe.attachment
        assert attachment is not None
        return attachment

    def free(self) -> None:
        if isinstance(self.probe, Capture):
            self.probe.forget()

    def info(self) -> ProbeInfo:
        probe = self.probe
        return ProbeInfo(
            self.id,
            self.kind,
            type(self.module).__name__,
            self.attachment.enabled,
            self.failures,
            self.last_error,
            probe.counts if isinstance(probe, Capture) else None,
        )


def _monitors(info: ProbeInfo) -> bool:
    return info.kind == "monitoring"


def _described(thing: Any) -> str:
    return "None" if thing is None else f"a {type(thing).__name__}"


def _check(max_captured_states: Any, memory_limit_mb: Any, enable_intervention: Any) -> None:
    if not isinstance(enable_intervention, bool):
        raise ConfigError(f"enable_intervention is True or False, not {enable_intervention!r}.")
    for name, value, kinds in (
        ("max_captured_states", max_captured_states, int),
        ("memory_limit_mb", memory_limit_mb, int | float),
    ):
        if value is None:
            continue
        if not isinstance(value, kinds) or isinstance(value, bool) or value <= 0:
            raise ConfigError(f"{name} is a number above 0, or None, not {value!r}.")
