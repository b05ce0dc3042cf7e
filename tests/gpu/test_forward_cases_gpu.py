"""The ten cases of the speed comparison, cut to 512 tokens, against float64: readings and final bank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sdm_rt.bench.cases import CASES, Case, Inputs, make_inputs
from sdm_rt.bench.forward import no_grad_call
from sdm_rt.cpu.recurrence import Streams, Tokens, advance
from tests.tolerances import relative_error

pytestmark = pytest.mark.gpu

# Relative error by norm; the first against rows rounded at the same chunk ends, the second without rounding.
BOUNDS = {torch.float32: (5e-7, 5e-7), torch.bfloat16: (3e-3, 4e-3)}


def recurrence(case: Case, inputs: Inputs, rounded: bool) -> tuple[Tensor, Tensor]:
    """The definition in float64 (tests/cpu holds it to the oracle), rows rounded at chunk ends or never."""
    bank = inputs.memory.double()
    k_idx, k_val, v, beta, g, q_idx, q_val = (x.flatten(0, 1) for x in inputs.tokens())
    tokens = Tokens(k_idx, k_val.double(), v.double(), beta.double(), g.double(), q_idx, q_val.double())
    readings = torch.zeros(case.streams * case.tokens, case.head_dim, dtype=torch.float64, device=bank.device)
    for first in range(0, case.tokens, case.chunk):
        length = min(case.chunk, case.tokens - first)
        starts = [stream * case.tokens + first for stream in range(case.streams)]
        streams = Streams.sorted_by_length(starts, [length] * case.streams, bank.device)
        readings += advance(bank, tokens, streams, None)[0]
        if rounded:
            rows = k_idx.view(case.streams, -1, case.lanes)[:, first : first + length].reshape(-1)
            bank[rows] = bank[rows].to(case.dtype).double()
    return readings, bank


@pytest.mark.parametrize("name", CASES)
def test_case_against_float64(name: str) -> None:
    case = replace(CASES[name], tokens=512)
    inputs = make_inputs(case, torch.device("cuda"), seed=3)
    wants = [recurrence(case, inputs, rounded) for rounded in (True, False)]
    readings = no_grad_call(case, inputs)
    for bound, (want, bank) in zip(BOUNDS[case.dtype], wants, strict=True):
        assert relative_error(readings, want) <= bound
        assert relative_error(inputs.memory, bank) <= bound
