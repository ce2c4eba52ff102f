"""The short form: `with hookline.probe(model, "blocks.*.mlp") as seen: model(x)`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from hookline.probes.capture import Calls, Capture
from hookline.probes.captured_state import CapturedState
from hookline.probes.module_selection import Which
from hookline.probes.store import Counts

__all__ = ["Seen", "probe"]


def probe(
    model: torch.nn.Module,
    which: Which | None = None,
    *,
    taps: str | Sequence[str] = (),
    **options: Any,
) -> Seen:
    """Keep what some modules return, from now on until the end of the `with` block, or `close()`.

    By default the outputs are kept, as copies: an in-place operation after the module, as in many a
    residual network, changes nothing of them. All calls are kept, without a limit; around a long
    training, say `memory_limit_mb=` or `max_states=`.

    Args:
        model: The model.
        which: Its modules: a name, a glob such as `"blocks.*.mlp"`, a regular expression, a type, a
            function of name and module, a module, or a list of these.
        taps: Names of values in the model's code, as given to `hookline.tap`, or globs.
        options: What `Capture` takes: `input=True` and `kwargs=True` keep what goes in as well,
            `gradient=True` what flows back; `device`, `dtype`, `select`, `reduce`, `by` …

    Returns:
        A mapping from names to what was captured of them.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
        >>> with probe(model, "0") as seen:
        ...     _ = model(torch.ones(1, 2))
        >>> seen["0"].output.shape
        torch.Size([1, 3])
    """
    defaults: dict[str, Any] = {"input": False, "kwargs": False}
    if "store" not in options:
        defaults["memory_limit_mb"] = None
    names = (taps,) if isinstance(taps, str) else tuple(taps)
    capture = Capture(which, **{**defaults, **options}, taps=names)
    capture.attach(model, name="probe")
    return Seen(capture)


class Seen(Mapping[str, Calls]):
    """What was captured, by the names of modules and taps.

    `seen[name].output` is that of the last call, `seen[name]` a sequence of all calls. It can be
    read at any time, also after `close()`, until `clear()`.
    """

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        """The probe itself."""

    def __getitem__(self, name: str) -> Calls:
        return self.capture[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.capture)

    def __len__(self) -> int:
        return sum(1 for _ in self.capture)

    def __bool__(self) -> bool:
        return True  # also when nothing was captured yet

    def __repr__(self) -> str:
        last = {state.module: state for state in self.capture.metadata()}
        shown = "\n".join(f"  {name!r}: {state!r}" for name, state in last.items())
        return f"Seen({{\n{shown}\n}})" if shown else "Seen({})"

    def states(self, name: str | None = None) -> list[CapturedState]:
        """Return all states in the order of the calls, or those of one name."""
        return self.capture.states(name)

    @property
    def counts(self) -> Counts:
        """What became of all that was captured."""
        return self.capture.counts

    def enable(self) -> None:
        """Capture again."""
        if self.capture.attachment is not None:
            self.capture.attachment.on()

    def disable(self) -> None:
        """Capture nothing for the time being."""
        if self.capture.attachment is not None:
            self.capture.attachment.off()

    def clear(self) -> None:
        """Free what was captured."""
        self.capture.clear()

    def close(self) -> None:
        """Take the probe off the model; what was captured stays."""
        self.capture.detach()

    def __enter__(self) -> Seen:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
