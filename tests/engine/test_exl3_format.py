"""The EXL3 format library against a second reading of the format: bit by bit, in plain Python integers."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from ds41_kernels import exl3
from ds41_kernels.exl3 import Codebook, Exl3Expert, Exl3Linear, FormatError, Rate

WHOLE = [Rate.of(bits) for bits in range(1, 9)]
HALF = [Rate.of(bits) for bits in (1.5, 2.5, 3.5)]


def half(value: float) -> float:
    """Round to half precision, to nearest even, by the interpreter's own conversion."""
    return float(struct.unpack("<e", struct.pack("<e", value))[0])


def half_bits(bits: int) -> float:
    return float(struct.unpack("<e", struct.pack("<H", bits))[0])


def plain_value(state: int, codebook: Codebook) -> float:
    if codebook is Codebook.MUL1:
        product = state * 0x83DCD12D % 2**32
        total = sum(product.to_bytes(4, "little"))
        return half(half_bits(0x6400 + total) * half_bits(0x1EEE) + half_bits(0xC931))
    product = (state * 0xCBAC1FED if codebook is Codebook.MCG else state * 89226354 + 64248484) % 2**32
    bits = (product & 0x8FFF8FFF) ^ 0x3B603B60
    return half(half_bits(bits & 0xFFFF) + half_bits(bits >> 16))


