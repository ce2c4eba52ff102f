"""`hookline.probe`: capture outputs of modules in a `with` block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from hookline.arguments import check_whole_number, listed_strings
from hookline.printable import printable
from hookline.probes.capture import Calls, Capture
from hookline.probes.captured_state import CapturedState
from hookline.probes.module_selection import Which
from hookline.probes.store import Counts

__all__ = ["ProbeResults", "probe"]


def probe(
    model: torch.nn.Module,
    which: Which | None = None,
    *,
    taps: str | Sequence[str] = (),
    every: int = 1,
    **options: Any,
) -> ProbeResults:
    """Capture the outputs of some modules until the end of the `with` block, or until `close()`.

    By default outputs are captured as copies: a later in-place operation, such as an in-place ReLU,
    does not change them. Calls are kept up to 1 GB; then the oldest are dropped, and a warning says
    how many. `memory_limit_mb=None` keeps all.

    Args:
        model: The model.
        which: Its modules: a name, a glob such as `"blocks.*.mlp"`, a regular expression, a type, a
            function of name and module, a module, or a list of these.
        taps: Names of values in the model's code, as given to `hookline.tap`, or globs.
        every: Capture only in the forwards N, 2N, 3N … of the model.
        options: Options of `Capture`: `input=True` and `kwargs=True` also keep the arguments,
            `gradient=True` the gradients of outputs; `device`, `dtype`, `select`, `reduce`, `by` …

    Returns:
        A mapping from names of modules and taps to their captured calls.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
        >>> with probe(model, "0") as results:
        ...     _ = model(torch.ones(1, 2))
        >>> results["0"].output.shape
        torch.Size([1, 3])
    """
    defaults: dict[str, Any] = {"input": False, "kwargs": False}
    check_whole_number("probe(…, every=…)", every, 1)
    taps = tuple(listed_strings("probe(…, taps=…)", taps))
    capture = Capture(which, **{**defaults, **options}, taps=taps)
    try:
        capture.attach(model, name="probe", every=None if every == 1 else int(every))
        return ProbeResults(capture)
    except BaseException:  # Ctrl-C may come before the results are returned
        capture.detach()
        raise


class ProbeResults(Mapping[str, Calls]):
    """The captured calls, by the names of modules and taps.

    `results[name]` is a sequence of all captured calls, `results[name].output` the output of the
    last one. Results can be read at any time, also after `close()`, until `clear()`.
    """

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        """The probe."""

    def __getitem__(self, name: str) -> Calls:
        return self.capture[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.capture)

    def __len__(self) -> int:
        return sum(1 for _ in self.capture)

    def __bool__(self) -> bool:
        return True  # also before anything was captured

    def __repr__(self) -> str:
        last = {state.module: state for state in self.capture.states()}
        lines = "\n".join(f"  {printable(repr(name))}: {state!r}" for name, state in last.items())
        if self.counts.dropped:
            lines += f"\n  # {self.counts.dropped} of {self.counts.captured} states were dropped"
        return f"ProbeResults({{\n{lines}\n}})" if lines else "ProbeResults({})"

    def states(self, name: str | None = None) -> list[CapturedState]:
        """Return all states in the order of the calls, or those of one name."""
        return self.capture.states(name)

    @property
    def counts(self) -> Counts:
        """How many states were captured, kept and dropped."""
        return self.capture.counts

    def enable(self) -> None:
        """Resume capturing."""
        if self.capture.attachment is not None:
            self.capture.attachment.enable()

    def disable(self) -> None:
        """Pause capturing."""
        if self.capture.attachment is not None:
            self.capture.attachment.disable()

    def clear(self) -> None:
        """Free the captured states."""
        self.capture.clear()

    def close(self) -> None:
        """Detach the probe from the model; the captured states are kept."""
        self.capture.detach()

    def __enter__(self) -> ProbeResults:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
