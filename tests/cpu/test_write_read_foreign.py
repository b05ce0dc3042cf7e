"""Arrays of other libraries, by ``__dlpack__``: NumPy's here; CuPy's in tests/gpu."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sdm_rt import sdm_write_read
from tests.problems import Problem, make_problem
from tests.tolerances import assert_same_bits


@pytest.fixture
def problem() -> Problem:
    return make_problem(2, 9, 3, 4, 6, 8, lengths=[9, 4]).cast(torch.float32)


def test_numpy_arrays_give_the_tensors_of_tensors(problem: Problem) -> None:
    bank = problem.memory.clone()
    want = sdm_write_read(bank, **problem.inputs(), **problem.options())
    memory = problem.memory.numpy().copy()
    arrays = {name: x.numpy() for name, x in problem.inputs().items()}
    options = problem.options() | {"lengths": np.array(problem.lengths)}
    readings = sdm_write_read(memory, **arrays, **options)
    assert_same_bits("readings", readings, want)
    assert_same_bits("the bank, advanced in place", torch.from_numpy(memory), bank)


def test_some_arrays_among_tensors_and_the_final_bank(problem: Problem) -> None:
    want = sdm_write_read(problem.memory, **problem.inputs(), **problem.options(), return_final_bank=True)
    inputs = problem.inputs() | {"v": problem.v.numpy()}
    got = sdm_write_read(problem.memory, **inputs, **problem.options(), return_final_bank=True)
    for name, one, other in zip(("readings", "bank"), got, want, strict=True):
        assert_same_bits(name, one, other)


def test_gradients_reach_the_tensors_among_arrays(problem: Problem) -> None:
    v = problem.v.clone().requires_grad_()
    inputs = problem.inputs() | {"v": v, "k_val": problem.k_val.numpy()}
    sdm_write_read(problem.memory.clone(), **inputs, **problem.options()).sum().backward()
    assert v.grad is not None
    assert v.grad[0].abs().sum() > 0
