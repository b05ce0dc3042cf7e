"""The persistent backward against the stepwise one, bit for bit: gradients, restored bank, lam."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdm_rt.plan import kernel_resources, persistent_backward
from sdm_rt.plan.column_slices import NARROW_SLICE, WIDE_SLICE, PersistentConfig
from sdm_rt.plan.device import DeviceModel
from sdm_rt.plan.persistent_backward import Layout
from sdm_rt.plan.shapes import WriteReadShape
from sdm_rt.plan.step_plan import StepPlan
from tests.emulator.build import Replacement
from tests.emulator.harness import EmulatorError
from tests.emulator.harness import run as emulate
from tests.kernels.backends import BACKENDS, Backend, device_model, execute, require
from tests.kernels.backward import planned_backward
from tests.kernels.forward import planned_forward
from tests.problems import GATES, WRITES, Problem, make_problem
from tests.tolerances import assert_same_bits

EMULATED_THREADS = 64
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def available(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a cluster run as fibers on the emulator, so they are small there, and so are slabs."""
    require(backend)
    if not device_model(backend).clusters:
        pytest.skip("needs a GPU with thread block clusters, compute capability 9.0")
    monkeypatch.setattr(persistent_backward, "PARTIAL_BYTES", 1)
    if backend == "emulator":
        cut_into(monkeypatch, PersistentConfig(NARROW_SLICE, 2, EMULATED_THREADS))


def cut_into(monkeypatch: pytest.MonkeyPatch, config: PersistentConfig) -> None:
    """Make plans of this cut; the table has no figures of its kernels."""
    monkeypatch.setattr(persistent_backward, "configs", lambda *_: iter([config]))
    monkeypatch.setitem(kernel_resources.BUDGETS, "persistent_backward.cu", (config.threads, 1))


def lay_out(monkeypatch: pytest.MonkeyPatch, in_place: bool, overlap: bool) -> None:
    """Make plans of the smallest layout of a kind."""
    layouts = persistent_backward._layouts

    def of_the_kind(shape: WriteReadShape, config: PersistentConfig) -> list[Layout]:
        kinds = [one for one in layouts(shape, config) if (one.in_place, one.overlap) == (in_place, overlap)]
        return kinds[-1:]

    monkeypatch.setattr(persistent_backward, "_layouts", of_the_kind)


@dataclass(frozen=True)
class Walked:
    """What a forward and its backward leave behind."""

    plan: StepPlan
    results: dict[str, Tensor]


def run(
    backend: Backend,
    problem: Problem,
    chunk: int,
    schedule: str,
    *,
    bank: Tensor | None = None,
    model: DeviceModel | None = None,
    replacements: tuple[Replacement, ...] = (),
    **options: Any,
) -> Walked:
    model = model or device_model(backend)
    forward = planned_forward(problem, chunk, model, bank=bank, training=True, **options)
    memory = forward.values["memory"]
    plan, calls, gradients, scratch = planned_backward(
        problem, forward, model, bank_gradient=True, bank=memory, schedule=schedule
    )
    assert plan.schedule == schedule
    calls, scratch = [*forward.calls, *calls], [*forward.scratch, *scratch]
    outputs = [forward.readings, *(x for name, x in gradients.items() if name != "grad_memory")]
    if backend == "emulator":
        emulate(calls, outputs=outputs, scratch=scratch, replacements=replacements, builds=("access",))
    else:
        execute(backend, calls, outputs=outputs, scratch=scratch)
    values = {name: x for call in calls for name, x in call.values.items()}
    whole = {name: values[name] for name in ("lam", "d_k_pd", "d_a", "d_qk")}
    return Walked(plan, gradients | whole | {"bank": memory})


