"""The variants of the decode kernel execute and equal the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch

from sdm_rt.plan.decode import plan_decode
from sdm_rt.plan.device import DeviceModel, preset
from sdm_rt.plan.launch import Launch
from sdm_rt.plan.shapes import BANK_DTYPES, DecodeShape
from sdm_rt.runtime.kernel import KernelSpec
from tests.emulator.harness import coverage
from tests.kernels.decode import decode_on_emulator, decode_oracle
from tests.problems import Problem, make_problem
from tests.tolerances import assert_close, assert_same_bits

ROWS = {1: (3, 5), 2: (33, 2), 4: (4, 65), 8: (129, 7)}  # rows a thread holds -> W, R
# Threads across a row follow from the columns and from how many SMs want a block.
SM_COUNTS = (1, 2, 4)


@dataclass(frozen=True)
class Case:
    """One problem on devices that differ in their number of SMs."""

    problem: Problem
    models: tuple[DeviceModel, ...]

    def launch(self, model: DeviceModel) -> Launch:
        shape = DecodeShape(
            streams=self.problem.streams,
            writes=self.problem.k_idx.shape[2],
            reads=self.problem.q_idx.shape[2],
            head_dim=self.problem.memory.shape[1],
            bank_dtype=str(self.problem.memory.dtype).removeprefix("torch."),
        )
        (launch,) = plan_decode(shape, model).kernels()
        return launch


def cases() -> Iterator[Case]:
    for name, dtype, (W, R) in product(("h100", "a100"), BANK_DTYPES, ROWS.values()):
        vector = 4 if dtype == "float32" else 8
        models = tuple(replace(preset(name), sm_count=count) for count in SM_COUNTS)
        for D in (8 * vector, vector, 1, 2, 3, 9):
            problem = make_problem(1, 1, W, R, D, 12, writes="repeats", gate_per_write=True, seed=D)
            some = models if 8 * vector == D else models[:1]
            yield Case(problem.cast(getattr(torch, dtype)), some)


CASES = list(cases())
SPECS = sorted({case.launch(model).kernel for case in CASES for model in case.models})


def name_of(spec: KernelSpec) -> str:
    return " ".join(f"{name}={value}" for name, value in spec.defines)


@pytest.mark.parametrize("spec", SPECS, ids=name_of)
def test_variant(spec: KernelSpec) -> None:
    for case in CASES:
        models = [model for model in case.models if case.launch(model).kernel == spec]
        runs = [decode_on_emulator(case.problem, model)[0] for model in models]
        want, dtype = decode_oracle(case.problem), case.problem.memory.dtype
        for got in runs:
            assert_close("readings", got.readings, want.readings, dtype)
            assert_close("bank", got.bank, want.bank, dtype)
            assert got.repeats == want.repeats
            # How many columns a block takes changes no bit.
            assert_same_bits("readings", got.readings, runs[0].readings)
            assert_same_bits("bank", got.bank, runs[0].bank)
    assert spec in coverage.specs
