"""The paged row cache without vLLM around it: any split into chunks gives the same bits, and the packed form agrees."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from ds41_engine.backbone import ROW_TILE, Backbone, EngramTable
from ds41_engine.engram_hash import DEAD, EngramHash
from ds41_engine.packed import PackedBatch
from ds41_engine.paged import PagedBatch, RequestRows, row_width
from ds41_engine.shape import IMAGE_TOKEN_ID, BackboneShape
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoint import random_backbone, text_config
from torch import Tensor

LENGTHS = (150, 83)
BLOCK = 16
IMAGES = {0: range(20, 31), 1: range(60, 63)}
Step = Sequence[tuple[int, int]]
"""(sequence, rows) of one forward pass"""


class Case:
    """A random backbone, two sequences with image tokens, and their ids and embeddings."""

    def __init__(self) -> None:
        self.shape = BackboneShape.from_config(text_config())
        torch.set_num_threads(1)
        self.backbone: Backbone = random_backbone(self.shape, 256, 6)
        torch.manual_seed(3)
        with torch.no_grad():
            for block in self.backbone.layers:
                block.ffn.gate.bias_vl.normal_()
        for layer, rows in zip(self.shape.engram_layer_ids, self.shape.engram_num_embeddings, strict=True):
            self.backbone.layers[layer].engram.lookup = EngramTable(torch.randn(rows, self.shape.engram_head_dim))
        self.hash = EngramHash.build(self.shape, 7)
        self.ids = [torch.randint(0, 900, (length,)) for length in LENGTHS]
        for sequence, span in IMAGES.items():
            self.ids[sequence][list(span)] = IMAGE_TOKEN_ID
        self.x = [torch.randn(length, self.shape.hidden_size) for length in LENGTHS]

    def rows(self, ids: Tensor, positions: Tensor) -> Tensor:
        compressed = torch.where(ids == IMAGE_TOKEN_ID, DEAD, ids)
        return torch.from_numpy(self.hash.row_ids(compressed.numpy(), positions.numpy()))

    def packed(self) -> Tensor:
        batch = PackedBatch(self.shape, LENGTHS, self.backbone.rope)
        ids = torch.cat(self.ids)
        image = ids == IMAGE_TOKEN_ID
        with torch.no_grad():
            return self.backbone(
                torch.cat(self.x), batch.positions, batch, self.rows(ids, batch.positions), ~image, image
            )

    def paged(self, steps: Sequence[Step], seed: int = 0) -> Tensor:
        """Run both sequences through a fresh cache in the given steps, blocks scattered by ``seed``."""
        blocks = -(-max(LENGTHS) // BLOCK)
        order = torch.from_numpy(np.random.default_rng(seed).permutation(2 * blocks)).view(2, blocks)
        slots = (order[:, :, None] * BLOCK + torch.arange(BLOCK)).view(2, -1)
        # rows that nobody wrote must never be read
        layers = range(self.shape.num_hidden_layers)
        caches = [torch.full((2 * blocks * BLOCK, row_width(self.shape)), torch.nan) for _ in layers]
        done, out = [0, 0], [[], []]
        for step in steps:
            requests, ids, x, positions = [], [], [], []
            row = 0
            for sequence, count in step:
                part = slice(done[sequence], done[sequence] + count)
                requests.append(RequestRows(row, row + count, part.stop, slots[sequence, : part.stop]))
                ids.append(self.ids[sequence][part])
                x.append(self.x[sequence][part])
                positions.append(torch.arange(part.start, part.stop))
                row, done[sequence] = row + count, part.stop
            pad = -row % ROW_TILE
            all_ids = torch.nn.functional.pad(torch.cat(ids), (0, pad))
            all_x = torch.nn.functional.pad(torch.cat(x), (0, 0, 0, pad))
            all_positions = torch.nn.functional.pad(torch.cat(positions), (0, pad))
            with torch.no_grad():
                batch = PagedBatch(self.shape, self.backbone.rope, requests, caches, all_positions)
                extended, extended_positions, wanted = batch.lookback(all_ids, self.shape.engram_max_ngram_size - 1)
                rows = self.rows(extended, extended_positions)[wanted]
                rows = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, pad))
                image = all_ids == IMAGE_TOKEN_ID
                hidden = self.backbone(all_x, all_positions, batch, rows, ~image, image)
            for request, (sequence, _) in zip(requests, step, strict=True):
                out[sequence].append(hidden[request.begin : request.end])
        assert done == list(LENGTHS)
        return torch.cat([*out[0], *out[1]])


@pytest.fixture(scope="module")
def case() -> Case:
    return Case()


@pytest.fixture(scope="module")
def at_once(case: Case) -> Tensor:
    return case.paged([[(0, LENGTHS[0]), (1, LENGTHS[1])]])


def test_paged_agrees_with_packed(case: Case, at_once: Tensor) -> None:
    expected = case.packed()
    assert not at_once.isnan().any()
    # fp32 in another order of summation; the hidden state is normed to about 1
    assert torch.allclose(at_once, expected, atol=1e-3)


def test_token_by_token_is_identical(case: Case, at_once: Tensor) -> None:
    steps = [[(0, 1), (1, 1)]] * LENGTHS[1] + [[(0, 1)]] * (LENGTHS[0] - LENGTHS[1])
    assert torch.equal(case.paged(steps), at_once)


def schedule(seed: int) -> list[Step]:
    """Random steps of one or both sequences, in either order, 1 to 60 rows each."""
    draw = random.Random(seed)
    left = list(LENGTHS)
    steps: list[Step] = []
    while any(left):
        step = []
        for sequence in draw.choice(([0], [1], [0, 1], [1, 0])):
            count = min(left[sequence], draw.randint(1, 60))
            if count:
                left[sequence] -= count
                step.append((sequence, count))
        if step:
            steps.append(step)
    return steps


@given(st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_any_schedule_is_identical(case: Case, at_once: Tensor, seed: int) -> None:
    assert torch.equal(case.paged(schedule(seed), seed), at_once)


def test_images_steer_and_break_ngrams(case: Case, at_once: Tensor) -> None:
    """The same ids without image tokens give other states, though the embeddings are the same."""
    other = Case.__new__(Case)
    other.__dict__.update(case.__dict__)
    other.ids = [torch.where(ids == IMAGE_TOKEN_ID, 5, ids) for ids in case.ids]
    changed = other.paged([[(0, LENGTHS[0]), (1, LENGTHS[1])]])
    assert torch.equal(changed[:20], at_once[:20])
    assert not torch.allclose(changed[20], at_once[20], atol=1e-3)
