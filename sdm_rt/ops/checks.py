"""Argument checks of the ops: every refusal happens here, before any work and with nothing changed.

Checks that read shapes, dtypes and strides alone run on every device. Checks that read values (lengths,
indices) run on the CPU, and on the GPU only where the caller or ``SDM_RT_CHECK=1`` asks for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from sdm_rt.plan.shapes import MAX_HEAD_DIM, MAX_LANES

__all__ = [
    "BANK_DTYPES",
    "INDEX_DTYPES",
    "FlatShape",
    "StreamShape",
    "are_plain",
    "check_bank",
    "check_choice",
    "check_index_range",
    "check_int",
    "check_no_derivatives",
    "check_no_gradient",
    "check_no_tangents",
    "check_one_device",
    "check_plain",
    "check_sequence",
    "check_stream_lengths",
    "check_stream_offsets",
    "check_streams_disjoint",
    "check_token_tensors",
    "flat_shapes",
    "flat_tokens",
    "resolve_streams",
]

BANK_DTYPES: tuple[torch.dtype, ...] = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_PLAIN = frozenset({Tensor, Parameter})
INDEX_DTYPES: tuple[torch.dtype, ...] = (torch.int32, torch.int64)
_transforms = torch._C._functorch.peek_interpreter_stack


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(_dtype_name(dtype) for dtype in dtypes[:-1]) + f" or {_dtype_name(dtypes[-1])}"


def check_int(name: str, value: Any, low: int, high: int | None) -> int:
    """Return ``value`` where it is an int of [low, high]; TypeError or ValueError naming the argument."""
    # torch.SymInt stands for an int whose value an export leaves open.
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if value < low or (high is not None and value > high):
        wanted = f"at least {low}" if high is None else f"in {low}..{high}"
        raise ValueError(f"{name}: expected a value {wanted}, got {value}")
    return value  # type: ignore[return-value]


def check_sequence(name: str, value: Any) -> tuple[Any, ...]:
    """Return the items of ``value``; TypeError naming the argument where it has none."""
    try:
        return tuple(value)
    except TypeError:
        raise TypeError(f"{name}: expected a sequence, got {type(value).__name__}") from None


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """Return ``value`` where it is one of ``choices``; ValueError naming the argument otherwise."""
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}")
    return str(value)


def check_one_device(tensors: dict[str, Tensor]) -> torch.device:
    """Return the one device of all ``tensors``; ValueError naming the two that differ."""
    (first_name, first), *rest = tensors.items()
    for name, tensor in rest:
        if tensor.device != first.device:
            raise ValueError(
                f"{name}: expected the device of {first_name}, {first.device}, got {tensor.device}"
            )
    return first.device


def are_plain(tensors: Iterable[Tensor]) -> bool:
    """Whether `check_plain` has nothing to look at: the usual case, told in no time."""
    return _PLAIN.issuperset(map(type, tensors)) and forward_ad._current_level < 0 and _transforms() is None


def check_plain(op: str, tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors whose values are not at their own address, and tangents: kernels would not see them."""
    check_no_derivatives(op, tensors)
    for name, tensor in tensors.items():
        if type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor):
            raise TypeError(
                f"{name}: expected a plain tensor, got {type(tensor).__name__}; pass what this process holds "
                f"of it (a DTensor's to_local())"
            )


def check_no_derivatives(op: str, tensors: Mapping[str, Tensor]) -> None:
    """Refuse transforms of ``torch.func`` and forward-mode tangents; a compile does not show them."""
    if not torch.compiler.is_compiling() and _transforms() is not None:
        raise RuntimeError(
            f"{op}: torch.func transforms (vmap, grad and others) are not supported; batch by streams and "
            f"differentiate with torch.autograd"
        )
    check_no_tangents(op, tensors)


