"""``sdm-rt doctor``: what works, what is missing for the GPU path, and how to get it."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

import sdm_rt
from sdm_rt import env
from sdm_rt.cli import machine, selftest
from sdm_rt.errors import MissingDependencyError
from sdm_rt.runtime import cache, device, driver
from sdm_rt.runtime.dependencies import install_command, load_cupy, load_nvrtc
from sdm_rt.runtime.sources import find_kernels

__all__ = ["CPU_CHECKS", "CUDA_CHECKS", "CUDA_TRIALS", "Check", "Report", "add_arguments", "examine", "run"]

MINIMUM_CAPABILITY = (8, 0)
PDL_CAPABILITY = (9, 0)
SEE_COMMAND = "see the command below"


@dataclass(frozen=True)
class Check:
    """The outcome of one look at the machine.

    Parameters
    ----------
    status : {"ok", "note", "missing", "failed", "skipped"}
        Anything but "ok" and "note" keeps the path of this check from working.
    detail : str
        What was found.
    remedy : str
        What a user can do about it; empty where nothing is wrong.
    package : str
        First letters of the requirement of the CUDA extras that is missing, for the report's one command.
    """

    status: Literal["ok", "note", "missing", "failed", "skipped"]
    detail: str
    remedy: str = ""
    package: str = ""


@dataclass(frozen=True)
class Report:
    """All checks of a machine and the path they lead to.

    Parameters
    ----------
    cpu, cuda : dict of str to Check
        The checks of the two paths, by what was looked at.
    device : {"cpu", "cuda"}
        The chosen path.
    """

    cpu: dict[str, Check]
    cuda: dict[str, Check]
    device: str

    @property
    def works(self) -> bool:
        """Whether the chosen path is complete."""
        return _complete(self.cuda if self.device == "cuda" else self.cpu)

    @property
    def install_command(self) -> str:
        """The one command that installs what the GPU path lacks; empty where no package is missing."""
        missing = [check.package for check in self.cuda.values() if check.package]
        return install_command(*missing) if missing else ""

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-compatible data."""
        return {
            "version": sdm_rt.__version__,
            "device": self.device,
            "works": self.works,
            "install_command": self.install_command,
            "cpu": {name: asdict(check) for name, check in self.cpu.items()},
            "cuda": {name: asdict(check) for name, check in self.cuda.items()},
        }

    def describe(self) -> str:
        """Return the report as text."""
        lines = [f"sdm_rt {sdm_rt.__version__}"]
        for title, checks in (("CPU path", self.cpu), ("GPU path", self.cuda)):
            lines += ["", f"{title}: {'works' if _complete(checks) else 'incomplete'}"]
            for name, check in checks.items():
                lines.append(f"  {check.status:<8} {name:<14} {check.detail}")
                if check.remedy:
                    lines.append(f"  {'':<8} {'':<14} -> {check.remedy}")
        if self.install_command:
            lines += ["", f"To install what the GPU path lacks: {self.install_command}"]
        verdict = "it works" if self.works else "it does not work here"
        return "\n".join([*lines, "", f"Chosen path: {self.device}; {verdict}."])


def check_python() -> Check:
    """Name the interpreter."""
    return Check("ok", f"{platform.python_version()}, {sys.executable}")


def check_torch() -> Check:
    """Name PyTorch's release and what it was built for."""
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
    return Check("ok", f"{torch.__version__}, {built}")


def check_numpy() -> Check:
    """Name NumPy's release."""
    return Check("ok", importlib.metadata.version("numpy"))


def check_cpu_op() -> Check:
    """Run op, backward and decode on CPU tensors against known answers."""
    problems = (selftest.forward_error, selftest.backward_error, selftest.decode_error)
    return _trial(torch.device("cpu"), torch.float64, 1e-12, *problems)


def check_driver() -> Check:
    """Ask the NVIDIA driver what it supports."""
    try:
        major, minor = driver.driver_version()
    except MissingDependencyError as error:
        return Check("missing", _first_clause(error), "install the NVIDIA driver of the GPU")
    return Check("ok", f"supports CUDA {major}.{minor}")


def check_gpus() -> Check:
    """List the GPUs; one of them must have the compute capability that the kernels need."""
    try:
        devices = machine.gpus()
    except MissingDependencyError:
        devices = []
    if not devices:
        return Check("missing", "none found", "CPU tensors work without one")
    detail = ", ".join(f"{name} (compute capability {major}.{minor})" for name, (major, minor) in devices)
    if all(capability < MINIMUM_CAPABILITY for _, capability in devices):
        return Check("failed", detail, "the kernels need compute capability 8.0 or above")
    return Check("ok", detail)


def check_torch_cuda() -> Check:
    """Ask PyTorch for GPUs."""
    if torch.version.cuda is None:
        return Check("missing", "this torch is a CPU build", "install a CUDA build of torch")
    if not torch.cuda.is_available():
        return Check("failed", "torch.cuda.is_available() is False", "see driver and GPU above")
    return Check("ok", f"torch sees {torch.cuda.device_count()}")


def check_cupy() -> Check:
    """Import CuPy as the kernels do."""
    try:
        return Check("ok", load_cupy().__version__)
    except MissingDependencyError as error:
        return Check("missing", _first_clause(error), SEE_COMMAND, "cupy")


