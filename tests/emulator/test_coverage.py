"""Every kernel of kernels_cu, and every variant of it that a plan can choose, executes at least once.

A kernel without a family here fails this file, and so does a choice of a planner that no case of its family runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch

from sdm_rt.plan.decode import plan_decode
from sdm_rt.plan.device import PRESETS, DeviceModel, preset
from sdm_rt.plan.launch import Dim3, Launch
from sdm_rt.plan.shapes import BANK_DTYPES, DecodeShape
from sdm_rt.runtime.kernel import KernelSpec
from tests.emulator.harness import KERNELS_CU, coverage, prepare
from tests.kernels.decode import Decoded, decode_on_emulator, decode_oracle
from tests.problems import Problem, make_problem
from tests.tolerances import assert_close, assert_same_bits

ENTRY = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(")


@dataclass(frozen=True)
class Variant:
    """What distinguishes two launches of one kernel beside their sizes."""

    spec: KernelSpec
    entry: str
    block: Dim3
    cluster: Dim3
    pdl: bool

    @classmethod
    def of(cls, launch: Launch) -> Variant:
        return cls(launch.kernel, launch.entry, launch.block, launch.cluster, launch.pdl)


# ---- decode ----

DECODE_ROWS = {1: (3, 5), 2: (33, 2), 4: (4, 65), 8: (129, 7)}  # rows a thread holds -> W, R
# Threads across a row follow from the columns and from how many SMs want a block.
DECODE_SMS = (1, 2, 4)


@dataclass(frozen=True)
class DecodeCase:
    """One problem on devices that differ in their number of SMs."""

    problem: Problem
    models: tuple[DeviceModel, ...]

    def launches(self) -> Iterator[Launch]:
        for model in self.models:
            yield decode_launch(self.problem, model)


def decode_launch(problem: Problem, model: DeviceModel) -> Launch:
    shape = DecodeShape(
        streams=problem.streams,
        writes=problem.k_idx.shape[2],
        reads=problem.q_idx.shape[2],
        head_dim=problem.memory.shape[1],
        bank_dtype=str(problem.memory.dtype).removeprefix("torch."),
    )
    (launch,) = plan_decode(shape, model).kernels()
    return launch


def decode_cases() -> list[DecodeCase]:
    cases = []
    for name, dtype, rows in product(("h100", "a100"), BANK_DTYPES, DECODE_ROWS):
        W, R = DECODE_ROWS[rows]
        vector = 4 if dtype == "float32" else 8
        models = tuple(replace(preset(name), sm_count=count) for count in DECODE_SMS)
        for D, some_models in [(8 * vector, models), *((D, models[:1]) for D in (vector, 1, 2, 3, 9))]:
            problem = make_problem(1, 1, W, R, D, 12, writes="repeats", gate_per_write=True, seed=D)
            cases.append(DecodeCase(problem.cast(getattr(torch, dtype)), some_models))
    return cases


def decode_choices() -> set[Variant]:
    """What plans choose over all presets and a wide grid of shapes."""
    grid = product(
        (1, 4, 64, 1024),
        (1, 32, 33, 64, 65, 128, 129, 256),
        (1, 2, 3, 4, 5, 8, 16, 24, 30, 64, 100, 1024, 16384),
    )
    found = set()
    for P, lanes, D in grid:
        for dtype, aligned, model in product(BANK_DTYPES, (False, True), PRESETS.values()):
            for W, R in {(lanes, 1), (1, lanes)}:
                shape = DecodeShape(P, W, R, D, dtype, aligned=aligned)
                found |= {Variant.of(launch) for launch in plan_decode(shape, model).kernels()}
    return found


DECODE_CASES = decode_cases()
DECODE_SPECS = sorted({launch.kernel for case in DECODE_CASES for launch in case.launches()})


@pytest.fixture(scope="module")
def built() -> None:
    prepare(DECODE_SPECS)


def check_decode(problem: Problem, got: Decoded) -> None:
    want, dtype = decode_oracle(problem), problem.memory.dtype
    assert_close("readings", got.readings, want.readings, dtype)
    assert_close("bank", got.bank, want.bank, dtype)
    assert got.repeats == want.repeats


@pytest.mark.parametrize(
    "spec", DECODE_SPECS, ids=lambda spec: " ".join(f"{name}={value}" for name, value in spec.defines)
)
@pytest.mark.usefixtures("built")
def test_decode_variant(spec: KernelSpec) -> None:
    for case in DECODE_CASES:
        runs = []
        for model in case.models:
            if decode_launch(case.problem, model).kernel == spec:
                runs.append(decode_on_emulator(case.problem, model)[0])
        for got in runs:
            check_decode(case.problem, got)
            # How many columns a block takes changes no bit.
            assert_same_bits("readings", got.readings, runs[0].readings)
            assert_same_bits("bank", got.bank, runs[0].bank)
    assert spec in coverage.specs


def test_decode_cases_hold_every_choice() -> None:
    run = {Variant.of(launch) for case in DECODE_CASES for launch in case.launches()}
    missing = decode_choices() - run
    assert not missing, (
        f"{len(missing)} variants that plans choose run in no case, for example {next(iter(missing))}"
    )


# ---- all kernels ----

FAMILIES = {"decode.cu": DECODE_SPECS}  # file -> the specifications that its tests above execute


def test_every_kernel_has_a_family() -> None:
    kernels = {
        (path.name, entry)
        for path in sorted(KERNELS_CU.glob("*.cu"))
        for entry in ENTRY.findall(path.read_text())
    }
    families = {(spec.file, entry) for specs in FAMILIES.values() for spec in specs for entry in spec.entries}
    assert not kernels - families, (
        f"kernels that no test executes in the emulator: {sorted(kernels - families)}"
    )
    assert not families - kernels, f"families of kernels that do not exist: {sorted(families - kernels)}"
