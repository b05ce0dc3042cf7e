"""Where the tokens of a layer call lie, and the way to the op's streams and back.

A layer works on rows [N, *], one a token, sequence after sequence. The op works on streams: stream
p = b*H + h is head h of sequence b.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from sdm_rt.ops.checks import (
    INDEX_DTYPES,
    check_int,
    check_one_device,
    check_stream_lengths,
    check_stream_offsets,
)
from sdm_rt.ops.library import is_traced

__all__ = ["OneTokenLayout", "PackedLayout", "PaddedLayout", "TokenLayout", "resolve_layout"]


@dataclass(frozen=True, eq=False)
class PaddedLayout:
    """B sequences of T rows each, of which the first ``lengths[b]`` are tokens and the rest is padding.

    Parameters
    ----------
    sequences, heads, tokens : int
        B, H and T.
    lengths : Tensor, optional
        [B]; None where every row is a token.
    is_real : Tensor, optional
        Bool [N], False for padding; None where every row is a token.
    """

    sequences: int
    heads: int
    tokens: int
    lengths: Tensor | None
    is_real: Tensor | None

    @classmethod
    def of(cls, sequences: int, heads: int, tokens: int, lengths: Tensor | None) -> PaddedLayout:
        """Make the layout of B, H, T and ``lengths``."""
        if lengths is None:
            return cls(sequences, heads, tokens, None, None)
        positions = torch.arange(tokens, device=lengths.device)
        return cls(sequences, heads, tokens, lengths, (positions < lengths.unsqueeze(-1)).flatten())

    def to_streams(self, x: Tensor) -> Tensor:
        """Return [N, H*w] or [N, H, w] as [P, T, w]."""
        by_token = x.view(self.sequences, self.tokens, self.heads, _head_width(x, self.heads))
        return by_token.transpose(1, 2).flatten(0, 1)

    def bank_rows(self, idx: Tensor, slots: int) -> Tensor:
        """Return slots [N, H, w] of a stream as rows [P, T, w] of the whole bank."""
        return self.to_streams(idx) + _first_rows(self.sequences * self.heads, slots, idx.device)

    def from_streams(self, readings: Tensor) -> Tensor:
        """Return readings [P*T, D] as [N, H, D]."""
        by_stream = readings.view(self.sequences, self.heads, self.tokens, readings.shape[-1])
        return by_stream.transpose(1, 2).flatten(0, 1)

    @property
    def stream_lengths(self) -> Tensor | None:
        """The op's ``lengths`` [P]."""
        return None if self.lengths is None else self.lengths.repeat_interleave(self.heads)

    @property
    def stream_offsets(self) -> Tensor | None:
        """The op's ``cu_seqlens``: none, since the streams are padded."""
        return None


