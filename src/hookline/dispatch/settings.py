"""How a manager treats its hooks, when a hook is due, and a hook with its schedule in a list."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Ge, Gt

from hookline.arguments import check_flag, check_number, check_whole_number, show_value
from hookline.errors import ArgumentError
from hookline.hook import Hook


@dataclass(frozen=True)
class HookSettings:
    """How a manager treats failing and costly hooks.

    Args:
        isolate: log and count a hook's exception and continue; False re-raises it, for debugging.
        max_failures: disable a hook after this many failures in a row.
        budget: share of the run that hooks may take before a warning names the costliest one,
            once; None disables the warning.
        budget_after: seconds of training before the budget is checked, and at least 100 steps. The
            first five steps do not count.
        log_errors: log each failure with its traceback; the summary counts them in any case.
    """

    isolate: bool = True
    max_failures: Annotated[int, Gt(0)] = 3
    budget: Annotated[float, Gt(0)] | None = 0.05
    budget_after: Annotated[float, Ge(0)] = 60.0
    log_errors: bool = True

    def __post_init__(self) -> None:
        check_flag("HookSettings(isolate=…)", self.isolate)
        check_flag("HookSettings(log_errors=…)", self.log_errors)
        check_whole_number("HookSettings(max_failures=…)", self.max_failures, 1)
        check_number("HookSettings(budget_after=…)", self.budget_after, 0)
        if self.budget is not None:
            check_number("HookSettings(budget=…)", self.budget, 0, is_included=False)


@dataclass(frozen=True)
class Schedule:
    """The steps in which a hook is called. In such a step it gets all events, in others none.

    The schedule belongs to the registration, not to the hook.

    Args:
        every: call the hook in steps N, 2N, 3N, …
        sample_rate: of these, call it in this fraction. The choice depends on the step and the
            hook's name only, so it is the same on every rank and after resuming.
        from_epoch: call it from this epoch on, counted from 0.
    """

    every: int = 1
    sample_rate: float = 1.0
    from_epoch: int = 0

    def __post_init__(self) -> None:
        check_whole_number("every", self.every, 1)
        check_whole_number("from_epoch", self.from_epoch, 0)
        rate = self.sample_rate
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate <= 1:
            raise ArgumentError(
                f"sample_rate is {show_value(rate)}; expected a fraction above 0 and up to 1, such "
                "as 0.1. To disable a hook, use enabled=False."
            )

    def __str__(self) -> str:
        parts = [f"every {self.every}"] if self.every > 1 else []
        parts += [f"sample {self.sample_rate:g}"] if self.sample_rate < 1 else []
        parts += [f"from epoch {self.from_epoch}"] if self.from_epoch else []
        return ", ".join(parts) or "always"

    def is_due(self, name: str, step: int, epoch: int) -> bool:
        """Return whether the hook of this name is called in this step and epoch."""
        return not step % self.every and epoch >= self.from_epoch and self.samples(name, step)

    def samples(self, name: str, step: int) -> bool:
        """Return whether `sample_rate` selects this step for the hook of this name."""
        return zlib.crc32(f"{name}:{step}".encode()) < self.sample_rate * 2**32


@dataclass(frozen=True)
class Registration:
    """A hook of a list, with the arguments that `add_hook` registers it with; see `every`.

    Attributes:
        hook: the hook, its name, or a mapping as in a config file.
        options: the arguments of `add_hook`.
    """

    hook: Any
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


HookLike = Hook | Registration | Mapping[str, Any] | str
"""An item of a list of hooks: a hook, `every(…)`, or as in a config file a mapping or a name."""


def every(steps: int, hook: HookLike, **options: Any) -> Registration:
    """Return a hook that is called in steps N, 2N, 3N … only, for any list of hooks.

        hookline.attach(model, optimizer, hooks=[hookline.every(100, GradientMonitor())])

    A built-in with an option `every` takes N instead of that option's default.

    Args:
        steps: the number of steps, N.
        hook: the hook; its name, or a mapping as in a config file, where names are known.
        options: further arguments of `add_hook`, such as `name` or `ranks`.
    """
    check_whole_number("every(steps, …)", steps, 1)
    return Registration(hook, {"every": steps, **options})
