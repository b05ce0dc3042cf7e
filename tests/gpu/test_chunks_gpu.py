"""wy_solve and phase1_forward on a real GPU: real shapes, layouts, captures, refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sdm_rt import Phase1, phase1_forward, wy_solve
from sdm_rt.cpu import phase1 as definition
from tests.kernels.phase1 import make_chunks
from tests.kernels.solve import chunk_matrices, solve_oracle
from tests.kernels.test_phase1 import check
from tests.tolerances import assert_close, assert_same_bits

pytestmark = pytest.mark.gpu


def solved(*tensors: Tensor) -> tuple[Tensor, ...]:
    return wy_solve(*(tensor.cuda() for tensor in tensors))


@pytest.mark.parametrize(("N", "C"), [(1024, 64), (256, 128), (64, 256), (1, 1), (70000, 2)])
def test_the_solve_at_real_shapes(N: int, C: int) -> None:
    tensors = tuple(x.float() for x in chunk_matrices(N, C))
    for name, got, want in zip(("X", "QX"), solved(*tensors), solve_oracle(*tensors), strict=True):
        assert_close(name, got, want, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("N", "C", "W", "R", "S"),
    [(64, 64, 64, 64, 4096), (4, 256, 256, 256, 4096), (200, 30, 7, 9, 333), (3, 256, 16, 16, 20)],
)
def test_phase1_at_real_shapes(dtype: torch.dtype, N: int, C: int, W: int, R: int, S: int) -> None:
    check("gpu", make_chunks(N, C, W, R, S, dtype, gates="some -inf", gate_per_write=True))


def test_layouts_give_the_same_bits() -> None:
    a, beta, qk = (x.float().cuda() for x in chunk_matrices(3, 40))
    turned = wy_solve(a.mT.contiguous().mT, beta[..., None], qk.repeat_interleave(2, 2)[..., ::2])
    for name, one, two in zip(("X", "QX"), turned, wy_solve(a, beta, qk), strict=True):
        assert_same_bits(name, one, two)
    chunks = make_chunks(3, 20, 4, 6, 30, torch.bfloat16)
    inputs = {name: tensor.cuda() for name, tensor in chunks.inputs().items()}
    strided = {name: tensor.mT.contiguous().mT for name, tensor in inputs.items()}
    for name, one, two in zip(
        Phase1._fields,
        phase1_forward(**strided, num_memory_slots=30),
        phase1_forward(**inputs, num_memory_slots=30),
        strict=True,
    ):
        assert_same_bits(name, one, two)


def captured(call: Callable[[], tuple[Tensor, ...]]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


def test_both_wait_for_nothing_and_are_captured_after_warmup() -> None:
    chunks = make_chunks(8, 32, 8, 8, 100)
    inputs = {name: tensor.cuda() for name, tensor in chunks.inputs().items()}
    beta = torch.rand(8, 32, device="cuda")

    def call() -> tuple[Tensor, ...]:
        result = phase1_forward(**inputs, num_memory_slots=100)
        return (*result, *wy_solve(result.a, beta, result.qk))

    graph, results = captured(call)
    for seed in (1, 2):
        for name, tensor in make_chunks(8, 32, 8, 8, 100, seed=seed).inputs().items():
            inputs[name].copy_(tensor)
        graph.replay()
        for name, got, want in zip((*Phase1._fields, "X", "QX"), results, call(), strict=True):
            assert_same_bits(name, got, want)


def test_lengths_beyond_the_chunk_count_as_the_chunk() -> None:
    chunks = make_chunks(2, 10, 3, 3, 20)
    inputs = {name: tensor.cuda() for name, tensor in chunks.inputs().items()}
    lengths = torch.tensor([10, 1000], dtype=torch.int32, device="cuda")
    got = phase1_forward(**inputs, num_memory_slots=20, lengths=lengths)
    want, _ = definition.phase1(**chunks.inputs(), slots=20, lengths=None)
    assert_same_bits("payload", got.payload, want.payload)


def test_dtypes_other_than_float32_are_refused_by_the_solve() -> None:
    a, beta, qk = (x.cuda() for x in chunk_matrices(1, 4))
    with pytest.raises(TypeError, match=r"A: expected dtype float32 on a GPU, got torch\.float64"):
        wy_solve(a, beta, qk)
    with pytest.raises(TypeError, match=r"beta: expected dtype float32 on a GPU, got torch\.bfloat16"):
        wy_solve(a.float(), beta.bfloat16(), qk.float())
