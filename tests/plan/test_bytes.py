"""Bytes moved and time floors against the flagship's figures and against a count by hand."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from sdm_rt.plan import backward, forward
from sdm_rt.plan.decode import plan_decode
from sdm_rt.plan.device import preset
from sdm_rt.plan.launch import Launch
from sdm_rt.plan.shapes import DecodeShape, WriteReadShape
from sdm_rt.plan.step_plan import StepPlan
from tests.plan.cases import FLAGSHIP, WRITE_READ_CASES

plan_forward = functools.partial(forward.plan_forward, schedule="stepwise")
plan_backward = functools.partial(backward.plan_backward, schedule="stepwise")

ROWS = 8192 * 2048  # bytes of one step's write rows, and of its read rows: 16.8 MB


def step_floor(plan: StepPlan) -> int:
    return sum(call.floor_bytes for call in plan.step)


def test_flagship_forward_step_is_67_megabytes_and_15_8_us() -> None:
    plan = plan_forward(FLAGSHIP, preset("h200"))
    assert step_floor(plan) == 4 * ROWS
    assert step_floor(plan) / 1e6 == pytest.approx(67, abs=0.2)
    assert plan.device.floor_us(step_floor(plan)) == pytest.approx(15.8, abs=0.05)


def test_flagship_backward_step_is_117_megabytes_and_27_6_us() -> None:
    plan = plan_backward(FLAGSHIP, preset("h200"))
    assert step_floor(plan) == 7 * ROWS
    assert step_floor(plan) / 1e6 == pytest.approx(117, abs=0.5)
    assert plan.device.floor_us(step_floor(plan)) == pytest.approx(27.6, abs=0.05)


def test_flagship_loops_are_8_1_and_14_1_ms() -> None:
    there, back = plan_forward(FLAGSHIP, preset("h200")), plan_backward(FLAGSHIP, preset("h200"))
    assert there.steps == back.steps == 512
    assert there.device.floor_us(512 * step_floor(there)) / 1e3 == pytest.approx(8.1, abs=0.05)
    assert back.device.floor_us(512 * step_floor(back)) / 1e3 == pytest.approx(14.1, abs=0.06)


def test_a_total_holds_phase_1_beside_the_loop() -> None:
    for plan, milliseconds in (
        (plan_forward(FLAGSHIP, preset("h200")), 0.225),
        (plan_backward(FLAGSHIP, preset("h200")), 0.419),
    ):
        assert plan.slabs == 1
        launches = (*plan.prologue, *plan.epilogue)
        phase1 = sum(launch.floor_bytes for launch in launches if isinstance(launch, Launch))
        assert plan.total("floor_bytes") == 512 * step_floor(plan) + phase1
        assert plan.device.floor_us(phase1) / 1e3 == pytest.approx(milliseconds, abs=0.001)


def test_no_grad_forward_leaves_out_the_snapshot() -> None:
    assert step_floor(plan_forward(WRITE_READ_CASES["flagship_no_grad"], preset("h200"))) == 3 * ROWS


@pytest.mark.parametrize(
    ("snapshot", "row"), [("none", 2048), ("bf16", 2048), ("fp8", 1024 + 4), ("int4", 512 + 4)]
)
def test_snapshot_rows_by_mode(snapshot: str, row: int) -> None:
    shape = dataclasses.replace(FLAGSHIP, snapshot=snapshot)
    assert shape.snapshot_row_bytes == row
    assert step_floor(plan_forward(shape, preset("h200"))) == 3 * ROWS + 8192 * row
    assert step_floor(plan_backward(shape, preset("h200"))) == 6 * ROWS + 8192 * row


def test_int4_rows_of_odd_width_round_up() -> None:
    shape = WriteReadShape(1, 64, 64, 8, 8, 101, 64, snapshot="int4")
    assert shape.snapshot_row_bytes == 51 + 4


def test_float32_gradient_bank_doubles_its_rows() -> None:
    shape = WRITE_READ_CASES["float32_gradient"]
    # Gradient rows: K read and written, Q read and written. Snapshot, Q rows and restored rows stay.
    assert step_floor(plan_backward(shape, preset("h200"))) == (4 * 2 + 3) * ROWS


def test_a_small_bank_bounds_the_rows_of_a_step() -> None:
    shape = WriteReadShape(3, 64, 64, 64, 32, 128, 1000)
    assert shape.write_rows == 3 * 1000
    assert shape.read_rows == 3 * 1000
    assert step_floor(plan_forward(shape, preset("h200"))) == 3 * (3 * 1000 + 1000) * 256


def test_bytes_moved_by_hand() -> None:
    """One token, one slot, one column, float32 bank: every operand counted once."""
    shape = WriteReadShape(1, 1, 1, 1, 1, 1, 1, bank_dtype="float32")
    gather, dual_matmul, decay_write = plan_forward(shape, preset("h100")).step
    # A row of K and of Q; two int64 indices and two float32 weights; v; residual and inter.
    assert gather.bytes_moved == 2 * 4 + 2 * (8 + 4) + 4 + 2 * 4
    # x, qx and a; beta; the readings; residual, inter, delta and err.
    assert dual_matmul.bytes_moved == 3 * 4 + 4 + 4 + 4 * 4
    # The row read, written and kept; the slot's record and the write's term; delta.
    assert decay_write.bytes_moved == 3 * 4 + 16 + 16 + 4
    assert gather.floor_bytes == decay_write.floor_bytes == 2 * 4
    assert dual_matmul.floor_bytes == 0


def test_phase_1_bytes_by_hand() -> None:
    """A chunk of one token with two writes and three reads, bfloat16 bank, 9 slots."""
    sort, scan, gram, solve = plan_forward(WriteReadShape(1, 1, 1, 2, 3, 8, 9), preset("h100")).prologue
    # Five int64 indices to five entries and their slots.
    assert sort.bytes_moved == 5 * (8 + 4 + 4)
    # Each entry: itself and its slot, its weight, what Phase 2 uses of it, its partners. Each write: its
    # entry, its term. At most two slots: a record. For the backward, each write's weight, each read's
    # entry and term, and a record of the at most three slots read.
    kept = 2 * 4 + 3 * (16 + 16) + 3 * 16
    assert scan.bytes_moved == 5 * (4 + 4 + 2 + 4 + 16) + 2 * (16 + 16) + 2 * 16 + kept
    # Where the partners of each entry are, and its weight; a and qk.
    assert gram.bytes_moved == 5 * (4 + 2) + 2 * 4
    # a, qk, x and qx; beta.
    assert solve.bytes_moved == 4 * 4 + 4
    for launch in (sort, scan, gram, solve):
        assert launch.floor_bytes == launch.bytes_moved


def test_totals_add_up() -> None:
    shape = WriteReadShape(2, 150, 64, 8, 8, 128, 256)
    back, there = plan_backward(shape, preset("h100")), plan_forward(shape, preset("h100"))
    slabs = dataclasses.replace(there, slab_steps=2)
    kept = plan_forward(dataclasses.replace(shape, snapshot="int4"), preset("h100"))
    plans = ((back, 3 * 4 + 3), (there, 4 + 3 * 3), (slabs, 2 * 4 + 3 * 3), (kept, 4 + 3 * 4))
    for plan, count in plans:
        for field in ("bytes_moved", "floor_bytes"):
            calls = sum(getattr(call, field) for _, call in plan.launches())
            unused = sum(getattr(call, field) for call in plan.prologue) // 2 if plan is slabs else 0
            assert plan.total(field) == calls - unused, "the second slab has one step of two"
        assert plan.launch_count == len(list(plan.launches())) == count


def test_quantized_rows_are_read_once_more_by_the_kernel_that_keeps_them() -> None:
    """One float32 row of 8 columns in one slot: read; kept in bytes with its scale; the slot's record."""
    shape = WriteReadShape(1, 1, 1, 1, 1, 8, 1, bank_dtype="float32", snapshot="fp8")
    keep_rows, _, _, decay_write = plan_forward(shape, preset("h100")).step
    assert keep_rows.bytes_moved == 32 + (8 + 4) + 16
    # The row has crossed the bus for the gather's sake; what is kept has not.
    assert keep_rows.floor_bytes == 8 + 4
    assert decay_write.bytes_moved == 2 * 32 + 16 + 16 + 32
    assert decay_write.floor_bytes == 32


