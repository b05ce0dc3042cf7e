"""Every kernel variant that plans can choose compiles for every target, as the committed tables say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sdm_rt.plan.kernel_resources import FIGURES, TABLE, resource_key
from sdm_rt.plan.write_resources import TARGETS, figures_of, variants
from sdm_rt.runtime.kernel import KernelSpec
from sdm_rt.runtime.nvrtc import compile_source, kernel_figures, nvrtc_version
from sdm_rt.runtime.sources import expand, find_kernels

COMMITTED: dict[str, dict[str, dict[str, Any]]] = json.loads(TABLE.read_text(encoding="utf-8"))
SAMPLE = 12  # one variant in so many is compiled for a target
# Bytes a thread: what ptxas spills to reach a better occupancy; a local array is larger. More where rows are
# loaded value by value (gwr), where Phase A holds four words of a row in 128 registers, and in the persistent
# kernels, whose threads have as many.
MOST_SPILLED = 96
SPILLED = {"gwr.cu": 256, "phase_a.cu": 224, "persistent_forward.cu": 224, "persistent_backward.cu": 1024}
NVRTC = (12, 9)
WRITE_ANEW = "`python -m sdm_rt.plan.write_resources` writes the table anew"


def _committed(spec: KernelSpec, target: str) -> dict[str, Any]:
    kernels = COMMITTED.get(spec.file, {})
    keys = [resource_key(spec, entry) for entry in spec.entries]
    return {key: kernels[key][target] for key in keys if target in kernels.get(key, {})}


@pytest.mark.parametrize("target", TARGETS)
def test_the_table_holds_every_variant(target: str) -> None:
    missing = [spec for spec in variants(target) if len(_committed(spec, target)) != len(spec.entries)]
    assert not missing, WRITE_ANEW


@pytest.mark.parametrize("target", TARGETS)
def test_resources_equal_the_committed_table(target: str) -> None:
    """A part of the variants is compiled, another part for each target; the script compiles all for all."""
    if nvrtc_version() != NVRTC:
        pytest.skip("the committed figures are those of NVRTC {}.{}".format(*NVRTC))
    turn = TARGETS.index(target)
    sample = [spec for at, spec in enumerate(variants(target)) if at % SAMPLE == turn]
    assert sample
    for spec in sample:
        assert figures_of(spec, target) == _committed(spec, target), WRITE_ANEW


def test_no_variant_spills_more_than_a_few_registers() -> None:
    for file, kernels in COMMITTED.items():
        for key, targets in kernels.items():
            for target, figures in targets.items():
                spilled = max(figures[FIGURES.index(name)] for name in ("spill_stores", "spill_loads"))
                assert spilled <= SPILLED.get(file, MOST_SPILLED), (key, target)


def _representatives(target: str) -> dict[tuple[str, bool, bool], KernelSpec]:
    """One translation unit for each file and combination of PDL macros."""
    found = {}
    for spec in variants(target):
        macros = dict(spec.defines)
        flags = (macros.get("SDM_PDL_WAIT") == "1", macros.get("SDM_PDL_TRIGGER") == "1")
        found.setdefault((spec.file, *flags), spec)
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_griddepcontrol_stands_exactly_where_plans_set_it(target: str) -> None:
    for (file, waits, triggers), spec in _representatives(target).items():
        source = expand(spec, find_kernels())
        ptx = compile_source(source.text, target, file).ptx
        assert ("griddepcontrol.wait" in ptx) == waits
        assert ("griddepcontrol.launch_dependents" in ptx) == triggers
        if target < "sm_90" and len(target) == len("sm_90"):
            assert "griddepcontrol" not in ptx


def test_the_pdl_functions_are_empty_below_sm_90() -> None:
    """The macros themselves are harmless on an older target."""
    spec = next(spec for spec in variants("sm_90") if ("SDM_PDL_WAIT", "1") in spec.defines)
    source = expand(spec, find_kernels())
    assert "griddepcontrol" not in compile_source(source.text, "sm_89", spec.file).ptx


def test_figures_are_read_from_the_log() -> None:
    text = """
    extern "C" __global__ void shared_one(float* x) {
        __shared__ float y[100];
        y[threadIdx.x] = *x;
        __syncthreads();
        *x = y[5];
    }
    extern "C" __global__ void local_one(float* x, int n) {
        float y[64];
        for (int i = 0; i < n; ++i) y[i * n % 64] = x[i];
        *x = y[n];
    }
    """
    figures = kernel_figures(text, "sm_90", "two.cu")
    assert figures["shared_one"].static_shared == 400
    assert figures["local_one"].stack >= 256
    assert all(one.registers > 0 for one in figures.values())
    assert figures["shared_one"].stack == figures["shared_one"].spill_stores == 0
