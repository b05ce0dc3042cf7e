"""The operators of write-read calls for ``torch.compile``, fake tensors and dispatch modes.

``sdm_rt::write_read`` is the form that returns the final bank, with its gradient in
``sdm_rt::write_read_backward``; ``sdm_rt::write_read_inplace`` saves nothing and advances the bank in place.
All take the token tensors as [rows, *]. Checks that read values run inside the operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from sdm_rt.ops.checks import StreamShape
from sdm_rt.ops.inplace_call import named_apart
from sdm_rt.ops.library import define, differentiable_once
from sdm_rt.ops.write_read_autograd import run_backward
from sdm_rt.ops.write_read_call import TOKEN_TENSORS, WriteReadCall, check_values, needs_backward
from sdm_rt.ops.write_read_flops import backward_flops, forward_flops
from sdm_rt.ops.write_read_paths import path_of

__all__ = ["traced_write_read"]

_TOKENS = "Tensor k_idx, Tensor k_val, Tensor v, Tensor beta, Tensor g, Tensor q_idx, Tensor q_val"
_STREAMS = "Tensor? lengths, Tensor? cu_seqlens"
_NUMBERS = (
    "SymInt streams, SymInt slots, bool shared_bank, SymInt longest, int chunk_size, str snapshot_quant, "
    "bool grad_bank_fp32, str? schedule, bool checked"
)


class _Arguments:
    """The arguments behind the bank of an operator, by meaning."""

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        tokens, (lengths, cu_seqlens), numbers = arguments[:7], arguments[7:9], arguments[9:]
        streams, slots, shared_bank, longest, *options, self.checked = numbers
        rows, packed = tokens[0].shape[0], cu_seqlens is not None
        a_stream = rows if packed else rows // streams if streams else 0
        shape = StreamShape(streams, a_stream, slots, rows, packed, shared_bank)
        self.call = WriteReadCall(shape, longest, *options)
        self.flat: dict[str, Tensor] = dict(zip(TOKEN_TENSORS, tokens, strict=True))
        given = {"lengths": lengths, "cu_seqlens": cu_seqlens}
        self.streams: dict[str, Tensor] = {name: t for name, t in given.items() if t is not None}

    def check_if_asked(self, bank: Tensor) -> None:
        """Check values on a GPU; the recurrence checks its own always."""
        if self.checked and bank.is_cuda:
            check_values(self.call, self.flat, self.streams)


def _write_read(memory: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    at = _Arguments(arguments)
    at.check_if_asked(memory)
    bank = memory.clone(memory_format=torch.contiguous_format)
    path = path_of(memory.device)
    readings, saved = path.training_forward(bank, at.flat, at.call, at.streams)
    return readings, bank, list(saved)


def _fake_write_read(memory: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    at = _Arguments(arguments)
    saved = path_of(memory.device).empty_saved(memory, at.flat, at.call)
    return _fake_readings(memory, *arguments), memory.new_empty(memory.shape), list(saved)


def _write_read_inplace(memory: Tensor, *arguments: Any) -> Tensor:
    at = _Arguments(arguments)
    at.check_if_asked(memory)
    flat, streams = named_apart(memory, at.flat, at.streams)
    return path_of(memory.device).forward(memory, flat, at.call, streams)


def _fake_readings(memory: Tensor, k_idx: Tensor, *_arguments: Any) -> Tensor:
    return memory.new_empty(k_idx.shape[0], memory.shape[1])


def _write_read_backward(
    final: Tensor,
    saved: list[Tensor],
    grad_readings: Tensor | None,
    grad_final: Tensor | None,
    *arguments: Any,
) -> tuple[Tensor, ...]:
    at = _Arguments(arguments)
    bank = final.clone(memory_format=torch.contiguous_format)
    grads = run_backward(
        path_of(final.device), at.call, bank, at.flat, at.streams, tuple(saved), grad_readings, grad_final
    )
    return grads.in_dtypes_of(bank, at.flat)


def _fake_write_read_backward(
    final: Tensor, saved: list[Tensor], grad_readings: Any, grad_final: Any, *arguments: Any
) -> tuple[Tensor, ...]:
    flat = _Arguments(arguments).flat
    inputs = (final, flat["k_val"], flat["v"], flat["beta"], flat["g"], flat["q_val"])
    return tuple(tensor.new_empty(tensor.shape) for tensor in inputs)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    _, final, saved = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*saved)
    ctx.save_for_backward(final, *inputs[1:10], *saved)
    ctx.numbers = inputs[10:]


def _backward(ctx: Any, grad_readings: Tensor | None, grad_final: Tensor | None, _: Any) -> tuple[Any, ...]:
    final, *kept = ctx.saved_tensors
    arguments, saved = kept[:9], kept[9:]
    grads = torch.ops.sdm_rt.write_read_backward(
        final, saved, grad_readings, grad_final, *arguments, *ctx.numbers
    )
    memory, k_val, v, beta, g, q_val = grads
    return memory, None, k_val, v, beta, g, None, q_val, None, None, *[None] * len(ctx.numbers)


define(
    f"write_read(Tensor memory, {_TOKENS}, {_STREAMS}, {_NUMBERS}) -> (Tensor, Tensor, Tensor[])",
    cpu=_write_read,
    cuda=_write_read,
    fake=_fake_write_read,
    backward=_backward,
    setup_context=_setup_context,
)
define(
    f"write_read_backward(Tensor final, Tensor[] saved, Tensor? grad_readings, Tensor? grad_final, "
    f"{_TOKENS}, {_STREAMS}, {_NUMBERS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    cpu=_write_read_backward,
    cuda=_write_read_backward,
    fake=_fake_write_read_backward,
    backward=differentiable_once,
)
define(
    f"write_read_inplace(Tensor(a!) memory, {_TOKENS}, {_STREAMS}, {_NUMBERS}) -> Tensor",
    cpu=_write_read_inplace,
    cuda=_write_read_inplace,
    fake=_fake_readings,
)
register_flop_formula([torch.ops.sdm_rt.write_read, torch.ops.sdm_rt.write_read_inplace])(forward_flops)
register_flop_formula(torch.ops.sdm_rt.write_read_backward)(backward_flops)


def traced_write_read(
    memory: Tensor,
    flat: dict[str, Tensor],
    call: WriteReadCall,
    streams: dict[str, Tensor],
    checked: bool,
    return_final_bank: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run a checked call through the operators.

    An in-place call that needs a backward runs on a copy of the bank, which is then copied into ``memory``:
    the gradients are those of an eager call, but the backward does not restore the bank.

    Parameters
    ----------
    memory : Tensor
        The bank [rows, D].
    flat, call, streams
        The token tensors [rows, *] by name, the call, and its ``lengths`` or ``cu_seqlens``.
    checked : bool
        Whether values are checked on a GPU.
    return_final_bank : bool
        Whether to leave ``memory`` alone and return the bank after the call too.
    """
    arguments = (
        *flat.values(),
        streams.get("lengths"),
        streams.get("cu_seqlens"),
        call.shape.streams,
        call.shape.slots,
        call.shape.shared_bank,
        call.longest,
        call.chunk_size,
        call.snapshot_quant,
        call.grad_bank_fp32,
        call.schedule,
        checked,
    )
    if not needs_backward(memory, flat):
        bank = memory.clone(memory_format=torch.contiguous_format) if return_final_bank else memory
        readings: Tensor = torch.ops.sdm_rt.write_read_inplace(bank, *arguments)
        return (readings, bank) if return_final_bank else readings
    readings, final, _ = torch.ops.sdm_rt.write_read(memory, *arguments)
    if return_final_bank:
        return readings, final
    with torch.no_grad():
        memory.copy_(final)
    return readings