def check_nvrtc() -> Check:
    """Load NVRTC as CuPy does, and name the files of it in this process."""
    try:
        version = load_nvrtc().getVersion()
    except MissingDependencyError as error:
        return Check("missing", _first_clause(error), SEE_COMMAND, "nvidia-cuda-nvrtc")
    release = ".".join(str(part) for part in version)
    return Check("ok", ", ".join([release, *machine.loaded_libraries("libnvrtc")]))


def check_headers() -> Check:
    """Find the CUDA headers: the kernels of this package include none, CuPy's own kernels do."""
    for folder in machine.header_folders():
        if (folder / "cuda_bf16.h").is_file():
            return Check("ok", str(folder))
    return Check(
        "note", "none found; only CuPy's own array operations need them", SEE_COMMAND, "nvidia-cuda-runtime"
    )


def check_launch_features() -> Check:
    """Say what plans use of each GPU: shared memory of a block, programmatic dependent launch."""
    try:
        devices = machine.gpus()
    except MissingDependencyError:
        devices = []
    if not devices:
        return Check("skipped", "waits for a GPU")
    words = []
    for index, (_, capability) in enumerate(devices):
        shared = device.attributes(index)["MaxSharedMemoryPerBlockOptin"]
        pdl = "PDL" if capability >= PDL_CAPABILITY else "no PDL (compute capability 9.0 has it)"
        words.append(f"GPU {index}: {shared} bytes of shared memory a block, {pdl}")
    switched_off = "" if env.flag("SDM_RT_PDL") else "; SDM_RT_PDL=0 switches PDL off"
    return Check("ok", "; ".join(words) + switched_off)


def check_sources() -> Check:
    """Find the CUDA sources."""
    return Check("ok", str(find_kernels()))


def check_cache() -> Check:
    """Find the compile cache and say what it holds."""
    folder = cache.cache_folder()
    found = cache.entries(folder / cache.MANIFEST)
    detail = f"{folder}, {len(found)} kernel files, {sum(entry.size for entry in found) // 1024} KiB"
    if cache.is_temporary():
        return Check("note", f"{detail}; temporary", "SDM_RT_CACHE_DIR chooses a folder that can be written")
    return Check("ok", detail)


def check_cuda_decode() -> Check:
    """Run decode on the GPU against known answers."""
    return _trial(torch.device("cuda"), torch.float32, 1e-5, selftest.decode_error)


def check_cuda_forward() -> Check:
    """Run the op without gradients on the GPU against known answers."""
    return _trial(torch.device("cuda"), torch.float32, 1e-5, selftest.forward_error)


def check_cuda_backward() -> Check:
    """Run op and backward on the GPU against known answers."""
    return _trial(torch.device("cuda"), torch.float32, 1e-5, selftest.backward_error)


CPU_CHECKS: dict[str, Callable[[], Check]] = {
    "Python": check_python,
    "torch": check_torch,
    "numpy": check_numpy,
    "op on CPU": check_cpu_op,
}
CUDA_CHECKS: dict[str, Callable[[], Check]] = {
    "driver": check_driver,
    "GPU": check_gpus,
    "torch and GPU": check_torch_cuda,
    "CuPy": check_cupy,
    "NVRTC": check_nvrtc,
    "CUDA headers": check_headers,
    "launches": check_launch_features,
    "CUDA sources": check_sources,
    "compile cache": check_cache,
}
CUDA_TRIALS: dict[str, Callable[[], Check]] = {
    "decode on GPU": check_cuda_decode,
    "op on GPU": check_cuda_forward,
    "train on GPU": check_cuda_backward,
}


def examine(device: str = "auto") -> Report:
    """Look at the machine.

    Parameters
    ----------
    device : {"auto", "cpu", "cuda"}
        The path that must work; "auto" is cuda where the GPU path is complete, else cpu.
    """
    cpu = {name: _perform(check) for name, check in CPU_CHECKS.items()}
    cuda = {name: _perform(check) for name, check in CUDA_CHECKS.items()}
    ready = _complete(cuda)
    for name, trial in CUDA_TRIALS.items():
        cuda[name] = _perform(trial) if ready else Check("skipped", "waits for what is missing above")
    if device == "auto":
        device = "cuda" if _complete(cuda) else "cpu"
    return Report(cpu, cuda, device)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``sdm-rt doctor``."""
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="the path that must work (default: cuda where it is complete, else cpu)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the report; return 0 where the chosen path works, else 1."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the compile cache cannot be made")  # the report says it
        report = examine(arguments.device)
    print(json.dumps(report.to_dict(), indent=2) if arguments.json else report.describe())
    return 0 if report.works else 1


def _complete(checks: dict[str, Check]) -> bool:
    return all(check.status in ("ok", "note") for check in checks.values())


def _perform(check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:  # a broken installation may raise anything, and the report must still be whole
        return Check("failed", f"{type(error).__name__}: {_first_line(error)}")


def _first_clause(error: BaseException) -> str:
    return _first_line(error).partition(";")[0]


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _trial(
    device: torch.device,
    dtype: torch.dtype,
    tolerance: float,
    *problems: Callable[[torch.device, torch.dtype], float],
) -> Check:
    error = max(problem(device, dtype) for problem in problems)
    detail = f"a problem with known answers in {str(dtype).removeprefix('torch.')}: largest error {error:.1e}"
    if error <= tolerance:
        return Check("ok", detail)
    return Check("failed", f"{detail}, above {tolerance:.0e}", "report this with the output above")
