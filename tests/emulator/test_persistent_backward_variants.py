"""The variants of the persistent backward execute and give the bits of the stepwise schedule."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch

from sdm_rt.plan import persistent_backward
from sdm_rt.plan.backward import plan_backward
from sdm_rt.plan.column_slices import NARROW_SLICE, WIDE_SLICE, PersistentConfig
from sdm_rt.plan.device import preset
from sdm_rt.plan.persistent_backward import COLUMN_SUM_KERNEL
from sdm_rt.plan.shapes import BANK_DTYPES, SNAPSHOTS, WriteReadShape, dtype_bytes
from sdm_rt.runtime.kernel import KernelSpec
from tests.emulator.build import PARALLEL_BUILDS
from tests.kernels.backward import train_on_emulator
from tests.problems import GRADIENTS, make_problem
from tests.tolerances import assert_same_bits

W, R, T, S, CHUNK = 3, 2, 3, 8, 2
WORD_BYTES = 16
MODEL = preset("h100")


@dataclass(frozen=True)
class Case:
    """One call."""

    dtype: str
    wide_gradient: bool
    D: int
    snapshot: str

    def kernel(self) -> KernelSpec:
        shape = WriteReadShape(
            1,
            T,
            CHUNK,
            W,
            R,
            self.D,
            S,
            bank_dtype=self.dtype,
            gradient_bank_dtype="float32" if self.wide_gradient else self.dtype,
            snapshot=self.snapshot,
            alignment=min(WORD_BYTES, (self.D & -self.D) * dtype_bytes(self.dtype)),
        )
        return plan_backward(shape, MODEL, "persistent").kernels()[0].kernel


def cases() -> Iterator[Case]:
    for dtype in BANK_DTYPES:
        word = WORD_BYTES // dtype_bytes(dtype)
        for D in (1, word, WIDE_SLICE // dtype_bytes(dtype) + word):
            for wide_gradient in {False, dtype != "float32"}:
                for snapshot in SNAPSHOTS:
                    if (dtype, snapshot) != ("bfloat16", "bf16"):  # the kernel of "none"
                        yield Case(dtype, wide_gradient, D, snapshot)


CASES = list(cases())
SPECS = sorted({COLUMN_SUM_KERNEL, *(case.kernel() for case in CASES)})


def check(case: Case) -> None:
    problem = make_problem(1, T, W, R, case.D, S, writes="repeats", gate_per_write=True, seed=case.D)
    problem = problem.cast(getattr(torch, case.dtype))
    results = []
    for schedule in ("stepwise", "persistent"):
        trained, plan = train_on_emulator(
            problem,
            CHUNK,
            MODEL,
            snapshot=case.snapshot,
            grad_bank_fp32=case.wide_gradient,
            schedule=schedule,
            builds=("access",),
        )
        results.append(trained)
    assert plan.kernels()[0].kernel == case.kernel()
    stepwise, persistent = results
    for name in GRADIENTS:
        assert_same_bits(f"{case}: {name}", persistent.gradients[name], stepwise.gradients[name])
    assert_same_bits(f"{case}: the restored bank", persistent.restored, stepwise.restored)


@pytest.mark.parametrize(("dtype", "D"), sorted({(case.dtype, case.D) for case in CASES}))
def test_variants(dtype: str, D: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By clusters of one block, which are the same kernels; `tests/kernels` has those of more."""
    slice_bytes = WIDE_SLICE if D * dtype_bytes(dtype) > WIDE_SLICE else NARROW_SLICE
    monkeypatch.setattr(persistent_backward, "configs", lambda *_: iter([PersistentConfig(slice_bytes, 1)]))
    chosen = [case for case in CASES if (case.dtype, case.D) == (dtype, D)]
    with ThreadPoolExecutor(PARALLEL_BUILDS) as pool:
        list(pool.map(check, chosen))
