"""Tensor-parallel ranks: each reads its own sub-tables, together they read what one rank reads."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from ds41_engine.engram_hash import EngramHash
from ds41_engine.engram_rows import EngramRows
from ds41_engine.shape import BackboneShape
from ds41_engine.store import EngramStore, StoreError
from tiny_checkpoint import write_store


@pytest.fixture(scope="module")
def hashing(checkpoint: Path) -> EngramHash:
    shape = BackboneShape.from_config(json.loads((checkpoint / "config.json").read_text())["text_config"])
    return EngramHash.build(shape, 7)


def opened(store: Path, hashing: EngramHash) -> EngramStore:
    rows = dict(zip(hashing.layer_ids, hashing.primes.reshape(2, -1).sum(1).tolist(), strict=True))
    return EngramStore.open(store, rows)


def reader(store: Path, hashing: EngramHash, rank: int, ranks: int, fast: bool, all_gather: object) -> EngramRows:
    found = opened(store, hashing)
    made = EngramRows(found, hashing, rank, ranks, all_gather)  # type: ignore[arg-type]
    if fast:
        found.use_kernels(2, worker=rank)
    return made


def token_rows(hashing: EngramHash, tokens: int) -> np.ndarray:
    draw = np.random.default_rng(tokens)
    return hashing.row_ids(draw.integers(0, 200, tokens), np.arange(tokens))


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("tokens", [1, 400])
def test_all_ranks_together_read_what_one_rank_reads(
    store: Path, checkpoint: Path, hashing: EngramHash, ranks: int, tokens: int, fast: bool
) -> None:
    meeting = threading.Barrier(ranks)
    shared: list[torch.Tensor | None] = [None] * ranks
    decoded: list[torch.Tensor | None] = [None] * ranks

    def rank_main(rank: int) -> None:
        def all_gather(mine: torch.Tensor) -> torch.Tensor:
            shared[rank] = mine
            meeting.wait()
            everything = torch.cat([piece for piece in shared if piece is not None], 1)
            meeting.wait()
            return everything

        rows = reader(store, hashing, rank, ranks, fast, all_gather)
        assert rows.prove(4, checkpoint) == 2 * (rows.end - rows.first)
        ids = token_rows(hashing, tokens)
        rows.start(ids, hashing.layer_ids)
        decoded[rank] = rows.lookup(4)(torch.from_numpy(ids[:, 1].copy()))

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = reader(store, hashing, 0, 1, False, None)
    expected = alone.lookup(4)(torch.from_numpy(token_rows(hashing, tokens)[:, 1].copy()))
    for found in decoded:
        assert found is not None and torch.equal(found, expected)


@pytest.mark.parametrize("fast", [True, False])
def test_another_ranks_row_is_an_error_not_a_wrong_row(store: Path, hashing: EngramHash, fast: bool) -> None:
    """The rank-offset fault: rank 1 asking for the rows that rank 0 asks for."""
    rows = reader(store, hashing, 1, 2, fast, None)
    first, end = rows.span(1)
    assert first > 0
    for bad in (0, first - 1, end):
        with pytest.raises(IndexError):
            rows.store.gather(1, np.array([[first, bad]]))


def test_a_store_whose_second_half_repeats_the_first_is_not_proven(
    tmp_path: Path, checkpoint: Path, hashing: EngramHash
) -> None:
    write_store(tmp_path, checkpoint)
    path = tmp_path / "layer-4-node0.rows"
    data = path.read_bytes()
    half = len(data) // 528 * 264
    path.write_bytes(data[:half] + data[: len(data) - half])
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    for entry in manifest["layers"]:  # canaries that somebody recomputed over the wrong rows
        entry["canaries"] = entry["canaries"][:1]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(StoreError, match="rank 1 of 2 read other bytes for row"):
        reader(tmp_path, hashing, 1, 2, True, None).prove(4, checkpoint)


def test_more_ranks_than_columns_are_refused(store: Path, hashing: EngramHash) -> None:
    with pytest.raises(StoreError, match="expected at most 6"):
        reader(store, hashing, 0, 7, False, None)


@pytest.mark.parametrize("memory_backed", [True, False])
@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_stores_in_parts_and_on_disk_give_the_same_rows(
    tmp_path: Path, checkpoint: Path, store: Path, hashing: EngramHash, nodes: int, memory_backed: bool
) -> None:
    write_store(tmp_path, checkpoint, memory_backed=memory_backed, nodes=nodes)
    ids = token_rows(hashing, 300)[:, 0]
    plain = reader(store, hashing, 0, 1, False, None).store.gather(1, ids)
    found = reader(tmp_path, hashing, 0, 1, True, None).store
    assert np.array_equal(found.gather(1, ids), plain)
    assert found.how.startswith("ds41_kernels (") and found.counters()["rows"] == ids.size
    assert reader(tmp_path, hashing, 0, 1, False, None).store.counters() == {}
