"""What a plan for some tensors promises: every byte in its place, few requests, the same file every time."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds41ctl.adapters import profiles
from ds41ctl.adapters.safetensors import WORD, parse_header
from ds41ctl.core import subset
from ds41ctl.core.errors import IntegrityError
from ds41ctl.core.pins import Subset, SubsetFile, united
from ds41ctl.core.subset import Plan, plan
from ds41ctl.core.tensors import ROUTED, TABLE
from tests.fakes.missions import OFFICIAL, small
from tests.fakes.packs import shard_bytes
from tests.fakes.v41 import REAL, Stored, official_layout

TB = 10**12


def planned(data: bytes, *leave_out: str) -> Plan:
    length = int.from_bytes(data[:WORD], "little")
    tensors, metadata = parse_header(data[WORD : WORD + length], len(data), "shard")
    return plan(tensors, metadata, leave_out)


def built(data: bytes, made: Plan, begin: int = 0, end: int = TB) -> bytes:
    """Bytes [begin, end) of the new file, from what the requests bring."""
    out = made.head[begin:end]
    for first, last, pieces in made.requests(begin, min(end, made.size)):
        assert 0 <= first < last <= len(data)
        out += b"".join(data[piece.source : piece.source + piece.length] for piece in pieces)
    return out


def shard(sizes: list[int]) -> bytes:
    return shard_bytes({f"t{i}": ("U8", [n], bytes([i % 251]) * n) for i, n in enumerate(sizes)})


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    dropped=st.sets(st.integers(0, 11)),
    gap=st.integers(0, 60),
    cut=st.integers(0, 600),
)
def test_every_wanted_byte_comes_once_wherever_the_file_is_cut(
    sizes: list[int], dropped: set[int], gap: int, cut: int
) -> None:
    data = shard(sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subset, "GAP", gap)
        made = planned(data, *(f"t{number}" for number in dropped))
        whole = built(data, made)
        assert len(whole) == made.size and whole == built(data, made, 0, cut) + built(data, made, cut)
        length = int.from_bytes(whole[:WORD], "little")
        tensors, _ = parse_header(whole[WORD : WORD + length], len(whole), "new")
        assert list(tensors) == [f"t{i}" for i in range(len(sizes)) if i not in dropped]
        for name, tensor in tensors.items():
            assert whole[tensor.begin : tensor.end] == bytes([int(name[1:]) % 251]) * sizes[int(name[1:])]
        ranges = [(first, last) for first, last, _ in made.requests(0, made.size)]
        assert all(second - last > gap for (_, last), (second, _) in itertools.pairwise(ranges))


def test_the_new_header_keeps_metadata_and_order_and_ends_at_a_multiple_of_eight() -> None:
    tree = {
        "b": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [2, 5]},
    }
    raw = json.dumps(tree).encode()
    made = planned(len(raw).to_bytes(WORD, "little") + raw + b"bbaaa", "x.*")
    assert len(made.head) % 8 == 0 and made.kept == made.tensors == 2
    new = json.loads(made.head[WORD:])
    assert list(new) == ["__metadata__", "b", "a"] and new["__metadata__"] == {"format": "pt"}
    assert planned(len(raw).to_bytes(WORD, "little") + raw + b"bbaaa", "x.*") == made


def test_of_the_official_checkpoint_18_8_gb_are_no_routed_experts_and_221_5_gb_are_taken_with_the_tables() -> None:
    """The drafter's experts (mtp.*) are among the 18.8 GB: the hybrid's 188,241 tensors count them."""
    source = next(s for s in small("cmp170hx-tp4").model.hub_sources if s.repo == OFFICIAL)
    total, tables, drafter = 0, 0, 0
    for specs in official_layout(REAL).values():
        at, header = 0, {}
        for name, spec in specs.items():
            size = _size(spec.dtypes[0], spec.shape)
            header[name] = {"dtype": spec.dtypes[0], "shape": list(spec.shape), "data_offsets": [at, at + size]}
            at += size
        raw = json.dumps(header).encode()
        tensors, _ = parse_header(raw, WORD + len(raw) + at, "shard")
        made = plan(tensors, {}, source.leave_out)
        kept = json.loads(made.head[WORD:])
        assert not any(ROUTED.fullmatch(name) for name in kept)
        assert {name for name in header if not ROUTED.fullmatch(name)} == set(kept)
        for name, entry in kept.items():
            begin, end = entry["data_offsets"]
            total += end - begin
            tables += end - begin if TABLE.fullmatch(name) else 0
            drafter += end - begin if name.startswith("mtp.") and ".ffn.experts." in name else 0
    assert (tables, total - tables, drafter) == (202_758_032_400, 18_750_334_792, 7_219_445_760)
    assert abs(total - source.size_bytes) < 0.001 * total


def _size(dtype: str, shape: tuple[int, ...]) -> int:
    import math

    from ds41ctl.core.tensors import DTYPE_BITS

    return math.prod(shape) * DTYPE_BITS[dtype] // 8


@pytest.mark.parametrize(
    ("name", "seed", "tolerance"), [("cmp170hx-tp4", 428 * 2**30, 0.05), ("v100-pp2tp4", 421_600_000_000, 0)]
)
def test_the_sizes_in_a_mission_profile_are_the_seeds(name: str, seed: int, tolerance: float) -> None:
    total = profiles.read(profiles.find(name)).model.size_bytes
    assert total is not None and abs(total - seed) <= tolerance * seed


# ---- two locks that know of the same subset

ENTRY = SubsetFile(path="a.safetensors", head_sha256="0" * 64, tensors=2, kept=1, size=9, plan="1" * 64)


def of(*files: SubsetFile) -> Subset:
    return Subset(repo="o/r", revision="2" * 40, leave_out=("x",), files=files)


def test_a_digest_that_one_lock_knows_counts_and_two_that_differ_are_refused() -> None:
    known = ENTRY.model_copy(update={"sha256": "3" * 64})
    assert united(of(ENTRY), of(known)) == united(of(known), of(ENTRY)) == of(known)
    for other in (
        of(known.model_copy(update={"sha256": "4" * 64})),
        of(ENTRY.model_copy(update={"plan": "5" * 64})),
        of(),
        of(ENTRY, ENTRY.model_copy(update={"path": "b.safetensors"})),
    ):
        with pytest.raises(IntegrityError, match="two lock files"):
            united(of(known), other)


def test_a_sources_tensors_are_ordinary_stored_tensors() -> None:
    tensors: Stored = {"w": ("F32", [2, 2], bytes(16)), "n": ("BF16", [3], bytes(6))}
    assert built(shard_bytes(tensors), planned(shard_bytes(tensors), "n"))[-16:] == bytes(16)
