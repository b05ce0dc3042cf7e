"""From a kernel specification to a loaded kernel: freshness, precompiled folder, NVRTC through CuPy.

CuPy compiles (``RawModule(code=..., backend="nvrtc")``) and its disk cache keeps the result in our folder.
Kept here: one module per specification, GPU and text; failed builds, raised again without another attempt;
and the last good module, which goes on serving while an edited source does not compile.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from sdm_rt import env
from sdm_rt.errors import KernelCompileError, NotPrecompiledError
from sdm_rt.runtime import cache as disk
from sdm_rt.runtime import nvrtc, precompile
from sdm_rt.runtime.cores import side_by_side
from sdm_rt.runtime.dependencies import load_cupy
from sdm_rt.runtime.device import Gpu
from sdm_rt.runtime.kernel import KernelSpec
from sdm_rt.runtime.sources import Source, SourceTree, expand, find_kernels

__all__ = ["Builder", "CupyBuilder", "Kernels", "LoadedModule", "kernels"]

OnMiss = Callable[[], None]


class LoadedModule(Protocol):
    """Machine code on one GPU."""

    def function(self, entry: str) -> int:
        """Return the driver's handle of a kernel."""


class Builder(Protocol):
    """What makes machine code; the tests put a builder without a GPU in its place."""

    def enter_thread(self, gpu: Gpu) -> None:
        """Do what a thread of ours does before it compiles for a GPU."""

    def compile(self, spec: KernelSpec, source: Source, gpu: Gpu, on_miss: OnMiss) -> LoadedModule:
        """Compile, or take from the disk cache; ``on_miss`` is called before a real compile."""

    def load(self, path: Path, spec: KernelSpec, gpu: Gpu) -> LoadedModule:
        """Load a file of machine code."""


def with_paths(log: str, source: Source) -> str:
    """Return a compiler's log with the full paths of the files it names."""
    paths = {path.name: str(path) for path in source.files}
    return re.sub(r"(?<![^\s:])([\w.+-]+)(?=\()", lambda name: paths.get(name[1], name[1]), log)


@dataclass(frozen=True)
class _CupyModule:
    functions: dict[str, Any]  # CuPy's: they keep the machine code loaded, which else only CuPy's memo does

    def function(self, entry: str) -> int:
        return int(self.functions[entry].ptr)


def watched_cache(spec: KernelSpec, source: Source, gpu: Gpu, on_miss: OnMiss) -> disk.KernelCache:
    """Return the disk cache of one compile: CuPy's, in our folder; a new build enters the manifest."""
    folder = disk.cache_folder()
    backend = importlib.import_module("cupy.cuda._compiler_cache").DiskKernelCacheBackend
    start = time.perf_counter()

    def saved(name: str, cubin: bytes) -> None:
        entry = precompile.new_entry(spec, source, gpu.target, start, cubin, name)
        entry.write(folder / disk.MANIFEST)

    return disk.KernelCache(backend(str(folder / disk.CUBINS)), on_miss, saved)


class _Route:
    """CuPy's cache while this package compiles: ours in the threads that do, the user's in all others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._users: Any = None
        self._own = threading.local()

    @contextlib.contextmanager
    def to(self, own: disk.KernelCache) -> Iterator[None]:
        """Let this thread's compiles in a ``with`` block look into ``own``."""
        compiler = load_cupy().cuda.compiler
        with self._lock:
            if compiler._kernel_cache_backend is not self:
                self._users = compiler._kernel_cache_backend
                compiler._set_kernel_cache_backend(self)
            self._open += 1
        self._own.cache = own
        try:
            yield
        finally:
            del self._own.cache
            with self._lock:
                self._open -= 1
                if self._open == 0 and compiler._kernel_cache_backend is self:
                    compiler._set_kernel_cache_backend(self._users)

    def _of_this_thread(self) -> Any:
        return getattr(self._own, "cache", self._users)

    def load(self, name: str) -> Any:
        """Return what a cache holds under a name."""
        return self._of_this_thread().load(name)

    def save(self, name: str, cubin: bytes, source: str) -> None:
        """Keep machine code under a name."""
        self._of_this_thread().save(name, cubin, source)


