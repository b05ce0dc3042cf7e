"""The variants of the backward's kernels execute and equal their definition.

Variants that differ in macros of PDL alone are one library here; they run as one, beside a test that each use
of PDL occurs.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch

from sdm_rt.plan.backward import plan_backward
from sdm_rt.plan.device import DeviceModel, preset
from sdm_rt.plan.launch import Launch
from sdm_rt.plan.shapes import BANK_DTYPES, SNAPSHOTS, WriteReadShape, dtype_bytes
from tests.emulator.build import PARALLEL_BUILDS
from tests.kernels.backward import backward_definition, train_on_emulator
from tests.problems import GRADIENTS, Problem, make_problem
from tests.tolerances import SNAPSHOT_GRADIENT, TOLERANCES, relative_error

W, R, T, S, CHUNK = 3, 2, 3, 8, 2
WARP, WORD_BYTES = 32, 16
APPROXIMATE = ("k_val", "g", "q_val")  # with a quantized snapshot
ONE_SM = {name: replace(preset(name), sm_count=1) for name in ("h100", "a100")}
# With one, two and many SMs the products take blocks of 64, 32 and 16 columns.
MODELS = (
    ONE_SM["a100"],
    *(replace(preset(name), sm_count=2) for name in ("h100", "a100")),
    *(preset(name) for name in ("h100", "a100")),
)


@dataclass(frozen=True)
class Case:
    """One training call on one device."""

    dtype: str
    D: int
    model: DeviceModel
    wide_gradient: bool = False
    snapshot: str = "none"

    def launches(self) -> tuple[Launch, ...]:
        gradient = "float32" if self.wide_gradient else self.dtype
        alignment = min(WORD_BYTES, (self.D & -self.D) * dtype_bytes(self.dtype))
        shape = WriteReadShape(
            *(1, T, CHUNK, W, R, self.D, S, self.dtype, gradient),
            snapshot=self.snapshot,
            alignment=alignment,
        )
        plan = plan_backward(shape, self.model, "stepwise")
        return tuple(one for one in plan.kernels() if "phase1" not in one.name)

    def problem(self) -> Problem:
        problem = make_problem(1, T, W, R, self.D, S, writes="repeats", gate_per_write=True, seed=self.D)
        return problem.cast(getattr(torch, self.dtype))


def cases() -> Iterator[Case]:
    for dtype in BANK_DTYPES:
        word = WORD_BYTES // dtype_bytes(dtype)
        # Words of a row: half a warp's, a warp's, two and four of each lane.
        for words in (0, WARP // 2, WARP, 2 * WARP):
            first = words * word
            for D in (first + word, first + 1):
                yield Case(dtype, D, ONE_SM["h100"])
                for snapshot in SNAPSHOTS[1:]:
                    yield Case(dtype, D, ONE_SM["h100"], snapshot=snapshot)
                if dtype == "float32" or words == 2 * WARP:
                    continue
                for snapshot in SNAPSHOTS:
                    yield Case(dtype, D, ONE_SM["h100"], True, snapshot)
        yield from (Case(dtype, 40, model) for model in MODELS)


CASES = list(dict.fromkeys(cases()))
SPECS = sorted({launch.kernel for case in CASES for launch in case.launches()})


def check(case: Case) -> None:
    problem = case.problem()
    dtype = problem.memory.dtype
    got, _ = train_on_emulator(
        problem,
        CHUNK,
        case.model,
        snapshot=case.snapshot,
        grad_bank_fp32=case.wide_gradient,
        builds=("access",),
    )
    rounding = None if dtype == torch.float32 else dtype
    want = backward_definition(
        problem,
        CHUNK,
        bank_gradient=True,
        round_bank=rounding,
        round_gradient=None if case.wide_gradient else rounding,
    )
    for name in GRADIENTS:
        bound = TOLERANCES[dtype].relative
        if name in APPROXIMATE and case.snapshot != "none":
            bound += 4 * SNAPSHOT_GRADIENT[case.snapshot].relative  # of few values, which may cancel
        error = relative_error(got.gradients[name], want[name])
        assert error <= bound, f"{case}: gradient of {name}: {error:.2e}"


@pytest.mark.parametrize(("dtype", "D"), sorted({(case.dtype, case.D) for case in CASES}))
def test_variants(dtype: str, D: int) -> None:
    chosen = [case for case in CASES if (case.dtype, case.D) == (dtype, D)]
    with ThreadPoolExecutor(PARALLEL_BUILDS) as pool:
        list(pool.map(check, chosen))


def test_the_cases_hold_every_use_of_pdl() -> None:
    uses = {(one.entry, one.pdl) for case in CASES for one in case.launches()}
    behind = {(name, pdl) for name in ("du_update", "phase_a", "gds", "gwr") for pdl in (False, True)}
    assert uses == behind | {("gram_backward", False)}
