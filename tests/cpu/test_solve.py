"""The solve of chunks on CPU tensors: the inverse, its precision, what it ignores and what it refuses."""

from __future__ import annotations

import pytest
import torch

from sdm_rt import wy_solve
from tests.bad_calls import Arguments, Bad, assert_refused, bad
from tests.kernels.solve import chunk_matrices, solve_oracle
from tests.tolerances import assert_close, assert_same_bits

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("C", [1, 2, 7, 64, 100, 256])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_the_inverse(dtype: torch.dtype, C: int) -> None:
    a, beta, qk = (x.to(dtype) for x in chunk_matrices(2, C, seed=C))
    x, qx = wy_solve(a, beta, qk)
    want_x, want_qx = solve_oracle(a, beta, qk)
    assert x.dtype == qx.dtype == dtype
    assert_close("X", x, want_x, dtype)
    assert_close("QX", qx, want_qx, dtype)
    upper = torch.stack([x, qx]).triu(1)
    assert_same_bits("above the diagonal", upper, torch.zeros_like(upper))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_are_solved_in_float32(dtype: torch.dtype) -> None:
    narrow = tuple(x.to(dtype) for x in chunk_matrices(2, 30))
    got, want = wy_solve(*narrow), wy_solve(*(x.float() for x in narrow))
    for name, one, wide in zip(("X", "QX"), got, want, strict=True):
        assert_same_bits(name, one, wide)


def test_one_float64_argument_makes_the_result_float64() -> None:
    a, beta, qk = chunk_matrices(2, 10)
    assert wy_solve(a.float(), beta, qk.float())[0].dtype == torch.float64


def test_layouts_give_the_same_bits() -> None:
    a, beta, qk = chunk_matrices(3, 12)
    want = wy_solve(a, beta, qk)
    turned = wy_solve(
        a.mT.contiguous().mT, beta[..., None].expand(3, 12, 1), qk.repeat_interleave(2, 2)[..., ::2]
    )
    for name, one, two in zip(("X", "QX"), turned, want, strict=True):
        assert_same_bits(name, one, two)


def test_the_precision_of_matrix_products_does_not_matter() -> None:
    tensors = tuple(x.float() for x in chunk_matrices(2, 64))
    want = wy_solve(*tensors)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        got = wy_solve(*tensors)
    finally:
        torch.set_float32_matmul_precision(before)
    for name, one, two in zip(("X", "QX"), got, want, strict=True):
        assert_same_bits(name, one, two)


def test_no_chunks() -> None:
    x, qx = wy_solve(torch.zeros(0, 5, 5), torch.zeros(0, 5), torch.zeros(0, 5, 5))
    assert x.shape == qx.shape == (0, 5, 5)


def test_meta_tensors_propagate_shapes() -> None:
    a, beta, qk = (x.float().to("meta") for x in chunk_matrices(2, 5))
    x, qx = wy_solve(a, beta, qk)
    assert (x.shape, qx.shape, x.dtype, x.device.type) == ((2, 5, 5), (2, 5, 5), torch.float32, "meta")


def good() -> Arguments:
    return dict(zip(("A", "beta", "QK"), chunk_matrices(2, 5), strict=True))


BAD = [
    bad("a matrix alone", ValueError, "A...expected shape [N, C, C]...got [5, 5]", A=lambda x: x[0]),
    bad("not square", ValueError, "A...expected shape [N, C, C]...got [2, 5, 4]", A=lambda x: x[..., :4]),
    bad("no tokens", ValueError, "A...C in 1..256...got shape [2, 0, 0]", A=torch.zeros(2, 0, 0)),
    bad(
        "too many tokens", ValueError, "A...C in 1..256...got shape [1, 257, 257]", A=torch.zeros(1, 257, 257)
    ),
    bad("a strength too few", ValueError, "beta...[2, 5] or [2, 5, 1]...got [2, 4]", beta=lambda x: x[:, :4]),
    bad("other chunks of QK", ValueError, "QK...the shape of A...got [1, 5, 5]", QK=lambda x: x[:1]),
    bad("integers", TypeError, "A...floating-point dtype...int64", A=torch.zeros(2, 5, 5, dtype=torch.int64)),
    bad("a list", TypeError, "beta...expected a torch.Tensor, got list", beta=lambda x: x.tolist()),
    bad("two devices", ValueError, "QK...device of A, cpu...got meta", QK=lambda x: x.to("meta")),
    bad("needs a gradient", RuntimeError, "beta...not differentiable", beta=lambda x: x.requires_grad_()),
]


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.label)
def test_bad_input(case: Bad) -> None:
    assert_refused(wy_solve, case.change(good()), case)
