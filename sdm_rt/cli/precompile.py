"""``sdm-rt precompile``: compile kernels ahead of time, on a machine without a GPU."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import isqrt, prod
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from sdm_rt.cli import INTERRUPTED
from sdm_rt.errors import KernelCompileError, MissingDependencyError
from sdm_rt.plan.backward import (
    du_update_kernel,
    gds_kernel,
    gram_backward_kernel,
    gwr_kernel,
    phase_a_kernel,
)
from sdm_rt.plan.decode import decode_kernel
from sdm_rt.plan.device import PRESETS, DeviceModel
from sdm_rt.plan.forward import (
    PRODUCT_COLUMNS,
    WRITE_LANES,
    decay_write_kernel,
    dual_matmul_kernel,
    gather_kernel,
    keep_rows_kernel,
)
from sdm_rt.plan.persistent import persistent_kernels
from sdm_rt.plan.persistent_backward import COLUMN_SUM_KERNEL, persistent_backward_kernels
from sdm_rt.plan.phase1 import phase1_kernels
from sdm_rt.plan.phase1_backward import phase1_backward_gates_kernel, phase1_backward_pairs_kernel
from sdm_rt.plan.shapes import (
    ALIGNMENTS,
    BANK_DTYPES,
    INDEX_DTYPES,
    SNAPSHOTS,
    DecodeShape,
    WriteReadShape,
    dtype_bytes,
)
from sdm_rt.plan.topk import TopkShape, topk_kernel
from sdm_rt.runtime.kernel import KernelSpec
from sdm_rt.runtime.nvrtc import check_target
from sdm_rt.runtime.precompile import precompile

__all__ = ["add_arguments", "kernels_of", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.add_argument(
        "--arch",
        action="append",
        required=True,
        type=_target,
        help="compile target, for example sm_90; may be repeated",
    )
    parser.add_argument(
        "--shape",
        action="append",
        required=True,
        type=_shape,
        help="W=64,R=64,D=1024[,C=64][,S=65536][,dtype=bfloat16][,factors=256x256]: slots a token writes and "
        "reads, head_dim, chunk size, slots of a stream, bank dtype, widths of the product-key factors "
        "(default: two of the square root of S); may be repeated. Streams and lengths need no kernel of "
        "their own.",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("sdm_rt_kernels"), help="folder to fill (default: sdm_rt_kernels)"
    )


def _target(text: str) -> str:
    if not re.fullmatch(r"sm_\d{2,3}", text) or _capability(text) < (8, 0):
        raise argparse.ArgumentTypeError(f"expected a target from sm_80 on, got {text!r}")
    return text


def _capability(target: str) -> tuple[int, int]:
    number = int(target.removeprefix("sm_"))
    return number // 10, number % 10


class CallShape(NamedTuple):
    """What ``--shape`` names: the shape of calls, and the factors that its slots are selected by, if any."""

    call: WriteReadShape
    factors: tuple[int, ...]


def _shape(text: str) -> CallShape:
    words = [word.partition("=") for word in text.replace(" ", "").split(",")]
    given = {name: value for name, equals, value in words if equals}
    unclear = len(given) < len(words)  # a word without "=", or a name given twice
    factors = given.pop("factors", None)
    dtype = given.pop("dtype", BANK_DTYPES[0])
    sizes = {"C": "64", "S": "65536"} | given
    if unclear or set(sizes) != set("WRDCS") or not all(value.isdecimal() for value in sizes.values()):
        raise argparse.ArgumentTypeError(
            f"expected W=..,R=..,D=..[,C=..][,S=..][,dtype=..][,factors=..x..], got {text!r}"
        )
    W, R, D, C, S = (int(sizes[name]) for name in "WRDCS")
    try:
        return CallShape(WriteReadShape(1, 1, C, W, R, D, S, bank_dtype=dtype), _factors(factors, S))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _factors(text: str | None, slots: int) -> tuple[int, ...]:
    """Return the factors named, or two of the square root of ``slots``; none where it has none."""
    if text is None:
        root = isqrt(slots)
        return (root, root) if root * root == slots else ()
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text) or prod(map(int, text.split("x"))) != slots:
        raise ValueError(f"factors: expected widths ..x.. with the product S = {slots}, got {text!r}")
    return tuple(map(int, text.split("x")))


def _model(target: str) -> DeviceModel:
    """Return a device of the target: the preset of the nearest lower compute capability, renumbered."""
    capability = _capability(target)
    lower = [model for model in PRESETS.values() if model.compute_capability <= capability]
    nearest = max(lower, key=lambda model: model.compute_capability)
    return replace(nearest, compute_capability=capability)


def _forward_specs(shape: WriteReadShape, device: DeviceModel) -> Iterator[KernelSpec]:
    """Yield the kernels of the forward, calls with and without gradients, of either schedule."""
    gather = gather_kernel(shape)
    yield from phase1_kernels(shape).values()
    yield gather
    for training, snapshot in ((False, SNAPSHOTS[0]), *product((True,), SNAPSHOTS)):
        call = replace(shape, training=training, snapshot=snapshot)
        for columns, triggers in product(PRODUCT_COLUMNS, sorted({False, device.pdl})):
            yield dual_matmul_kernel(call, columns, triggers)
        writes = [decay_write_kernel(call, lanes, device.pdl) for lanes in WRITE_LANES]
        yield from writes
        if call.quantizes:
            yield keep_rows_kernel(call)
        if device.clusters:
            yield from persistent_kernels(call, gather, writes[0])


def _backward_specs(shape: WriteReadShape, device: DeviceModel) -> Iterator[KernelSpec]:
    """Yield the kernels of the backward, either schedule, gradient banks in the bank's format or float32."""
    yield from (du_update_kernel(shape, columns, device.pdl) for columns in PRODUCT_COLUMNS)
    for gradient in (shape.bank_dtype, "float32"):
        call = replace(shape, gradient_bank_dtype=gradient)
        yield gwr_kernel(call, device.pdl)
        yield gds_kernel(call, device.pdl)
        for snapshot in SNAPSHOTS:
            phase_a = phase_a_kernel(replace(call, snapshot=snapshot), device.pdl)
            yield phase_a
            if device.clusters:
                yield from persistent_backward_kernels(call, phase_a)
    if device.clusters:
        yield COLUMN_SUM_KERNEL
    yield gram_backward_kernel(shape)
    yield from (phase1_backward_pairs_kernel(batch) for batch in (False, True))
    yield phase1_backward_gates_kernel(shape)


