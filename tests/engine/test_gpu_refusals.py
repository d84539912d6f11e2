"""What the GPU side refuses, each with one line, tried without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ds41_kernels import driver, selfcheck
from ds41_kernels.moe import DeviceLinear, Images, MoeError, Workspace, worst_groups

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


def linear(words: int = 48, suh: int = 256, dtype: torch.dtype = torch.float16) -> DeviceLinear:
    trellis = torch.zeros(16, 8, words, dtype=torch.int16)
    return DeviceLinear(trellis, torch.zeros(suh, dtype=dtype), torch.zeros(128, dtype=torch.float16))


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (linear(words=40), "half bit rates have no GPU kernel"),
        (linear(words=144), r"K of 1\.\.8"),
        (linear(suh=128), r"suh: expected float16 \[256\], found torch.float16 \[128\]"),
        (linear(dtype=torch.float32), r"suh: expected float16"),
        (linear(), "trellis: expected a contiguous CUDA tensor"),
    ],
)
def test_tensors_that_do_not_fit(found: DeviceLinear, text: str) -> None:
    with pytest.raises(MoeError, match=text):
        found.check(256, 128)


@pytest.mark.parametrize(
    ("hidden", "inner", "experts", "text"),
    [
        (200, 256, 4, "hidden: expected a multiple of 128 up to 8192, found 200"),
        (256, 576, 4, "inner: .* found 576"),  # 2304 channels cut evenly in four
        (256, 8320, 4, "inner: .* found 8320"),
        (256, 256, 513, r"experts: expected 1\.\.512, found 513"),
    ],
)
def test_shapes_that_the_kernels_do_not_have(hidden: int, inner: int, experts: int, text: str) -> None:
    with pytest.raises(MoeError, match=text):
        Workspace(hidden, inner, experts, 6, 64, torch.device("cpu"))


def test_the_worst_case_of_groups_is_enough() -> None:
    for rows in (1, 2, 4, 8, 64):
        for counts in ([0, 0, 0], [1, 1, 1], [9, 0, 0], [5, 4, 0], [63, 64, 65]):
            needed = sum(-(-count // rows) for count in counts)
            assert worst_groups(sum(counts), len(counts), rows) >= needed


def test_missing_images_are_named(tmp_path: Path) -> None:
    with pytest.raises(MoeError, match="expected exl3_decode and exl3_prefill, found"):
        Images.load([tmp_path / "exl3_decode-sm_70-0.cubin"], "sm_70")


@needs_no_gpu
def test_without_a_card_nothing_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(driver.DriverError) as caught:
        driver.compute_capability()
    assert "\n" not in str(caught.value)
    assert selfcheck.main(["--images", str(tmp_path)]) == 1
    assert selfcheck.main(["--images", str(tmp_path), "--target", "sm_70"]) == 1
    said = capsys.readouterr()
    assert not said.out
    assert all(line.startswith("GPU kernels: ") for line in said.err.splitlines())
