"""The triangular solve of each chunk: argument checks and dispatch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from sdm_rt.cpu import solve as definition
from sdm_rt.ops.bound_plans import bound_plan
from sdm_rt.ops.checks import check_no_gradient, check_one_device
from sdm_rt.ops.counters import record_definition, record_dispatch
from sdm_rt.plan.chunks import SolveShape, plan_chunk_solve
from sdm_rt.plan.shapes import MAX_CHUNK
from sdm_rt.runtime.interop import current_stream

__all__ = ["wy_solve"]


def wy_solve(A: Tensor, beta: Tensor, QK: Tensor) -> tuple[Tensor, Tensor]:
    """Return X = (I + diag(beta) tril(A, -1))^-1 and QX = tril(QK) X of each chunk.

    The WY form of a chunk's delta rule (gated delta rule: arXiv 2412.06464): with u = beta * residual, the
    chunk writes delta = X u and reads QX u. IEEE arithmetic, whatever precision PyTorch is set to use for
    matrix products. Values above the diagonal of A and QK (for A, on it too) are ignored, NaN included.

    Parameters
    ----------
    A : Tensor
        [N, C, C], how much of an earlier token's write a token retrieves; C in 1..256.
    beta : Tensor
        [N, C] or [N, C, 1], write strengths.
    QK : Tensor
        [N, C, C], how much of an earlier token's write, or its own, a token reads.

    Returns
    -------
    X, QX : Tensor
        [N, C, C], lower triangular: float64 where an argument is, else float32.

    Raises
    ------
    TypeError
        An argument that is no floating-point tensor; on a GPU, one that is not float32.
    ValueError
        A shape or device that does not fit; the message names the argument.
    RuntimeError
        Grad mode is on and an argument requires grad: gradients come from ``sdm_write_read``. On a GPU also:
        a part of the GPU path is missing (`MissingDependencyError`), a GPU below compute capability 8.0, a
        kernel that would have to be compiled inside a CUDA graph capture.
    """
    arguments = {"A": A, "beta": beta, "QK": QK}
    _check(arguments)
    check_no_gradient("wy_solve", arguments)
    beta = beta.reshape(A.shape[:2])
    if A.is_cuda:
        return _on_gpu(A.contiguous(), beta.contiguous(), QK.contiguous())
    dtype = torch.float64 if torch.float64 in (A.dtype, beta.dtype, QK.dtype) else torch.float32
    if A.is_meta:
        return A.new_empty(A.shape, dtype=dtype), A.new_empty(A.shape, dtype=dtype)
    result = definition.solve(*(tensor.to(dtype).contiguous() for tensor in (A, beta, QK)))
    if not isinstance(A, FakeTensor):
        record_definition("wy_solve")
    return result


def _on_gpu(a: Tensor, beta: Tensor, qk: Tensor) -> tuple[Tensor, Tensor]:
    x, qx = torch.empty_like(a), torch.empty_like(a)
    chunks, chunk, _ = a.shape
    plan = None
    if chunks:
        index = a.get_device()
        bound = bound_plan(plan_chunk_solve, SolveShape(chunks, chunk), index)
        tensors = {"a": a, "qk": qk, "strength": beta, "x": x, "qx": qx}
        bound.set({"C": chunk, **{name: tensor.data_ptr() for name, tensor in tensors.items()}})
        bound.run(current_stream(index))
        plan = bound.plan
    record_dispatch({"op": "wy_solve", "path": "gpu", "plan": plan})
    return x, qx


def _check(arguments: dict[str, Tensor]) -> None:
    for name, tensor in arguments.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    A, beta, QK = arguments.values()
    for name, tensor in arguments.items():
        if not tensor.dtype.is_floating_point:
            raise TypeError(f"{name}: expected a floating-point dtype, got {tensor.dtype}")
    if A.dim() != 3 or A.shape[1] != A.shape[2]:
        raise ValueError(f"A: expected shape [N, C, C], got {list(A.shape)}")
    chunks, chunk, _ = A.shape
    if not 1 <= chunk <= MAX_CHUNK:
        raise ValueError(f"A: expected C in 1..{MAX_CHUNK}, got shape {list(A.shape)}")
    if tuple(beta.shape) not in ((chunks, chunk), (chunks, chunk, 1)):
        raise ValueError(
            f"beta: expected shape [N, C] or [N, C, 1] = {[chunks, chunk]} or {[chunks, chunk, 1]}, got "
            f"{list(beta.shape)}"
        )
    if QK.shape != A.shape:
        raise ValueError(f"QK: expected the shape of A, {list(A.shape)}, got {list(QK.shape)}")
    if check_one_device(arguments).type == "cuda":
        for name, tensor in arguments.items():
            if tensor.dtype != torch.float32:
                raise TypeError(f"{name}: expected dtype float32 on a GPU, got {tensor.dtype}")
