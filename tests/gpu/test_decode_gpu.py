"""Decode on a real GPU: against the oracle at real shapes, and what only a GPU can show."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import sdm_rt
from sdm_rt import product_key_topk, repeated_write_slots, sdm_decode_step, sdm_write_read
from tests.kernels.decode import decode, decode_oracle
from tests.problems import Problem, make_problem
from tests.tolerances import TOLERANCES, assert_close, assert_same_bits

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Inputs = dict[str, Tensor]


def on_gpu(problem: Problem, t: int = 0, device: str = "cuda") -> Inputs:
    """The bank and token t, on the GPU."""
    return {"memory": problem.memory.to(device)} | {
        name: x[:, t].to(device) for name, x in problem.inputs().items()
    }


def step(inputs: Inputs, **options: Any) -> tuple[Tensor, Tensor]:
    """Readings and bank of one step on a copy of the bank."""
    memory = inputs["memory"].clone()
    readings = sdm_decode_step(**{**inputs, "memory": memory}, **options)
    return readings, memory


def assert_same_step(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    for name, left, right in zip(("readings", "bank"), got, want, strict=True):
        assert_same_bits(name, left, right)


def where(got: Tensor, want: Tensor) -> str:
    """Which rows and columns lie outside the tolerance, element by element."""
    tolerance = TOLERANCES[got.dtype]
    got, want = got.double(), want.double()
    wrong = ~((got - want).abs() <= 100 * (tolerance.relative * want.abs().mean() + tolerance.floor))
    rows, columns = (wrong.any(dim=other).nonzero().flatten().tolist() for other in (1, 0))
    return (
        f"{int(wrong.sum())} values, rows {rows[:8]} of {len(rows)}, columns {columns[:8]} of {len(columns)}"
    )


def check(problem: Problem) -> None:
    got, want = decode("gpu", problem), decode_oracle(problem)
    try:
        assert_close("readings", got.readings, want.readings, problem.memory.dtype)
        assert_close("bank", got.bank, want.bank, problem.memory.dtype)
        assert got.repeats == want.repeats
    except AssertionError as error:
        again = decode("gpu", problem)
        same = torch.equal(again.bank, got.bank) and torch.equal(again.readings, got.readings)
        raise AssertionError(
            f"{error}\nreadings: {where(got.readings, want.readings)}\nbank: {where(got.bank, want.bank)}\n"
            f"repeats: {got.repeats}, expected {want.repeats}\na second run gives "
            f"{'the same bits' if same else 'other bits'}"
        ) from error


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("P", "W", "R", "D", "S"),
    [
        (16, 64, 64, 1024, 4096),
        (64, 64, 64, 1024, 256),
        (2, 64, 64, 1024, 65536),
        (1, 1, 1, 1, 1),
        (3, 256, 256, 96, 256),
        (5, 128, 33, 1000, 500),
        (2, 37, 200, 100, 300),
        (130, 7, 9, 30, 20),
        (1, 16, 16, 16384, 64),
        (1, 16, 16, 16383, 64),
        (4, 256, 1, 3, 1024),
    ],
)
def test_real_shapes(dtype: torch.dtype, P: int, W: int, R: int, D: int, S: int) -> None:
    check(make_problem(P, 1, W, R, D, S, seed=D).cast(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gates", ["zero", "-50", "-1e4", "-inf", "all kinds"])
@pytest.mark.parametrize("gate_per_write", [False, True])
@pytest.mark.parametrize("writes", ["distinct", "repeats", "one slot"])
def test_gates_and_repeats(dtype: torch.dtype, gates: str, gate_per_write: bool, writes: str) -> None:
    problem = make_problem(4, 1, 40, 24, 72, 64, gates=gates, gate_per_write=gate_per_write, writes=writes)
    check(problem.cast(dtype))


@pytest.mark.parametrize("seed", range(30))
def test_random_shapes(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=draw))

    W, R = number(1, 256), number(1, 256)
    P, D, S = number(1, 40), number(1, 700), number(W, 2 * W)
    lengths = torch.randint(0, 2, (P,), generator=draw).tolist() if seed % 3 == 0 else None
    problem = make_problem(
        P, 1, W, R, D, S, seed=seed, gates="all kinds", gate_per_write=bool(seed % 2), lengths=lengths
    )
    check(problem.cast(DTYPES[seed % 3]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_thousand_tokens_equal_the_cpu(dtype: torch.dtype) -> None:
    problem = make_problem(3, 1000, 8, 12, 40, 96, gates="mild", seed=7).cast(dtype)
    there = {name: x.cuda() for name, x in problem.inputs().items()}
    here_bank, there_bank = problem.memory.clone(), problem.memory.cuda()
    here, readings = [], []
    for t in range(problem.tokens):
        here.append(sdm_decode_step(here_bank, **{name: x[:, t] for name, x in problem.inputs().items()}))
        readings.append(sdm_decode_step(there_bank, **{name: x[:, t] for name, x in there.items()}))
    assert_close("readings", torch.stack(readings), torch.stack(here), dtype)
    assert_close("bank", there_bank, here_bank, dtype)


def test_repeated_calls_give_the_same_bits() -> None:
    inputs = on_gpu(make_problem(16, 1, 64, 64, 1024, 512, writes="repeats").cast(torch.bfloat16))
    first = step(inputs)
    for _ in range(50):
        assert_same_step(step(inputs), first)


def test_streams_beside_change_no_bit() -> None:
    problem = make_problem(64, 1, 32, 48, 520, 128).cast(torch.bfloat16)
    together = step(on_gpu(problem))
    for first, last in ((0, 1), (5, 7), (32, 64)):
        alone = step(on_gpu(problem.streams_of(first, last)))
        rows = slice(first * problem.slots, last * problem.slots)
        assert_same_step(alone, (together[0][first:last], together[1][rows]))


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_any_alignment_gives_the_same_bits(offset: int) -> None:
    inputs = on_gpu(make_problem(4, 1, 32, 32, 64, 64).cast(torch.bfloat16))
    want = step(inputs)
    storage = torch.empty(inputs["memory"].numel() + 16, dtype=torch.bfloat16, device="cuda")
    moved = storage[offset : offset + inputs["memory"].numel()].view_as(inputs["memory"])
    moved.copy_(inputs["memory"])
    readings = sdm_decode_step(**{**inputs, "memory": moved})
    assert_same_step((readings, moved), want)


@pytest.mark.parametrize("layout", ["columns", "transposed", "rows"])
def test_strided_inputs_equal_contiguous_ones(layout: str) -> None:
    inputs = on_gpu(make_problem(4, 1, 32, 24, 64, 64, gate_per_write=True).cast(torch.bfloat16))
    want = step(inputs)

    def strided(x: Tensor) -> Tensor:
        rows, columns = x.shape
        if layout == "columns":
            return x.new_zeros(rows, 2 * columns + 1)[:, 1::2].copy_(x)
        if layout == "transposed":
            return x.new_zeros(columns, rows).T.copy_(x)
        return x.new_zeros(2 * rows, columns)[::2].copy_(x)

    moved = {name: strided(x) for name, x in inputs.items()}
    readings = sdm_decode_step(**moved)
    assert_same_step((readings, moved["memory"]), want)


def test_expanded_parameters_and_inference_tensors() -> None:
    inputs = on_gpu(make_problem(4, 1, 8, 8, 16, 32).cast(torch.float32))
    inputs["beta"] = torch.full((1, 1), 0.5, device="cuda").expand(4, 1)
    inputs["g"] = torch.tensor(-0.1, device="cuda").expand(4, 8)
    want = step(inputs)
    bank = torch.nn.Parameter(inputs["memory"].clone())
    with pytest.raises(RuntimeError, match="memory: requires grad"):
        sdm_decode_step(**{**inputs, "memory": bank})
    with torch.no_grad():
        readings = sdm_decode_step(**{**inputs, "memory": bank})
    assert_same_step((readings, bank.detach()), want)
    with torch.inference_mode():
        assert_same_step(step(inputs), want)


def test_bad_input_changes_nothing_and_the_next_call_works() -> None:
    inputs = on_gpu(make_problem(2, 1, 8, 8, 16, 32).cast(torch.float32))
    before = inputs["memory"].clone()
    with pytest.raises(ValueError, match="v: expected shape"):
        sdm_decode_step(**{**inputs, "v": inputs["v"][:, 1:]})
    with pytest.raises(ValueError, match="beta: expected the device of memory, cuda:0, got cpu"):
        sdm_decode_step(**{**inputs, "beta": inputs["beta"].cpu()})
    with pytest.raises(TypeError, match="float64"):
        sdm_decode_step(**{**inputs, "memory": before.double()})
    assert_same_bits("bank", inputs["memory"], before)
    step(inputs)


def test_indices_out_of_range(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(3, 1, 8, 8, 16, 32).cast(torch.float32)
    problem.k_idx[1, 0, 3] = 5
    problem.q_idx[2, 0, 0] = 2**40
    check(problem)
    inputs = on_gpu(problem)
    monkeypatch.setenv("SDM_RT_CHECK", "1")
    before = inputs["memory"].clone()
    with pytest.raises(ValueError, match=r"k_idx: expected bank rows in 32\.\.63 for stream 1, got 5"):
        sdm_decode_step(**inputs)
    assert_same_bits("bank", inputs["memory"], before)


def test_empty_calls() -> None:
    inputs = on_gpu(make_problem(2, 1, 8, 8, 16, 32).cast(torch.float32))
    none = {name: x[:0] for name, x in inputs.items()}
    assert sdm_decode_step(**none).shape == (0, 16)


def test_rows_beyond_two_to_the_31_elements() -> None:
    rows, columns = 2**21 + 64, 1024
    if torch.cuda.mem_get_info()[0] < 3 * rows * columns * 2:
        pytest.skip("needs 13 GB of free GPU memory")
    memory = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    last = torch.arange(rows - 8, rows, device="cuda").view(1, 8)
    memory[last[0]] = 1.0
    weights = torch.full((1, 8), 0.125, device="cuda")
    one = torch.ones(1, 1, device="cuda")
    v = torch.full((1, columns), 3.0, device="cuda")
    readings = sdm_decode_step(memory, last, weights, v, one, 0 * one, last, weights)
    # delta = 3 - 1; every row becomes 1 + 0.125 * 2
    assert bool((memory[last[0]] == 1.25).all())
    assert bool((readings == 1.25).all())
    assert not bool(memory[: rows - 8].any())


def test_subnormal_rows_read_as_zero() -> None:
    """CuPy compiles with -ftz=true: float32 subnormals flush to zero in every kernel."""
    memory = torch.full((4, 8), 1e-40, device="cuda")
    idx = torch.tensor([[0]], device="cuda")
    one = torch.ones(1, 1, device="cuda")
    readings = sdm_decode_step(
        memory, idx, one, torch.zeros(1, 8, device="cuda"), 0 * one, 0 * one, idx + 1, one
    )
    assert bool((readings == 0).all())


def test_repeats_are_counted_on_the_device() -> None:
    repeated_write_slots()
    problem = make_problem(5, 1, 12, 4, 200, 16, writes="one slot").cast(torch.bfloat16)
    step(on_gpu(problem))
    assert repeated_write_slots(reset=False) == 5 * 11
    assert repeated_write_slots() == 5 * 11
    assert repeated_write_slots() == 0


def test_the_plan_is_shown() -> None:
    step(on_gpu(make_problem(2, 1, 8, 8, 16, 32).cast(torch.float32)))
    shown = sdm_rt.last_dispatch()
    assert shown["op"] == "sdm_decode_step"
    assert shown["plan"].device.name == torch.cuda.get_device_name()


# ---- streams and threads ----


def slow_copies(inputs: Inputs) -> Inputs:
    """Copies that appear late on the current stream."""
    late = {name: torch.full_like(x, -1 if x.dtype == torch.int64 else 0) for name, x in inputs.items()}
    torch.cuda._sleep(100_000_000)
    for name, x in inputs.items():
        late[name].copy_(x)
    return late


def test_a_side_stream_with_a_slow_producer() -> None:
    inputs = on_gpu(make_problem(8, 1, 32, 32, 256, 64).cast(torch.bfloat16))
    want = step(inputs)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        late = slow_copies(inputs)
        readings = sdm_decode_step(**late)
    side.synchronize()
    assert_same_step((readings, late["memory"]), want)


def test_two_threads_on_two_streams() -> None:
    problems = [make_problem(8, 64, 16, 16, 128, 64, seed=seed).cast(torch.bfloat16) for seed in (0, 1)]
    tokens = [[on_gpu(problem, t) for t in range(problem.tokens)] for problem in problems]
    torch.cuda.synchronize()

    def run(which: int, stream: torch.cuda.Stream, results: dict[int, tuple[Tensor, Tensor]]) -> None:
        with torch.cuda.stream(stream):
            memory = tokens[which][0]["memory"].clone()
            readings = [sdm_decode_step(**{**inputs, "memory": memory}) for inputs in tokens[which]]
            results[which] = (torch.stack(readings), memory)
            stream.synchronize()

    alone: dict[int, tuple[Tensor, Tensor]] = {}
    for which in (0, 1):
        run(which, torch.cuda.Stream(), alone)
    for _ in range(5):
        together: dict[int, tuple[Tensor, Tensor]] = {}
        threads = [
            threading.Thread(target=run, args=(which, torch.cuda.Stream(), together)) for which in (0, 1)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for which in (0, 1):
            assert_same_step(together[which], alone[which])


def test_a_thread_that_has_touched_no_gpu() -> None:
    inputs = on_gpu(make_problem(2, 1, 8, 8, 16, 32).cast(torch.float32))
    want = step(inputs)
    readings = torch.empty_like(want[0])
    memory = inputs["memory"].clone()
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            readings.copy_(sdm_decode_step(**{**inputs, "memory": memory}))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert not failures
    assert_same_step((readings, memory), want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_gpu_that_is_not_current() -> None:
    problem = make_problem(4, 1, 16, 16, 64, 32).cast(torch.bfloat16)
    want = step(on_gpu(problem))
    got = step(on_gpu(problem, device="cuda:1"))
    assert torch.cuda.current_device() == 0
    assert got[0].device == torch.device("cuda", 1)
    assert_same_step(got, want)
    assert_same_step(step(on_gpu(problem)), want)


# ---- graphs and PDL ----

STEPS = 64


def eager_steps(problem: Problem) -> tuple[Tensor, Tensor]:
    there = {name: x.cuda() for name, x in problem.inputs().items()}
    memory = problem.memory.cuda()
    readings = [
        sdm_decode_step(memory, **{name: x[:, t] for name, x in there.items()}) for t in range(problem.tokens)
    ]
    return torch.stack(readings), memory


def test_a_graph_of_64_steps_equals_64_calls() -> None:
    problem = make_problem(16, STEPS, 32, 32, 512, 64, writes="hot").cast(torch.bfloat16)
    want = eager_steps(problem)
    tokens = [{name: x[:, t].cuda() for name, x in problem.inputs().items()} for t in range(STEPS)]
    memory = problem.memory.cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        readings = [sdm_decode_step(memory, **token) for token in tokens]
    for _ in range(5):
        memory.copy_(problem.memory)
        graph.replay()
        assert_same_step((torch.stack(readings), memory), want)


@pytest.mark.parametrize("pdl", ["0", "1"])
def test_pdl_changes_no_bit(monkeypatch: pytest.MonkeyPatch, pdl: str) -> None:
    problem = make_problem(16, STEPS, 32, 32, 512, 64, writes="hot").cast(torch.bfloat16)
    want = eager_steps(problem)
    monkeypatch.setenv("SDM_RT_PDL", pdl)
    for _ in range(10):
        assert_same_step(eager_steps(problem), want)


def test_pdl_waits_for_a_slow_kernel_before_it() -> None:
    inputs = on_gpu(make_problem(8, 1, 32, 32, 256, 64).cast(torch.bfloat16))
    want = step(inputs)
    for _ in range(20):
        assert_same_step((lambda late: (sdm_decode_step(**late), late["memory"]))(slow_copies(inputs)), want)


def test_a_cold_capture_says_warm_up_and_leaves_the_stream_usable() -> None:
    # A shape that no other test of this process uses: 3 rows a thread become a kernel of their own.
    problem = make_problem(3, 1, 70, 5, 40, 80).cast(torch.float16)
    inputs = on_gpu(problem)
    from sdm_rt.ops import decode_launch
    from sdm_rt.runtime import compile as compile_module

    decode_launch._memo.ready.clear()
    loaded = compile_module.kernels()._good.copy()
    compile_module.kernels()._good.clear()
    try:
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(RuntimeError, match="run warmup first"), torch.cuda.graph(graph):
            step(inputs)
    finally:
        compile_module.kernels()._good.update(loaded)
    readings, memory = step(inputs)
    want = decode_oracle(problem)
    assert_close("readings", readings, want.readings, torch.float16)
    assert_close("bank", memory, want.bank, torch.float16)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        step(inputs)


# ---- CuPy and other libraries ----


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy")


def as_cupy(cupy: Any, inputs: Inputs) -> dict[str, Any]:
    return {name: cupy.from_dlpack(x.clone()) for name, x in inputs.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [None, [1, 0, 1, 1]])
def test_cupy_in_and_out_equals_torch(cupy: Any, dtype: torch.dtype, lengths: list[int] | None) -> None:
    inputs = on_gpu(make_problem(4, 1, 16, 16, 72, 32).cast(dtype))
    steps = None if lengths is None else torch.tensor(lengths, device="cuda")
    want = step(inputs, lengths=steps)
    arrays = as_cupy(cupy, inputs)
    readings = sdm_decode_step(**arrays, lengths=None if steps is None else cupy.from_dlpack(steps))
    assert isinstance(readings, cupy.ndarray)
    assert readings.dtype == arrays["memory"].dtype
    assert_same_step((torch.from_dlpack(readings), torch.from_dlpack(arrays["memory"])), want)


def test_strided_cupy_arrays(cupy: Any) -> None:
    inputs = on_gpu(make_problem(4, 1, 16, 16, 72, 32).cast(torch.float32))
    want = step(inputs)
    arrays = as_cupy(cupy, inputs)
    for name, array in arrays.items():
        wide = cupy.zeros((array.shape[0], 2 * array.shape[1]), dtype=array.dtype)
        wide[:, ::2] = array
        arrays[name] = wide[:, ::2]
    readings = sdm_decode_step(**arrays)
    assert_same_step((torch.from_dlpack(readings), torch.from_dlpack(arrays["memory"]).contiguous()), want)


def test_a_cupy_stream_with_a_slow_producer(cupy: Any) -> None:
    inputs = on_gpu(make_problem(8, 1, 32, 32, 256, 64).cast(torch.float32))
    want = step(inputs)
    arrays = as_cupy(cupy, inputs)
    torch.cuda.synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        late = {name: cupy.zeros_like(array) for name, array in arrays.items()}
        square = cupy.ones((4096, 4096), dtype=cupy.float32)
        for _ in range(20):
            square = square @ square
        for name, array in arrays.items():
            late[name][...] = array
        readings = sdm_decode_step(**late)
    stream.synchronize()
    assert_same_step((torch.from_dlpack(readings), torch.from_dlpack(late["memory"])), want)


def test_cupy_operands_beside_a_torch_bank(cupy: Any) -> None:
    """The producer's stream is waited for: CuPy queues on its current stream, torch works on another."""
    inputs = on_gpu(make_problem(8, 1, 32, 32, 256, 64).cast(torch.float32))
    want = step(inputs)
    arrays = as_cupy(cupy, inputs)
    memory = inputs["memory"].clone()
    torch.cuda.synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, torch.cuda.stream(torch.cuda.Stream()):
        square = cupy.ones((4096, 4096), dtype=cupy.float32)
        for _ in range(20):
            square = square @ square
        late = cupy.zeros_like(arrays["v"])
        late[...] = arrays["v"]
        readings = sdm_decode_step(**{**inputs, "memory": memory, "v": late})
        torch.cuda.current_stream().synchronize()
    assert isinstance(readings, Tensor)
    assert_same_step((readings, memory), want)


