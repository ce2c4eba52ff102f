"""The main facts of a run: as JSON for programs, and in sentences for people."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from hookline.report.run_data import RunData
from hookline.report.series import (
    find_bad_gradients,
    find_gradient_norms,
    group_layers,
    order_layers,
)
from hookline.runs.formatting import format_duration, format_number, format_time
from hookline.runs.jsonl_reader import is_finite_number
from hookline.text_tables import join_some

_PHASES = (
    *("data", "data and forward", "forward", "backward", "optimizer"),
    *("hooks", "validation", "checkpoints"),
)
_SKIPS, _FAILURES, _SPIKES = "step_skipped", "hook_failed", "loss_spike"
_LOSSES = ("train/loss", "train/loss_epoch", "val/loss", "val/loss_epoch")
_MAX_FINDINGS = 20
_MAX_LINT = 200
_LINT_TEXTS = {"check": 100, "subject": 500, "message": 2_000, "fix": 2_000, "page": 4_000}


def collect_facts(data: RunData) -> dict[str, Any]:
    """Return the main facts of a run as JSON."""
    overview, manifest = data.overview, data.manifest
    keys = ("id", "name", "tags", "status", "path", "started", "seconds", "attempts", "steps")
    facts = {name: overview[name] for name in keys}
    # The last `end` of a run that was resumed and goes on, or was lost, is that of an earlier one.
    end = (data.end or {}) if overview["status"] not in ("training", "lost") else {}
    seconds, steps = overview["seconds"], overview["steps"]
    if steps is None and is_finite_number(end.get("step")):  # nothing was logged
        steps = int(end["step"])
    starts = data.events_of("start")[:1]  # a fork does not begin at step 0
    trained = (steps or 0) - sum(int(_measure(start.get("step"))) for start in starts)
    is_timed = seconds and trained > 0 and overview["attempts"] == 1
    is_timed = is_timed and not data.events_of("resumed")  # a bare loop loaded a checkpoint
    facts |= {
        "ended": manifest.get("ended"),
        "reason": end.get("reason"),
        "last_error": overview["last_error"],
        "parameters": _parameters(manifest),
        "tokens": int(points[-1][1]) if (points := token_points(data)) else None,
        "steps_per_second": trained / seconds if is_timed else None,
        "steps": steps,
        "metrics": {name: _finite(asdict(one.summary(name))) for name, one in data.series.items()},
        "not_finite": {name: one.not_finite for name, one in data.series.items() if one.not_finite},
        "checkpoints_saved": data.event_counts.get("checkpoint", 0),
        "checkpoints_on_disk": [one.path.name for one in data.checkpoints],
        "steps_skipped": _skipped_steps(data),
        "loss_spikes": data.event_counts.get(_SPIKES, 0) if _detects_spikes(data) else None,
        "debug_findings": _findings(data),
        "lint": _lint_facts(data),
        "hooks": _hook_facts(data),
        "phase_seconds": phase_seconds(data),
        "gradients": _gradient_facts(data),
        "left_out": data.left_out,
    }
    return facts


def describe_facts(facts: Mapping[str, Any]) -> list[str]:
    """Return the facts as sentences."""
    lines = [_outcome(facts), _losses(facts), _results(facts)]
    lines += [text for _, text in describe_gradients(facts)]
    others = (describe_lint, _origin, _incidents, _hook_cost, _time)
    lines += [describe(facts) for describe in others]
    described = {"gradients", "grad_norm"} if facts["gradients"] is not None else set[str]()
    odd = [
        f"{shorten(name, 80)} ({count})"
        for name, count in facts["not_finite"].items()
        if name.partition("/")[0] not in described and name not in ("train/loss", "val/loss")
    ]
    if odd:
        lines.append(f"Values that are not finite: {join_some(odd)}.")
    return [line for line in lines if line]


def describe_status(facts: Mapping[str, Any]) -> list[str]:
    """Return how a run ended as a tone (`good`, `warn`, `bad` or none) and a text.

    Only a run that completed is good, if its losses and gradients were finite and Lint has found
    nothing that is an error.
    """
    status = shorten(facts["status"], 40)
    tones = {"completed": "good", "stopped": "", "training": ""}
    tones |= {"interrupted": "warn", "preempted": "warn"}
    tone = tones.get(status, "bad")
    losses = [facts["metrics"][name]["last"] for name in _LOSSES if name in facts["metrics"]]
    if None in losses:
        return ["bad", f"{status}, loss not finite"]
    errors = facts["lint"]["errors"] if facts["lint"] is not None else 0
    if errors:
        return ["bad", f"{status}, with {plural(errors, 'error')} found by Lint"]
    is_odd = facts["not_finite"].keys() & {*_LOSSES} or _has_bad_gradients(facts)
    if is_odd and tone in ("good", ""):
        return ["warn", f"{status}, with values that were not finite"]
    return [tone, status]


def _has_bad_gradients(facts: Mapping[str, Any]) -> bool:
    names = facts["not_finite"]
    return any(name.partition("/")[0] in ("gradients", "grad_norm") for name in names)


def describe_gradients(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what is known about the gradients of layers: a tone (`good` or `bad`) and a sentence.

    Without recorded gradients of layers, nothing is said.
    """
    found = facts["gradients"]
    if found is None:
        return []
    lines: list[tuple[str, str]] = []
    steps, count = found["not_finite"], found["layers"]
    if steps:
        first = min((step for step in steps.values() if step is not None), default=None)
        at_once = [name for name, step in steps.items() if step == first]
        which = f"all {count}" if len(steps) == count else f"{len(steps)} of {count}"
        shown = join_some(shorten(name, 80) for name in at_once)
        where = "all layers at once" if len(at_once) == count else shown
        text = f"The gradients of {which} layers are not finite, first at step {_step(first)} (of "
        lines.append(("bad", f"{text}the recorded steps), in {where}."))
    for verb, layers in (("vanish", found["vanishing"]), ("explode", found["exploding"])):
        if layers:
            shown = join_some(f"{shorten(n, 80)} ({_shown(v)})" for n, v in layers.items())
            lines.append(("bad", f"Gradients {verb} in {shown}."))
    losses_are_finite = not facts["not_finite"].keys() & {*_LOSSES}
    if not lines and losses_are_finite and not _has_bad_gradients(facts):
        text = "In the last quarter of the recorded steps, no gradient of the "
        lines.append(("good", f"{text}{count} layers vanishes or explodes."))
    return lines


