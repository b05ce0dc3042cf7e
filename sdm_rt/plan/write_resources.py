"""Write ``resources.json``: what NVRTC reports of every kernel variant that a plan can choose.

    python -m sdm_rt.plan.write_resources                 every kernel: minutes
    python -m sdm_rt.plan.write_resources decay_write.cu  only those of the files named

Needs NVRTC and no GPU. Beside the table stands a digest of each file's code, so that a test sees a table that
was not written from these sources; another test compiles a part of the variants and compares.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from multiprocessing import get_context
from typing import Any

from sdm_rt.plan.backward import (
    du_update_kernel,
    gds_kernel,
    gram_backward_kernel,
    gwr_kernel,
    phase_a_kernel,
)
from sdm_rt.plan.decode import GROUPS, decode_kernel
from sdm_rt.plan.forward import (
    PRODUCT_COLUMNS,
    WRITE_LANES,
    decay_write_kernel,
    dual_matmul_kernel,
    gather_kernel,
    keep_rows_kernel,
)
from sdm_rt.plan.kernel_resources import FIGURES, TABLE, resource_key
from sdm_rt.plan.persistent import persistent_kernels
from sdm_rt.plan.persistent_backward import COLUMN_SUM_KERNEL, persistent_backward_kernels
from sdm_rt.plan.phase1 import phase1_kernels
from sdm_rt.plan.phase1_backward import phase1_backward_gates_kernel, phase1_backward_pairs_kernel
from sdm_rt.plan.shapes import (
    BANK_DTYPES,
    INDEX_DTYPES,
    MAX_LANES,
    SNAPSHOTS,
    DecodeShape,
    WriteReadShape,
    dtype_bytes,
)
from sdm_rt.plan.topk import TopkShape, topk_kernel
from sdm_rt.runtime.kernel import KernelSpec
from sdm_rt.runtime.nvrtc import OPTIONS, kernel_figures
from sdm_rt.runtime.sources import expand, find_kernels

__all__ = ["SOURCES", "TARGETS", "code_digest", "figures_of", "figures_of_all", "text", "variants"]

SOURCES = TABLE.with_name("resources.sources.json")

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")

# Words of a row, one count for each choice that a forward plan makes by the width of a row.
ROW_WORDS = (1, 17, 33, 65, 129, 257, 513)

Figures = dict[str, list[int]]  # resource key -> FIGURES of `kernel_resources`
Table = dict[str, dict[str, Figures]]  # file -> resource key -> target -> the same


def _decode_variants(pdl: bool) -> Iterator[KernelSpec]:
    rows = GROUPS
    while rows <= MAX_LANES:
        for dtype, aligned in product(BANK_DTYPES, (True, False)):
            shape = DecodeShape(
                streams=1, writes=rows, reads=1, head_dim=64, bank_dtype=dtype, aligned=aligned
            )
            yield decode_kernel(shape, pdl)
        rows *= 2


def _forward_shapes(dtypes: Sequence[str] = BANK_DTYPES, **options: Any) -> Iterator[WriteReadShape]:
    """Yield rows of every word size and of every width class."""
    for dtype in dtypes:
        for exponent in range((16 // dtype_bytes(dtype)).bit_length()):
            for words in ROW_WORDS:
                yield WriteReadShape(
                    streams=1,
                    tokens=1,
                    chunk=1,
                    writes=1,
                    reads=1,
                    head_dim=words << exponent,
                    slots=1,
                    bank_dtype=dtype,
                    **options,
                )


def _forward_variants(pdl: bool) -> Iterator[KernelSpec]:
    for index in INDEX_DTYPES:
        for shape in _forward_shapes(index_dtype=index):
            yield from phase1_kernels(shape).values()
            yield gather_kernel(shape)
        for chunk, slots in product((1, 256), (1, 2**30)):  # items and blocks of the sort
            wide = WriteReadShape(1, 1, chunk, 128, 128, 1, slots, index_dtype=index)
            yield phase1_kernels(wide)["phase1_sort"]
    for dtype in BANK_DTYPES:
        yield phase1_kernels(WriteReadShape(1, 1, 256, 128, 128, 1, 1, dtype))["phase1_scan"]
    for training, snapshot in ((False, "none"), *product((True,), SNAPSHOTS)):
        for shape in _forward_shapes(training=training, snapshot=snapshot):
            for columns, triggers in product(PRODUCT_COLUMNS, {False, pdl}):
                yield dual_matmul_kernel(shape, columns, triggers)
            for lanes in WRITE_LANES:
                yield decay_write_kernel(shape, lanes, pdl)
            if shape.quantizes:
                yield keep_rows_kernel(shape)
            if pdl:  # such GPUs have clusters
                yield from persistent_kernels(
                    shape, gather_kernel(shape), decay_write_kernel(shape, WRITE_LANES[0], pdl)
                )


def _phase1_backward_variants() -> Iterator[KernelSpec]:
    yield from (phase1_backward_pairs_kernel(batch) for batch in (False, True))
    for dtype in BANK_DTYPES:
        yield phase1_backward_gates_kernel(WriteReadShape(1, 1, 1, 1, 1, 1, 1, bank_dtype=dtype))


def _backward_variants(pdl: bool) -> Iterator[KernelSpec]:
    for dtype, wide in product(BANK_DTYPES, (False, True)):
        gradient = "float32" if wide else dtype
        for shape in _forward_shapes(dtypes=(dtype,), gradient_bank_dtype=gradient):
            yield gwr_kernel(shape, pdl)
            yield gds_kernel(shape, pdl)
            yield gram_backward_kernel(shape)
            for snapshot in SNAPSHOTS:
                phase_a = phase_a_kernel(replace(shape, snapshot=snapshot), pdl)
                yield phase_a
                if pdl:  # such GPUs have clusters
                    yield from persistent_backward_kernels(shape, phase_a)
            for columns in PRODUCT_COLUMNS:
                yield du_update_kernel(shape, columns, pdl)
    if pdl:
        yield COLUMN_SUM_KERNEL


def _topk_variants() -> Iterator[KernelSpec]:
    """Yield usual selections, those of banks of 10,000 and of 65,536 slots, and one of the largest k."""
    for dtype, factors in product(BANK_DTYPES, ((100, 100), (256, 256))):
        yield topk_kernel(TopkShape(1, factors, 64, dtype))
    yield topk_kernel(TopkShape(1, (16, 16, 16), MAX_LANES, "float32"))


def variants(target: str) -> tuple[KernelSpec, ...]:
    """Return every translation unit that plans can choose on GPUs of a target, in a fixed order.

    Top-k has variants without number: some of them.
    """
    pdl = int(target.removeprefix("sm_")) >= 90
    kernels = {
        *_decode_variants(pdl),
        *_forward_variants(pdl),
        *_backward_variants(pdl),
        *_phase1_backward_variants(),
        *_topk_variants(),
    }
    return tuple(sorted(kernels))


def code_digest(file: str) -> str:
    """Return the digest of a kernel file with its headers and options, without comments and layout."""
    source = expand(KernelSpec(file, (file,)), find_kernels()).text
    code = re.sub(r"//[^\n]*|^#line [^\n]*", "", source, flags=re.MULTILINE)
    return hashlib.sha256(" ".join([*OPTIONS, *code.split()]).encode()).hexdigest()[:16]


def figures_of(spec: KernelSpec, target: str) -> Figures:
    """Return the table's entries of one translation unit on one target, by resource key."""
    source = expand(spec, find_kernels())
    return {
        resource_key(spec, entry): [getattr(figures, name) for name in FIGURES]
        for entry, figures in kernel_figures(source.text, target, spec.file).items()
    }


