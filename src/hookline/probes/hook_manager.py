"""Probes, also called HookManager: probes on single modules, each with an id."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from hookline.arguments import check_flag, check_instance, check_name, check_whole_number
from hookline.dispatch import HookInfo
from hookline.dispatch import HookManager as Dispatch
from hookline.errors import HookFailedError, NameTakenError, ProbeError, listed
from hookline.interrupts import HeldInterrupts
from hookline.probes.attachment import Attachment
from hookline.probes.capture import Capture, bytes_of
from hookline.probes.probe import Probe
from hookline.probes.store import MAX_CAPTURED_STATES, CapturedState, Store
from hookline.probes.sync import arrange_probes

P = TypeVar("P", bound=Probe)


class _ProbesInOrder(Dispatch):
    """Orders probes as they were registered, edits among the others."""

    _by_group = False


@dataclass(frozen=True, eq=False)
class _ModuleProbe:
    """A probe that is registered on one module."""

    probe: Probe
    module: torch.nn.Module
    every: int


class Probes:
    """Registers probes on modules, each under an id.

    A context manager: on exit all its hooks are removed and their states freed. Safe to use from
    several threads. A probe that fails does not fail the model: the error is logged and counted,
    and after three failures in a row the hook is disabled. Errors of edits are raised.

    With `every=N`, a hook sees only the calls N, 2N, 3N … of its module.

    Args:
        max_captured_states: How many states to keep, over all hooks; None for any number.
        cleanup_interval: The number of captures between two clean-ups: in between there may be up
            to `cleanup_interval - 1` states more than `max_captured_states`.
        memory_limit_mb: How many megabytes (of 1024² bytes) to keep, over all hooks; never
            exceeded. None for no limit.
        enable_intervention: Whether hooks may edit what flows through modules.

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
        max_captured_states: int | None = MAX_CAPTURED_STATES,
        cleanup_interval: int = 1,
        memory_limit_mb: float | None = 1024,
        enable_intervention: bool = False,
    ) -> None:
        check_flag("enable_intervention", enable_intervention)
        if max_captured_states is not None:
            check_whole_number("max_captured_states", max_captured_states, 1)
        self.enable_intervention = enable_intervention
        memory_limit = bytes_of(memory_limit_mb)
        self._store = Store(max_captured_states, memory_limit, cleanup_interval)
        self._options = (max_captured_states, cleanup_interval, memory_limit_mb)
        self._registered: dict[str, _ModuleProbe] = {}
        self._hooks = _ProbesInOrder(on_change=self._sync)
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
        """Capture the arguments and the output of a module, and return the id.

        Args:
            module: The module.
            hook_id: The hook's id, and the `module` of its states.
            layer_idx: The layer's number, for the states.
            capture_input: Whether to keep the arguments, positional and by keyword.
            capture_output: Whether to keep the output.
            options: `every`, and further options of `Capture`: `gradient`, `device`, `select` …
        """
        kept = {"input": capture_input, "kwargs": capture_input, "output": capture_output}
        options = {"layer_idx": layer_idx, **kept, "store": self._store, **options}
        return self._register(module, hook_id, Capture, options)

    def register_monitoring_hook(
        self, module: torch.nn.Module, hook_id: str, metrics: Any = None, **options: Any
    ) -> str:
        """Measure the output of a module, and return the id; `get_metrics` has the values.

        `metrics` are names of metrics of `Monitor`, None for the default ones; `options` are
        `every` and further options of `Monitor`.
        """
        from hookline.probes.monitor import Monitor

        options = {"metrics": metrics, **options}
        return self._register(module, hook_id, Monitor, options)

    def register_debug_hook(
        self, module: torch.nn.Module, hook_id: str, conditions: Any = None, **options: Any
    ) -> str:
        """Check the output of a module, and return the id; `get_hook(id)` has the `findings`.

        `conditions` are those of `Debug`, None for NaN and infinity; `options` are `every` and
        further options of `Debug`, such as `action`.
        """
        from hookline.probes.debug_probe import Debug

        options = {"conditions": conditions, **options}
        return self._register(module, hook_id, Debug, options)

    def register_probe(
        self, module: torch.nn.Module, hook_id: str, probe: Probe, every: int | None = None
    ) -> str:
        """Register a probe on a module, whatever its own `modules` are, and return the id.

        For an edit, such as `Edit.scale(None, 2.0, enable_intervention=True)`, the manager needs
        `enable_intervention=True`, too.
        """
        check_instance(f"'{hook_id}': probe", probe, Probe, "a Probe")
        if probe.attachment is not None:
            raise ProbeError(
                f"'{hook_id}': this probe is attached to a module already. Make another instance."
            )
        if probe.edits:
            self._check_intervention(hook_id)
        return self._register(module, hook_id, lambda _: probe, {"every": every})

    def _check_intervention(self, hook_id: str) -> None:
        if not self.enable_intervention:
            raise ProbeError(
                f"'{hook_id}' edits what flows through the module, and this manager does not allow "
                f"edits. To allow them: {type(self).__name__}(enable_intervention=True)."
            )

    def _register(self, module: Any, hook_id: Any, make: Callable[..., Probe], options: Any) -> str:
        with self._lock, HeldInterrupts():
            if self._closed:
                raise ProbeError("This manager is closed. Make a new one.")
            check_name("hook_id", hook_id)
            check_instance(f"'{hook_id}': module", module, torch.nn.Module, "a torch.nn.Module")
            if hook_id in self._registered:
                raise NameTakenError(
                    f"There is a hook '{hook_id}' already. Choose another hook_id, or remove it "
                    f"first: remove_hook('{hook_id}')."
                )
            every = options.pop("every", None)
            every = 1 if every is None else every
            probe = make(module, **options)
            probe.probe_name = hook_id
            self._registered[hook_id] = _ModuleProbe(probe, module, every)
            try:
                return self._hooks.add_hook(probe, hook_id, every=every)
            except BaseException:
                del self._registered[hook_id]
                raise

    # -- removing and toggling --------------------------------------------------------------------

    def remove_hook(self, hook_id: str) -> None:
        """Remove a hook from its module and free its states."""
        with self._lock, HeldInterrupts():
            self._hooks.remove_hook(hook_id)
            entry = self._registered.pop(hook_id)
            entry.probe.detach()
            _free_states(entry.probe)

    def clear_hooks(self) -> None:
        """Remove all hooks."""
        with self._lock:
            for hook_id in self.list_hooks():
                self.remove_hook(hook_id)

    def enable_hook(self, hook_id: str) -> None:
        """Enable a hook again, also one that was disabled after repeated failures."""
        self._hooks.enable_hook(hook_id)

    def disable_hook(self, hook_id: str) -> None:
        """Disable a hook; its states are kept."""
        self._hooks.disable_hook(hook_id)

    def close(self) -> None:
        """Remove all hooks and free everything; the manager cannot be used afterwards."""
        with self._lock:
            self._closed = True
            for entry in self._registered.values():
                if entry.probe.attachment is not None and entry.probe.attachment.enabled:
                    entry.probe.attachment.check_calls()
            self.clear_hooks()

    def __enter__(self) -> Probes:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- attaching --------------------------------------------------------------------------------

    def _sync(self) -> None:
        """Attach the probes that are enabled, each to its module, and detach the others."""
        with HeldInterrupts():
            attached: list[Attachment] = []
            for name, _, enabled in self._hooks.of_kind("probe"):
                entry = self._registered[name]
                probe = entry.probe
                if enabled and probe.attachment is None:  # each call of the module is a forward
                    guard = self._make_guard(name, entry)
                    probe.attachment = Attachment(probe, {name: entry.module}, guard=guard)
                    probe.attachment.schedule(entry.every)
                if probe.attachment is not None:
                    attached.append(probe.attachment)
                    (probe.attachment.enable if enabled else probe.attachment.disable)()
            arrange_probes(attached)

    def _make_guard(self, name: str, entry: _ModuleProbe) -> Callable[..., Any]:
        guarded, registered = self._hooks.guard(name), self._registered

        def guard(function: Callable[..., Any], *args: Any) -> Any:
            if registered.get(name) is not entry:
                return None
            try:
                returned = guarded(function, *args)
            except HookFailedError as error:  # outside of training, raise the probe's own error
                cause = error.__cause__ if type(error) is HookFailedError else None
                raise cause or error from None
            if registered.get(name) is not entry:  # removed by another thread
                _free_states(entry.probe)
            return returned

        return guard

    # -- results ----------------------------------------------------------------------------------

    def get_captured_states(self, hook_id: str) -> list[CapturedState]:
        """Return the states of a capture hook, oldest first."""
        return self._get(hook_id, Capture, "captures nothing").states()

    def clear_captured_states(self, hook_id: str | None = None) -> None:
        """Free the states of a capture hook, or of all of them; capturing continues."""
        if hook_id is not None:
            self._get(hook_id, Capture, "captures nothing").clear()
            return
        for entry in list(self._registered.values()):
            if isinstance(entry.probe, Capture):
                entry.probe.clear()

    def get_metrics(self, hook_id: str) -> dict[str, float]:
        """Return the values of a monitoring hook over the calls since this was last called."""
        from hookline.probes.monitor import Monitor

        values = self._get(hook_id, Monitor, "measures nothing").report()
        return dict(values.get(hook_id, {}))

    def get_hook(self, hook_id: str) -> Any:
        """Return the probe with this id."""
        return self._hooks.get_hook(hook_id)

    def _get(self, hook_id: str, cls: type[P], otherwise: str) -> P:
        probe = self.get_hook(hook_id)
        if isinstance(probe, cls):
            return probe
        raise ProbeError(f"'{hook_id}' is a {type(probe).__name__}, which {otherwise}.")

    def list_hooks(self) -> list[str]:
        """Return the ids of all hooks in the order of registration, disabled ones included."""
        return list(self._registered)

    def describe(self) -> list[HookInfo]:
        """Return a `HookInfo` for each hook, as the `describe` of loops does."""
        return self._hooks.describe()

    @property
    def nbytes(self) -> int:
        """The exact number of bytes of captured states in memory."""
        return self._store.nbytes

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {listed(self.list_hooks())}, {self.nbytes} bytes>"

    def __reduce__(self) -> Any:
        """A copy has the options, but no hooks and no states."""
        return type(self), (*self._options, self.enable_intervention)


def _free_states(probe: Probe) -> None:
    if isinstance(probe, Capture):
        probe.forget()


HookManager = Probes
