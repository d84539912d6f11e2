"""The compiled EXL3 kernel and encoder: the same values as the reference, the same bits for every way to call them."""

from __future__ import annotations

import ctypes

import ds41_kernels as kernels
import numpy as np
import pytest
from ds41_kernels import exl3
from ds41_kernels.exl3 import Codebook, Exl3Expert, FormatError, Rate, cpu, encode

RATES = [Rate.of(bits) for bits in (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)]
LOOPS = ("portable", "avx2", "avx512")
HIDDEN, INNER, TOKENS = 512, 256, 40


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return kernels.load()


@pytest.fixture(params=LOOPS)
def loops(request: pytest.FixtureRequest, library: ctypes.CDLL) -> str:
    before = cpu.loops(library)
    try:
        cpu.loops(library, request.param)
    except FormatError as error:
        pytest.skip(str(error))
    request.addfinalizer(lambda: cpu.loops(library, before))
    return str(request.param)


@pytest.fixture(scope="module")
def experts() -> list[Exl3Expert | None]:
    """Mixed rates by expert and by projection, one of them missing."""
    random = np.random.default_rng(1)
    mixed = [(2, 2, 2), (3, 3, 3), (5, 5, 5), (3, 4, 5)]
    made = [exl3.random_expert(random, HIDDEN, INNER, tuple(map(Rate.of, bits))) for bits in mixed]
    return [*made, None, exl3.random_expert(random, HIDDEN, INNER, (Rate.of(2.5),) * 3)]


@pytest.fixture(scope="module")
def batch() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(2)
    chosen = np.stack([random.permutation(6)[:3] for _ in range(TOKENS)])
    x, weights = random.standard_normal((TOKENS, HIDDEN)), random.uniform(0, 1, (TOKENS, 3))
    return x.astype(np.float32), chosen, weights.astype(np.float32)


@pytest.mark.parametrize("codebook", Codebook)
def test_all_states_decode_to_the_bit(library: ctypes.CDLL, loops: str, codebook: Codebook) -> None:
    pairs = np.arange(65536, dtype=np.uint16)  # at 8 bits a weight a repeated pair is the state of every odd position
    found = cpu.decode_tiles(library, np.repeat(pairs[:, None], 128, 1), codebook)[:, 1]
    assert np.array_equal(found, exl3.table(codebook).astype(np.float32))


@pytest.mark.parametrize("codebook", Codebook)
@pytest.mark.parametrize("rate", RATES, ids=str)
def test_tiles_decode_to_the_bit(library: ctypes.CDLL, loops: str, rate: Rate, codebook: Codebook) -> None:
    rows, columns = exl3.positions()
    tiles = exl3.random_tiles(np.random.default_rng(rate.halves), (50,), rate)
    expected = exl3.decode_tiles(tiles, codebook)[:, rows, columns].astype(np.float32)
    assert np.array_equal(cpu.decode_tiles(library, tiles, codebook), expected)


def test_a_layer_is_the_reference_in_single_precision(
    library: ctypes.CDLL, loops: str, experts: list[Exl3Expert | None], batch: tuple[np.ndarray, ...]
) -> None:
    found = cpu.CpuExperts(library, experts)(*batch)
    exact = exl3.layer_forward(experts, *batch, rounded=False)
    assert np.sqrt(np.square(found - exact).mean() / np.square(exact).mean()) < 1e-6


def test_every_loop_gives_the_same_bits(
    library: ctypes.CDLL, experts: list[Exl3Expert | None], batch: tuple[np.ndarray, ...]
) -> None:
    before, found = cpu.loops(library), []
    for name in LOOPS:
        try:
            cpu.loops(library, name)
        except FormatError:
            continue
        found.append(cpu.CpuExperts(library, experts)(*batch))
    cpu.loops(library, before)
    assert all(np.array_equal(one, found[0]) for one in found)


def test_a_rows_bits_depend_on_the_row_alone(
    library: ctypes.CDLL, loops: str, experts: list[Exl3Expert | None], batch: tuple[np.ndarray, ...]
) -> None:
    layer = cpu.CpuExperts(library, experts)
    whole = layer(*batch)
    order = np.random.default_rng(4).permutation(TOKENS)
    assert np.array_equal(layer(*(part[order] for part in batch)), whole[order])
    for size in (1, 2, 3, 7, 16):
        parts = [layer(*(part[at : at + size] for part in batch)) for at in range(0, TOKENS, size)]
        assert np.array_equal(np.concatenate(parts), whole)
    for threads in (2, 3, 8):
        pool = kernels.Pool(library, [None] * threads)
        assert np.array_equal(cpu.CpuExperts(library, experts, pool=pool)(*batch), whole)
        pool.close()
    # more tokens than are computed at once
    many = layer(*(np.concatenate([part] * 8) for part in batch))
    assert np.array_equal(many, np.concatenate([whole] * 8))


def test_no_token_all_on_one_expert_and_a_missing_expert(
    library: ctypes.CDLL, experts: list[Exl3Expert | None], batch: tuple[np.ndarray, ...]
) -> None:
    layer = cpu.CpuExperts(library, experts)
    x, _, weights = batch
    assert layer(x[:0], np.zeros((0, 2), np.int64), weights[:0, :2]).shape == (0, HIDDEN)
    one = layer(x, np.full((TOKENS, 1), 2), weights[:, :1])
    exact = exl3.layer_forward(experts, x, np.full((TOKENS, 1), 2), weights[:, :1], rounded=False)
    assert np.allclose(one, exact, rtol=1e-4, atol=1e-5)
    assert not layer(x, np.full((TOKENS, 1), 4), weights[:, :1]).any()