def test_backward_bytes_by_hand() -> None:
    """One token, one slot, one column, float32 bank: every operand counted once."""
    shape = WriteReadShape(1, 1, 1, 1, 1, 1, 1, bank_dtype="float32")
    plan = plan_backward(shape, preset("h100"))
    gwr, du_update, phase_a, gds = plan.step
    # The gradient row; an int64 index, the write's weight and its d_k_pd; err and gwr.
    assert gwr.bytes_moved == 4 + (8 + 4 + 4) + 4 + 4
    assert gwr.floor_bytes == 4
    # x and qx; grad_readings and grad_v; gwr and lam; strength.
    assert du_update.bytes_moved == 2 * 4 + 2 * 4 + 2 * 4 + 4
    assert du_update.floor_bytes == 0
    # Gradient row read and written, snapshot read, bank row written; the slot's record and total; the write's
    # term and d_k_eff; lam and strength.
    assert phase_a.bytes_moved == 4 * 4 + (16 + 4) + (16 + 4) + 4 + 4
    assert phase_a.floor_bytes == 3 * 4
    # Gradient row read and written, bank row read; the slot's record; the read's term and d_q_w;
    # grad_readings.
    assert gds.bytes_moved == 3 * 4 + 16 + (16 + 4) + 4
    assert gds.floor_bytes == 3 * 4
    gram = plan.epilogue[0]
    # lam and err; grad_readings; strength and grad_beta; d_a and d_qk.
    assert gram.bytes_moved == gram.floor_bytes == 2 * 4 + 4 + 2 * 4 + 2 * 4


def test_decode_moves_write_rows_twice_and_read_rows_once() -> None:
    plan = plan_decode(DecodeShape(16, 64, 32, 1024), preset("h200"))
    assert plan.total("floor_bytes") == 16 * (2 * 64 + 32) * 2048
    token = 16 * (96 * (8 + 2) + 2 * 2048 + 4 * (1 + 1))
    assert plan.total("bytes_moved") == plan.total("floor_bytes") + token
