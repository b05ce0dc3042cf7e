"""``sdm-rt bench``: speed or accuracy on this GPU, phase by phase, as a table and as JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sdm_rt.bench.accuracy import bench_accuracy
from sdm_rt.bench.cases import CASES
from sdm_rt.bench.decode import DecodeBench, bench_decode
from sdm_rt.bench.forward import bench_forward
from sdm_rt.bench.layer import LayerBench, bench_layer
from sdm_rt.bench.record import heading
from sdm_rt.bench.scaling import CURVES, bench_scaling
from sdm_rt.bench.start import bench_start
from sdm_rt.bench.training import bench_training
from sdm_rt.ops.plan_inputs import device_model
from sdm_rt.plan.column_slices import SCHEDULES
from sdm_rt.runtime import device

__all__ = ["PHASES", "add_arguments", "run"]


def _accuracy(arguments: argparse.Namespace) -> dict[str, Any]:
    return bench_accuracy(arguments.case or tuple(CASES), arguments.schedule)


def _decode(arguments: argparse.Namespace) -> dict[str, Any]:
    return bench_decode(DecodeBench(), starts=not arguments.no_start)


def _forward(arguments: argparse.Namespace) -> dict[str, Any]:
    return bench_forward(arguments.case or tuple(CASES), arguments.kernels, arguments.schedule)


def _layer(arguments: argparse.Namespace) -> dict[str, Any]:
    return bench_layer(LayerBench(), device_model(torch.cuda.current_device()))


def _scaling(arguments: argparse.Namespace) -> dict[str, Any]:
    return bench_scaling(CURVES, device_model(torch.cuda.current_device()))


def _start(arguments: argparse.Namespace) -> dict[str, Any]:
    return bench_start()


def _training(arguments: argparse.Namespace) -> dict[str, Any]:
    return bench_training(arguments.case or tuple(CASES), arguments.kernels, arguments.schedule)


PHASES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "accuracy": _accuracy,
    "decode": _decode,
    "forward": _forward,
    "layer": _layer,
    "scaling": _scaling,
    "start": _start,
    "training": _training,
}


# Options that change what is measured, and the phases that they are of.
OPTIONS: dict[str, tuple[str, ...]] = {
    "case": ("forward", "training", "accuracy"),
    "schedule": ("forward", "training", "accuracy"),
    "kernels": ("forward", "training"),
    "no_start": ("decode",),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.add_argument("--phase", choices=tuple(PHASES), required=True, help="what to measure")
    parser.add_argument(
        "--case", choices=tuple(CASES), nargs="+", help="of forward, training and accuracy (default: all)"
    )
    parser.add_argument("--schedule", choices=SCHEDULES, help="of the same (default: the plan's choice)")
    parser.add_argument("--kernels", action="store_true", help="of forward and training: each kernel too")
    parser.add_argument("--no-start", action="store_true", help="of decode: no cold and warm start")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print a table and return the exit status."""
    for option, phases in OPTIONS.items():
        if getattr(arguments, option) and arguments.phase not in phases:
            flag = option.replace("_", "-")
            print(
                f"sdm-rt bench: --{flag} is of {', '.join(phases)}, not of {arguments.phase}", file=sys.stderr
            )
            return 1
    if not torch.cuda.is_available():
        print("sdm-rt bench: PyTorch finds no CUDA GPU; `sdm-rt doctor` says more", file=sys.stderr)
        return 1
    if arguments.json is not None:
        try:
            _require_writable(arguments.json)
        except OSError as error:
            print(f"sdm-rt bench: {error}", file=sys.stderr)
            return 1
    gpu = device.gpu(torch.cuda.current_device())
    print(f"{gpu.name}, torch {torch.__version__}")
    record = heading(arguments.phase, gpu.name)
    if arguments.schedule is not None:
        record["schedule"] = arguments.schedule
    record |= PHASES[arguments.phase](arguments)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


def _require_writable(path: Path) -> None:
    """Make the file's folder and raise OSError where the file cannot be written; leave the file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    existed = os.path.lexists(path)
    path.open("a").close()
    if not existed:
        path.unlink()
