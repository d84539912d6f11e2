"""A PNG writer for the image test: a coloured square with a digit, from the standard library. Pure."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

Colour = tuple[int, int, int]

# 5 x 7 dots a digit, one row a string
_GLYPHS = (
    ("01110", "10001", "10011", "10101", "11001", "10001", "01110"),
    ("00100", "01100", "00100", "00100", "00100", "00100", "01110"),
    ("01110", "10001", "00001", "00110", "01000", "10000", "11111"),
    ("11110", "00001", "00001", "01110", "00001", "00001", "11110"),
    ("00010", "00110", "01010", "10010", "11111", "00010", "00010"),
    ("11111", "10000", "11110", "00001", "00001", "10001", "01110"),
    ("00110", "01000", "10000", "11110", "10001", "10001", "01110"),
    ("11111", "00001", "00010", "00100", "01000", "01000", "01000"),
    ("01110", "10001", "10001", "01110", "10001", "10001", "01110"),
    ("01110", "10001", "10001", "01111", "00001", "00010", "01100"),
)
_WHITE: Colour = (255, 255, 255)


def write_png(rows: Sequence[Sequence[Colour]]) -> bytes:
    """PNG file (8-bit RGB) of `rows` of pixels, all of one width. Raises ValueError when they are not."""
    widths = {len(row) for row in rows}
    if len(widths) != 1 or 0 in widths:
        raise ValueError(f"rows of one width above 0 expected, found widths {sorted(widths)}")
    raw = b"".join(b"\0" + b"".join(bytes(pixel) for pixel in row) for row in rows)
    header = struct.pack(">IIBBBBB", widths.pop(), len(rows), 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(raw, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def digit_square(colour: Colour, digit: int, *, size: int = 224) -> bytes:
    """PNG of `size` x `size` pixels: a square of `colour` in a white margin, a white `digit` (0-9) on it."""
    glyph = _GLYPHS[digit]
    margin, dot = size // 8, size // 12
    left, top = (size - 5 * dot) // 2, (size - 7 * dot) // 2

    def pixel(x: int, y: int) -> Colour:
        if not (margin <= x < size - margin and margin <= y < size - margin):
            return _WHITE
        column, row = (x - left) // dot, (y - top) // dot
        inked = 0 <= column < 5 and 0 <= row < 7 and glyph[row][column] == "1"
        return _WHITE if inked else colour

    return write_png([[pixel(x, y) for x in range(size)] for y in range(size)])


def plain_square(colour: Colour, size: int) -> bytes:
    """PNG of `size` x `size` pixels of one colour, made at once however large it is."""
    row = b"\0" + bytes(colour) * size
    header = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(row * size, 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
