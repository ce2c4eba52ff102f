"""Generate one function per event: the calls unrolled, the arguments in place.

A loop over hooks that filters keyword arguments takes 742 ns per call on the machine where this
was measured, a direct method call 27 ns. Generated code that contains just the calls comes close
to that:

    def dispatch(context):                     # has the arguments as attributes
        global until_timed
        until_timed = remaining = until_timed - 1
        if remaining <= 0: return timed(context)
        try: a_step = context.step             # each argument once, only those that hooks require
        except NotProvided as error: until_timed += 1; return skip_and_retry(context, error)
        except Exception as error: until_timed += 1; return fail_and_retry(context, error)
        fatal = None
        try: hook0(a_step)                     # a `try` costs nothing
        except Exception as error: fatal = first_error(fatal, handle_failure(0, error))
        try: hook1(a_step)
        except Exception as error: fatal = first_error(fatal, handle_failure(1, error))
        if fatal is not None: raise fatal

`timed` is the same with a clock around each call. `tests/dispatch/golden/dispatchers.txt` shows
complete examples.

All other names are globals that belong to one dispatcher. A hook that is removed while an event is
being fired is replaced there (`hook0`), so that it is not called any more.
"""

from __future__ import annotations

import linecache
import re
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from types import CodeType

from hookline.dispatch.binding import Binding, WantedValue
from hookline.dispatch.settings import Schedule

DISPATCHER_FILE = "<hookline dispatcher"  # how the file names of dispatchers begin
HOOK_CALL = re.compile(r" +(?:try: )?hook(\d+)\(")  # a line that calls a hook, with its index


@dataclass(frozen=True)
class CallSignature:
    """All that the source of one call depends on; equal signatures share their compiled code."""

    positional: tuple[WantedValue, ...]
    keywords: tuple[tuple[str, WantedValue], ...]
    has_optional: bool
    every: bool
    samples: bool
    from_epoch: bool
    clocked: bool

    @property
    def scheduled(self) -> bool:
        """Whether the hook is called only in some steps."""
        return self.every or self.samples or self.from_epoch

    @property
    def required(self) -> list[WantedValue]:
        """The values to load for the call, without optional ones: as they are, then converted."""
        wanted = (*self.positional, *(value for _, value in self.keywords))
        converted = [value for value in wanted if value.form not in ("", "eval")]
        return [*(WantedValue(value.argument) for value in wanted), *converted]


def make_signature(binding: Binding, schedule: Schedule, *, clocked: bool) -> CallSignature:
    """Return the signature of a binding's call. Schedules apply only to per-step events."""
    per_step = binding.event.per_step
    return CallSignature(
        binding.positional,
        binding.keywords,
        bool(binding.optional),
        per_step and schedule.every > 1,
        per_step and schedule.sample_rate < 1,
        per_step and schedule.from_epoch > 0,
        clocked,
    )


@dataclass(frozen=True)
class Source:
    """Generated source; `calls` has the lines that call a hook, with the hook's index."""

    lines: tuple[str, ...]
    calls: tuple[tuple[int, int], ...]
    code: CodeType


@lru_cache(maxsize=512)  # compiling takes about a millisecond, too long for a toggle
def make_source(signatures: tuple[CallSignature, ...]) -> Source:
    """Return the source that defines `dispatch` and the functions it calls."""
    writer = SourceWriter(signatures)
    lines = [*writer.function("dispatch"), "", *writer.function("timed")]
    calls = [(i, HOOK_CALL.match(line)) for i, line in enumerate(lines)]
    return Source(
        tuple(line + "\n" for line in lines),
        tuple((i, int(call[1])) for i, call in calls if call is not None),
        compile("\n".join(lines), "<hookline dispatcher>", "exec"),
    )


_numbers = count(1)


def register_source(source: Source, event: str, labels: Sequence[str], owner: object) -> CodeType:
    """Register a dispatcher's source with `linecache`; return its code under that file name.

    Tracebacks and debuggers then show the generated lines, each call with its hook's label. The
    entry is removed when the owner is garbage collected.
    """
    filename = f"{DISPATCHER_FILE} {next(_numbers)}: {event}>"
    lines = list(source.lines)
    for i, hook in source.calls:
        lines[i] = f"{lines[i][:-1]}  # {labels[hook]}\n"
    size = sum(map(len, lines))
    linecache.cache[filename] = (size, None, lines, filename)  # None: never out of date
    weakref.finalize(owner, linecache.cache.pop, filename, None).atexit = False
    return _rename_code(source.code, filename)


def _rename_code(code: CodeType, filename: str) -> CodeType:
    constants = tuple(
        _rename_code(constant, filename) if isinstance(constant, CodeType) else constant
        for constant in code.co_consts
    )
    return code.replace(co_filename=filename, co_consts=constants)


