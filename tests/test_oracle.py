"""The oracle itself: against finite differences, against the chunked form, and in cases worked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import chunked_form, oracle
from tests.problems import GATES, GRADIENTS, WRITES, make_problem, run_oracle
from tests.tolerances import assert_close, assert_same_bits


@pytest.mark.parametrize("writes", WRITES)
@pytest.mark.parametrize("gate_per_write", [False, True])
def test_gradients_equal_finite_differences(writes: str, gate_per_write: bool) -> None:
    problem = make_problem(
        2, 4, 3, 2, 2, 5, gates="some positive", gate_per_write=gate_per_write, writes=writes
    )

    def function(memory, k_val, v, beta, g, q_val):
        return oracle.write_read(
            memory, problem.k_idx, k_val, v, beta, g, problem.q_idx, q_val, slots=5, lengths=[4, 2]
        )

    filled = {name: getattr(problem, name).clone().requires_grad_() for name in GRADIENTS}
    assert torch.autograd.gradcheck(function, tuple(filled.values()))


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**16),
    T=st.integers(1, 13),
    chunk_size=st.sampled_from([1, 2, 3, 4, 16]),
    W=st.integers(1, 4),
    gates=st.sampled_from(GATES),
    writes=st.sampled_from(WRITES),
    gate_per_write=st.booleans(),
    beta=st.sampled_from(["random", "zero", "one"]),
    signed_weights=st.booleans(),
)
def test_equals_the_chunked_form(
    seed, T, chunk_size, W, gates, writes, gate_per_write, beta, signed_weights
) -> None:
    problem = make_problem(
        1, T, W, 3, 4, 6, seed=seed, gates=gates, writes=writes, gate_per_write=gate_per_write, beta=beta,
        signed_weights=signed_weights,
    )  # fmt: skip
    want = run_oracle(problem, bank_gradient=True)
    inputs = {name: x[0] for name, x in problem.inputs().items()}
    readings, bank, chunks = chunked_form.forward(problem.memory, **inputs, chunk_size=chunk_size)
    assert_close("readings", readings, want.readings[0], torch.float64)
    assert_close("bank", bank, want.bank, torch.float64)
    gradients = chunked_form.backward(chunks, problem.grad_readings[0], problem.grad_bank)
    if not gate_per_write:
        gradients["g"] = gradients["g"].sum(1, keepdim=True)
    for name in GRADIENTS:
        got = gradients[name] if name == "memory" else gradients[name][None]
        assert_close(f"gradient of {name}", got, want.gradients[name], torch.float64)


def test_erase_forgets_the_row_and_has_gradient_zero() -> None:
    problem = make_problem(1, 2, 2, 2, 3, 4, gates="-inf", gate_per_write=True, writes="hot")
    result = run_oracle(problem, bank_gradient=True)
    assert torch.equal(result.gradients["g"], torch.zeros(1, 2, 2, dtype=torch.float64))
    written = problem.k_idx[0, 0]
    assert bool((result.gradients["memory"][written] == 0).all()), "an erased row does not depend on its past"
    poisoned = problem.memory.clone()
    poisoned[problem.k_idx[0, 0, 0]] = torch.nan
    after = run_oracle(replace(problem, memory=poisoned), bank_gradient=True)
    assert bool(after.bank[problem.k_idx[0, 0, 0]].isnan().all()), "an erased row that held NaN stays NaN"
    assert torch.equal(after.gradients["g"], torch.zeros(1, 2, 2, dtype=torch.float64))


def test_a_repeated_slot_decays_once_by_the_gate_of_its_first_lane() -> None:
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    readings, bank = oracle.write_read(
        memory=torch.tensor([[8.0]], dtype=torch.float64),
        k_idx=torch.zeros(1, 1, 2, dtype=torch.long),
        k_val=torch.tensor([[[0.25, 0.5]]], dtype=torch.float64),
        v=10 * one,
        beta=0.5 * one,
        g=torch.tensor([[[0.5, 100.0]]], dtype=torch.float64).log(),
        q_idx=torch.zeros(1, 1, 1, dtype=torch.long),
        q_val=2 * one,
        slots=1,
    )
    # 8 decays to 4; r = 0.75 * 4 = 3; delta = 0.5 (10 - 3) = 3.5; the row becomes 4 + 0.75 * 3.5.
    assert bank.item() == 6.625
    assert readings.item() == 13.25


def test_entries_outside_the_stream_are_absent() -> None:
    problem = make_problem(2, 3, 3, 3, 2, 5, gate_per_write=True)
    outside = replace(problem, k_idx=problem.k_idx.clone(), q_idx=problem.q_idx.clone())
    outside.k_idx[0, :, 1] = 7  # a row of the other stream
    outside.k_idx[1, :, 1] = -1
    outside.q_idx[:, :, 2] = 10
    keep_k, keep_q = [0, 2], [0, 1]
    without = replace(
        problem,
        k_idx=problem.k_idx[..., keep_k],
        k_val=problem.k_val[..., keep_k],
        g=problem.g[..., keep_k],
        q_idx=problem.q_idx[..., keep_q],
        q_val=problem.q_val[..., keep_q],
    )
    got, want = run_oracle(outside, bank_gradient=True), run_oracle(without, bank_gradient=True)
    assert_same_bits("readings", got.readings, want.readings)
    assert_same_bits("bank", got.bank, want.bank)
    assert bool((got.gradients["k_val"][..., 1] == 0).all())
    assert bool((got.gradients["q_val"][..., 2] == 0).all())


def test_rows_are_rounded_every_few_tokens_and_after_the_last() -> None:
    problem = make_problem(1, 5, 2, 2, 3, 4)
    rounded = run_oracle(
        problem.cast(torch.bfloat16), bank_gradient=True, round_rows=torch.bfloat16, round_every=2
    )
    assert torch.equal(rounded.bank, rounded.bank.bfloat16().double())
    exact = run_oracle(problem.cast(torch.bfloat16), bank_gradient=True)
    assert_same_bits("first reading", rounded.readings[:, 0], exact.readings[:, 0])
    assert not torch.equal(rounded.readings[:, 2], exact.readings[:, 2])


def test_gated_delta_net_is_the_product_of_its_transitions() -> None:
    torch.manual_seed(0)
    k, q, v = (torch.randn(4, n, dtype=torch.float64) for n in (3, 3, 2))
    alpha, beta = torch.rand(4, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    start = torch.randn(2, 3, dtype=torch.float64)
    outputs, state = oracle.gated_delta_net(start, k, v, q, alpha, beta)
    # The same state column by column of its transpose: forget, then correct what the key retrieves.
    columns = start.T.clone()
    for t in range(4):
        columns = alpha[t] * columns
        columns = columns + beta[t] * torch.outer(k[t], v[t] - columns.T @ k[t])
        assert_close(f"output {t}", outputs[t], columns.T @ q[t], torch.float64)
    assert_close("state", state.T, columns, torch.float64)
