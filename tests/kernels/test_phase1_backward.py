"""The kernels of Phase-1 backward against their definition in float64, on the emulator and on the GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sdm_rt.plan.phase1_backward import PAIRS_EACH
from tests.kernels.backends import BACKENDS, Backend, require
from tests.kernels.phase1 import Chunks, make_chunks
from tests.kernels.phase1_backward import (
    GRADIENTS,
    ROUNDED,
    Gradients,
    backward_definition,
    make_gradients,
    phase1_backward,
)
from tests.problems import GATES, WRITES
from tests.tolerances import assert_close, assert_same_bits

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def available(backend: Backend) -> None:
    require(backend)


def gradients_of(chunks: Chunks, seed: int = 0) -> Gradients:
    N, C, W = chunks.k_idx.shape
    return make_gradients(N, C, W, chunks.q_idx.shape[2], seed)


def check(backend: Backend, chunks: Chunks, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    gradients = gradients_of(chunks, seed)
    got = phase1_backward(backend, chunks, gradients, seed=seed)
    ahead = phase1_backward(backend, chunks, gradients, det=True, seed=seed)
    for name, one, two in zip(GRADIENTS, got, ahead, strict=True):
        assert_same_bits(f"{name} of the variant that hides latency", two, one)
    for name, one, want in zip(GRADIENTS, got, backward_definition(chunks, gradients), strict=True):
        assert one.dtype == (torch.float32 if name == "grad_g" else chunks.k_val.dtype)
        assert_close(name, one, want, one.dtype, tolerance=ROUNDED[one.dtype])
    touched = {"grad_k_val": chunks.k_idx, "grad_q_val": chunks.q_idx, "grad_g": chunks.k_idx}
    for name, one in zip(GRADIENTS, got, strict=True):
        absent = (touched[name] < 0) | (touched[name] >= chunks.slots)
        if chunks.lengths is not None:
            absent |= (torch.arange(absent.shape[1]) >= chunks.lengths[:, None])[..., None]
        assert not one[absent].any(), f"{name}: an absent or padded entry has a gradient"
    same = chunks.k_idx[:, :, :, None] == chunks.k_idx[:, :, None, :]
    assert not got[2][same.tril(-1).any(dim=3)].any(), "a repeat has a gradient of its gate"
    assert not got[2][chunks.g.isneginf().expand_as(got[2])].any(), "a gate of -inf has a gradient"
    return got


@pytest.mark.parametrize("gate_per_write", [False, True])
@pytest.mark.parametrize("gates", GATES)
def test_gates(backend: Backend, gates: str, gate_per_write: bool) -> None:
    check(backend, make_chunks(2, 20, 3, 3, 8, gates=gates, gate_per_write=gate_per_write, writes="repeats"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("writes", WRITES)
def test_collisions(backend: Backend, writes: str, dtype: torch.dtype) -> None:
    options = {"writes": writes, "gates": "all kinds", "gate_per_write": True, "signed_weights": True}
    check(backend, make_chunks(2, 24, 4, 5, 12, dtype, seed=1, **options), seed=1)


def test_the_entries_that_a_thread_looks_at_change_no_bit(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """650 entries a chunk: three blocks, two, or one."""
    chunks = make_chunks(2, 130, 3, 2, 90, seed=3, gates="some -inf", gate_per_write=True, writes="repeats")
    found = []
    for each in PAIRS_EACH:
        monkeypatch.setattr("sdm_rt.plan.phase1_backward.PAIRS_EACH", (each,))
        found.append(check(backend, chunks))
    for other in found[1:]:
        for name, one, two in zip(GRADIENTS, found[0], other, strict=True):
            assert_same_bits(name, two, one)


@pytest.mark.parametrize(("C", "W", "R"), [(1, 1, 1), (7, 3, 9), (16, 40, 2), (65, 4, 3), (130, 3, 2)])
def test_sizes(backend: Backend, C: int, W: int, R: int) -> None:
    check(backend, make_chunks(2, C, W, R, 50, seed=C, gates="some -inf", gate_per_write=W > 1), seed=C)


@pytest.mark.parametrize("gates", ["zero", "mild", "all kinds"])
def test_a_slot_that_every_token_touches(backend: Backend, gates: str) -> None:
    chunks = make_chunks(1, 130, 2, 2, 3, gates=gates, gate_per_write=True, writes="repeats", seed=2)
    check(backend, chunks)


def test_chunks_of_different_lengths(backend: Backend) -> None:
    check(backend, make_chunks(5, 16, 3, 4, 20, torch.bfloat16, lengths=[16, 0, 1, 15, 7], writes="repeats"))


def test_an_index_outside_the_slots_is_absent(backend: Backend) -> None:
    chunks = make_chunks(2, 9, 4, 5, 12, seed=1, writes="repeats")
    for n, token, lane, slot in ((0, 3, 1, -1), (0, 3, 2, 12), (1, 8, 0, 2**40)):
        chunks.k_idx[n, token, lane] = slot
        chunks.q_idx[n, token, lane] = slot
    check(backend, chunks)


def test_a_pair_without_an_owner_between_leaves_the_gates_alone(backend: Backend) -> None:
    """A read of the latest write has a decay of 1 whatever the gates: exactly nothing reaches them."""
    slots = torch.tensor([0, 0, 1, 0])[None, :, None]
    chunks = Chunks(
        slots, slots.clone(), *torch.full((2, 1, 4, 1), 0.3), torch.full((1, 4, 1), -0.1), slots=2
    )
    chunks.q_idx[0, 2] = 0  # reads the write of token 1, a token later
    zeros, d_a, d_qk = torch.zeros(1, 4, 1), torch.zeros(1, 4, 4), torch.zeros(1, 4, 4)
    d_qk[0, 1, 1] = d_qk[0, 2, 1] = d_qk[0, 3, 3] = 1.7
    _, grad_q, grad_g = phase1_backward(backend, chunks, Gradients(d_a, d_qk, zeros, zeros, zeros))
    assert grad_q[0, :, 0].tolist() == pytest.approx([0.0, 0.51, 0.51, 0.51])
    assert not grad_g.any()
    d_qk[0, 3, 1] = 1.7
    _, _, grad_g = phase1_backward(backend, chunks, Gradients(d_a, d_qk, zeros, zeros, zeros))
    assert (grad_g[0, :, 0] != 0).tolist() == [False, False, False, True]


def test_large_terms_of_pairs_without_an_owner_between_do_not_blur_the_gates(backend: Backend) -> None:
    """They cancel out of every gate's gradient; left in, their roundings would be larger than the rest."""
    chunks = make_chunks(2, 24, 1, 1, 2, writes="one slot", gate_per_write=True, seed=6)
    chunks.k_idx[:, 1::3] = chunks.slots  # absent: some tokens read and do not write
    chunks.q_idx[:] = 0
    gradients = gradients_of(chunks)
    for token in range(24):
        latest = token - (token % 3 == 1)
        gradients.d_qk[:, token, latest] *= 1e8
    got = phase1_backward(backend, chunks, gradients)
    want = backward_definition(chunks, gradients)
    for name, one, two in zip(GRADIENTS, got, want, strict=True):
        assert_close(name, one, two, torch.float32, tolerance=ROUNDED[torch.float32])


