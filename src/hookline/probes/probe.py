"""Probe: the base of what captures, measures, checks or edits the inputs and outputs of modules."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch

from hookline.arguments import check_name
from hookline.errors import ConfigError, ProbeError
from hookline.hook import Hook
from hookline.interrupts import HeldInterrupts
from hookline.probes.attachment import Attachment
from hookline.probes.call import Call
from hookline.probes.module_selection import Which, check_model, select
from hookline.probes.taps import check_taps

log = logging.getLogger("hookline")


class Probe(Hook):
    """Sees the calls of some modules. Subclass it and implement `after(call)` or `before(call)`.

    A probe that only observes must not change tensors in place, which raises an `ObserverError`, or
    use global random number generators: these are restored, and the probe is disabled.

    Args:
        modules: Which modules: names, globs, regular expressions, types, predicates, or modules
            themselves; None for none, only taps.
        taps: Which of the values that `hookline.tap` names in the model's code: names or globs.
    """

    hookline_kind = "probe"

    edits: bool = False
    """Whether what `after` returns replaces the module's output.

    This needs `enable_intervention`, and a failure stops training.
    """

    edits_input: bool = False
    """Whether the edit is of a module's arguments, so what `compiled_edit` returns gets these."""

    enable_intervention: bool = False
    """The permission to edit. `Edit` takes it as an option; other subclasses set it."""

    wants_before: bool = False
    """Whether `before(call)` is called, too. True for a class that implements it."""

    wants_input: bool = True
    """Whether it reads `call.args` or `call.kwargs`; this has a cost in a compiled model."""

    modules: Which | None = ""
    taps: Sequence[str] = ()
    attachment: Attachment | None = None
    probe_name: str = "probe"
    wants_forward_end = False
    _warned_compiled = False
    _results: ClassVar[tuple[str, ...]] = ()
    """The attributes that a copy does not get, but sets anew with `_reset_results`."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for method in ("before", "forward_end"):
            is_implemented = getattr(cls, method) is not getattr(Probe, method)
            if is_implemented and f"wants_{method}" not in vars(cls):
                setattr(cls, f"wants_{method}", True)
        if cls.edits:  # training depends on it
            cls.critical = cls.intervenes = True

    def __init__(self, modules: Which | None, taps: Sequence[str] = ()) -> None:
        self.modules = modules
        self.taps = check_taps(taps)

    def before(self, call: Call) -> Any:
        """Called before a module runs. An edit may return new `(args, kwargs)`."""
        return None

    def after(self, call: Call) -> Any:
        """Called after a module has run. An edit may return what replaces `call.output`."""
        return None

    def forward_end(self) -> None:
        """Called when the model's outermost call has ended without an error."""

    def compiled_edit(self, name: str) -> Callable[[Any, torch.Tensor], Any] | None:
        """Return the edit for compiled models: a function that can be compiled.

        It is called with the output and a tensor that says whether the edit is on, and returns
        `torch.where(on, edited, output)`.
        """
        return None

    # -- attaching --------------------------------------------------------------------------------

    def attach(
        self,
        model: torch.nn.Module,
        *,
        name: str | None = None,
        every: int | None = None,
        context: Any = None,
        guard: Callable[..., Any] | None = None,
    ) -> Attachment:
        """Attach the probe to a model: it sees the calls of its modules from now on.

        Args:
            model: The model.
            name: The probe's name in messages and captured states.
            every: See only the forwards N, 2N, 3N … of the model, and all calls of its modules
                outside of its own forward. During training the schedule counts steps and belongs
                to the registration: `trainer.add_hook(probe, every=N)`.
            context: Has `step` and `epoch` during training.
            guard: Calls the probe's methods; by default they are called directly.
        """
        self.check_permission()
        if name is not None:
            check_name("attach(…, name=…)", name)
        try:
            with HeldInterrupts():
                if self.attachment is None or self.attachment.root is not model:
                    self.detach()
                    self.probe_name = name or self.probe_name
                    sites = self.choose(model)
                    self.attachment = Attachment(self, sites, model, context, guard, self.taps)
                attachment = self.attachment
                if every is not None:
                    attachment.schedule(every)
                attachment.enable()
        except BaseException:
            self.detach()
            raise
        return attachment

    def check_permission(self) -> None:
        """Raise if it edits without the permission."""
        made_with = self.hookline_options.get("enable_intervention", False)
        if self.edits and not (self.enable_intervention or made_with):
            raise ProbeError(
                f"A {type(self).__name__} edits the outputs of modules, which is not allowed yet. "
                f"To allow it, set {type(self).__name__}.enable_intervention = True, or set it on "
                "this probe."
            )

    def choose(self, model: torch.nn.Module) -> dict[str, torch.nn.Module]:
        """Return the model's modules that the probe is for; raise if one does not exist."""
        check_model(model)
        if self.modules is not None:
            return select(model, self.modules)
        if not self.taps:
            raise ConfigError(f"The probe '{self.probe_name}' has neither modules nor taps.")
        return {}

    def detach(self) -> None:
        """Detach the probe from the model."""
        if self.attachment is not None:
            self.attachment.close()
            self.attachment = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()

    def can_see_gradients(self, call: Call) -> bool:
        """Return whether the gradients of an output can be seen; warn once if they cannot."""
        if call.compiled and not self._warned_compiled:
            self._warned_compiled = True
            log.warning(
                "The probe '%s' cannot see gradients in a compiled model, only outputs.",
                self.probe_name,
            )
        return not call.compiled

    def call_guarded(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function of the probe that is not called by the attachment, if it is enabled."""
        if self.attachment is not None and self.attachment.enabled:
            self.attachment.guard(function, *args)

    def __getstate__(self) -> dict[str, Any]:
        """Copy the options: a copy is on no model and has no results."""
        own = ("attachment", "_warned_compiled", *self._results)
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset_results()

    def _reset_results(self) -> None:
        """Set the attributes of `_results` as a new probe has them."""