def plain_tile(words: list[int], rate: Rate, codebook: Codebook) -> list[list[float]]:
    """One tile, from the definition: a string of bits, a window that ends with the weight's own bits."""
    stream = "".join(f"{words[i + 1]:016b}{words[i]:016b}" for i in range(0, len(words), 2))
    out = [[math.nan] * 16 for _ in range(16)]
    end = 0
    for position in range(256):
        end += int(rate.bits) + (position % 2 if rate.bits % 1 else 0)
        state = int("".join(stream[(end - 16 + i) % len(stream)] for i in range(16)), 2)
        lane, item = divmod(position, 8)
        row = lane % 4 * 2 + item % 2 + (8 if item in (2, 3, 6, 7) else 0)
        out[row][lane // 4 + (8 if item >= 4 else 0)] = plain_value(state, codebook)
    assert end == len(stream)
    return out


@pytest.mark.parametrize("codebook", Codebook)
def test_all_states_decode_as_defined(codebook: Codebook) -> None:
    states = np.arange(65536, dtype=np.uint16)
    expected = np.array([plain_value(int(s), codebook) for s in states], np.float16)
    assert np.array_equal(exl3.decode(states, codebook).view(np.uint16), expected.view(np.uint16))


def test_the_codebooks_have_their_published_shape() -> None:
    values = {book: exl3.table(book).astype(np.float64) for book in Codebook}
    assert values[Codebook.THREE_INST].std() == pytest.approx(1.243711, abs=2e-6)
    assert values[Codebook.MCG].std() == pytest.approx(1.244112, abs=2e-6)
    assert values[Codebook.MUL1].std() == pytest.approx(1.00031, abs=1e-5)
    assert len(np.unique(values[Codebook.MUL1])) == 913


def test_mul1_is_one_half_fma_and_a_half_product_and_sum_are_another_codebook() -> None:
    states = np.arange(65536, dtype=np.uint16)
    sums = (1024 + exl3.mul1_sum(states)).astype(np.float16)
    slope, offset = (np.array([bits], np.uint16).view(np.float16)[0] for bits in (0x1EEE, 0xC931))
    twice_rounded = (sums * slope).astype(np.float16) + offset
    assert np.count_nonzero(twice_rounded != exl3.table(Codebook.MUL1)) == 60_326
    through_float = (sums.astype(np.float32) * np.float32(slope) + np.float32(offset)).astype(np.float16)
    assert np.array_equal(through_float, exl3.table(Codebook.MUL1))


@pytest.mark.parametrize("codebook", Codebook)
@pytest.mark.parametrize("rate", WHOLE, ids=str)
def test_tiles_decode_as_defined(rate: Rate, codebook: Codebook) -> None:
    tiles = exl3.random_tiles(np.random.default_rng(rate.halves), (3,), rate)
    found = exl3.decode_tiles(tiles, codebook)
    assert found.tolist() == [plain_tile(tile.tolist(), rate, codebook) for tile in tiles]


@pytest.mark.parametrize("rate", HALF, ids=str)
def test_half_rates_give_the_extra_bit_to_odd_positions(rate: Rate) -> None:
    tiles = exl3.random_tiles(np.random.default_rng(rate.halves), (3,), rate)
    assert tiles.shape[-1] == 16 * rate.bits
    found = exl3.decode_tiles(tiles, Codebook.MUL1)
    assert found.tolist() == [plain_tile(tile.tolist(), rate, Codebook.MUL1) for tile in tiles]


@pytest.mark.parametrize("rate", WHOLE + HALF, ids=str)
def test_packing_is_the_reverse_of_reading(rate: Rate) -> None:
    tiles = exl3.random_tiles(np.random.default_rng(7), (2, 3), rate)
    assert np.array_equal(exl3.pack_states(exl3.tile_states(tiles), rate), tiles)


def test_states_that_are_no_path_are_refused() -> None:
    states = exl3.tile_states(exl3.random_tiles(np.random.default_rng(0), (1,), Rate.of(3)))
    states[0, 40] ^= 1 << 9
    with pytest.raises(FormatError, match="tail-biting"):
        exl3.pack_states(states, Rate.of(3))


def test_every_state_is_reachable_and_positions_cover_the_tile() -> None:
    rows, columns = exl3.positions()
    assert sorted(zip(rows.tolist(), columns.tolist(), strict=True)) == [(r, c) for r in range(16) for c in range(16)]
    # 8 bits a weight: a state is two weights' own bits, so 65,536 tiles of a repeated pair reach every state
    pairs = np.arange(65536, dtype=np.uint16)
    assert np.array_equal(exl3.tile_states(np.repeat(pairs[:, None], 128, 1))[:, 1], pairs)


def test_the_hadamard_is_the_sylvester_matrix() -> None:
    matrix = np.array([[1.0]])
    while len(matrix) < 128:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    matrix /= np.sqrt(128)
    x = np.random.default_rng(3).standard_normal((5, 256))
    expected = np.concatenate((x[:, :128] @ matrix, x[:, 128:] @ matrix), 1)
    assert np.allclose(exl3.hadamard(x), expected, atol=1e-13)
    assert np.allclose(exl3.hadamard(exl3.hadamard(x.T, 0), 0), x.T, atol=1e-13)


@pytest.mark.parametrize("codebook", Codebook)
def test_a_product_is_the_product_with_the_reconstruction(codebook: Codebook) -> None:
    random = np.random.default_rng(11)
    layer = exl3.random_linear(random, 256, 384, Rate.of(3), codebook)
    x = random.standard_normal((4, 256))
    expected = x @ layer.reconstruct()
    assert np.allclose(layer.product(x), expected, atol=1e-12)
    assert 0.5 < expected.std() < 2
    # the rounding points of the kernels cost about half precision, and no more
    error = layer.kernel_product(x) - expected
    assert 1e-6 < np.sqrt((error**2).mean() / (expected**2).mean()) < 1e-3


def test_slices_of_an_expert_sum_to_the_expert_and_cut_blocks_are_refused() -> None:
    random = np.random.default_rng(12)
    expert = exl3.random_expert(random, 256, 384, (Rate.of(2), Rate.of(3), Rate.of(5)))
    x = random.standard_normal((3, 256))
    parts = sum(expert.slice(*span).forward(x, rounded=False) for span in ((0, 128), (128, 384)))
    assert np.allclose(parts, expert.forward(x, rounded=False), atol=1e-12)
    with pytest.raises(FormatError, match="multiples of 128"):
        expert.slice(0, 192)


def test_a_layer_adds_its_experts_and_skips_those_of_other_ranks() -> None:
    random = np.random.default_rng(13)
    experts: list[Exl3Expert | None] = [exl3.random_expert(random, 128, 128, (Rate.of(2),) * 3) for _ in range(3)]
    x, weights = random.standard_normal((2, 128)), random.uniform(0.2, 1, (2, 2))
    chosen = np.array([[0, 2], [2, 1]])
    every = exl3.layer_forward(experts, x, chosen, weights)
    first, second = experts[2], experts[1]
    assert first is not None and second is not None
    expected = weights[1, 0] * first.forward(x[1:]) + weights[1, 1] * second.forward(x[1:])
    assert np.allclose(every[1:], expected, atol=1e-12)
    experts[1] = None
    assert np.allclose(exl3.layer_forward(experts, x, chosen, weights)[1:], weights[1, 0] * first.forward(x[1:]))


def test_the_swiglu_clamps_the_gate_from_above_and_the_up_projection_on_both_sides() -> None:
    found = exl3.swiglu(np.array([20.0, -20.0, 1.0]), np.array([-30.0, 2.0, 30.0]), 10.0)
    silu = lambda v: v / (1 + math.exp(-v))  # noqa: E731
    assert found.tolist() == pytest.approx([silu(10) * -10, silu(-20) * 2, silu(1) * 10])


# ---- tensors


def layer_tensors(codebook: Codebook = Codebook.MUL1, bits: float = 3) -> dict[str, np.ndarray]:
    return exl3.random_linear(np.random.default_rng(5), 128, 256, Rate.of(bits), codebook).tensors("k")


@pytest.mark.parametrize("codebook", Codebook)
def test_the_marker_selects_the_codebook_and_its_value_is_not_read(codebook: Codebook) -> None:
    tensors = layer_tensors(codebook)
    if codebook.marker:
        assert int(tensors[f"k.{codebook.marker}"]) in (-2082680531, -877912083)
        tensors[f"k.{codebook.marker}"] = np.array(0, np.int32)
    layer = Exl3Linear.from_tensors("k", tensors)
    assert layer.codebook is codebook and layer.rate == Rate.of(3)
    assert (layer.in_features, layer.out_features) == (128, 256)


def test_old_files_hold_signs_as_bits() -> None:
    tensors = layer_tensors()
    signs = np.where(np.arange(128) % 3 == 0, -1, 1).astype(np.float16)
    bits = np.packbits(signs < 0, bitorder="little").view("<i2")
    tensors["k.suh"] = signs
    expected = Exl3Linear.from_tensors("k", tensors).reconstruct()
    del tensors["k.suh"]
    tensors["k.su"] = bits
    assert np.array_equal(Exl3Linear.from_tensors("k", tensors).reconstruct(), expected)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"k.trellis": None}, "k: expected a trellis"),
        ({"k.suh": None}, "k: expected suh"),
        ({"k.svh": np.ones(128, np.float16)}, r"k.svh: expected float16 \[256\]"),
        ({"k.svh": np.ones(256, np.float32)}, "k.svh: expected float16"),
        ({"k.suh": np.full(128, np.nan, np.float16)}, "k.suh: expected finite"),
        ({"k.mcg": np.array(0, np.int32)}, "found mcg and mul1"),
        ({"k.trellis": np.zeros((8, 16, 20), np.int16)}, "k.trellis: expected 16 words"),
        ({"k.trellis": np.zeros((8, 16, 72), np.int16)}, "k.trellis: bits a weight: expected 1 to 8"),
        ({"k.trellis": np.zeros((4, 16, 48), np.int16)}, "expected inputs in multiples of 128, found 64"),
        ({"k.trellis": np.zeros((8, 16, 48), np.int32)}, "k.trellis: expected int16"),
        ({"k.mul1": None, "k.trellis": np.zeros((8, 16, 40), np.int16)}, "2.5 bits a weight exist with the mul1"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_in_one_line(change: dict[str, np.ndarray | None], line: str) -> None:
    tensors = layer_tensors()
    for name, value in change.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    with pytest.raises(FormatError, match=line) as caught:
        Exl3Linear.from_tensors("k", tensors)
    assert "\n" not in str(caught.value)
