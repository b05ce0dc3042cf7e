"""``sdm-rt demo``: train a small byte-level language model with SDM layers on real text."""

from __future__ import annotations

import argparse
import importlib.util
import io
import os
import shlex
import sys
from pathlib import Path

import torch

from sdm_rt.cli import INTERRUPTED
from sdm_rt.demo.config import DemoConfig
from sdm_rt.demo.errors import DemoError, is_lack_of_memory
from sdm_rt.ops.availability import gpu_path_obstacle

__all__ = ["add_arguments", "run"]

PACKAGES = ("tqdm", "matplotlib")
SIZES = {
    "steps": "optimizer steps",
    "batch": "sequences of a step",
    "seq_len": "bytes of a sequence",
    "dim": "width of the model",
    "layers": "blocks: local attention, SDM layer, MLP",
    "sdm_layers": "blocks that have an SDM layer, 0: all",
    "text_bytes": "most bytes of text, 0: all of --text, 4,000,000 of the standard library",
    "slots": "slots of an SDM head, a square number",
    "seed": "of initial weights, data order and sample",
}
THREADS_PER_CORE = 4  # more threads than any machine profits from; PyTorch crashes on very many
WRONG_RESULT, WRONG_USE = 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--text",
        type=Path,
        metavar="PATH",
        help="file or folder to learn (default: the Python standard library)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="default: %(default)s"
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue the interrupted run in the --out folder"
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="default: cuda where there is a GPU that the kernels run on, else cpu",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        metavar="N",
        help="PyTorch threads on the CPU; the steps of a token are too small for more (default: %(default)s)",
    )
    for name, meaning in SIZES.items():
        default = DemoConfig.__dataclass_fields__[name].default
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, metavar="N", help=f"{meaning} (default: {default})"
        )


def run(arguments: argparse.Namespace) -> int:
    """Run the demo and return its exit status: 1 if the decode path gave other logits, 130 after Ctrl-C."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(
            errors="backslashreplace"
        )  # a sample may hold what the terminal's encoding lacks
    try:
        _require_packages()
        device = _device(arguments.device)
        most = THREADS_PER_CORE * (os.cpu_count() or 1)
        if not 1 <= arguments.threads <= most:
            raise DemoError(f"--threads: expected from 1 to {most}, got {arguments.threads}")
        torch.set_num_threads(arguments.threads)
        from sdm_rt.demo.experiment import Request, perform
        from sdm_rt.demo.training import StoppedError

        sizes = {name: getattr(arguments, name) for name in SIZES if getattr(arguments, name) is not None}
        request = Request(sizes, arguments.text, arguments.out, arguments.resume, device)
        try:
            return 0 if perform(request) else WRONG_RESULT
        except StoppedError:
            folder = shlex.quote(str(arguments.out))
            print(f"\nstopped   checkpoint saved; continue with: sdm-rt demo --resume --out {folder}")
            return INTERRUPTED
    except (DemoError, OSError) as error:
        print(f"sdm-rt demo: {error}", file=sys.stderr)
        return WRONG_USE
    except (MemoryError, RuntimeError) as error:
        if not is_lack_of_memory(error):
            raise
        print(
            "sdm-rt demo: the memory is too small for these sizes; "
            "less of --batch, --seq-len, --dim, --layers or --slots needs less",
            file=sys.stderr,
        )
        return WRONG_USE
    except KeyboardInterrupt:
        print(f"\nsdm-rt demo: interrupted; checkpoints, if any yet, are in {arguments.out}", file=sys.stderr)
        return INTERRUPTED


def _require_packages() -> None:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoError(f'needs {" and ".join(missing)}: pip install "sdm_rt[demo]"')


def _device(asked: str) -> torch.device:
    obstacle = gpu_path_obstacle()
    if asked == "cuda" and obstacle is not None:
        raise DemoError(f"--device cuda: {obstacle}; --device cpu works")
    if asked == "cpu" or obstacle is not None:
        print("device    cpu" + (f" ({obstacle})" if asked == "auto" else ""))
        return torch.device("cpu")
    print(f"device    cuda ({torch.cuda.get_device_name()})")
    return torch.device("cuda")
