"""From a kernel specification to a loaded kernel: freshness, precompiled folder, NVRTC through CuPy.

CuPy compiles (``RawModule(code=..., backend="nvrtc")``) and its disk cache keeps the result in our folder.
Kept here: one module per specification, GPU and text; failed builds, raised again without another attempt;
and the last good module, which goes on serving while an edited source does not compile.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from sdm_rt import env
from sdm_rt.errors import KernelCompileError, NotPrecompiledError
from sdm_rt.runtime import cache as disk
from sdm_rt.runtime import nvrtc, precompile
from sdm_rt.runtime.dependencies import load_cupy
from sdm_rt.runtime.device import Gpu
from sdm_rt.runtime.kernel import KernelSpec
from sdm_rt.runtime.sources import Source, SourceTree

__all__ = ["Builder", "CupyBuilder", "Kernels", "LoadedModule", "kernels"]

OnMiss = Callable[[], None]


class LoadedModule(Protocol):
    """Machine code on one GPU."""

    def function(self, entry: str) -> int:
        """Return the driver's handle of a kernel."""


class Builder(Protocol):
    """What makes machine code; the tests put a builder without a GPU in its place."""

    def compile(self, spec: KernelSpec, source: Source, gpu: Gpu, on_miss: OnMiss) -> LoadedModule:
        """Compile, or take from the disk cache; ``on_miss`` is called before a real compile."""

    def load(self, path: Path, spec: KernelSpec, gpu: Gpu) -> LoadedModule:
        """Load a file of machine code."""


def with_paths(log: str, source: Source) -> str:
    """Return a compiler's log with the full paths of the files it names."""
    for path in source.files:
        log = log.replace(f"{path.name}(", f"{path}(")
    return log


@dataclass(frozen=True)
class _CupyModule:
    raw: Any  # keeps the machine code loaded
    functions: dict[str, int]

    def function(self, entry: str) -> int:
        return self.functions[entry]


def watched_cache(spec: KernelSpec, source: Source, gpu: Gpu, on_miss: OnMiss) -> disk.KernelCache:
    """Return the disk cache of one compile: CuPy's, in our folder; a new build enters the manifest."""
    folder = disk.cache_folder()
    backend = importlib.import_module("cupy.cuda._compiler_cache").DiskKernelCacheBackend
    start = time.perf_counter()

    def saved(name: str, cubin: bytes) -> None:
        disk.Entry(
            file=spec.file,
            entries=spec.entries,
            defines=" ".join(f"{macro}={value}" for macro, value in spec.defines),
            target=gpu.target,
            options=" ".join(nvrtc.OPTIONS),
            digest=source.digest,
            compiler="NVRTC {}.{}".format(*nvrtc.nvrtc_version()),
            seconds=round(time.perf_counter() - start, 3),
            size=len(cubin),
            sha256=hashlib.sha256(cubin).hexdigest(),
            built=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            cubin=name,
        ).write(folder / disk.MANIFEST)

    return disk.KernelCache(backend(str(folder / disk.CUBINS)), on_miss, saved)


class CupyBuilder:
    """Compile and load through CuPy, with CuPy's disk cache in our folder."""

    def compile(self, spec: KernelSpec, source: Source, gpu: Gpu, on_miss: OnMiss) -> LoadedModule:
        """Compile, or take from the disk cache.

        Raises
        ------
        KernelCompileError
            With NVRTC's log.
        """
        cupy = load_cupy()
        compiler = cupy.cuda.compiler
        users = compiler._kernel_cache_backend
        compiler._set_kernel_cache_backend(watched_cache(spec, source, gpu, on_miss))
        try:
            raw = cupy.RawModule(code=source.text, options=nvrtc.OPTIONS, backend="nvrtc")
            return self._functions(raw, spec, gpu)
        except compiler.CompileException as error:
            raise KernelCompileError(
                f"{spec.file} does not compile for {gpu.target}:\n{with_paths(str(error), source)}"
            ) from None
        finally:
            compiler._set_kernel_cache_backend(users)

    def load(self, path: Path, spec: KernelSpec, gpu: Gpu) -> LoadedModule:
        """Load a file of machine code."""
        return self._functions(load_cupy().RawModule(path=str(path)), spec, gpu)

    @staticmethod
    def _functions(raw: Any, spec: KernelSpec, gpu: Gpu) -> LoadedModule:
        with load_cupy().cuda.Device(gpu.index):
            return _CupyModule(
                raw, {entry: int(raw.get_function(entry).kernel.ptr) for entry in spec.entries}
            )


@dataclass(frozen=True)
class _Good:
    digest: str
    module: LoadedModule


class _Noted(threading.local):
    specs: set[KernelSpec] | None = None