def test_large_terms_that_cancel_leave_the_small_ones(backend: Backend) -> None:
    """Sums over pairs are compensated: +2^20, a small term, -2^20, and so on along rows and columns."""
    chunks = make_chunks(1, 64, 1, 1, 1, writes="one slot", gates="zero", gate_per_write=True)
    chunks.k_val[:], chunks.q_val[:] = 0.5, 0.5
    gradients = gradients_of(chunks)
    row, column = torch.arange(32)[:, None], torch.arange(30)
    large = 2.0**20 * (1 - 2 * (row % 2)) * (1 - column % 3)
    for cells in (gradients.d_a, gradients.d_qk):
        corner = cells[0, 32:, :30]
        corner.copy_(large.where(large != 0, corner))
    got = phase1_backward(backend, chunks, gradients)
    for name, one, want in zip(GRADIENTS, got, backward_definition(chunks, gradients), strict=True):
        assert_close(name, one, want, torch.float32, tolerance=ROUNDED[torch.float32])


def test_what_lies_above_the_diagonal_is_not_read(backend: Backend) -> None:
    chunks = make_chunks(1, 12, 3, 3, 5, writes="repeats", gates="all kinds")
    nan = gradients_of(chunks)
    above = torch.ones(12, 12, dtype=torch.bool)
    other = replace(
        nan, d_a=nan.d_a.masked_fill(above.triu(), 9.0), d_qk=nan.d_qk.masked_fill(above.triu(1), 9.0)
    )
    for name, one, two in zip(
        GRADIENTS, *(phase1_backward(backend, chunks, gradients) for gradients in (nan, other)), strict=True
    ):
        assert_same_bits(name, one, two)


def test_nan_reaches_no_other_slot_and_no_gate_of_later_tokens(backend: Backend) -> None:
    chunks = make_chunks(2, 12, 2, 2, 6, gates="mild", gate_per_write=True, seed=4)
    clean = gradients_of(chunks)
    token, slot = 6, int(chunks.k_idx[0, 6, 1])
    d_k_eff = clean.d_k_eff.clone()
    d_k_eff[0, token, 1] = torch.nan
    before = phase1_backward(backend, chunks, clean)
    after = phase1_backward(backend, chunks, replace(clean, d_k_eff=d_k_eff))
    reached = torch.zeros_like(chunks.k_idx, dtype=torch.bool)
    reached[0, : token + 1] = chunks.k_idx[0, : token + 1] == slot
    assert torch.equal(after[2].isnan(), reached)
    assert_same_bits("the other gates' gradients", after[2][~reached], before[2][~reached])
    reached[0, :token] = False
    assert torch.equal(after[0].isnan(), reached)
    assert_same_bits("the other weights' gradients", after[0][~reached], before[0][~reached])
    assert_same_bits("gradients of reads", after[1], before[1])


def test_chunks_change_no_bit_of_each_other(backend: Backend) -> None:
    chunks = make_chunks(4, 20, 4, 4, 12, writes="hot", gates="all kinds")
    gradients = gradients_of(chunks)
    part = Chunks(**{k: x[2:3].clone() for k, x in chunks.inputs().items()}, slots=12)
    given = Gradients(**{name: x[2:3].clone() for name, x in gradients.tensors().items()})
    whole = phase1_backward(backend, chunks, gradients)
    for name, one, two in zip(GRADIENTS, phase1_backward(backend, part, given), whole, strict=True):
        assert_same_bits(name, one, two[2:3])
