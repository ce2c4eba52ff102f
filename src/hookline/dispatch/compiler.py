"""One generated function per event: the calls unrolled, the arguments in place.

A loop over hooks that filters keyword arguments takes 742 ns per call on the machine where this
was measured, a direct method call 27. Text that contains just the calls comes close to that:

    def dispatch(src):                         # src: whoever knows the arguments, as attributes
        global left
        left = now_left = left - 1
        if now_left <= 0: return timed(src)    # the same with a clock around each call
        try: a_step = src.step                 # each argument once, only those somebody asked for
        except NotSupplied as error: left += 1; return missing(src, error)
        try:
            h0(a_step)
            h1(a_step)
        except Exception as error:             # which hook it was, the line says
            at = error.__traceback__.tb_lineno - 8
            fatal = failed(at, error)
        else: return
        resume(src, at + 1, fatal, a_step)     # every other hook still has its turn

With a schedule or a clock among them, each call has a `try` of its own, as in `timed` and `resume`.

Everything the text names stands in the globals it is executed with, which belong to one
dispatcher: `h0` can be blanked there while the dispatcher is running, and that is how a hook that
is removed in the middle of an event is not called any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from types import CodeType

from hookline.dispatch.binding import Binding
from hookline.dispatch.schedule import Schedule

__all__ = ["Shape", "dispatcher_code", "shape_of"]


@dataclass(frozen=True)
class Shape:
    """All that the text of one call depends on; dispatchers of equal shapes share their code."""

    positional: tuple[str, ...]
    keywords: tuple[tuple[str, str], ...]
    collects: bool
    every: bool
    samples: bool
    from_epoch: bool
    clocked: bool

    @property
    def scheduled(self) -> bool:
        """Whether it is called only when due."""
        return self.every or self.samples or self.from_epoch

    @property
    def asks(self) -> tuple[str, ...]:
        """The arguments of the call."""
        return (*self.positional, *(argument for _, argument in self.keywords))


def shape_of(binding: Binding, schedule: Schedule, *, clocked: bool) -> Shape:
    """Return the shape of a binding's call. Schedules thin out only what happens in every step."""
    thinned = binding.event.per_step
    return Shape(
        binding.positional,
        binding.keywords,
        bool(binding.collected),
        thinned and schedule.every > 1,
        thinned and schedule.sample_rate < 1,
        thinned and schedule.from_epoch > 0,
        clocked,
    )


@lru_cache(maxsize=512)  # compiling takes about a millisecond; toggling must not
def dispatcher_code(event: str, shapes: tuple[Shape, ...]) -> CodeType:
    """Return the code that defines `dispatch` and what it calls, for hooks of these shapes."""
    text = Text(shapes)
    if any(shape.scheduled or shape.clocked for shape in shapes):
        lines = [*text.careful("dispatch"), *text.careful("timed")]
    else:
        lines = [*text.quick(), *text.resume(), *text.careful("timed")]
    return compile("\n".join(lines), f"<hookline dispatcher of {event}>", "exec")