@pytest.mark.parametrize("op", ["decode", "write-read"])
def test_torch_operands_beside_a_cupy_bank(cupy: Any, op: str) -> None:
    """The work waits for what torch has queued, and torch's memory is not handed out again before it."""
    inputs = on_gpu(make_problem(8, 1, 32, 32, 256, 64).cast(torch.float32))
    memory, v = inputs.pop("memory"), inputs.pop("v")

    def run(bank: Any, v: Tensor) -> Any:
        if op == "decode":
            return sdm_decode_step(bank, v=v, **inputs)
        return sdm_write_read(bank, v=v, **inputs, num_parallel=8, num_memory_slots=64)

    want_bank = memory.clone()
    want = run(want_bank, v)
    bank = cupy.from_dlpack(memory.clone())
    torch.cuda.synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, torch.cuda.stream(torch.cuda.Stream()):
        square = torch.ones(4096, 4096, device="cuda")
        for _ in range(20):
            square = square @ square
        late = torch.zeros_like(v)
        late.copy_(v)
        readings = run(bank, late)
        del late
        torch.full_like(v, torch.nan)  # where the operand lay
    stream.synchronize()
    assert_same_step((torch.from_dlpack(readings), torch.from_dlpack(bank)), (want, want_bank))


@pytest.mark.parametrize("op", ["write-read", "top-k"])
def test_cupys_per_thread_stream_and_captures_are_refused(cupy: Any, op: str) -> None:
    inputs = on_gpu(make_problem(2, 1, 4, 4, 16, 8).cast(torch.float32))
    arrays = as_cupy(cupy, inputs)
    scores = cupy.ones((3, 8), dtype=cupy.float32)

    def run() -> Any:
        if op == "top-k":
            return product_key_topk(scores, (4, 4), 3)
        return sdm_write_read(**arrays, num_parallel=2, num_memory_slots=8)

    with cupy.cuda.Stream.ptds, pytest.raises(RuntimeError, match="per-thread default stream"):
        run()
    assert bool((arrays["memory"] == cupy.from_dlpack(inputs["memory"])).all())
    run()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(RuntimeError, match=r"torch\.cuda\.graph"):
            run()
        stream.end_capture()
    run()


