"""The variants of the persistent forward execute and equal the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from sdm_rt.plan import persistent
from sdm_rt.plan.column_slices import NARROW_SLICE, WIDE_SLICE, PersistentConfig
from sdm_rt.plan.device import preset
from sdm_rt.plan.forward import plan_forward
from sdm_rt.plan.shapes import BANK_DTYPES, SNAPSHOTS, WriteReadShape, dtype_bytes
from sdm_rt.plan.step_plan import StepPlan
from sdm_rt.runtime.kernel import KernelSpec
from tests.emulator.build import PARALLEL_BUILDS
from tests.emulator.harness import run
from tests.kernels.forward import forward_oracle, planned_forward
from tests.problems import make_problem
from tests.tolerances import TOLERANCES, relative_error

W, R, T, S, CHUNK = 3, 2, 3, 8, 2
WORD_BYTES = 16
MODEL = preset("h100")


def walk_of(plan: StepPlan) -> KernelSpec:
    """Return the kernel that walks the steps."""
    return next(launch.kernel for launch in plan.kernels() if launch.name == "persistent_forward")


@dataclass(frozen=True)
class Case:
    """One call."""

    dtype: str
    D: int
    training: bool
    snapshot: str

    def kernel(self) -> KernelSpec:
        alignment = min(WORD_BYTES, (self.D & -self.D) * dtype_bytes(self.dtype))
        shape = WriteReadShape(
            1,
            T,
            CHUNK,
            W,
            R,
            self.D,
            S,
            bank_dtype=self.dtype,
            snapshot=self.snapshot,
            training=self.training,
            alignment=alignment,
        )
        return walk_of(plan_forward(shape, MODEL, "persistent"))


def cases() -> Iterator[Case]:
    for dtype in BANK_DTYPES:
        largest = WORD_BYTES // dtype_bytes(dtype)
        wide = WIDE_SLICE // dtype_bytes(dtype) + largest
        widths = [largest, wide, *(v for v in (1, 2, 4) if v < largest)]
        for D in widths:
            yield Case(dtype, D, False, "none")
            yield from (Case(dtype, D, True, snapshot) for snapshot in SNAPSHOTS)


CASES = list(cases())
RINGS = persistent.RINGS


@contextmanager
def under_way(ring: int) -> Iterator[None]:
    """Plans have ``ring`` batches of rows under way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(persistent, "RINGS", (ring,))
        yield


def specs() -> Iterator[KernelSpec]:
    for ring in RINGS:
        with under_way(ring):
            yield from (case.kernel() for case in CASES)


SPECS = sorted(set(specs()))


def check(case: Case) -> None:
    problem = make_problem(1, T, W, R, case.D, S, writes="repeats", gate_per_write=True, seed=case.D)
    problem = problem.cast(getattr(torch, case.dtype))
    planned = planned_forward(
        problem, CHUNK, MODEL, training=case.training, snapshot=case.snapshot, schedule="persistent"
    )
    assert walk_of(planned.plan) == case.kernel()
    run(planned.calls, outputs=[planned.readings], scratch=planned.scratch, builds=("access",))
    got, want = planned.written(problem), forward_oracle(problem, CHUNK)
    for name in ("readings", "bank"):
        error = relative_error(getattr(got, name), getattr(want, name))
        assert error <= TOLERANCES[problem.memory.dtype].relative, f"{case}: {name}: {error:.2e}"
    assert got.repeats == want.repeats, case


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize(("dtype", "D"), sorted({(case.dtype, case.D) for case in CASES}))
def test_variants(dtype: str, D: int, ring: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By clusters of one block, which are the same kernels; `tests/kernels` has those of more."""
    slice_bytes = WIDE_SLICE if D * dtype_bytes(dtype) > WIDE_SLICE else NARROW_SLICE
    monkeypatch.setattr(persistent, "configs", lambda *_: iter([PersistentConfig(slice_bytes, 1)]))
    chosen = [case for case in CASES if (case.dtype, case.D) == (dtype, D)]
    with under_way(ring), ThreadPoolExecutor(PARALLEL_BUILDS) as pool:
        list(pool.map(check, chosen))
