"""The solve kernel against its float64 definition, on the emulator and on the GPU."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.backends import BACKENDS, Backend, require
from tests.kernels.solve import chunk_matrices, solve, solve_oracle
from tests.tolerances import assert_close, assert_same_bits

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def available(backend: Backend) -> None:
    require(backend)


@pytest.mark.parametrize("C", [1, 2, 3, 15, 16, 17, 33, 63, 64, 65, 100, 129, 256])
def test_equals_the_inverse(backend: Backend, C: int) -> None:
    N = 1 if C > 64 else 3
    a, beta, qk = (x.float() for x in chunk_matrices(N, C, seed=C))
    x, qx = solve(backend, a, beta, qk, seed=C)
    want_x, want_qx = solve_oracle(a, beta, qk)
    assert_close("X", x, want_x, torch.float32)
    assert_close("QX", qx, want_qx, torch.float32)
    for name, matrix in (("X", x), ("QX", qx)):
        upper = matrix.triu(1)
        assert_same_bits(f"{name} above the diagonal", upper, torch.zeros_like(upper))
    ones = x.diagonal(dim1=1, dim2=2)
    assert_same_bits("diagonal of X", ones, torch.ones_like(ones))


def test_chunks_change_no_bit_of_each_other(backend: Backend) -> None:
    a, beta, qk = (x.float() for x in chunk_matrices(4, 33))
    whole = solve(backend, a, beta, qk)
    part = solve(backend, a[2:3].clone(), beta[2:3].clone(), qk[2:3].clone())
    for name, one, all_chunks in zip(("X", "QX"), part, whole, strict=True):
        assert_same_bits(name, one, all_chunks[2:3])


@pytest.mark.parametrize("token", [10, 40])
@pytest.mark.parametrize("where", ["A", "beta", "QK"])
def test_nan_reaches_no_earlier_token_and_no_later_column(backend: Backend, where: str, token: int) -> None:
    tensors = dict(zip(("A", "beta", "QK"), (x.float() for x in chunk_matrices(1, 70)), strict=True))
    clean = solve(backend, *tensors.values())
    tensors[where][0, token] = torch.nan
    got = solve(backend, *tensors.values())
    for name, one, before in zip(("X", "QX"), got, clean, strict=True):
        assert_same_bits(name, one[:, :token], before[:, :token])
        assert_same_bits(f"{name} of tokens behind", one[:, :, token + 1 :], before[:, :, token + 1 :])
    assert got[1][0, token:].isnan().any()


def test_beta_zero_and_one(backend: Backend) -> None:
    a, _, qk = (x.float() for x in chunk_matrices(2, 20))
    beta = torch.stack([torch.zeros(20), torch.ones(20)])
    x, qx = solve(backend, a, beta, qk)
    assert_same_bits("X without writes", x[0], torch.eye(20))
    assert_same_bits("QX without writes", qx[0], qk[0].tril())
    assert_close("X", x[1], solve_oracle(a, beta, qk)[0][1], torch.float32)
