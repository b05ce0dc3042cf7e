"""NVRTC itself, for every target and without a GPU: the ahead-of-time build, resource figures and checks.

The options are those that CuPy passes for the same kernel at run time, so both give the same machine code.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from sdm_rt.errors import KernelCompileError, MissingDependencyError
from sdm_rt.runtime.dependencies import install_command, load_nvrtc

__all__ = [
    "OPTIONS",
    "Compiled",
    "KernelFigures",
    "check_target",
    "compile_source",
    "kernel_figures",
    "nvrtc_version",
    "offline_options",
    "require_target",
]

# Passed to NVRTC for every kernel; the macros of a specification are part of its text.
OPTIONS: tuple[str, ...] = ("-std=c++17",)
# What CuPy adds of its own; the last -ftz wins, so float32 subnormals flush to zero in every kernel.
CUPY_OPTIONS: tuple[str, ...] = ("-ftz=true",)
CUPY_LAST_OPTIONS: tuple[str, ...] = ("--device-as-default-execution-space",)

_RESOURCES = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '(?P<target>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)
_STATIC_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Compiled:
    """What NVRTC made of one source.

    Parameters
    ----------
    cubin : bytes
        Machine code.
    ptx : str
        The assembly it was made from.
    log : str
        The compiler's messages.
    """

    cubin: bytes
    ptx: str
    log: str


@dataclass(frozen=True)
class KernelFigures:
    """What ptxas reports of a kernel: registers and bytes of a thread, shared memory of a block."""

    registers: int
    static_shared: int
    stack: int
    spill_stores: int
    spill_loads: int


def _dotted(version: tuple[int, int]) -> str:
    return "{}.{}".format(*version)


def nvrtc_version() -> tuple[int, int]:
    """Return the version of the NVRTC that CuPy loads, for example (12, 9)."""
    major, minor = load_nvrtc().getVersion()
    return int(major), int(minor)


def newest_target(version: tuple[int, int]) -> tuple[int, int]:
    """Return the highest compute capability that an NVRTC of this version compiles for."""
    if version < (12, 8):
        return (9, 0)
    return (12, 0) if version < (12, 9) else (12, 1)


def require_target(device: str, compute_capability: tuple[int, int]) -> None:
    """Raise where the loaded NVRTC is older than the GPU.

    Parameters
    ----------
    device : str
        The GPU's name.
    compute_capability : tuple of int
        Its compute capability.

    Raises
    ------
    MissingDependencyError
        Naming the GPU's compute capability, what NVRTC supports and the package to upgrade.
    """
    version = nvrtc_version()
    newest = newest_target(version)
    if compute_capability > newest:
        raise MissingDependencyError(
            f"{device} has compute capability {_dotted(compute_capability)}, and the loaded NVRTC "
            f"{_dotted(version)} compiles for at most {_dotted(newest)}; upgrade it with: "
            f"{install_command('nvidia-cuda-nvrtc')} --upgrade"
        )


def check_target(target: str) -> None:
    """KernelCompileError for a target such as ``"sm_90"`` that the loaded NVRTC does not know."""
    if target not in {f"sm_{number}" for number in load_nvrtc().getSupportedArchs()}:
        raise KernelCompileError(f"NVRTC {_dotted(nvrtc_version())} knows no target {target}")


def offline_options(target: str) -> tuple[str, ...]:
    """Return all options of a kernel for a target such as ``"sm_90"``, in CuPy's order."""
    return (*OPTIONS, *CUPY_OPTIONS, f"-arch={target}", *CUPY_LAST_OPTIONS)


def compile_source(text: str, target: str, name: str, extra_options: tuple[str, ...] = ()) -> Compiled:
    """Compile an expanded source for a target.

    Parameters
    ----------
    text : str
        The source (``sources.Source.text``).
    target : str
        For example ``"sm_90"``.
    name : str
        What messages call the source where no ``#line`` says otherwise.
    extra_options : tuple of str
        Further options, in front of the others.

    Raises
    ------
    KernelCompileError
        With NVRTC's log.
    """
    nvrtc = load_nvrtc()
    program = nvrtc.createProgram(text, name, (), ())
    try:
        try:
            nvrtc.compileProgram(program, (*extra_options, *offline_options(target)))
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program) or str(error)
            raise KernelCompileError(f"{name} does not compile for {target}:\n{log}") from None
        log = nvrtc.getProgramLog(program)
        ptx = nvrtc.getPTX(program)
        ptx = ptx.decode() if isinstance(ptx, bytes) else ptx
        return Compiled(cubin=_whole(nvrtc.getCUBIN(program)), ptx=ptx, log=log)
    finally:
        nvrtc.destroyProgram(program)


def _whole(cubin: bytes) -> bytes:
    """Return machine code with its last byte, which CuPy takes for the end of a string."""
    headers_at, size, count = struct.unpack_from("<Q", cubin, 32) + struct.unpack_from("<HH", cubin, 54)
    return cubin + bytes(max(headers_at + size * count - len(cubin), 0))


def kernel_figures(text: str, target: str, name: str) -> dict[str, KernelFigures]:
    """Return the resources of each kernel of a source on a target, read from ptxas's report."""
    log = compile_source(text, target, name, ("--ptxas-options=-v",)).log
    figures = {}
    for match in _RESOURCES.finditer(log):
        shared = _STATIC_SHARED.search(match["rest"])
        figures[match["name"]] = KernelFigures(
            registers=int(match["registers"]),
            static_shared=int(shared[1]) if shared else 0,
            stack=int(match["stack"]),
            spill_stores=int(match["stores"]),
            spill_loads=int(match["loads"]),
        )
    return figures