def check_no_tangents(op: str, tensors: Mapping[str, Tensor]) -> None:
    """RuntimeError naming the tensor that has a forward-mode tangent; a compile does not show them."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    for name, tensor in tensors.items():
        if forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
            raise RuntimeError(f"{name}: has a tangent, and {op} has no forward-mode derivative")


def check_no_gradient(op: str, tensors: dict[str, Tensor]) -> None:
    """RuntimeError for a tangent, and where grad mode is on and one of ``tensors`` requires grad."""
    check_no_tangents(op, tensors)
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor.requires_grad:
            raise RuntimeError(
                f"{name}: requires grad, and {op} is not differentiable; gradients come from sdm_write_read, "
                f"or call it under torch.no_grad()"
            )


def _elements_overlap(memory: Tensor) -> bool:
    """Whether two elements of a 2-D tensor share an address: i a + j b = i' a + j' b, (i, j) != (i', j')."""
    (rows, columns), (a, b) = memory.shape, memory.stride()
    if rows == 0 or columns == 0:
        return False
    if (rows > 1 and a == 0) or (columns > 1 and b == 0):
        return True
    if rows == 1 or columns == 1 or a > b * (columns - 1) or b > a * (rows - 1):
        return False
    divisor = gcd(a, b)
    return rows > b // divisor and columns > a // divisor


def _check_strided(name: str, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got layout {tensor.layout}")


def check_bank(memory: Any) -> None:
    """Check rank, dtype, width and layout of a bank [rows, D].

    Raises
    ------
    TypeError
        Not a tensor, a sparse one, or a dtype that no bank has.
    ValueError
        Wrong rank, D outside 1..16384, or a view whose elements overlap.
    """
    if not isinstance(memory, Tensor):
        raise TypeError(f"memory: expected a torch.Tensor, got {type(memory).__name__}")
    _check_strided("memory", memory)
    if memory.dtype not in BANK_DTYPES:
        raise TypeError(
            f"memory: expected dtype {_dtype_names(BANK_DTYPES)}, got {_dtype_name(memory.dtype)}"
        )
    if memory.dim() != 2:
        raise ValueError(f"memory: expected shape [slots, head_dim], got {list(memory.shape)}")
    if not 1 <= memory.shape[1] <= MAX_HEAD_DIM:
        raise ValueError(f"memory: expected head_dim in 1..{MAX_HEAD_DIM}, got {memory.shape[1]}")
    if _elements_overlap(memory):
        raise ValueError(
            f"memory: expected a bank without overlapping elements, got shape {list(memory.shape)} with "
            f"strides {list(memory.stride())}; clone() it first"
        )


def check_token_tensors(
    memory: Tensor, tokens: Mapping[str, Tensor | FlatShape], leading: tuple[int, ...], leading_names: str
) -> tuple[int, int]:
    """Check dtypes and shapes of the per-token tensors of a call.

    Parameters
    ----------
    memory : Tensor
        The bank [rows, D], already checked.
    tokens : mapping of Tensor or FlatShape
        ``k_idx, k_val, v, beta, g, q_idx, q_val``; the last dimensions are W, W, D, 1, 1 or W, R, R.
    leading : tuple of int
        What all dimensions before the last must be.
    leading_names : str
        The leading dimensions in words, for messages: ``"P, T"``.

    Returns
    -------
    tuple of int
        (W, R).
    """
    for name in ("k_idx", "q_idx"):
        if tokens[name].dtype not in INDEX_DTYPES:
            raise TypeError(
                f"{name}: expected dtype {_dtype_names(INDEX_DTYPES)}, got {_dtype_name(tokens[name].dtype)}"
            )
    for name in ("k_val", "v", "beta", "g", "q_val"):
        if not tokens[name].dtype.is_floating_point:
            raise TypeError(f"{name}: expected a floating-point dtype, got {_dtype_name(tokens[name].dtype)}")
    for name in ("k_idx", "q_idx"):
        if len(tokens[name].shape) != len(leading) + 1:
            symbol = "W" if name == "k_idx" else "R"
            raise ValueError(
                f"{name}: expected shape [{leading_names}, {symbol}], got {list(tokens[name].shape)}"
            )
    writes, reads = tokens["k_idx"].shape[-1], tokens["q_idx"].shape[-1]
    for name, count in (("k_idx", writes), ("q_idx", reads)):
        if not 1 <= count <= MAX_LANES:
            raise ValueError(f"{name}: expected 1..{MAX_LANES} slots a token, got {count}")
    widths = {"k_idx": (writes, "W"), "k_val": (writes, "W"), "v": (memory.shape[1], "D"), "beta": (1, "1")}
    widths |= {"q_idx": (reads, "R"), "q_val": (reads, "R")}
    for name, (width, symbol) in widths.items():
        if tuple(tokens[name].shape) != (*leading, width):
            raise ValueError(
                f"{name}: expected shape [{leading_names}, {symbol}] = {[*leading, width]}, "
                f"got {list(tokens[name].shape)}"
            )
    gate = tuple(tokens["g"].shape)
    if gate not in ((*leading, 1), (*leading, writes)):
        raise ValueError(
            f"g: expected shape [{leading_names}, 1] or [{leading_names}, W] = {[*leading, 1]} or "
            f"{[*leading, writes]}, got {list(gate)}"
        )
    return writes, reads


@dataclass(frozen=True)
class StreamShape:
    """How the tokens of a call are laid out, from shapes alone.

    Parameters
    ----------
    streams : int
        P.
    tokens : int
        T of the padded layout [P, T, *]; for the packed layout the number of all rows.
    slots : int
        S of a stream; for a shared bank, all rows.
    rows : int
        Rows of the flat token tensors [rows, *].
    packed : bool
        Whether streams lie one after another, as ``cu_seqlens`` says.
    shared_bank : bool
        Whether all streams use one bank of S rows.
    """

    streams: int
    tokens: int
    slots: int
    rows: int
    packed: bool
    shared_bank: bool

    @property
    def leading(self) -> tuple[int, ...]:
        """Dimensions before the last of a flat token tensor."""
        return (self.rows,)

    def first_slot(self, stream: int) -> int:
        """Return the first bank row that ``stream`` owns."""
        return 0 if self.shared_bank else stream * self.slots


def resolve_streams(
    memory: Tensor,
    k_idx: Tensor,
    num_memory_slots: int,
    num_parallel: int,
    shared_bank: bool,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
) -> StreamShape:
    """Find P, T and S of a call from its shapes; ValueError naming what does not fit."""
    check_int("num_memory_slots", num_memory_slots, 0, None)
    check_int("num_parallel", num_parallel, 0, None)
    streams = num_parallel
    if shared_bank and num_memory_slots not in (0, memory.shape[0]):
        raise ValueError(
            f"num_memory_slots: expected 0 (one bank for all) with shared_bank=True, got {num_memory_slots}"
        )
    if num_memory_slots == 0 and streams > 1 and not shared_bank:
        raise ValueError(
            f"num_memory_slots: expected the slots of a stream, got 0: one bank for all {streams} streams "
            "needs shared_bank=True (you promise that rows written by one stream are touched by no other)"
        )
    one_bank = shared_bank or num_memory_slots == 0
    if not one_bank and memory.shape[0] != streams * num_memory_slots:
        raise ValueError(
            f"memory: expected num_parallel * num_memory_slots = {streams} * {num_memory_slots} = "
            f"{streams * num_memory_slots} rows, got {memory.shape[0]}"
        )
    slots = memory.shape[0] if one_bank else num_memory_slots
    if lengths is not None and cu_seqlens is not None:
        raise ValueError(
            "lengths: expected either lengths (padded inputs) or cu_seqlens (packed inputs), got both"
        )
    for name, vector, count, symbol in (
        ("lengths", lengths, streams, "num_parallel"),
        ("cu_seqlens", cu_seqlens, streams + 1, "num_parallel + 1"),
    ):
        if vector is None:
            continue
        if not isinstance(vector, Tensor) or vector.dtype not in INDEX_DTYPES:
            got = _dtype_name(vector.dtype) if isinstance(vector, Tensor) else type(vector).__name__
            raise TypeError(f"{name}: expected a tensor of dtype {_dtype_names(INDEX_DTYPES)}, got {got}")
        if tuple(vector.shape) != (count,):
            raise ValueError(f"{name}: expected shape [{symbol}] = [{count}], got {list(vector.shape)}")
    if cu_seqlens is not None:
        if k_idx.dim() != 2:
            raise ValueError(f"k_idx: expected shape [sum T, W] with cu_seqlens, got {list(k_idx.shape)}")
        return StreamShape(streams, k_idx.shape[0], slots, k_idx.shape[0], True, one_bank)
    if k_idx.dim() == 3:
        if k_idx.shape[0] != streams:
            raise ValueError(
                f"k_idx: expected shape [P, T, W] with P = num_parallel = {streams}, got {list(k_idx.shape)}"
            )
        tokens = k_idx.shape[1]
    elif k_idx.dim() == 2:
        if (streams == 0 and k_idx.shape[0]) or (streams and k_idx.shape[0] % streams):
            raise ValueError(
                f"k_idx: expected a multiple of num_parallel = {streams} rows in shape [P*T, W], got "
                f"{list(k_idx.shape)}"
            )
        tokens = k_idx.shape[0] // streams if streams else 0
    else:
        raise ValueError(f"k_idx: expected shape [P, T, W] or [P*T, W], got {list(k_idx.shape)}")
    return StreamShape(streams, tokens, slots, streams * tokens, False, one_bank)


class FlatShape(NamedTuple):
    """What checks look at of a token tensor: its dtype, and its shape as [rows, *]."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def flat_shapes(tokens: dict[str, Tensor], shape: StreamShape) -> dict[str, FlatShape]:
    """Return the token tensors' shapes as [rows, *], leading dimensions checked; no tensor is made."""
    flat = {}
    for name, tensor in tokens.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
        _check_strided(name, tensor)
        size = tuple(tensor.shape)
        if not shape.packed and len(size) == 3:
            if size[:2] != (shape.streams, shape.tokens):
                raise ValueError(
                    f"{name}: expected shape [P, T, *] = [{shape.streams}, {shape.tokens}, *], got "
                    f"{list(size)}"
                )
            size = (shape.rows, size[2])
        flat[name] = FlatShape(tensor.dtype, size)
    return flat