def _origin(facts: Mapping[str, Any]) -> str:
    """Return what Debug found; if losses or gradients were not finite, that the origin is unknown.

    The layer whose gradient is the first in a list is not blamed: one NaN in the loss makes the
    gradients of all layers NaN.
    """
    findings = facts["debug_findings"]
    if findings["count"]:
        first = findings["first"][:3]
        shown = dict.fromkeys(map(_describe_finding, first))  # two hooks may find the same
        more = findings["count"] - len(first)
        return f"Debug found {'; '.join(shown)}{f'; and {more:,} more' if more else ''}."
    if facts["not_finite"].keys() & {*_LOSSES} or _has_bad_gradients(facts):
        return (
            "Where values that are not finite came from is unknown: no finding of a debug probe is "
            "recorded. hookline.probes.Debug() names the first module that has one."
        )
    return ""


def _describe_finding(found: Mapping[str, Any]) -> str:
    at = f"at step {_step(found['step'])}"
    if found["module"] is None:
        return f"{at}: {found['message'].rstrip('.')}"
    where = {"output": "the output", "input": "the input", "gradient": "the gradient"}
    what = "values that are not finite" if found["condition"] == "nonfinite" else found["condition"]
    return (
        f"{what} in {where.get(found['where'], found['where'])} of "
        f"{found['module'] or 'the model'} {at}"
    )


def _findings(data: RunData) -> dict[str, Any]:
    """Return the first findings of debug probes, with what can be trusted of their fields."""
    limits = {"probe": 100, "condition": 60, "where": 60, "message": 1000}
    first = [
        {
            "step": event.get("step") if is_finite_number(event.get("step")) else None,
            "module": None if event.get("module") is None else shorten(event["module"], 200),
            **{name: shorten(event.get(name) or "", limit) for name, limit in limits.items()},
        }
        for event in data.events_of("debug_finding")[:_MAX_FINDINGS]
    ]
    return {"count": data.event_counts.get("debug_finding", 0), "first": first}


def _lint_facts(data: RunData) -> dict[str, Any] | None:
    """Return what Lint has found and which checks it made; None if it was not there.

    A resumed run may find the same again: it is one finding. The checks are those of the last
    attempt that ended; None before.
    """
    events, summaries = data.events_of("finding"), data.events_of("lint")
    if not events and not summaries:
        return None
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for event in events:
        texts = {name: shorten(event.get(name) or "", limit) for name, limit in _LINT_TEXTS.items()}
        numbers = {name: _count(event.get(name)) for name in ("step", "rank")}
        severity = "error" if event.get("severity") == "error" else "warning"
        one = {**texts, **numbers, "severity": severity}
        found.setdefault((texts["check"], texts["subject"]), one)
    findings = sorted(found.values(), key=lambda one: one["severity"])  # errors first
    last = summaries[-1] if summaries else {}
    return {
        "findings": findings[:_MAX_LINT],
        "count": len(findings),
        "errors": sum(one["severity"] == "error" for one in findings),
        "checks": _count(last.get("checks")),
        "left_out": {
            shorten(name, 100): shorten(why, 300)
            for name, why in [*as_dict(last.get("left_out")).items()][:_MAX_LINT]
        },
    }


