"""Compiles kernels with the machine's C++ compiler and executes planned launches on the CPU.

Each kernel is built twice and each run executes both builds in processes of their own:

``address``
    AddressSanitizer and UndefinedBehaviorSanitizer.
``access``
    Every access goes through the emulator's memory model: bounds, unwritten bytes, races, launch order.

The two builds start from different garbage and run threads and blocks in different random orders, and must
give the same bits.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sdm_rt.plan.launch import Launch
from sdm_rt.runtime.kernel import KernelSpec
from tests.emulator.build import (
    BUILDS,
    PDL_MACROS,
    BuildKind,
    Replacement,
    execute,
    kernel_sources,
    library,
    runner,
)

__all__ = ["Call", "EmulatorError", "LaunchCounts", "coverage", "run"]

ARGUMENT_FORMATS = {"int32": "<i", "int64": "<q", "float32": "<f"}
GARBAGE = {"access": 0x5A, "address": 0xFF}


class EmulatorError(AssertionError):
    """A fault of a kernel or of its launch, found by the emulator.

    Parameters
    ----------
    kind : str
        Which check found it: ``bounds``, ``race``, ``unwritten``, ``barrier``, ``deadlock``, ``mask``,
        ``shuffle``, ``pdl``, ``copy``, ``cluster``, ``mbarrier``, ``trap``, ``shared``, ``readonly``,
        ``undeclared``, ``alignment``, ``arguments``; ``address`` or ``undefined`` (the sanitizers); ``order``
        (the result depends on the order of threads or on garbage).
    report : str
        What happened and where.
    """

    def __init__(self, kind: str, report: str) -> None:
        super().__init__(f"{kind}: {report}")
        self.kind = kind


@dataclass(frozen=True)
class Call:
    """A planned launch with its arguments.

    Parameters
    ----------
    launch : Launch
        The planner's value.
    values : mapping
        A tensor, None (a null pointer) or a number for each of the launch's argument names.
    """

    launch: Launch
    values: Mapping[str, Any]


@dataclass(frozen=True)
class LaunchCounts:
    """What one launch did, as the access build counted it."""

    entry: str
    blocks: int
    barriers: int
    warp_operations: int
    pdl_waits: int
    pdl_triggers: int
    cluster_barriers: int
    shared_touched: int


@dataclass
class Coverage:
    """The kernels that ran in this process."""

    executed: set[tuple[str, str]] = field(default_factory=set)  # (file, entry)
    specs: set[KernelSpec] = field(default_factory=set)


coverage = Coverage()


class _Request:
    """The runner's input file: a buffer for each storage that a tensor argument lies in, then launches."""

    def __init__(self, calls: Sequence[Call], outputs: Sequence[Tensor], scratch: Sequence[Tensor]) -> None:
        self.calls = calls
        self.storages: dict[int, tuple[str, torch.UntypedStorage]] = {}
        self.outputs = {tensor.untyped_storage().data_ptr() for tensor in outputs}
        self.scratch = {tensor.untyped_storage().data_ptr() for tensor in scratch}
        for call in calls:
            names = {argument.name for argument in call.launch.arguments}
            if names != set(call.values):
                raise EmulatorError(
                    "arguments", f"the launch takes {sorted(names)}, given {sorted(call.values)}"
                )
            for name, value in call.values.items():
                if isinstance(value, Tensor):
                    storage = value.untyped_storage()
                    self.storages.setdefault(storage.data_ptr(), (name, storage))

    def _place(self, tensor: Tensor) -> tuple[int, int]:
        pointer = tensor.untyped_storage().data_ptr()
        return list(self.storages).index(pointer), tensor.data_ptr() - pointer

    def _indices(self, call: Call, names: Iterable[str]) -> bytes:
        found = sorted({self._place(value)[0] for name in names if (value := call.values[name]) is not None})
        return struct.pack(f"<I{len(found)}I", len(found), *found)

    def _argument(self, kind: str, value: Any) -> bytes:
        if kind == "pointer":
            index, offset = (-1, 0) if value is None else self._place(value)
            return struct.pack("<IIQ", 1, index + 1, offset)
        data = struct.pack(ARGUMENT_FORMATS[kind], value)
        return struct.pack("<II", 0, len(data)) + data

    def encode(self, seed: int, garbage: int, libraries: Sequence[Path]) -> bytes:
        parts = [struct.pack("<QII", seed, garbage, len(self.storages))]
        for pointer, (name, storage) in self.storages.items():
            flags = 2 if pointer in self.outputs else 0 if pointer in self.scratch else 1
            parts += [_text(name), struct.pack("<QI", storage.nbytes(), flags)]
            if flags == 1:
                parts.append(_storage_bytes(storage))
        parts.append(struct.pack("<I", len(self.calls)))
        for call, path in zip(self.calls, libraries, strict=True):
            launch = call.launch
            options = dict(launch.kernel.defines)
            pdl = (int(launch.pdl), *(int(options.get(macro, "0")) for macro in PDL_MACROS))
            sizes = (*launch.grid, *launch.block, *launch.cluster, launch.shared_memory, *pdl)
            parts += [_text(str(path)), _text(launch.entry), struct.pack("<9IQ3I", *sizes)]
            parts += [self._indices(call, launch.writes), self._indices(call, launch.reads)]
            parts.append(struct.pack("<I", len(launch.arguments)))
            parts += [self._argument(a.kind, call.values[a.name]) for a in launch.arguments]
        return b"".join(parts)

    def decode(self, response: bytes) -> list[bytes]:
        results = []
        for _, storage in self.storages.values():
            results.append(response[: storage.nbytes()])
            response = response[storage.nbytes() :]
        return results


