"""Phase-1 backward of a whole training call: chunks of several streams, layouts of rows, d_tot, staging."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdm_rt.ops.write_read_launch import BUFFER_DTYPES, allocate
from sdm_rt.plan.phase1_backward import entries_a_thread, plan_phase1_backward_launches, stages_outputs
from sdm_rt.plan.shapes import WriteReadShape
from tests.emulator.harness import Call
from tests.kernels.backends import BACKENDS, Backend, device_model, execute, require
from tests.kernels.forward import planned_forward
from tests.kernels.phase1 import Chunks
from tests.kernels.phase1_backward import (
    GRADIENTS,
    ROUNDED,
    Gradients,
    backward_definition,
    make_gradients,
)
from tests.problems import Problem, make_problem
from tests.tolerances import assert_close, assert_same_bits

pytestmark = pytest.mark.parametrize("backend", BACKENDS)

C = 16
SMALL_BLOCK = 32  # bytes of shared memory that stage nothing


@pytest.fixture(autouse=True)
def available(backend: Backend) -> None:
    require(backend)


def chunks_of(problem: Problem) -> Chunks:
    """The chunks of a call step by step, as one call of chunks; tokens past the end are padding."""
    steps = -(-problem.tokens // C)
    first = (torch.arange(problem.streams) * problem.slots)[:, None, None]
    tensors = {name: getattr(problem, name) for name in ("k_val", "q_val", "g")}
    tensors |= {"k_idx": problem.k_idx - first, "q_idx": problem.q_idx - first}

    def split(x: Tensor) -> Tensor:
        padded = torch.cat([x, x.new_zeros(x.shape[0], steps * C - x.shape[1], x.shape[2])], dim=1)
        return padded.unflatten(1, (steps, C)).transpose(0, 1).flatten(0, 1)

    counts = problem.real().sum(dim=1)
    real = (counts - C * torch.arange(steps)[:, None]).clamp(0, C).flatten()
    return Chunks(**{name: split(x) for name, x in tensors.items()}, slots=problem.slots, lengths=real)


def by_written_slot(d_tot: Tensor, chunks: Chunks, capacity: int) -> Tensor:
    """[N, S] to [N, capacity]: the slots that a chunk writes, ascending; NaN behind them."""
    packed = torch.full((len(d_tot), capacity), torch.nan)
    assert chunks.lengths is not None
    for n, length in enumerate(chunks.lengths.tolist()):
        written = chunks.k_idx[n, :length].unique()
        written = written[(written >= 0) & (written < chunks.slots)]
        packed[n, : len(written)] = d_tot[n, written]
    return packed


def rows_of(x: Tensor, problem: Problem) -> Tensor:
    """[N, C, *] to the padded rows [P, T, *]."""
    steps = -(-problem.tokens // C)
    streams = x.unflatten(0, (steps, problem.streams)).transpose(0, 1).flatten(1, 2)
    return streams[:, : problem.tokens]


def run(
    backend: Backend, problem: Problem, given: Gradients, d_tot: Tensor, *, packed: bool, staged: bool
) -> dict[str, Tensor]:
    """Gradients by name, in the padded rows."""
    model = device_model(backend)
    planned = planned_forward(problem, C, model, training=True)
    shape = planned.plan.shape
    assert isinstance(shape, WriteReadShape)
    launches, buffers = plan_phase1_backward_launches(
        shape, model if staged else replace(model, shared_memory_per_block=SMALL_BLOCK)
    )
    scratch = allocate(buffers, torch.device("cpu"))
    gates = problem.g.shape[2]
    values: dict[str, Any] = {
        **planned.values,
        **dict.fromkeys(("given_log_k", "given_log_q", "given_rex", "cu_seqlens", "gate_gradients")),
        **scratch,
        **given.tensors(),
        "d_tot": d_tot,
        "slab_step": 0,
        "grad_gates": gates,
        "stage_outputs": int(staged),
        "each": entries_a_thread(shape, launches),
    }
    rows = problem.streams * problem.tokens
    if packed:
        tokens = {name: problem.pack(x).contiguous() for name, x in problem.inputs().items()}
        values |= tokens | {"lengths": None, "cu_seqlens": problem.cu_seqlens()}
        rows = len(tokens["k_idx"])
    dtype = BUFFER_DTYPES[shape.bank_dtype]
    results = {
        "grad_k_val": torch.empty(rows, shape.writes, dtype=dtype),
        "grad_q_val": torch.empty(rows, shape.reads, dtype=dtype),
        "grad_g": torch.empty(rows, gates),
    }
    values |= results
    prologue = [call.launch for call in planned.calls if call.launch.name in ("phase1_sort", "phase1_scan")]
    calls = [
        Call(launch, {argument.name: values[argument.name] for argument in launch.arguments})
        for launch in (*prologue, *launches)
    ]
    execute(backend, calls, outputs=list(results.values()), scratch=[*planned.scratch, *scratch.values()])
    shape_of_rows = (problem.streams, problem.tokens)
    if not packed:
        return {name: x.unflatten(0, shape_of_rows) for name, x in results.items()}
    found = {}
    for name, x in results.items():
        found[name] = x.new_zeros(*shape_of_rows, x.shape[1])
        found[name][problem.real()] = x
    return found


def check(backend: Backend, problem: Problem, *, packed: bool = False) -> None:
    chunks = chunks_of(problem)
    N, _, W = chunks.k_idx.shape
    R, dtype = chunks.q_idx.shape[2], problem.k_val.dtype
    given = make_gradients(N, C, W, R)
    d_tot = torch.randn(N, chunks.slots, generator=torch.Generator().manual_seed(1))
    in_order = by_written_slot(d_tot, chunks, min(C * W, chunks.slots))
    got = run(backend, problem, given, in_order, packed=packed, staged=True)
    stored = run(backend, problem, given, in_order, packed=packed, staged=False)
    for name in GRADIENTS:
        assert_same_bits(f"{name} without staging", stored[name], got[name])
    wanted = dict(zip(GRADIENTS, backward_definition(chunks, given, d_tot), strict=True))
    if problem.g.shape[2] == 1:
        wanted["grad_g"] = wanted["grad_g"].sum(dim=2, keepdim=True)
    for name, want in wanted.items():
        kind = torch.float32 if name == "grad_g" else dtype
        assert_close(name, got[name], rows_of(want, problem), kind, tolerance=ROUNDED[kind])
        assert not got[name][~problem.real()].any(), f"{name}: a padded row has a gradient"


@pytest.mark.parametrize(
    ("dtype", "packed", "gate_per_write"),
    [
        (torch.float32, False, False),
        (torch.float32, True, True),
        (torch.bfloat16, False, True),
        (torch.bfloat16, True, False),
        (torch.float16, False, False),
    ],
)
def test_streams_of_different_lengths(
    backend: Backend, dtype: torch.dtype, packed: bool, gate_per_write: bool
) -> None:
    options: dict[str, Any] = {"gates": "some -inf", "writes": "repeats", "gate_per_write": gate_per_write}
    problem = make_problem(4, 37, 3, 4, 8, 9, lengths=[37, 0, 16, 19], **options).cast(dtype)
    check(backend, problem, packed=packed)


@pytest.mark.parametrize("gate_per_write", [False, True])
def test_more_writes_than_a_warp_has_lanes(backend: Backend, gate_per_write: bool) -> None:
    """W rows of odd width too: neither they nor their starts lie on words of 16 bytes."""
    problem = make_problem(2, 21, 37, 3, 8, 60, gate_per_write=gate_per_write).cast(torch.bfloat16)
    check(backend, problem)


def test_one_write_a_token(backend: Backend) -> None:
    check(backend, make_problem(2, 20, 1, 1, 8, 3, gates="all kinds").cast(torch.float32))


def test_the_small_block_stages_nothing(backend: Backend) -> None:
    model = device_model(backend)
    shape = WriteReadShape(2, 20, C, 3, 4, 8, 9)
    assert stages_outputs(shape, model)
    assert not stages_outputs(shape, replace(model, shared_memory_per_block=SMALL_BLOCK))
