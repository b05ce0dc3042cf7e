"""The two ways to run a write-read call: the recurrence on CPU tensors, planned kernels on CUDA tensors."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from sdm_rt.cpu.recurrence import Saved, Streams, Tokens, advance, retreat, sum_dtype
from sdm_rt.cpu.snapshot import RowSnapshot
from sdm_rt.ops.checks import flat_tokens
from sdm_rt.ops.counters import count_repeats, record_dispatch
from sdm_rt.ops.write_read_backward_launch import backward_on_gpu
from sdm_rt.ops.write_read_call import Gradients, WriteReadCall, check_values, stream_spans
from sdm_rt.ops.write_read_graphs import replay_backward, replay_forward
from sdm_rt.ops.write_read_launch import forward_on_gpu, saved_bytes, training_forward_on_gpu

__all__ = ["Path", "path_of"]


class Path(Protocol):
    """How calls run on one kind of device.

    ``tensors`` holds the checked token tensors by name, [P, T, *] or [rows, *], ``streams`` the call's
    ``lengths`` or ``cu_seqlens``.
    """

    def forward(
        self, bank: Tensor, tensors: dict[str, Tensor], call: WriteReadCall, streams: dict[str, Tensor]
    ) -> Tensor:
        """Advance the bank in place, save nothing; return the readings [rows, D]."""

    def training_forward(
        self, bank: Tensor, tensors: dict[str, Tensor], call: WriteReadCall, streams: dict[str, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Advance the bank in place; return the readings and what ``backward`` needs beside the inputs."""

    def empty_saved(
        self, bank: Tensor, tensors: dict[str, Tensor], call: WriteReadCall
    ) -> tuple[Tensor, ...]:
        """Return tensors like those that ``training_forward`` saves, from shapes alone."""

    def backward(
        self,
        bank: Tensor,
        tensors: dict[str, Tensor],
        call: WriteReadCall,
        streams: dict[str, Tensor],
        saved: tuple[Tensor, ...],
        grad_readings: Tensor,
        grad_final: Tensor | None,
    ) -> Gradients:
        """Restore the bank in place; return the gradients, in dtypes of the path's choice."""


class _Recurrence:
    """CPU tensors: the definition, token by token."""

    def forward(
        self, bank: Tensor, tensors: dict[str, Tensor], call: WriteReadCall, streams: dict[str, Tensor]
    ) -> Tensor:
        flat = flat_tokens(tensors)
        readings, _, repeats = advance(bank, Tokens(**flat), self._checked(bank, flat, call, streams), None)
        count_repeats(repeats)
        return readings

    def training_forward(
        self, bank: Tensor, tensors: dict[str, Tensor], call: WriteReadCall, streams: dict[str, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        flat = flat_tokens(tensors)
        readings, saved, repeats = advance(
            bank, Tokens(**flat), self._checked(bank, flat, call, streams), call.snapshot_quant
        )
        count_repeats(repeats)
        assert saved is not None
        return readings, (saved.rows.payload, saved.rows.scale, saved.error)

    def empty_saved(
        self, bank: Tensor, tensors: dict[str, Tensor], call: WriteReadCall
    ) -> tuple[Tensor, ...]:
        tokens, writes = flat_tokens(tensors)["k_idx"].shape
        saved = Saved.empty(call.snapshot_quant, tokens, writes, bank)
        return saved.rows.payload, saved.rows.scale, saved.error

    def backward(
        self,
        bank: Tensor,
        tensors: dict[str, Tensor],
        call: WriteReadCall,
        streams: dict[str, Tensor],
        saved: tuple[Tensor, ...],
        grad_readings: Tensor,
        grad_final: Tensor | None,
    ) -> Gradients:
        flat = flat_tokens(tensors)
        payload, scale, error = saved
        rows = RowSnapshot(call.snapshot_quant, bank.shape[1], bank.dtype, payload, scale)
        if grad_final is None:
            grad_bank = torch.zeros(bank.shape, dtype=sum_dtype(bank), device=bank.device)
        else:
            grad_bank = grad_final.to(sum_dtype(bank), copy=True, memory_format=torch.contiguous_format)
        starts, lengths = stream_spans(call, streams)
        self._record("sdm_write_read_backward", bank, flat, call, lengths)
        spans = Streams.sorted_by_length(starts, lengths, bank.device)
        grads = retreat(bank, grad_bank, Tokens(**flat), spans, Saved(rows, error), grad_readings)
        return Gradients(grad_bank, grads.k_val, grads.v, grads.beta, grads.g, grads.q_val)

    def _checked(
        self, bank: Tensor, flat: dict[str, Tensor], call: WriteReadCall, streams: dict[str, Tensor]
    ) -> Streams:
        """Check values before anything changes; return where the streams lie."""
        starts, spans = check_values(call, flat, streams)
        self._record("sdm_write_read", bank, flat, call, spans)
        return Streams.sorted_by_length(starts, spans, bank.device)

    @staticmethod
    def _record(
        op: str, bank: Tensor, flat: dict[str, Tensor], call: WriteReadCall, lengths: list[int]
    ) -> None:
        """Tell `last_dispatch` of a call or a backward of streams of these lengths."""
        record_dispatch(
            {
                "op": op,
                "path": "recurrence",
                "device": str(bank.device),
                "streams": call.shape.streams,
                "tokens": sum(lengths),
                "writes": flat["k_idx"].shape[1],
                "reads": flat["q_idx"].shape[1],
                "head_dim": bank.shape[1],
                "slots": call.shape.slots,
                "bank_dtype": str(bank.dtype).removeprefix("torch."),
                "snapshot_quant": call.snapshot_quant,
            }
        )


class _Kernels:
    """CUDA tensors: the chunked form by planned kernels."""

    def forward(
        self, bank: Tensor, tensors: dict[str, Tensor], call: WriteReadCall, streams: dict[str, Tensor]
    ) -> Tensor:
        return forward_on_gpu(bank, tensors, call, streams)

    def training_forward(
        self, bank: Tensor, tensors: dict[str, Tensor], call: WriteReadCall, streams: dict[str, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        replayed = replay_forward(bank, tensors, call, streams)
        readings, saved = replayed or training_forward_on_gpu(bank, tensors, call, streams)
        return readings, (saved,)

    def empty_saved(
        self, bank: Tensor, tensors: dict[str, Tensor], call: WriteReadCall
    ) -> tuple[Tensor, ...]:
        return (bank.new_empty(saved_bytes(bank, tensors, call), dtype=torch.uint8),)

    def backward(
        self,
        bank: Tensor,
        tensors: dict[str, Tensor],
        call: WriteReadCall,
        streams: dict[str, Tensor],
        saved: tuple[Tensor, ...],
        grad_readings: Tensor,
        grad_final: Tensor | None,
    ) -> Gradients:
        (kept,) = saved
        replayed = replay_backward(bank, kept, grad_readings, grad_final)
        return replayed or backward_on_gpu(bank, tensors, call, streams, kept, grad_readings, grad_final)


_RECURRENCE = _Recurrence()
_KERNELS = _Kernels()


def path_of(device: torch.device) -> Path:
    """Return how calls on ``device`` run."""
    return _KERNELS if device.type == "cuda" else _RECURRENCE