def kernels_of(of: CallShape, target: str) -> Iterator[KernelSpec]:
    """Yield the kernels of decode, forward, backward and top-k that a shape needs on a target.

    For banks of every alignment, indices of both widths, every snapshot, few streams and many;
    top-k of product keys of these factors, where there are any.
    """
    device, (shape, factors) = _model(target), of
    for aligned in (True, False):
        token = DecodeShape(1, shape.writes, shape.reads, shape.head_dim, shape.bank_dtype, aligned=aligned)
        yield decode_kernel(token, device.pdl)
    for alignment in (n for n in ALIGNMENTS if n >= dtype_bytes(shape.bank_dtype)):
        for index in INDEX_DTYPES:
            yield from _forward_specs(replace(shape, index_dtype=index, alignment=alignment), device)
        yield from _backward_specs(replace(shape, alignment=alignment), device)
    if factors:
        for selected in (shape.writes, shape.reads):
            yield topk_kernel(TopkShape(1, factors, selected, shape.bank_dtype))


@contextlib.contextmanager
def _ended_by_interrupt() -> Iterator[None]:
    """End the process at Ctrl-C: an exception would wait for the compiles under way, seconds long."""

    def stop(number: int, frame: FrameType | None) -> None:
        os.write(2, b"\nsdm-rt precompile: stopped; what was built is kept\n")
        os._exit(INTERRUPTED)

    if threading.current_thread() is not threading.main_thread():  # others may set no handler
        yield
        return
    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@_ended_by_interrupt()
def run(arguments: argparse.Namespace) -> int:
    """Fill the folder; return the exit status."""
    for shape, factors in arguments.shape:
        if not factors:
            print(
                f"no top-k for S={shape.slots}, which is no square: name the widths of the product-key "
                f"factors that a layer has, factors=..x.."
            )
    try:
        for target in arguments.arch:
            check_target(target)
        for target in dict.fromkeys(arguments.arch):
            specs = [spec for one in arguments.shape for spec in kernels_of(one, target)]
            for spec, _, path, built in precompile(dict.fromkeys(specs), [target], arguments.output):
                done = "compiled" if built else "present "
                print(f"{done} {target} {spec.file} {' '.join(spec.options)} {path.name}", flush=True)
    except (MissingDependencyError, KernelCompileError, OSError, ValueError) as error:
        print(f"sdm-rt precompile: {error}", file=sys.stderr)
        return 1
    print(f"Use it with SDM_RT_PRECOMPILED={arguments.output.resolve()}")
    return 0
