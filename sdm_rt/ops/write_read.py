"""The write-read op: advance a bank over whole sequences and read it, with gradients."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from sdm_rt import env
from sdm_rt.ops import checks
from sdm_rt.ops.inplace_call import apart, check_tracked, named_apart
from sdm_rt.ops.library import is_traced
from sdm_rt.ops.write_read_autograd import write_read_in_place, write_read_with_final_bank
from sdm_rt.ops.write_read_call import WriteReadCall, check_values, needs_backward
from sdm_rt.ops.write_read_operators import traced_write_read
from sdm_rt.ops.write_read_paths import path_of
from sdm_rt.plan.column_slices import SCHEDULES
from sdm_rt.plan.shapes import MAX_CHUNK, SNAPSHOTS
from sdm_rt.runtime.interop import check_writable, is_foreign, producer_stream, to_caller, to_tensor

__all__ = ["sdm_write_read"]

MOST_CHECKED = 1024  # calls that are remembered; lengths that differ at every step must not fill the memory


class _Options(NamedTuple):
    """The arguments of a call that are no tensors and that its shapes are checked against."""

    chunk_size: int
    num_memory_slots: int
    num_parallel: int
    snapshot_quant: str
    key_weighted_decay: bool | None
    shared_bank: bool
    grad_bank_fp32: bool
    max_seqlen: int | None
    schedule: str | None


def _check_options(options: _Options) -> None:
    checks.check_int("chunk_size", options.chunk_size, 1, MAX_CHUNK)
    checks.check_int("num_memory_slots", options.num_memory_slots, 0, None)
    checks.check_int("num_parallel", options.num_parallel, 0, None)
    checks.check_choice("snapshot_quant", options.snapshot_quant, SNAPSHOTS)
    if options.schedule is not None:
        checks.check_choice("schedule", options.schedule, SCHEDULES)
    if options.max_seqlen is not None:
        checks.check_int("max_seqlen", options.max_seqlen, 0, None)


def _check_device(device: torch.device, memory: Tensor, packed: bool, options: _Options) -> None:
    if device.type != "cuda":
        if options.schedule is not None:
            raise ValueError(
                f"schedule: expected None for CPU tensors, which run the recurrence, got {options.schedule!r}"
            )
        return
    if memory.dtype == torch.float64:
        raise TypeError(
            "memory: expected dtype float32, bfloat16 or float16 on a GPU, got float64 (CPU only)"
        )
    if packed and options.max_seqlen is None:
        raise ValueError(
            "max_seqlen: expected the tokens of the longest stream with cu_seqlens on a GPU (the host does "
            "not wait to look), got None"
        )


def _check_call(
    memory: Tensor, tensors: dict[str, Tensor], streams: dict[str, Tensor], options: _Options
) -> WriteReadCall:
    """Check all that shapes, dtypes, layouts and devices tell; return the call beside its tensors."""
    checks.check_bank(memory)
    if not isinstance(tensors["k_idx"], Tensor):
        raise TypeError(f"k_idx: expected a torch.Tensor, got {type(tensors['k_idx']).__name__}")
    shape = checks.resolve_streams(
        memory,
        tensors["k_idx"],
        options.num_memory_slots,
        options.num_parallel,
        options.shared_bank,
        streams.get("lengths"),
        streams.get("cu_seqlens"),
    )
    if memory.shape[0] == 0 and shape.rows > 0:
        raise ValueError("memory: expected rows for the tokens' indices, got a bank of none")
    flat = checks.flat_shapes(tensors, shape)
    writes, _ = checks.check_token_tensors(memory, flat, shape.leading, "sum T" if shape.packed else "P*T")
    weighted, gates = options.key_weighted_decay, flat["g"].shape[-1]
    if weighted is not None and gates != (writes if weighted else 1):
        raise ValueError(
            f"g: expected width {writes if weighted else 1}, as key_weighted_decay={weighted} says, "
            f"got {gates}"
        )
    device = checks.check_one_device({"memory": memory, **tensors, **streams})
    longest = options.max_seqlen
    if longest is not None and not streams and longest < shape.tokens:
        raise ValueError(f"max_seqlen: expected at least T = {shape.tokens}, got {longest}")
    _check_device(device, memory, shape.packed, options)
    return WriteReadCall(
        shape,
        shape.tokens if longest is None else min(longest, shape.tokens),
        options.chunk_size,
        options.snapshot_quant,
        options.grad_bank_fp32,
        options.schedule,
    )


# Calls that were checked, by all that `_check_call` looks at.
_checked: dict[Hashable, WriteReadCall] = {}


def _known_call(
    memory: Tensor, tensors: dict[str, Tensor], streams: dict[str, Tensor], options: _Options
) -> WriteReadCall:
    """Do as `_check_call` does, once for calls that are alike."""
    key = (
        options,
        memory.shape,
        memory.stride(),
        memory.dtype,
        memory.device,
        *[(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors.values()],
        *[(name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in streams.items()],
    )
    call = _checked.get(key)
    if call is None:
        call = _check_call(memory, tensors, streams, options)
        if len(_checked) >= MOST_CHECKED:
            _checked.clear()
        _checked[key] = call
    return call


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
    Every tensor may be a CuPy array or another object with ``__dlpack__``; a CuPy bank gets CuPy arrays back.

    Parameters
    ----------
    memory : Tensor
        The bank, [P*S, D]; stream p owns rows p*S .. (p+1)*S - 1. float32, bfloat16, float16, on the CPU also
        float64. Advanced in place, unless ``return_final_bank``.
    k_idx, q_idx : Tensor
        Bank rows to write and to read, [P, T, W] and [P, T, R], int32 or int64; W and R in 1..256. A slot
        that a token writes twice decays once, by the gate of its first lane, and its weights add.
    k_val, q_val : Tensor
        Weights, [P, T, W] and [P, T, R]. These and the next three have any floating-point dtype, each its
        own; their gradients have it too.
    v : Tensor
        Values, [P, T, D].
    beta : Tensor
        Write strengths, [P, T, 1].
    g : Tensor
        Log-decays in nats, [P, T, 1] for one a token or [P, T, W] for one a write; -inf erases. Meant to be
        at most 0: on a GPU, sums of positive ones within a chunk cost accuracy (docs/math.md).
    chunk_size : int
        C of the chunked form, 1..256. The recurrence of the CPU has no chunks: no effect there.
    num_memory_slots : int
        S, the slots of a stream. 0: one bank for all streams, which needs ``shared_bank=True`` where P > 1.
    num_parallel : int
        P. All token tensors may also come as [P*T, *].
    snapshot_quant : {"none", "bf16", "fp8", "int4"}
        How training keeps the rows it overwrites. Values stay those of "none"; the gradients of ``k_val``,
        ``g`` and ``q_val`` become approximate, and so does the restored bank. With "fp8" and "int4" a NaN or
        inf there makes its whole row NaN.
    key_weighted_decay : bool, optional
        True asserts gates per write, False gates per token.
    shared_bank : bool
        One bank for all streams: the caller promises that rows written by one stream are touched by no other.
        Verified on the CPU. A backward on a GPU takes the read rows of one stream after another.
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
        Forces a GPU schedule, for the forward and the backward. Default: chosen for each of them by a rule
        (docs/planning.md). Both give the same bits. The CPU has none and refuses the argument.

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
    UnsupportedConfigurationError
        On a GPU, a ValueError: a forced schedule that cannot run (``"persistent"`` on a GPU without thread
        block clusters, with a chunk that its shared memory does not hold, or with a backward of several
        streams of ``shared_bank``), 2**31 slots a stream and more, more than 65,535 streams, or bank rows
        2**32 elements apart and more. Nothing has changed then: the forward refuses what only the backward
        could not run, too.
    TypeError
        A wrong dtype or type; a float64 bank on a GPU.
    MissingDependencyError
        On a GPU, a RuntimeError: CuPy, NVRTC or the driver is missing or too old.
    KernelCompileError, NotPrecompiledError
        On a GPU, RuntimeErrors: a kernel's source does not compile, or it would have to be compiled under
        ``SDM_RT_JIT=0``.
    RuntimeError
        Inside a transform of ``torch.func``, for a tensor with a forward-mode tangent, or for an inference
        tensor or another library's array as the bank of an in-place call that needs a backward. For a CuPy
        bank on CuPy's per-thread default stream or inside a capture that CuPy began. On a GPU: a
        compute capability below 8.0, or a first call of its kind inside a CUDA graph capture, where no kernel
        can be compiled or loaded. From a backward: the bank of an in-place call was changed in between, or
        ran backward before; ``create_graph=True``.

    Notes
    -----
    A backward restores the bank of an in-place call, bit for bit with ``snapshot_quant="none"``. So
    backwards of in-place calls run in the reverse order of their calls, the gradient of ``memory`` is with
    respect to the bank at that call's own start, and none flows between two in-place calls;
    ``return_final_bank`` does that, and is what activation checkpointing needs, which calls the op twice.

    Under ``torch.compile`` and under dispatch modes a call is an operator of ``torch.library``. An in-place
    call that needs a backward then runs on a copy of the bank: the values and gradients are the same, but its
    backward does not restore the bank.
    """
    options = _Options(
        chunk_size,
        num_memory_slots,
        num_parallel,
        snapshot_quant,
        None if key_weighted_decay is None else bool(key_weighted_decay),
        bool(shared_bank),
        bool(grad_bank_fp32),
        max_seqlen,
        schedule,
    )
    _check_options(options)
    tensors = {"k_idx": k_idx, "k_val": k_val, "v": v, "beta": beta, "g": g, "q_idx": q_idx, "q_val": q_val}
    streams = {name: t for name, t in (("lengths", lengths), ("cu_seqlens", cu_seqlens)) if t is not None}
    given = {"memory": memory, **tensors, **streams}
    only_tensors = all(isinstance(array, Tensor) for array in given.values())
    if not only_tensors and any(map(is_foreign, given.values())):
        result: Tensor | tuple[Tensor, Tensor] = _on_foreign_arrays(
            given, **options._asdict(), return_final_bank=return_final_bank, check_indices=check_indices
        )
        return result
    checked = env.flag("SDM_RT_CHECK") if check_indices is None else check_indices
    traced = only_tensors and is_traced(memory)
    check = _known_call if only_tensors and not traced else _check_call  # symbolic shapes go into no memo
    call = check(memory, tensors, streams, options)
    if traced:
        checks.check_no_derivatives("sdm_write_read", given)
        return traced_write_read(
            memory, checks.flat_tokens(tensors), call, streams, checked, return_final_bank
        )
    if not checks.are_plain(given.values()):
        checks.check_plain("sdm_write_read", given)
    if not return_final_bank:
        tensors, streams = named_apart(memory, tensors, streams)
    if checked and memory.is_cuda:
        check_values(call, checks.flat_tokens(tensors), streams)
    if needs_backward(memory, tensors):
        if not return_final_bank:
            check_tracked(memory, memory)
        run = write_read_with_final_bank if return_final_bank else write_read_in_place
        return run(memory, tensors, call, streams)
    bank = memory.clone(memory_format=torch.contiguous_format) if return_final_bank else memory
    readings = path_of(memory.device).forward(bank.detach(), tensors, call, streams)
    return (readings, bank) if return_final_bank else readings


def _on_foreign_arrays(arrays: dict[str, Any], **options: Any) -> Any:
    """Run on arrays of another library, on the caller's stream; a CuPy bank gets CuPy arrays back."""
    caller = arrays["memory"]
    with producer_stream(caller, arrays.values()):
        tensors = {name: to_tensor(array, name) for name, array in arrays.items()}
        if needs_backward(tensors["memory"], tensors):  # changes to another library's array are not tracked
            tensors |= {
                name: x.clone()
                for name, x in tensors.items()
                if name != "memory" and not isinstance(arrays[name], Tensor)
            }
        if not options["return_final_bank"]:
            bank = tensors["memory"]
            check_writable(caller)
            if needs_backward(bank, tensors):
                check_tracked(bank, caller)
            tensors = {name: x if x is bank else apart(bank, x) for name, x in tensors.items()}
        op: Any = sdm_write_read
        result = op(**tensors, **options)
        if isinstance(result, tuple):
            return tuple(to_caller(one, caller) for one in result)
        return to_caller(result, caller)
