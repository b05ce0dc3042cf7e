"""The persistent forward against the stepwise one, bit for bit: readings, bank, err, snapshot, repeats."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdm_rt.ops.checks import resolve_streams
from sdm_rt.plan import kernel_resources, persistent
from sdm_rt.plan.column_slices import NARROW_SLICE, WIDE_SLICE, PersistentConfig
from sdm_rt.plan.shapes import QUANTIZED
from tests.emulator.build import Replacement
from tests.emulator.harness import Call, EmulatorError
from tests.emulator.harness import run as emulate
from tests.kernels import forward
from tests.kernels.backends import BACKENDS, Backend, device_model, execute, require
from tests.kernels.forward import Planned, planned_forward
from tests.problems import Problem, make_problem
from tests.tolerances import assert_same_bits

EMULATED_THREADS = 64

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def available(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a cluster run as fibers on the emulator, so they are small there."""
    require(backend)
    if not device_model(backend).clusters:
        pytest.skip("needs a GPU with thread block clusters, compute capability 9.0")
    if backend == "emulator":
        cut_into(monkeypatch, PersistentConfig(NARROW_SLICE, 4, EMULATED_THREADS))


def cut_into(monkeypatch: pytest.MonkeyPatch, config: PersistentConfig) -> None:
    """Make plans of this cut; the table has no figures of its kernels."""
    monkeypatch.setattr(persistent, "configs", lambda *_: iter([config]))
    monkeypatch.setitem(kernel_resources.BUDGETS, "persistent_forward.cu", (config.threads, 1))


def run(backend: Backend, problem: Problem, chunk: int, schedule: str, **options: Any) -> Planned:
    planned = planned_forward(problem, chunk, device_model(backend), schedule=schedule, **options)
    execute(backend, planned.calls, outputs=[planned.readings], scratch=planned.scratch)
    return planned


def kept_rows(planned: Planned, name: str) -> list[Tensor]:
    """What a buffer [chunks, slots, *] holds of the slots that each chunk has written."""
    counts = planned.values["slot_count"].tolist()
    return [rows[:count] for rows, count in zip(planned.values[name], counts, strict=True)]


def check(
    backend: Backend, problem: Problem, chunk: int, *, training: bool = False, snapshot: str = "none"
) -> Planned:
    """Hold the persistent schedule to the stepwise one; return the former."""
    options: dict[str, Any] = {"training": training, "snapshot": snapshot}
    want = run(backend, problem, chunk, "stepwise", **options)
    got = run(backend, problem, chunk, "persistent", **options)
    walk = ["persistent_forward", *["keep_rows"] * (training and snapshot in QUANTIZED)]
    assert [launch.name for launch in got.plan.step] == walk
    assert_same_bits("readings", got.readings, want.readings)
    assert_same_bits("bank", got.values["memory"], want.values["memory"])
    assert int(got.values["repeats"]) == int(want.values["repeats"])
    if training:
        assert_same_bits("err", got.values["err"], want.values["err"])
        for name in ("slots", "snapshot", *["snapshot_scale"] * (snapshot in QUANTIZED)):
            for one, other in zip(kept_rows(got, name), kept_rows(want, name), strict=True):
                assert_same_bits(name, one, other)
    return got


@pytest.mark.parametrize("chunk", [1, 7, 16, 33, 64, 65, 130])
def test_chunk_sizes(backend: Backend, chunk: int) -> None:
    """Several tiles of the products, a last chunk that is short, blocks that own no token."""
    tokens = min(2 * chunk + 1, 150)
    problem = make_problem(1, tokens, 3, 2, 8, 30, writes="repeats", seed=chunk)
    check(backend, problem.cast(torch.float32), chunk, training=chunk % 2 == 1)


@pytest.mark.parametrize(
    ("D", "dtype"),
    [
        (1, torch.bfloat16),
        (7, torch.float32),
        (30, torch.float16),
        (66, torch.float32),
        (72, torch.float16),
        (136, torch.bfloat16),
    ],
    ids=str,
)
def test_widths_of_a_row(backend: Backend, D: int, dtype: torch.dtype) -> None:
    problem = make_problem(2, 37, 5, 4, D, 40, writes="hot", gates="some -inf", seed=D).cast(dtype)
    check(backend, problem, 16, training=True, snapshot="bf16" if D % 2 else "none")


@pytest.mark.parametrize(("W", "R"), [(1, 1), (1, 9), (9, 1), (40, 33)])
def test_lanes(backend: Backend, W: int, R: int) -> None:
    """More and fewer rows of a token than a batch of loads and than the groups of a sum."""
    problem = make_problem(2, 20, W, R, 24, 60, seed=W).cast(torch.bfloat16)
    check(backend, problem, 16)


@pytest.mark.parametrize("writes", ["distinct", "repeats", "hot"])
def test_slots_and_gates(backend: Backend, writes: str) -> None:
    problem = make_problem(
        2, 40, 4, 4, 16, 12, writes=writes, gates="some positive", gate_per_write=True, seed=3
    )
    check(backend, problem.cast(torch.bfloat16), 16, training=True)


