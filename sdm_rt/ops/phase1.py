"""Phase 1 of chunks: argument checks and dispatch."""

from __future__ import annotations

import torch
from torch import Tensor

from sdm_rt.cpu import phase1 as definition
from sdm_rt.cpu.phase1 import Phase1
from sdm_rt.ops.checks import (
    INDEX_DTYPES,
    check_int,
    check_no_gradient,
    check_one_device,
    check_stream_lengths,
)
from sdm_rt.ops.counters import count_repeats, record_definition
from sdm_rt.ops.phase1_launch import phase1_on_gpu
from sdm_rt.plan.shapes import BANK_DTYPES, MAX_CHUNK, MAX_LANES, MAX_SLOTS

__all__ = ["Phase1", "phase1_forward"]


def phase1_forward(
    k_idx: Tensor,
    q_idx: Tensor,
    k_val: Tensor,
    q_val: Tensor,
    g: Tensor,
    *,
    num_memory_slots: int = 0,
    lengths: Tensor | None = None,
) -> Phase1:
    """Compute what N chunks need before the bank is read: sorted entries, decays, weights and Gram matrices.

    Phase 1 of the chunked form of the recurrence (arXiv 2607.07386; gated delta rule: arXiv 2412.06464).
    Every chunk stands alone: its slots are numbered in its own stream, and nothing is carried to the next.

    Parameters
    ----------
    k_idx, q_idx : Tensor
        int32 or int64 slots [N, C, W] and [N, C, R]; N >= 1, C, W and R in 1..256. An index outside
        0..num_memory_slots-1 is absent: it meets nothing, and its results are 0.
    k_val, q_val : Tensor
        Weights of the write and read slots, shaped like their indices; both float32, bfloat16 or float16.
    g : Tensor
        Log-decays, float32, one a token [N, C, 1] or one a write [N, C, W]; -inf erases. A slot that a token
        repeats decays once, by the gate of its first lane. Gates are summed to 2**-38, those beyond 65536 in
        size count as that: their exp is 0 or inf (NaN on a GPU).
    num_memory_slots : int
        S, slots of a chunk's stream; 0: as many as the kernels number, 2**31 - 1.
    lengths : Tensor, optional
        int32 or int64 [N], how many tokens of each chunk are real; results of the others are 0. On a CPU each
        must lie in 0..C; on a GPU the host does not look, and more count as C.

    Returns
    -------
    Phase1
        NamedTuple of payload, log_k, log_q, rex, cpe, k_eff, q_w, a, qk, last and only, described there.

    Raises
    ------
    TypeError
        A dtype that does not fit; the message names the argument.
    ValueError
        A shape, range or device that does not fit; the message names the argument.
    RuntimeError
        Grad mode is on and an argument requires grad: gradients come from ``sdm_write_read``. On a GPU also:
        a part of the GPU path is missing (`MissingDependencyError`), a GPU below compute capability 8.0, a
        kernel that would have to be compiled inside a CUDA graph capture.
    """
    arguments = {"k_idx": k_idx, "q_idx": q_idx, "k_val": k_val, "q_val": q_val, "g": g}
    if lengths is not None:
        arguments["lengths"] = lengths
    _check(arguments)
    check_int("num_memory_slots", num_memory_slots, 0, MAX_SLOTS)
    check_no_gradient("phase1_forward", arguments)
    slots = num_memory_slots or MAX_SLOTS
    if k_idx.is_cuda:
        return phase1_on_gpu(k_idx, q_idx, k_val, q_val, g, slots, lengths)
    if lengths is not None:
        check_stream_lengths(lengths, k_idx.shape[1])
    result, repeats = definition.phase1(k_idx, q_idx, k_val, q_val, g, slots, lengths)
    count_repeats(repeats)
    record_definition("phase1_forward")
    return result


def _check(arguments: dict[str, Tensor]) -> None:
    for name, tensor in arguments.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
        if name in ("k_idx", "q_idx", "lengths") and tensor.dtype not in INDEX_DTYPES:
            raise TypeError(f"{name}: expected dtype int32 or int64, got {tensor.dtype}")
    k_idx, q_idx, k_val, q_val, g = (arguments[name] for name in ("k_idx", "q_idx", "k_val", "q_val", "g"))
    names = [str(dtype).removeprefix("torch.") for dtype in (k_val.dtype, q_val.dtype)]
    if names[0] not in BANK_DTYPES:
        raise TypeError(f"k_val: expected dtype float32, bfloat16 or float16, got {names[0]}")
    if names[1] != names[0]:
        raise TypeError(f"q_val: expected the dtype of k_val, {names[0]}, got {names[1]}")
    if g.dtype != torch.float32:
        raise TypeError(f"g: expected dtype float32, got {g.dtype}")
    if k_idx.dim() != 3:
        raise ValueError(f"k_idx: expected shape [N, C, W], got {list(k_idx.shape)}")
    N, C, W = k_idx.shape
    if q_idx.dim() != 3 or tuple(q_idx.shape[:2]) != (N, C):
        raise ValueError(f"q_idx: expected shape [N, C, R] = [{N}, {C}, R], got {list(q_idx.shape)}")
    if N < 1:
        raise ValueError(f"k_idx: expected at least one chunk, got shape {list(k_idx.shape)}")
    if not 1 <= C <= MAX_CHUNK:
        raise ValueError(f"k_idx: expected C in 1..{MAX_CHUNK} tokens a chunk, got shape {list(k_idx.shape)}")
    for name, idx in (("k_idx", k_idx), ("q_idx", q_idx)):
        if not 1 <= idx.shape[2] <= MAX_LANES:
            raise ValueError(f"{name}: expected 1..{MAX_LANES} slots a token, got {idx.shape[2]}")
    for name, val, idx in (("k_val", k_val, k_idx), ("q_val", q_val, q_idx)):
        if val.shape != idx.shape:
            raise ValueError(f"{name}: expected shape {list(idx.shape)}, got {list(val.shape)}")
    if tuple(g.shape) not in ((N, C, 1), (N, C, W)):
        raise ValueError(
            f"g: expected shape [N, C, 1] or [N, C, W] = {[N, C, 1]} or {[N, C, W]}, got {list(g.shape)}"
        )
    if "lengths" in arguments and tuple(arguments["lengths"].shape) != (N,):
        raise ValueError(f"lengths: expected shape [N] = [{N}], got {list(arguments['lengths'].shape)}")
    check_one_device(arguments)
