"""The reference for real sizes against the one that has no limits."""

from __future__ import annotations

import pytest
import torch

from tests import chunked_form, sparse_chunked_form
from tests.problems import make_problem
from tests.tolerances import relative_error


@pytest.mark.parametrize("round_rows", [None, torch.bfloat16], ids=["exact", "rounded"])
@pytest.mark.parametrize("gate_per_write", [False, True])
@pytest.mark.parametrize("writes", ["distinct", "hot"])
def test_equals_the_dense_form(writes: str, gate_per_write: bool, round_rows: torch.dtype | None) -> None:
    problem = make_problem(1, 37, 5, 6, 7, 30, writes=writes, gate_per_write=gate_per_write)
    if round_rows is not None:
        problem = problem.cast(round_rows).cast(torch.float64)
    tokens = {name: x[0] for name, x in problem.inputs().items()}
    _, _, chunks = chunked_form.forward(problem.memory, **tokens, chunk_size=16, round_rows=round_rows)
    grad_bank = torch.zeros_like(problem.memory)
    want = chunked_form.backward(chunks, problem.grad_readings[0], grad_bank, round_rows)
    got = sparse_chunked_form.gradients(
        problem.memory.clone(), tokens, problem.grad_readings[0], 16, round_rows
    )
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert relative_error(got[name], tensor) <= 1e-11, name
