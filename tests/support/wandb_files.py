"""Reads the file that W&B writes offline: blocks of records, as W&B's protocol defines them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 32768
_HEADER = 7  # of the file, and of each record: checksum (4), length (2), kind (1)


def read_wandb_file(file: Path) -> Iterator[Any]:
    """Yield the records of a `.wandb` file."""
    from wandb.proto import wandb_internal_pb2

    data = file.read_bytes()
    position, parts = _HEADER, b""
    while position + _HEADER <= len(data):
        if _BLOCK - position % _BLOCK < _HEADER:
            position += _BLOCK - position % _BLOCK
            continue
        size = int.from_bytes(data[position + 4 : position + 6], "little")
        kind = data[position + 6]  # 1: complete, 2: first, 3: middle, 4: last
        if kind == 0:
            return
        parts += data[position + _HEADER : position + _HEADER + size]
        position += _HEADER + size
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def read_history(folder: Path) -> list[dict[str, Any]]:
    """Return the rows that W&B has of a run, in all of its files."""
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row}
        for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"))
        for record in read_wandb_file(file)
        if (row := record.history.item)
    ]
