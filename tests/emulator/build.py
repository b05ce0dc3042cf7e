"""Compiles kernels, and the program that executes them, with the machine's C++ compiler.

Builds lie in the temporary folder under a hash of their content.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from sdm_rt.runtime.kernel import KernelSpec

__all__ = [
    "BUILDS",
    "KERNELS_CU",
    "PARALLEL_BUILDS",
    "PDL_MACROS",
    "TEST_KERNELS",
    "BuildKind",
    "CompileError",
    "Replacement",
    "execute",
    "kernel_sources",
    "library",
    "require",
    "runner",
    "unavailable_reason",
    "without_pdl",
]

HERE = Path(__file__).resolve().parent
INCLUDE = HERE / "include"
RUNTIME = HERE / "runtime"
KERNELS_CU = HERE.parents[1] / "kernels_cu"
TEST_KERNELS = HERE / "kernels"

BuildKind = Literal["access", "address"]
BUILDS: tuple[BuildKind, ...] = ("access", "address")
PARALLEL_BUILDS = 2
TIMEOUT = 300  # seconds of one compile or run

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
RUNNER_FLAGS = {"access": ("-O2", "-DEMULATOR_TRACK"), "address": ("-O2", *SANITIZERS)}
# The access build sees what the optimizer leaves of a copy: without it memcpy would pass unseen.
KERNEL_FLAGS = {"access": ("-O1", "-fsanitize=thread"), "address": ("-O0", *SANITIZERS)}
# Under -fsanitize=thread only the hooks are wanted: the runner has its own in place of the run-time library.
LINK_FLAGS: dict[BuildKind, tuple[str, ...]] = {"access": (), "address": SANITIZERS}
COMMON_FLAGS = ("-std=c++17", "-g1", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-unknown-pragmas")
# Type punning through pointers is CUDA's custom; products and sums stay separate, as written.
DIALECT_FLAGS = ("-fPIC", "-fno-strict-aliasing", "-ffp-contract=off")
INCLUDED = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
PDL_MACROS = ("SDM_PDL_WAIT", "SDM_PDL_TRIGGER")  # read by ptx.cuh alone; here they travel with the launch


class CompileError(AssertionError):
    """The C++ compiler refused a kernel; the message is its output."""


@dataclass(frozen=True)
class Replacement:
    """One textual change of a kernel's source, to seed a fault.

    Parameters
    ----------
    file, old, new : str
        The file, the text looked for and the text in its place.
    occurrence : int, optional
        Which occurrence of ``old``, from 0; without it there must be exactly one.
    """

    file: str
    old: str
    new: str
    occurrence: int | None = None

    def apply(self, text: str) -> str:
        """Return the changed text; a ValueError where ``old`` is not found as expected."""
        parts = text.split(self.old)
        found, at = len(parts) - 1, self.occurrence or 0
        expected = "exactly 1" if self.occurrence is None else f"more than {at}"
        # No AssertionError: a fault that is not there must not look like one that was caught.
        if found != 1 and (self.occurrence is None or found <= at):
            raise ValueError(f"{self.file}: {self.old!r} occurs {found} times, expected {expected}")
        return self.old.join(parts[: at + 1]) + self.new + self.old.join(parts[at + 1 :])


def compiler() -> str | None:
    """Return the C++ compiler, or None."""
    return shutil.which("g++")


@functools.cache
def unavailable_reason() -> str | None:
    """Return why kernels cannot be emulated on this machine, or None where they can."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
        machine = f"{platform.system()} {platform.machine()}"
        return f"the kernel emulator runs on Linux, x86_64 or aarch64, not {machine}"
    if compiler() is None:
        return "the kernel emulator needs a C++ compiler (g++), which is not on PATH"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text("int main() { return 0; }\n")
        probe = execute([str(compiler()), *SANITIZERS, str(source), "-o", str(Path(folder, "probe"))])
    if probe.returncode:
        return f"the kernel emulator needs g++ with AddressSanitizer: {probe.stderr.strip().splitlines()[-1]}"
    return None


def require() -> None:
    """Skip the running test where kernels cannot be emulated."""
    if (reason := unavailable_reason()) is not None:
        pytest.skip(reason)


def execute(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False, **options)


@functools.cache
def _compiler_version() -> str:
    return execute([str(compiler()), "--version"]).stdout


def _digest(parts: Iterable[str]) -> str:
    digest = hashlib.sha256(_compiler_version().encode())
    for part in parts:
        digest.update(b"\0" + part.encode())
    return digest.hexdigest()[:24]


