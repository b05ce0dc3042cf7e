"""Write ``resources.json``: what NVRTC reports of every kernel variant that a plan can choose.

    python -m sdm_rt.plan.write_resources

Needs NVRTC and no GPU. A test compiles the same variants and compares.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product

from sdm_rt.plan.decode import GROUPS, decode_kernel
from sdm_rt.plan.kernel_resources import TABLE, resource_key
from sdm_rt.plan.shapes import BANK_DTYPES, MAX_LANES, DecodeShape
from sdm_rt.runtime.kernel import KernelSpec
from sdm_rt.runtime.nvrtc import kernel_figures
from sdm_rt.runtime.sources import expand, find_kernels

__all__ = ["TARGETS", "figures_of", "variants"]

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")

Figures = dict[str, dict[str, int]]


def variants(target: str) -> Iterator[KernelSpec]:
    """Yield every translation unit that plans can choose on GPUs of a target."""
    pdl = int(target.removeprefix("sm_")) >= 90
    rows = GROUPS
    while rows <= MAX_LANES:
        for dtype, aligned in product(BANK_DTYPES, (True, False)):
            shape = DecodeShape(
                streams=1, writes=rows, reads=1, head_dim=64, bank_dtype=dtype, aligned=aligned
            )
            yield decode_kernel(shape, pdl)
        rows *= 2


def figures_of(spec: KernelSpec, target: str) -> Figures:
    """Return the table's entries of one translation unit on one target, by resource key."""
    source = expand(spec, find_kernels())
    return {
        resource_key(spec, entry): {
            "registers": figures.registers,
            "static_shared": figures.static_shared,
            "spill_stores": figures.spill_stores,
            "spill_loads": figures.spill_loads,
        }
        for entry, figures in kernel_figures(source.text, target, spec.file).items()
    }


def main() -> None:
    """Compile everything and write the table."""
    table: dict[str, dict[str, Figures]] = {}
    for target in TARGETS:
        for spec in variants(target):
            for key, figures in figures_of(spec, target).items():
                table.setdefault(spec.file, {}).setdefault(key, {})[target] = figures
    files = []
    for file, kernels in sorted(table.items()):
        lines = []
        for key, targets in sorted(kernels.items()):
            body = ",\n".join(
                f"   {json.dumps(target)}: {json.dumps(figures)}" for target, figures in targets.items()
            )
            lines.append(f"  {json.dumps(key)}: {{\n{body}\n  }}")
        files.append(f" {json.dumps(file)}: {{\n" + ",\n".join(lines) + "\n }")
    TABLE.write_text("{\n" + ",\n".join(files) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
