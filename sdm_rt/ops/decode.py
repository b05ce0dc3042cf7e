"""Decode: the recurrence for one token of every stream."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from sdm_rt.cpu.recurrence import Streams, Tokens, advance
from sdm_rt.ops.checks import (
    StreamShape,
    are_plain,
    check_bank,
    check_index_range,
    check_no_derivatives,
    check_no_gradient,
    check_one_device,
    check_plain,
    check_stream_lengths,
    check_token_tensors,
    flat_shapes,
    flat_tokens,
    resolve_streams,
)
from sdm_rt.ops.counters import count_repeats, record_dispatch
from sdm_rt.ops.decode_launch import decode_on_gpu
from sdm_rt.ops.inplace_call import apart
from sdm_rt.ops.library import define, is_traced
from sdm_rt.runtime.interop import check_writable, empty_like_caller, is_cupy, producer_stream, to_tensor

__all__ = ["sdm_decode_step"]

NAMES = ("k_idx", "k_val", "v", "beta", "g", "q_idx", "q_val")


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
        Readings [P, D] in the bank's dtype; a CuPy array for a CuPy bank. Every argument may be a CuPy array
        or another object with ``__dlpack__``.

    Raises
    ------
    RuntimeError
        Grad mode is on and an input requires grad, an input has a forward-mode tangent, or a transform of
        ``torch.func`` is active. On a GPU also: a part of the GPU path is missing
        (`MissingDependencyError`), a GPU below compute capability 8.0, a kernel that would have to be
        compiled inside a CUDA graph capture.
    TypeError, ValueError
        A dtype, shape, device or index that does not fit; the message names the argument. Nothing has
        been changed.
    """
    operands = (k_idx, k_val, v, beta, g, q_idx, q_val)
    given = (memory, *operands) if lengths is None else (memory, *operands, lengths)
    for array in given:
        if not isinstance(array, Tensor):
            return _decode_foreign(memory, operands, lengths)
    return _decode(memory, operands, lengths, None)


def _decode(
    memory: Tensor, operands: tuple[Tensor, ...], lengths: Tensor | None, readings: Tensor | None
) -> Tensor:
    """Refuse what needs gradients, then run on the bank's device."""
    if torch.is_grad_enabled():
        for tensor in (memory, *operands):
            if tensor.requires_grad:
                check_no_gradient("sdm_decode_step", _named(memory, operands, lengths))
    if is_traced(memory):
        check_no_derivatives("sdm_decode_step", _named(memory, operands, lengths))
        _, flat = _check(memory, operands, lengths, values=False)
        out: Tensor = torch.ops.sdm_rt.decode_step(memory, *flat.values(), lengths)
        return out
    if not are_plain((memory, *operands) if lengths is None else (memory, *operands, lengths)):
        check_plain("sdm_decode_step", _named(memory, operands, lengths))
    if memory.is_cuda:
        return _on_gpu(memory, operands, lengths, readings)
    return _recurrence(memory, operands, lengths)


def _named(memory: Tensor, operands: tuple[Tensor, ...], lengths: Tensor | None) -> dict[str, Tensor]:
    """Return the tensors of a call by the names of their arguments."""
    named = {"memory": memory, **dict(zip(NAMES, operands, strict=True))}
    return named if lengths is None else named | {"lengths": lengths}


def _on_gpu(
    memory: Tensor, operands: tuple[Tensor, ...], lengths: Tensor | None, readings: Tensor | None
) -> Tensor:
    return decode_on_gpu(memory, operands, lengths, partial(_check, memory, operands, lengths), readings)


def _recurrence(memory: Tensor, operands: tuple[Tensor, ...], lengths: Tensor | None) -> Tensor:
    shape, flat = _check(memory, operands, lengths, values=True)
    streams = Streams.sorted_by_length(list(range(shape.streams)), _steps(shape, lengths), memory.device)
    with torch.no_grad():
        out, _, repeats = advance(memory, Tokens(**flat), streams, None)
    count_repeats(repeats)
    record_dispatch({"op": "sdm_decode_step", "path": "recurrence", "streams": shape.streams})
    return out


def _decode_foreign(memory: Any, operands: tuple[Any, ...], lengths: Any) -> Any:
    """Run on arrays of another library; a CuPy bank gets CuPy readings."""
    with producer_stream(memory, (*operands, lengths), allocates=False):
        check_writable(memory)
        bank = to_tensor(memory, "memory")
        tensors = tuple(
            apart(bank, to_tensor(array, name)) for name, array in zip(NAMES, operands, strict=True)
        )
        steps = None if lengths is None else apart(bank, to_tensor(lengths, "lengths"))
        if not is_cupy(memory):
            return _decode(bank, tensors, steps, None)
        shape, _ = _check(bank, tensors, steps, values=False)
        readings = empty_like_caller(memory, (shape.streams, bank.shape[1]))
        _decode(bank, tensors, steps, to_tensor(readings, "readings"))
        return readings


def _check(
    memory: Tensor, operands: tuple[Tensor, ...], lengths: Tensor | None, values: bool
) -> tuple[StreamShape, dict[str, Tensor]]:
    """Check a call; return its layout and its tensors as [P, *].

    Parameters
    ----------
    memory, operands, lengths
        The arguments of the call.
    values : bool
        Whether lengths and indices are looked at too, which waits for their device.
    """
    check_bank(memory)
    tokens = dict(zip(NAMES, operands, strict=True))
    k_idx = tokens["k_idx"]
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
    check_token_tensors(memory, flat_shapes(tokens, shape), shape.leading, "P")
    flat = flat_tokens(tokens)
    check_one_device(_named(memory, tuple(flat.values()), lengths))
    if values:
        steps = _steps(shape, lengths)
        for name in ("k_idx", "q_idx"):
            check_index_range(name, flat[name], shape, list(range(streams)), steps)
    return shape, flat


def _steps(shape: StreamShape, lengths: Tensor | None) -> list[int]:
    """Return how many tokens each stream takes: 0 or 1."""
    return [1] * shape.streams if lengths is None else check_stream_lengths(lengths, 1)


define(
    "decode_step(Tensor(a!) memory, Tensor k_idx, Tensor k_val, Tensor v, Tensor beta, Tensor g, "
    "Tensor q_idx, Tensor q_val, Tensor? lengths) -> Tensor",
    cpu=lambda memory, *arguments: _recurrence(memory, arguments[:-1], arguments[-1]),
    cuda=lambda memory, *arguments: _on_gpu(memory, arguments[:-1], arguments[-1], None),
    fake=lambda memory, k_idx, *_: memory.new_empty(k_idx.shape[0], memory.shape[1]),
)