_route = _Route()


class CupyBuilder:
    """Compile and load through CuPy, with CuPy's disk cache in our folder; for several threads at once."""

    def enter_thread(self, gpu: Gpu) -> None:
        """Make the GPU current. A new thread has GPU 0, and going back to that would make a context on it."""
        load_cupy().cuda.runtime.setDevice(gpu.index)

    def compile(self, spec: KernelSpec, source: Source, gpu: Gpu, on_miss: OnMiss) -> LoadedModule:
        """Compile, or take from the disk cache.

        Raises
        ------
        KernelCompileError
            With NVRTC's log.
        """
        cupy = load_cupy()
        try:
            with _route.to(watched_cache(spec, source, gpu, on_miss)):
                raw = cupy.RawModule(code=source.text, options=nvrtc.OPTIONS, backend="nvrtc")
                return self._functions(raw, spec, gpu)
        except cupy.cuda.compiler.CompileException as error:
            raise KernelCompileError(
                f"{spec.file} does not compile for {gpu.target}:\n{with_paths(str(error), source)}"
            ) from None

    def load(self, path: Path, spec: KernelSpec, gpu: Gpu) -> LoadedModule:
        """Load a file of machine code."""
        return self._functions(load_cupy().RawModule(path=str(path)), spec, gpu)

    @staticmethod
    def _functions(raw: Any, spec: KernelSpec, gpu: Gpu) -> LoadedModule:
        with load_cupy().cuda.Device(gpu.index):
            return _CupyModule({entry: raw.get_function(entry).kernel for entry in spec.entries})


