"""One write-read call beside its tensors, what its gradients are, and the checks that read values."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from sdm_rt.ops import checks
from sdm_rt.ops.checks import StreamShape

__all__ = [
    "DIFFERENTIABLE",
    "TOKEN_TENSORS",
    "Gradients",
    "WriteReadCall",
    "check_values",
    "needs_backward",
    "stream_spans",
]

TOKEN_TENSORS = ("k_idx", "k_val", "v", "beta", "g", "q_idx", "q_val")
DIFFERENTIABLE = ("k_val", "v", "beta", "g", "q_val")


@dataclass(frozen=True)
class WriteReadCall:
    """What a call is beside its tensors.

    Parameters
    ----------
    shape : StreamShape
        How its tokens are laid out.
    longest : int
        An upper bound of the streams' lengths.
    chunk_size : int
        C.
    snapshot_quant : str
        How training keeps the rows it overwrites.
    grad_bank_fp32 : bool
        Whether a half-precision bank's gradient is float32 during the backward.
    schedule : str or None
        A GPU schedule that the caller forces.
    """

    shape: StreamShape
    longest: int
    chunk_size: int
    snapshot_quant: str
    grad_bank_fp32: bool
    schedule: str | None


class Gradients(NamedTuple):
    """Gradients of the bank at the call's start, [rows, D], and of the token tensors, [rows, *]."""

    memory: Tensor
    k_val: Tensor
    v: Tensor
    beta: Tensor
    g: Tensor
    q_val: Tensor

    def in_dtypes_of(self, memory: Tensor, tensors: dict[str, Tensor]) -> Gradients:
        """Return the gradients as their inputs are: in their dtypes, of one gate a token summed over W."""
        g = self.g if self.g.shape[1] == tensors["g"].shape[-1] else self.g.sum(dim=1, keepdim=True)
        return Gradients(
            self.memory.to(memory.dtype),
            self.k_val.to(tensors["k_val"].dtype),
            self.v.to(tensors["v"].dtype),
            self.beta.to(tensors["beta"].dtype),
            g.to(tensors["g"].dtype),
            self.q_val.to(tensors["q_val"].dtype),
        )


def needs_backward(memory: Tensor, tensors: dict[str, Tensor]) -> bool:
    """Whether a backward through the call can come."""
    return torch.is_grad_enabled() and (
        memory.requires_grad or any(tensors[name].requires_grad for name in DIFFERENTIABLE)
    )


def stream_spans(call: WriteReadCall, streams: dict[str, Tensor]) -> tuple[list[int], list[int]]:
    """Return the first flat row and the length of every stream, checked. Waits for a GPU."""
    shape = call.shape
    bound = call.longest if call.longest < shape.tokens else None
    if "cu_seqlens" in streams:
        offsets = checks.check_stream_offsets(streams["cu_seqlens"], shape.rows, bound)
        return offsets[:-1], [end - start for start, end in pairwise(offsets)]
    starts = [stream * shape.tokens for stream in range(shape.streams)]
    if "lengths" not in streams:
        return starts, [shape.tokens] * shape.streams
    return starts, checks.check_stream_lengths(streams["lengths"], shape.tokens, bound)


def check_values(
    call: WriteReadCall, flat: dict[str, Tensor], streams: dict[str, Tensor]
) -> tuple[list[int], list[int]]:
    """Check what only values tell: lengths, offsets, index ranges, disjoint streams. Waits for a GPU.

    Parameters
    ----------
    call : WriteReadCall
        The call.
    flat : dict of Tensor
        The token tensors [rows, *] by name.
    streams : dict of Tensor
        ``lengths`` or ``cu_seqlens``, where given.

    Returns
    -------
    starts, lengths : list of int
        The first flat row and the length of every stream.

    Raises
    ------
    ValueError
        Naming the argument, what was expected and what came.
    """
    starts, spans = stream_spans(call, streams)
    for name in ("k_idx", "q_idx"):
        checks.check_index_range(name, flat[name], call.shape, starts, spans)
    if call.shape.shared_bank and call.shape.streams > 1:
        checks.check_streams_disjoint(flat["k_idx"], flat["q_idx"], call.shape, starts, spans)
    return starts, spans
