"""The data that the page's script draws, as JSON: series, marks, hooks and manifest of each run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from hookline.report.facts import (
    as_dict,
    describe_facts,
    describe_gradients,
    describe_lint,
    describe_status,
    phase_seconds,
    read_hooks,
    round_number,
    shorten,
    token_points,
)
from hookline.report.run_data import RunData
from hookline.report.series import SampledSeries, group_layers, order_layers
from hookline.runs.diff import describe_sections
from hookline.runs.environment import describe_commit
from hookline.runs.formatting import format_number
from hookline.runs.jsonl_reader import is_finite_number
from hookline.text_tables import join_some

_BUCKETS = 120_000  # of all series of a page: about 3 MB
_BUCKET_BYTES, _SERIES_BYTES = 27, 4_000_000
_MOST_BUCKETS = 1_000  # of a series
_MAX_CONFIG = 400  # rows
_MAX_LEFT_OUT = 40
_MAX_TRACEBACK = 6_000  # characters: its end
_MAX_SPIKES = 50  # with their details:
_MAX_SERIES, _MAX_BATCHES = 60, 16
_SKIPPED, _FAILED, _SPIKE = "step_skipped", "hook_failed", "loss_spike"
_SHOWN_FACTS = (
    *("id", "name", "status", "started", "seconds", "steps", "tokens", "parameters"),
    *("hooks", "loss_spikes", "debug_findings", "left_out"),
)


def share_buckets(runs: Sequence[RunData]) -> None:
    """Shrink the series of all runs so that the page stays small; leave out what does not fit."""
    sampled = [one for run in runs for one in run.series.items()]
    main = [one for name, one in sampled if _is_main(name)]
    others = [one for name, one in sampled if not _is_main(name)]
    room = _BUCKETS // 2
    for several in (main, others):
        limit = _MOST_BUCKETS
        while limit > 20 and sum(min(len(one), limit) for one in several) > room:
            limit //= 2
        for one in several:
            one.shrink(limit)
        room = _BUCKETS - sum(map(len, main))
    for run in runs:
        count, room = len(run.series), _SERIES_BYTES // len(runs)
        for name, one in [*run.series.items()]:
            room -= _BUCKET_BYTES * len(one) + 3 * len(name) + 100
            if room < 0 and not _is_main(name):
                del run.series[name]
        if left_out := count - len(run.series):
            run.left_out.append(f"the curves of {left_out:,} of {count:,} series")


def encode_run(
    data: RunData, facts: Mapping[str, Any], label: str, media: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a run as the page's script expects it."""
    sentences = describe_facts(facts)
    notes, badge = describe_gradients(facts), describe_status(facts)
    lint = facts["lint"] and {**facts["lint"], "summary": describe_lint(facts)}
    axes: dict[tuple[bytes, bytes], int] = {}
    xs: list[dict[str, Any]] = []
    series = {name: _encode(one, axes, xs) for name, one in data.series.items()}
    facts = {name: facts[name] for name in _SHOWN_FACTS}
    facts["left_out"] = facts["left_out"][:_MAX_LEFT_OUT]
    return {
        "label": label,
        "badge": badge,
        "facts": facts,
        "sentences": sentences,
        "xs": xs,
        "series": series,
        "layers": _encode_layers(data),
        "gradients": notes,
        "lint": lint,
        "marks": _marks(data),
        "tokens": [list(column) for column in zip(*token_points(data), strict=True)],
        "hooks": read_hooks(data),
        "switches": _switches(data),
        "failures": _failures(data),
        "spikes": [encode_spike(event) for event in data.events_of(_SPIKE)[:_MAX_SPIKES]],
        "phases": phase_seconds(data),
        "manifest": _manifest_rows(data),
        "config": _config_rows(data.manifest),
        "checkpoints": [
            [one.path.name[:200], one.step, one.is_last, one.is_best, one.size]
            for one in data.checkpoints[-200:]
        ],
        "media": media,
    }


def _encode_layers(data: RunData) -> dict[str, dict[str, Any]]:
    """Return the order and the series of layers, by group and measure.

    The series are pairs of layer and name: JavaScript would sort keys that are numbers.
    """
    names = data.manifest.get("parameter_names") or ()
    encoded: dict[str, dict[str, Any]] = {}
    for group, measures in group_layers(data.series).items():
        for measure, layers in measures.items():
            ordered, order = order_layers(layers, names)
            pairs = [list(pair) for pair in ordered.items()]
            encoded.setdefault(group, {})[measure] = {"order": order, "series": pairs}
    return encoded


def _is_main(name: str) -> bool:
    return name in ("train/loss", "val/loss") or name.startswith("lr/")


