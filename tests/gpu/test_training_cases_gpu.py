"""The ten cases of the speed comparison, cut to 512 tokens: every gradient against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sdm_rt.bench.cases import CASES, Case, Inputs, make_inputs
from sdm_rt.bench.training import training_step
from tests.problems import GRADIENTS
from tests.sparse_chunked_form import gradients
from tests.tolerances import SNAPSHOT_GRADIENT

pytestmark = pytest.mark.gpu

# Relative error by norm. A bfloat16 gradient is compared with the definition that rounds rows of the bank and
# of its gradient where the kernels do, and with the one that rounds nothing.
FLOAT32 = 1e-6
BFLOAT16_ROUNDED, BFLOAT16 = 4e-3, 6e-3
APPROXIMATE = ("k_val", "g", "q_val")  # with a quantized snapshot


def errors(
    case: Case, inputs: Inputs, memory: Tensor, got: dict[str, Tensor], round_rows: torch.dtype | None
) -> dict[str, float]:
    """Relative errors of all streams together; the reference of one stream lives at a time."""
    names = ("k_idx", "k_val", "v", "beta", "g", "q_idx", "q_val")
    squares = {name: torch.zeros(2, dtype=torch.float64, device=memory.device) for name in GRADIENTS}
    for stream in range(case.streams):
        first = stream * case.slots
        tokens = {
            name: x[stream] - first if name.endswith("idx") else x[stream].double()
            for name, x in zip(names, (x.detach() for x in inputs.tokens()), strict=True)
        }
        bank = memory[first : first + case.slots].double()
        grad_readings = inputs.grad_readings.view(case.streams, case.tokens, -1)[stream].double()
        want = gradients(bank, tokens, grad_readings, case.chunk, round_rows)
        want["g"] = want["g"].sum(1, keepdim=True)
        for name, tensor in want.items():
            own = got[name][first : first + case.slots] if name == "memory" else got[name][stream]
            squares[name] += torch.stack([(own.double() - tensor).square().sum(), tensor.square().sum()])
    return {name: float((error / norm).sqrt()) for name, (error, norm) in squares.items()}


@pytest.mark.parametrize("name", CASES)
def test_case_against_float64(name: str) -> None:
    case = replace(CASES[name], tokens=512)
    inputs = make_inputs(case, torch.device("cuda"), seed=3)
    memory = inputs.memory.clone()
    for leaf in GRADIENTS:
        getattr(inputs, leaf).requires_grad_()
    training_step(case, inputs)
    got = {leaf: getattr(inputs, leaf).grad for leaf in GRADIENTS}
    if case.snapshot == "none":
        assert torch.equal(inputs.memory.detach().view(torch.uint8), memory.view(torch.uint8))
    if case.dtype == torch.float32:
        bounds = [(None, FLOAT32)]
    else:
        bounds = [(case.dtype, BFLOAT16_ROUNDED), (None, BFLOAT16)]
    for round_rows, bound in bounds:
        for leaf, error in errors(case, inputs, memory, got, round_rows).items():
            if case.snapshot != "none" and leaf in APPROXIMATE:
                assert error <= SNAPSHOT_GRADIENT[case.snapshot].relative, leaf
            else:
                assert error <= bound, f"{leaf}, rows rounded to {round_rows}: {error:.2e}"