class SourceWriter:
    """Writes the functions of one dispatcher."""

    def __init__(self, signatures: tuple[CallSignature, ...]) -> None:
        self.signatures = signatures
        self.always_loaded = always_loaded(signatures)
        self.loaded_when_due = [
            value for value in _sort_values(signatures) if value not in self.always_loaded
        ]
        self.has_optional = any(signature.has_optional for signature in signatures)

    def function(self, name: str) -> list[str]:
        """Write `dispatch`, or `timed`: the same with a clock around each call."""
        timed = name == "timed"
        counters = [f"calls{i}" for i, call in enumerate(self.signatures) if call.scheduled]
        lines = [f"def {name}(context):", "    global " + ", ".join(["until_timed", *counters])]
        if timed:  # added after the call instead of set: other threads may have counted meanwhile
            lines += ["    gap = next_gap(context)", "    until_timed += gap"]
        else:
            lines.append("    until_timed = remaining = until_timed - 1")
            lines.append("    if remaining <= 0: return timed(context)")
        lines += [*self._load_arguments(), "    fatal = None"]
        for i, signature in enumerate(self.signatures):
            lines += self._call_when_due(i, clocked=timed or signature.clocked)
        return [*lines, "    if fatal is not None: raise fatal"]

    def _load_arguments(self) -> list[str]:
        loads = [f"{value.variable} = {_source_of(value)}" for value in self.always_loaded]
        loads += [f"{value.variable} = UNSET" for value in self.loaded_when_due]
        if any(signature.every or signature.samples for signature in self.signatures):
            loads.append("step = context.step_in_progress")
        if any(signature.from_epoch for signature in self.signatures):
            loads.append("epoch = context.epoch")
        lines: list[str] = []
        if loads:
            retry = "until_timed += 1; return {}_and_retry(context, error)"
            lines.append(f"    try: {'; '.join(loads)}")
            lines.append(f"    except NotProvided as error: {retry.format('skip')}")
            lines.append(f"    except Exception as error: {retry.format('fail')}")
        if self.has_optional:  # shared, so that each argument is computed once per event
            loaded = ", ".join(f"{value.key!r}: {value.variable}" for value in self.always_loaded)
            lines.append(f"    values = {{{loaded}}}")
        return lines

    def _call_when_due(self, i: int, *, clocked: bool) -> list[str]:
        """Write the i-th call, with its schedule and the arguments that only it requires."""
        signature = self.signatures[i]
        if not signature.scheduled:
            return self._guarded_call(i, "    ", clocked=clocked)
        lines = [f"    if {_condition(i, signature)}:", f"        calls{i} += 1"]
        due = dict.fromkeys(value for value in signature.required if value in self.loaded_when_due)
        loads = [self._late_load(value) for value in due]
        if not loads:
            return [*lines, *self._guarded_call(i, "        ", clocked=clocked)]
        return [
            *lines,
            "        try:",
            *loads,
            "        except NotProvided as error:",
            f"            calls{i} -= 1",
            f"            fatal = first_error(fatal, handle_missing_args({i}, context, error))",
            "        except Exception as error:",
            f"            fatal = first_error(fatal, handle_failure({i}, error))",
            "        else:",
            *self._guarded_call(i, "            ", clocked=clocked),
        ]

    def _late_load(self, value: WantedValue) -> str:
        key, source, variable = repr(value.key), _source_of(value), value.variable
        if self.has_optional:
            source = f"values[{key}] = values[{key}] if {key} in values else {source}"
        return f"            if {variable} is UNSET: {variable} = {source}"

    def _guarded_call(self, i: int, indent: str, *, clocked: bool) -> list[str]:
        failure = f"fatal = first_error(fatal, handle_failure({i}, error))"
        lines = [
            f"{indent}try: {self._call(i)}",
            f"{indent}except Exception as error: {failure}",
        ]
        if clocked:
            end = f"{indent}add_time({i}, clock() - started)"
            lines = [f"{indent}started = clock()", *lines, end]
        return lines

    def _call(self, i: int) -> str:
        signature = self.signatures[i]
        arguments = [_expression(value) for value in signature.positional]
        arguments += [f"{name}={_expression(value)}" for name, value in signature.keywords]
        if signature.has_optional:
            arguments.append(f"**load_optional(context, optional{i}, values)")
        return f"hook{i}({', '.join(arguments)})"


def always_loaded(signatures: Iterable[CallSignature]) -> list[WantedValue]:
    """Return the values that are loaded each time: those of hooks without a schedule."""
    return _sort_values(call for call in signatures if not call.scheduled)


def _sort_values(calls: Iterable[CallSignature]) -> list[WantedValue]:
    """Return the values that calls require, each once: as they are, then converted."""
    values = dict.fromkeys(value for call in calls for value in call.required)
    return sorted(values, key=lambda value: value.form != "")


def _source_of(value: WantedValue) -> str:
    """Return the expression that a value is loaded with."""
    return f"to_{value.form}(a_{value.argument})" if value.form else f"context.{value.argument}"


def _expression(value: WantedValue) -> str:
    """Return the expression of a value in a call: metrics are renamed as they are by then."""
    return _source_of(value) if value.form == "eval" else value.variable


def _condition(i: int, signature: CallSignature) -> str:
    conditions = [f"not step % every{i}"] if signature.every else []
    conditions += [f"epoch >= from_epoch{i}"] if signature.from_epoch else []
    conditions += [f"samples{i}(step)"] if signature.samples else []
    return " and ".join(conditions)
