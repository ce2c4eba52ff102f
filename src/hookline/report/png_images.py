"""PNG files from elsewhere: checked, and reduced to what a browser needs to draw them."""

from __future__ import annotations

import struct
import zlib

__all__ = ["strip_png"]

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_KEPT = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")
_MAX_PIXELS = 4_000_000


def strip_png(data: bytes) -> bytes:
    """Return a PNG file with its header, palette and pixels only.

    Raises:
        ValueError: It is not a PNG file, it is damaged, or it has more than 4 million pixels.
    """
    if data[:8] != _SIGNATURE or data[12:16] != b"IHDR":
        raise ValueError("it is not a PNG file")
    width, height = struct.unpack(">II", data[16:24].ljust(8, b"\0"))
    if not 0 < width * height <= _MAX_PIXELS:
        raise ValueError(f"it has {width:,} × {height:,} pixels")
    kept, position, tag = [_SIGNATURE], 8, b""
    while tag != b"IEND":
        head = data[position : position + 8]
        size = int.from_bytes(head[:4], "big")
        tag, end = head[4:], position + size + 12
        chunk = data[position:end]
        if len(head) < 8 or len(chunk) < size + 12:
            raise ValueError("it is incomplete")
        if zlib.crc32(chunk[4:-4]) != int.from_bytes(chunk[-4:], "big"):
            raise ValueError("it is damaged")
        if tag in _KEPT:
            kept.append(chunk)
        position = end
    return b"".join(kept)
