"""What the forward of a training call keeps, and that it computes what a call without gradients does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from sdm_rt.cpu.snapshot import RowSnapshot
from sdm_rt.plan.device import DeviceModel
from sdm_rt.plan.step_plan import StepPlan
from tests import chunked_form
from tests.kernels.backends import BACKENDS, Backend, device_model, execute, require
from tests.kernels.forward import Written, planned_forward
from tests.problems import Problem, make_problem
from tests.tolerances import assert_same_bits, relative_error

CHUNK = 16
# Against the chunked form in float64 with bank rows rounded at the same chunk ends.
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 3e-3, torch.float16: 1e-3}

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def available(backend: Backend) -> None:
    require(backend)


@dataclass(frozen=True)
class Case:
    """A problem's width and dtype, and the snapshots taken of it."""

    dtype: torch.dtype
    D: int
    snapshots: tuple[str, ...]

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}-{self.D}"


CASES = (
    Case(torch.float32, 24, ("none", "bf16", "fp8", "int4")),
    Case(torch.float32, 7, ("int4",)),  # the last byte holds one value
    Case(torch.bfloat16, 131, ("none", "fp8", "int4")),  # values one by one, two slices of a warp
    Case(torch.bfloat16, 1032, ("fp8", "int4")),  # 16 bytes a load, two slices
    Case(torch.float16, 66, ("none", "bf16", "int4")),
)
EACH = [(case, snapshot) for case in CASES for snapshot in case.snapshots]


