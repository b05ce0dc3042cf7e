"""Device presets, their lookup, and models made from device attributes."""

from __future__ import annotations

import dataclasses

import pytest

from sdm_rt.plan.backward import plan_backward
from sdm_rt.plan.decode import plan_decode
from sdm_rt.plan.device import PRESETS, DeviceModel, preset
from sdm_rt.plan.forward import plan_forward
from tests.plan.cases import DECODE_CASES, FLAGSHIP

# Compute capability, SMs, shared memory of a block and of an SM, threads and blocks of an SM, L2 bytes.
FIGURES = {
    "a100": ((8, 0), 108, 166_912, 167_936, 2048, 32, 41_943_040),
    "rtx4090": ((8, 9), 128, 101_376, 102_400, 1536, 24, 75_497_472),
    "h100": ((9, 0), 132, 232_448, 233_472, 2048, 32, 52_428_800),
    "h200": ((9, 0), 132, 232_448, 233_472, 2048, 32, 62_914_560),
    "b200": ((10, 0), 148, 232_448, 233_472, 2048, 32, 132_644_864),
    "rtxpro6000": ((12, 0), 188, 101_376, 102_400, 1536, 24, 134_217_728),
}

H200_CLUSTERS = (132, 66, 39, 30, 22, 17, 15, 15)
H200_ATTRIBUTES = {
    "ComputeCapabilityMajor": 9,
    "ComputeCapabilityMinor": 0,
    "MultiProcessorCount": 132,
    "MaxSharedMemoryPerBlockOptin": 232_448,
    "MaxSharedMemoryPerMultiprocessor": 233_472,
    "ReservedSharedMemoryPerBlock": 1024,
    "L2CacheSize": 62_914_560,
    "MaxRegistersPerMultiprocessor": 65_536,
    "MaxRegistersPerBlock": 65_536,
    "MaxThreadsPerMultiProcessor": 2048,
    "MaxBlocksPerMultiprocessor": 32,
    "MemoryClockRate": 3_201_000,
    "GlobalMemoryBusWidth": 6144,
}


def test_presets_hold_the_published_figures() -> None:
    assert set(PRESETS) == set(FIGURES)
    for name, figures in FIGURES.items():
        model = PRESETS[name]
        assert (
            model.compute_capability,
            model.sm_count,
            model.shared_memory_per_block,
            model.shared_memory_per_sm,
            model.max_threads_per_sm,
            model.max_blocks_per_sm,
            model.l2_bytes,
        ) == figures
        assert model.shared_memory_reserved == 1024
        assert model.registers_per_sm == model.registers_per_block == 65_536


def test_h200_bandwidth_is_the_measured_copy() -> None:
    assert preset("h200").memory_bandwidth == 4.25e12
    assert preset("h200").bandwidth_source == "measured"


@pytest.mark.parametrize(
    ("name", "arch", "pdl"),
    [
        ("a100", "sm_80", False),
        ("rtx4090", "sm_89", False),
        ("h100", "sm_90", True),
        ("b200", "sm_100", True),
    ],
)
def test_target_and_pdl_follow_the_compute_capability(name: str, arch: str, pdl: bool) -> None:
    assert (preset(name).arch, preset(name).pdl, preset(name).clusters) == (arch, pdl, pdl)


@pytest.mark.parametrize("spelling", ["RTX PRO 6000", "rtx-pro-6000", "rtx_pro_6000", "RTXPRO6000"])
def test_preset_spellings(spelling: str) -> None:
    assert preset(spelling) is PRESETS["rtxpro6000"]


def test_unknown_preset_lists_the_presets() -> None:
    with pytest.raises(ValueError, match="no device preset named 'v100'; presets: a100, rtx4090, h100"):
        preset("v100")


def test_model_from_attributes_differs_from_the_preset_in_name_and_bandwidth_alone() -> None:
    model = DeviceModel.from_attributes("NVIDIA H200", H200_ATTRIBUTES, active_clusters=H200_CLUSTERS)
    assert model.memory_bandwidth == pytest.approx(4.917e12, rel=1e-3)
    assert model.bandwidth_source == "memory clock"
    same = dataclasses.replace(model, name="H200", memory_bandwidth=4.25e12, bandwidth_source="measured")
    assert same == preset("h200")
    assert DeviceModel.from_attributes("H200", H200_ATTRIBUTES, 4.25e12, H200_CLUSTERS) == preset("h200")


def test_missing_attribute_is_named() -> None:
    attributes = {name: value for name, value in H200_ATTRIBUTES.items() if name != "L2CacheSize"}
    with pytest.raises(KeyError, match="L2CacheSize"):
        DeviceModel.from_attributes("NVIDIA H200", attributes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sm_count": 0}, "sm_count must be at least 1, got 0"),
        ({"shared_memory_per_block": 233_472}, "exceeds the SM's 233472"),
    ],
)
def test_impossible_models_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(preset("h100"), **change)


def test_planners_refuse_a_gpu_below_8_0() -> None:
    turing = dataclasses.replace(preset("a100"), name="T4", compute_capability=(7, 5))
    message = "T4 has compute capability 7.5; sdm_rt supports 8.0 and newer"
    with pytest.raises(RuntimeError, match=message):
        plan_forward(FLAGSHIP, turing)
    with pytest.raises(RuntimeError, match=message):
        plan_backward(FLAGSHIP, turing)
    with pytest.raises(RuntimeError, match=message):
        plan_decode(DECODE_CASES["decode_1"], turing)


def test_a_driver_without_a_memory_clock_leaves_the_floor_open() -> None:
    model = DeviceModel.from_attributes("GPU", {**H200_ATTRIBUTES, "MemoryClockRate": 0})
    assert model.memory_bandwidth == 0
    assert model.floor_us(10**9) == 0
    assert "bandwidth unknown" in plan_forward(FLAGSHIP, model).describe()


def test_floor_is_bytes_over_bandwidth() -> None:
    assert preset("h200").floor_us(4_250_000) == pytest.approx(1.0)


def test_clusters_at_once_are_the_drivers_or_an_estimate_by_gpcs_of_sixteen_sms() -> None:
    assert [preset("h200").clusters_at_once(blocks) for blocks in (1, 2, 6, 8)] == [132, 66, 17, 15]
    unasked = preset("b200")
    assert not unasked.active_clusters
    assert [unasked.clusters_at_once(blocks) for blocks in (1, 2, 3, 6, 8)] == [148, 72, 45, 18, 18]