@dataclass(frozen=True, eq=False)
class OneTokenLayout:
    """One token of each of B sequences, B > 0: rows [B, H * w] of the layer are the op's [P, 1, w].

    Methods also take two such tensors, one after the other, as [2B, H, w], and return [2P, 1, w].

    Parameters
    ----------
    sequences, heads : int
        B and H.
    """

    sequences: int
    heads: int
    tokens: ClassVar[int] = 1
    is_real: ClassVar[None] = None
    stream_lengths: ClassVar[None] = None
    stream_offsets: ClassVar[None] = None

    def to_streams(self, x: Tensor) -> Tensor:
        """Return [B, H*w] or [B, H, w] as [P, 1, w]."""
        return x.view(-1, 1, x.shape[-1] if x.dim() == 3 else x.shape[-1] // self.heads)

    def bank_rows(self, idx: Tensor, slots: int) -> Tensor:
        """Return slots [B, H, w] of a stream as rows [P, 1, w] of the whole bank."""
        streams = self.sequences * self.heads
        if streams == 1:
            return self.to_streams(idx)
        by_stream = idx.view(-1, streams, 1, idx.shape[-1])
        return (by_stream + _first_rows(streams, slots, idx.device)).flatten(0, 1)

    def from_streams(self, readings: Tensor) -> Tensor:
        """Return readings [P, D] as [B, H, D]."""
        return readings.view(self.sequences, self.heads, readings.shape[-1])


def _first_rows(streams: int, slots: int, device: torch.device) -> Tensor:
    """Return the first bank row of each stream, [P, 1, 1]."""
    return torch.arange(0, streams * slots, slots, device=device).view(-1, 1, 1)


def _head_width(x: Tensor, heads: int) -> int:
    """Return w of [N, H*w] or [N, H, w]."""
    return x.shape[-1] if x.dim() == 3 else x.shape[-1] // heads


@dataclass(frozen=True, eq=False)
class PackedLayout:
    """B sequences of any lengths, one after another.

    Parameters
    ----------
    sequences, heads : int
        B and H.
    tokens : int
        An upper bound of the lengths.
    rows : int
        N, the sum of the lengths.
    sequence_of_row : Tensor
        int64 [N]: the sequence of each row.
    stream_offsets : Tensor
        int64 [P+1], the op's ``cu_seqlens``: the first row of each stream, streams packed one after another,
        then N*H.
    stream_row_of_token : Tensor
        int64 [N*H]: where row n, head h of the layer lies among the rows of the packed streams.
    token_of_stream_row : Tensor
        int64 [N*H], the inverse permutation.
    """

    sequences: int
    heads: int
    tokens: int
    rows: int
    sequence_of_row: Tensor
    stream_offsets: Tensor
    stream_row_of_token: Tensor
    token_of_stream_row: Tensor

    @classmethod
    def of(cls, heads: int, tokens: int, rows: int, cu_seqlens: Tensor) -> PackedLayout:
        """Make the layout of H, an upper bound of the lengths, N and ``cu_seqlens`` [B+1]."""
        row = torch.arange(rows, device=cu_seqlens.device)
        head = torch.arange(heads, device=cu_seqlens.device)
        sequence = torch.bucketize(row, cu_seqlens[1:], right=True)
        first_rows = cu_seqlens[:-1, None].long() * heads + cu_seqlens.diff()[:, None] * head  # [B, H]
        offsets = torch.cat([first_rows.flatten(), cu_seqlens[-1:].long() * heads])
        to_stream = (first_rows[sequence] + (row - cu_seqlens[sequence])[:, None]).flatten()
        inverse = torch.empty_like(to_stream).scatter_(
            0, to_stream, torch.arange(rows * heads, device=row.device)
        )
        return cls(cu_seqlens.shape[0] - 1, heads, tokens, rows, sequence, offsets, to_stream, inverse)

    @property
    def is_real(self) -> Tensor | None:
        """None: every row is a token."""
        return None

    def to_streams(self, x: Tensor) -> Tensor:
        """Return [N, H*w] or [N, H, w] as [N*H, w], stream after stream."""
        by_head = x.reshape(self.rows * self.heads, _head_width(x, self.heads))
        return _permute_rows(by_head, self.token_of_stream_row, self.stream_row_of_token)

    def bank_rows(self, idx: Tensor, slots: int) -> Tensor:
        """Return slots [N, H, w] of a stream as rows [N*H, w] of the whole bank, stream after stream."""
        heads = torch.arange(self.heads, device=idx.device)
        streams = self.sequence_of_row[:, None] * self.heads + heads  # [N, H]
        return self.to_streams(idx + (streams * slots).unsqueeze(-1))

    def from_streams(self, readings: Tensor) -> Tensor:
        """Return readings [N*H, D], stream after stream, as [N, H, D]."""
        by_token = _permute_rows(readings, self.stream_row_of_token, self.token_of_stream_row)
        return by_token.view(self.rows, self.heads, readings.shape[-1])

    @property
    def stream_lengths(self) -> Tensor | None:
        """The op's ``lengths``: none, since the streams are packed."""
        return None


TokenLayout = PaddedLayout | OneTokenLayout | PackedLayout


def resolve_layout(
    x: Tensor,
    heads: int,
    freqs_cis: Any,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> TokenLayout:
    """Find where the tokens of ``x`` lie.

    Parameters
    ----------
    x : Tensor
        [B, T, dim], [B*T, dim], or [sum T, dim] with ``cu_seqlens``.
    heads : int
        H.
    freqs_cis : Tensor, optional
        Only its first dimension counts: T, where x is [B*T, dim].
    lengths, cu_seqlens, max_seqlen
        As :class:`~sdm_rt.layer.layer.SparseDeltaMemory` takes them.

    Raises
    ------
    ValueError, TypeError
        A shape, dtype, device or (on the CPU) value that does not fit; the message names the argument.
    """
    if lengths is not None and cu_seqlens is not None:
        raise ValueError("lengths: expected either lengths (padded x) or cu_seqlens (packed x), got both")
    if max_seqlen is not None:
        check_int("max_seqlen", max_seqlen, 0, None)
    if cu_seqlens is not None:
        return _resolve_packed(x, heads, cu_seqlens, max_seqlen)
    if x.dim() == 3:
        sequences, tokens = x.shape[:2]
    else:
        if freqs_cis is None:
            raise ValueError(
                f"x: expected shape [B, T, dim], or [B*T, dim] with freqs_cis of T rows, or [sum T, dim] "
                f"with cu_seqlens, got {list(x.shape)} without either"
            )
        if not getattr(freqs_cis, "shape", ()):
            raise TypeError(
                f"freqs_cis: expected a torch.Tensor of T rows beside x of rank 2, got "
                f"{type(freqs_cis).__name__}{' of rank 0' if isinstance(freqs_cis, Tensor) else ''}"
            )
        tokens = freqs_cis.shape[0]
        if x.shape[0] % max(tokens, 1) or (tokens == 0 and x.shape[0]):
            raise ValueError(
                f"x: expected shape [B*T, dim] with T = {tokens}, the rows of freqs_cis, got {list(x.shape)}"
            )
        sequences = x.shape[0] // max(tokens, 1)
    if lengths is not None:
        _check_vector("lengths", lengths, sequences, "B", x)
        if x.device.type == "cpu" and not is_traced(x):
            check_stream_lengths(lengths, tokens, max_seqlen)
    elif max_seqlen is not None and max_seqlen < tokens:
        raise ValueError(f"max_seqlen: expected at least T = {tokens}, got {max_seqlen}")
    if tokens == 1 and lengths is None and sequences:
        return OneTokenLayout(sequences, heads)
    return PaddedLayout.of(sequences, heads, tokens, lengths)


def _resolve_packed(x: Tensor, heads: int, cu_seqlens: Tensor, max_seqlen: int | None) -> PackedLayout:
    if x.dim() != 2:
        raise ValueError(f"x: expected shape [sum T, dim] with cu_seqlens, got {list(x.shape)}")
    sequences = max(cu_seqlens.shape[0] - 1, 0) if isinstance(cu_seqlens, Tensor) and cu_seqlens.dim() else 0
    _check_vector("cu_seqlens", cu_seqlens, sequences + 1, "B+1", x)
    rows = x.shape[0]
    if x.device.type == "cpu" and not is_traced(x):
        offsets = check_stream_offsets(cu_seqlens, rows, max_seqlen)
        longest = max((end - start for start, end in pairwise(offsets)), default=0)
        return PackedLayout.of(heads, longest, rows, cu_seqlens)
    if max_seqlen is None:
        raise ValueError(
            f"max_seqlen: expected an upper bound of the lengths with cu_seqlens on {x.device}"
            f"{' in a compiled or traced call' if x.device.type == 'cpu' else ''}, since the host must not "
            f"wait for it, got None"
        )
    return PackedLayout.of(heads, max_seqlen, rows, cu_seqlens)


def _check_vector(name: str, vector: Any, count: int, symbol: str, x: Tensor) -> None:
    if not isinstance(vector, Tensor) or vector.dtype not in INDEX_DTYPES:
        got = vector.dtype if isinstance(vector, Tensor) else type(vector).__name__
        raise TypeError(f"{name}: expected a tensor of dtype int32 or int64, got {got}")
    if tuple(vector.shape) != (count,):
        raise ValueError(f"{name}: expected shape [{symbol}] = [{count}], got {list(vector.shape)}")
    check_one_device({"x": x, name: vector})


def _permute_rows(x: Tensor, forward: Tensor, inverse: Tensor) -> Tensor:
    rows: Tensor = _PermuteRows.apply(x, forward, inverse)  # type: ignore[no-untyped-call]
    return rows


class _PermuteRows(torch.autograd.Function):
    """``x[forward]`` whose backward gathers by the inverse, where indexing would add."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(forward, inverse)
        return x.index_select(0, forward)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        forward, inverse = ctx.saved_tensors
        return _permute_rows(grad, inverse, forward), None, None