def _encode(
    one: SampledSeries, axes: dict[tuple[bytes, bytes], int], xs: list[dict[str, Any]]
) -> dict[str, Any]:
    key = one.steps.tobytes(), one.times.tobytes()
    axis = axes.get(key)
    if axis is None:
        axis = axes[key] = len(xs)
        xs.append({"steps": _numbers(one.steps, 12), "times": _numbers(one.times, 12)})
    encoded: dict[str, Any] = {"x": axis, "y": _numbers(one.means), "n": one.total}
    encoded["last"] = one.last if math.isfinite(one.last) else str(one.last)
    if one.width > 1:
        encoded |= {"lo": _numbers(one.lows), "hi": _numbers(one.highs), "w": one.width}
    if one.not_finite:
        encoded["bad"] = [one.not_finite, _numbers(one.not_finite_steps, 12)]
    return encoded


def _numbers(values: Iterable[float], digits: int = 5) -> list[float | int | None]:
    rounded = [float(f"{v:.{digits}g}") if math.isfinite(v) else None for v in values]
    return [int(v) if v is not None and abs(v) < 1e15 and v == int(v) else v for v in rounded]


def _marks(data: RunData) -> list[list[Any]]:
    """Return the marks of the curves: kind, step, time, text and, for a spike, its loss."""
    marks: list[list[Any]] = []

    def add(kind: str, event: Mapping[str, Any], text: str, loss: Any = None) -> None:
        numbers = [v if is_finite_number(v) else None for v in (event.get("step"), loss)]
        marks.append([kind, numbers[0], event.get("time"), shorten(text, 300), numbers[1]])

    for event in data.events_of("checkpoint"):
        path = str(event.get("path")).replace("\\", "/").rstrip("/")
        add("checkpoint", event, f"checkpoint {path.rpartition('/')[2]}")
    for event in data.events_of("checkpoint_failed"):
        add("failure", event, f"checkpoint failed: {event.get('error')}")
    for event in data.events_of(_SKIPPED):
        add("skipped", event, f"step skipped: {event.get('reason')}")
    for event in data.events_of("hooks"):
        items = as_dict(event.get("hooks")).items()
        by = f" (by {event['by']})" if event.get("by") else ""
        add("toggle", event, ", ".join(f"{name}: {status}" for name, status in items) + by)
    for event in data.events_of(_SPIKE):
        loss, z = event.get("loss"), event.get("z")
        text = f"loss spike: {format_number(loss)} (robust z-score {format_number(z)})"
        add("spike", event, text, loss)
    for event in data.events_of(_FAILED):
        add(
            "failure",
            event,
            f"{event.get('hook')} failed in {event.get('event')}: {event.get('error')}",
        )
    for event in [*data.events_of("start")[1:], *data.events_of("resumed")]:
        add("start", event, "resumed")
    for event in data.events_of("debug_finding"):
        add("finding", event, f"debug finding: {event.get('message')}")
    for event in data.events_of("stop"):
        by = f" by {event.get('by')}" if event.get("by") else ""
        add("stop", event, f"stop asked for{by}: {event.get('reason') or 'no reason given'}")
    for event in data.events_of("signal"):
        add("stop", event, f"signal {event.get('signal')}")
    for event in data.events_of("end"):
        if event.get("status") != "completed":
            text = f"{event.get('status')}: {event.get('reason') or event.get('error') or ''}"
            add("stop", {"step": data.overview["steps"], **event}, text.strip(": "))
    return marks


def _switches(data: RunData) -> dict[str, list[list[Any]]]:
    """Return when each hook was switched: steps with the status from then on."""
    switches: dict[str, list[list[Any]]] = {}
    hooks: Any = data.manifest.get("hooks")
    for hook in hooks if isinstance(hooks, list) else ():
        if isinstance(hook, dict):
            status = "enabled" if hook.get("enabled", True) else "disabled"
            switches[shorten(hook.get("name"), 100)] = [[0, status]]
    for event in data.events_of("hooks"):
        for name, status in as_dict(event.get("hooks")).items():
            one = switches.setdefault(shorten(name, 100), [])
            one.append([event.get("step"), shorten(status, 40)])
    return switches


def _failures(data: RunData) -> list[dict[str, Any]]:
    """Return the errors that ended training, and those of hooks, with their tracebacks."""
    ends = [{**event, "hook": "training"} for event in data.events_of("end") if event.get("error")]
    recorded = [
        {
            "hook": shorten(event.get("hook"), 100),
            "event": shorten(event.get("event") or "", 100),
            "step": event.get("step") if is_finite_number(event.get("step")) else None,
            "error": shorten(event.get("error"), 1000),
            "traceback": str(event.get("traceback") or "")[-_MAX_TRACEBACK:],
        }
        for event in [*ends[-20:], *data.events_of(_FAILED)[:200]]
    ]
    named = {failure["hook"] for failure in recorded}
    nowhere: dict[str, Any] = {"event": "", "step": None, "traceback": ""}
    return recorded + [
        {"hook": hook["name"], "error": hook["last_error"], **nowhere}
        for hook in read_hooks(data)
        if hook["last_error"] and hook["name"] not in named
    ]


