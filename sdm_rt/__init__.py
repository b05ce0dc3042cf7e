"""Sparse Delta Memory for PyTorch and CuPy, with CUDA kernels compiled at run time by NVRTC.

Importing this package creates no CUDA context and compiles nothing.
"""

from sdm_rt.errors import (
    KernelCompileError,
    MissingDependencyError,
    NotPrecompiledError,
    UnsupportedConfigurationError,
    UntestedHardwareWarning,
)

__version__ = "0.1.0"

__all__ = [
    "KernelCompileError",
    "MissingDependencyError",
    "NotPrecompiledError",
    "UnsupportedConfigurationError",
    "UntestedHardwareWarning",
]
