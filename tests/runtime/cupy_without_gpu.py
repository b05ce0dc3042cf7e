"""CuPy's real compiler and disk cache on a machine without a GPU: only what touches a device is replaced.

``RawModule`` needs a GPU to say which architecture it compiles for and to load the result. Here it asks
CuPy's own compile function for a fixed architecture and keeps the machine code as bytes.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from sdm_rt.runtime.compile import CupyBuilder, Kernels
from sdm_rt.runtime.dependencies import load_cupy
from sdm_rt.runtime.device import Gpu
from sdm_rt.runtime.kernel import KernelSpec

HOPPER = Gpu(0, "fake H100", (9, 0))
SPEC = KernelSpec("small.cu", ("small",), (("SCALE", "2"),))
SMALL_CU = '#include "small.cuh"\nextern "C" __global__ void small(float* x) { x[0] = scaled(x[0]); }\n'
SMALL_CUH = "#pragma once\n__device__ float scaled(float x) { return SCALE * x; }\n"


current = threading.local()
"""``device``: the GPU that a thread has made current."""


def make_current(index: int) -> None:
    current.device = index


class FakeModule:
    """What CuPy's compile function loads its machine code into."""

    loaded: ClassVar[list[bytes]] = []
    alive: ClassVar[weakref.WeakSet[FakeModule]] = weakref.WeakSet()
    """As in CuPy: the driver unloads machine code whose object nobody keeps."""

    def load(self, cubin: bytes) -> None:
        self.cubin = cubin
        self.loaded.append(cubin)
        self.alive.add(self)

    def _set_mapping(self, mapping: Any) -> None:
        pass


class FakeRawModule:
    def __init__(
        self, code: str | None = None, *, path: str | None = None, options=(), backend="nvrtc"
    ) -> None:
        self.code, self.path, self.options, self.backend = code, path, options, backend

    def get_function(self, entry: str) -> Any:
        compiler = load_cupy().cuda.compiler
        if self.path is not None:
            module = FakeModule()
            with open(self.path, "rb") as file:
                module.load(file.read())
        else:
            module = compiler._compile_module_with_cache(self.code, self.options, backend=self.backend)
        assert entry.encode() in module.cubin
        kernel = SimpleNamespace(ptr=1 + len(FakeModule.loaded), module=module, code=self.code)
        return SimpleNamespace(kernel=kernel)


def install(setattr: Any, arch: str = "90") -> None:
    """Put the fakes into CuPy, through ``setattr(object, name, value)``."""
    cupy = load_cupy()
    compiler = cupy.cuda.compiler
    setattr(compiler, "_get_arch", lambda: arch)
    setattr(compiler, "_get_arch_for_options_for_nvrtc", lambda arch=arch: (f"-arch=sm_{arch}", "cubin"))
    setattr(compiler, "function", SimpleNamespace(Module=FakeModule))
    setattr(cupy, "RawModule", FakeRawModule)
    setattr(cupy.cuda, "Device", lambda index: contextlib.nullcontext())
    setattr(cupy.cuda.runtime, "setDevice", make_current)
    FakeModule.loaded = []
    FakeModule.alive = weakref.WeakSet()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, cache_folder: Any) -> Kernels:
    install(monkeypatch.setattr)
    return Kernels(CupyBuilder())