def _manifest_rows(data: RunData) -> list[list[str]]:
    manifest, overview = data.manifest, data.overview
    git: Any = overview["git"]
    rows: list[tuple[str, Any]] = [("Run", overview["id"]), ("Folder", overview["path"])]
    branch = f" on {git['branch']}" if git.get("branch") else ""
    changes = ", with uncommitted changes" if git.get("dirty") else ""
    rows.append(("Commit", describe_commit(git) + branch + changes))
    if parent := as_dict(manifest.get("parent")):
        rows.append(("Forked from", f"run {parent.get('run_id')} at step {parent.get('step')}"))
    command: Any = manifest.get("command")
    rows.append(("Command", " ".join(map(str, command)) if isinstance(command, list) else command))
    rows += [("Seed", manifest.get("seed")), ("torch seed", manifest.get("torch_seed"))]
    rows.append(("Configuration hash", overview["config_hash"]))
    versions = as_dict(manifest.get("versions"))
    rows.append(("Versions", ", ".join(f"{n} {v}" for n, v in versions.items() if v)))
    for name in ("platform", "python", "host", "devices", "last_error"):
        value: Any = manifest.get(name)
        if value:
            text = json.dumps(value, default=str) if isinstance(value, dict | list) else value
            rows.append((name.replace("_", " ").capitalize(), text))
    return [[name, shorten(value, 2000)] for name, value in rows if value not in (None, "")]


def _config_rows(manifest: Mapping[str, Any]) -> list[list[str]]:
    flat = describe_sections(manifest)["config"]
    rows = [
        [shorten(name, 200), shorten(value, 400)]
        for name, value in flat.items()
        if value is not None
    ]
    return rows[:_MAX_CONFIG]


# -- loss spikes ----------------------------------------------------------------------------------


def encode_spike(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `loss_spike` event: its title, rows of names and texts, and a table of values.

    The table has, for each series, the median before the spike, the value at it and the one
    farthest from that median after it. The series that changed most come first.
    """
    shown = {name: _show(event.get(name)) for name in ("loss", "z", "median", "deviation", "peak")}
    rows = [
        [
            "Loss",
            f"{shown['loss']}, from a median of {shown['median']} with a deviation of "
            f"{shown['deviation']} in the steps before (robust z-score {shown['z']})",
        ],
        ["Peak", f"{shown['peak']} at step {_show(event.get('peak_step'))}"],
        ["Samples", _describe_batches(event.get("batches"))],
    ]
    series, more = _compare(event)
    step = _show(event.get("step"))
    return {
        "title": f"Step {step}: loss {shown['loss']}, robust z-score {shown['z']}",
        "rows": rows,
        "values": series,
        "more": more,
    }


def _describe_batches(batches: Any) -> str:
    if not isinstance(batches, list) or not batches:
        return "not known"
    parts: list[str] = []
    for batch in batches[:_MAX_BATCHES]:
        if isinstance(batch, dict):
            indices: Any = batch.get("indices")
            known = isinstance(indices, list) and indices
            of = f": indices {join_some(indices, 40, 20)}" if known else ""
            loader = shorten(batch.get("loader"), 60)
            parts.append(f"batch {_show(batch.get('batch_idx'))} of {loader}{of}")
    more = len(batches) - _MAX_BATCHES
    return "; ".join(parts) + (f"; and {more} more batches" if more > 0 else "")


def _compare(event: Mapping[str, Any]) -> tuple[list[list[str]], int]:
    """Return the rows of the table, and how many more series were logged around the spike."""
    values, step = as_dict(event.get("values")), _number(event.get("step"))
    if step is None:
        return [], 0
    found: list[tuple[float, list[str]]] = []
    for name, points in values.items():
        pairs = [
            (at, value)
            for point in (points if isinstance(points, list) else ())
            if isinstance(point, list) and len(point) == 2
            if (at := _number(point[0])) is not None
            and (value := _number(point[1], finite=False)) is not None
        ]
        before = [value for at, value in pairs if at < step and math.isfinite(value)]
        after = [value for at, value in pairs if at >= step]
        if not after:
            continue
        center = median(before) if before else None
        farthest = max(after, key=lambda value: _distance(value, center))
        row = [shorten(name, 200), *map(_show, (center, after[0], farthest))]
        found.append((_surprise(farthest, before, center), row))
    found.sort(key=lambda item: -item[0])
    return [row for _, row in found[:_MAX_SERIES]], max(0, len(found) - _MAX_SERIES)


def _distance(value: float, center: float | None) -> float:
    if not math.isfinite(value):
        return math.inf
    return abs(value - (center or 0.0))


def _surprise(value: float, before: list[float], center: float | None) -> float:
    """Return how far a value is from the median before, in median distances from it."""
    if center is None:
        return -1.0
    spread = median(abs(one - center) for one in before)
    return _distance(value, center) / max(spread, 1e-3 * abs(center), 1e-12)


def _number(value: Any, *, finite: bool = True) -> float | None:
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity") and not finite:
        return float(value)
    return float(value) if is_finite_number(value) else None


def _show(value: Any) -> str:
    return "–" if value is None else shorten(format_number(round_number(value)), 60)
