"""The GPU kernels without a GPU: they build for every card, stay within their limits, and their loops are as short as
promised. Needs the compiler's wheels (``make kernel-toolchain``); without them the builds are skipped, saying so."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from ds41_kernels import build, sass, slices
from ds41_kernels.build import BuildError, Resources, Variant
from ds41_kernels.census import Census

K3_MUL1 = Variant((3,), ("mul1",))
# SASS instructions a weight and lane of the hot loop; 14.6 in the best documented EXL3 kernel for V100
VOLTA_LIMITS = [
    ("mul1", 2, 7.6),
    ("mul1", 3, 7.6),
    ("mul1", 4, 7.6),
    ("mul1", 5, 8.4),
    ("mcg", 3, 8.4),
    ("mcg", 5, 8.4),
]
AMPERE_LIMITS = [("mul1", 3, 4.4), ("mul1", 5, 4.8), ("mcg", 3, 5.6)]


@pytest.fixture(scope="session")
def toolchain() -> build.Toolchain:
    try:
        return build.find_toolchain()
    except BuildError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def disassembler() -> Path:
    try:
        return sass.find_disassembler()
    except sass.NoDisassembler as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


def test_what_is_in_the_cache_is_known_without_compiling(toolchain: build.Toolchain, tmp_path: Path) -> None:
    assert not build.cached("sm_70", tmp_path, K3_MUL1, toolchain)
    images = build.build("sm_70", tmp_path, K3_MUL1, toolchain)
    assert build.cached("sm_70", tmp_path, K3_MUL1, toolchain)
    assert not build.cached("sm_70", tmp_path, Variant((4,), ("mul1",)), toolchain)
    images[0].path.write_bytes(images[0].path.read_bytes()[:-1])
    assert not build.cached("sm_70", tmp_path, K3_MUL1, toolchain)


@pytest.mark.parametrize("target", build.TARGETS)
def test_every_target_builds(target: str, toolchain: build.Toolchain, cache: Path) -> None:
    images = build.build(target, cache, K3_MUL1, toolchain)
    assert [image.source for image in images] == list(build.SOURCES)
    for image in images:
        content = image.path.read_bytes()
        if target in build.PTX:
            assert f".target sm_{target.split('_')[1]}".encode() in content
        else:
            assert content.startswith(b"\x7fELF")
            multiply = [found for name, found in image.kernels.items() if "multiply" in name]
            assert multiply and all(found.spill_stores == found.spill_loads == 0 for found in multiply)


@pytest.mark.parametrize("target", ["sm_70", "sm_80"])
def test_a_build_for_all_rates_stays_within_the_limits(target: str, toolchain: build.Toolchain, cache: Path) -> None:
    images = build.build(target, cache, Variant(codebooks=("mul1",)), toolchain)
    assert all(not build.breaches(image.kernels) for image in images)


def test_a_second_build_is_the_first(toolchain: build.Toolchain, cache: Path) -> None:
    first = build.build("compute_70", cache, K3_MUL1, toolchain)
    second = build.build("compute_70", cache, K3_MUL1, toolchain)
    assert [image.path for image in first] == [image.path for image in second]
    assert all(image.cached for image in second)


def test_a_damaged_image_is_built_again(toolchain: build.Toolchain, cache: Path) -> None:
    (image,) = build.build("compute_80", cache, K3_MUL1, toolchain, ["exl3_prefill.cu"])
    whole = image.path.read_bytes()
    image.path.write_bytes(whole[:-1])
    (again,) = build.build("compute_80", cache, K3_MUL1, toolchain, ["exl3_prefill.cu"])
    assert not again.cached
    assert again.path.read_bytes() == whole


@pytest.mark.parametrize(("codebook", "bits", "limit"), VOLTA_LIMITS)
def test_loop_of_the_volta_decode(
    codebook: str, bits: int, limit: float, toolchain: build.Toolchain, disassembler: Path, cache: Path
) -> None:
    (image,) = build.build("sm_70", cache, Variant((bits,), (codebook,)), toolchain, ["exl3_decode.cu"])
    (loop,) = sass.hot_loops(image.path, disassembler)
    assert loop.kernel == f"exl3_decode_multiply2_{codebook}"
    assert loop.operations["HMMA"] and not loop.local_memory
    weights = loop.mma  # two m8n8k4 of four HMMA each for the eight weights of a lane in a tile
    assert loop.instructions / weights <= limit


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize(("codebook", "bits", "limit"), AMPERE_LIMITS)
def test_loop_of_the_ampere_decode(
    target: str, codebook: str, bits: int, limit: float, toolchain: build.Toolchain, disassembler: Path, cache: Path
) -> None:
    (image,) = build.build(target, cache, Variant((bits,), (codebook,)), toolchain, ["exl3_decode.cu"])
    loops = {loop.kernel: loop for loop in sass.hot_loops(image.path, disassembler)}
    loop = loops[f"exl3_decode_multiply4_{codebook}"]
    assert loop.operations["IMMA" if codebook == "mul1" else "HMMA"] and not loop.local_memory
    assert loop.instructions / (4 * loop.mma) <= limit  # an MMA takes four weights of a lane


@pytest.mark.parametrize("target", build.CUBINS)
def test_loops_of_the_prefill(target: str, toolchain: build.Toolchain, disassembler: Path, cache: Path) -> None:
    (image,) = build.build(target, cache, K3_MUL1, toolchain, ["exl3_prefill.cu"])
    loops = sass.hot_loops(image.path, disassembler)
    assert len(loops) == 3  # tiles of 16, 32 and 64 rows
    assert all(loop.operations["HMMA"] and not loop.local_memory for loop in loops)


def test_a_limit_that_breaks_is_named() -> None:
    fat = Resources(registers=300, spill_stores=4, spill_loads=8, stack=16, shared=1 << 20)
    lines = build.breaches({"exl3_decode_multiply4_mul1": fat})
    assert [line.split("found ")[1] for line in lines] == ["300", "12", str(1 << 20)]
    assert build.breaches({"another": fat}) == ["another: no limit is set for it"]


def test_a_source_that_does_not_compile_gives_one_line(
    toolchain: build.Toolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "SOURCE_DIR", tmp_path)
    monkeypatch.setattr(build, "HEADERS", ())
    (tmp_path / "bad.cu").write_text('extern "C" __global__ void k() { nothing; }')
    with pytest.raises(BuildError, match="identifier") as caught:
        build.build("sm_70", tmp_path / "cache", K3_MUL1, toolchain, ["bad.cu"])
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize("bits", [(), (0,), (9,)])
def test_rates_outside_the_format_are_refused(bits: tuple[int, ...]) -> None:
    with pytest.raises(BuildError, match=r"1\.\.8"):
        Variant(bits)


def test_other_variants_targets_and_compilers_are_other_images() -> None:
    digests = {
        build.source_digest("exl3_decode.cu", build.flags(target, variant), compiler)
        for target in ("sm_70", "sm_80")
        for variant in (K3_MUL1, Variant((3, 5), ("mul1",)))
        for compiler in ("one", "two")
    }
    assert len(digests) == 8


def test_no_toolchain_names_the_wheels(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"nvidia-cuda-nvrtc-cu12==12\.8\.93"):
        build.find_toolchain([tmp_path])


def test_cards_and_their_targets() -> None:
    assert [build.target_for(*card) for card in ((7, 0), (8, 0), (8, 6), (9, 0), (12, 0))] == [
        "sm_70", "sm_80", "sm_80", "sm_90", "compute_80",
    ]  # fmt: skip
    with pytest.raises(BuildError, match=r"found 6\.1"):
        build.target_for(6, 1)


LISTING = """
\t.section\t.text.kernel,"ax",@progbits
.L_x_1:
        /*0010*/                   HMMA.884.F32.F32.STEP0 R4, R8, R9, R4 ;
        /*0020*/                   LDL R1, [R2] ;
