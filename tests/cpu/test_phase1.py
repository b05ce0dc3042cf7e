"""Phase 1 of chunks on CPU tensors: each output by its formula, what is absent, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sdm_rt import Phase1, phase1_forward, repeated_write_slots
from sdm_rt.cpu import phase1 as definition
from tests.bad_calls import Arguments, Bad, assert_refused, bad
from tests.kernels.phase1 import Chunks, make_chunks, phase1_oracle
from tests.problems import GATES, WRITES
from tests.tolerances import assert_close, assert_same_bits

pytestmark = pytest.mark.usefixtures("poisoned_memory")

EXACT = ("payload", "last", "only")


def run(chunks: Chunks) -> Phase1:
    return phase1_forward(**chunks.inputs(), num_memory_slots=chunks.slots, lengths=chunks.lengths)


def check(chunks: Chunks) -> Phase1:
    got, want = run(chunks), phase1_oracle(chunks)
    for name, one, two in zip(Phase1._fields, got, want, strict=True):
        if name in EXACT:
            assert_same_bits(name, one, two)
        else:
            assert one.dtype == torch.float32
            assert_close(name, one, two, torch.float32, nonfinite=name in ("log_k", "log_q", "rex"))
    return got


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**20),
    shape=st.tuples(*(st.integers(1, high) for high in (3, 12, 6, 6))),
    slots=st.integers(8, 30),
    gates=st.sampled_from(GATES),
    gate_per_write=st.booleans(),
    writes=st.sampled_from(WRITES),
    signed_weights=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    ragged=st.booleans(),
)
def test_equals_the_formulas(
    seed: int,
    shape: tuple[int, int, int, int],
    slots: int,
    gates: str,
    gate_per_write: bool,
    writes: str,
    signed_weights: bool,
    dtype: torch.dtype,
    ragged: bool,
) -> None:
    N, C, W, R = shape
    lengths = [(seed + 5 * n) % (C + 1) for n in range(N)] if ragged else None
    check(
        make_chunks(
            N,
            C,
            W,
            R,
            slots,
            dtype,
            seed=seed,
            gates=gates,
            gate_per_write=gate_per_write,
            writes=writes,
            signed_weights=signed_weights,
            lengths=lengths,
        )
    )


@pytest.mark.parametrize(("C", "W", "R"), [(256, 1, 2), (1, 256, 256), (64, 20, 7), (100, 3, 50)])
def test_large_chunks(C: int, W: int, R: int) -> None:
    check(make_chunks(2, C, W, R, 300, seed=C, gates="all kinds", gate_per_write=True))


def test_pairs_in_parts_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = make_chunks(3, 30, 4, 4, 12, writes="hot")
    whole = run(chunks)
    for pairs in (1, 7, 100):
        monkeypatch.setattr(definition, "PAIRS_AT_ONCE", pairs)
        for name, one, two in zip(Phase1._fields, run(chunks), whole, strict=True):
            assert_same_bits(name, one, two)


def test_an_index_outside_the_slots_is_absent() -> None:
    chunks = make_chunks(2, 9, 4, 5, 12, seed=1, writes="repeats")
    for n, token, lane, slot in ((0, 3, 1, -1), (0, 3, 2, 12), (1, 8, 0, 2**40)):
        chunks.k_idx[n, token, lane] = slot
        chunks.q_idx[n, token, lane] = slot
    got = check(chunks)
    assert got.k_eff[0, 3, 1] == got.q_w[0, 3, 2] == got.cpe[1, 8, 0] == 0


def test_without_a_number_of_slots_every_index_counts() -> None:
    chunks = make_chunks(2, 9, 4, 5, 12)
    far = replace(chunks, k_idx=chunks.k_idx + (2**31 - 13), q_idx=chunks.q_idx + (2**31 - 13))
    near, distant = phase1_forward(**chunks.inputs()), phase1_forward(**far.inputs())
    for name, one, two in zip(Phase1._fields, near, distant, strict=True):
        assert_same_bits(name, one, two)


def test_a_repeated_slot_is_counted_and_decays_once() -> None:
    repeated_write_slots()
    got = phase1_forward(
        torch.tensor([[[3, 3, 5]]]),
        torch.tensor([[[3]]]),
        torch.tensor([[[0.25, 0.5, 1.0]]]),
        torch.tensor([[[2.0]]]),
        torch.tensor([[[-1.0, -20.0, -2.0]]]),
    )
    assert repeated_write_slots() == 1
    torch.testing.assert_close(got.log_k, torch.tensor([[[-1.0, -1.0, -2.0]]]))
    torch.testing.assert_close(got.qk, torch.tensor([[[2.0 * 0.75]]]))
    assert got.last.tolist() == [[[False, True, True]]]
    assert got.only.tolist() == [[[False, False, True]]]


def test_a_nan_gate_stays_in_its_slot_and_the_tokens_it_decays() -> None:
    chunks = make_chunks(1, 8, 1, 1, 4, gate_per_write=True)
    chunks.k_idx[0, :, 0] = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1])
    chunks.q_idx[0, :, 0] = torch.tensor([1, 0, 1, 0, 1, 0, 1, 0])
    clean = run(chunks)
    chunks.g[0, 4, 0] = torch.nan
    got = run(chunks)
    even, late = torch.arange(8) % 2 == 0, torch.arange(8) >= 4
    assert got.log_k[0, :, 0].isnan().tolist() == (even & late).tolist()
    assert got.log_q[0, :, 0].isnan().tolist() == (~even & late).tolist()
    assert got.rex[0, :, 0].isnan().tolist() == (even & ~late).tolist()
    assert_same_bits("earlier rows of A", got.a[0, :4], clean.a[0, :4])
    assert_same_bits("the other slot in A", got.a[0, 1::2], clean.a[0, 1::2])
    # A pair wholly after the NaN gate does not contain it.
    assert_same_bits("later pairs", got.a[0, 6, 4], clean.a[0, 6, 4])
    assert got.a[0, 6, 2].isnan()


def test_layouts_and_index_types_give_the_same_bits() -> None:
    chunks = make_chunks(3, 10, 4, 6, 20, torch.bfloat16)
    want = run(chunks)
    turned = replace(
        chunks,
        k_idx=chunks.k_idx.mT.contiguous().mT.int(),
        q_val=chunks.q_val.repeat_interleave(2, 2)[..., ::2],
        g=chunks.g.expand(3, 10, 4),
    )
    for name, one, two in zip(Phase1._fields, run(turned), want, strict=True):
        assert_same_bits(name, one, two)


def good() -> Arguments:
    chunks = make_chunks(2, 5, 3, 4, 10)
    return {**chunks.inputs(), "num_memory_slots": 10, "lengths": torch.tensor([5, 2])}


BAD = [
    bad("indices of rank 2", ValueError, "k_idx...[N, C, W]...got [5, 3]", k_idx=lambda x: x[0]),
    bad("other tokens of reads", ValueError, "q_idx...[2, 5, R]...got [2, 4, 4]", q_idx=lambda x: x[:, :4]),
    bad("no lanes", ValueError, "q_idx...1..256 slots...got 0", q_idx=lambda x: x[..., :0]),
    bad("a weight too many", ValueError, "k_val...[2, 5, 3]...got [2, 5, 4]", k_val=torch.zeros(2, 5, 4)),
    bad("a gate too many", ValueError, "g...[2, 5, 1] or [2, 5, 3]...got [2, 5, 2]", g=torch.zeros(2, 5, 2)),
    bad("a length too few", ValueError, "lengths...[N] = [2]...got [1]", lengths=lambda x: x[:1]),
    bad(
        "a length beyond the chunk",
        ValueError,
        "lengths...0..5...got 6 for stream 1",
        lengths=torch.tensor([5, 6]),
    ),
    bad("float indices", TypeError, "k_idx...int32 or int64...float32", k_idx=lambda x: x.float()),
    bad(
        "float64 weights",
        TypeError,
        "k_val...float32, bfloat16 or float16...float64",
        k_val=lambda x: x.double(),
    ),
    bad(
        "two dtypes of weights",
        TypeError,
        "q_val...dtype of k_val, float32...float16",
        q_val=lambda x: x.half(),
    ),
    bad("float64 gates", TypeError, "g...float32...float64", g=lambda x: x.double()),
    bad("a list", TypeError, "g...expected a torch.Tensor, got list", g=lambda x: x.tolist()),
    bad("too many slots", ValueError, "num_memory_slots...0..2147483647", num_memory_slots=2**31),
    bad("two devices", ValueError, "g...device of k_idx, cpu...got meta", g=lambda x: x.to("meta")),
    bad("needs a gradient", RuntimeError, "q_val...not differentiable", q_val=lambda x: x.requires_grad_()),
]


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.label)
def test_bad_input(case: Bad) -> None:
    assert_refused(phase1_forward, case.change(good()), case)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (1, 257)], ids=str)
def test_chunks_out_of_range(shape: tuple[int, int]) -> None:
    index, value = torch.zeros(*shape, 1, dtype=torch.int64), torch.zeros(*shape, 1)
    with pytest.raises(ValueError, match=r"^k_idx: expected (at least one chunk|C in 1\.\.256)"):
        phase1_forward(index, index, value, value, value)
