"""The write-read op: advance a bank over whole sequences and read it, with gradients."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal, overload

import torch
from torch import Tensor

from sdm_rt import env
from sdm_rt.cpu.recurrence import Saved, Streams, Tokens, advance, retreat, sum_dtype
from sdm_rt.cpu.snapshot import RowSnapshot
from sdm_rt.ops import checks
from sdm_rt.ops.counters import count_repeats, record_dispatch
from sdm_rt.ops.write_read_launch import forward_on_gpu

__all__ = ["sdm_write_read"]


class _InplaceCall:
    """The place of one in-place call in the history of its bank.

    An in-place call can be taken back only while the bank holds what the call left. Taking it back makes the
    bank what the call before it had left, so that one can be taken back next.
    """

    # Keyed by address: a live record keeps its bank alive, so a live entry is never another bank's.
    _latest: ClassVar[weakref.WeakValueDictionary[int, _InplaceCall]] = weakref.WeakValueDictionary()

    def __init__(self, bank: Tensor, version_before: int) -> None:
        self.bank = bank
        self.version_before = version_before
        self.version_after = bank._version
        previous = self._latest.get(self._address)
        self._previous = weakref.ref(previous) if previous is not None else None
        self.taken_back = False
        self._latest[self._address] = self

    @property
    def _address(self) -> int:
        return self.bank.untyped_storage().data_ptr()

    def check_unchanged(self) -> None:
        """RuntimeError unless the bank holds exactly what this call left in it."""
        if self.taken_back:
            raise RuntimeError(
                "sdm_write_read: a second backward through one in-place call: the first has already restored "
                "the bank. Run the forward again, or use return_final_bank=True with retain_graph=True."
            )
        if self.bank._version != self.version_after:
            raise RuntimeError(
                "sdm_write_read: the bank was changed between this in-place call and its backward. Run the "
                "backwards of in-place calls in the reverse order of the calls and change the bank only "
                "after them, or use return_final_bank=True, which leaves the caller's bank alone and is what "
                "activation checkpointing needs."
            )

    def finish(self) -> None:
        """Record that the bank has been restored to what it was before this call."""
        self.taken_back = True
        previous = self._previous() if self._previous is not None else None
        if previous is None:
            return
        if previous.version_after == self.version_before:
            previous.version_after = self.bank._version
        self._latest[self._address] = previous


@dataclass(frozen=True)
class _Settings:
    """The arguments of a call that are no tensors."""

    streams: Streams
    snapshot_quant: str
    functional: bool


class _WriteRead(torch.autograd.Function):
    """The recurrence with its own backward, in place on the bank or on a copy that is returned."""

    @staticmethod
    def forward(ctx: Any, settings: _Settings, memory: Tensor, *tensors: Tensor) -> Any:
        tokens = Tokens(*tensors)
        bank = memory.detach()
        version = bank._version
        if settings.functional:
            bank = bank.clone(memory_format=torch.contiguous_format)
        readings, saved, repeats = advance(bank, tokens, settings.streams, settings.snapshot_quant)
        count_repeats(repeats)
        assert saved is not None
        ctx.set_materialize_grads(False)
        ctx.settings = settings
        ctx.call = None if settings.functional else _InplaceCall(bank, version)
        kept = (*tensors, saved.rows.payload, saved.rows.scale, saved.error)
        ctx.save_for_backward(*kept, *((bank,) if settings.functional else ()))
        return (readings, bank) if settings.functional else readings

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_readings: Tensor | None, grad_final: Tensor | None = None) -> Any:
        if ctx.call is not None:
            ctx.call.check_unchanged()
            kept = ctx.saved_tensors
            ctx.call.check_unchanged()  # checkpointing runs the call again to make them
            bank = ctx.call.bank
        else:
            *kept, final = ctx.saved_tensors
            bank = final.clone()
        *tensors, payload, scale, error = kept
        tokens = Tokens(*tensors)
        if grad_final is None:
            grad_bank = torch.zeros(bank.shape, dtype=sum_dtype(bank), device=bank.device)
        else:
            grad_bank = grad_final.to(sum_dtype(bank), copy=True, memory_format=torch.contiguous_format)
        rows = RowSnapshot(ctx.settings.snapshot_quant, bank.shape[1], bank.dtype, payload, scale)
        saved = Saved(rows, error)
        if grad_readings is None:
            grad_readings = bank.new_zeros(1, 1).expand(tokens.v.shape)
        grads = retreat(bank, grad_bank, tokens, ctx.settings.streams, saved, grad_readings)
        if ctx.call is not None:
            ctx.call.finish()
        grad_g = grads.g if tokens.g.shape[1] == grads.g.shape[1] else grads.g.sum(dim=1, keepdim=True)
        return (
            None,
            grad_bank.to(bank.dtype),
            None,
            grads.k_val.to(tokens.k_val.dtype),
            grads.v.to(tokens.v.dtype),
            grads.beta.to(tokens.beta.dtype),
            grad_g.to(tokens.g.dtype),
            None,
            grads.q_val.to(tokens.q_val.dtype),
        )


def _check_options(
    chunk_size: int,
    snapshot_quant: str,
    schedule: str | None,
    max_seqlen: int | None,
) -> None:
    checks.check_int("chunk_size", chunk_size, 1, 256)
    checks.check_choice("snapshot_quant", snapshot_quant, checks.SNAPSHOT_MODES)
    if schedule is not None:
        checks.check_choice("schedule", schedule, checks.SCHEDULES)
    if max_seqlen is not None:
        checks.check_int("max_seqlen", max_seqlen, 0, None)


def _stream_spans(
    shape: checks.StreamShape, lengths: Tensor | None, cu_seqlens: Tensor | None, max_seqlen: int | None
) -> tuple[list[int], list[int]]:
    """Return the first flat row and the length of every stream, with their values checked."""
    if cu_seqlens is not None:
        offsets = checks.check_stream_offsets(cu_seqlens, shape.rows, max_seqlen)
        return offsets[:-1], [end - start for start, end in pairwise(offsets)]
    starts = [stream * shape.tokens for stream in range(shape.streams)]
    if lengths is None:
        return starts, [shape.tokens] * shape.streams
    return starts, checks.check_stream_lengths(lengths, shape.tokens, max_seqlen)


def _check_values(
    shape: checks.StreamShape,
    flat: dict[str, Tensor],
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> tuple[list[int], list[int]]:
    """Check what only values tell; return the first flat row and the length of every stream."""
    starts, spans = _stream_spans(shape, lengths, cu_seqlens, max_seqlen)
    for name in ("k_idx", "q_idx"):
        checks.check_index_range(name, flat[name], shape, starts, spans)
    if shape.shared_bank and shape.streams > 1:
        checks.check_streams_disjoint(flat["k_idx"], flat["q_idx"], shape, starts, spans)
    return starts, spans


def _forward_on_gpu(
    memory: Tensor,
    flat: dict[str, Tensor],
    shape: checks.StreamShape,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    chunk_size: int,
    functional: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run a call that saves nothing on a GPU."""
    if memory.dtype == torch.float64:
        raise TypeError(
            "memory: expected dtype float32, bfloat16 or float16 on a GPU, got float64 (CPU only)"
        )
    if cu_seqlens is not None and max_seqlen is None:
        raise ValueError(
            "max_seqlen: expected the tokens of the longest stream with cu_seqlens on a GPU (the host does "
            "not wait to look), got None"
        )
    longest = shape.tokens if max_seqlen is None else min(max_seqlen, shape.tokens)
    bank = memory.clone(memory_format=torch.contiguous_format) if functional else memory
    streams = {name: t for name, t in (("lengths", lengths), ("cu_seqlens", cu_seqlens)) if t is not None}
    readings = forward_on_gpu(bank, flat, shape, streams, longest, chunk_size)
    return (readings, bank) if functional else readings


