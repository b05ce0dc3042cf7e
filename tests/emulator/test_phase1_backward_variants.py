"""The variants of Phase-1 backward's kernels execute and equal their definition."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from sdm_rt.plan.phase1_backward import phase1_backward_gates_kernel, phase1_backward_pairs_kernel
from sdm_rt.plan.shapes import BANK_DTYPES, WriteReadShape
from tests.kernels.phase1 import make_chunks
from tests.kernels.phase1_backward import (
    GRADIENTS,
    ROUNDED,
    backward_definition,
    make_gradients,
    phase1_backward,
    planned_phase1_backward,
)
from tests.tolerances import assert_close

CASES = list(product(BANK_DTYPES, (False, True)))
SPECS = sorted(
    {phase1_backward_pairs_kernel(batch) for batch in (False, True)}
    | {
        phase1_backward_gates_kernel(WriteReadShape(1, 1, 1, 1, 1, 1, 1, bank_dtype=dtype))
        for dtype in BANK_DTYPES
    }
)


@pytest.mark.parametrize(("dtype", "det"), CASES)
def test_variants(dtype: str, det: bool) -> None:
    chunks = make_chunks(2, 9, 3, 2, 6, getattr(torch, dtype), writes="repeats", gate_per_write=True)
    gradients = make_gradients(2, 9, 3, 2)
    got = phase1_backward("emulator", chunks, gradients, det=det, builds=("access",))
    for name, one, want in zip(GRADIENTS, got, backward_definition(chunks, gradients), strict=True):
        assert_close(name, one, want, one.dtype, tolerance=ROUNDED[one.dtype])


def test_the_cases_hold_every_variant() -> None:
    planned = set()
    for dtype, det in CASES:
        chunks = make_chunks(1, 1, 1, 1, 1, getattr(torch, dtype))
        calls, _, _ = planned_phase1_backward(chunks, make_gradients(1, 1, 1, 1), det=det)
        planned |= {call.launch.kernel for call in calls if call.launch.name != "phase1_scan"}
    assert sorted(planned) == SPECS
