from __future__ import annotations

import io
import logging
import os
import re
import subprocess
import sys
import types
from typing import Any

import pytest
from rich.console import Console

from hookline.context import LazyFloat
from hookline.dispatch.accounting import HookInfo, Summary
from hookline.trainer import progress
from hookline.trainer.progress import BarProgress, JupyterProgress, PlainProgress, make_progress


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


def test_plain_lines_tell_epoch_step_loss_rate_and_time_left() -> None:
    display, stream, clock = plain()
    display.start(epochs=3, steps=900)
    display.epoch(0, 300)
    run(display, clock, 100)
    display.end("stopped", None)
    line = "epoch 1/3  step 100/900  loss 2.5000  8.0 steps/s  left 0:01:40"
    assert line in stream.getvalue().splitlines()


def test_the_first_plain_line_comes_with_the_first_batch_and_then_few() -> None:
    display, stream, clock = plain()
    display.start(epochs=1, steps=100)
    run(display, clock, 100)
    lines = stream.getvalue().splitlines()
    assert "step 1/100" in lines[0]
    assert 2 <= len(lines) <= 3  # in 12 seconds


def test_the_last_step_is_always_told_and_only_once() -> None:
    display, stream, clock = plain()
    display.start(epochs=1, steps=7)
    run(display, clock, 7)
    display.end("completed", None)
    assert stream.getvalue().count("step 7/7") == 1
    display.start(epochs=1, steps=1)
    run(display, clock, 1)
    display.end("completed", None)
    assert stream.getvalue().count("step 1/1 ") == 1
    assert stream.getvalue().endswith("completed after 1 step in 0:00:00\n")


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


def test_a_loss_that_cannot_be_read_is_left_out() -> None:
    display, stream, _ = plain()

    def fail() -> float:
        raise RuntimeError("device lost")

    display.start(epochs=1, steps=2)
    display.advance(1, LazyFloat(fail))
    display.end("error", None)
    assert "step 1/2" in stream.getvalue()
    assert "loss" not in stream.getvalue()


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


@pytest.mark.parametrize("width", [10, 20, 40, 60, 80, 200])
def test_the_bar_fits_into_every_terminal(width: int) -> None:
    display, stream, clock = bar(width)
    display.start(epochs=3, steps=900)
    run(display, clock, 450)
    assert all(len(line) <= width for line in re.split(r"[\r\n]", shown(stream)))


@pytest.mark.parametrize("make", [plain, bar])
def test_unknown_totals_show_no_percentage_and_no_time_left(make: Any) -> None:
    display, stream, clock = make()
    display.start(epochs=None, steps=None)
    display.epoch(0, None)
    run(display, clock, 10, seconds=2.0)
    display.end("completed", None)
    assert "step 10  loss 2.5000  2.0 s/step" in shown(stream)
    assert "left" not in shown(stream)
    assert "%" not in shown(stream)


def test_without_a_number_of_steps_time_left_comes_from_epochs_and_batches() -> None:
    display, stream, clock = plain()
    display.start(epochs=2, steps=None)
    display.epoch(0, 20)
    run(display, clock, 10, seconds=1.0)
    display.end("stopped", None)
    assert "epoch 1/2  step 10  loss 2.5000  1.0 s/step  left 0:00:30" in stream.getvalue()


@pytest.mark.parametrize("make", [plain, bar])
def test_zero_steps_are_fine(make: Any) -> None:
    display, stream, _ = make()
    display.start(epochs=0, steps=0)
    display.end("completed", None)
    assert "step 0/0" in shown(stream)
    assert shown(stream).endswith("completed after 0 steps in 0:00:00\n")


def test_a_resumed_training_counts_its_own_steps_in_the_rate() -> None:
    display, stream, clock = plain()
    display.start(epochs=1, steps=100, first_step=90)
    clock.now += 5
    display.advance(95, 1.0)
    display.end("completed", None)
    assert "step 95/100  loss 1.0000  1.0 s/step  left 0:00:05" in stream.getvalue()
    assert "after 5 steps" in stream.getvalue()


