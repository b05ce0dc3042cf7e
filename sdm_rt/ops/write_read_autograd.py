"""The gradient of eager write-read calls, in place on the bank or on a copy that is returned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdm_rt.ops.inplace_call import InplaceCall
from sdm_rt.ops.library import differentiable_once
from sdm_rt.ops.write_read_call import TOKEN_TENSORS, Gradients, WriteReadCall
from sdm_rt.ops.write_read_paths import Path, path_of

__all__ = ["run_backward", "write_read_in_place", "write_read_with_final_bank"]


class _WriteRead(torch.autograd.Function):
    """A call with its own backward, wherever it runs."""

    @staticmethod
    def forward(
        ctx: Any,
        path: Path,
        call: WriteReadCall,
        stream_names: tuple[str, ...],
        functional: bool,
        memory: Tensor,
        *tensors: Tensor,
    ) -> Any:
        ctx.shapes = [x.shape for x in tensors[: len(TOKEN_TENSORS)]]
        # Inference tensors cannot be saved for the backward.
        tensors = tuple(x.clone() if x.is_inference() else x for x in tensors)
        # [rows, *] of what has gaps between tokens: a view, or a copy that the backward takes too.
        tensors = tuple(x if x.dim() < 3 or x.is_contiguous() else x.flatten(0, 1) for x in tensors)
        tokens, streams = tensors[: len(TOKEN_TENSORS)], tensors[len(TOKEN_TENSORS) :]
        bank = memory.detach()
        version = 0 if functional else bank._version
        if functional:
            bank = bank.clone(memory_format=torch.contiguous_format)
        readings, saved = path.training_forward(
            bank,
            dict(zip(TOKEN_TENSORS, tokens, strict=True)),
            call,
            dict(zip(stream_names, streams, strict=True)),
        )
        ctx.set_materialize_grads(False)
        ctx.path, ctx.call, ctx.stream_names = path, call, stream_names
        ctx.inplace = None if functional else InplaceCall(bank, version)
        ctx.save_for_backward(*tensors, *saved, *((bank,) if functional else ()))
        return (readings, bank) if functional else readings

    @staticmethod
    def backward(ctx: Any, grad_readings: Tensor | None, grad_final: Tensor | None = None) -> Any:
        if torch.is_grad_enabled():  # create_graph=True: what is computed here would count as constant
            differentiable_once(ctx)
        if ctx.inplace is not None:
            ctx.inplace.check_unchanged()
            kept = ctx.saved_tensors
            ctx.inplace.check_unchanged()  # checkpointing runs the call again to make them
            bank = ctx.inplace.bank
        else:
            *kept, final = ctx.saved_tensors
            bank = final.clone()
        tokens, kept = kept[: len(TOKEN_TENSORS)], kept[len(TOKEN_TENSORS) :]
        streams, saved = kept[: len(ctx.stream_names)], kept[len(ctx.stream_names) :]
        named = dict(zip(TOKEN_TENSORS, tokens, strict=True))
        grads = run_backward(
            ctx.path,
            ctx.call,
            bank,
            named,
            dict(zip(ctx.stream_names, streams, strict=True)),
            tuple(saved),
            grad_readings,
            grad_final,
        )
        if ctx.inplace is not None:
            ctx.inplace.finish()
        grads = grads.in_dtypes_of(bank, named)
        flat = (getattr(grads, name, None) for name in TOKEN_TENSORS)
        of_tokens = [
            grad if grad is None or grad.shape == shape else grad.view(shape)
            for grad, shape in zip(flat, ctx.shapes, strict=True)
        ]
        return None, None, None, None, grads.memory, *of_tokens, *[None] * len(streams)


def run_backward(
    path: Path,
    call: WriteReadCall,
    bank: Tensor,
    tensors: dict[str, Tensor],
    streams: dict[str, Tensor],
    saved: tuple[Tensor, ...],
    grad_readings: Tensor | None,
    grad_final: Tensor | None,
) -> Gradients:
    """Restore ``bank``, the bank after the call, in place; return the gradients as the kernels leave them.

    Parameters
    ----------
    path, call, tensors, streams
        Of the call.
    bank : Tensor
        [rows, D].
    saved : tuple of Tensor
        What the path's ``training_forward`` saved, or copies.
    grad_readings, grad_final : Tensor or None
        Gradients of the readings and of the bank after the call; None counts as 0.
    """
    if grad_readings is None:
        grad_readings = bank.new_zeros(1, 1).expand(call.shape.rows, bank.shape[1])
    return path.backward(bank, tensors, call, streams, saved, grad_readings, grad_final)


def write_read_in_place(
    memory: Tensor, tensors: dict[str, Tensor], call: WriteReadCall, streams: dict[str, Tensor]
) -> Tensor:
    """Advance ``memory`` in place; return the readings, whose backward restores it."""
    readings: Tensor = _apply(memory, tensors, call, streams, False)
    return readings


def write_read_with_final_bank(
    memory: Tensor, tensors: dict[str, Tensor], call: WriteReadCall, streams: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Leave ``memory`` alone; return the readings and the bank after the call, both differentiable."""
    readings, final = _apply(memory, tensors, call, streams, True)
    return readings, final


def _apply(
    memory: Tensor,
    tensors: dict[str, Tensor],
    call: WriteReadCall,
    streams: dict[str, Tensor],
    functional: bool,
) -> Any:
    """Apply the function to the caller's tensors, [P, T, *] or [rows, *]: views here would be graph nodes."""
    path = path_of(memory.device)
    return _WriteRead.apply(  # type: ignore[no-untyped-call]
        path, call, tuple(streams), functional, memory, *tensors.values(), *streams.values()
    )
