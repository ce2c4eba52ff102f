"""Checkpoints as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookline.printable import printable
from hookline.runs.checkpoint_reader import decode_metrics
from hookline.runs.formatting import format_duration, format_number, format_time
from hookline.text_tables import format_table, join_some

if TYPE_CHECKING:
    from hookline.checkpoint.contents import CheckpointContents
    from hookline.runs.checkpoint_reader import SavedCheckpoint

_MAX_ROWS = 2000  # of checkpoints, and of the weights of one


def format_list(complete: Sequence[SavedCheckpoint], damage: Mapping[str, str]) -> str:
    """Return checkpoints as a table, damaged ones with what is wrong with them."""
    headers = ("checkpoint", "step", "epoch", "size", "age", "status", "", "metrics")
    rows = [
        (
            one.path.name,
            format_number(one.step),
            format_number(one.epoch),
            format_size(one.size),
            _format_age(one.created),
            "complete",
            _format_labels(one),
            _format_metrics(one.metrics),
        )
        for one in complete
    ]
    rows += [(name, "", "", "", "", "damaged", "", problem) for name, problem in damage.items()]
    return format_table(headers, rows, limit=_MAX_ROWS)


def format_contents(path: Path, contents: CheckpointContents) -> str:
    """Return what a checkpoint contains: fields, files, sections of the state, weights."""
    manifest, info = contents.manifest, contents.manifest["info"]
    sizes = {name: file["size"] for name, file in manifest["files"].items()}
    fields = {
        "checkpoint": str(path),
        "run": info.get("run_id"),
        "step": info.get("step"),
        "epoch": info.get("epoch"),
        "metrics": _format_metrics(decode_metrics(info)),
        "emergency": "saved after a crash" if info.get("emergency") else None,
        "weights only": "no run resumes from it" if info.get("weights_only") else None,
        "created": f"{format_time(manifest['created'])} UTC",
        "number": manifest.get("number"),
        "size": format_size(sum(sizes.values())),
        "parameters": f"{contents.parameters:,}",
    }
    shown = [(name, str(value)) for name, value in fields.items() if value not in (None, "")]
    files = [
        (name, format_size(size), manifest["files"][name]["xxh3_64"])
        for name, size in sizes.items()
    ]
    weights = [
        (
            *(one.name, one.dtype, str(tuple(one.shape))),
            f"tied to {printable(one.tied_to)}" if one.tied_to else format_size(one.size),
        )
        for one in contents.weights
    ]
    tables: dict[tuple[str, ...], Sequence[Sequence[str]]] = {
        ("file", "size", "xxh3_64"): files,
        ("state", "contents"): list(contents.state.items()),
        ("weights", "dtype", "shape", "size"): weights,
    }
    blocks = [format_table(shown[0], shown[1:])]
    blocks += [format_table(*table, limit=_MAX_ROWS) for table in tables.items() if table[1]]
    return "\n\n".join(blocks)


def format_size(size: int) -> str:
    """Return a number of bytes with its unit: `1.5 GB`."""
    from rich.filesize import decimal

    return decimal(size)


def _format_age(created: str) -> str:
    try:
        age = datetime.now(UTC) - datetime.fromisoformat(created)
    except (ValueError, TypeError):
        return "?"
    return format_duration(max(0.0, age.total_seconds()))


def _format_labels(one: SavedCheckpoint) -> str:
    labels = {"last": one.is_last, "best": one.is_best, "emergency": one.is_emergency}
    labels["weights-only"] = one.is_weights_only
    return " ".join(label for label, applies in labels.items() if applies)


def _format_metrics(metrics: Mapping[str, Any]) -> str:
    return join_some(f"{name} {format_number(value)}" for name, value in metrics.items())
