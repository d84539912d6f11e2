"""Test pictures: a coloured square with one seven-segment digit, as PNG and as raw pixels (standard library only)."""

from __future__ import annotations

import struct
import zlib

SIDE = 168  # 12 patches of 14 pixels: 4 x 4 image tokens, above min_pixels, so the processor never rescales it
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 30, 30),
    "green": (20, 160, 60),
    "blue": (40, 70, 220),
    "yellow": (235, 205, 30),
}
# Segments: a top, b upper right, c lower right, d bottom, e lower left, f upper left, g middle.
_SEGMENTS = ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcfgd")
_BOXES = {  # x0, y0, x1, y1 in pixels
    "a": (62, 44, 106, 54),
    "g": (62, 79, 106, 89),
    "d": (62, 114, 106, 124),
    "f": (58, 48, 68, 86),
    "b": (100, 48, 110, 86),
    "e": (58, 82, 68, 120),
    "c": (100, 82, 110, 120),
}


def pixels(colour: str, digit: int) -> bytes:
    """RGB bytes, [SIDE, SIDE, 3] row-major: white border, coloured square, black digit."""
    fill = bytes(COLOURS[colour])
    rows = [bytearray(b"\xff" * (3 * SIDE)) for _ in range(SIDE)]
    for y in range(21, SIDE - 21):
        rows[y][3 * 21 : 3 * (SIDE - 21)] = fill * (SIDE - 42)
    for segment in _SEGMENTS[digit]:
        x0, y0, x1, y1 = _BOXES[segment]
        for y in range(y0, y1):
            rows[y][3 * x0 : 3 * x1] = bytes(3 * (x1 - x0))
    return b"".join(bytes(row) for row in rows)


def png(colour: str, digit: int) -> bytes:
    """The same picture as a PNG file's bytes."""
    raw = pixels(colour, digit)
    lines = b"".join(b"\0" + raw[i * 3 * SIDE : (i + 1) * 3 * SIDE] for i in range(SIDE))

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines, 9)) + chunk(b"IEND", b"")
