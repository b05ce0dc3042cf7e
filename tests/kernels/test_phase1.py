"""The kernels of Phase 1 against the CPU's definition, on the emulator and on the GPU."""

from __future__ import annotations

import pytest
import torch

from sdm_rt.cpu import phase1 as definition
from sdm_rt.cpu.phase1 import Phase1
from tests.kernels.backends import BACKENDS, Backend, require
from tests.kernels.phase1 import Chunks, make_chunks, phase1
from tests.problems import GATES, WRITES
from tests.tolerances import assert_close, assert_same_bits

# Log-decays too: both sum them in the same fixed point.
EXACT = ("payload", "last", "only", "log_k", "log_q", "rex")

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def available(backend: Backend) -> None:
    require(backend)


def check(backend: Backend, chunks: Chunks, *, seed: int = 0) -> Phase1:
    got, repeats = phase1(backend, chunks, seed=seed)
    want, counted = definition.phase1(**chunks.inputs(), slots=chunks.slots, lengths=chunks.lengths)
    for name, one, two in zip(Phase1._fields, got, want, strict=True):
        if name in EXACT:
            assert_same_bits(name, one, two)
        else:
            assert_close(name, one, two, torch.float32)
    assert repeats == counted
    return got


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("C", "W", "R"), [(1, 1, 1), (16, 4, 3), (33, 2, 9), (64, 8, 1)])
def test_shapes(backend: Backend, dtype: torch.dtype, C: int, W: int, R: int) -> None:
    check(backend, make_chunks(3, C, W, R, 40, dtype, seed=C, gate_per_write=W > 2), seed=R)


@pytest.mark.parametrize("gate_per_write", [False, True])
@pytest.mark.parametrize("gates", GATES)
def test_gates(backend: Backend, gates: str, gate_per_write: bool) -> None:
    check(backend, make_chunks(2, 20, 3, 3, 8, gates=gates, gate_per_write=gate_per_write, writes="repeats"))


@pytest.mark.parametrize("writes", WRITES)
def test_collisions(backend: Backend, writes: str) -> None:
    check(backend, make_chunks(2, 30, 4, 4, 12, writes=writes, gates="some -inf", signed_weights=True))


def test_chunks_of_different_lengths(backend: Backend) -> None:
    check(backend, make_chunks(5, 16, 3, 4, 20, torch.bfloat16, lengths=[16, 0, 1, 15, 7]))


@pytest.mark.parametrize("slots", [5, 256, 300, 2**20, 2**31 - 1])
def test_numbers_of_slots(backend: Backend, slots: int) -> None:
    chunks = make_chunks(2, 12, 4, 4, 5)
    stride = slots // 5
    spread = Chunks(
        **(chunks.inputs() | {"k_idx": chunks.k_idx * stride, "q_idx": chunks.q_idx * stride}), slots=slots
    )
    check(backend, spread)


def test_an_index_outside_the_slots_is_absent(backend: Backend) -> None:
    chunks = make_chunks(2, 9, 4, 5, 12, seed=1, writes="repeats")
    for n, token, lane, slot in ((0, 3, 1, -1), (0, 3, 2, 12), (1, 8, 0, 2**40)):
        chunks.k_idx[n, token, lane] = slot
        chunks.q_idx[n, token, lane] = slot
    check(backend, chunks)


def test_index_types_give_the_same_bits(backend: Backend) -> None:
    chunks = make_chunks(2, 16, 4, 4, 20, torch.bfloat16)
    wide = check(backend, chunks)
    for narrow in (("k_idx", "q_idx"), ("q_idx",)):
        inputs = chunks.inputs() | {name: chunks.inputs()[name].int() for name in narrow}
        got = check(backend, Chunks(**inputs, slots=chunks.slots))
        for name, one, two in zip(Phase1._fields, got, wide, strict=True):
            assert_same_bits(name, one, two)


def test_chunks_change_no_bit_of_each_other(backend: Backend) -> None:
    chunks = make_chunks(4, 20, 4, 4, 12, writes="hot", gates="all kinds")
    whole, _ = phase1(backend, chunks)
    part, _ = phase1(backend, Chunks(**{k: x[2:3].clone() for k, x in chunks.inputs().items()}, slots=12))
    for name, one, two in zip(Phase1._fields, part, whole, strict=True):
        assert_same_bits(name, one, two[2:3])
