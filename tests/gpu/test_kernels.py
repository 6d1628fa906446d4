"""The Triton kernels give the references' numbers, compiled, on the card."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from tests.kernels.triton_cases import CASES, Attend, Case, Site

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: no compiled kernel was run"),
]

# Every head_dim and every group that a supported line has, over contexts that are split, and some that are not.
ON_THE_CARD: Mapping[str, Case] = {
    f"{kind}, head_dim {dim}, {heads}/{kv_heads}, window {window}": Attend(heads, kv_heads, dim, *slices, window=window)
    for dim, heads, kv_heads, window in (
        (64, 9, 3, None),
        (128, 32, 8, None),
        (128, 8, 8, 100),
        (256, 4, 1, 512),
        (256, 32, 16, 1024),
        (256, 24, 4, None),
        (512, 32, 4, None),
        (512, 16, 1, None),
    )
    for kind, slices in {
        "decode": ((1, 1, 1, 1), (3001, 1, 1024, 515)),
        "prefill": ((700, 33, 300), (700, 1100, 301)),
        "mixed": ((1, 64, 1, 130), (1500, 2000, 17, 130)),
    }.items()
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [*CASES, *ON_THE_CARD])
def test_kernel_equals_its_reference(case: str, dtype: torch.dtype) -> None:
    """Every element of what a kernel wrote is within a few roundings of the reference's."""
    {**CASES, **ON_THE_CARD}[case](Site(torch.device("cuda"), dtype))
