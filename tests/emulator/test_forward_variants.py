"""The variants of the forward's kernels execute and equal the oracle, those of the sort its definition.

Variants that differ in macros of PDL alone are one library here; they run as one, beside a test that each use
of PDL occurs.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch

from sdm_rt.cpu import phase1 as definition
from sdm_rt.ops.write_read_launch import allocate
from sdm_rt.plan.device import DeviceModel, preset
from sdm_rt.plan.forward import forward_constants, plan_forward
from sdm_rt.plan.launch import Launch
from sdm_rt.plan.phase1 import phase1_kernels
from sdm_rt.plan.shapes import BANK_DTYPES, INDEX_DTYPES, SNAPSHOTS, WriteReadShape, dtype_bytes
from tests.emulator.build import PARALLEL_BUILDS
from tests.emulator.harness import Call, run
from tests.kernels.forward import forward_on_emulator, forward_oracle, planned_forward
from tests.problems import Problem, make_problem
from tests.tolerances import TOLERANCES, assert_close, relative_error

W, R, T, S = 3, 2, 3, 8
WRITE_WORDS = (1, 9)  # words of a row from which decay_write takes narrower and wider slices
GATHER_WORDS = (1, 17, 33, 65)  # words of a row from which gather takes fewer rows side by side
WORD_BYTES = 16
ONE_SM = {name: replace(preset(name), sm_count=1) for name in ("h100", "a100")}
# With one, two and many SMs the products take blocks of 64, 32 and 16 columns.
MODELS = (
    *ONE_SM.values(),
    *(replace(preset(name), sm_count=2) for name in ("h100", "a100")),
    *(preset(name) for name in ("h100", "a100")),
)


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
        return plan_forward(self.shape(), self.model, "stepwise").kernels()

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
            for words in WRITE_WORDS if vector in (1, largest) else ():
                D = first_multiple((words - 1) * largest + 1, vector, largest)
                yield Case(dtype, D, ONE_SM["h100"])
                for snapshot in SNAPSHOTS:
                    yield Case(dtype, D, ONE_SM["h100"], training=True, snapshot=snapshot)
        for training, model in product((False, True), MODELS):
            yield Case(dtype, 40, model, training=training)
    yield Case("float32", 8, ONE_SM["h100"], chunk=65)


@dataclass(frozen=True)
class SortCase:
    """A sort of one chunk: slots decide the bytes of an item, entries the threads of a block."""

    index: str
    slots: int
    chunk: int
    writes: int
    reads: int

    def launch(self) -> tuple[Launch, dict[str, object]]:
        """The launch with the numbers and the working memory that the plan gives it."""
        shape = WriteReadShape(
            1,
            self.chunk,
            self.chunk,
            self.writes,
            self.reads,
            1,
            self.slots,
            index_dtype=self.index,
            training=False,
        )
        plan = plan_forward(shape, preset("h100"), "stepwise")
        (launch,) = (launch for launch in plan.prologue if launch.name == "phase1_sort")
        given = forward_constants(plan) | allocate(plan.buffers, torch.device("cpu"))
        return launch, {a.name: given.get(a.name) for a in launch.arguments}


CASES = list(dict.fromkeys(cases()))
WIDE_SCANS = BANK_DTYPES  # of more entries than pass through shared memory
SORT_CASES = [
    SortCase(index, slots, *sizes)
    for index in INDEX_DTYPES
    for slots in (300, 2**28)
    for sizes in ((7, 3, 5), (130, 70, 60))
]
SPECS = sorted(
    {launch.kernel for case in CASES for launch in case.launches()}
    | {case.launch()[0].kernel for case in SORT_CASES}
    | {
        phase1_kernels(WriteReadShape(1, 130, 130, 70, 60, 1, 99, dtype))["phase1_scan"]
        for dtype in WIDE_SCANS
    }
)


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


@pytest.mark.parametrize("case", SORT_CASES, ids=str)
def test_sort_variants(case: SortCase) -> None:
    launch, values = case.launch()
    C, lanes = case.chunk, case.writes + case.reads
    generator = torch.Generator().manual_seed(C)
    # Slots of both ends, few enough to repeat, and some outside the bank.
    pool = torch.cat(
        [torch.arange(40), case.slots - 1 - torch.arange(40), torch.tensor([-1, case.slots, 2**30])]
    )
    slots = pool[torch.randint(len(pool), (C, lanes), generator=generator)]
    values |= {
        "k_idx": slots[:, : case.writes].to(getattr(torch, case.index)).contiguous(),
        "q_idx": slots[:, case.writes :].to(getattr(torch, case.index)).contiguous(),
        "slab_step": 0,
        "shared_bank": 0,
        "wide": 1,
    }
    payload = values["payload"]
    scratch = [x for x in (payload, values["sort_scratch"]) if x is not None]
    # Absent entries need no place in the second buffer.
    run([Call(launch, values)], scratch=scratch, builds=("access",), unused_shared_memory=True)
    entries = []
    for t, lane in product(range(C), range(lanes)):
        slot, query = int(slots[t, lane]), lane >= case.writes
        valid = 0 <= slot < case.slots
        code = (lane - query * case.writes) | t << 8 | query << 16 | valid << 17
        entries.append((not valid, slot if valid else 0, len(entries), code))
    assert (payload.flatten()[: C * lanes] & 0x3FFFF).tolist() == [code for *_, code in sorted(entries)]


@pytest.mark.parametrize("dtype", WIDE_SCANS)
def test_wide_scan_variants(dtype: str) -> None:
    problem = make_problem(1, 130, 70, 60, 1, 400, gates="some -inf", gate_per_write=True)
    problem = problem.cast(getattr(torch, dtype))
    planned = planned_forward(problem, 130, preset("h100"))
    calls = [call for call in planned.calls if call.launch.name in ("phase1_sort", "phase1_scan")]
    assert calls[1].launch.block == (768, 1, 1)
    run(calls, scratch=planned.scratch, builds=("access",))
    inputs = (problem.k_idx, problem.q_idx, problem.k_val, problem.q_val, problem.g)
    want, _ = definition.phase1(*inputs, 400, None)
    for name in ("k_eff", "q_w"):
        assert_close(name, planned.values[name], getattr(want, name), torch.float32)


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
