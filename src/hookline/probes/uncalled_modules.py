"""Warnings about modules that a probe is attached to and that no call was seen of."""

from __future__ import annotations

import logging
import sys
from types import CodeType
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch

from hookline.errors import listed

if TYPE_CHECKING:
    from hookline.probes.attachment import Attachment

__all__ = ["UncalledModules"]

log = logging.getLogger("hookline")

_WARNED: WeakSet[torch.nn.Module] = WeakSet()
"""Models whose calls were not seen, as a warning has said: perhaps they were never called."""


class UncalledModules:
    """The modules of one attachment that no call was seen of. Warns about them once."""

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self._warned = False

    def names(self) -> list[str]:
        """Return the names of the modules."""
        sites = self._attachment.sites.values()
        uncalled = [site for site in sites if not site.was_called]
        # A ModuleList has no forward and is never called: it was selected along with others.
        callable_ = [site for site in uncalled if _has_forward(site.module)]
        return [site.name for site in (uncalled if len(uncalled) == len(sites) else callable_)]

    def warn_after_forward(self) -> None:
        """Warn at the end of the model's first forward."""
        if self._warned:
            return
        self._warned = True
        uncalled, taps = self.names(), self._attachment.taps
        if uncalled:
            log.warning(
                "The probe '%s' saw no call of %s in the model's first forward. %s",
                self._attachment.probe.probe_name,
                listed(uncalled),
                self.explain(uncalled),
            )
        if taps is not None and taps.unmatched:
            log.warning(
                "The probe '%s' saw no value named %s in the model's first forward. %s",
                self._attachment.probe.probe_name,
                listed(taps.unmatched),
                taps.hint(),
            )

    def warn_after_step(self) -> None:
        """Warn at the end of a step of training in which the model's own call was not seen."""
        self._warn_model_not_called(self._attachment.uncalled)

    def warn_on_close(self) -> None:
        """Warn when the attachment is closed outside of training."""
        attachment, root = self._attachment, self._attachment.root
        outside = attachment.enabled and attachment.context is None
        if outside and root is not None and root not in _WARNED:
            self._warn_model_not_called(self.names())

    def _warn_model_not_called(self, uncalled: list[str]) -> None:
        if self._warned or not uncalled:
            return
        self._warned = True
        if self._attachment.root is not None:
            _WARNED.add(self._attachment.root)
        log.warning(
            "The probe '%s' saw neither %s nor a call of the model itself. %s",
            self._attachment.probe.probe_name,
            listed(uncalled),
            self.explain(uncalled, model_called=False),
        )

    def explain(self, uncalled: list[str], *, model_called: bool = True) -> str:
        """Return a sentence on the likely reason why no call of these modules was seen."""
        root = self._attachment.root
        if root is not None and (
            _is_compiled(root)
            or _has_compiled_code(root)
            or (not model_called and _may_be_compiled_by_wrapping(root))
        ):
            return (
                "The model was compiled and called before the probe was attached. Attach first, "
                "then compile; or call torch.compiler.reset() now."
            )
        if self._are_within_compiled(uncalled):
            return "It was compiled before the probe was attached. Attach first, then compile."
        if root is not None and not model_called:
            return (
                "Probably its `.forward()` or another method was called directly, which runs no "
                "PyTorch hooks. Call modules as `model(x)`."
            )
        return (
            "Probably it was not called as a module: a fused path was used instead (as by an "
            "attention layer in eval mode), its `.forward()` was called directly, or this forward "
            "did not need it."
        )

    def _are_within_compiled(self, uncalled: list[str]) -> bool:
        sites, root = self._attachment.sites, self._attachment.root
        uncalled_ids = {id(sites[name].module) for name in uncalled if name in sites}
        attached = [site.module for site in sites.values() if site.module is not None]
        return any(
            _is_compiled(module) and any(id(inner) in uncalled_ids for inner in module.modules())
            for module in (attached if root is None else root.modules())
        )


def _has_forward(module: torch.nn.Module | None) -> bool:
    return getattr(type(module), "forward", None) is not torch.nn.Module.forward


def _is_compiled(module: torch.nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or module.__dict__.get("_compiled_call_impl") is not None


def _has_compiled_code(module: torch.nn.Module) -> bool:
    """Return whether Dynamo has compiled a module's forward, for it or another of its class."""
    code = getattr(module.forward, "__code__", None)
    return code is not None and _has_cache_entries(code)


def _may_be_compiled_by_wrapping(module: torch.nn.Module) -> bool:
    """Return whether a model of one of PyTorch's own classes may have been compiled.

    Dynamo compiles a frame that it puts around these, which all of them share.
    """
    wrap = getattr(sys.modules.get("torch._dynamo.external_utils"), "wrap_inline", None)
    origin = getattr(type(module).forward, "__module__", None) or ""
    if wrap is None or not origin.startswith("torch."):
        return False
    inner = [code for code in wrap.__code__.co_consts if isinstance(code, CodeType)]
    return any(_has_cache_entries(code) for code in inner)


def _has_cache_entries(code: CodeType) -> bool:
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    get_entries = getattr(dynamo, "_debug_get_cache_entry_list", None)
    return get_entries is not None and bool(get_entries(code))
