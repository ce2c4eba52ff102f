"""The main facts of a run: as JSON for programs, and in sentences for people."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from hookline.printable import printable
from hookline.report.layers import find_bad_gradients, find_gradient_norms, group_layers
from hookline.report.reading import RunData
from hookline.runs.formatting import format_duration, format_number, format_time
from hookline.runs.record_checks import is_finite_number
from hookline.text_tables import join_some

__all__ = ["collect_facts", "describe_facts"]

_PHASES = ("data", "forward", "backward", "optimizer", "hooks", "validation", "checkpoints")
_SKIPS, _FAILURES, _SPIKES = "step_skipped", "hook_failed", "loss_spike"


def collect_facts(data: RunData) -> dict[str, Any]:
    """Return the main facts of a run as JSON."""
    overview, manifest = data.overview, data.manifest
    keys = ("id", "name", "tags", "status", "path", "started", "seconds", "parts", "steps")
    facts = {name: overview[name] for name in keys}
    end = data.end or {}
    seconds, steps = overview["seconds"], overview["steps"]
    trained = (steps or 0) - _first_step(data)  # a fork does not begin at step 0
    is_timed = seconds and trained > 0 and overview["parts"] == 1
    facts |= {
        "ended": manifest.get("ended"),
        "reason": end.get("reason"),
        "last_error": overview["last_error"],
        "parameters": _parameters(manifest),
        "tokens": _tokens(data),
        "steps_per_second": trained / seconds if is_timed else None,
        "metrics": {name: _finite(asdict(one.summary(name))) for name, one in data.series.items()},
        "not_finite": {name: one.not_finite for name, one in data.series.items() if one.not_finite},
        "checkpoints_saved": data.event_counts.get("checkpoint", 0),
        "checkpoints_on_disk": [one.path.name for one in data.checkpoints],
        "steps_skipped": _skipped_steps(data),
        "loss_spikes": data.event_counts.get(_SPIKES, 0),
        "hooks": _hook_facts(data),
        "phase_seconds": phase_seconds(data),
        "gradients": _gradient_facts(data),
        "trackers": _tracker_facts(data),
        "left_out": data.left_out,
    }
    return facts


def describe_facts(facts: Mapping[str, Any]) -> list[str]:
    """Return the facts as sentences."""
    lines = [_outcome(facts), _losses(facts), _results(facts)]
    gradients = facts["gradients"]
    if gradients is not None:
        for what, layers in (
            ("vanish", gradients["vanishing"]),
            ("explode", gradients["exploding"]),
        ):
            if layers:
                shown = join_some(f"{printable(n, 80)} ({_shown(v)})" for n, v in layers.items())
                lines.append(f"Gradients {what} in {shown}.")
        if not gradients["vanishing"] and not gradients["exploding"]:
            lines.append(f"No gradient of the {gradients['layers']} layers vanishes or explodes.")
    lines += [_incidents(facts), _hook_cost(facts), _time(facts)]
    for name, lacks in facts["trackers"].items():
        problem = f": {lacks['problem']}" if lacks["problem"] else ""
        lines.append(f"The tracker {name} lacks {lacks['missing']:,} values{problem}.")
    if facts["not_finite"]:
        shown = join_some(f"{printable(n, 80)} ({c})" for n, c in facts["not_finite"].items())
        lines.append(f"Values that are not finite: {shown}.")
    return [line for line in lines if line]


def phase_seconds(data: RunData) -> dict[str, float]:
    """Return the seconds of each phase of training; empty if they were not recorded.

    The end of each part of a run has its totals. A part that was killed has only what was recorded
    from time to time.
    """
    totals: dict[str, float] = {}
    ends = [times for e in data.events_of("end") if isinstance(times := e.get("times"), dict)]
    for times in ends:
        for phase, seconds in times.items():
            totals[printable(phase, 40)] = totals.get(phase, 0.0) + _measure(seconds)
    recorded = {
        name[5:]: _measure(sum(one.sums))
        for name, one in data.series.items()
        if name.startswith("time/")
    }
    found = totals if len(ends) == data.overview["parts"] or not recorded else recorded
    order = {phase: i for i, phase in enumerate(_PHASES)}
    return dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))


def _first_step(data: RunData) -> int:
    starts = data.events_of("start")
    return int(_measure(starts[0].get("step"))) if starts else 0


def _tracker_facts(data: RunData) -> dict[str, dict[str, Any]]:
    """Return what each tracker lacks: the number of values, and the problem."""
    lacks: dict[str, dict[str, Any]] = {}
    for event in data.events_of("trackers"):
        missing: Any = event.get("missing")
        for name, found in list(missing.items())[:20] if isinstance(missing, dict) else ():
            if isinstance(found, dict):
                count = int(_measure(found.get("dropped")) + _measure(found.get("failed")))
                one = lacks.setdefault(printable(name, 60), {"missing": 0, "problem": None})
                one["missing"] += count
                one["problem"] = found.get("problem") and printable(found["problem"], 300)
    return lacks


def _skipped_steps(data: RunData) -> int:
    """Return how many steps were skipped: the event log has some of them, if they are many."""
    ends = sum(int(_measure(event.get("skipped_steps"))) for event in data.events_of("end"))
    return max(ends, data.event_counts.get(_SKIPS, 0))


def _outcome(facts: Mapping[str, Any]) -> str:
    count = facts["steps"] or 0
    steps = f"{count:,} step{'' if count == 1 else 's'}" if count else "no steps"
    words = {"training": "is still training", "lost": "was lost: its process ended without a word"}
    words |= {"error": "ended with an error", "unknown": "has no manifest that can be read"}
    status = words.get(facts["status"], f"was {printable(facts['status'], 40)}")
    if facts["status"] in ("completed", "stopped"):
        status = printable(facts["status"], 40)
    pace = facts["steps_per_second"]
    pace = f", {_pace(pace)}" if pace else ""
    parts = f", in {facts['parts']} parts" if facts["parts"] > 1 else ""
    started = "" if not facts["started"] else f", started {format_time(facts['started'])} UTC"
    duration = f" in {format_duration(facts['seconds'])}" if facts["seconds"] is not None else ""
    reason = f" Reason: {printable(facts['reason'], 300).rstrip('.')}." if facts["reason"] else ""
    error = facts["last_error"]
    first = printable(str(error).strip().partition("\n")[0], 400) if error else ""
    error_text = f" Its error: {first}" if first else ""
    return f"The run {status}: {steps}{duration}{pace}{parts}{started}.{reason}{error_text}"


def _pace(per_second: float) -> str:
    if per_second >= 1:
        return f"{_short(per_second):g} steps per second"
    return f"{_short(1 / per_second):g} seconds per step"


def _losses(facts: Mapping[str, Any]) -> str:
    parts: list[str] = []
    for name, label in (("train/loss", "training loss"), ("val/loss", "validation loss")):
        found = facts["metrics"].get(name)
        if found is None:
            continue
        text = f"The {label} ended at {_shown(found['last'])}"
        if found["lowest"] is not None:
            lowest = (
                f"{format_number(_short(found['lowest']))} at step {_step(found['lowest_step'])}"
            )
            text += f"; its lowest value was {lowest}"
        parts.append(text + ".")
    return " ".join(parts)


def _results(facts: Mapping[str, Any]) -> str:
    shown = [
        f"{printable(name, 60)} {format_number(_short(one['best']))} "
        f"(step {_step(one['best_step'])})"
        for name, one in facts["metrics"].items()
        if name.startswith("val/") and name != "val/loss" and one["best"] is not None
    ]
    return f"Best: {join_some(shown)}." if shown else ""


def _incidents(facts: Mapping[str, Any]) -> str:
    counts = {
        "loss spike": facts["loss_spikes"],
        "skipped step": facts["steps_skipped"],
        "failure of hooks": facts["hooks"]["failures"],
    }
    plurals = {"failure of hooks": "failures of hooks"}
    some = [
        f"{n:,} {what if n == 1 else plurals.get(what, what + 's')}"
        for what, n in counts.items()
        if n
    ]
    saved = facts["checkpoints_saved"]
    text = (
        f"{saved:,} checkpoint{'' if saved == 1 else 's'} saved" if saved else "No checkpoint saved"
    )
    on_disk = len(facts["checkpoints_on_disk"])
    text += f", {on_disk:,} in the folder" if on_disk else ""
    if not some:
        return f"{text}. No loss spike, skipped step or failing hook was recorded."
    return f"{text}. Recorded: {', '.join(some)}."


def _hook_cost(facts: Mapping[str, Any]) -> str:
    hooks = facts["hooks"]
    if hooks["share"] is None:
        return ""
    text = f"Hooks took about {hooks['share']:.2%} of the run"
    if hooks["costliest"] is not None:
        name, share = printable(hooks["costliest"], 80), hooks["costliest_share"]
        text += f"; the costliest was {name} ({share:.2%})"
    return text + ", estimated from sampled clocks."


def _time(facts: Mapping[str, Any]) -> str:
    phases = facts["phase_seconds"]
    total = sum(phases.values())
    if not total:
        return ""
    largest = sorted(phases.items(), key=lambda item: -item[1])[:3]
    shown = ", ".join(f"{name} (about {seconds / total:.0%})" for name, seconds in largest)
    return f"Most time went to {shown}."


def _hook_facts(data: RunData) -> dict[str, Any]:
    found: dict[str, Any] = {"share": None, "costliest": None, "costliest_share": None}
    hooks = read_hooks(data)
    failures = sum(hook["failures"] for hook in hooks)
    found["failures"] = max(failures, data.event_counts.get(_FAILURES, 0))
    if data.end is not None and hooks:
        costliest = max(hooks, key=lambda hook: hook["share"])
        found["share"] = sum(hook["share"] for hook in hooks)
        found |= {"costliest": costliest["name"], "costliest_share": costliest["share"]}
    return found


def read_hooks(data: RunData) -> list[dict[str, Any]]:
    """Return the hooks of the last `end` event, with what can be trusted of their fields."""
    summary: Any = (data.end or {}).get("hooks")
    hooks: Any = summary.get("hooks") if isinstance(summary, dict) else None
    if not isinstance(hooks, list):
        return []
    found: list[dict[str, Any]] = []
    for hook in hooks[:500]:
        if isinstance(hook, dict):
            numbers = {n: _measure(hook.get(n)) for n in ("calls", "seconds", "share", "failures")}
            texts = {
                n: printable(hook.get(n) or "", 500)
                for n in ("name", "cls", "status", "schedule", "last_error")
            }
            by_event: Any = hook.get("costs")
            costs = by_event if isinstance(by_event, dict) else {}
            events = {
                printable(event, 60): {n: _measure(cost.get(n)) for n in ("calls", "seconds")}
                for event, cost in list(costs.items())[:60]
                if isinstance(cost, dict)
            }
            found.append({**texts, **numbers, "events": events})
    return found


def _gradient_facts(data: RunData) -> dict[str, Any] | None:
    norms = find_gradient_norms(group_layers(data.series))
    if norms is None:
        return None
    vanishing, exploding = find_bad_gradients(norms[1], data.series)
    found: dict[str, Any] = _finite(
        {"layers": len(norms[1]), "vanishing": vanishing, "exploding": exploding}
    )
    return found


def _parameters(manifest: dict[str, Any]) -> int | None:
    training: Any = manifest.get("training")
    model: Any = training.get("model") if isinstance(training, dict) else None
    count: Any = model.get("parameters") if isinstance(model, dict) else None
    return count if type(count) is int else None


def token_points(data: RunData) -> list[tuple[float, float]]:
    """Return how many tokens were seen at some steps, in their order."""
    points = {
        float(event["step"]): float(event["tokens_seen"])
        for event in data.events_of("checkpoint", "end")
        if _number(event.get("tokens_seen")) > 0 and _number(event.get("step")) > 0
    }
    series = data.series.get("train/tokens_seen") or data.series.get("tokens_seen")
    if series is not None:
        points |= dict(zip(series.steps, series.highs, strict=True))
    return sorted({0.0: 0.0, **points}.items()) if points else []


def _tokens(data: RunData) -> int | None:
    points = token_points(data)
    return int(points[-1][1]) if points else None


def _number(value: Any) -> float:
    return value if is_finite_number(value) else 0


def _measure(value: Any) -> float:
    """Return a number of a size that a run can have; 0 for others, whose sums might overflow."""
    number = _number(value)
    return number if 0 <= number < 1e18 else 0


def _finite(value: Any) -> Any:
    """Return JSON without NaN and infinities, which become None."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) and math.isfinite(value) else value


def _shown(value: Any) -> str:
    return "a value that is not finite" if value is None else format_number(_short(value))


def _step(step: Any) -> str:
    return f"{step:,}" if isinstance(step, int) else "unknown" if step is None else str(step)
