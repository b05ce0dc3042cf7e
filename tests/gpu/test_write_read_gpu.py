"""The forward on a GPU at real shapes: repeated calls, processes, graphs, PDL, memory, host waits."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from sdm_rt import sdm_write_read
from sdm_rt.bench.cases import Case, make_inputs
from tests.problems import make_problem
from tests.tolerances import assert_same_bits

pytestmark = pytest.mark.gpu

CASE = Case(2, 600, 64, 64, 512, 4096)


def call(memory: Tensor, case: Case = CASE, seed: int = 0, **options: object) -> Tensor:
    inputs = make_inputs(case, memory.device, seed)
    with torch.no_grad():
        return sdm_write_read(
            memory,
            *inputs.tokens(),
            chunk_size=case.chunk,
            num_memory_slots=case.slots,
            num_parallel=case.streams,
            **options,
        )


def fresh(case: Case = CASE) -> Tensor:
    return make_inputs(case, torch.device("cuda")).memory


def digest(readings: Tensor, memory: Tensor) -> str:
    both = torch.cat([readings.reshape(-1), memory.reshape(-1)]).view(torch.int16).long()
    weights = torch.arange(1, both.numel() + 1, device=both.device) % 1000003
    return str(int((both * weights).sum()))


@pytest.fixture
def reference() -> tuple[Tensor, Tensor]:
    memory = fresh()
    return call(memory), memory


def test_a_hundred_calls_give_the_same_bits(reference: tuple[Tensor, Tensor]) -> None:
    for _ in range(100):
        memory = fresh()
        assert torch.equal(call(memory), reference[0])
        assert torch.equal(memory, reference[1])


@pytest.mark.parametrize("environment", [{}, {"SDM_RT_PDL": "0"}])
def test_another_process_gives_the_same_bits(
    reference: tuple[Tensor, Tensor], environment: dict[str, str]
) -> None:
    code = "from tests.gpu.test_write_read_gpu import *; m = fresh(); print(digest(call(m), m))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == digest(*reference)


def test_graph_replays_give_the_same_bits(reference: tuple[Tensor, Tensor]) -> None:
    inputs = make_inputs(CASE, torch.device("cuda"))
    memory = inputs.memory.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        readings = sdm_write_read(
            memory, *inputs.tokens(), num_memory_slots=CASE.slots, num_parallel=CASE.streams
        )
    for _ in range(100):
        memory.copy_(inputs.memory)
        graph.replay()
        assert torch.equal(readings, reference[0])
        assert torch.equal(memory, reference[1])


@pytest.fixture
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_the_call_waits_for_nothing(reference: tuple[Tensor, Tensor], no_waiting: None) -> None:
    inputs_memory = reference[1]
    inputs = make_inputs(CASE, torch.device("cuda"))
    with torch.no_grad():
        sdm_write_read(
            inputs_memory, *inputs.tokens(), num_memory_slots=CASE.slots, num_parallel=CASE.streams
        )


def test_working_memory_does_not_grow_with_the_tokens() -> None:
    def peak(tokens: int) -> int:
        case = Case(2, tokens, 64, 32, 256, 4096)
        inputs = make_inputs(case, torch.device("cuda"))
        gc.collect()
        torch.cuda.empty_cache()  # else blocks are counted as large as earlier calls left them
        with torch.no_grad():
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            out = sdm_write_read(
                inputs.memory, *inputs.tokens(), num_memory_slots=case.slots, num_parallel=case.streams
            )
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() - before - out.numel() * out.element_size()

    assert peak(65536) <= peak(32768) + 2**20


def test_packed_streams_equal_padded_ones() -> None:
    case = Case(3, 200, 64, 16, 128, 1024)
    lengths = torch.tensor([200, 70, 129], device="cuda")
    inputs = make_inputs(case, torch.device("cuda"))
    keep = torch.arange(200, device="cuda") < lengths[:, None]
    with torch.no_grad():
        padded_bank, packed_bank = inputs.memory.clone(), inputs.memory.clone()
        options = {"num_memory_slots": case.slots, "num_parallel": case.streams}
        padded = sdm_write_read(padded_bank, *inputs.tokens(), lengths=lengths, **options)
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        packed = sdm_write_read(
            packed_bank, *(x[keep] for x in inputs.tokens()), cu_seqlens=offsets, max_seqlen=200, **options
        )
    assert torch.equal(packed, padded.view(3, 200, -1)[keep])
    assert torch.equal(packed_bank, padded_bank)


@pytest.mark.usefixtures("schedule_runs")
@pytest.mark.parametrize("schedule", ["stepwise", "persistent"])
def test_a_bound_on_the_lengths_of_padded_streams(schedule: str) -> None:
    problem = make_problem(3, 150, 8, 8, 32, 64, lengths=[40, 7, 90]).cast(torch.bfloat16)
    found = []
    for bound in ({}, {"max_seqlen": 90}):
        tensors = {name: x.nan_to_num(0).cuda() for name, x in problem.inputs().items()}
        for name in ("k_val", "v", "beta", "g", "q_val"):
            tensors[name].requires_grad_()
        options = problem.options() | {"lengths": torch.tensor([40, 7, 90], device="cuda")} | bound
        memory = problem.memory.cuda().requires_grad_()
        readings, bank = sdm_write_read(
            memory, **tensors, **options, schedule=schedule, return_final_bank=True
        )
        (readings.float().square().sum() + bank.float().square().sum()).backward()
        assert bool((readings.view(3, 150, -1)[1, 7:] == 0).all())
        assert bool((readings.view(3, 150, -1)[2, :90] != 0).any())
        found.append([readings, bank, memory.grad, *(tensors[name].grad for name in ("k_val", "v", "q_val"))])
    for at, (got, want) in enumerate(zip(found[1], found[0], strict=True)):
        assert_same_bits(str(at), got, want)


@pytest.mark.parametrize("layout", ["strided columns", "offset", "row stride"])
def test_layouts_of_the_bank_give_the_same_bits(layout: str) -> None:
    case = Case(2, 130, 64, 16, 96, 512)
    memory = fresh(case)
    want = call(memory, case)
    rows, columns = memory.shape
    if layout == "strided columns":
        bank = torch.empty(rows, 2 * columns, dtype=memory.dtype, device="cuda")[:, 1::2]
    elif layout == "offset":
        bank = torch.empty(rows * columns + 1, dtype=memory.dtype, device="cuda")[1:].view(rows, columns)
    else:
        bank = torch.empty(rows, columns + 4, dtype=memory.dtype, device="cuda")[:, :columns]
    bank.copy_(fresh(case))
    assert torch.equal(call(bank, case), want)
    assert torch.equal(bank, memory)


def test_rows_beyond_two_gib() -> None:
    case = Case(1, 64, 64, 16, 1024, 2_200_000)
    memory = fresh(case)
    inputs = make_inputs(case, torch.device("cuda"))
    assert int(inputs.k_idx.max()) * case.head_dim > 2**31
    before = memory[inputs.k_idx.view(-1)].clone()
    call(memory, case)
    assert not torch.equal(memory[inputs.k_idx.view(-1)], before)


def test_checks_read_indices_where_asked() -> None:
    inputs = make_inputs(CASE, torch.device("cuda"))
    memory, bad = inputs.memory.clone(), list(inputs.tokens())
    bad[0] = bad[0].clone()
    bad[0][1, 3, 2] = 7  # a row of stream 0
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=r"k_idx: expected bank rows in 4096..8191 for stream 1"),
    ):
        sdm_write_read(
            memory, *bad, num_memory_slots=CASE.slots, num_parallel=CASE.streams, check_indices=True
        )
    assert torch.equal(memory, inputs.memory)


def test_cupy_in_and_out_equals_torch() -> None:
    cupy = pytest.importorskip("cupy")
    memory = fresh()
    want = call(memory)
    inputs = make_inputs(CASE, torch.device("cuda"))
    bank = cupy.from_dlpack(fresh())
    stream = cupy.cuda.Stream(non_blocking=True)
    torch.cuda.synchronize()
    with stream:
        readings = sdm_write_read(
            bank,
            *(cupy.from_dlpack(x) for x in inputs.tokens()),
            chunk_size=CASE.chunk,
            num_memory_slots=CASE.slots,
            num_parallel=CASE.streams,
        )
        assert isinstance(readings, cupy.ndarray)
    stream.synchronize()
    assert digest(torch.from_dlpack(readings), torch.from_dlpack(bank)) == digest(want, memory)