def _cache_folder() -> Path:
    return Path(tempfile.gettempdir(), f"sdm-rt-emulator-{os.getuid()}")


def _texts(folder: Path, *patterns: str) -> dict[str, str]:
    return {path.name: path.read_text() for pattern in patterns for path in sorted(folder.glob(pattern))}


def _build(key: str, name: str, files: Mapping[str, str], commands: Sequence[Sequence[str]]) -> Path:
    """Run commands in a folder that holds `files`; keep the folder under its key once they have succeeded."""
    import fcntl  # not on Windows, where collecting the tests must work

    folder = _cache_folder() / key
    if (folder / name).exists():
        return folder / name
    _cache_folder().mkdir(mode=0o700, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process builds, the others wait for it
        if (folder / name).exists():
            return folder / name
        with tempfile.TemporaryDirectory(dir=_cache_folder()) as work:
            for file, text in files.items():
                Path(work, file).write_text(text)
            for command in commands:
                done = execute(command, cwd=work)
                if done.returncode:
                    raise CompileError(done.stderr)
            os.rename(work, folder)
            os.mkdir(work)  # for the context manager to remove
    return folder / name


@functools.cache
def runner(kind: BuildKind) -> Path:
    """Build the program that executes launches."""
    files = {**_texts(RUNTIME, "*.cpp", "*.h"), **_texts(INCLUDE, "emulator_abi.h")}
    flags = (*COMMON_FLAGS, *RUNNER_FLAGS[kind], "-rdynamic")
    sources = sorted(name for name in files if name.endswith(".cpp"))
    command = [str(compiler()), *flags, "-I.", *sources, "-o", "runner", "-ldl"]
    return _build(_digest([*command, *map(str, sorted(files.items()))]), "runner", files, [command])


def kernel_sources(spec: KernelSpec, replacements: Sequence[Replacement] = ()) -> dict[str, str]:
    """Return a translation unit's files by name: the kernel's and its own headers, but for ptx.cuh.

    A replacement in a file that is none of the kernel's is left out.

    Raises
    ------
    ValueError
        If the text that a replacement looks for is not there exactly once, or its file is missing.
    """
    for change in replacements:
        if not any((folder / change.file).exists() for folder in (KERNELS_CU, TEST_KERNELS)):
            raise ValueError(f"no file {change.file}")
    folder = next(folder for folder in (KERNELS_CU, TEST_KERNELS) if (folder / spec.file).exists())
    files = {spec.file: (folder / spec.file).read_text()}
    pending = [spec.file]
    while pending:
        for header in INCLUDED.findall(files[pending.pop()]):
            if header not in files and header != "ptx.cuh":  # the emulator has its own
                files[header] = (KERNELS_CU / header).read_text()
                pending.append(header)
    for change in replacements:
        if change.file in files:
            files[change.file] = change.apply(files[change.file])
    return {name: f'#line 1 "{name}"\n{text}' for name, text in files.items()}


def without_pdl(spec: KernelSpec) -> KernelSpec:
    """Return the specification without the macros of PDL: those with one result share a library."""
    return replace(spec, defines=tuple(define for define in spec.defines if define[0] not in PDL_MACROS))


def library(spec: KernelSpec, kind: BuildKind, replacements: Sequence[Replacement] = ()) -> Path:
    """Build the kernels of a specification as a shared library."""
    entries = "".join(f'    emulator::Invoker<{entry}>::entry("{entry}"),\n' for entry in spec.entries)
    unit = (
        f'#include "cuda_dialect.h"\n#include "{spec.file}"\n'
        'extern "C" {\nextern const emulator::Entry emulator_entries[];\n'
        f"const emulator::Entry emulator_entries[] = {{\n{entries}"
        "    {nullptr, nullptr, 0, nullptr}};\n}\n"
    )
    files = {**kernel_sources(spec, replacements), "unit.cpp": unit}
    include = _texts(INCLUDE, "*")
    flags = (*COMMON_FLAGS, *DIALECT_FLAGS, *KERNEL_FLAGS[kind], *without_pdl(spec).options)
    key = _digest([*flags, *map(str, sorted(files.items())), *map(str, sorted(include.items()))])
    commands = [
        [str(compiler()), *flags, "-I.", f"-I{INCLUDE}", "-c", "unit.cpp", "-o", "unit.o"],
        [str(compiler()), "-shared", *LINK_FLAGS[kind], "unit.o", "-o", "kernels.so"],
    ]
    return _build(key, "kernels.so", files, commands)