@overload
def sdm_write_read(
    memory: Tensor,
    k_idx: Tensor,
    k_val: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    q_idx: Tensor,
    q_val: Tensor,
    *,
    chunk_size: int = ...,
    num_memory_slots: int = ...,
    num_parallel: int = ...,
    snapshot_quant: str = ...,
    key_weighted_decay: bool | None = ...,
    shared_bank: bool = ...,
    grad_bank_fp32: bool = ...,
    return_final_bank: Literal[False] = ...,
    lengths: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    max_seqlen: int | None = ...,
    check_indices: bool | None = ...,
    schedule: str | None = ...,
) -> Tensor: ...


@overload
def sdm_write_read(
    memory: Tensor,
    k_idx: Tensor,
    k_val: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    q_idx: Tensor,
    q_val: Tensor,
    *,
    chunk_size: int = ...,
    num_memory_slots: int = ...,
    num_parallel: int = ...,
    snapshot_quant: str = ...,
    key_weighted_decay: bool | None = ...,
    shared_bank: bool = ...,
    grad_bank_fp32: bool = ...,
    return_final_bank: Literal[True],
    lengths: Tensor | None = ...,
    cu_seqlens: Tensor | None = ...,
    max_seqlen: int | None = ...,
    check_indices: bool | None = ...,
    schedule: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


def sdm_write_read(
    memory: Tensor,
    k_idx: Tensor,
    k_val: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    q_idx: Tensor,
    q_val: Tensor,
    *,
    chunk_size: int = 64,
    num_memory_slots: int = 0,
    num_parallel: int = 1,
    snapshot_quant: str = "none",
    key_weighted_decay: bool | None = None,
    shared_bank: bool = False,
    grad_bank_fp32: bool = False,
    return_final_bank: bool = False,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    check_indices: bool | None = None,
    schedule: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Write every token into the bank by the gated delta rule, then read the bank at that token.

    For each token of a stream, in order (arXiv 2607.07386)::

        M[k_idx[n]] <- exp(g_n) M[k_idx[n]]
        r            = sum_n k_val[n] M[k_idx[n]]
        M[k_idx[n]] <- M[k_idx[n]] + k_val[n] beta (v - r)
        y            = sum_m q_val[m] M[q_idx[m]]

    ``k_val``, ``q_val`` and ``v`` are rounded to the bank's dtype; ``beta`` and ``g`` are used in float32
    (float64 with a float64 bank). CPU tensors run this recurrence itself and round bank rows once a token.

    Parameters
    ----------
    memory : Tensor
        The bank, [P*S, D]; stream p owns rows p*S .. (p+1)*S - 1. float32, bfloat16, float16, on the CPU also
        float64. Advanced in place, unless ``return_final_bank``.
    k_idx, q_idx : Tensor
        Bank rows to write and to read, [P, T, W] and [P, T, R], int32 or int64; W and R in 1..256. A slot
        that a token writes twice decays once, by the gate of its first lane, and its weights add.
    k_val, q_val : Tensor
        Weights, [P, T, W] and [P, T, R].
    v : Tensor
        Values, [P, T, D].
    beta : Tensor
        Write strengths, [P, T, 1].
    g : Tensor
        Log-decays in nats, [P, T, 1] for one a token or [P, T, W] for one a write; -inf erases.
    chunk_size : int
        C of the chunked form, 1..256. The recurrence of the CPU has no chunks: no effect there.
    num_memory_slots : int
        S. 0 means one bank for all streams.
    num_parallel : int
        P. All token tensors may also come as [P*T, *].
    snapshot_quant : {"none", "bf16", "fp8", "int4"}
        How training keeps the rows it overwrites. Values stay those of "none"; the gradients of ``k_val``,
        ``g`` and ``q_val`` become approximate, and so does the restored bank.
    key_weighted_decay : bool, optional
        True asserts gates per write, False gates per token.
    shared_bank : bool
        With one bank for several streams: the caller promises that rows written by one stream are touched by
        no other. Verified on the CPU.
    grad_bank_fp32 : bool
        Keep the gradient of a half-precision bank in float32 during the backward. The CPU always does.
    return_final_bank : bool
        Leave ``memory`` untouched and return the bank after the call too, with gradients into and out of it,
        so that segments of a sequence chain.
    lengths : Tensor, optional
        Tokens of each stream, [P], int32 or int64, at most T. What lies behind is padding: it touches
        nothing, its readings and gradients are 0.
    cu_seqlens : Tensor, optional
        Packed streams instead: offsets [P+1] into token tensors [sum T, *].
    max_seqlen : int, optional
        An upper bound of the streams' lengths, required with ``cu_seqlens`` on a GPU.
    check_indices : bool, optional
        Check indices on the GPU too (waits for it); default: ``SDM_RT_CHECK``. The CPU always checks.
    schedule : {"stepwise", "persistent"}, optional
        Forces a GPU schedule; the CPU has none and refuses the argument.

    Returns
    -------
    readings : Tensor
        [P*T, D] (packed: [sum T, D]) in the bank's dtype.
    final_bank : Tensor
        [P*S, D], only with ``return_final_bank``.

    Raises
    ------
    ValueError
        A shape, range, layout or index that does not fit; the message names the argument, what was expected
        and what came. Nothing has changed then.
    TypeError
        A wrong dtype or type.
    RuntimeError
        From a backward: the bank of an in-place call was changed in between, or ran backward before.

    Notes
    -----
    A backward restores the bank of an in-place call, bit for bit with ``snapshot_quant="none"``. So
    backwards of in-place calls run in the reverse order of their calls, the gradient of ``memory`` is with
    respect to the bank at that call's own start, and none flows between two in-place calls;
    ``return_final_bank`` does that, and is what activation checkpointing needs, which calls the op twice.
    """
    _check_options(chunk_size, snapshot_quant, schedule, max_seqlen)
    checks.check_bank(memory)
    tensors = {"k_idx": k_idx, "k_val": k_val, "v": v, "beta": beta, "g": g, "q_idx": q_idx, "q_val": q_val}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    shape = checks.resolve_streams(
        memory, k_idx, num_memory_slots, num_parallel, shared_bank, lengths, cu_seqlens
    )
    flat = checks.flatten_tokens(tensors, shape)
    writes, reads = checks.check_token_tensors(
        memory, flat, shape.leading, "sum T" if shape.packed else "P*T"
    )
    if key_weighted_decay is not None and g.shape[-1] != (writes if key_weighted_decay else 1):
        raise ValueError(
            f"g: expected width {writes if key_weighted_decay else 1}, as "
            f"key_weighted_decay={key_weighted_decay} says, got {g.shape[-1]}"
        )
    located = {"memory": memory, **flat}
    located |= {name: t for name, t in (("lengths", lengths), ("cu_seqlens", cu_seqlens)) if t is not None}
    device = checks.check_one_device(located)
    if max_seqlen is not None and lengths is None and cu_seqlens is None and max_seqlen < shape.tokens:
        raise ValueError(f"max_seqlen: expected at least T = {shape.tokens}, got {max_seqlen}")
    if device.type == "cuda":
        if torch.is_grad_enabled() and any(t.requires_grad for t in (memory, k_val, v, beta, g, q_val)):
            raise RuntimeError(
                "sdm_write_read: this version has no backward on a GPU; call it under torch.no_grad(), or "
                "train with CPU tensors"
            )
        checked = env.flag("SDM_RT_CHECK") if check_indices is None else check_indices
        if checked:
            _check_values(shape, flat, lengths, cu_seqlens, max_seqlen)
        return _forward_on_gpu(
            memory, flat, shape, lengths, cu_seqlens, max_seqlen, chunk_size, return_final_bank
        )
    if schedule is not None:
        raise ValueError(
            f"schedule: expected None for CPU tensors, which run the recurrence, got {schedule!r}"
        )

    starts, spans = _check_values(shape, flat, lengths, cu_seqlens, max_seqlen)
    record_dispatch(
        {
            "op": "sdm_write_read",
            "path": "recurrence",
            "device": str(device),
            "streams": shape.streams,
            "tokens": sum(spans),
            "writes": writes,
            "reads": reads,
            "head_dim": memory.shape[1],
            "slots": shape.slots,
            "bank_dtype": str(memory.dtype).removeprefix("torch."),
            "snapshot_quant": snapshot_quant,
        }
    )
    streams = Streams.sorted_by_length(starts, spans, device)
    differentiable = (memory, k_val, v, beta, g, q_val)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in differentiable):
        settings = _Settings(streams, snapshot_quant, return_final_bank)
        result: Tensor | tuple[Tensor, Tensor] = _WriteRead.apply(  # type: ignore[no-untyped-call]
            settings, memory, *flat.values()
        )
        return result
    bank = memory.clone(memory_format=torch.contiguous_format) if return_final_bank else memory
    readings, _, repeats = advance(bank.detach(), Tokens(**flat), streams, None)
    count_repeats(repeats)
    return (readings, bank) if return_final_bank else readings
