"""Hashing ahead: the same row ids as hashing at once, whatever was guessed, and right guesses are used."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from ds41_engine.engram_hash import EngramHash
from ds41_engine.hash_ahead import HashAhead
from ds41_engine.shape import BackboneShape

DEPTH = 3


@pytest.fixture(scope="module")
def hashing(checkpoint: Path) -> EngramHash:
    shape = BackboneShape.from_config(json.loads((checkpoint / "config.json").read_text())["text_config"])
    return EngramHash.build(shape, 7)


class Chunks:
    """Prompts cut into batches as the scheduler would: (prompt, first position, end) of each piece."""

    def __init__(self, *lengths: int) -> None:
        draw = np.random.default_rng(5)
        self.prompts = [draw.integers(0, 200, length) for length in lengths]

    def piece(self, number: int, first: int, end: int) -> tuple[int, np.ndarray]:
        start = max(0, first - DEPTH)
        return start, self.prompts[number][start:end]

    def ask(self, ahead: HashAhead, pieces: list[tuple[int, int, int]]) -> np.ndarray:
        """Rows of the pieces without their predecessors."""
        parts = [self.piece(*piece) for piece in pieces]
        rows = ahead.rows(
            np.concatenate([ids for _, ids in parts]),
            np.concatenate([np.arange(start, start + ids.size) for start, ids in parts]),
            [ids.size for _, ids in parts],
        )
        ends = np.cumsum([ids.size for _, ids in parts])
        return np.concatenate(
            [rows[end - (last - first) : end] for end, (_, first, last) in zip(ends, pieces, strict=True)]
        )

    def expected(self, hashing: EngramHash, pieces: list[tuple[int, int, int]]) -> np.ndarray:
        whole = [hashing.row_ids(prompt, np.arange(prompt.size)) for prompt in self.prompts]
        return np.concatenate([whole[number][first:end] for number, first, end in pieces])


@pytest.mark.parametrize(
    ("guessed", "asked", "hits"),
    [
        ([], [(0, 0, 40), (1, 0, 9)], 0),
        ([(0, 40, 80)], [(0, 40, 80)], 43),
        ([(0, 40, 80)], [(0, 40, 61)], 24),  # a shorter chunk than expected
        ([(0, 40, 80)], [(0, 40, 81)], 0),  # a longer one is hashed at once
        ([(0, 40, 80)], [(1, 30, 31), (0, 40, 80), (1, 50, 60)], 43),
        ([(0, 40, 80), (1, 30, 60)], [(1, 30, 60), (0, 40, 80)], 76),
        ([(0, 40, 80)], [(1, 40, 80)], 0),  # same positions, other tokens
        ([(0, 41, 80)], [(0, 40, 80)], 0),
    ],
)
def test_rows_do_not_depend_on_what_was_guessed(
    hashing: EngramHash,
    guessed: list[tuple[int, int, int]],
    asked: list[tuple[int, int, int]],
    hits: int,
) -> None:
    chunks, ahead = Chunks(200, 100), HashAhead(hashing.row_ids)
    ahead.expect(chunks.piece(*piece) for piece in guessed)
    assert np.array_equal(chunks.ask(ahead, asked), chunks.expected(hashing, asked))
    assert ahead.hits == hits


def test_a_guess_is_forgotten_when_the_next_ones_come(hashing: EngramHash) -> None:
    chunks, ahead = Chunks(200), HashAhead(hashing.row_ids)
    ahead.expect([chunks.piece(0, 40, 80)])
    ahead.expect([])
    chunks.ask(ahead, [(0, 40, 80)])
    assert (ahead.hits, ahead.tokens) == (0, 43)


def test_what_a_wrong_guess_cannot_hash_harms_nobody(hashing: EngramHash) -> None:
    def hash_rows(ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
        if (ids > 1000).any():
            raise IndexError("no such token")
        return hashing.row_ids(ids, positions)

    chunks, ahead = Chunks(200), HashAhead(hash_rows)
    ahead.expect([(37, np.full(40, 5000)), chunks.piece(0, 40, 80)])
    assert np.array_equal(chunks.ask(ahead, [(0, 40, 80)]), chunks.expected(hashing, [(0, 40, 80)]))
    assert ahead.hits == 43
