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
from sdm_rt.layer.activations import l2_normalize
from sdm_rt.layer.args import SparseDeltaMemoryArgs
from sdm_rt.layer.layer import SparseDeltaMemory
from sdm_rt.layer.state import Cache, SDMLayerState
from sdm_rt.ops.counters import last_dispatch, repeated_write_slots, reset_dispatch
from sdm_rt.ops.decode import sdm_decode_step
from sdm_rt.ops.phase1 import Phase1, phase1_forward
from sdm_rt.ops.phase1_backward import phase1_backward, phase1_backward_det
from sdm_rt.ops.solve import wy_solve
from sdm_rt.ops.topk import product_key_topk
from sdm_rt.ops.write_read import sdm_write_read
from sdm_rt.ops.write_read_graphs import reset_cuda_graphs, suspend_cuda_graphs

__version__ = "0.1.0"

__all__ = [
    "Cache",
    "KernelCompileError",
    "MissingDependencyError",
    "NotPrecompiledError",
    "Phase1",
    "SDMLayerState",
    "SparseDeltaMemory",
    "SparseDeltaMemoryArgs",
    "UnsupportedConfigurationError",
    "UntestedHardwareWarning",
    "l2_normalize",
    "last_dispatch",
    "phase1_backward",
    "phase1_backward_det",
    "phase1_forward",
    "product_key_topk",
    "repeated_write_slots",
    "reset_cuda_graphs",
    "reset_dispatch",
    "sdm_decode_step",
    "sdm_write_read",
    "suspend_cuda_graphs",
    "wy_solve",
]