def describe_lint(facts: Mapping[str, Any]) -> str:
    """Return how many checks Lint made and what it found, in a sentence; "" without Lint."""
    lint = facts["lint"]
    if lint is None:
        return ""
    count, errors = lint["count"], lint["errors"]
    checks = "" if lint["checks"] is None else f"{lint['checks']:,} checks, "
    found = plural(count, "finding") if count else "no finding"
    which = "an error" if errors == count == 1 else f"{errors:,} of them errors"
    return f"Lint: {checks}{found}{f', {which}' if errors else ''}."


def _detects_spikes(data: RunData) -> bool:
    """Return whether a hook has looked for loss spikes."""
    hooks: Any = data.manifest.get("hooks")
    classes: list[Any] = [hook["cls"] for hook in read_hooks(data)]
    classes += [hook.get("class") for hook in hooks or () if isinstance(hook, dict)]
    detects = any(str(name).rpartition(".")[2] == "LossSpikeDetector" for name in classes)
    return detects or bool(data.event_counts.get(_SPIKES))


def phase_seconds(data: RunData) -> dict[str, float]:
    """Return the seconds of each phase of training; empty if they were not recorded.

    The end of each attempt has its totals. One that was killed has only what was recorded from time
    to time.
    """
    totals: dict[str, float] = {}
    ends = [times for e in data.events_of("end") if isinstance(times := e.get("times"), dict)]
    for times in ends:
        for phase, seconds in times.items():
            totals[shorten(phase, 40)] = totals.get(phase, 0.0) + _measure(seconds)
    recorded = {
        name[5:]: _measure(sum(one.sums))
        for name, one in data.series.items()
        if name.startswith("time/")
    }
    found = totals if len(ends) == data.overview["attempts"] or not recorded else recorded
    if not found.get("data") and found.get("forward"):  # a bare loop that loads its own batches
        found = {"data and forward": found["forward"], **found}
        del found["forward"]
        found.pop("data", None)
    order = {phase: i for i, phase in enumerate(_PHASES)}
    return dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))


def _skipped_steps(data: RunData) -> int:
    """Return how many steps were skipped: the event log has some of them, if they are many."""
    ends = sum(int(_measure(event.get("skipped_steps"))) for event in data.events_of("end"))
    return max(ends, data.event_counts.get(_SKIPS, 0))


def _outcome(facts: Mapping[str, Any]) -> str:
    count = facts["steps"]
    steps = "an unknown number of steps" if count is None else plural(count, "step")
    words = {"training": "is still training", "lost": "was lost: its process ended without a word"}
    words |= {"error": "ended with an error", "unknown": "has no manifest that can be read"}
    status = words.get(facts["status"], f"was {shorten(facts['status'], 40)}")
    if facts["status"] in ("completed", "stopped"):
        status = shorten(facts["status"], 40)
    pace = facts["steps_per_second"]
    pace = f", {_pace(pace)}" if pace else ""
    attempts = f", in {facts['attempts']} attempts" if facts["attempts"] > 1 else ""
    started = "" if not facts["started"] else f", started {format_time(facts['started'])} UTC"
    duration = f" in {format_duration(facts['seconds'])}" if facts["seconds"] is not None else ""
    reason = f" Reason: {shorten(facts['reason'], 300).rstrip('.')}." if facts["reason"] else ""
    error = facts["last_error"]
    first = shorten(str(error).strip().partition("\n")[0], 400) if error else ""
    error_text = f" Its error: {first}" if first else ""
    return f"The run {status}: {steps}{duration}{pace}{attempts}{started}.{reason}{error_text}"


def _pace(per_second: float) -> str:
    if per_second >= 1:
        return f"{round_number(per_second):g} steps per second"
    return f"{round_number(1 / per_second):g} seconds per step"


def _losses(facts: Mapping[str, Any]) -> str:
    parts: list[str] = []
    for name, label in (("train/loss", "training loss"), ("val/loss", "validation loss")):
        found = facts["metrics"].get(name)
        if found is None:
            continue
        text = f"The {label} ended at {_shown(found['last'])}"
        if name in facts["not_finite"]:
            times = facts["not_finite"][name]
            text += f" (it was not finite {'once' if times == 1 else f'{times:,} times'})"
        if found["lowest"] is not None:
            lowest = format_number(round_number(found["lowest"]))
            text += f"; its lowest value was {lowest} at step {_step(found['lowest_step'])}"
        parts.append(text + ".")
    return " ".join(parts)


