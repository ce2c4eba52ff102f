"""Reading a run for its report: series, events and damage, in bounded memory."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from hookline.report.page_media import Media
from hookline.report.series import SampledSeries, Scalar
from hookline.runs.jsonl_reader import JsonlReader
from hookline.runs.reader import OpenedRun

MAX_SERIES = 20_000
_MAX_PENDING = 200_000  # values that are kept before they are sampled
_MAX_BUCKETS = 2_000_000  # of all series together: about 100 MB
_MAX_PER_SERIES = 2_000
_MAX_EVENTS = 2_000  # of one kind
_MAX_TEXT = 20_000  # characters of an event's text, such as a traceback
_MAX_FIELD, _MAX_SHORT = 1_000_000, 1_000  # of a field as JSON, first and after `_MAX_LONG`
_MAX_LONG = 20_000_000  # of all long fields

# The events that a report shows, with the fields that it needs.
_FIELDS = {
    "start": ("step",),
    "resumed": ("step",),
    "checkpoint": ("step", "path", "tokens_seen"),
    "checkpoint_failed": ("step", "error"),
    "step_skipped": ("step", "reason"),
    "hooks": ("step", "hooks", "by"),
    "hook_failed": ("step", "hook", "event", "error", "traceback"),
    "loss_spike": (
        *("step", "loss", "z", "median", "deviation", "peak", "peak_step"),
        *("batches", "values"),
    ),
    "debug_finding": ("step", "probe", "module", "condition", "where", "message"),
    "finding": ("step", "check", "severity", "rank", "subject", "message", "fix", "page"),
    "lint": ("steps", "checks", "left_out"),
    "stop": ("step", "by", "reason"),
    "signal": ("step", "signal"),
    "end": (
        *("step", "status", "reason", "error", "traceback"),
        *("skipped_steps", "tokens_seen", "times", "hooks"),
    ),
}

Event = dict[str, Any]


@dataclass
class RunData:
    """A run as far as a report shows it.

    Series are in the order of their first values, events by kind, the oldest first. If there are
    very many events, `events` has the first and the last, and `event_counts` their number.
    """

    run: OpenedRun
    overview: dict[str, Any]
    manifest: dict[str, Any]
    series: dict[str, SampledSeries] = field(default_factory=dict[str, SampledSeries])
    media: Media = field(default_factory=Media)
    events: dict[str, list[Event]] = field(default_factory=dict[str, list[Event]])
    event_counts: dict[str, int] = field(default_factory=dict[str, int])
    checkpoints: list[Any] = field(default_factory=list[Any])
    left_out: list[str] = field(default_factory=list[str])

    def events_of(self, *kinds: str) -> list[Event]:
        """Return the events of some kinds, in their order within each."""
        return [event for kind in kinds for event in self.events.get(kind, ())]

    @property
    def end(self) -> Event | None:
        """The last `end` event; None while the run has not ended."""
        ends = self.events.get("end")
        return ends[-1] if ends else None


def read_run(run: OpenedRun) -> RunData:
    """Read a run, whatever state it is in."""
    data = RunData(run, run.overview(), run.manifest, checkpoints=run.checkpoints())
    growing = data.overview["status"] == "training"
    metrics = JsonlReader(run.path / "metrics.jsonl", growing=growing)
    events = JsonlReader(run.path / "events.jsonl", growing=growing)
    left_out = _read_metrics(data, metrics)
    _read_events(data, events)
    data.left_out = run.collect_damage([metrics, events]) + left_out
    return data


def _read_metrics(data: RunData, reader: JsonlReader) -> list[str]:
    pending: dict[str, list[Scalar]] = {}
    has_more = False
    count = 0
    limit = _MAX_PER_SERIES
    for record in reader:
        if record["kind"] != "scalar":
            data.media.add(record)
            continue
        rows = pending.get(record["name"])
        if rows is None:
            if len(pending) >= MAX_SERIES:
                has_more = True
                continue
            rows = pending[record["name"]] = []
        rows.append((record.get("step"), record.get("time"), float(record["value"])))
        count += 1
        if count % _MAX_PENDING == 0:
            limit = _sample(data, pending, limit)
    _sample(data, pending, limit)
    return [f"metrics.jsonl: the series after the first {MAX_SERIES:,}"] if has_more else []


def _sample(data: RunData, pending: dict[str, list[Scalar]], limit: int) -> int:
    """Move the pending values to the series; return how many buckets a series may have."""
    for name, rows in pending.items():
        if rows:
            data.series.setdefault(name, SampledSeries()).add(rows, limit)
            rows.clear()
    while limit > 50 and sum(map(len, data.series.values())) > _MAX_BUCKETS:
        limit //= 2
        for series in data.series.values():
            series.shrink(limit)
    return limit


def _read_events(data: RunData, reader: JsonlReader) -> None:
    room = _MAX_LONG
    for event in reader:
        kind = str(event["kind"])
        if kind not in _FIELDS:
            continue
        data.event_counts[kind] = data.event_counts.get(kind, 0) + 1
        kept = data.events.setdefault(kind, [])
        if kind == "end" and kept:
            kept[-1].pop("hooks", None)  # only those of the last one are shown
        cut, size = _cut(event, _MAX_FIELD if room > 0 or kind == "end" else _MAX_SHORT)
        room -= size
        kept.append(cut)
        if len(kept) > _MAX_EVENTS:
            del kept[_MAX_EVENTS // 2]  # the first and the last stay


def _cut(event: Event, limit: int) -> tuple[Event, int]:
    """Return the fields of an event that a report shows, and the size of its long ones as JSON.

    Texts are cut at their beginning, because errors are at the end. Other fields that are longer
    than `limit` are left out.
    """
    kept: Event = {}
    total = 0
    for name in ("time", *_FIELDS[event["kind"]]):
        value = event.get(name)
        if isinstance(value, str):
            size = len(value)
            value = "…" + value[-_MAX_TEXT:] if size > _MAX_TEXT else value
            value = "…" + value[-limit:] if len(value) > limit else value
        else:
            size = len(json.dumps(value)) if isinstance(value, dict | list) else 0
            value = value if size <= limit else None
        total += size if size > _MAX_SHORT else 0
        kept[name] = value
    return kept, total
