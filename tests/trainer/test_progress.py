from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

from hookline.context import LazyFloat
from hookline.dispatch.accounting import HookInfo, Summary
from hookline.trainer.progress import BarProgress, PlainProgress, make_progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def plain() -> tuple[PlainProgress, io.StringIO, Clock]:
    stream, clock = io.StringIO(), Clock()
    return PlainProgress(stream, clock), stream, clock


def bar(width: int = 110, file: Any = None) -> tuple[BarProgress, Any, Clock]:
    stream, clock = file or io.StringIO(), Clock()
    console = Console(file=stream, force_terminal=True, width=width)
    return BarProgress(console, clock), stream, clock


def run(display: Any, clock: Clock, steps: int, seconds: float = 0.125) -> None:
    for step in range(1, steps + 1):
        clock.now += seconds
        display.advance(step, 2.5)


def shown(stream: io.StringIO) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())


def hook(name: str, failures: int = 0, enabled: bool = True) -> HookInfo:
    error = "ValueError: [/x] é" if failures else None
    status = "enabled" if enabled else "disabled"
    return HookInfo(name, "hook", "C", status, "", (), failures, error, 900, 0.12, 0.034)


def ascii_file() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)


@pytest.mark.parametrize(
    ("totals", "seconds", "line"),
    [
        ((3, 900), 0.125, "epoch 1/3  step 10/900  loss 2.5000  8.0 steps/s  left 0:01:51"),
        ((2, None), 1.0, "epoch 1/2  step 10  loss 2.5000  1.0 s/step  left 0:00:30"),
    ],
)
def test_plain_lines_tell_epoch_step_loss_rate_and_time_left(
    totals: tuple[int, int | None], seconds: float, line: str
) -> None:
    display, stream, clock = plain()
    display.start(epochs=totals[0], steps=totals[1])
    display.epoch(0, 20)
    run(display, clock, 10, seconds)
    display.end("stopped", None)
    assert line in stream.getvalue().splitlines()


@pytest.mark.parametrize("make", [plain, bar])
def test_a_loss_is_not_read_between_redraws(make: Any) -> None:
    display, _, clock = make()
    reads: list[int] = []

    def lazy(step: int) -> LazyFloat:
        return LazyFloat(lambda: reads.append(step) or 1.0)  # type: ignore[func-returns-value]

    display.start(epochs=1, steps=1000)
    for step in range(1, 1000):  # the clock stands: only the first is shown
        display.advance(step, lazy(step))
    assert reads == [1]
    clock.now += 100
    display.end("completed", None)
    assert reads == [1, 999]


def test_the_bar_shows_a_loss_that_the_device_has_had_time_to_compute() -> None:
    display, stream, clock = bar()
    display.start(epochs=1, steps=3)
    for step, loss in enumerate((1.0, 2.0, 3.0), start=1):
        clock.now += 1
        display.advance(step, LazyFloat(loss))
    assert "3/3  loss 2.0000" in shown(stream)
    display.end("completed", None)
    assert "3/3  loss 3.0000" in shown(stream)


def test_the_bar_tells_everything() -> None:
    display, stream, clock = bar()
    display.start(epochs=3, steps=900)
    display.epoch(1, 300)
    run(display, clock, 450)
    display.end("stopped", None)
    bar_line, last_line, _ = shown(stream).split("\r")[-1].split("\n")
    before, after = re.split("  [━╸╺]+  ", bar_line)
    assert before == "epoch 2/3"
    facts = ["50%", "step 450/900", "loss 2.5000", "8.0 steps/s", "0:00:56", "left 0:00:56"]
    assert after.rstrip().split("  ") == facts
    assert last_line == "stopped after 450 steps in 0:00:56"


@pytest.mark.parametrize("width", [10, 60])
def test_the_bar_fits_into_every_terminal(width: int) -> None:
    display, stream, clock = bar(width)
    display.start(epochs=3, steps=900)
    run(display, clock, 450)
    assert all(len(line) <= width for line in re.split(r"[\r\n]", shown(stream)))


@pytest.mark.parametrize("make", [plain, bar])
def test_validation_and_messages_are_lines_of_their_own(make: Any) -> None:
    display, stream, clock = make()
    display.start(epochs=3, steps=9)
    run(display, clock, 2)
    display.validation({"val/loss": LazyFloat(1.25), "val/histogram": [1, 2]}, 0, 7)
    display.say("[/b] as it is")
    lines = [line.split("\r")[-1] for line in shown(stream).split("\n")]
    assert "epoch 1/3  step 7  val/loss 1.2500" in lines
    assert "[/b] as it is" in lines


def test_the_table_lists_hooks_and_failures() -> None:
    display, stream, _ = bar()
    display.start(epochs=1, steps=1)
    display.end("completed", Summary(5.0, (hook("watch"), hook("saver", 2, enabled=False))))
    assert re.search(r"hook +calls +time +share +failures", shown(stream))
    assert re.search(r"watch +900 +0.120 s +3.4% +0", shown(stream))
    assert re.search(r"saver +900 +0.120 s +3.4% +2 +disabled", shown(stream))
    assert "saver: last error: ValueError: [/x] é" in shown(stream)


def test_a_terminal_without_unicode_gets_question_marks() -> None:
    file = ascii_file()
    display, _, clock = bar(file=file)
    display.start(epochs=3, steps=9)
    run(display, clock, 5)
    display.say("é")
    display.end("completed", Summary(1.0, (hook("héros", 1),)))
    text = file.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert "\r\x1b[2K?\n" in text
    assert "h?ros" in text
    assert "5/9" in text


def test_a_pipe_that_was_closed_does_not_stop_training() -> None:
    stream = io.StringIO()
    display = PlainProgress(stream)
    display.start(epochs=1, steps=9)
    stream.close()
    display.advance(1, 1.0)
    display.say("hello")
    display.end("completed", None)


def test_the_display_follows_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    assert type(make_progress(stream=io.StringIO())) is PlainProgress
    assert type(make_progress(True, stream=Terminal())) is BarProgress
    assert type(make_progress("bar", stream=io.StringIO())) is BarProgress
    assert type(make_progress("plain", stream=Terminal())) is PlainProgress
    monkeypatch.setenv("TERM", "dumb")
    assert type(make_progress(stream=Terminal())) is PlainProgress


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_prints_and_log_records_appear_above_the_bar() -> None:
    import pty

    code = """if True:
        import logging, sys
        logging.basicConfig()  # this handler holds the real stderr
        from hookline.trainer.progress import make_progress
        out, err = sys.stdout, sys.stderr
        display = make_progress()
        display.start(epochs=1, steps=9)
        display.advance(1, 1.0)
        print("a", "print")
        logging.warning("a record")
        print("half", end=""); print(" and half")
        display.end("completed", None)
        assert (sys.stdout, sys.stderr) == (out, err)
        assert logging.root.handlers[0].stream is err
    """
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen([sys.executable, "-c", code], stdout=theirs, stderr=theirs, env=env) as p:
        os.close(theirs)
        seen = b""
        while True:
            try:
                seen += os.read(ours, 4096)
            except OSError:  # how Linux says that the other side has closed
                break
            if p.poll() is not None:
                break
    os.close(ours)
    text = re.sub(r"\x1b\[[0-9;]*m", "", seen.decode())
    assert p.returncode == 0, text
    for line in ("a print", "WARNING:root:a record", "half and half"):
        assert f"\r\x1b[2K{line}\r\n" in text
    assert "Traceback" not in text