class Text:
    """The text of the functions of one dispatcher."""

    def __init__(self, shapes: tuple[Shape, ...]) -> None:
        self.shapes = shapes
        self.always = list(
            dict.fromkeys(a for shape in shapes if not shape.scheduled for a in shape.asks)
        )
        self.sometimes = [
            argument
            for argument in dict.fromkeys(a for shape in shapes for a in shape.asks)
            if argument not in self.always
        ]
        self.collects = any(shape.collects for shape in shapes)

    def quick(self) -> list[str]:
        """`dispatch` for hooks that are all called each time: one `try` around them all."""
        lines = ["def dispatch(src):", *self._count(), *self._loads(), "    try:"]
        first = len(lines) + 1
        lines += [f"        {self._call(i)}" for i in range(len(self.shapes))]
        passed = ", ".join(
            ["src", "at + 1", "fatal", *(f"a_{a}" for a in self.always), *self._made()]
        )
        return [
            *lines,
            "    except Exception as error:",
            f"        at = error.__traceback__.tb_lineno - {first}",
            "        fatal = failed(at, error)",
            "    else: return",
            f"    resume({passed})",
        ]

    def resume(self) -> list[str]:
        """`resume`: the hooks from `start` on, after one before them has failed."""
        passed = ", ".join(
            ["src", "start", "fatal", *(f"a_{a}" for a in self.always), *self._made()]
        )
        lines = [f"def resume({passed}):"]
        for i in range(len(self.shapes)):
            lines.append(f"    if start <= {i}:")
            lines += self._try(i, "        ", clocked=False)
        return [*lines, "    if fatal is not None: raise fatal"]

    def careful(self, name: str) -> list[str]:
        """`timed`, or a `dispatch` in which hooks are scheduled or clocked."""
        timed = name == "timed"
        counters = [f"n{i}" for i, shape in enumerate(self.shapes) if shape.scheduled]
        lines = [f"def {name}(src):", "    global " + ", ".join(["left", *counters])]
        # added, not set, and after the call: other threads may have counted on meanwhile
        lines += ["    more = gap()", "    left += more"] if timed else self._count()[1:]
        lines += [*self._loads(), "    fatal = None"]
        for i, shape in enumerate(self.shapes):
            lines += self._due(i, clocked=timed or shape.clocked)
        return [*lines, "    if fatal is not None: raise fatal"]

    def _count(self) -> list[str]:
        return [
            "    global left",
            "    left = now_left = left - 1",
            "    if now_left <= 0: return timed(src)",
        ]

    def _made(self) -> list[str]:
        return ["made"] if self.collects else []

    def _loads(self) -> list[str]:
        loads = [f"a_{argument} = src.{argument}" for argument in self.always]
        loads += [f"a_{argument} = UNSET" for argument in self.sometimes]
        if any(shape.every or shape.samples for shape in self.shapes):
            loads.append("now = src.step_in_progress")
        if any(shape.from_epoch for shape in self.shapes):
            loads.append("epoch = src.epoch")
        lines = []
        if loads:
            lines.append(f"    try: {'; '.join(loads)}")
            lines.append("    except NotSupplied as error: left += 1; return missing(src, error)")
        if self.collects:  # what is made for one is there for the others
            lines.append(f"    made = {{{', '.join(f'{a!r}: a_{a}' for a in self.always)}}}")
        return lines

    def _due(self, i: int, *, clocked: bool) -> list[str]:
        """The i-th call with what decides whether it is due, and what only it asks for."""
        shape = self.shapes[i]
        if not shape.scheduled:
            return self._try(i, "    ", clocked=clocked)
        lines = [f"    if {_condition(i, shape)}:", f"        n{i} += 1"]
        loads = [line for a in shape.asks if a in self.sometimes for line in self._late_load(a)]
        if not loads:
            return [*lines, *self._try(i, "        ", clocked=clocked)]
        return [
            *lines,
            "        try:",
            *loads,
            "        except NotSupplied as error:",
            f"            n{i} -= 1",
            f"            fatal = first(fatal, misses({i}, src, error))",
            "        else:",
            *self._try(i, "            ", clocked=clocked),
        ]

    def _late_load(self, argument: str) -> list[str]:
        key = repr(argument)
        shared = f"made[{key}] = made[{key}] if {key} in made else src.{argument}"
        value = shared if self.collects else f"src.{argument}"
        return [f"            if a_{argument} is UNSET: a_{argument} = {value}"]

    def _try(self, i: int, indent: str, *, clocked: bool) -> list[str]:
        lines = [
            f"{indent}try: {self._call(i)}",
            f"{indent}except Exception as error: fatal = first(fatal, failed({i}, error))",
        ]
        if clocked:
            lines = [f"{indent}t = clock()", *lines, f"{indent}spent({i}, clock() - t)"]
        return lines

    def _call(self, i: int) -> str:
        shape = self.shapes[i]
        arguments = [f"a_{argument}" for argument in shape.positional]
        arguments += [f"{name}=a_{argument}" for name, argument in shape.keywords]
        arguments += [f"**collect(src, c{i}, made)"] if shape.collects else []
        return f"h{i}({', '.join(arguments)})"


def _condition(i: int, shape: Shape) -> str:
    parts = [f"not now % every{i}"] if shape.every else []
    parts += [f"epoch >= from_epoch{i}"] if shape.from_epoch else []
    parts += [f"samples{i}(now)"] if shape.samples else []
    return " and ".join(parts)