@cache
def problem_of(case: Case, tokens: int = 37) -> Problem:
    problem = make_problem(
        2, 37, 4, 3, case.D, 24, writes="repeats", gates="some positive", gate_per_write=True, seed=case.D
    ).cast(case.dtype)
    problem.memory[5] = 0.0  # a row without a scale of its own
    problem.memory[7, case.D // 2] = torch.inf
    # Values that are normal numbers, of which a scale is none.
    problem.memory[9] = problem.memory[9].sign() * (1e-36 + 1e-36 * problem.memory[9].abs().clamp(max=1.0))
    problem.memory[9, 0] = 0.0
    problem.k_idx[:, :, 0] %= 24  # every lane 0 of the second stream lies outside its rows
    return problem.tokens_of(0, tokens)


def run(
    backend: Backend,
    problem: Problem,
    *,
    training: bool,
    snapshot: str = "none",
    model: DeviceModel | None = None,
    seed: int = 0,
) -> tuple[Written, dict[str, Any], StepPlan]:
    planned = planned_forward(
        problem, CHUNK, model or device_model(backend), training=training, snapshot=snapshot
    )
    execute(backend, planned.calls, outputs=[planned.readings], scratch=planned.scratch, seed=seed)
    return planned.written(problem), planned.values, planned.plan


@cache
def without_gradients(backend: Backend, case: Case, tokens: int = 37) -> Written:
    return run(backend, problem_of(case, tokens), training=False)[0]


def banks_at_chunk_starts(backend: Backend, case: Case) -> list[Tensor]:
    starts = range(CHUNK, 37, CHUNK)
    return [problem_of(case).memory, *(without_gradients(backend, case, start).bank for start in starts)]


def written_slots(problem: Problem, stream: int, step: int) -> Tensor:
    """The distinct slots that a chunk writes, in rising order."""
    rows = problem.k_idx[stream, step * CHUNK : (step + 1) * CHUNK] - stream * problem.slots
    return rows[(rows >= 0) & (rows < problem.slots)].unique()


@pytest.mark.parametrize(("case", "snapshot"), EACH, ids=str)
def test_readings_and_bank_are_those_of_a_call_without_gradients(
    backend: Backend, case: Case, snapshot: str
) -> None:
    got, values, _ = run(backend, problem_of(case), training=True, snapshot=snapshot, seed=1)
    want = without_gradients(backend, case)
    assert_same_bits("readings", got.readings, want.readings)
    assert_same_bits("bank", got.bank, want.bank)
    assert got.repeats == want.repeats
    check_snapshot(case, snapshot, values, banks_at_chunk_starts(backend, case))


def check_snapshot(case: Case, snapshot: str, values: dict[str, Any], banks: list[Tensor]) -> None:
    """Row j of a chunk keeps its j-th written slot as the CPU keeps the same row."""
    problem = problem_of(case)
    for step, stream in product(range(len(banks)), range(problem.streams)):
        n, slots = step * problem.streams + stream, written_slots(problem, stream, step)
        records = values["slots"][n].view(torch.int32)[: len(slots)]
        assert int(values["slot_count"][n]) == len(slots)
        assert records[:, 0].tolist() == slots.tolist()
        rows = banks[step][stream * problem.slots + slots]
        want = RowSnapshot.empty(snapshot, len(slots), rows)
        want.store(0, rows)
        payload = values["snapshot"][n, : len(slots)]
        if snapshot in ("none", "bf16"):
            # A NaN is one whatever its bits: hardware and PyTorch round it to different ones.
            assert torch.equal(payload.isnan(), want.payload.isnan())
            assert_same_bits("snapshot", payload.nan_to_num(0.0), want.payload.nan_to_num(0.0))
            continue
        # A row with NaN or inf has no scale, whatever its values became.
        finite = rows.isfinite().all(dim=1)
        scale = values["snapshot_scale"][n, : len(slots), None]
        assert_same_bits("snapshot", payload[finite], want.payload[finite].view(torch.uint8))
        assert_same_bits("scale", scale[finite], want.scale[finite])
        assert scale[~finite].isnan().all()


def test_the_rows_that_have_no_scale_of_their_own_are_kept(backend: Backend) -> None:
    """The problems above do write the row of zeros, the tiny one and the one with inf."""
    for case in CASES:
        slots = written_slots(problem_of(case), 0, 0).tolist()
        assert {5, 7, 9} <= set(slots)
        assert written_slots(problem_of(case), 1, 0).numel() > 0


@pytest.mark.parametrize("writes", ["distinct", "hot"])
@pytest.mark.parametrize(
    ("dtype", "D"), [(torch.float32, 24), (torch.bfloat16, 131), (torch.float16, 66)], ids=str
)
def test_err_is_what_the_chunked_form_says(backend: Backend, dtype: torch.dtype, D: int, writes: str) -> None:
    problem = make_problem(2, 37, 4, 3, D, 24, writes=writes, gates="some -inf", seed=1).cast(dtype)
    _, values, _ = run(backend, problem, training=True)
    err = values["err"].view(3, 2, CHUNK, D)  # [steps, P, C, D]
    wide = problem.cast(torch.float64)
    for stream in range(2):
        rows = slice(stream * 24, (stream + 1) * 24)
        bank = wide.memory[rows]
        for step in range(3):
            part = slice(step * CHUNK, (step + 1) * CHUNK)
            inputs = {name: x[stream, part] for name, x in wide.inputs().items()}
            for name in ("k_idx", "q_idx"):
                inputs[name] = inputs[name] - stream * 24
            _, bank, (chunk,) = chunked_form.forward(bank, **inputs, chunk_size=CHUNK)
            real = len(chunk.err)
            got = err[step, stream]
            assert relative_error(got[:real], chunk.err) <= BOUNDS[dtype]
            assert not got[real:].any(), "err of padded tokens"
            bank = bank.to(dtype).double()


def test_streams_of_different_lengths_keep_nothing_of_their_padding(backend: Backend) -> None:
    problem = make_problem(4, 37, 3, 4, 24, 20, lengths=[37, 0, 16, 17]).cast(torch.float32)
    _, values, _ = run(backend, problem, training=True)
    err = values["err"].view(3, 4, CHUNK, 24).transpose(0, 1).reshape(4, 3 * CHUNK, 24)
    counts = values["slot_count"].view(3, 4).T
    for stream, length in enumerate([37, 0, 16, 17]):
        assert not err[stream, length:].any()
        assert err[stream, :length].abs().sum(dim=1).min() > 0 if length else True
        for step in range(3):
            tokens = max(0, min(CHUNK, length - step * CHUNK))
            rows = problem.k_idx[stream, step * CHUNK : step * CHUNK + tokens]
            assert int(counts[stream, step]) == len(rows.unique())


def test_the_width_of_the_products_blocks_changes_no_bit(backend: Backend) -> None:
    problem = make_problem(2, 40, 4, 3, 72, 24, seed=2).cast(torch.bfloat16)
    runs = []
    for sm_count in (1, 6, 1000):
        model = replace(device_model(backend), sm_count=sm_count)
        runs.append(run(backend, problem, training=True, model=model))
    columns = [
        dict(next(one for one in plan.kernels() if one.name == "dual_matmul").kernel.defines)["COLUMNS"]
        for _, _, plan in runs
    ]
    assert columns == ["64", "32", "16"]
    for written, values, _ in runs[1:]:
        assert_same_bits("readings", written.readings, runs[0][0].readings)
        assert_same_bits("bank", written.bank, runs[0][0].bank)
        assert_same_bits("err", values["err"], runs[0][1]["err"])


def test_chunks_of_several_tiles(backend: Backend) -> None:
    """Two tiles of the products in both directions, the last one ragged; err against the float64 matrices."""
    problem = make_problem(1, 150, 3, 3, 8, 30, writes="repeats", seed=4).cast(torch.float32)
    planned = planned_forward(problem, 150, device_model(backend), training=True)
    execute(backend, planned.calls, outputs=[planned.readings], scratch=planned.scratch)
    wide = problem.cast(torch.float64)
    inputs = {name: x[0] for name, x in wide.inputs().items()}
    readings, _, (chunk,) = chunked_form.forward(wide.memory, **inputs, chunk_size=150)
    assert relative_error(planned.values["err"][0], chunk.err) <= BOUNDS[torch.float32]
    assert relative_error(planned.readings, readings) <= BOUNDS[torch.float32]