def test_a_cupy_bank_in_a_capture_of_torch(cupy: Any) -> None:
    """As the refusal of CuPy's own captures says."""
    inputs = on_gpu(make_problem(2, 1, 4, 4, 16, 8).cast(torch.float32))
    arrays = as_cupy(cupy, inputs)
    want_bank = inputs.pop("memory").clone()
    want = [sdm_write_read(want_bank, **inputs, num_parallel=2, num_memory_slots=8) for _ in range(3)]
    bank = arrays.pop("memory")
    start = bank.copy()
    sdm_write_read(bank, **arrays, num_parallel=2, num_memory_slots=8)
    bank[...] = start
    cupy.cuda.Device().synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        readings = sdm_write_read(bank, **arrays, num_parallel=2, num_memory_slots=8)
    for one in want:
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits("readings", torch.from_dlpack(readings), one)
    assert_same_bits("bank", torch.from_dlpack(bank), want_bank)


class Foreign:
    """An array of some library: DLPack and nothing else."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


@pytest.mark.parametrize("wrap", [Foreign, lambda x: x])
def test_any_dlpack_object(wrap: Callable[[Tensor], Any]) -> None:
    inputs = on_gpu(make_problem(4, 1, 16, 16, 72, 32).cast(torch.bfloat16))
    want = step(inputs)
    memory = inputs["memory"].clone()
    readings = sdm_decode_step(
        wrap(memory), **{name: Foreign(x) for name, x in inputs.items() if name != "memory"}
    )
    assert isinstance(readings, Tensor)
    assert_same_step((readings, memory), want)


def test_float8_values() -> None:
    inputs = on_gpu(make_problem(4, 1, 16, 16, 72, 32).cast(torch.bfloat16))
    inputs["v"] = inputs["v"].to(torch.float8_e4m3fn)
    assert_same_step(step(inputs), step({**inputs, "v": inputs["v"].to(torch.bfloat16)}))


def test_index_dtypes_and_shapes_with_a_token_axis() -> None:
    problem = make_problem(4, 1, 16, 16, 72, 32).cast(torch.bfloat16)
    want = step(on_gpu(problem))
    narrow = replace(problem, k_idx=problem.k_idx.int(), q_idx=problem.q_idx.int())
    assert_same_step(step(on_gpu(narrow)), want)
    inputs = on_gpu(problem)
    with_axis = {name: x if name == "memory" else x.unsqueeze(1) for name, x in inputs.items()}
    assert_same_step(step(with_axis), want)
