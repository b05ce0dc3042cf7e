"""Every variant of the forward's kernels that a plan can choose executes and equals the oracle.

Variants that differ in macros of PDL alone are one library here; they count as one, beside a test that each
use of PDL occurs.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import pytest
import torch

from sdm_rt.errors import UnsupportedConfigurationError
from sdm_rt.plan.device import PRESETS, DeviceModel, preset
from sdm_rt.plan.forward import plan_forward
from sdm_rt.plan.launch import Launch
from sdm_rt.plan.shapes import BANK_DTYPES, INDEX_DTYPES, SNAPSHOTS, WriteReadShape, dtype_bytes
from sdm_rt.runtime.kernel import KernelSpec
from tests.emulator.build import PARALLEL_BUILDS, without_pdl
from tests.kernels.forward import forward_on_emulator, forward_oracle
from tests.problems import Problem, make_problem
from tests.tolerances import TOLERANCES, relative_error

W, R, T, S = 3, 2, 3, 8
WARP = 32
LOADS = (1, 2, 3, 4)  # words of a row that a thread of decay_write holds
GATHER_WORDS = (1, 17, 33, 65)  # words of a row from which gather takes fewer rows side by side
WORD_BYTES = 16
ONE_SM = {name: replace(preset(name), sm_count=1) for name in ("h100", "a100")}


@dataclass(frozen=True)
class Case:
    """One call on one device."""

    dtype: str
    D: int
    model: DeviceModel
    index: str = "int64"
    training: bool = False
    snapshot: str = "none"
    chunk: int = 2

    def shape(self) -> WriteReadShape:
        alignment = min(WORD_BYTES, (self.D & -self.D) * dtype_bytes(self.dtype))
        return WriteReadShape(
            streams=1,
            tokens=T,
            chunk=self.chunk,
            writes=W,
            reads=R,
            head_dim=self.D,
            slots=S,
            bank_dtype=self.dtype,
            index_dtype=self.index,
            snapshot=self.snapshot,
            training=self.training,
            alignment=alignment,
        )

    def launches(self) -> tuple[Launch, ...]:
        return plan_forward(self.shape(), self.model).kernels()

    def problem(self) -> Problem:
        problem = make_problem(1, T, W, R, self.D, S, writes="repeats", gate_per_write=True, seed=self.D)
        index = getattr(torch, self.index)
        problem = replace(problem, k_idx=problem.k_idx.to(index), q_idx=problem.q_idx.to(index))
        return problem.cast(getattr(torch, self.dtype))


def first_multiple(at_least: int, vector: int, largest: int) -> int:
    """The first width from `at_least` on whose rows are aligned to `vector` values and to no more."""
    D = -(-at_least // vector) * vector
    return D if vector == largest or D // vector % 2 else D + vector


def cases() -> Iterator[Case]:
    for dtype in BANK_DTYPES:
        largest = WORD_BYTES // dtype_bytes(dtype)
        for vector in (v for v in (1, 2, 4, 8) if v <= largest):
            for words in GATHER_WORDS:
                D = first_multiple((words - 1) * largest + 1, vector, largest)
                yield from (Case(dtype, D, ONE_SM["h100"], index) for index in INDEX_DTYPES)
            for loads in LOADS:
                D = first_multiple((loads - 1) * WARP * vector + 1, vector, largest)
                yield Case(dtype, D, ONE_SM["h100"])
                for snapshot in SNAPSHOTS:
                    yield Case(dtype, D, ONE_SM["h100"], training=True, snapshot=snapshot)
        for training, model in product((False, True), (*ONE_SM.values(), preset("h100"), preset("a100"))):
            yield Case(dtype, 40, model, training=training)
    yield Case("float32", 8, ONE_SM["h100"], chunk=65)


@cache
def choices() -> frozenset[KernelSpec]:
    """What plans choose over a wide grid of shapes, on GPUs of every kind."""
    columns = (1, 2, 3, 4, 5, 8, 16, 30, 33, 64, 66, 96, 100, 130, 132, 160, 192, 194, 200, 256, 260, 264)
    columns += (388, 392, 512, 516, 520, 768, 776, 1000, 1024, 4096, 16384)
    models = (PRESETS["h100"], PRESETS["a100"], PRESETS["rtx4090"], PRESETS["b200"])
    found: set[KernelSpec] = set()
    for D, dtype, alignment in product(columns, BANK_DTYPES, (2, 4, 8, 16)):
        calls = [("int64", "none", False), ("int32", "none", False)]
        calls += [("int64", snapshot, True) for snapshot in SNAPSHOTS]
        for (index, snapshot, training), (P, C) in product(calls, ((1, 16), (256, 128))):
            model = models[(D + C + len(found)) % len(models)]
            try:
                shape = WriteReadShape(
                    P, 1024, C, 16, 16, D, 4096, dtype, index_dtype=index, snapshot=snapshot,
                    training=training, alignment=max(alignment, dtype_bytes(dtype)),
                )  # fmt: skip
                found |= {without_pdl(launch.kernel) for launch in plan_forward(shape, model).kernels()}
            except UnsupportedConfigurationError:
                continue
    return frozenset(found)


CASES = list(dict.fromkeys(cases()))
SPECS = sorted({launch.kernel for case in CASES for launch in case.launches()})


def check(case: Case) -> None:
    problem = case.problem()
    got, _, _ = forward_on_emulator(
        problem, case.chunk, case.model, training=case.training, snapshot=case.snapshot, builds=("access",)
    )
    want = forward_oracle(problem, case.chunk)
    for name in ("readings", "bank"):
        error = relative_error(getattr(got, name), getattr(want, name))
        assert error <= TOLERANCES[problem.memory.dtype].relative, f"{case}: {name}: {error:.2e}"
    assert got.repeats == want.repeats, case


@pytest.mark.parametrize(("dtype", "D"), sorted({(case.dtype, case.D) for case in CASES}))
def test_variants(dtype: str, D: int) -> None:
    chosen = [case for case in CASES if (case.dtype, case.D) == (dtype, D)]
    with ThreadPoolExecutor(PARALLEL_BUILDS) as pool:
        list(pool.map(check, chosen))


def test_the_cases_hold_every_choice() -> None:
    missing = choices() - {without_pdl(spec) for spec in SPECS}
    assert not missing, f"{len(missing)} variants run in no case, for example {next(iter(missing))}"


def test_the_cases_hold_every_use_of_pdl() -> None:
    launches = [launch for case in CASES for launch in case.launches()]
    uses = {(launch.entry, launch.pdl, launch.triggers) for launch in launches}
    assert {use for use in uses if use[0] == "decay_write"} == {
        ("decay_write", False, False),
        ("decay_write", True, False),
    }
    assert {use for use in uses if use[0] == "dual_matmul"} == {
        ("dual_matmul", False, False),
        ("dual_matmul", False, True),
    }
