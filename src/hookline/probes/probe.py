"""Probe: something on a module that captures, measures, checks or edits what flows through it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hookline.errors import ConfigError, ProbeError
from hookline.hook import Hook
from hookline.probes.attachment import Attachment, Call
from hookline.probes.module_selection import Which, select
from hookline.probes.taps import check_taps

__all__ = ["Probe"]


class Probe(Hook):
    """Sees the calls of some modules. Subclass it and write `after(call)`, or `before(call)` too.

    Args:
        modules: which: names, globs, regular expressions, types, predicates, or modules themselves;
            None: none, only taps.
        taps: which of the values that `hookline.tap` names in the model's code: names or globs.
    """

    hookline_kind = "probe"

    edits: bool = False
    """Whether it changes what flows: then what `after` returns replaces the module's output.

    It needs the permission to do so, `enable_intervention`; and when it fails, training stops.
    """

    enable_intervention: bool = False
    """The permission. `Edit` is made with it; an edit of one's own sets it."""

    wants_before: bool = False
    """Whether `before(call)` is to be called, too."""

    wants_input: bool = True
    """Whether it looks at what comes in; in a compiled model that costs extra."""

    wants_recomputed: bool = False
    """Whether it sees the calls of a recomputation in backward, too (`call.recomputed`)."""

    modules: Which | None = ""
    taps: Sequence[str] = ()
    attachment: Attachment | None = None
    probe_name: str = "probe"

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.edits:  # training is changed by it, and depends on it
            cls.critical = cls.intervenes = True

    def __init__(self, modules: Which | None, taps: Sequence[str] = ()) -> None:
        self.modules = modules
        self.taps = check_taps(taps)

    def before(self, call: Call) -> Any:
        """A module is about to run. An edit may return new `(args, kwargs)`."""
        return None

    def after(self, call: Call) -> Any:
        """A module has run. An edit may return what replaces `call.output`."""
        return None

    def forward_start(self) -> None:
        """Called when the model's outermost call begins, but not in a recomputation."""

    def forward_end(self) -> None:
        """Called when the model's outermost call has ended without an error."""

    @property
    def wants_forward_start(self) -> bool:
        """Whether the class implements `forward_start`."""
        return type(self).forward_start is not Probe.forward_start

    @property
    def wants_forward_end(self) -> bool:
        """Whether the class implements `forward_end`."""
        return type(self).forward_end is not Probe.forward_end

    @property
    def acts(self) -> bool:
        """Whether an edit that is on is to be applied; `attachment.refresh()` when it changed."""
        return True

    def compiled_edit(self, name: str) -> Callable[[Any, torch.Tensor], Any] | None:
        """For edits in compiled models: a function that can be compiled.

        It gets the output and a tensor that says whether the edit is on, and returns the output to
        use: `torch.where(on, edited, output)`.
        """
        return None

    # -- on a model -------------------------------------------------------------------------------

    def attach(
        self,
        model: torch.nn.Module,
        *,
        name: str | None = None,
        context: Any = None,
        guard: Callable[..., Any] | None = None,
    ) -> Attachment:
        """Put the probe on a model; it sees calls from now on."""
        self.check_permission()
        if self.attachment is None or self.attachment.root is not model:
            self.detach()
            self.probe_name = name or self.probe_name
            sites = self.choose(model)
            self.attachment = Attachment(self, sites, model, context, guard, self.taps)
        self.attachment.on()
        return self.attachment

    def check_permission(self) -> None:
        """Raise where it edits and may not."""
        made_with = self.hookline_options.get("enable_intervention", False)
        if self.edits and not (self.enable_intervention or made_with):
            raise ProbeError(
                f"A {type(self).__name__} edits what flows through the model, and that is not "
                f"allowed yet. If you mean it, set {type(self).__name__}.enable_intervention = "
                "True, or on this one alone."
            )

    def choose(self, model: torch.nn.Module) -> dict[str, torch.nn.Module]:
        """Return the modules of a model that the probe is for; raise where one is not there."""
        if self.modules is not None:
            return select(model, self.modules)
        if not self.taps:
            raise ConfigError(f"The probe '{self.probe_name}' has neither modules nor taps.")
        return {}

    def detach(self) -> None:
        """Take it off the model."""
        if self.attachment is not None:
            self.attachment.close()
            self.attachment = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a probe is on no model."""
        return {name: value for name, value in self.__dict__.items() if name != "attachment"}