def flat_tokens(tokens: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return checked token tensors, [P, T, *] or [rows, *], as [rows, *]: views where the layout allows."""
    return {name: t if t.dim() == 2 else t.flatten(0, 1) for name, t in tokens.items()}


def check_stream_lengths(lengths: Tensor, tokens: int, max_seqlen: int | None = None) -> list[int]:
    """Return ``lengths`` as ints; ValueError where one exceeds 0..T or max_seqlen. Waits for the device."""
    values: list[int] = lengths.tolist()
    for stream, value in enumerate(values):
        if not 0 <= value <= tokens:
            raise ValueError(f"lengths: expected values in 0..{tokens}, got {value} for stream {stream}")
        if max_seqlen is not None and value > max_seqlen:
            raise ValueError(
                f"max_seqlen: expected at least the longest stream, {value} tokens (stream {stream}), "
                f"got {max_seqlen}"
            )
    return values


def check_stream_offsets(cu_seqlens: Tensor, rows: int, max_seqlen: int | None) -> list[int]:
    """Return ``cu_seqlens`` as ints; ValueError unless they split the rows in order. Waits for the device."""
    offsets: list[int] = cu_seqlens.tolist()
    if offsets[0] != 0 or offsets[-1] != rows:
        raise ValueError(
            f"cu_seqlens: expected to start at 0 and end at {rows}, got {offsets[0]} and {offsets[-1]}"
        )
    for stream, (start, end) in enumerate(pairwise(offsets)):
        if end < start:
            raise ValueError(
                f"cu_seqlens: expected rising offsets, got {start} then {end} for stream {stream}"
            )
        if max_seqlen is not None and end - start > max_seqlen:
            raise ValueError(
                f"max_seqlen: expected at least the longest stream, {end - start} tokens (stream {stream}), "
                f"got {max_seqlen}"
            )
    return offsets


def check_index_range(
    name: str, idx: Tensor, shape: StreamShape, starts: list[int], lengths: list[int]
) -> None:
    """ValueError naming the first stream with an index outside its bank rows; padding is not looked at.

    Parameters
    ----------
    name : str
        The argument's name.
    idx : Tensor
        Bank rows [rows, W or R].
    shape : StreamShape
        The call's layout.
    starts, lengths : list of int
        First flat row and number of tokens of each stream.
    """
    for stream, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        if length == 0:
            continue
        first = shape.first_slot(stream)
        low, high = (int(bound) for bound in idx[start : start + length].aminmax())
        if low < first or high >= first + shape.slots:
            raise ValueError(
                f"{name}: expected bank rows in {first}..{first + shape.slots - 1} for stream {stream}, got "
                f"{low if low < first else high}"
            )


def check_streams_disjoint(
    k_idx: Tensor, q_idx: Tensor, shape: StreamShape, starts: list[int], lengths: list[int]
) -> None:
    """ValueError where, in a shared bank, a row written by one stream is touched by another."""
    writer = torch.full((shape.slots,), -1, dtype=torch.int64, device=k_idx.device)
    spans = [slice(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    for touch, idx in (("written", k_idx), ("read", q_idx)):
        for stream, span in enumerate(spans):
            touched = idx[span].reshape(-1).long()
            others = writer[touched]
            clash = (others >= 0) & (others != stream)
            if bool(clash.any()):
                at = int(clash.nonzero()[0])
                raise ValueError(
                    f"shared_bank: expected rows written by one stream to be touched by no other, got row "
                    f"{int(touched[at])} written by stream {int(others[at])} and {touch} by stream {stream}"
                )
            if touch == "written":
                writer[touched] = stream
