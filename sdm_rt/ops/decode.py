"""Decode: the recurrence for one token of every stream."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdm_rt.cpu.recurrence import Streams, Tokens, advance
from sdm_rt.ops.checks import (
    StreamShape,
    check_bank,
    check_index_range,
    check_one_device,
    check_stream_lengths,
    check_token_tensors,
    flatten_tokens,
    resolve_streams,
)
from sdm_rt.ops.counters import count_repeats, record_dispatch

__all__ = ["sdm_decode_step"]


def sdm_decode_step(
    memory: Any,
    k_idx: Any,
    k_val: Any,
    v: Any,
    beta: Any,
    g: Any,
    q_idx: Any,
    q_val: Any,
    lengths: Any = None,
) -> Any:
    """Advance every stream by one token: decay, delta-rule write, then read (recurrence of arXiv 2607.07386).

    The bank is advanced in place. Not differentiable: for gradients use ``sdm_write_read``.

    Parameters
    ----------
    memory : Tensor
        The bank [P*S, D]: float32, bfloat16 or float16 (float64 too on a CPU). Stream p owns rows
        [p*S, (p+1)*S).
    k_idx, q_idx : Tensor
        int32 or int64 bank rows [P, W] and [P, R], or [P, 1, W] and [P, 1, R]; W and R in 1..256.
    k_val, q_val : Tensor
        Weights of the write and read slots, shaped like their indices; rounded to the bank's dtype.
    v : Tensor
        Values [P, D] or [P, 1, D], rounded to the bank's dtype.
    beta : Tensor
        Write strengths [P, 1] or [P, 1, 1], used in float32.
    g : Tensor
        Log-decays, one a stream ([P, 1]) or one a write ([P, W]), used in float32.
    lengths : Tensor, optional
        int32 or int64 [P]: 0 skips the stream (its bank stays, its readings are 0), 1 runs it.

    Returns
    -------
    Tensor
        Readings [P, D] in the bank's dtype.

    Raises
    ------
    RuntimeError
        Grad mode is on and an input requires grad.
    TypeError, ValueError
        A dtype, shape, device or index that does not fit; the message names the argument. Nothing has
        been changed.
    """
    tokens = {"k_idx": k_idx, "k_val": k_val, "v": v, "beta": beta, "g": g, "q_idx": q_idx, "q_val": q_val}
    check_bank(memory)
    shape, flat = _check(memory, tokens, lengths)
    return _decode_by_recurrence(memory, flat, shape, lengths)


def _check(memory: Tensor, tokens: dict[str, Any], lengths: Any) -> tuple[StreamShape, dict[str, Tensor]]:
    """Check everything that needs no value of a tensor; return the layout and the tensors as [P, *]."""
    k_idx = tokens["k_idx"]
    if not isinstance(k_idx, Tensor):
        raise TypeError(f"k_idx: expected a torch.Tensor, got {type(k_idx).__name__}")
    if k_idx.dim() not in (2, 3) or (k_idx.dim() == 3 and k_idx.shape[1] != 1):
        raise ValueError(f"k_idx: expected one token a stream, [P, W] or [P, 1, W], got {list(k_idx.shape)}")
    streams = k_idx.shape[0]
    if memory.shape[0] % max(streams, 1) or (streams and memory.shape[0] == 0):
        raise ValueError(
            f"memory: expected a positive multiple of P = {streams} rows (k_idx has {streams} streams), got "
            f"{memory.shape[0]}"
        )
    slots = memory.shape[0] // streams if streams else 0
    shape = resolve_streams(memory, k_idx, slots, streams, False, lengths, None)
    flat = flatten_tokens(tokens, shape)
    check_token_tensors(memory, flat, shape.leading, "P")
    given = {"memory": memory, **flat} | ({} if lengths is None else {"lengths": lengths})
    check_one_device(given)
    if torch.is_grad_enabled():
        for name, tensor in given.items():
            if tensor.requires_grad:
                raise RuntimeError(
                    f"{name}: requires grad, and sdm_decode_step is not differentiable; use sdm_write_read, or call "
                    f"under torch.no_grad()"
                )
    return shape, flat


def _decode_by_recurrence(
    memory: Tensor, flat: dict[str, Tensor], shape: StreamShape, lengths: Tensor | None
) -> Tensor:
    """Run the definition in torch."""
    steps = [1] * shape.streams if lengths is None else check_stream_lengths(lengths, 1)
    starts = list(range(shape.streams))
    for name in ("k_idx", "q_idx"):
        check_index_range(name, flat[name], shape, starts, steps)
    with torch.no_grad():
        readings, _, repeats = advance(
            memory, Tokens(**flat), Streams.sorted_by_length(starts, steps, memory.device), None
        )
    count_repeats(repeats)
    record_dispatch({"op": "decode", "path": "recurrence", "streams": shape.streams})
    return readings