def test_all_writes_to_one_slot(backend: Backend) -> None:
    problem = make_problem(1, 20, 3, 2, 16, 12, seed=5).cast(torch.float32)
    problem.k_idx.fill_(7)
    check(backend, problem, 16, training=True)


def test_streams_of_different_lengths(backend: Backend) -> None:
    problem = make_problem(4, 37, 3, 4, 24, 20, lengths=[37, 0, 16, 17], seed=6).cast(torch.bfloat16)
    got = check(backend, problem, 16, training=True)
    readings = got.readings.view(4, 37, 24)
    assert not readings[~problem.real()].any()


def test_streams_that_share_a_bank(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bank of 40 rows, of which no stream touches another's, in the place of two of 20."""
    problem = make_problem(2, 20, 4, 4, 24, 20, seed=4).cast(torch.bfloat16)
    want = run(backend, problem, 16, "stepwise")
    monkeypatch.setattr(
        forward,
        "resolve_streams",
        lambda memory, k_idx, slots, streams, shared, lengths, offsets: resolve_streams(
            memory, k_idx, 0, streams, True, lengths, offsets
        ),
    )
    got = planned_forward(problem, 16, device_model(backend), schedule="persistent")
    calls = [replace(one, values={**one.values, **shares(one)}) for one in got.calls]
    execute(backend, calls, outputs=[got.readings], scratch=got.scratch)
    assert_same_bits("readings", got.readings, want.readings)
    assert_same_bits("bank", got.values["memory"], want.values["memory"])


def shares(call: Call) -> dict[str, int]:
    return {"shared_bank": 1} if "shared_bank" in call.values else {}


def test_absent_entries(backend: Backend) -> None:
    problem = make_problem(2, 20, 4, 4, 24, 30, seed=7).cast(torch.bfloat16)
    problem.k_idx[0, ::3, 1] = -1
    problem.k_idx[1, ::2, 2] = 2**40
    problem.q_idx[:, 5] = 2 * 30  # behind every stream
    check(backend, problem, 16, training=True)


def test_indices_of_32_bits(backend: Backend) -> None:
    problem = make_problem(2, 20, 4, 4, 24, 30, seed=8).cast(torch.bfloat16)
    narrow = replace(problem, k_idx=problem.k_idx.int(), q_idx=problem.q_idx.int())
    check(backend, narrow, 16)


def test_nan_and_inf(backend: Backend) -> None:
    problem = make_problem(2, 37, 4, 4, 24, 30, gates="some -inf", seed=9).cast(torch.float32)
    problem.v[0, 10, 3] = torch.nan
    problem.memory[3, 2] = torch.inf
    check(backend, problem, 16, training=True)


@pytest.mark.parametrize("slab_steps", [1, 2])
def test_slabs_change_no_bit(backend: Backend, slab_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(2, 70, 4, 4, 16, 30, seed=1).cast(torch.bfloat16)
    whole = run(backend, problem, 16, "persistent")
    monkeypatch.setattr("sdm_rt.plan.forward.slab_steps", lambda shape, device: slab_steps)
    got = run(backend, problem, 16, "persistent")
    assert got.plan.slabs == -(-5 // slab_steps)
    assert_same_bits("readings", got.readings, whole.readings)
    assert_same_bits("bank", got.values["memory"], whole.values["memory"])


@pytest.mark.parametrize(
    "config",
    [
        PersistentConfig(NARROW_SLICE, 1, 64),
        PersistentConfig(NARROW_SLICE, 3, 64),
        PersistentConfig(NARROW_SLICE, 6, 64),
        PersistentConfig(NARROW_SLICE, 8, 64),
        PersistentConfig(WIDE_SLICE, 2, 64),
        PersistentConfig(WIDE_SLICE, 4, 128),
    ],
    ids=str,
)
def test_every_cut_gives_the_same_bits(
    backend: Backend, config: PersistentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = make_problem(1, 40, 4, 4, 160, 30, seed=2).cast(torch.bfloat16)
    cut_into(monkeypatch, config)
    launch = check(backend, problem, 33, training=True).plan.step[0]
    assert launch.cluster == (config.cluster, 1, 1)
    assert launch.grid[0] == config.cluster * -(-320 // config.slice_bytes)


@pytest.mark.parametrize(
    ("ring", "list_tokens", "in_place", "training"),
    [(3, 3, False, True), (1, 1, True, False), (3, 3, True, True), (1, 3, False, True)],
)
def test_every_layout_gives_the_same_bits(
    backend: Backend,
    ring: int,
    list_tokens: int,
    in_place: bool,
    training: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Few rows under way; lists of a few tokens; delta in the place of residual, in several passes."""
    problem = make_problem(1, 141, 3, 4, 20, 30, writes="repeats", seed=2).cast(torch.float32)
    layouts = persistent._layouts

    def few(shape: Any, config: PersistentConfig, vector: int) -> Any:
        for _ in layouts(shape, config, vector):
            shared = persistent._shared_memory(shape, config, vector, ring, list_tokens, in_place)
            yield persistent.Layout(ring, list_tokens, in_place, shared)

    monkeypatch.setattr(persistent, "_layouts", few)
    got = check(backend, problem, 139, training=training)
    assert (got.values["list_tokens"], got.values["in_place"]) == (list_tokens, in_place)
    assert dict(got.plan.step[0].kernel.defines)["RING"] == str(ring)


@pytest.mark.parametrize(
    ("dtype", "vector"), [(torch.float32, 2), (torch.bfloat16, 1), (torch.bfloat16, 4)], ids=str
)
def test_alignment_changes_no_bit(backend: Backend, dtype: torch.dtype, vector: int) -> None:
    problem = make_problem(2, 20, 4, 4, 64, 30, seed=1).cast(dtype)
    whole = run(backend, problem, 16, "persistent")
    room = torch.zeros(60 * 64 + 8, dtype=dtype)
    bank = room[vector : vector + 60 * 64].view(60, 64)
    bank.copy_(problem.memory)
    got = run(backend, problem, 16, "persistent", bank=bank)
    assert_same_bits("readings", got.readings, whole.readings)
    assert_same_bits("bank", got.values["memory"], whole.values["memory"])


@pytest.mark.parametrize(
    ("D", "dtype"), [(1, torch.float32), (30, torch.float16), (136, torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("snapshot", QUANTIZED)
def test_quantized_snapshots(
    backend: Backend, snapshot: str, steps: int, D: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Walks of one step, of two with a short one at the end, and of all; streams of different lengths."""
    monkeypatch.setattr("sdm_rt.plan.forward.steps_of_walk", lambda *_: steps)
    problem = make_problem(3, 70, 4, 4, D, 30, writes="repeats", lengths=[70, 0, 37], seed=D).cast(dtype)
    got = check(backend, problem, 16, training=True, snapshot=snapshot)
    assert len([call for call in got.calls if call.launch.name == "persistent_forward"]) == -(-5 // steps)
    assert got.values["walk_rows"].shape[0] == 3 * steps


def emulate_without(planned: Any, file: str, text: str) -> None:
    """Execute a planned forward without a piece of a kernel's text."""
    emulate(
        planned.calls,
        outputs=[planned.readings],
        scratch=planned.scratch,
        replacements=[Replacement(file, text, "")],
        builds=("access",),
    )


BARRIERS = {
    "gather": ("persistent_forward.cu", "cluster_sync();  // residual is whole"),
    "place": ("walk_products.cuh", "if (in_place) cluster_sync();"),
    "products": ("walk_products.cuh", "if (job.pass == 0) cluster_sync();"),
    "write": ("persistent_forward.cu", "cluster_sync();  // the rows are written"),
}


@pytest.mark.parametrize("barrier", BARRIERS)
def test_no_cluster_barrier_can_be_left_out(
    backend: Backend, barrier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "gpu":
        pytest.skip("the emulator alone sees races")
    layouts = persistent._layouts
    monkeypatch.setattr(persistent, "_layouts", lambda *call: [one for one in layouts(*call) if one.in_place])
    problem = make_problem(1, 40, 4, 4, 24, 20, seed=3).cast(torch.bfloat16)
    planned = planned_forward(problem, 16, device_model(backend), training=True, schedule="persistent")
    with pytest.raises(EmulatorError) as caught:
        emulate_without(planned, *BARRIERS[barrier])
    assert caught.value.kind in ("race", "unwritten")


WAITS = {
    "lists": ("walk_gather.cuh", "ptx::copy_wait<0>();"),
    "rows of the gather": ("walk_gather.cuh", "ptx::copy_wait<RING - 1>();"),
    "tiles": ("walk_products.cuh", "ptx::copy_wait<1>();"),
    "first units": ("walk_write.cuh", "ptx::copy_wait<1>();"),
    "later units": ("walk_write.cuh", "ptx::copy_wait<RING - 1>();"),
}


@pytest.mark.parametrize("wait", WAITS)
def test_no_wait_for_copies_can_be_left_out(backend: Backend, wait: str) -> None:
    """A word that a copy has not reached holds nothing, or what an earlier copy left there.

    One block: a warp writes more units of slots than batches of rows are under way. Eight blocks: one tile of
    products, so that no wait of theirs stands for the one of the first units.
    """
    if backend == "gpu":
        pytest.skip("the emulator alone sees copies that nobody waited for")
    problem = make_problem(1, 40, 8, 8, 64, 512, seed=3).cast(torch.bfloat16)
    blocks, chunk = (8, 16) if wait == "first units" else (1, 32)
    with pytest.MonkeyPatch.context() as patch:
        cut_into(patch, PersistentConfig(NARROW_SLICE, blocks, 64))
        right, planned = (
            planned_forward(problem, chunk, device_model(backend), schedule="persistent") for _ in range(2)
        )
    execute(backend, right.calls, outputs=[right.readings], scratch=right.scratch)
    found = None
    try:
        emulate_without(planned, *WAITS[wait])
    except EmulatorError as error:
        found = error.kind
    banks = planned.values["memory"], right.values["memory"]
    same = torch.equal(planned.readings, right.readings) and torch.equal(*banks)
    assert found in ("race", "unwritten", "copy") or not same
