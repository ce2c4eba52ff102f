"""The progress display: a bar in a terminal, lines elsewhere.

The trainer calls `advance` for each batch, which must cost almost nothing: it counts, looks at the
clock, and reads a loss only when it is shown.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, TextIO, cast

from hookline.printable import printable_message

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from hookline.context import LazyFloat
    from hookline.dispatch.accounting import Summary

    Loss = LazyFloat | torch.Tensor | float | None

Kind = Literal["auto", "bar", "plain", "off"]


class Progress:
    """Counts batches and decides when to show them. This one shows nothing; others say how."""

    shows = False
    waits = False  # whether to wait for the device's newest loss, or to show the one before

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._running = False
        self._reset(None, None, 0)

    def _reset(self, epochs: int | None, steps: int | None, first_step: int) -> None:
        self._epochs, self._steps = epochs, steps
        self._first_step = self._step = first_step
        self._loss: Loss = None
        self._earlier_loss: Loss = None
        self._due = self._started = self._clock()  # due: the first batch is shown
        self._broken = False
        self.epoch(0, None)

    def start(self, *, epochs: int | None, steps: int | None, first_step: int = 0) -> None:
        """Start the display, for a run resumed after `first_step` steps; None: unknown total."""
        self.end("stopped", None)
        self._reset(epochs, steps, first_step)
        self._running = True
        self._attempt(self._open)

    def epoch(self, epoch: int, batches: int | None, seen: int = 0) -> None:
        """Start an epoch, counted from 0, or resume it after the batches that were seen.

        `batches` is the number of its batches, None if it is not known.
        """
        self._epoch, self._batches, self._batches_seen = epoch, batches, seen
        if self._step == self._first_step:  # speed is measured from here, also in a resumed run
            self._measured_from = self._clock(), self._position()[0]

    def advance(self, step: int, loss: Loss) -> None:
        """Count a batch, after which `step` steps are complete."""
        self._step, self._loss = step, loss
        self._batches_seen += 1
        now = self._clock()
        if now >= self._due and self._running:
            earlier, self._earlier_loss = self._earlier_loss, loss
            self._attempt(self._show, now, loss if self.waits or earlier is None else earlier)
            self._due = now + self._interval(now)

    def validation(self, metrics: Mapping[str, Any], epoch: int, step: int) -> None:
        """Show the metrics of a validation."""
        if not self.shows:  # reading them would wait for the device
            return
        numbers = {name: _number(value) for name, value in metrics.items()}
        shown = [f"{name!s:.100} {text}" for name, text in numbers.items() if text]
        self.say("  ".join([f"epoch {_of(epoch + 1, self._epochs)}  step {step}", *shown]))

    def say(self, text: str) -> None:
        """Show a message without damaging the display."""
        self._attempt(self._print, printable_message(text))

    def end(self, status: str, summary: Summary | None, reason: str | None = None) -> None:
        """End the display and restore the terminal. A second call does nothing."""
        if not self._running:
            return
        self._running = False
        now = self._clock()
        try:
            self._attempt(self._show, now, self._loss)
        finally:  # also if Ctrl-C comes while waiting for the last loss
            with contextlib.suppress(OSError, ValueError):
                self._close()
            self._loss = self._earlier_loss = None
        steps = self._step - self._first_step
        plural = "" if steps == 1 else "s"
        why = f": {reason}" if reason else ""
        self.say(f"{status} after {steps} step{plural} in {_duration(now - self._started)}{why}")
        if summary and summary.hooks:
            self._attempt(self._print, str(summary))

    def _attempt(self, show: Callable[..., None], *args: Any) -> None:
        """Show something unless the output failed before: a closed pipe must not stop training."""
        if self.shows and not self._broken:
            try:
                show(*args)
            except (OSError, ValueError):
                self._broken = True

    def _position(self) -> tuple[float, int | None]:
        """Return the position and the end: in steps if that is known, otherwise in epochs."""
        if self._steps is not None:
            return self._step, self._steps
        done = min(1.0, self._batches_seen / self._batches) if self._batches else 0.0
        return self._epoch + done, self._epochs if self._batches else None

    def _fraction(self) -> float | None:
        position, end = self._position()
        return None if end is None else min(1.0, position / end) if end else 1.0

    def _fields(self, now: float, loss: Loss) -> dict[str, str]:
        """Return the texts to show, in order, without those that are not known."""
        since, first_position = self._measured_from
        position, end = self._position()
        seconds, steps = now - since, self._step - self._first_step
        fraction, number = self._fraction(), _number(loss)
        left = rate = ""
        if end is not None and position > first_position:
            ahead = max(0.0, end - position) * seconds / (position - first_position)
            left = f"left {_duration(ahead)}"
        if steps > 0 and seconds > 0:
            fast = steps > seconds
            rate = f"{steps / seconds:.1f} steps/s" if fast else f"{seconds / steps:.1f} s/step"
        fields = {
            "epoch": f"epoch {_of(self._epoch + 1, self._epochs)}",
            "percent": "" if fraction is None else f"{fraction:.0%}",
            "step": f"step {_of(self._step, self._steps)}",
            "loss": number and f"loss {number}",
            "rate": rate,
            "elapsed": _duration(now - self._started),
            "left": left,
        }
        return {name: text for name, text in fields.items() if text}

    def _interval(self, now: float) -> float:
        return 1 / 8

    def _open(self) -> None: ...
    def _close(self) -> None: ...
    def _show(self, now: float, loss: Loss) -> None: ...
    def _print(self, text: str) -> None: ...


class PlainProgress(Progress):
    """Lines: the first at once, then every five seconds, in long runs every minute."""

    shows = waits = True

    def __init__(self, stream: TextIO, clock: Callable[[], float] = monotonic) -> None:
        super().__init__(clock)
        self._stream, self._shown_step = stream, -1

    def _interval(self, now: float) -> float:
        return min(60.0, max(5.0, (now - self._started) / 20))

    def _show(self, now: float, loss: Loss) -> None:
        if self._running or self._shown_step != self._step:  # the last one may be shown already
            fields = self._fields(now, loss)
            shown = (fields.get(name) for name in ("epoch", "step", "loss", "rate", "left"))
            self._print("  ".join(text for text in shown if text))
        self._shown_step = self._step if self._running else -1

    def _print(self, text: str) -> None:
        self._stream.write(_encodable(text, self._stream) + "\n")
        self._stream.flush()


class BarProgress(Progress):
    """One line with a rich bar; printed and logged lines appear above it.

    There is no thread and the cursor is not hidden, so debuggers, forks and kills are safe.
    """

    shows = True

    def __init__(self, console: Console, clock: Callable[[], float] = monotonic) -> None:
        super().__init__(clock)
        self._console, self._stream = console, cast(TextIO, console.file)
        self._cleanup = contextlib.ExitStack()

    def _open(self) -> None:
        from rich.live import Live

        real = {name: getattr(sys, name) for name in ("stdout", "stderr")}
        shared = {n: _is_terminal(self._stream) and _is_terminal(s) for n, s in real.items()}
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            redirect_stdout=shared["stdout"],  # not a stream that goes to a file
            redirect_stderr=shared["stderr"],
        )
        self._live.start()
        self._cleanup.callback(self._live.stop)
        self._console.show_cursor(True)
        for name, stream in real.items():
            for handler in _handlers_of(stream) if shared[name] else ():
                handler.setStream(getattr(sys, name))  # made before the bar, it holds the stream
                self._cleanup.callback(handler.setStream, stream)

    def _close(self) -> None:
        self._cleanup.close()  # the bar stays where it is

    def _show(self, now: float, loss: Loss) -> None:
        self._live.update(self._line(self._fields(now, loss)), refresh=True)

    def _line(self, fields: dict[str, str]) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        epoch, fraction = fields.pop("epoch"), self._fraction()
        text = "  ".join(fields.values())
        room = self._console.width - len(epoch) - len(text) - 6
        cells: list[Any] = [Text(epoch, "bold", no_wrap=True, overflow="crop")]
        if fraction is not None and room >= 8:
            cells.append(ProgressBar(total=1.0, completed=fraction, width=min(40, room)))
        cells.append(Text(text, "cyan", no_wrap=True, overflow="crop"))
        line = Table.grid(padding=(0, 2, 0, 0))
        line.add_row(*cells)
        return line

    def _print(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text(_encodable(text, self._stream)), soft_wrap=True)


def make_progress(kind: Kind | bool = "auto", *, stream: TextIO | None = None) -> Progress:
    """Return a display; "auto" or True chooses the one for the place where the program runs."""
    chosen = {True: "auto", False: "off"}.get(kind, kind) if isinstance(kind, bool) else kind
    out = sys.stdout if stream is None else stream
    if chosen == "auto":
        is_able = os.environ.get("TERM", "") not in ("dumb", "unknown")
        chosen = "bar" if _is_terminal(out) and is_able else "plain"
    if chosen == "bar":
        from rich.console import Console

        return BarProgress(Console(file=out, force_terminal=True))
    return PlainProgress(out) if chosen == "plain" else Progress()


def _is_terminal(stream: Any) -> bool:
    with contextlib.suppress(AttributeError, ValueError):  # no stream, or a closed one
        return bool(stream.isatty())
    return False


def _handlers_of(stream: TextIO) -> list[Any]:
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = [handler for logger in loggers for handler in getattr(logger, "handlers", ())]
    return [handler for handler in handlers if getattr(handler, "stream", None) is stream]


def _encodable(text: str, stream: TextIO) -> str:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


def _of(number: int, total: int | None) -> str:
    return f"{number}" if total is None else f"{number}/{total}"


def _number(value: Any) -> str:
    """Return a number as text, "" if it is not a number or cannot be read; waits for the device."""
    try:
        number = float(value)
    except Exception:  # a device that failed raises in the training loop, too
        return ""
    return f"{number:.4f}" if number == 0 or 1e-3 <= abs(number) < 1e5 else f"{number:.3e}"


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=int(min(seconds, 1e9))))
