"""``sdm-rt bench``: the speed of one phase on this GPU, as a table and as JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from sdm_rt.bench.cases import CASES
from sdm_rt.bench.decode import DecodeBench, bench_decode
from sdm_rt.bench.forward import bench_forward
from sdm_rt.bench.training import bench_training
from sdm_rt.plan.persistent import SCHEDULES
from sdm_rt.runtime import device

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to ``parser``."""
    parser.add_argument("--phase", choices=("decode", "forward", "training"), required=True)
    parser.add_argument("--case", choices=tuple(CASES), nargs="+", help="which (default: all)")
    parser.add_argument("--schedule", choices=SCHEDULES, help="of the forward (default: the plan's choice)")
    parser.add_argument("--kernels", action="store_true", help="time each kernel too")
    parser.add_argument("--no-start", action="store_true", help="leave out decode's cold and warm start")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print a table and return the exit status."""
    gpu = device.gpu(torch.cuda.current_device())
    print(f"{gpu.name}, torch {torch.__version__}")
    figures: dict[str, Any] = {"gpu": gpu.name, "torch": torch.__version__}
    if arguments.phase == "decode":
        figures |= bench_decode(DecodeBench(), starts=not arguments.no_start)
    elif arguments.phase == "training":
        figures |= bench_training(arguments.case or tuple(CASES), arguments.kernels, arguments.schedule)
    else:
        figures |= bench_forward(arguments.case or tuple(CASES), arguments.kernels, arguments.schedule)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0
