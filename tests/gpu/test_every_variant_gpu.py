"""Calls of small shapes that reach every variant of the write-read kernels.

``tests/sanitizer.py`` runs them under compute-sanitizer.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import pytest
import torch

from sdm_rt import last_dispatch, sdm_write_read
from sdm_rt.ops import bound_plans
from sdm_rt.plan.shapes import QUANTIZED, SNAPSHOTS
from tests.gpu.training import Found, op_step
from tests.problems import Problem, make_problem
from tests.tolerances import assert_close, assert_same_bits

pytestmark = pytest.mark.gpu

# racecheck, the slow one, looks at shared memory, which streams do not share: it gets one stream.
STREAMS = int(os.environ.get("SANITIZER_STREAMS", "2"))
HALF = (torch.bfloat16, torch.float16)
APPROXIMATE = ("k_val", "g", "q_val", "restored bank")
# Half a warp a row; single values; words in pieces; one, two and four words of a lane; two slices of a row.
COLUMNS = (16, 33, 68, 136, 264, 520, 1096)


def problem_of(
    dtype: torch.dtype, columns: int, int32: bool, tokens: int = 40, streams: int = STREAMS
) -> Problem:
    """Streams, ragged with 64-bit indices; slots meet in a chunk and across chunks."""
    lengths = None if int32 else (tokens, 2 * tokens // 3)[:streams]
    options: dict[str, Any] = {
        "seed": columns,
        "writes": "repeats",
        "gate_per_write": int32,
        "lengths": lengths,
    }
    return make_problem(streams, tokens, 5, 7, columns, 48, **options).cast(dtype)


def step(
    dtype: torch.dtype, columns: int, chunk: int, int32: bool = False, tokens: int = 40, **options: Any
) -> Found:
    """Run one step: of few tokens, since a tool may take a thousand times as long."""
    problem = problem_of(dtype, columns, int32, tokens)
    changes = {}
    if int32:
        changes = {name: getattr(problem, name).cuda().int() for name in ("k_idx", "q_idx")}
    found = op_step(problem, changes=changes, chunk_size=chunk, **options)
    if "schedule" in options:
        assert last_dispatch()["schedule"] == options["schedule"]
    for name, tensor in found.items():
        assert torch.isfinite(tensor).all(), name
    return found


@cache
def stepwise(dtype: torch.dtype, columns: int, chunk: int, snapshot: str = "none", **options: Any) -> Found:
    """Run a step that several tests of a process compare theirs with."""
    return step(dtype, columns, chunk, snapshot_quant=snapshot, schedule="stepwise", **options)


@pytest.mark.parametrize("chunk", [16, 80])
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_stepwise(dtype: torch.dtype, columns: int, chunk: int) -> None:
    exact = stepwise(dtype, columns, chunk)
    for snapshot in ("bf16", *QUANTIZED):
        found = stepwise(dtype, columns, chunk, snapshot)
        for name, want in exact.items():
            if name not in APPROXIMATE:
                assert_same_bits(f"{snapshot}: {name}", found[name], want)


@pytest.mark.usefixtures("clusters")
@pytest.mark.parametrize("chunk", [16, 80])
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_persistent(dtype: torch.dtype, columns: int, chunk: int) -> None:
    for snapshot in SNAPSHOTS:
        found = step(dtype, columns, chunk, snapshot_quant=snapshot, schedule="persistent")
        for name, want in stepwise(dtype, columns, chunk, snapshot).items():
            assert_same_bits(f"{snapshot}: {name}", found[name], want)


@pytest.mark.usefixtures("schedule_runs")
@pytest.mark.parametrize("schedule", ["stepwise", "persistent"])
@pytest.mark.parametrize("chunk", [16, 80])
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_without_gradients(dtype: torch.dtype, columns: int, chunk: int, schedule: str) -> None:
    problem = problem_of(dtype, columns, int32=False)
    given = {name: x.cuda() for name, x in problem.inputs().items()}
    options = {name: x.cuda() if torch.is_tensor(x) else x for name, x in problem.options().items()}
    bank = problem.memory.cuda().clone()
    with torch.no_grad():
        readings = sdm_write_read(bank, **given, chunk_size=chunk, schedule=schedule, **options)
    assert last_dispatch()["schedule"] == schedule
    exact = stepwise(dtype, columns, chunk)
    assert_same_bits("readings", readings, exact["readings"])
    assert_same_bits("final bank", bank, exact["final bank"])


@pytest.mark.parametrize("columns", COLUMNS)
def test_streams_of_one_bank(columns: int) -> None:
    """Streams write slots of their own and read slots that nobody writes, in turn."""
    problem = problem_of(torch.bfloat16, columns, int32=False, streams=2)
    written = problem.k_idx % 16
    for stream in range(2):
        written[stream] += 16 * stream
    changes = {"k_idx": written.cuda(), "q_idx": (32 + problem.q_idx % 16).cuda()}
    found = op_step(problem, changes=changes, chunk_size=16, shared_bank=True, num_memory_slots=0)
    for name, tensor in found.items():
        assert torch.isfinite(tensor).all(), name


@pytest.mark.usefixtures("clusters")
@pytest.mark.parametrize("snapshot", QUANTIZED)
def test_persistent_walks_of_one_step_of_two_and_of_all(
    snapshot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six steps; the last walk of some is short. Every plan is made anew."""
    want = step(torch.bfloat16, 136, 16, tokens=90, snapshot_quant=snapshot, schedule="stepwise")
    for steps in (1, 2, 4, 6):
        monkeypatch.setattr("sdm_rt.plan.forward.steps_of_walk", lambda *_, steps=steps: steps)
        monkeypatch.setattr(bound_plans, "_memo", bound_plans._Memo())
        found = step(torch.bfloat16, 136, 16, tokens=90, snapshot_quant=snapshot, schedule="persistent")
        for name, x in want.items():
            assert_same_bits(f"{steps} steps: {name}", found[name], x)


@pytest.mark.usefixtures("schedule_runs")
@pytest.mark.parametrize("schedule", ["stepwise", "persistent"])
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_wide_gradients_and_indices_of_32_bits(dtype: torch.dtype, columns: int, schedule: str) -> None:
    exact = stepwise(dtype, columns, 16, int32=True)
    for snapshot in ("none", "fp8", "int4"):
        found = step(
            dtype, columns, 16, int32=True, grad_bank_fp32=True, snapshot_quant=snapshot, schedule=schedule
        )
        assert_close(f"{snapshot}: memory", found["memory"], exact["memory"], torch.bfloat16)
        assert_same_bits(f"{snapshot}: readings", found["readings"], exact["readings"])
