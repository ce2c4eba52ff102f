"""The source of dispatchers: what is generated, and that tracebacks and debuggers show it.

After a change of the compiler, `python tests/dispatch/test_compiler.py` rewrites the golden file.
"""

import gc
import linecache
import re
import sys
import traceback
from pathlib import Path

import pytest

from hookline import Hook, HookManager, HookSettings

GOLDEN = Path(__file__).parent / "golden" / "dispatchers.txt"


class Watch(Hook):
    def on_step_end(self, step, loss):
        pass


class Export(Hook):
    def on_step_end(self, *, lr, step=0, **kwargs):
        pass


class Broken(Hook):
    def on_step_end(self, step):
        raise ValueError("no luck")


def registered():
    """Return the sources of all dispatchers that exist, by file name."""
    return {
        name: "".join(entry[2])
        for name, entry in linecache.cache.items()
        if name.startswith("<hookline dispatcher")
    }


@pytest.fixture
def new_sources():
    """Return a function that returns the sources that a test has registered."""
    gc.collect()
    before = set(registered())
    return lambda: {name: text for name, text in registered().items() if name not in before}


def generate(*hooks):
    """Return the source for hooks, each with the options of its registration."""
    manager = HookManager()
    for hook, options in hooks:
        manager.add_hook(hook, **options)
    before = set(registered())
    manager.fire("on_step_end", step=1, loss=0.5, lr=0.1, epoch=0)
    (source,) = (text for name, text in registered().items() if name not in before)
    return source


def golden_text():
    return "\n".join(
        [
            "# Two hooks that are called in every step.",
            generate((Watch(), {}), (Export(), {})),
            "# The same, and one with a schedule.",
            generate((Watch(), {}), (Export(), {}), (Watch(), {"every": 100, "from_epoch": 2})),
        ]
    )


def test_the_generated_source_is_that_of_the_golden_file():
    assert golden_text() == GOLDEN.read_text(encoding="utf-8")


def test_the_traceback_of_a_failing_hook_shows_the_generated_line_with_the_hooks_name(caplog):
    manager = HookManager([Watch(), Broken()])
    manager.fire("on_step_end", step=1, loss=0.5)
    lines = caplog.text.splitlines()
    (at,) = (i for i, line in enumerate(lines) if "<hookline dispatcher" in line)
    assert re.search(r"dispatcher \d+: on_step_end>\", line \d+, in timed$", lines[at])
    assert lines[at + 1].strip() == "try: hook1(a_step)  # 'broken' (Broken.on_step_end)"
    assert 'raise ValueError("no luck")' in caplog.text


@pytest.mark.parametrize("options", [{}, {"every": 2}], ids=["each step", "scheduled"])
def test_the_line_is_right_in_every_function_of_the_dispatcher(options):
    manager = HookManager([Watch()], settings=HookSettings(isolate=False))
    broken = Broken()
    broken.on_step_end = lambda step: 1 / 0 if step == 20 else None
    manager.add_hook(broken, "late", **options)
    for step in range(20):
        manager.fire("on_step_end", step=step, loss=0.5)
    with pytest.raises(ZeroDivisionError) as caught:
        manager.fire("on_step_end", step=20, loss=0.5)
    frames = [frame for frame in traceback.extract_tb(caught.tb) if "<hookline" in frame.filename]
    assert frames[-1].name == "dispatch"
    assert frames[-1].line.endswith("hook1(a_step)  # 'late' (Broken.on_step_end)")


def test_a_source_is_removed_when_its_dispatcher_is_garbage_collected(new_sources):
    manager = HookManager([Watch()])
    for name in ("a", "b", "c"):
        manager.add_hook(Watch(), name)
        manager.fire("on_step_end", step=1, loss=0.5)
    gc.collect()
    (source,) = new_sources().values()  # each replaced the one before
    assert "'c' (Watch.on_step_end)" in source
    del manager
    gc.collect()
    assert new_sources() == {}


if __name__ == "__main__":
    GOLDEN.write_text(golden_text(), encoding="utf-8")
    sys.stdout.write(f"{GOLDEN} written\n")