def _text(text: str) -> bytes:
    return struct.pack("<I", len(text)) + text.encode()


def _storage_view(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _storage_bytes(storage: torch.UntypedStorage) -> bytes:
    return _storage_view(storage).numpy().tobytes()


def run(
    calls: Sequence[Call],
    *,
    outputs: Sequence[Tensor] = (),
    scratch: Sequence[Tensor] = (),
    seed: int = 0,
    replacements: Sequence[Replacement] = (),
    builds: Sequence[BuildKind] = BUILDS,
    unused_shared_memory: bool = False,
) -> list[LaunchCounts]:
    """Execute launches one after another; the tensors among their arguments are changed in place.

    Parameters
    ----------
    calls : sequence of Call
        The launches with CPU tensors as pointers.
    outputs : sequence of Tensor
        Tensors that hold nothing before the first launch and must be written entirely.
    scratch : sequence of Tensor
        Tensors that hold nothing before the first launch and garbage, where unwritten, after the last.
    seed : int
        The order of threads and blocks.
    replacements : sequence of Replacement
        Faults to seed.
    builds : sequence of {"access", "address"}
        The builds to execute; only two of them can show that the order of threads matters.
    unused_shared_memory : bool
        Whether a launch may touch less shared memory than it asks for.

    Returns
    -------
    list of LaunchCounts
        For each launch.

    Raises
    ------
    EmulatorError
        For every fault found; the tensors are then unchanged.
    CompileError
        Where a kernel does not compile.
    """
    request = _Request(calls, outputs, scratch)
    results = _run_builds(request, seed, replacements, builds)
    (data, counts), (other, _) = results[0], results[-1]
    for (pointer, (name, _)), one, two in zip(request.storages.items(), data, other, strict=True):
        if one != two and pointer not in request.scratch:
            at = next(i for i in range(len(one)) if one[i] != two[i])
            text = (
                f"'{name}' depends on the order of threads or on garbage: byte {at} differs between two runs"
            )
            raise EmulatorError("order", text)
    for call, count in zip(calls, counts, strict=True):
        planned = call.launch.shared_memory - call.launch.shared_padding
        if count.shared_touched < planned and not unused_shared_memory:
            text = f"{call.launch.name} asks for {planned} bytes and touches {count.shared_touched}"
            raise EmulatorError("shared", text)
    for (_, storage), one in zip(request.storages.values(), data, strict=True):
        if one:
            _storage_view(storage).copy_(torch.frombuffer(bytearray(one), dtype=torch.uint8))
    if not replacements:
        coverage.executed |= {(call.launch.kernel.file, call.launch.entry) for call in calls}
        coverage.specs |= {call.launch.kernel for call in calls}
    return counts


def _run_builds(
    request: _Request, seed: int, replacements: Sequence[Replacement], builds: Sequence[BuildKind]
) -> list[tuple[list[bytes], list[LaunchCounts]]]:
    specs = list(dict.fromkeys(call.launch.kernel for call in request.calls))

    def run_build(kind: BuildKind) -> tuple[list[bytes], list[LaunchCounts]]:
        paths = {spec: library(spec, kind, replacements) for spec in specs}
        order = 2 * seed + BUILDS.index(kind)
        data = request.encode(order, GARBAGE[kind], [paths[call.launch.kernel] for call in request.calls])
        return _run_one(request, kind, data)

    if replacements:
        used = {file for spec in specs for file in kernel_sources(spec)}
        for change in replacements:
            assert change.file in used, f"no kernel of the call is made from {change.file}"
        # Most seeded faults show in the first build, which then is the only one to compile.
        return [run_build(kind) for kind in builds]
    with ThreadPoolExecutor(len(builds)) as pool:
        return [job.result() for job in [pool.submit(run_build, kind) for kind in builds]]


def _run_one(request: _Request, kind: BuildKind, data: bytes) -> tuple[list[bytes], list[LaunchCounts]]:
    environment = {
        "PATH": os.environ.get("PATH", ""),
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    with tempfile.TemporaryDirectory(prefix="sdm-rt-emulator-") as folder:
        paths = Path(folder, "request"), Path(folder, "response")
        paths[0].write_bytes(data)
        done = execute([str(runner(kind)), *map(str, paths)], env=environment)
        if done.returncode:
            raise _fault(done)
        counts = [LaunchCounts(**launch) for launch in json.loads(done.stdout)["launches"]]
        return request.decode(paths[1].read_bytes()), counts


def _fault(done: subprocess.CompletedProcess[str]) -> EmulatorError:
    report = done.stderr
    if own := re.search(r"^EMULATOR (\w+): ", report, re.MULTILINE):
        text = report[own.end() :].strip()
        return EmulatorError(own[1], re.sub(r"^  at (\S+) (0x\w+)$", _source_line, text, flags=re.MULTILINE))
    if "AddressSanitizer" in report:
        return EmulatorError("address", report[report.index("ERROR: AddressSanitizer") :][:2000])
    if "runtime error" in report:
        return EmulatorError("undefined", report[:2000])
    return EmulatorError("harness", f"the runner ended with {done.returncode}: {report[-2000:]}")


def _source_line(match: re.Match[str]) -> str:
    addr2line = shutil.which("addr2line")
    if addr2line is None:
        return match[0]
    lines = execute([addr2line, "-i", "-e", match[1], match[2]]).stdout.splitlines()
    named = [Path(line.split()[0]).name for line in lines if not line.startswith("?")]
    return f"  at {' inlined in '.join(named)}" if named else match[0]
