"""The plan of Phase-1 backward against its kernels: signatures, shared memory, variants, working memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sdm_rt.plan.backward import backward_constants, plan_backward
from sdm_rt.plan.device import PRESETS, preset
from sdm_rt.plan.launch import Launch
from sdm_rt.plan.phase1_backward import (
    entries_a_thread,
    output_bytes,
    phase1_backward_constants,
    plan_phase1_backward,
    plan_phase1_backward_launches,
    stages_outputs,
)
from sdm_rt.plan.shapes import BANK_DTYPES, WriteReadShape
from sdm_rt.plan.write_resources import TARGETS, variants
from tests.plan.cases import FLAGSHIP, WRITE_READ_CASES
from tests.plan.kernel_source import constant, explains, parameters

NAMES = ("phase1_backward_pairs", "phase1_backward_gates")
CHUNKS = WriteReadShape(6, 64, 64, 8, 9, 1, 2**31 - 1)
TRAINING = {name: shape for name, shape in WRITE_READ_CASES.items() if shape.training and shape.tokens}
TRAINING.pop("no_streams")


def launch(shape: WriteReadShape, name: str, device: str = "h100") -> Launch:
    launches, _ = plan_phase1_backward_launches(shape, preset(device))
    return next(one for one in launches if one.name == name)


# ---- plan and source ----


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_the_kernels_parameters(name: str) -> None:
    assert [(a.name, a.kind) for a in launch(FLAGSHIP, name).arguments] == parameters(name)


@pytest.mark.parametrize("name", NAMES)
def test_macros_and_blocks_are_those_of_the_kernels(name: str) -> None:
    planned = launch(FLAGSHIP, name)
    for macro in dict(planned.kernel.defines):
        assert explains(name, macro), f"{name}.cu does not explain {macro}"
    if name == "phase1_backward_gates":
        assert planned.block[0] <= constant(name, "MOST_THREADS")
    else:
        assert planned.block == (constant(name, "THREADS"), 1, 1)


def test_the_call_gives_the_one_number_that_shapes_do_not_fix() -> None:
    plan = plan_phase1_backward(CHUNKS, preset("h100"), det=False)
    numbers = {a.name for one in plan.kernels() for a in one.arguments if a.kind != "pointer"}
    assert numbers - phase1_backward_constants(plan).keys() - {"slab_step"} == {"wide"}


@pytest.mark.parametrize("target", TARGETS)
def test_every_chosen_variant_is_a_variant_of_the_table(target: str) -> None:
    known = set(variants(target))
    for shape in TRAINING.values():
        launches, _ = plan_phase1_backward_launches(shape, preset("h100"))
        assert {one.kernel for one in launches} <= known


# ---- choices ----


@pytest.mark.parametrize(
    ("shape", "threads"),
    [
        (FLAGSHIP, 256),  # 1,024 chunks, two blocks an SM
        (replace(FLAGSHIP, streams=1, tokens=132 * 64), 512),  # a block an SM at most
        (replace(FLAGSHIP, streams=1, tokens=133 * 64), 256),
        # Shared memory for one block an SM: 256 tokens of 128 writes have 128 KiB of gradients.
        (replace(FLAGSHIP, chunk=256, writes=128, reads=128), 512),
        # They fit no block, and pass through none.
        (replace(FLAGSHIP, chunk=256, writes=256, reads=256, tokens=2**17), 256),
    ],
)
def test_gates_have_twice_the_threads_where_an_sm_has_one_block(shape: WriteReadShape, threads: int) -> None:
    assert launch(shape, "phase1_backward_gates").block == (threads, 1, 1)


@pytest.mark.parametrize(("chunk", "batch"), [(1, "0"), (64, "0"), (127, "0"), (128, "1"), (256, "1")])
def test_the_op_fetches_partners_ahead_from_128_tokens_on(chunk: int, batch: str) -> None:
    shape = replace(FLAGSHIP, chunk=chunk)
    assert dict(launch(shape, "phase1_backward_pairs").kernel.defines) == {"BATCH": batch}


@pytest.mark.parametrize("chunk", [1, 64, 256])
@pytest.mark.parametrize("det", [False, True])
def test_the_op_of_chunks_fetches_ahead_where_it_is_asked_to(chunk: int, det: bool) -> None:
    shape = replace(CHUNKS, chunk=chunk, tokens=chunk)
    plan = plan_phase1_backward(shape, preset("h100"), det)
    assert [call.name for call in plan.calls()] == ["phase1_scan", *NAMES]
    assert plan.name == ("phase1_backward_det" if det else "phase1_backward")
    assert ("BATCH", str(int(det))) in plan.kernels()[1].kernel.defines


def test_grids_cover_all_chunks_of_a_call() -> None:
    """2 streams of 512 chunks with 64 (64 + 64) entries each."""
    assert launch(FLAGSHIP, "phase1_backward_pairs").grid == (1024 * 8, 1, 1)
    assert launch(FLAGSHIP, "phase1_backward_gates").grid == (1024, 1, 1)
    ragged = WRITE_READ_CASES["ragged"]  # 3 streams of 2 chunks with 64 (5 + 3) entries
    assert launch(ragged, "phase1_backward_pairs").grid == (6 * 2, 1, 1)
    assert launch(ragged, "phase1_backward_gates").grid == (6, 1, 1)


@pytest.mark.parametrize(
    ("tokens", "det", "each"),
    [  # a chunk of FLAGSHIP has 8,192 entries, an H100 holds four blocks of 256 threads an SM: 528
        (66 * 64, False, 4),
        (65 * 64, False, 2),
        (33 * 64, False, 2),
        (32 * 64, False, 1),
        (64, False, 1),
        (66 * 64, True, 4),
        (65 * 64, True, 2),
    ],
)
def test_a_thread_looks_at_as_many_entries_as_leave_a_wave_of_blocks(
    tokens: int, det: bool, each: int
) -> None:
    shape = replace(FLAGSHIP, streams=1, tokens=tokens)
    (pairs, _), _ = plan_phase1_backward_launches(shape, preset("h100"), batch=det)
    assert pairs.occupancy(preset("h100")).wave(preset("h100")) == 528
    assert pairs.grid == (tokens // 64 * 32 // each, 1, 1)
    if not det:
        plan = plan_backward(shape, preset("h100"))
        assert backward_constants(plan)["each"] == entries_a_thread(shape, [pairs]) == each


# ---- shared memory ----


@pytest.mark.parametrize(
    ("chunk", "writes", "reads", "dtype", "need"),
    [
        (64, 64, 64, "bfloat16", 16_384),  # the gates' gradients
        (64, 64, 128, "bfloat16", 16_384),
        (64, 64, 129, "bfloat16", 16_512),  # the reads' gradients
        (64, 64, 65, "float32", 16_640),
        (128, 128, 128, "bfloat16", 65_536),
        (256, 128, 128, "float16", 131_072),
        (256, 218, 1, "float32", 223_232),
        (1, 1, 1, "bfloat16", 4),
    ],
)
def test_shared_memory_by_hand(chunk: int, writes: int, reads: int, dtype: str, need: int) -> None:
    shape = WriteReadShape(2, 1024, chunk, writes, reads, 64, 4096, bank_dtype=dtype)
    assert output_bytes(shape) == need
    assert launch(shape, "phase1_backward_gates").shared_memory == need
    assert launch(shape, "phase1_backward_pairs").shared_memory == 0


@pytest.mark.parametrize(
    ("device", "chunk", "writes", "staged"),
    [
        ("h100", 256, 218, True),  # 223,232 of 232,448 bytes, of which 8,320 are static
        ("h100", 256, 219, False),
        ("a100", 154, 256, True),  # 157,696 of 166,912
        ("a100", 155, 256, False),
        ("rtx4090", 90, 256, True),  # 92,160 of 101,376
        ("rtx4090", 91, 256, False),
    ],
)
def test_outputs_are_staged_where_they_fit(device: str, chunk: int, writes: int, staged: bool) -> None:
    shape = WriteReadShape(2, 1024, chunk, writes, 4, 64, 4096)
    assert stages_outputs(shape, preset(device)) == staged
    assert (launch(shape, "phase1_backward_gates", device).shared_memory > 0) == staged


def test_gradients_of_single_writes_need_memory_only_where_they_are_summed_and_not_staged() -> None:
    large = WriteReadShape(2, 1024, 256, 256, 4, 64, 4096)

    def buffers(shape: WriteReadShape) -> dict[str, tuple[int, ...]]:
        return {one.name: one.shape for one in plan_phase1_backward_launches(shape, preset("h100"))[1]}

    sums = {"value_sums": (8, 256 * 260), "log_sums": (8, 256 * 260)}
    assert buffers(large) == sums | {"gate_gradients": (8, 256, 256)}
    assert buffers(replace(large, gates_per_write=True)) == sums
    assert buffers(replace(large, writes=64)).keys() == sums.keys()
    one_write = WriteReadShape(2, 1024, 256, 1, 256, 64, 4096, bank_dtype="float32")
    assert not stages_outputs(one_write, preset("h100"))
    assert buffers(one_write).keys() == sums.keys()


# ---- the plan of chunks ----


def test_buffers_are_the_scratch_and_the_results() -> None:
    plan = plan_phase1_backward(CHUNKS, preset("h100"), det=False)
    kept = {
        buffer.name: (buffer.dtype, buffer.shape) for buffer in plan.buffers if buffer.name.startswith("grad")
    }
    assert kept == {
        "grad_k_val": ("bfloat16", (6, 64, 8)),
        "grad_q_val": ("bfloat16", (6, 64, 9)),
        "grad_g": ("float32", (6, 64, 8)),
    }
    names = {a.name for one in plan.kernels() for a in one.arguments if a.kind == "pointer"}
    given = {"payload", "k_val", "q_val", "g", "beta", "repeats", "d_a", "d_qk", "d_k_eff", "d_k_pd", "d_q_w"}
    given |= {"given_log_k", "given_log_q", "given_rex"}
    null = {"sorted_slots", "lengths", "cu_seqlens", "log_k", "log_q", "rex", "cpe", "flags", "d_tot"}
    assert {buffer.name for buffer in plan.buffers} == names - given - null - {"gate_gradients"}


@pytest.mark.parametrize("dtype", BANK_DTYPES)
@pytest.mark.parametrize("per_write", [False, True])
def test_constants_name_every_number_that_a_shape_fixes(dtype: str, per_write: bool) -> None:
    shape = replace(CHUNKS, bank_dtype=dtype, gradient_bank_dtype=dtype, gates_per_write=per_write)
    plan = plan_phase1_backward(shape, preset("h100"), det=True)
    numbers = {a.name for one in plan.kernels() for a in one.arguments if a.kind != "pointer"}
    assert phase1_backward_constants(plan).keys() == numbers - {"slab_step", "shared_bank", "wide"}
    sizes = {"P": 6, "T": 64, "C": 64, "W": 8, "R": 9, "S": 2**31 - 1, "gates": 8 if per_write else 1}
    assert phase1_backward_constants(plan) == {**sizes, "grad_gates": 8, "stage_outputs": 1, "each": 1}


def test_a_call_of_several_steps_or_without_training_is_refused() -> None:
    for change in ({"tokens": 65}, {"training": False}):
        with pytest.raises(ValueError, match="takes one training step"):
            plan_phase1_backward(replace(CHUNKS, **change), preset("h100"), det=False)
    old = replace(preset("a100"), compute_capability=(7, 5))
    with pytest.raises(RuntimeError, match="compute capability"):
        plan_phase1_backward(CHUNKS, old, det=False)


@pytest.mark.parametrize("device", PRESETS)
@pytest.mark.parametrize("case", TRAINING)
def test_every_case_fits_every_device(case: str, device: str) -> None:
    launches, _ = plan_phase1_backward_launches(TRAINING[case], preset(device))
    for one in launches:
        resources = one.resources(preset(device))
        assert resources.measured
        # Four blocks of pairs an SM are faster than three that spill nothing (docs/performance-log.md).
        most = 64 if one.name == "phase1_backward_pairs" else 0
        assert max(resources.spill_stores, resources.spill_loads) <= most
        assert one.occupancy(preset(device)).blocks >= 1
        assert one.shared_memory + resources.static_shared <= preset(device).shared_memory_per_block