def _failure(source: Source, gpu: Gpu) -> tuple[str, str]:
    """Return what a failed build is remembered by."""
    return source.digest, gpu.target


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
        self._replaced: list[LoadedModule] = []  # a caller's CUDA graph may still launch them
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
        if good is None:
            return False
        if self._tree.is_current(spec):
            return True
        try:  # touched a moment ago, perhaps before it was loaded; this read is noted nowhere
            return good.digest == expand(spec, find_kernels()).digest
        except KernelCompileError:
            return False

    @contextlib.contextmanager
    def noting(self) -> Iterator[set[KernelSpec]]:
        """Collect the specifications whose kernels this thread uses in a ``with`` block."""
        before, self._noted.specs = self._noted.specs, set()
        try:
            yield self._noted.specs
        finally:
            self._noted.specs = before

    def load(self, spec: KernelSpec, gpu: Gpu) -> LoadedModule:
        """Return the module of a specification on a GPU; errors as of `load_all`."""
        return self.load_all([spec], gpu)[0]

    def load_all(self, specs: Iterable[KernelSpec], gpu: Gpu) -> list[LoadedModule]:
        """Return the module of each specification on a GPU; sources that are new or edited are compiled.

        All cores compile side by side, the longest source first; a progress line for each says how many wait
        behind it.

        Parameters
        ----------
        specs : iterable of KernelSpec
            What to load.
        gpu : Gpu
            Where.

        Raises
        ------
        KernelCompileError
            Where a source does not compile and no earlier version of it is loaded. With one loaded, a
            warning carries the log, once, and that version goes on serving.
        NotPrecompiledError
            With ``SDM_RT_JIT=0``, where the precompiled folder lacks a kernel.
        MissingDependencyError
            Where NVRTC is missing or older than the GPU.
        """
        wanted = list(dict.fromkeys(specs))
        if self._noted.specs is not None:
            self._noted.specs.update(wanted)
        ready = [module for spec in wanted if (module := self._module_of(spec, self._tree.known(spec), gpu))]
        if len(ready) == len(wanted):  # without the lock: another thread may hold it while it compiles
            return ready
        with self._lock:
            sources = {spec: self._read(spec) for spec in wanted}
            missing = {
                spec: source
                for spec, source in sources.items()
                if isinstance(source, Source) and self._must_build(spec, source, gpu)
            }
            try:
                self._refuse_known_failures(sources, gpu)
                built = self._build(missing, gpu)
            except BaseException:
                # They were read and none is kept: an earlier module of theirs must not pass for current.
                self._tree.forget(missing)
                raise
            for spec, result in built.items():
                self._keep(spec, missing[spec], gpu, result)
            return [self._serving(spec, sources[spec], gpu) for spec in wanted]

    def _module_of(self, spec: KernelSpec, source: Source | None, gpu: Gpu) -> LoadedModule | None:
        """Return the module that was built of a source, if it is at hand."""
        good = self._good.get((spec, gpu.index))
        return (
            good.module if good is not None and source is not None and good.digest == source.digest else None
        )

    def _read(self, spec: KernelSpec) -> Source | KernelCompileError:
        try:
            return self._tree.source(spec)
        except KernelCompileError as error:
            return error

    def _must_build(self, spec: KernelSpec, source: Source, gpu: Gpu) -> bool:
        return self._module_of(spec, source, gpu) is None and _failure(source, gpu) not in self._failed

    def _refuse_known_failures(
        self, sources: dict[KernelSpec, Source | KernelCompileError], gpu: Gpu
    ) -> None:
        """Raise, before anything is compiled, what the call will end with anyway."""
        for spec, source in sources.items():
            if (spec, gpu.index) in self._good:
                continue
            if isinstance(source, KernelCompileError):
                raise source
            if (log := self._failed.get(_failure(source, gpu))) is not None:
                raise KernelCompileError(log)

    def _build(
        self, missing: dict[KernelSpec, Source], gpu: Gpu
    ) -> dict[KernelSpec, LoadedModule | KernelCompileError]:
        """Compile sources side by side; return the module or the error of each."""
        longest_first = sorted(missing, key=lambda spec: len(missing[spec].text), reverse=True)

        def obtain(at: int) -> LoadedModule | KernelCompileError:
            spec = longest_first[at]
            try:
                return self._obtain(spec, missing[spec], gpu, left=len(longest_first) - 1 - at)
            except KernelCompileError as error:
                return error

        results = side_by_side(obtain, range(len(longest_first)), lambda: self._builder.enter_thread(gpu))
        return dict(zip(longest_first, results, strict=True))

    def _keep(
        self, spec: KernelSpec, source: Source, gpu: Gpu, built: LoadedModule | KernelCompileError
    ) -> None:
        """Keep a module in the place of an earlier one, or remember a failure."""
        if isinstance(built, KernelCompileError):
            self._note(spec, _failure(source, gpu), gpu, str(built))
            return
        if (before := self._good.get((spec, gpu.index))) is not None:
            self._replaced.append(before.module)
            self.generation += 1
        self._good[spec, gpu.index] = _Good(source.digest, built)

    def _note(self, spec: KernelSpec, failure: tuple[str, str], gpu: Gpu, log: str) -> None:
        """Remember a failure; warn, once, where an earlier module goes on serving."""
        known = failure in self._failed
        self._failed[failure] = log
        if not known and (spec, gpu.index) in self._good:
            warnings.warn(
                f"{log}\nthe last version that compiled goes on serving", RuntimeWarning, stacklevel=5
            )

    def _serving(self, spec: KernelSpec, source: Source | KernelCompileError, gpu: Gpu) -> LoadedModule:
        """Return the module that serves now; raises the failure where there is none."""
        if isinstance(source, KernelCompileError):
            self._note(spec, (str(source), gpu.target), gpu, str(source))
        good = self._good.get((spec, gpu.index))
        if good is None:
            assert isinstance(source, Source)  # else it was refused before
            raise KernelCompileError(self._failed[_failure(source, gpu)])
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
