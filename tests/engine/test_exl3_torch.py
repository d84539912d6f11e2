"""The torch reference that the GPU run compares with agrees with the numpy library."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from ds41_kernels import exl3

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
import exl3_torch as reference


@pytest.mark.parametrize("codebook", list(reference.CODEBOOKS))
@pytest.mark.parametrize("bits", range(1, 9))
def test_weights_and_products_agree(codebook: str, bits: int) -> None:
    table = reference.values(codebook, "cpu")
    linear = reference.random_linear(256, 128, bits, codebook, torch.Generator().manual_seed(bits))
    library = exl3.Exl3Linear(
        linear.trellis.numpy().view(np.uint16),
        linear.suh.numpy(),
        linear.svh.numpy(),
        reference.CODEBOOKS[codebook],
    )
    found = reference.decoded(linear, table).numpy()
    assert np.array_equal(found.view(np.uint16), library.decoded().view(np.uint16))
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1)).half()
    wanted = library.kernel_product(x.numpy())
    np.testing.assert_allclose(reference.product(x, linear, table).numpy(), wanted, atol=2e-3 * np.abs(wanted).max())
