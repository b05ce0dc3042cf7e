"""The op on CPU tensors against the oracle: readings, final bank and all six gradients, in both forms."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sdm_rt import sdm_write_read
from tests import oracle
from tests.problems import GATES, GRADIENTS, WRITES, Problem, Result, make_problem, run_op, run_oracle
from tests.tolerances import assert_close, assert_same_bits

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def assert_equals_oracle(got: Result, want: Result, dtype: torch.dtype) -> None:
    assert_close("readings", got.readings, want.readings, dtype)
    assert_close("final bank", got.bank, want.bank, dtype)
    for name in GRADIENTS:
        assert_close(f"gradient of {name}", got.gradients[name], want.gradients[name], dtype)


def check(problem: Problem, dtype: torch.dtype, **options: object) -> None:
    """Both forms of the call, and the packed layout where streams are ragged, against the oracle."""
    rounded = problem.cast(dtype)
    round_rows = None if dtype == torch.float64 else dtype
    for return_final_bank in (False, True):
        want = run_oracle(rounded, bank_gradient=return_final_bank, round_rows=round_rows)
        for packed in (False, True) if problem.lengths is not None else (False,):
            got = run_op(rounded, return_final_bank=return_final_bank, packed=packed, **options)
            assert_equals_oracle(got, want, dtype)


@st.composite
def problems(draw: st.DrawFn, max_tokens: int = 24) -> Problem:
    P, T = draw(st.integers(1, 4)), draw(st.integers(1, max_tokens))
    W, R = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    writes = draw(st.sampled_from(WRITES))
    lengths = draw(st.none() | st.lists(st.integers(0, T), min_size=P, max_size=P))
    return make_problem(
        P,
        T,
        W,
        R,
        D=draw(st.sampled_from([1, 2, 3, 8, 17])),
        S=W + draw(st.sampled_from([1, 2, 7, 40])),
        seed=draw(st.integers(0, 2**20)),
        gates=draw(st.sampled_from(GATES)),
        gate_per_write=draw(st.booleans()),
        beta=draw(st.sampled_from(["random", "zero", "one"])),
        writes=writes,
        signed_weights=draw(st.booleans()),
        lengths=lengths,
    )


@settings(max_examples=250)
@given(problem=problems())
def test_float64(problem: Problem) -> None:
    check(problem, torch.float64)


@settings(max_examples=40)
@given(problem=problems())
def test_float32(problem: Problem) -> None:
    check(problem, torch.float32)


@settings(max_examples=25)
@given(problem=problems())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(problem: Problem, dtype: torch.dtype) -> None:
    check(problem, dtype)


# Case 15: every length around a chunk; the CPU has no chunks, so chunk_size must change no bit either.
@pytest.mark.parametrize("T", [1, 2, 7, 8, 9, 16, 17])
def test_lengths_around_the_chunk(T: int) -> None:
    problem = make_problem(3, T, 4, 5, 6, 32, seed=T)
    check(problem, torch.float64, chunk_size=8)
    for return_final_bank in (False, True):
        got = run_op(problem, return_final_bank=return_final_bank, chunk_size=8)
        want = run_op(problem, return_final_bank=return_final_bank, chunk_size=256)
        assert_same_bits("readings", got.readings, want.readings)
        assert_same_bits("final bank", got.bank, want.bank)
        for name in GRADIENTS:
            assert_same_bits(f"gradient of {name}", got.gradients[name], want.gradients[name])


# Case 16: every gate, one gate a token and one a write, each with beta 0 and 1.
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("gate_per_write", [False, True])
@pytest.mark.parametrize("beta", ["zero", "one"])
@pytest.mark.parametrize("writes", ["distinct", "one slot"])
def test_gates(gates: str, gate_per_write: bool, beta: str, writes: str) -> None:
    problem = make_problem(
        2, 12, 3, 4, 5, 9, gates=gates, gate_per_write=gate_per_write, beta=beta, writes=writes
    )
    check(problem, torch.float64)
    check(problem, torch.float32)


def test_a_decay_below_the_float32_range_is_zero() -> None:
    # exp(-88) is a subnormal float32 number: times a row of 1e36 it would still show beside the write.
    problem = make_problem(1, 1, 1, 1, 5, 3, gates="-88").cast(torch.float32)
    problem = replace(problem, memory=problem.memory * 1e36)
    row = int(problem.k_idx)
    got = run_op(problem, return_final_bank=True)
    assert_same_bits("row", got.bank[row], problem.k_val[0, 0] * (problem.beta[0, 0] * problem.v[0, 0]))
    erased = run_op(replace(problem, g=torch.full_like(problem.g, -torch.inf)), return_final_bank=True)
    assert_same_bits("row", got.bank[row], erased.bank[row])


def test_erased_gates_have_gradient_zero_beside_a_real_one() -> None:
    problem = make_problem(2, 10, 3, 3, 4, 6, gates="some -inf", gate_per_write=True)
    gradient = run_op(problem, return_final_bank=True).gradients["g"]
    erased = problem.g.isneginf()
    assert 0 < int(erased.sum()) < erased.numel()
    assert bool((gradient[erased] == 0).all())
    assert bool((gradient[~erased] != 0).all())


# Case 18: few slots shared by all tokens, repeats within a token, reads of rows never written.
@pytest.mark.parametrize("writes", WRITES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_collisions_and_repeats(writes: str, dtype: torch.dtype) -> None:
    check(make_problem(2, 20, 4, 4, 8, 24, writes=writes, gate_per_write=True), dtype)


def test_reads_of_rows_never_written() -> None:
    problem = make_problem(2, 6, 2, 3, 4, 12)
    first_row = torch.arange(2)[:, None, None] * 12
    problem = replace(problem, k_idx=first_row + problem.k_idx % 6, q_idx=first_row + 6 + problem.q_idx % 6)
    check(problem, torch.float64)


# Case 21.
@pytest.mark.parametrize("D", [1, 3, 30, 100, 1000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_odd_head_dims(D: int, dtype: torch.dtype) -> None:
    check(make_problem(2, 5, 3, 4, D, 10, seed=D), dtype)


@pytest.mark.parametrize(
    ("W", "R", "S"), [(1, 1, 1), (1, 7, 5), (7, 1, 7), (16, 16, 16), (256, 256, 256), (256, 3, 300)]
)
def test_odd_slot_counts(W: int, R: int, S: int) -> None:
    check(make_problem(2, 3, W, R, 4, S, gate_per_write=True), torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_few_hundred_tokens(dtype: torch.dtype) -> None:
    check(make_problem(2, 200, 16, 16, 16, 64, lengths=[200, 131]), dtype)


# The functional form alone: gradcheck runs many backwards through one call, the in-place form allows one.
@pytest.mark.parametrize("gates", ["mild", "some -inf"])
@pytest.mark.parametrize("writes", ["distinct", "repeats"])
def test_gradcheck(gates: str, writes: str) -> None:
    problem = make_problem(2, 5, 3, 2, 3, 5, gates=gates, gate_per_write=True, writes=writes, lengths=[5, 3])
    finite = problem.g.isfinite()

    def function(memory, k_val, v, beta, q_val, finite_gates):
        g = problem.g.masked_scatter(finite, finite_gates)
        return sdm_write_read(
            memory, problem.k_idx, k_val, v, beta, g, problem.q_idx, q_val,
            return_final_bank=True, **problem.options(),
        )  # fmt: skip

    # gradcheck compares padded values too, where a NaN has no difference quotient.
    values = [getattr(problem, name).nan_to_num(0.5) for name in ("memory", "k_val", "v", "beta", "q_val")]
    inputs = [x.clone().requires_grad_() for x in (*values, problem.g[finite])]
    assert torch.autograd.gradcheck(function, inputs)


def test_a_write_of_weight_one_and_beta_one_replaces_the_row() -> None:
    problem = make_problem(1, 4, 1, 1, 5, 3, beta="one", writes="one slot")
    one = torch.ones_like(problem.k_val)
    problem = replace(problem, k_val=one, q_val=one, q_idx=problem.k_idx)
    got = run_op(problem, return_final_bank=False)
    assert_close("readings", got.readings, problem.v, torch.float64)
    assert float(got.gradients["g"].abs().max()) < 1e-14
    assert float(got.gradients["memory"].abs().max()) < 1e-14


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_wider_inputs_are_rounded_to_the_bank_and_get_their_own_gradient_dtype(dtype: torch.dtype) -> None:
    problem = make_problem(2, 8, 3, 4, 6, 12)
    mixed = replace(problem, memory=problem.memory.to(dtype), grad_bank=problem.grad_bank.to(dtype))
    mixed = replace(mixed, grad_readings=problem.grad_readings.to(dtype))
    got = run_op(mixed, return_final_bank=True)
    want = run_op(problem.cast(dtype), return_final_bank=True)
    assert_same_bits("readings", got.readings, want.readings)
    assert_same_bits("final bank", got.bank, want.bank)
    for name in GRADIENTS:
        wide = got.gradients[name]
        assert wide.dtype == (dtype if name == "memory" else torch.float64)
        narrow = want.gradients[name]
        assert_same_bits(f"gradient of {name}", wide.to(narrow.dtype), narrow)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gates_are_used_in_float32(dtype: torch.dtype) -> None:
    problem = make_problem(2, 8, 3, 4, 6, 12).cast(dtype, gates=dtype)
    want = run_op(problem.cast(dtype), return_final_bank=True)
    got = run_op(problem, return_final_bank=True)
    assert_same_bits("readings", got.readings, want.readings)
    assert_same_bits("gradient of g", got.gradients["g"], want.gradients["g"].to(dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_segments_chain_with_full_gradients(dtype: torch.dtype) -> None:
    problem = make_problem(2, 21, 3, 4, 5, 8, gate_per_write=True).cast(dtype)
    want = run_op(problem, return_final_bank=True)
    leaves = {name: getattr(problem, name).clone().requires_grad_() for name in GRADIENTS}
    bank, readings = leaves["memory"], []
    for start, stop in ((0, 5), (5, 6), (6, 21)):
        part = {name: leaves.get(name, x)[:, start:stop] for name, x in problem.inputs().items()}
        y, bank = sdm_write_read(bank, **part, return_final_bank=True, **problem.options())
        readings.append(y.view(2, stop - start, 5))
    got = torch.cat(readings, dim=1)
    torch.autograd.backward([got, bank], [problem.grad_readings, problem.grad_bank])
    assert_same_bits("readings", got, want.readings)
    assert_same_bits("final bank", bank, want.bank)
    for name, leaf in leaves.items():
        assert_close(f"gradient of {name}", leaf.grad, want.gradients[name], dtype)
    if dtype == torch.float64:
        assert_equals_oracle(want, run_oracle(problem, bank_gradient=True), dtype)


@pytest.mark.parametrize("packed", [False, True])
def test_shared_bank(packed: bool) -> None:
    separate = make_problem(3, 9, 3, 4, 5, 10, lengths=[9, 0, 4], gate_per_write=True)
    shared = replace(separate, slots=0)
    for return_final_bank in (False, True):
        want = run_op(separate, return_final_bank=return_final_bank)
        got = run_op(shared, return_final_bank=return_final_bank, packed=packed, shared_bank=True)
        assert_equals_oracle(got, want, torch.float64)
        assert_equals_oracle(got, run_oracle(shared, bank_gradient=return_final_bank), torch.float64)


def test_shared_bank_rows_that_are_only_read_may_be_common() -> None:
    problem = replace(make_problem(2, 5, 2, 2, 3, 6), slots=0)
    common = torch.tensor([5, 11])  # taken from the written rows below
    k_idx = torch.where(problem.k_idx % 6 == 5, problem.k_idx - 1, problem.k_idx)
    problem = replace(problem, k_idx=k_idx, q_idx=common.expand(2, 5, 2))
    got = run_op(problem, return_final_bank=True, shared_bank=True)
    assert_equals_oracle(got, run_oracle(problem, bank_gradient=True), torch.float64)


# The dense limit: every slot selected, keys and queries of norm 1.
@pytest.mark.parametrize("gates", ["zero", "mild", "-inf"])
def test_dense_limit_is_gated_delta_net(gates: str) -> None:
    T, d_k, d_v = 40, 8, 6
    problem = make_problem(1, T, d_k, d_k, d_v, d_k, gates=gates)
    every = torch.arange(d_k).expand(1, T, d_k)
    torch.manual_seed(0)
    k_val, q_val = (
        torch.nn.functional.normalize(torch.randn(1, T, d_k, dtype=torch.float64), dim=-1) for _ in range(2)
    )
    problem = replace(problem, k_idx=every, q_idx=every, k_val=k_val, q_val=q_val)
    got = run_op(problem, return_final_bank=True)

    state = problem.memory.T.clone().requires_grad_()  # [d_v, d_k]
    k, v, q, beta = (
        x.clone().requires_grad_() for x in (k_val[0], problem.v[0], q_val[0], problem.beta[0, :, 0])
    )
    g = problem.g[0, :, 0].clone().requires_grad_()
    outputs, final = oracle.gated_delta_net(state, k, v, q, g.exp(), beta)
    loss = (outputs * problem.grad_readings[0]).sum() + (final.T * problem.grad_bank).sum()
    gradients = torch.autograd.grad(loss, [state, k, v, beta, g, q])
    want = Result(
        outputs[None],
        final.T,
        {
            "memory": gradients[0].T,
            "k_val": gradients[1][None],
            "v": gradients[2][None],
            "beta": gradients[3][None, :, None],
            "g": gradients[4][None, :, None],
            "q_val": gradients[5][None],
        },
    )
    assert_equals_oracle(got, want, torch.float64)
