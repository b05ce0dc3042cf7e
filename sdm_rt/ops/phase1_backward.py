"""Phase-1 backward of chunks: argument checks, dispatch, and its launches on a GPU."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from sdm_rt.cpu import phase1_backward as definition
from sdm_rt.cpu.phase1 import PAYLOAD_ALIGNMENT
from sdm_rt.ops.bound_plans import bound_plan
from sdm_rt.ops.checks import check_no_gradient, check_one_device
from sdm_rt.ops.counters import record_definition, record_dispatch
from sdm_rt.ops.plan_inputs import BANK_NAMES
from sdm_rt.ops.write_read_launch import allocate, pointers_of
from sdm_rt.plan.phase1_backward import phase1_backward_constants, plan_phase1_backward
from sdm_rt.plan.shapes import BANK_DTYPES, MAX_CHUNK, MAX_LANES, MAX_SLOTS, WriteReadShape
from sdm_rt.runtime.interop import current_stream

__all__ = ["phase1_backward", "phase1_backward_det", "phase1_backward_operands", "phase1_backward_shape"]

ARGUMENTS = (
    *("payload", "log_k", "log_q", "rex", "k_val", "q_val", "g"),
    *("d_a", "d_qk", "d_k_eff", "d_k_pd", "d_q_w"),
)
GRADIENTS = ("grad_k_val", "grad_q_val", "grad_g")

_PLANNERS = {det: partial(plan_phase1_backward, det=det) for det in (False, True)}


def phase1_backward(
    payload: Tensor,
    log_k: Tensor,
    log_q: Tensor,
    rex: Tensor,
    k_val: Tensor,
    q_val: Tensor,
    g: Tensor,
    d_a: Tensor,
    d_qk: Tensor,
    d_k_eff: Tensor,
    d_k_pd: Tensor,
    d_q_w: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of weights and log-decays of N chunks from those of what Phase 1 makes of them.

    The backward of :func:`sdm_rt.phase1_forward` (the chunked form of the recurrence, arXiv 2607.07386), of
    the write weights at the chunk's end too. Decays of pairs of entries come from exact sums of ``g``; a pair
    whose decay holds no gate leaves the gates' gradients alone. Sums over pairs are compensated float32 on a
    GPU, float64 on a CPU, in a fixed order.

    Parameters
    ----------
    payload : Tensor
        int32 [N, C (W + R) rounded up to 16], as ``phase1_forward`` made it; N >= 1, C, W and R in 1..256.
    log_k, rex : Tensor
        float32 [N, C, W]: L of each write, and the sum of log-decays after it: their exp is taken of these.
    log_q : Tensor
        float32 [N, C, R]: L of each read.
    k_val, q_val : Tensor
        Weights [N, C, W] and [N, C, R]; both float32, bfloat16 or float16.
    g : Tensor
        Log-decays, float32, [N, C, 1] or [N, C, W].
    d_a, d_qk : Tensor
        float32 [N, C, C], gradients of the Gram matrices. Values above the diagonal (of ``d_a``, on it too)
        are ignored, NaN included.
    d_k_eff, d_k_pd : Tensor
        float32 [N, C, W], gradients of k_val exp(L) and of k_val exp(rex).
    d_q_w : Tensor
        float32 [N, C, R], gradient of q_val exp(L).

    Returns
    -------
    grad_k_val, grad_q_val : Tensor
        [N, C, W] and [N, C, R], in the dtype of ``k_val``.
    grad_g : Tensor
        float32 [N, C, W]: the gradient of each write's log-decay, without that of its slot's total decay;
        with one gate a token, the caller sums over W. 0 for repeats of a slot and for gates of -inf.
        Entries that are absent or padded get 0 in all three.

    Raises
    ------
    TypeError
        A dtype that does not fit; the message names the argument.
    ValueError
        A shape, layout (all are contiguous) or device that does not fit; the message names the argument.
    RuntimeError
        Grad mode is on and an argument requires grad. On a GPU also: a part of the GPU path is missing
        (`MissingDependencyError`), a GPU below compute capability 8.0, a kernel that would have to be
        compiled inside a CUDA graph capture.
    """
    values = (payload, log_k, log_q, rex, k_val, q_val, g, d_a, d_qk, d_k_eff, d_k_pd, d_q_w)
    return _run("phase1_backward", dict(zip(ARGUMENTS, values, strict=True)), det=False)