def check(backend: Backend, problem: Problem, chunk: int, **options: Any) -> Walked:
    want = run(backend, problem, chunk, "stepwise", **options)
    got = run(backend, problem, chunk, "persistent", **options)
    for name, x in want.results.items():
        assert_same_bits(name, got.results[name], x)
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [1, 15, 17, 40])
def test_tokens_around_the_chunk(backend: Backend, dtype: torch.dtype, T: int) -> None:
    got = check(backend, make_problem(2, T, 4, 3, 72, 24, seed=T).cast(dtype), 16)
    assert got.plan.slabs == -(-T // 16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [1, 3, 30, 64, 125])
def test_widths_of_a_row(backend: Backend, dtype: torch.dtype, D: int) -> None:
    check(backend, make_problem(1, 21, 5, 4, D, 40, seed=D).cast(dtype), 16)


@pytest.mark.parametrize("chunk", [1, 7, 33, 65])
def test_chunk_sizes(backend: Backend, chunk: int) -> None:
    problem = make_problem(1, min(2 * chunk + 1, 70), 3, 3, 40, 30, seed=chunk)
    check(backend, problem.cast(torch.float32), chunk)


@pytest.mark.parametrize(("W", "R"), [(1, 9), (9, 1), (17, 16), (40, 33)])
def test_slots_of_a_token(backend: Backend, W: int, R: int) -> None:
    check(backend, make_problem(1, 40, W, R, 8, 60, seed=W).cast(torch.bfloat16), 32)


@pytest.mark.parametrize("slice_bytes", [NARROW_SLICE, WIDE_SLICE])
@pytest.mark.parametrize("cluster", [1, 2, 3, 4, 6, 8])
def test_slices_and_clusters(
    backend: Backend, cluster: int, slice_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = EMULATED_THREADS if backend == "emulator" else 512
    cut_into(monkeypatch, PersistentConfig(slice_bytes, cluster, threads))
    problem = make_problem(2, 25, 5, 4, 200, 30, seed=cluster, writes="hot")
    check(backend, problem.cast(torch.bfloat16), 24)


@pytest.mark.parametrize("slice_bytes", [NARROW_SLICE, WIDE_SLICE])
@pytest.mark.parametrize(("in_place", "overlap"), [(False, True), (True, False), (True, True)])
def test_layouts(
    backend: Backend, in_place: bool, overlap: bool, slice_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = EMULATED_THREADS if backend == "emulator" else 512
    cut_into(monkeypatch, PersistentConfig(slice_bytes, 2, threads))
    lay_out(monkeypatch, in_place, overlap)
    got = check(backend, make_problem(1, 67, 5, 4, 72, 40, seed=1).cast(torch.float32), 65)
    assert ("lam in the place of gwr" in got.plan.kernels()[0].note) == in_place
    assert ("where the tiles lie" in got.plan.kernels()[0].note) == overlap


@pytest.mark.parametrize("gate_per_write", [False, True])
@pytest.mark.parametrize("gates", GATES)
def test_gates(backend: Backend, gates: str, gate_per_write: bool) -> None:
    problem = make_problem(2, 37, 4, 4, 8, 10, gates=gates, gate_per_write=gate_per_write, writes="repeats")
    check(backend, problem.cast(torch.float32), 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("writes", WRITES)
def test_collisions(backend: Backend, writes: str, dtype: torch.dtype) -> None:
    check(backend, make_problem(2, 40, 4, 5, 72, 12, writes=writes, seed=3).cast(dtype), 32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("snapshot", ["bf16", "fp8", "int4"])
@pytest.mark.parametrize("D", [72, 75])
def test_quantized_snapshots(backend: Backend, snapshot: str, dtype: torch.dtype, D: int) -> None:
    problem = make_problem(1, 40, 4, 5, D, 30, seed=7, writes="hot").cast(dtype)
    check(backend, problem, 16, snapshot=snapshot)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("D", [72, 75])
def test_gradient_bank_in_float32(backend: Backend, dtype: torch.dtype, D: int) -> None:
    problem = make_problem(2, 40, 4, 5, D, 30, writes="repeats", seed=6).cast(dtype)
    check(backend, problem, 16, grad_bank_fp32=True)


def test_streams_of_different_lengths(backend: Backend) -> None:
    problem = make_problem(5, 37, 3, 4, 16, 20, lengths=[37, 0, 16, 17, 5]).cast(torch.bfloat16)
    check(backend, problem, 16)


def test_indices_outside_the_stream_and_of_32_bits(backend: Backend) -> None:
    problem = make_problem(3, 20, 5, 6, 16, 9, seed=2).cast(torch.float32)
    for token, lane, row in ((3, 2, 8), (3, 4, 18), (11, 0, 2**30)):
        problem.k_idx[1, token, lane] = row
    problem.q_idx[1, 5, 1] = 20
    wide = check(backend, problem, 8)
    narrow = check(backend, replace(problem, k_idx=problem.k_idx.int(), q_idx=problem.q_idx.int()), 8)
    for name, x in wide.results.items():
        assert_same_bits(name, narrow.results[name], x)


def test_the_size_of_a_slab_changes_no_bit(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(2, 70, 4, 5, 72, 30, seed=5).cast(torch.bfloat16)
    runs = []
    step_bytes = 1
    for steps, slabs in ((1, 5), (2, 3), (100, 1)):
        monkeypatch.setattr(persistent_backward, "PARTIAL_BYTES", steps * step_bytes)
        runs.append(run(backend, problem, 16, "persistent"))
        assert runs[-1].plan.slabs == slabs
        step_bytes = sum(one.bytes for one in runs[0].plan.buffers if one.name.startswith("partial_"))
    for other in runs[1:]:
        for name, x in runs[0].results.items():
            assert_same_bits(name, other.results[name], x)


def test_rows_of_a_bank_that_loads_cannot_take_whole(backend: Backend) -> None:
    problem = make_problem(1, 20, 4, 4, 64, 30, seed=1).cast(torch.bfloat16)
    room = torch.zeros(31 * 64, dtype=torch.bfloat16)
    results = []
    for schedule in ("stepwise", "persistent"):
        bank = room[1 : 1 + 30 * 64].view(30, 64)
        bank.copy_(problem.memory)
        results.append(run(backend, problem, 16, schedule, bank=bank))
    for name, x in results[0].results.items():
        assert_same_bits(name, results[1].results[name], x)


KERNEL = "persistent_backward.cu"
BARRIERS = {
    "gwr": (
        Replacement(KERNEL, "ptx::copy_wait<0>();\n        arrive();", "ptx::copy_wait<0>();"),
        Replacement(KERNEL, "wait();           // gwr is whole", ""),
    ),
    "lam": (
        Replacement(KERNEL, "held = written_rows().load_held(step, 0);\n                arrive();", ""),
        Replacement(KERNEL, "wait();  // lam is whole", ""),
    ),
    "rows": (
        Replacement(KERNEL, "arrive();\n        if (s > slab_step)", "if (s > slab_step)"),
        Replacement(KERNEL, "wait();  // the rows are written", ""),
    ),
}


@pytest.mark.parametrize("missing", BARRIERS)
def test_a_missing_barrier_shows(backend: Backend, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "gpu":
        pytest.skip("faults are seeded on the emulator")
    monkeypatch.setattr(persistent_backward, "PARTIAL_BYTES", 2**30)
    problem = make_problem(1, 40, 4, 4, 16, 30, seed=1).cast(torch.bfloat16)
    with pytest.raises(EmulatorError) as caught:
        run(backend, problem, 16, "persistent", replacements=BARRIERS[missing])
    assert caught.value.kind in ("race", "unwritten", "cluster"), caught.value
