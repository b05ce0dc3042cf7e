"""The runtime on a real GPU: hot reload, cache, precompiled kernels, graphs, the driver's view of plans."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sdm_rt import sdm_decode_step
from sdm_rt.cli import main
from sdm_rt.ops import decode_launch
from sdm_rt.ops.plan_inputs import device_model
from sdm_rt.plan.decode import decode_kernel, plan_decode
from sdm_rt.plan.device import preset
from sdm_rt.plan.occupancy import occupancy
from sdm_rt.plan.shapes import DecodeShape
from sdm_rt.runtime import driver, graph
from sdm_rt.runtime.compile import CupyBuilder, Kernels, kernels
from sdm_rt.runtime.dependencies import load_cupy
from sdm_rt.runtime.device import gpu
from sdm_rt.runtime.launcher import PreparedLaunch, prepare, warmup
from sdm_rt.runtime.sources import find_kernels
from tests.problems import make_problem
from tests.tolerances import assert_same_bits

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
FIRST_CALL = """
import torch
from sdm_rt import sdm_decode_step
from tests.problems import make_problem
problem = make_problem(2, 1, 8, 8, 24, 32).cast(torch.bfloat16)
memory = problem.memory.cuda()
readings = sdm_decode_step(memory, **{name: x[:, 0].cuda() for name, x in problem.inputs().items()})
print(readings.float().sum().item())
"""


# Several kernels, which threads compile, of a process that uses its second GPU alone.
ON_THE_SECOND = """
import ctypes
import torch
torch.cuda.set_device(1)
from sdm_rt import sdm_write_read
from sdm_rt.runtime import driver
from tests.problems import make_problem
problem = make_problem(2, 8, 8, 8, 24, 32).cast(torch.bfloat16)
tensors = {name: x.cuda() for name, x in problem.inputs().items()}
sdm_write_read(problem.memory.cuda(), **tensors, num_memory_slots=32, num_parallel=2)
torch.cuda.synchronize()
for device in (0, 1):
    flags, active = ctypes.c_uint(), ctypes.c_int()
    driver.library().cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
    print(active.value)
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_process_of_another_gpu_makes_no_context_on_the_first(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ON_THE_SECOND],
        cwd=ROOT,
        env={**os.environ, "SDM_RT_PROGRESS": "1", "SDM_RT_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert succeeded(done).split() == ["0", "1"]
    assert done.stderr.count("sdm_rt: compiling") > 1


def first_call(**variables: str) -> subprocess.CompletedProcess[str]:
    # The progress line tells what was compiled, whatever the caller of the tests has set.
    environment = {**os.environ, "SDM_RT_PROGRESS": "1", **variables}
    return subprocess.run(
        [sys.executable, "-c", FIRST_CALL],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def succeeded(done: subprocess.CompletedProcess[str]) -> str:
    """What a process printed; its messages where it failed."""
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def small_step() -> Callable[[], Tensor]:
    problem = make_problem(2, 1, 8, 8, 24, 32).cast(torch.float32)
    there = {name: x[:, 0].cuda() for name, x in problem.inputs().items()}
    return lambda: sdm_decode_step(problem.memory.cuda(), **there)


@pytest.fixture
def edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the sources that may be edited."""
    folder = tmp_path / "kernels_cu"
    shutil.copytree(find_kernels(), folder)
    monkeypatch.setenv("SDM_RT_KERNELS", str(folder))
    monkeypatch.setenv("SDM_RT_CACHE_DIR", str(tmp_path / "cache"))
    return folder


def test_an_edited_header_is_used_at_the_next_call(edited: Path) -> None:
    call = small_step()
    plain = call()
    header = edited / "numeric.cuh"
    text = header.read_text()
    # Every sum over a bank row passes through unpack: read all values twice as large.
    doubled = text.replace("x[i] = to_float(values[i]);", "x[i] = 2.0f * to_float(values[i]);")
    assert doubled != text
    header.write_text(doubled)
    assert not torch.equal(call(), plain)
    header.write_text(doubled + "int broken = no_such_name;\n")
    line = len(doubled.splitlines()) + 1
    with pytest.warns(RuntimeWarning, match=rf"numeric\.cuh\({line}\): error.*no_such_name") as caught:
        broken = call()
    assert str(header) in str(caught[0].message)
    assert not torch.equal(broken, plain)
    header.write_text(text)
    assert_same_bits("readings", call(), plain)


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    folder = str(tmp_path / "cache")
    cold, warm = (first_call(SDM_RT_CACHE_DIR=folder) for _ in range(2))
    assert succeeded(cold) == succeeded(warm)
    assert "sdm_rt: compiling decode.cu" in cold.stderr, cold.stderr
    assert "sdm_rt: compiling" not in warm.stderr, warm.stderr


def test_eight_processes_on_a_cold_cache(tmp_path: Path) -> None:
    environment = {**os.environ, "SDM_RT_CACHE_DIR": str(tmp_path / "cache")}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", FIRST_CALL], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(8)
    ]
    processes[0].kill()
    results = [process.communicate()[0] for process in processes]
    assert all(process.returncode == 0 for process in processes[1:])
    assert len(set(results[1:])) == 1
    assert "sdm_rt: compiling" not in first_call(SDM_RT_CACHE_DIR=str(tmp_path / "cache")).stderr


def test_no_home_no_toolkit(tmp_path: Path) -> None:
    homeless = first_call(
        HOME="/proc/nonexistent",
        PATH="/nonexistent",
        CUDA_HOME="/nonexistent",
        CUDA_PATH="/nonexistent",
        XDG_CACHE_HOME="",
        SDM_RT_CACHE_DIR="",
    )
    assert succeeded(homeless) == succeeded(first_call(SDM_RT_CACHE_DIR=str(tmp_path)))
    assert homeless.stderr.count("the compile cache cannot be made") == 1, homeless.stderr


def test_precompiled_kernels_equal_the_run_time_build(tmp_path: Path) -> None:
    folder = tmp_path / "precompiled"

    target = gpu(torch.cuda.current_device()).target
    shape = "W=8,R=8,D=24,C=16,S=100"
    assert main(["precompile", "--arch", target, "--shape", shape, "--output", str(folder)]) == 0
    loaded = first_call(
        SDM_RT_CACHE_DIR=str(tmp_path / "two"), SDM_RT_PRECOMPILED=str(folder), SDM_RT_JIT="0"
    )
    built = first_call(SDM_RT_CACHE_DIR=str(tmp_path / "one"))
    assert succeeded(loaded) == succeeded(built)
    assert "sdm_rt: compiling" in built.stderr, built.stderr
    assert "sdm_rt: compiling" not in loaded.stderr, loaded.stderr
    missing = first_call(SDM_RT_CACHE_DIR=str(tmp_path / "three"), SDM_RT_JIT="0")
    assert "NotPrecompiledError" in missing.stderr, missing.stderr


def test_the_users_own_cupy_cache_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDM_RT_CACHE_DIR", str(tmp_path))
    cupy = load_cupy()
    cupy.clear_memo()  # where a test before loaded the same kernel, CuPy would not compile
    users = cupy.cuda.compiler._kernel_cache_backend
    here = gpu(torch.cuda.current_device())
    Kernels(CupyBuilder()).load(decode_kernel(DecodeShape(1, 1, 1, 8), device_model(here.index).pdl), here)
    assert list(tmp_path.rglob("*.cubin"))
    assert cupy.cuda.compiler._kernel_cache_backend is users
    doubled = cupy.RawKernel('extern "C" __global__ void f(float* x) { x[0] *= 2; }', "f")
    x = cupy.ones(1, dtype=cupy.float32)
    doubled((1,), (1,), (x,))
    assert float(x[0]) == 2.0


def test_kernels_stay_loaded_where_cupy_is_told_to_forget_its_own() -> None:
    call = small_step()
    plain = call()
    load_cupy().clear_memo()
    gc.collect()
    assert_same_bits("prepared before", call(), plain)
    assert_same_bits("prepared after", small_step()(), plain)


# ---- plans and the device ----


def test_the_device_model_is_read_from_the_driver() -> None:
    model = device_model(torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    assert model.sm_count == properties.multi_processor_count
    assert model.compute_capability == (properties.major, properties.minor)
    assert model.l2_bytes == properties.L2_cache_size
    if "H200" in model.name:
        known = preset("h200")
        for field in (
            "sm_count",
            "shared_memory_per_block",
            "shared_memory_per_sm",
            "shared_memory_reserved",
            "registers_per_sm",
            "registers_per_block",
            "max_threads_per_sm",
            "max_blocks_per_sm",
            "l2_bytes",
        ):
            assert getattr(model, field) == getattr(known, field), field


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("lanes", [8, 64, 128, 256])
def test_the_driver_confirms_the_occupancy(dtype: str, lanes: int) -> None:
    index = torch.cuda.current_device()
    model = device_model(index)
    (launch,) = plan_decode(DecodeShape(16, lanes, lanes, 1024, dtype), model).kernels()
    prepared = prepare(launch, gpu(index), 0)
    function = prepared.function
    registers = driver.function_attribute(function, "registers")
    static = driver.function_attribute(function, "static_shared")
    with load_cupy().cuda.Device(index):
        resident = load_cupy().cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(
            function, launch.threads, launch.shared_memory
        )
    assert occupancy(model, launch.threads, registers, static + launch.shared_memory).blocks == resident
    assert driver.function_attribute(function, "max_threads") >= launch.threads


# ---- graphs that take other tensors ----

NAMES = ("memory", "k_idx", "k_val", "v", "beta", "g", "q_idx", "q_val")


def prepared_decode(P: int, W: int, D: int, S: int) -> PreparedLaunch:
    index = torch.cuda.current_device()
    (launch,) = plan_decode(DecodeShape(P, W, W, D, "float32"), device_model(index)).kernels()
    warmup([launch], gpu(index))
    prepared = prepare(launch, gpu(index), 0)
    count = torch.zeros(1, dtype=torch.int64, device="cuda")
    prepared.set({"row_stride": D, "S": S, "D": D, "W": W, "R": W, "gates": 1, "lengths": 0})
    prepared.set({"repeats": count.data_ptr(), "dtypes": 1 << 10 | 1 << 11})
    prepared.count = count  # type: ignore[attr-defined]
    return prepared


def tensors(seed: int, steps: int) -> tuple[Tensor, list[dict[str, Tensor]], list[Tensor]]:
    problem = make_problem(4, steps, 16, 16, 64, 32, seed=seed, writes="hot").cast(torch.float32)
    tokens = [
        {name: x[:, t].contiguous().cuda() for name, x in problem.inputs().items()} for t in range(steps)
    ]
    readings = [torch.empty(4, 64, device="cuda") for _ in range(steps)]
    return problem.memory.cuda(), tokens, readings


def values(memory: Tensor, tokens: list[dict[str, Tensor]], readings: list[Tensor]) -> list[dict[str, int]]:
    return [
        {name: x.data_ptr() for name, x in token.items()} | {"memory": memory.data_ptr(), "y": y.data_ptr()}
        for token, y in zip(tokens, readings, strict=True)
    ]


def eager(memory: Tensor, tokens: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    memory = memory.clone()
    return torch.stack([sdm_decode_step(memory, **token) for token in tokens]), memory


def test_a_captured_plan_replays_with_other_tensors() -> None:
    launch = prepared_decode(4, 16, 64, 32)
    context = driver.primary_context(torch.cuda.current_device())
    stream = torch.cuda.current_stream().cuda_stream
    first, second = tensors(0, 64), tensors(1, 64)
    wanted = [eager(*which[:2]) for which in (first, second)]
    steps = graph.capture([(launch, value) for value in values(*first)], context, first)
    assert len(steps) == 64
    steps.replay(stream)
    assert steps.update(values(*second), second) == 64
    steps.replay(stream)
    assert steps.update(values(*second), second) == 0
    torch.cuda.synchronize()
    for which, (readings, memory) in zip((first, second), wanted, strict=True):
        assert_same_bits("readings", torch.stack(which[2]), readings)
        assert_same_bits("bank", which[0], memory)


@pytest.mark.alone
def test_capturing_in_a_loop_does_not_grow_memory() -> None:
    launch = prepared_decode(4, 16, 64, 32)
    context = driver.primary_context(torch.cuda.current_device())
    case = tensors(0, 64)

    def rounds(count: int) -> int:
        for _ in range(count):
            steps = graph.capture([(launch, value) for value in values(*case)], context, case)
            steps.replay(torch.cuda.current_stream().cuda_stream)
            torch.cuda.synchronize()
            del steps
        gc.collect()
        return torch.cuda.mem_get_info()[0]

    before = rounds(20)
    assert before - rounds(100) < 8 * 2**20


def test_a_failed_capture_leaves_the_next_call_working() -> None:
    launch = prepared_decode(4, 16, 64, 32)
    context = driver.primary_context(torch.cuda.current_device())
    case = tensors(0, 2)

    class RefusedError(Exception):
        pass

    class Failing(dict[str, int]):
        def items(self) -> Any:
            raise RefusedError

    with pytest.raises(RefusedError):
        graph.capture([(launch, values(*case)[0]), (launch, Failing())], context, case)
    readings, memory = eager(*case[:2])
    steps = graph.capture([(launch, value) for value in values(*case)], context, case)
    steps.replay(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    assert_same_bits("readings", torch.stack(case[2]), readings)
    assert_same_bits("bank", case[0], memory)


# ---- contexts ----


def created_context() -> ctypes.c_void_p:
    """A context beside the primary one, popped off this thread."""
    context = ctypes.c_void_p()
    result = driver.library().cuCtxCreate_v2(ctypes.byref(context), 0, torch.cuda.current_device())
    driver.check(result, "cuCtxCreate")
    driver.check(driver.library().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p())), "cuCtxPopCurrent")
    return context


@pytest.mark.parametrize("current", ["none", "another"])
@pytest.mark.parametrize("which_stream", ["default", "side"])
def test_a_launch_while_its_context_is_not_current(current: str, which_stream: str) -> None:
    launch = prepared_decode(4, 16, 64, 32)
    memory, tokens, readings = tensors(0, 1)
    wanted = eager(memory, tokens)
    launch.set(values(memory, tokens, readings)[0])
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    stream = 0 if which_stream == "default" else side.cuda_stream
    if current == "none":
        with ThreadPoolExecutor(1) as fresh:  # a thread of its own has no current context
            fresh.submit(launch.run, stream).result()
    else:
        other = created_context()
        driver.check(driver.library().cuCtxPushCurrent_v2(other), "cuCtxPushCurrent")
        try:
            launch.run(stream)
        finally:
            popped = ctypes.c_void_p()
            driver.check(driver.library().cuCtxPopCurrent_v2(ctypes.byref(popped)), "cuCtxPopCurrent")
            driver.library().cuCtxDestroy_v2(other)
        assert popped.value == other.value
    torch.cuda.synchronize()
    assert_same_bits("readings", torch.stack(readings), wanted[0])
    assert_same_bits("bank", memory, wanted[1])


# ---- costs ----


def test_new_streams_and_slots_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    small_step()()
    kernels_now = dict(kernels()._good)
    for P, S in ((1, 8), (5, 100), (64, 32)):
        problem = make_problem(P, 1, 8, 8, 24, S).cast(torch.float32)
        sdm_decode_step(
            problem.memory.cuda(), **{name: x[:, 0].cuda() for name, x in problem.inputs().items()}
        )
    assert kernels()._good == kernels_now


def test_a_call_makes_no_copy_and_does_not_wait() -> None:
    problem = make_problem(4, 1, 16, 16, 64, 32).cast(torch.bfloat16)
    there = {name: x[:, 0].cuda() for name, x in problem.inputs().items()}
    memory = problem.memory.cuda()
    sdm_decode_step(memory, **there)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    slept = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)
    slept.record()
    readings = sdm_decode_step(memory, **there)
    assert not slept.query()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == 1
    torch.cuda.synchronize()
    assert readings.shape == (4, 64)


def test_the_memo_is_of_the_thread_and_by_shape() -> None:
    decode_launch._memo.ready.clear()
    call = small_step()
    call()
    call()
    assert len(decode_launch._memo.ready) == 1
    (ready,) = decode_launch._memo.ready.values()
    shape = DecodeShape(2, 8, 8, 24, "float32")
    assert ready.spec == decode_kernel(shape, device_model(torch.cuda.current_device()).pdl)