def test_the_clamp_bounds_large_activations(library: ctypes.CDLL, experts: list[Exl3Expert | None]) -> None:
    x = np.full((1, HIDDEN), 3e3, np.float32)
    chosen, weights = np.array([[0]]), np.ones((1, 1), np.float32)
    for limit in (10.0, 0.0):
        found = cpu.CpuExperts(library, experts, limit)(x, chosen, weights)
        exact = exl3.layer_forward(experts, x, chosen, weights, limit or np.inf, rounded=False)
        assert np.abs(found - exact).max() < 5e-5 * np.abs(exact).max()
    assert np.abs(cpu.CpuExperts(library, experts)(x, chosen, weights)).max() < 100 * INNER


@pytest.mark.parametrize("compiled", [True, False])
def test_an_expert_number_out_of_range_is_an_error(
    library: ctypes.CDLL, experts: list[Exl3Expert | None], batch: tuple[np.ndarray, ...], compiled: bool
) -> None:
    layer = cpu.CpuExperts(library if compiled else None, experts)
    x, chosen, weights = batch
    for bad in (-1, 6):
        wrong = chosen.copy()
        wrong[3, 1] = bad
        with pytest.raises(IndexError, match=f"expected 0 to 5, found {bad}"):
            layer(x, wrong, weights)
    with pytest.raises(ValueError, match=r"expected x \[T, 512\]"):
        layer(x[:, :128], chosen, weights)


def test_numpy_serves_where_nothing_was_compiled(
    experts: list[Exl3Expert | None], batch: tuple[np.ndarray, ...], library: ctypes.CDLL
) -> None:
    part = tuple(array[:3] for array in batch)
    plain = cpu.CpuExperts(None, experts)(*part)
    assert np.allclose(plain, cpu.CpuExperts(library, experts)(*part), rtol=1e-4, atol=1e-5)


def test_the_self_check_passes_here_and_fails_for_a_kernel_that_decodes_otherwise(
    library: ctypes.CDLL, loops: str
) -> None:
    kinds = [(rate, book) for rate in (Rate.of(2), Rate.of(5)) for book in Codebook]
    cpu.self_check(library, kinds)

    class Wrong:
        """Takes every codebook for mcg: plausible values, all wrong."""

        def __getattr__(self, name: str) -> object:
            return getattr(library, name)

        def ds41_exl3_decode(self, tiles: int, count: int, halves: int, _codebook: int, out: int) -> None:
            library.ds41_exl3_decode(tiles, count, halves, Codebook.MCG.value, out)

    with pytest.raises(FormatError, match="MUL1, decode to other values"):
        cpu.self_check(Wrong(), [(Rate.of(3), Codebook.MUL1)])  # type: ignore[arg-type]


# ---- the encoder


@pytest.mark.parametrize(("bits", "bound"), [(1, 0.29), (2, 0.073), (3, 0.0185), (4, 0.0048), (5, 0.0014)])
def test_encoded_noise_is_as_near_as_the_rate_allows(library: ctypes.CDLL, bits: int, bound: float) -> None:
    """A Gaussian source has a least error of 4**-K; the trellis comes within a fifth (K5: two fifths) of it."""
    wanted = np.random.default_rng(bits).standard_normal((8, 16, 16))
    tiles = encode.encode_tiles(library, wanted, Rate.of(bits), Codebook.MUL1)
    error = np.square(exl3.decode_tiles(tiles, Codebook.MUL1).astype(np.float64) - wanted).mean()
    assert 4.0**-bits < error < bound


def test_what_the_trellis_holds_is_found_again_and_threads_change_nothing(library: ctypes.CDLL) -> None:
    tiles = exl3.random_tiles(np.random.default_rng(9), (3,), Rate.of(3))
    values = exl3.decode_tiles(tiles, Codebook.MUL1)
    again = encode.encode_tiles(library, values, Rate.of(3), Codebook.MUL1, threads=2)
    assert np.array_equal(exl3.decode_tiles(again, Codebook.MUL1), values)


def test_error_feedback_lowers_the_error_that_the_inputs_see(library: ctypes.CDLL) -> None:
    random = np.random.default_rng(10)
    weight = random.standard_normal((128, 128))
    inputs = random.standard_normal((300, 16)) @ random.standard_normal((16, 128))
    hessian = inputs.T @ inputs
    plain = encode.quantise(library, weight, Rate.of(2), np.random.default_rng(0))
    led = encode.quantise(library, weight, Rate.of(2), np.random.default_rng(0), hessian)
    assert encode.weighted_error(led, weight, hessian) < encode.weighted_error(plain, weight, hessian) / 3
    assert encode.weighted_error(plain, weight, np.eye(128)) < 0.08


def test_empty_outputs_stay_exactly_zero_and_pay_for_the_others(library: ctypes.CDLL) -> None:
    weight = np.zeros((128, 128))
    weight[:, :64] = np.random.default_rng(11).standard_normal((128, 64))
    layer = encode.quantise(library, weight, Rate.of(2), np.random.default_rng(0))
    assert not layer.reconstruct()[:, 64:].any()
    assert encode.weighted_error(layer, weight, np.eye(128)) < 0.03  # 0.068 without the spare outputs


def test_what_cannot_be_encoded_is_refused(library: ctypes.CDLL) -> None:
    with pytest.raises(FormatError, match="whole bits"):
        encode.encode_tiles(library, np.zeros((16, 16)), Rate.of(2.5), Codebook.MUL1)
    with pytest.raises(FormatError, match="finite"):
        encode.encode_tiles(library, np.full((16, 16), np.nan), Rate.of(2), Codebook.MUL1)
    with pytest.raises(FormatError, match="multiples of 128"):
        encode.quantise(library, np.zeros((64, 128)), Rate.of(2), np.random.default_rng(0))
