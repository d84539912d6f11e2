"""Canaries: loading what a pack ships, and generating fresh ones."""

from __future__ import annotations

import json
import random
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds41ctl.core.errors import ConfigError
from smoke.canaries import generate, load, random_identifier
from smoke.judge import Copy, judge_copy
from smoke.png import digit_square, write_png

MINIMAL: dict[str, Any] = {"hello": {"prompt": "Say hello."}}


def folder(tmp_path: Path, tree: object, **files: bytes) -> Path:
    (tmp_path / "canaries.json").write_text(json.dumps(tree))
    for name, content in files.items():
        (tmp_path / name.replace("__", ".")).write_bytes(content)
    return tmp_path


def test_a_pack_is_read_with_its_files_and_unknown_keys(tmp_path: Path) -> None:
    tree = {
        **MINIMAL,
        "future": 1,
        "arithmetic": {"prompt": "p", "answer": 391, "thinking": True, "note": "x"},
        "copy": {"template": "Copy exactly: {identifier}", "identifiers": ["a_b"]},
        "images": [{"file": "x.png", "question": "q", "answer": "red"}],
        "needle": [{"document": "d.txt", "question": "q", "answer": "a"}, {"prompt": "whole", "answer": "b"}],
    }
    canaries = load(folder(tmp_path, tree, x__png=digit_square((9, 9, 9), 1, size=32), d__txt=b"long text"))
    assert canaries.images[0].png.startswith(b"\x89PNG")
    assert canaries.needle[0].message == "long text\n\nq"
    assert canaries.needle[1].message == "whole"
    assert canaries.copies is not None
    assert canaries.copies.prompt("a{identifier}") == "Copy exactly: a{identifier}"
    assert canaries.tool is None


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ([], "expected an object"),
        ({}, "hello"),
        ({**MINIMAL, "copy": {"template": "no field", "identifiers": ["a"]}}, "copy.template"),
        ({**MINIMAL, "copy": {"template": "{identifier}", "identifiers": []}}, "copy.identifiers"),
        ({**MINIMAL, "arithmetic": {"prompt": "p", "answer": "many"}}, "arithmetic.answer"),
        ({**MINIMAL, "images": [{"file": "../x.png", "question": "q", "answer": "a"}]}, "inside the pack"),
        ({**MINIMAL, "images": [{"file": "gone.png", "question": "q", "answer": "a"}]}, "gone.png"),
        ({**MINIMAL, "images": [{"file": "bad.png", "question": "q", "answer": "a"}]}, "not a PNG"),
    ],
)
def test_bad_canaries_are_one_clear_error(tmp_path: Path, tree: object, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(folder(tmp_path, tree, bad__png=b"GIF89a"))
    assert text in caught.value.message and "\n" not in caught.value.message


def test_missing_or_broken_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"canaries\.json"):
        load(tmp_path)
    (tmp_path / "canaries.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        load(tmp_path)


@given(st.integers(0, 2**32))
def test_random_identifiers_have_what_the_copy_test_needs(seed: int) -> None:
    name = random_identifier(random.Random(seed))
    assert name.count("_") >= 2 and any(c.isdigit() for c in name) and name != name.lower() and name.isascii()
    assert judge_copy(name, name.replace("_", "")) is Copy.UNDERSCORES


def test_generated_canaries_are_fresh_by_seed_and_the_same_for_one() -> None:
    first, again, other = generate(1), generate(1), generate(2)
    assert first == again
    assert first.copies is not None and other.copies is not None
    assert len(set(first.copies.identifiers)) == 20
    assert not set(first.copies.identifiers) & set(other.copies.identifiers)
    assert first.images[0].png != first.images[1].png
    assert not set(first.images[0].answer.split()) & set(first.images[1].answer.split())
    assert all(len(n.message) >= 1300 * 5 and n.answer in n.document for n in first.needle)
    assert generate(1, needle_tokens=0).needle == ()


def pixels(png: bytes) -> list[list[tuple[int, ...]]]:
    """An independent reading of the PNG subset the writer uses; checks every CRC."""
    at, data, width, height = 8, b"", 0, 0
    while at < len(png):
        (size,) = struct.unpack(">I", png[at : at + 4])
        kind, content = png[at + 4 : at + 8], png[at + 8 : at + 8 + size]
        assert struct.unpack(">I", png[at + 8 + size : at + 12 + size]) == (zlib.crc32(kind + content),)
        if kind == b"IHDR":
            width, height, *rest = struct.unpack(">IIBBBBB", content)
            assert rest == [8, 2, 0, 0, 0]
        data += content if kind == b"IDAT" else b""
        at += 12 + size
    raw, stride = zlib.decompress(data), 1 + 3 * width
    assert len(raw) == height * stride and not any(raw[::stride])
    return [[tuple(raw[y * stride + 1 + 3 * x :][:3]) for x in range(width)] for y in range(height)]


def test_the_png_writer_writes_the_pixels() -> None:
    rows = [[(1, 2, 3), (4, 5, 6)], [(7, 8, 9), (0, 0, 255)]]
    assert pixels(write_png(rows)) == rows


def test_a_digit_square_shows_its_colour_and_differs_by_digit() -> None:
    shown = pixels(digit_square((210, 30, 30), 7, size=48))
    assert shown[0][0] == (255, 255, 255) and shown[8][8] == (210, 30, 30)
    assert len({digit_square((0, 0, 0), digit, size=48) for digit in range(10)}) == 10


@pytest.mark.parametrize("rows", [[], [[]], [[(0, 0, 0)], []]])
def test_ragged_rows_are_refused(rows: list[list[tuple[int, int, int]]]) -> None:
    with pytest.raises(ValueError, match="one width"):
        write_png(rows)
