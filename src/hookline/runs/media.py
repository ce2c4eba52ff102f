"""Histograms and images: counts and edges, PNG files."""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from hookline.files import FileRefusedError, is_plain_name, open_handle
from hookline.runs.jsonable import to_jsonable
from hookline.runs.location import find_refused_folder

_BINS = 64
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_COLOR_TYPES = {1: 0, 3: 2, 4: 6}  # PNG's color type by number of channels


def make_histogram(value: Any) -> dict[str, Any]:
    """Return the counts and edges of a histogram.

    The value is counts and edges (a mapping with these keys, or a pair), with one more edge than
    counts; or a tensor or an array of values, which are counted in 64 bins. Values that are not
    finite are counted separately, as `nonfinite`.
    """
    if isinstance(value, Mapping):
        value = (value["counts"], value["edges"])
    if isinstance(value, tuple | list) and len(cast("list[Any]", value)) == 2:
        lists = [one.tolist() if hasattr(one, "tolist") else one for one in value]
        counts, edges = to_jsonable(lists)
        if len(edges) != len(counts) + 1:
            raise ValueError("a histogram has one more edge than counts")
        return {"counts": counts, "edges": edges}
    values = torch.as_tensor(value).detach().reshape(-1).double()
    finite = values[values.isfinite()].cpu()
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    if low == high:
        low, high = low - 0.5, high + 0.5
    counts = torch.histc(finite, _BINS, low, high).long().tolist()
    edges = torch.linspace(low, high, _BINS + 1, dtype=torch.float64).tolist()
    return {"counts": counts, "edges": edges, "nonfinite": len(values) - len(finite)}


def save_image(value: Any, folder: Path, step: Any, name: str) -> dict[str, Any]:
    """Write an image as a new PNG file, and return its path in the run, its width and height.

    The value is a tensor or array, height × width, or with 1, 3 or 4 channels first or last, of
    integers from 0 to 255 or floats from 0 to 1; or the bytes of a PNG file.
    """
    data = value if isinstance(value, bytes) else _encode_png(_to_pixels(value))
    if data[:8] != _PNG_SIGNATURE:
        raise ValueError("the bytes are not a PNG file")
    width, height = struct.unpack(">II", data[16:24])
    refused = find_refused_folder(folder)
    if refused is not None:
        raise FileRefusedError(refused)
    folder.mkdir(exist_ok=True)
    stem = f"{_make_plain(name)[:80]}-{_make_plain(str(step))[:80]}"
    stem = stem if is_plain_name(stem) else f"_{stem}"
    file = _write_new_file(folder, stem, data)
    return {"path": f"{folder.name}/{file}", "width": width, "height": height}


def _make_plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)


def _write_new_file(folder: Path, stem: str, data: bytes) -> str:
    """Write a file that does not exist yet, and return its name."""
    for number in count(1):
        name = f"{stem}.png" if number == 1 else f"{stem}-{number}.png"
        try:
            handle = open_handle(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            continue
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        return name
    raise AssertionError


def _to_pixels(value: Any) -> Tensor:
    """Return pixels as bytes, height × width × channels."""
    pixels = torch.as_tensor(value).detach().cpu()
    if pixels.is_floating_point():
        pixels = (pixels.nan_to_num().clamp(0, 1) * 255).round()
    pixels = pixels.to(torch.uint8)
    if pixels.dim() == 2:
        pixels = pixels[..., None]
    first = isinstance(value, Tensor) or pixels.shape[-1] not in _COLOR_TYPES
    if first and pixels.dim() == 3 and pixels.shape[0] in _COLOR_TYPES and value.ndim == 3:
        pixels = pixels.permute(1, 2, 0)
    if pixels.dim() != 3 or pixels.shape[-1] not in _COLOR_TYPES or not pixels.numel():
        raise ValueError(f"{tuple(pixels.shape)} is not the shape of an image")
    return pixels.contiguous()


def _encode_png(pixels: Tensor) -> bytes:
    height, width, channels = pixels.shape
    rows = torch.nn.functional.pad(pixels.reshape(height, -1), (1, 0))  # filter 0 before each row
    raw = bytes(rows.reshape(-1).tolist())
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOR_TYPES[channels], 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(raw)), (b"IEND", b""))
    return _PNG_SIGNATURE + b"".join(
        struct.pack(">I", len(body)) + tag + body + struct.pack(">I", zlib.crc32(tag + body))
        for tag, body in chunks
    )
