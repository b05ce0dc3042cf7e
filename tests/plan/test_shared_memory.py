"""Every number of the specification's shared-memory plans, and the refusals, of the reference schedule."""

from __future__ import annotations

import pytest

from sdm_rt.errors import UnsupportedConfigurationError
from sdm_rt.plan.device import PRESETS, DeviceModel, preset
from sdm_rt.plan.kernel_resources import KernelResources
from sdm_rt.plan.occupancy import occupancy
from sdm_rt.plan.reference_backward import plan_reference_backward
from sdm_rt.plan.shapes import WriteReadShape
from sdm_rt.plan.shared_memory import (
    gates_plan,
    largest_chunk,
    one_block_per_sm,
    pairs_bytes,
    pairs_plan,
    phase_a_bytes,
    phase_a_plan,
    snapshot_rows,
)

BF16, F32 = "bfloat16", "float32"
FEW_REGISTERS = KernelResources(registers=32)


def test_phase_a_bytes() -> None:
    assert phase_a_bytes(64, 8, BF16, BF16) == 65_792
    assert phase_a_bytes(256, 8, F32, F32) == 197_632
    assert phase_a_bytes(256, 4, F32, F32) == 164_864
    assert phase_a_bytes(256, 1, F32, F32) == 140_288
    assert phase_a_bytes(1, 1, BF16, F32) == 512 + 16 + 8 * 32 * (16 + 8)
    assert phase_a_bytes(5, 1, BF16, BF16) - phase_a_bytes(4, 1, BF16, BF16) == 512 + 16


@pytest.mark.parametrize(
    ("device", "chunk", "bank", "gradient", "warps", "shared_memory"),
    [
        ("h100", 64, BF16, BF16, 8, 65_792),
        ("h100", 256, F32, F32, 8, 197_632),
        ("a100", 256, F32, F32, 4, 164_864),
        ("rtx4090", 64, BF16, BF16, 8, 65_792),
        ("rtx4090", 64, F32, F32, 8, 98_560),
        ("rtx4090", 80, F32, F32, 4, 74_048),  # seven warps would fit; warps are a power of two
        ("rtx4090", 128, F32, F32, 4, 98_816),
    ],
)
def test_phase_a_halves_its_warps_until_it_fits(
    device: str, chunk: int, bank: str, gradient: str, warps: int, shared_memory: int
) -> None:
    plan = phase_a_plan(chunk, bank, gradient, preset(device))
    assert (plan.warps, plan.shared_memory) == (warps, shared_memory)


@pytest.mark.parametrize("device", ["rtx4090", "rtxpro6000"])
def test_phase_a_is_refused_with_a_chunk_size_that_fits(device: str) -> None:
    with pytest.raises(UnsupportedConfigurationError) as refusal:
        phase_a_plan(256, F32, F32, preset(device))
    message = str(refusal.value)
    assert "140,288" in message
    assert "101,376" in message
    assert message.endswith("The largest chunk size that fits is chunk_size=180.")


@pytest.mark.parametrize("device", PRESETS.values(), ids=PRESETS)
@pytest.mark.parametrize(("bank", "gradient"), [(BF16, BF16), (BF16, F32), (F32, F32)])
def test_the_suggested_chunk_size_fits_and_the_next_does_not(
    device: DeviceModel, bank: str, gradient: str
) -> None:
    chunk = largest_chunk(device, bank, gradient)

    def plan(chunk: int) -> None:
        shape = WriteReadShape(2, 256, chunk, 8, 8, 64, 256, bank, gradient)
        plan_reference_backward(shape, device)

    plan(chunk)
    if chunk < 256:
        with pytest.raises(UnsupportedConfigurationError, match=f"chunk_size={chunk}\\."):
            plan(chunk + 1)


def test_pairs_bytes() -> None:
    assert pairs_bytes(64) == (2 * 64 * 63, 2 * 64 * 65)
    assert sum(pairs_bytes(128)) == 65_536
    assert pairs_bytes(256)[1] == 131_584


@pytest.mark.parametrize(
    ("device", "chunk", "blocks", "shared_memory"),
    [
        ("h100", 128, 1, 65_536),
        ("h100", 169, 1, 114_244),
        ("h100", 170, 2, 2 * 170 * 171),
        ("h100", 256, 2, 131_584),
        ("a100", 256, 2, 131_584),
        ("rtx4090", 159, 1, 101_124),  # the cap, 101,376, is below the preferred 114,688
        ("rtx4090", 160, 2, 51_520),
        ("rtx4090", 224, 2, 100_800),
    ],
)
def test_pairs_share_a_block_where_both_triangles_fit(
    device: str, chunk: int, blocks: int, shared_memory: int
) -> None:
    plan = pairs_plan(chunk, BF16, BF16, preset(device), det=False, resources=FEW_REGISTERS)
    assert (plan.blocks_per_chunk, plan.shared_memory) == (blocks, shared_memory)
    assert not plan.batch_buffer


