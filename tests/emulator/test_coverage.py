"""Every kernel of kernels_cu, and every variant that a plan can choose, executes in the emulator.

A new kernel fails this file until a module of variants holds it, and so does a new variant. What plans can
choose is what the table of kernel figures holds: a plan with a kernel that is not in it fails.
"""

from __future__ import annotations

import re

import pytest

from sdm_rt.plan.write_resources import TARGETS, variants
from tests.emulator import (
    test_backward_variants,
    test_decode_variants,
    test_forward_variants,
    test_persistent_backward_variants,
    test_persistent_variants,
    test_phase1_backward_variants,
    test_topk_variants,
)
from tests.emulator.build import KERNELS_CU, without_pdl

ENTRY = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(")
# Top-k compiles its factors and k in, so its variants have no end; its module says what it runs of them.
UNBOUNDED = ("topk.cu",)
EXECUTED = (
    *test_backward_variants.SPECS,
    *test_decode_variants.SPECS,
    *test_forward_variants.SPECS,
    *test_persistent_backward_variants.SPECS,
    *test_persistent_variants.SPECS,
    *test_phase1_backward_variants.SPECS,
    *test_topk_variants.SPECS,
)


def test_every_kernel_is_executed() -> None:
    files = sorted(KERNELS_CU.glob("*.cu"))
    kernels = {(path.name, entry) for path in files for entry in ENTRY.findall(path.read_text())}
    assert kernels, "no kernel found"
    executed = {(spec.file, entry) for spec in EXECUTED for entry in spec.entries}
    assert not kernels - executed, f"no test executes these in the emulator: {sorted(kernels - executed)}"
    assert not executed - kernels, f"tests of kernels that do not exist: {sorted(executed - kernels)}"


@pytest.mark.parametrize("target", TARGETS)
def test_every_variant_is_executed(target: str) -> None:
    chosen = {without_pdl(spec) for spec in variants(target) if spec.file not in UNBOUNDED}
    assert chosen, "plans choose no kernel"
    missing = sorted(chosen - {without_pdl(spec) for spec in EXECUTED})
    assert not missing, f"no test executes {len(missing)} variants in the emulator, for example {missing[0]}"


def test_the_search_finds_kernels_in_any_layout() -> None:
    text = "__global__ void plain(int* x) {\n__global__ void __launch_bounds__(2 * N)\n    bounded(int* x)"
    assert ENTRY.findall(text) == ["plain", "bounded"]