def _results(facts: Mapping[str, Any]) -> str:
    shown = [
        f"{shorten(name, 60)} {_shown(one['best'])} (step {_step(one['best_step'])})"
        for name, one in facts["metrics"].items()
        if name.startswith("val/") and name != "val/loss" and one["best"] is not None
    ]
    return f"Best: {join_some(shown)}." if shown else ""


def _incidents(facts: Mapping[str, Any]) -> str:
    counts = {
        "loss spike": facts["loss_spikes"],
        "skipped step": facts["steps_skipped"],
        "hook failure": facts["hooks"]["failures"],
    }
    some = [plural(n, what) for what, n in counts.items() if n]
    saved = facts["checkpoints_saved"]
    text = f"{plural(saved, 'checkpoint')} saved" if saved else "No checkpoint saved"
    on_disk = len(facts["checkpoints_on_disk"])
    text += f", {on_disk:,} in the folder" if on_disk else ""
    if not some:
        spike = "loss spike, " if facts["loss_spikes"] is not None else ""
        return f"{text}. No {spike}skipped step or failing hook was recorded."
    return f"{text}. Recorded: {', '.join(some)}."


def _hook_cost(facts: Mapping[str, Any]) -> str:
    hooks = facts["hooks"]
    if hooks["share"] is None:
        return ""
    of = "the run" if facts["attempts"] <= 1 else "the last attempt that ended"
    name, share = shorten(hooks["costliest"], 80), hooks["costliest_share"]
    return (
        f"Hooks took about {hooks['share']:.2%} of {of}; the costliest was {name} ({share:.2%}), "
        "estimated from sampled clocks."
    )


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
    hooks: Any = as_dict((data.end or {}).get("hooks")).get("hooks")
    found: list[dict[str, Any]] = []
    for hook in hooks[:500] if isinstance(hooks, list) else ():
        if isinstance(hook, dict):
            numbers = {n: _measure(hook.get(n)) for n in ("calls", "seconds", "share", "failures")}
            texts = {
                n: shorten(hook.get(n) or "", 500)
                for n in ("name", "cls", "status", "schedule", "last_error")
            }
            events = {
                shorten(event, 60): {n: _measure(cost.get(n)) for n in ("calls", "seconds")}
                for event, cost in [*as_dict(hook.get("costs")).items()][:60]
                if isinstance(cost, dict)
            }
            found.append({**texts, **numbers, "events": events})
    return found


def _gradient_facts(data: RunData) -> dict[str, Any] | None:
    norms = find_gradient_norms(group_layers(data.series))
    if norms is None:
        return None
    layers, order = order_layers(norms[1], data.manifest.get("parameter_names") or ())
    vanishing, exploding, first_steps = find_bad_gradients(layers, data.series)
    steps = {layer: int(step) if step == step else None for layer, step in first_steps.items()}
    found: dict[str, Any] = _finite({"vanishing": vanishing, "exploding": exploding})
    return {"layers": len(layers), "order": order, **found, "not_finite": steps}


def _parameters(manifest: dict[str, Any]) -> int | None:
    count = as_dict(as_dict(manifest.get("training")).get("model")).get("parameters")
    return count if type(count) is int else None


def token_points(data: RunData) -> list[tuple[float, float]]:
    """Return how many tokens were seen at some steps, in their order."""
    points = {
        float(event["step"]): float(event["tokens_seen"])
        for event in data.events_of("checkpoint", "end")
        if _measure(event.get("tokens_seen")) > 0 and _measure(event.get("step")) > 0
    }
    series = data.series.get("train/tokens_seen") or data.series.get("tokens_seen")
    if series is not None:
        points |= dict(zip(series.steps, series.highs, strict=True))
    return sorted({0.0: 0.0, **points}.items()) if points else []


def shorten(value: Any, limit: int = 200) -> str:
    """Return a value as text, cut after `limit` characters."""
    text = str(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def as_dict(value: Any) -> dict[Any, Any]:
    """Return what should be a dict; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def _measure(value: Any) -> float:
    """Return a number of a size that a run can have; 0 for others, whose sums might overflow."""
    return value if is_finite_number(value) and 0 <= value < 1e18 else 0


def _count(value: Any) -> int | None:
    """Return a number that counts something; None for anything else."""
    return int(value) if is_finite_number(value) and 0 <= value < 1e18 else None


def plural(count: int, noun: str) -> str:
    """Return a number with its noun: `1 step`, `2,000 steps`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _finite(value: Any) -> Any:
    """Return JSON without NaN and infinities, which become None."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def round_number(value: Any) -> Any:
    """Return a finite float with four digits, and other values as they are."""
    return float(f"{value:.4g}") if isinstance(value, float) and math.isfinite(value) else value


def _shown(value: Any) -> str:
    return "a value that is not finite" if value is None else format_number(round_number(value))


def _step(step: Any) -> str:
    return f"{step:,}" if isinstance(step, int) else "unknown" if step is None else str(step)