@pytest.mark.parametrize("make", [plain, bar])
def test_end_without_start_and_a_second_end_show_nothing(make: Any) -> None:
    display, stream, _ = make()
    display.end("error", Summary(1.0, (hook("watch"),)))
    assert stream.getvalue() == ""
    display.start(epochs=1, steps=1)
    display.end("completed", None)
    before = stream.getvalue()
    display.end("completed", None)
    assert stream.getvalue() == before


def test_the_cursor_is_not_hidden() -> None:
    display, stream, clock = bar()
    display.start(epochs=1, steps=9)
    run(display, clock, 3)
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")


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


@pytest.mark.parametrize("make", [plain, bar])
def test_the_table_lists_hooks_and_failures(make: Any) -> None:
    display, stream, _ = make()
    display.start(epochs=1, steps=1)
    display.end("completed", Summary(5.0, (hook("watch"), hook("saver", 2, enabled=False))))
    assert re.search(r"hook +calls +time +share +failures", shown(stream))
    assert re.search(r"watch +900 +0.120 s +3.4% +0", shown(stream))
    assert re.search(r"saver +900 +0.120 s +3.4% +2 +disabled", shown(stream))
    assert "saver: last error: ValueError: [/x] é" in shown(stream)


@pytest.mark.parametrize("summary", [None, Summary(1.0)])
def test_without_hooks_there_is_no_table(summary: Summary | None) -> None:
    display, stream, _ = plain()
    display.start(epochs=1, steps=1)
    display.end("completed", summary)
    assert "failures" not in stream.getvalue()


@pytest.mark.parametrize("width", [20, 110])
def test_a_terminal_without_unicode_gets_question_marks(width: int) -> None:
    file = ascii_file()
    display, _, clock = bar(width, file)
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


def test_off_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ("off", False):
        display = make_progress(kind)  # type: ignore[arg-type]
        assert type(display) is progress.Progress
        display.start(epochs=1, steps=1)
        display.epoch(0, 1)
        display.advance(1, 1.0)
        display.validation({}, 0, 1)
        display.say("hello")
        display.end("completed", None)
    assert capsys.readouterr() == ("", "")


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


def test_a_notebook_has_one_display_that_is_updated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    updates: list[Any] = []
    handle = types.SimpleNamespace(update=lambda data, raw: updates.append(data))
    opened: list[Any] = []

    class ZMQInteractiveShell: ...

    class ColabShell(ZMQInteractiveShell): ...

    ipython: Any = types.ModuleType("IPython")
    ipython.get_ipython = ColabShell
    ipython.display = types.ModuleType("IPython.display")
    ipython.display.display = lambda data, **kwargs: opened.append(kwargs) or handle
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython.display)

    display = make_progress()
    assert type(display) is JupyterProgress
    display.start(epochs=1, steps=2)
    display.advance(1, 0.5)
    display.end("completed", Summary(1.0, (hook("watch"),)))
    assert opened == [{"raw": True, "display_id": True}]
    assert '<progress value="0.5000">' in updates[-1]["text/html"]
    assert "step 1/2  loss 0.5000" in updates[-1]["text/plain"]
    assert "watch" in capsys.readouterr().out


def test_rich_is_imported_only_for_a_bar() -> None:
    code = """if True:
        import sys
        from hookline.trainer.progress import make_progress
        for kind in ("off", "plain"):
            display = make_progress(kind)
            display.start(epochs=1, steps=1)
            display.end("completed", None)
        assert "rich" not in sys.modules and "IPython" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


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


def test_handlers_that_write_elsewhere_are_left_alone() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.root.addHandler(handler)
    try:
        display = make_progress("bar", stream=io.StringIO())
        display.start(epochs=1, steps=1)
        assert handler.stream is stream
        display.end("completed", None)
    finally:
        logging.root.removeHandler(handler)
