"""Operands in the memory of the bank that a call overwrites, on a GPU: it means their values at its start."""

from __future__ import annotations

import pytest

from tests.cpu.test_operands_in_the_bank import (
    NAMES,
    assert_equal_calls,
    assert_equal_decode_steps,
    assert_equal_steps,
    problem_of,
)

pytestmark = pytest.mark.gpu


@pytest.mark.usefixtures("schedule_runs")
@pytest.mark.parametrize("schedule", ["stepwise", "persistent"])
@pytest.mark.parametrize("name", NAMES)
def test_calls_and_steps(name: str, schedule: str) -> None:
    assert_equal_calls(problem_of(40), name, "cuda", chunk_size=16, schedule=schedule)
    assert_equal_steps(problem_of(40), name, "cuda", chunk_size=16, schedule=schedule)


@pytest.mark.parametrize("name", NAMES)
def test_decode_steps(name: str) -> None:
    assert_equal_decode_steps(name, "cuda")
