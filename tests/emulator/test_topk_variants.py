"""Both directions of top-k execute for every dtype and every shape of the selection's code.

Factors and k are compiled in, so their variants have no end. What the code distinguishes is one factor, two,
more, and how many keys a lane sorts.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

from sdm_rt.cpu.topk import product_key_topk
from sdm_rt.plan.shapes import BANK_DTYPES
from sdm_rt.plan.topk import TopkShape, topk_kernel
from tests.kernels.topk import gradient, score_rows, select
from tests.tolerances import assert_close, assert_same_bits

ROWS = 6  # more than one block's warps
SELECTIONS = [((7,), 3), ((90,), 70), ((9, 8), 33), ((30, 9), 130), ((3, 4, 5), 60), ((2, 3, 2, 2), 5)]
CASES = list(product(BANK_DTYPES, SELECTIONS))
SPECS = sorted({topk_kernel(TopkShape(ROWS, factors, k, dtype)) for dtype, (factors, k) in CASES})


@pytest.mark.parametrize(("dtype", "selection"), CASES)
def test_variant(dtype: str, selection: tuple[tuple[int, ...], int]) -> None:
    factors, k = selection
    raw = score_rows("ties", ROWS, sum(factors), getattr(torch, dtype), seed=k)
    on_cpu = raw.clone().requires_grad_()
    want_val, want_idx = product_key_topk(on_cpu, factors, k)
    val, idx = select("emulator", raw, factors, k)
    assert torch.equal(idx, want_idx)
    assert_same_bits("val", val, want_val.detach())
    grad_val = torch.randn(val.shape, generator=torch.Generator().manual_seed(k)).to(val.dtype)
    (want,) = torch.autograd.grad(want_val, on_cpu, grad_val)
    assert_close("gradient", gradient("emulator", raw, factors, k, grad_val, idx), want, raw.dtype)
