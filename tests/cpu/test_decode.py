"""Decode on CPU tensors: one token of every stream, against the oracle and against the op."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sdm_rt import repeated_write_slots, sdm_decode_step, sdm_write_read
from tests import oracle
from tests.problems import GATES, WRITES, Problem, make_problem
from tests.tolerances import assert_close, assert_same_bits

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def token(problem: Problem, t: int) -> dict[str, Tensor]:
    """Token t of every stream, [P, *]."""
    return {name: x[:, t] for name, x in problem.inputs().items()}


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**20),
    P=st.integers(1, 4),
    tokens=st.integers(1, 6),
    W=st.integers(1, 6),
    R=st.integers(1, 6),
    D=st.sampled_from([1, 3, 8, 30]),
    gates=st.sampled_from(GATES),
    gate_per_write=st.booleans(),
    beta=st.sampled_from(["random", "zero", "one"]),
    writes=st.sampled_from(WRITES),
    dtype=st.sampled_from(DTYPES),
)
def test_token_by_token_equals_the_oracle(
    seed: int,
    P: int,
    tokens: int,
    W: int,
    R: int,
    D: int,
    gates: str,
    gate_per_write: bool,
    beta: str,
    writes: str,
    dtype: torch.dtype,
) -> None:
    options = {"gates": gates, "gate_per_write": gate_per_write, "beta": beta, "writes": writes}
    problem = make_problem(P, tokens, W, R, D, W + 3, seed=seed, **options).cast(dtype)
    wide = problem.cast(torch.float64)
    round_rows = None if dtype == torch.float64 else dtype
    want, want_bank = oracle.write_read(wide.memory, **wide.inputs(), slots=wide.slots, round_rows=round_rows)
    bank = problem.memory.clone()
    got = torch.stack([sdm_decode_step(bank, **token(problem, t)) for t in range(tokens)], dim=1)
    assert got.dtype == dtype
    assert_close("readings", got, want, dtype)
    assert_close("bank", bank, want_bank, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("as_three_dimensions", [False, True])
def test_equals_one_call_of_the_op(dtype: torch.dtype, as_three_dimensions: bool) -> None:
    problem = make_problem(3, 1, 4, 5, 6, 8, writes="repeats", gate_per_write=True).cast(dtype)
    want_bank, bank = problem.memory.clone(), problem.memory.clone()
    want = sdm_write_read(want_bank, **problem.inputs(), **problem.options())
    got = sdm_decode_step(bank, **(problem.inputs() if as_three_dimensions else token(problem, 0)))
    assert got.shape == (3, 6)
    assert_same_bits("readings", got, want)
    assert_same_bits("bank", bank, want_bank)


def test_a_stream_of_length_zero_is_skipped() -> None:
    problem = make_problem(3, 1, 4, 5, 6, 8, lengths=[1, 0, 1])
    bank = problem.memory.clone()
    # The skipped stream holds NaN and indices outside every bank.
    readings = sdm_decode_step(bank, **token(problem, 0), lengths=torch.tensor([1, 0, 1]))
    assert bool((readings[1] == 0).all())
    assert_same_bits("rows of the skipped stream", bank[8:16], problem.memory[8:16])
    for p in (0, 2):
        alone = problem.streams_of(p, p + 1)
        own = alone.memory.clone()
        want = sdm_decode_step(own, **token(alone, 0))
        assert_same_bits("readings", readings[p : p + 1], want)
        assert_same_bits("bank", bank[8 * p : 8 * p + 8], own)


def test_no_stream() -> None:
    problem = make_problem(0, 1, 4, 5, 6, 8)
    assert sdm_decode_step(problem.memory, **token(problem, 0)).shape == (0, 6)


def test_inference_mode_and_int32_and_layouts_change_no_bit() -> None:
    problem = make_problem(2, 3, 4, 5, 6, 8)
    want_bank = problem.memory.clone()
    want = sdm_decode_step(want_bank, **{name: x.contiguous() for name, x in token(problem, 1).items()})
    small = replace(problem, k_idx=problem.k_idx.int(), q_idx=problem.q_idx.int())
    bank = problem.memory.t().contiguous().t()
    with torch.inference_mode():
        got = sdm_decode_step(bank, **token(small, 1))
    assert_same_bits("readings", got, want)
    assert_same_bits("bank", bank, want_bank)


def test_counts_repeated_slots() -> None:
    problem = make_problem(2, 1, 3, 2, 4, 6, writes="one slot")
    repeated_write_slots()
    sdm_decode_step(problem.memory.clone(), **token(problem, 0))
    assert repeated_write_slots() == 4


def test_a_decode_step_counts_as_a_change_of_the_bank() -> None:
    problem = make_problem(2, 3, 3, 2, 4, 6)
    bank = problem.memory.clone()
    arguments = problem.inputs() | {"v": problem.v.clone().requires_grad_()}
    readings = sdm_write_read(bank, **arguments, **problem.options())
    sdm_decode_step(bank, **token(problem, 0))
    with pytest.raises(RuntimeError, match="changed between"):
        readings.sum().backward()