def figures_of_all(files: Collection[str]) -> Table:
    """Compile every variant of some files for every target, in as many processes as the machine has cores."""
    jobs = [(spec, target) for target in TARGETS for spec in variants(target) if spec.file in files]
    table: Table = {}
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        results = pool.map(figures_of, *zip(*jobs, strict=True), chunksize=8)
        for (spec, target), figures in zip(jobs, results, strict=True):
            for key, found in figures.items():
                table.setdefault(spec.file, {}).setdefault(key, {})[target] = found
    return table


def text(table: Table) -> str:
    """Return the table as the file's text: one line a kernel variant."""
    files = []
    for file, kernels in sorted(table.items()):
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(kernels[key])}" for key in sorted(kernels))
        files.append(f" {json.dumps(file)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(files) + "\n}\n"


def main(files: Sequence[str]) -> None:
    """Compile the variants of the files, or of all where none is named, and write their part of the table."""
    known = {spec.file for target in TARGETS for spec in variants(target)}
    if unknown := sorted(set(files) - known):
        raise SystemExit(
            f"no plan chooses a kernel of {', '.join(unknown)}; known: {', '.join(sorted(known))}"
        )
    found = figures_of_all(files or known)
    # Read now: another run may have written other files' part meanwhile.
    table: Table = json.loads(TABLE.read_text(encoding="utf-8")) if files else {}
    digests: dict[str, str] = json.loads(SOURCES.read_text(encoding="utf-8")) if files else {}
    digests |= {file: code_digest(file) for file in files or known}
    TABLE.write_text(text(table | found), encoding="utf-8")
    SOURCES.write_text(json.dumps(digests, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
