"""Resident blocks against the CUDA toolkit's own calculator and against cases worked out by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from sdm_rt.plan.device import preset
from sdm_rt.plan.occupancy import occupancy

# Rows [preset, threads, registers, static, dynamic, blocks]; the blocks are what cuda_occupancy.h of CUDA
# 12.9 gives with the carveout at its maximum and the opt-in limit.
CALCULATED = json.loads(Path(__file__).with_name("occupancy.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("name", "threads", "registers", "static", "dynamic", "blocks"), CALCULATED)
def test_equals_the_toolkits_calculator(
    name: str, threads: int, registers: int, static: int, dynamic: int, blocks: int
) -> None:
    assert occupancy(preset(name), threads, registers, static + dynamic).blocks == blocks


def test_the_calculated_rows_cover_every_preset_and_outcome() -> None:
    assert {row[0] for row in CALCULATED} == {"a100", "rtx4090", "h100", "h200", "b200", "rtxpro6000"}
    assert {0, 1, 2, 4, 8} <= {row[-1] for row in CALCULATED}


@pytest.mark.parametrize(
    ("name", "threads", "registers", "shared_memory", "blocks", "limit"),
    [
        ("h100", 1024, 32, 0, 2, "threads"),  # 2,048 threads an SM
        ("h100", 32, 16, 0, 32, "blocks"),
        ("rtx4090", 32, 16, 0, 24, "blocks"),
        ("h100", 256, 64, 0, 4, "registers"),  # 65,536 / (256 * 64)
        ("h100", 256, 65, 0, 3, "registers"),  # 65 * 32 rounds up to 2,304 a warp: 28 warps
        ("h100", 256, 32, 65_792, 3, "shared memory"),  # 233,472 / (65,792 + 1,024)
        ("h100", 256, 32, 232_448, 1, "shared memory"),
        ("h100", 256, 32, 232_449, 0, "shared memory"),
        ("h100", 1024, 65, 0, 0, "registers"),
        ("h100", 256, 256, 0, 0, "registers"),  # a thread has at most 255
    ],
)
def test_by_hand(
    name: str, threads: int, registers: int, shared_memory: int, blocks: int, limit: str
) -> None:
    result = occupancy(preset(name), threads, registers, shared_memory)
    assert (result.blocks, result.limit) == (blocks, limit)
    assert result.wave(preset(name)) == blocks * preset(name).sm_count


def test_a_blocks_registers_are_checked_in_whole_sets_of_four_warps() -> None:
    # Five warps of 128 registers take 20,480; the hardware checks eight, 32,768.
    for limit, blocks in ((32_767, 0), (32_768, 3)):
        device = dataclasses.replace(preset("h100"), registers_per_block=limit)
        assert occupancy(device, 160, 128, 0).blocks == blocks


@pytest.mark.parametrize("arguments", [(0, 32, 0), (1025, 32, 0), (32, 0, 0), (32, 32, -1)])
def test_impossible_kernels_are_refused(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="must"):
        occupancy(preset("h100"), *arguments)