def test_pairs_are_refused_from_225_at_101376() -> None:
    with pytest.raises(UnsupportedConfigurationError) as refusal:
        pairs_plan(225, BF16, BF16, preset("rtx4090"), det=False, resources=FEW_REGISTERS)
    message = str(refusal.value)
    assert f"{2 * 225 * 226:,}" in message
    assert "101,376" in message
    assert message.endswith("chunk_size=188.")


def test_det_pairs_take_the_batch_buffer_only_at_no_cost_of_resident_blocks() -> None:
    device = preset("h100")
    for chunk in range(1, 257):
        plain = pairs_plan(chunk, BF16, BF16, device, det=False, resources=FEW_REGISTERS)
        det = pairs_plan(chunk, BF16, BF16, device, det=True, resources=FEW_REGISTERS)
        padded = -(-plain.shared_memory // 16) * 16 + 8192
        before = occupancy(device, 512, 32, plain.shared_memory).blocks
        after = occupancy(device, 512, 32, padded).blocks
        assert det.batch_buffer == (after >= before)
        assert det.shared_memory == (padded if det.batch_buffer else plain.shared_memory)
    outcomes = {
        pairs_plan(chunk, BF16, BF16, device, det=True, resources=FEW_REGISTERS).batch_buffer
        for chunk in (64, 112)
    }
    assert outcomes == {True, False}


def test_det_buffer_never_exceeds_the_cap() -> None:
    plan = pairs_plan(224, BF16, BF16, preset("rtx4090"), det=True, resources=FEW_REGISTERS)
    assert (plan.batch_buffer, plan.shared_memory) == (False, 100_800)


def test_gates_are_staged_at_exactly_114688() -> None:
    at_limit = gates_plan(128, 112, 112, BF16, preset("h100"), static_shared=0)
    assert (at_limit.staged, at_limit.shared_memory) == (True, 114_688)
    assert not gates_plan(128, 112, 112, BF16, preset("rtx4090"), static_shared=0).staged
    assert not gates_plan(128, 112, 113, BF16, preset("h100"), static_shared=0).staged
    assert not gates_plan(128, 112, 112, F32, preset("h100"), static_shared=0).staged
    assert gates_plan(64, 64, 64, F32, preset("h100"), static_shared=0).shared_memory == 49_152


def test_gates_leave_room_for_static_shared_memory() -> None:
    assert gates_plan(88, 144, 144, BF16, preset("rtx4090"), static_shared=0).staged  # needs 101,376
    assert not gates_plan(88, 144, 144, BF16, preset("rtx4090"), static_shared=1).staged


@pytest.mark.parametrize(
    ("name", "padded"),
    [("h100", 115_840), ("a100", 83_072), ("rtx4090", 50_304), ("b200", 115_840), ("rtxpro6000", 50_304)],
)
def test_padding_leaves_one_block_an_sm_and_is_the_least_that_does(name: str, padded: int) -> None:
    device = preset(name)
    assert one_block_per_sm(32_768, 0, device) == padded
    assert occupancy(device, 256, 32, padded).blocks == 1
    assert occupancy(device, 256, 32, padded - 128).blocks == 2
    assert one_block_per_sm(padded + 4, 0, device) == padded + 4
    assert occupancy(device, 256, 32, one_block_per_sm(0, 1000, device) + 1000).blocks == 1


def test_snapshot_rows_and_their_offsets() -> None:
    assert snapshot_rows(512, 2, 64, 64) == (4_194_304, 32)
    assert snapshot_rows(2**18, 2, 64, 64) == (2**31, 64)
    assert snapshot_rows(2**18 - 1, 2, 64, 64)[1] == 32


def test_the_reference_schedule_is_refused_where_its_phase_a_does_not_fit() -> None:
    shape = WriteReadShape(8, 4096, 256, 128, 128, 1024, 65536)
    with pytest.raises(UnsupportedConfigurationError, match=r"136,192 bytes.*101,376.*chunk_size=188\."):
        plan_reference_backward(shape, preset("rtx4090"))
    assert plan_reference_backward(shape, preset("a100")).steps == 16
