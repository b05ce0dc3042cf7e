"""Every kernel of kernels_cu has tests that execute it in the emulator.

A new kernel fails this file until a module of variants holds it; each of those fails where a planner chooses
a variant that none of its cases executes.
"""

from __future__ import annotations

import re

from tests.emulator import test_decode_variants, test_forward_variants, test_topk_variants
from tests.emulator.build import KERNELS_CU

ENTRY = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(")
EXECUTED = (*test_decode_variants.SPECS, *test_forward_variants.SPECS, *test_topk_variants.SPECS)


def test_every_kernel_is_executed() -> None:
    files = sorted(KERNELS_CU.glob("*.cu"))
    kernels = {(path.name, entry) for path in files for entry in ENTRY.findall(path.read_text())}
    assert kernels, "no kernel found"
    executed = {(spec.file, entry) for spec in EXECUTED for entry in spec.entries}
    assert not kernels - executed, f"no test executes these in the emulator: {sorted(kernels - executed)}"
    assert not executed - kernels, f"tests of kernels that do not exist: {sorted(executed - kernels)}"


def test_the_search_finds_kernels_in_any_layout() -> None:
    text = "__global__ void plain(int* x) {\n__global__ void __launch_bounds__(2 * N)\n    bounded(int* x)"
    assert ENTRY.findall(text) == ["plain", "bounded"]
