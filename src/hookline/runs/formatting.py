"""Runs as people read them: tables of text, and of HTML for notebooks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from hookline.runs.checkpoint_reader import SavedCheckpoint
from hookline.runs.git import describe_commit
from hookline.runs.metric_summary import Result

__all__ = ["as_html", "as_line", "as_text", "duration", "figure", "moment", "table"]

_MOST = 40  # metrics that are shown; the rest is counted

Facts = Mapping[str, Any]
Results = Mapping[str, Result]


def as_line(overview: Facts) -> str:
    """Return a run in one short line."""
    steps = "no steps" if overview["steps"] is None else f"{overview['steps']} steps"
    return f"<run {overview['id']}: {overview['status']}, {steps}, {overview['path']}>"


def as_text(
    overview: Facts,
    manifest: Facts,
    results: Results,
    checkpoints: Sequence[SavedCheckpoint],
    damage: Sequence[str],
) -> str:
    """Return a run as a short text: what it is, what came of it, what is damaged."""
    facts = _facts(overview, manifest)
    width = max(len(name) for name, _ in facts)
    blocks = ["\n".join(f"{name.ljust(width)}  {value}" for name, value in facts)]
    if results:
        blocks.append(table(_RESULTS, _results(results)) + _left_out(results))
    if checkpoints:
        blocks.append(table(_CHECKPOINTS, [_checkpoint(one) for one in checkpoints]))
    blocks += ["\n".join(f"damaged: {line}" for line in damage)] if damage else []
    return "\n\n".join(blocks)


def as_html(
    overview: Facts,
    manifest: Facts,
    results: Results,
    checkpoints: Sequence[SavedCheckpoint],
    damage: Sequence[str],
) -> str:
    """Return the same as tables for a notebook."""
    parts = [_html_table((), _facts(overview, manifest))]
    if results:
        parts.append(_html_table(_RESULTS, _results(results)) + escape(_left_out(results)))
    if checkpoints:
        parts.append(_html_table(_CHECKPOINTS, [_checkpoint(one) for one in checkpoints]))
    if damage:
        lines = "".join(f"<li>{escape(line)}</li>" for line in damage)
        parts.append(f"<p>Damaged:</p><ul>{lines}</ul>")
    return f"<div>{''.join(parts)}</div>"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows under heads, in columns."""
    lines = [tuple(heads), *(tuple(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def duration(seconds: float | None) -> str:
    """Return a time span in its two largest units: `2 h 05 min`."""
    if seconds is None:
        return "?"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, unit, smaller, below in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // smaller:02d} {below}"
    return f"{whole // 60} min {whole % 60:02d} s"


def moment(text: Any) -> str:
    """Return a manifest's time to the second."""
    return str(text)[:19].replace("T", " ") if text else "?"


def figure(value: Any) -> str:
    """Return a number in few digits."""
    if value is None:
        return ""
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.6g}"
    return str(value)


_RESULTS = ("metric", "last", "best", "at step", "values")
_CHECKPOINTS = ("checkpoint", "step", "epoch", "", "metrics")


def _facts(overview: Facts, manifest: Facts) -> list[tuple[str, str]]:
    git = overview["git"]
    changed = ", with uncommitted changes" if git.get("dirty") else ""
    branch = f" on {git['branch']}" if git.get("branch") else ""
    versions = manifest.get("versions")
    hooks = manifest.get("hooks")
    facts = [
        ("run", overview["id"]),
        ("folder", overview["path"]),
        ("status", overview["status"]),
        ("last error", _first_line(overview["last_error"])),
        ("started", f"{moment(overview['started'])} UTC"),
        ("trained", _trained(overview)),
        ("git", describe_commit(git, 12) + branch + changed if git else None),
        ("config", str(overview["config_hash"] or "")[:12]),
        ("seed", manifest.get("seed")),
        ("hooks", _hooks(hooks) if isinstance(hooks, list) else None),
        ("versions", _pairs(versions) if isinstance(versions, dict) else None),
    ]
    return [(name, str(value)) for name, value in facts if value not in (None, "")]


def _first_line(error: Any) -> str:
    """What ended a run, in one line; Ctrl-C has no message."""
    first, *more = str(error or "").strip().splitlines() or [""]
    return first.removesuffix(":") + (" …" if more else "")


def _trained(overview: Facts) -> str:
    parts = overview["parts"]
    span = duration(overview["seconds"])
    steps = "" if overview["steps"] is None else f", {overview['steps']} steps"
    return span + steps + (f", in {parts} parts" if parts > 1 else "")


def _hooks(hooks: Sequence[Any]) -> str:
    told = [hook for hook in hooks if isinstance(hook, dict)]
    return ", ".join(
        str(hook.get("name")) + ("" if hook.get("enabled", True) else " (disabled)")
        for hook in told
    )


def _pairs(versions: Facts) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)


def _results(results: Results) -> list[tuple[str, ...]]:
    return [
        (
            name,
            figure(result.last),
            figure(result.best),
            figure(result.best_step),
            str(result.count),
        )
        for name, result in list(results.items())[:_MOST]
    ]


def _left_out(results: Results) -> str:
    return f"\n… and {len(results) - _MOST} more" if len(results) > _MOST else ""


def _checkpoint(one: SavedCheckpoint) -> tuple[str, ...]:
    marks = " ".join(w for w, is_it in (("last", one.is_last), ("best", one.is_best)) if is_it)
    metrics = ", ".join(f"{name} {figure(value)}" for name, value in one.metrics.items())
    return one.path.name, figure(one.step), figure(one.epoch), marks, metrics


def _html_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table>{f'<tr>{head}</tr>' if heads else ''}{body}</table>"