def phase1_backward_det(
    payload: Tensor,
    log_k: Tensor,
    log_q: Tensor,
    rex: Tensor,
    k_val: Tensor,
    q_val: Tensor,
    g: Tensor,
    d_a: Tensor,
    d_qk: Tensor,
    d_k_eff: Tensor,
    d_k_pd: Tensor,
    d_q_w: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what :func:`phase1_backward` returns, the same bits, by the kernel that hides more latency.

    ``sdm_write_read`` uses it from 128 tokens a chunk on. Parameters, results and errors are those of
    :func:`phase1_backward`.
    """
    values = (payload, log_k, log_q, rex, k_val, q_val, g, d_a, d_qk, d_k_eff, d_k_pd, d_q_w)
    return _run("phase1_backward_det", dict(zip(ARGUMENTS, values, strict=True)), det=True)


def _run(op: str, arguments: dict[str, Tensor], det: bool) -> tuple[Tensor, Tensor, Tensor]:
    _check(arguments)
    check_no_gradient(op, arguments)
    if not arguments["k_val"].is_cuda:
        result = definition.phase1_backward(**arguments)
        record_definition(op)
        return result
    k_val, index = arguments["k_val"], arguments["k_val"].get_device()
    shape = phase1_backward_shape(**{name: arguments[name] for name in ("k_val", "q_val", "g")})
    bound = bound_plan(_PLANNERS[det], shape, index, phase1_backward_constants)
    buffers = allocate(bound.plan.buffers, k_val.device)
    tensors = {**phase1_backward_operands(arguments), **buffers}
    bound.set({**pointers_of(bound.plan, tensors), "wide": 0})
    bound.run(current_stream(index))
    record_dispatch({"op": op, "path": "gpu", "plan": bound.plan})
    grad_k_val, grad_q_val, grad_g = (buffers[name] for name in GRADIENTS)
    return grad_k_val, grad_q_val, grad_g


def phase1_backward_shape(k_val: Tensor, q_val: Tensor, g: Tensor) -> WriteReadShape:
    """Return what plans read of a call: every chunk a stream of its own, its slots without number."""
    N, C, W = k_val.shape
    return WriteReadShape(
        streams=N,
        tokens=C,
        chunk=C,
        writes=W,
        reads=q_val.shape[2],
        head_dim=1,
        slots=MAX_SLOTS,
        bank_dtype=BANK_NAMES[k_val.dtype],
        index_dtype="int32",
        gates_per_write=g.shape[2] > 1,
    )


def phase1_backward_operands(arguments: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the op's tensors by the kernels' names.

    Beside them a strength of 0 a token, which the scan only hands on, and a counter of repeats, which the
    forward has counted.
    """
    renamed = {"log_k": "given_log_k", "log_q": "given_log_q", "rex": "given_rex"}
    tensors = {renamed.get(name, name): tensor.detach() for name, tensor in arguments.items()}
    g = tensors["g"]
    return tensors | {
        "beta": g.new_zeros(g.shape[:2]),
        "repeats": torch.zeros(1, dtype=torch.int64, device=g.device),
    }


def _check(arguments: dict[str, Tensor]) -> None:
    for name, tensor in arguments.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    k_val, q_val, g = (arguments[name] for name in ("k_val", "q_val", "g"))
    names = [str(tensor.dtype).removeprefix("torch.") for tensor in (k_val, q_val)]
    if names[0] not in BANK_DTYPES:
        raise TypeError(f"k_val: expected dtype float32, bfloat16 or float16, got {names[0]}")
    if names[1] != names[0]:
        raise TypeError(f"q_val: expected the dtype of k_val, {names[0]}, got {names[1]}")
    for name, tensor in arguments.items():
        dtype = torch.int32 if name == "payload" else torch.float32
        if name not in ("k_val", "q_val") and tensor.dtype != dtype:
            raise TypeError(
                f"{name}: expected dtype {str(dtype).removeprefix('torch.')}, got "
                f"{str(tensor.dtype).removeprefix('torch.')}"
            )
    if k_val.dim() != 3:
        raise ValueError(f"k_val: expected shape [N, C, W], got {list(k_val.shape)}")
    N, C, W = k_val.shape
    if q_val.dim() != 3 or tuple(q_val.shape[:2]) != (N, C):
        raise ValueError(f"q_val: expected shape [N, C, R] = [{N}, {C}, R], got {list(q_val.shape)}")
    R = q_val.shape[2]
    if N < 1:
        raise ValueError(f"k_val: expected at least one chunk, got shape {list(k_val.shape)}")
    if not 1 <= C <= MAX_CHUNK:
        raise ValueError(f"k_val: expected C in 1..{MAX_CHUNK} tokens a chunk, got shape {list(k_val.shape)}")
    for name, lanes in (("k_val", W), ("q_val", R)):
        if not 1 <= lanes <= MAX_LANES:
            raise ValueError(f"{name}: expected 1..{MAX_LANES} slots a token, got {lanes}")
    if tuple(g.shape) not in ((N, C, 1), (N, C, W)):
        raise ValueError(
            f"g: expected shape [N, C, 1] or [N, C, W] = {[N, C, 1]} or {[N, C, W]}, got {list(g.shape)}"
        )
    row = -(-C * (W + R) // PAYLOAD_ALIGNMENT) * PAYLOAD_ALIGNMENT
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {"payload": ("N, row", (N, row))}
    shapes |= dict.fromkeys(("log_k", "rex", "d_k_eff", "d_k_pd"), ("N, C, W", (N, C, W)))
    shapes |= dict.fromkeys(("log_q", "d_q_w"), ("N, C, R", (N, C, R)))
    shapes |= dict.fromkeys(("d_a", "d_qk"), ("N, C, C", (N, C, C)))
    for name, (symbols, shape) in shapes.items():
        if tuple(arguments[name].shape) != shape:
            raise ValueError(
                f"{name}: expected shape [{symbols}] = {list(shape)}, got {list(arguments[name].shape)}"
            )
    for name, tensor in arguments.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got strides {list(tensor.stride())}")
    check_one_device(arguments)
