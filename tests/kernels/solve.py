"""The solve of chunks on a backend: the emulator runs the planned launch, the GPU the public op."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sdm_rt.plan.chunks import SolveShape, plan_chunk_solve
from tests.emulator.harness import Call, Replacement, run
from tests.kernels.backends import Backend, device_model

__all__ = ["chunk_matrices", "solve", "solve_oracle"]


def chunk_matrices(N: int, C: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A, beta and QK of N random chunks in float64; NaN above the diagonals, and on that of A."""
    generator = torch.Generator().manual_seed(seed)
    a, qk = torch.randn(2, N, C, C, generator=generator, dtype=torch.float64) / C**0.5
    beta = torch.rand(N, C, generator=generator, dtype=torch.float64)
    upper = torch.ones(C, C, dtype=torch.bool).triu()
    return a.masked_fill(upper, torch.nan), beta, qk.masked_fill(upper.triu(1), torch.nan)


def solve_oracle(a: Tensor, beta: Tensor, qk: Tensor) -> tuple[Tensor, Tensor]:
    """X and QX by LU in float64."""
    a, beta, qk = (x.double() for x in (a, beta, qk))
    identity = torch.eye(a.shape[1], dtype=torch.float64)
    x = torch.linalg.inv(identity + beta[..., None] * a.tril(-1))
    return x, qk.tril() @ x


def solve(
    backend: Backend,
    a: Tensor,
    beta: Tensor,
    qk: Tensor,
    *,
    seed: int = 0,
    replacements: Sequence[Replacement] = (),
) -> tuple[Tensor, Tensor]:
    """Solve float32 chunks [N, C, C]; ``seed`` is the emulator's order of threads."""
    if backend == "gpu":
        from sdm_rt import wy_solve

        x, qx = wy_solve(a.cuda(), beta.cuda(), qk.cuda())
        return x.cpu(), qx.cpu()
    chunks, chunk, _ = a.shape
    (launch,) = plan_chunk_solve(SolveShape(chunks, chunk), device_model(backend)).kernels()
    x, qx = torch.empty_like(a), torch.empty_like(a)
    values = {"a": a, "qk": qk, "strength": beta, "x": x, "qx": qx, "C": chunk}
    run([Call(launch, values)], outputs=[x, qx], seed=seed, replacements=replacements)
    return x, qx
