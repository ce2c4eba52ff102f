"""BuiltIn: the base of Hookline's own hooks, whose options are checked when one is made."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from hookline.hook import Hook
from hookline.options import check_options

__all__ = ["BuiltIn"]


class BuiltIn(Hook):
    """A hook of Hookline's own.

    Its options are the parameters of `__init__`; `hookline_options` has them, for the manifest.
    """

    cost: ClassVar[str] = ""
    """What it costs, in one sentence."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.hookline_cost = cls.cost

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Check the options; `__init__` gets them as they were given."""
        hook = super().__new__(cls)
        hook.hookline_options = check_options(cls, args, options, values=True)
        return hook