class Kernels:
    """The compiled kernels of a process.

    Parameters
    ----------
    builder : Builder
        What makes machine code.
    """

    def __init__(self, builder: Builder) -> None:
        self._builder = builder
        self._tree = SourceTree()
        self._lock = threading.RLock()
        self._good: dict[tuple[KernelSpec, int], _Good] = {}
        self._failed: dict[tuple[str, str], str] = {}
        self._noted = _Noted()
        self.generation = 0
        """How often a module took the place of an earlier one of its specification."""

    def are_current(self, specs: Iterable[KernelSpec], generation: int) -> bool:
        """Return whether modules got at ``generation`` are those of the present sources; a ``stat`` a file.

        Whoever keeps a module asks this, since another keeper of it may have loaded an edited source already.
        """
        if self._noted.specs is not None:
            self._noted.specs.update(specs)
        return generation == self.generation and self._tree.are_current(specs)

    def is_loaded(self, spec: KernelSpec, gpu: Gpu) -> bool:
        """Return whether ``load`` has a module of the current source at hand."""
        good = self._good.get((spec, gpu.index))
        return good is not None and self._tree.is_current(spec)

    @contextlib.contextmanager
    def noting(self) -> Iterator[set[KernelSpec]]:
        """Collect the specifications whose kernels this thread uses in a ``with`` block."""
        before, self._noted.specs = self._noted.specs, set()
        try:
            yield self._noted.specs
        finally:
            self._noted.specs = before

    def load_all(self, specs: Iterable[KernelSpec], gpu: Gpu) -> list[LoadedModule]:
        """Load several specifications; the progress line says how many are left."""
        pending = list(dict.fromkeys(specs))
        return [self.load(spec, gpu, left=len(pending) - 1 - at) for at, spec in enumerate(pending)]

    def load(self, spec: KernelSpec, gpu: Gpu, left: int = 0) -> LoadedModule:
        """Return the module of a specification on a GPU, compiled if its source is new or was edited.

        Parameters
        ----------
        spec : KernelSpec
            What to load.
        gpu : Gpu
            Where.
        left : int
            How many more the caller will load, for the progress line.

        Raises
        ------
        KernelCompileError
            Where the source does not compile and no earlier version of it is loaded. With one loaded, a
            warning carries the log, once, and that version goes on serving.
        NotPrecompiledError
            With ``SDM_RT_JIT=0``, where the precompiled folder lacks the kernel.
        MissingDependencyError
            Where NVRTC is missing or older than the GPU.
        """
        if self._noted.specs is not None:
            self._noted.specs.add(spec)
        with self._lock:
            good = self._good.get((spec, gpu.index))
            try:
                source = self._tree.source(spec)
            except KernelCompileError as error:
                return self._fall_back(good, (str(error), gpu.target), str(error))
            if good is not None and good.digest == source.digest:
                return good.module
            failure = (source.digest, gpu.target)
            if failure in self._failed:
                return self._fall_back(good, failure, self._failed[failure])
            try:
                module = self._obtain(spec, source, gpu, left)
            except KernelCompileError as error:
                return self._fall_back(good, failure, str(error))
            self._good[spec, gpu.index] = _Good(source.digest, module)
            if good is not None:
                self.generation += 1
            return module

    def _fall_back(self, good: _Good | None, failure: tuple[str, str], log: str) -> LoadedModule:
        known = failure in self._failed
        self._failed[failure] = log
        if good is None:
            raise KernelCompileError(log)
        if not known:
            warnings.warn(
                f"{log}\nthe last version that compiled goes on serving", RuntimeWarning, stacklevel=4
            )
        return good.module

    def _obtain(self, spec: KernelSpec, source: Source, gpu: Gpu, left: int) -> LoadedModule:
        folder = env.path("SDM_RT_PRECOMPILED")
        if folder is not None:
            path = precompile.find(folder, source, gpu.target)
            if path is not None:
                return self._builder.load(path, spec, gpu)
        if not env.flag("SDM_RT_JIT"):
            where = f"in {folder}" if folder is not None else "(SDM_RT_PRECOMPILED is not set)"
            macros = " ".join(spec.options)
            raise NotPrecompiledError(
                f"{spec.file} {macros} for {gpu.target} is not precompiled {where}, and SDM_RT_JIT=0 forbids "
                f"compiling it now; `sdm-rt precompile --arch {gpu.target}` makes it"
            )
        nvrtc.require_target(gpu.name, gpu.compute_capability)

        def on_miss() -> None:
            if env.flag("SDM_RT_PROGRESS"):
                rest = f", {left} more to go" if left else ""
                print(f"sdm_rt: compiling {spec.file} for {gpu.target}{rest}", file=sys.stderr, flush=True)

        return self._builder.compile(spec, source, gpu, on_miss)


@cache
def kernels() -> Kernels:
    """Return the compiled kernels of this process."""
    return Kernels(CupyBuilder())
