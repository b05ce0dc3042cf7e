"""The plans of product-key top-k."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from sdm_rt import UnsupportedConfigurationError
from sdm_rt.plan.device import DeviceModel, preset
from sdm_rt.plan.kernel_resources import TABLE
from sdm_rt.plan.step_plan import StepPlan
from sdm_rt.plan.topk import TopkShape, plan_topk, plan_topk_backward

H100 = preset("h100")

each_direction = pytest.mark.parametrize("plan", [plan_topk, plan_topk_backward])
Planner = Callable[[TopkShape, DeviceModel], StepPlan]


@each_direction
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (4, 1), (5, 2), (1000, 250), (65536, 16 * 132)])
def test_a_warp_takes_a_row_until_the_gpu_is_full(plan: Planner, rows: int, blocks: int) -> None:
    (launch,) = plan(TopkShape(rows, (100, 100), 64), H100).kernels()
    assert launch.grid == (blocks, 1, 1)
    assert launch.block == (128, 1, 1)


def test_bytes_are_those_of_the_tensors() -> None:
    shape = TopkShape(10, (100, 60), 64, "float32")
    (forward,) = plan_topk(shape, H100).kernels()
    (backward,) = plan_topk_backward(shape, H100).kernels()
    assert forward.bytes_moved == backward.bytes_moved == 10 * (160 * 4 + 64 * 4 + 64 * 8)


def test_both_directions_and_all_row_counts_share_a_translation_unit() -> None:
    kernels = {
        launch.kernel
        for plan in (plan_topk, plan_topk_backward)
        for rows in (1, 300)
        for launch in plan(TopkShape(rows, (4, 5), 7, "float16"), H100).kernels()
    }
    (kernel,) = kernels
    assert kernel.defines == (("FACTORS", "4,5"), ("K", "7"), ("SCORE", "Fp16"))


def test_k_beyond_all_slots_is_k_of_all_slots() -> None:
    kernels = [plan_topk(TopkShape(1, (2, 3), k), H100).kernels()[0].kernel for k in (6, 7, 256)]
    assert kernels[0] == kernels[1] == kernels[2]


@each_direction
@pytest.mark.parametrize("name", ["a100", "rtx4090", "h100", "b200", "rtxpro6000"])
@pytest.mark.parametrize(("factors", "k"), [((100, 100), 64), ((9, 8, 7, 6, 5), 256), ((65536,), 1)])
def test_every_gpu_holds_a_block(plan: Planner, name: str, factors: tuple[int, ...], k: int) -> None:
    (launch,) = plan(TopkShape(8, factors, k, "float32"), preset(name)).kernels()
    assert launch.occupancy(preset(name)).blocks >= 2


@each_direction
def test_no_rows_no_launch(plan: Planner) -> None:
    assert plan(TopkShape(0, (4, 4), 4), H100).kernels() == ()


@each_direction
def test_more_slots_than_the_kernel_numbers_are_refused(plan: Planner) -> None:
    plan(TopkShape(3, (2**16, 2**15 - 1), 4), H100)
    with pytest.raises(
        UnsupportedConfigurationError,
        match=r"factors: \(65536, 32768\) span 2147483648 slots, more than the 2147483647 .*; use narrower",
    ):
        plan(TopkShape(3, (2**16, 2**15), 4), H100)


@each_direction
def test_an_old_gpu_is_refused(plan: Planner) -> None:
    with pytest.raises(RuntimeError, match=r"compute capability 7\.5; sdm_rt supports 8\.0"):
        plan(TopkShape(3, (4, 4), 4), replace(H100, compute_capability=(7, 5)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rows": -1}, "rows must not be negative, got -1"),
        ({"factors": ()}, "factors must be one or more widths of at least 1"),
        ({"factors": (4, 0)}, "factors must be one or more widths of at least 1"),
        ({"k": 0}, "k must be in 1..256, got 0"),
        ({"k": 257}, "k must be in 1..256, got 257"),
        ({"dtype": "float64"}, "dtype must be one of bfloat16, float16, float32, got 'float64'"),
    ],
)
def test_fields_out_of_range(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        TopkShape(**{"rows": 1, "factors": (4, 4), "k": 4, **fields})  # type: ignore[arg-type]


def test_variants_beside_the_table_take_a_budget_that_no_committed_variant_exceeds() -> None:
    (launch,) = plan_topk(TopkShape(1, (9, 11), 5), H100).kernels()
    budget = launch.resources(H100)
    assert not budget.measured
    targets = [figures for key in _committed() for figures in _committed()[key].values()]
    assert len(targets) >= 12
    for registers, static_shared, *_ in targets:
        assert registers <= budget.registers
        assert static_shared <= budget.static_shared


def _committed() -> dict[str, dict[str, list[int]]]:
    kernels: dict[str, dict[str, list[int]]] = json.loads(TABLE.read_text(encoding="utf-8"))["topk.cu"]
    return kernels
