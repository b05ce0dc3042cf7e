"""``sdm-rt precompile``: compile kernels ahead of time, on a machine without a GPU."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path

from sdm_rt.errors import MissingDependencyError
from sdm_rt.plan.decode import decode_kernel
from sdm_rt.plan.device import PRESETS, DeviceModel
from sdm_rt.plan.shapes import BANK_DTYPES, DecodeShape
from sdm_rt.runtime.kernel import KernelSpec
from sdm_rt.runtime.precompile import precompile

__all__ = ["add_arguments", "run"]


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
        help="W=64,R=64,D=1024,dtype=bfloat16: slots a token writes and reads, head_dim, bank dtype; may be "
        "repeated. Streams, lengths and slots of a stream need no kernel of their own.",
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


def _shape(text: str) -> DecodeShape:
    words = dict(word.split("=", 1) for word in text.replace(" ", "").split(",") if "=" in word)
    dtype = words.pop("dtype", BANK_DTYPES[0])
    if set(words) != {"W", "R", "D"} or not all(value.isdecimal() for value in words.values()):
        raise argparse.ArgumentTypeError(f"expected W=..,R=..,D=..[,dtype=..], got {text!r}")
    try:
        return DecodeShape(1, int(words["W"]), int(words["R"]), int(words["D"]), dtype)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _model(target: str) -> DeviceModel:
    """Return a device of the target: the preset of the nearest lower compute capability, renumbered."""
    capability = _capability(target)
    lower = [model for model in PRESETS.values() if model.compute_capability <= capability]
    nearest = max(lower, key=lambda model: model.compute_capability)
    return replace(nearest, compute_capability=capability)


def _specs(shape: DecodeShape, target: str) -> list[KernelSpec]:
    """Return the kernels that a shape needs on a target, for banks that are aligned and that are not."""
    pdl = _model(target).pdl
    return [decode_kernel(replace(shape, aligned=aligned), pdl) for aligned in (True, False)]


def run(arguments: argparse.Namespace) -> int:
    """Fill the folder; return the exit status."""
    try:
        for target in dict.fromkeys(arguments.arch):
            specs = [spec for shape in arguments.shape for spec in _specs(shape, target)]
            for spec, _, path, built in precompile(dict.fromkeys(specs), [target], arguments.output):
                done = "compiled" if built else "present "
                print(f"{done} {target} {spec.file} {' '.join(spec.options)} {path.name}")
    except MissingDependencyError as error:
        print(error)
        return 1
    print(f"Use it with SDM_RT_PRECOMPILED={arguments.output.resolve()}")
    return 0