.L_x_2:
        /*0030*/                   HMMA.884.F32.F32.STEP1 R4, R8, R9, R4 ;
        /*0040*/              @P0  IADD3 R1, R1, 0x1, RZ ;
        /*0050*/              @P0  BRA `(.L_x_2) ;
        /*0060*/                   BRA `(.L_x_1) ;
        /*0070*/                   BRA `(.L_x_3) ;
.L_x_3:
        /*0080*/                   EXIT ;
"""


def test_the_listing_is_read_for_innermost_loops() -> None:
    (loop,) = sass.parse(LISTING)
    assert (loop.kernel, loop.instructions, loop.mma, loop.local_memory) == ("kernel", 3, 1, 0)
    assert loop.operations == Counter(HMMA=1, IADD3=1, BRA=1)


def test_slices_of_four_ranks_are_whole_blocks_and_even_out() -> None:
    held = [0] * 4
    for layer in range(4):
        pieces = sorted(slices.inner_slice(2304, 4, rank, layer) for rank in range(4))
        assert pieces == [(0, 640), (640, 1280), (1280, 1792), (1792, 2304)]
        for rank in range(4):
            begin, end = slices.inner_slice(2304, 4, rank, layer)
            held[rank] += end - begin
    assert held == [2304] * 4
    with pytest.raises(ValueError, match="block of 128"):
        slices.inner_slice(2304, 32, 0, 0)


def test_the_census_names_what_no_kernel_served() -> None:
    census = Census()
    census.note("layers.0", "decode", "exl3_decode_multiply2_mul1 (sm_70)")
    census.note("layers.0", "decode", "exl3_decode_multiply2_mul1 (sm_70)")
    census.note("layers.1", "prefill", "exl3_prefill_multiply_mul1 (sm_70)")
    assert census.missing(["layers.0", "layers.1"]) == ["layers.1: decode"]
    assert census.lines() == [
        "decode: exl3_decode_multiply2_mul1 (sm_70) in 1 layers, 2 calls",
        "prefill: exl3_prefill_multiply_mul1 (sm_70) in 1 layers, 1 calls",
    ]
