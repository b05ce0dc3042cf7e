"""The write-read backward on a GPU: a plan a shape, bound once a thread, over what the forward kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from sdm_rt.ops.bound_plans import bound_plan
from sdm_rt.ops.write_read_call import Gradients, WriteReadCall
from sdm_rt.ops.write_read_launch import (
    BankLayout,
    BoundCall,
    covers_every_row,
    finish_bank,
    new_arena,
    operands_of,
    output_like,
    planned_shape,
    pointers_of,
    record_run,
    stream_numbers,
)
from sdm_rt.plan.backward import backward_constants, plan_backward
from sdm_rt.plan.buffer import Arena
from sdm_rt.plan.column_slices import SCHEDULES
from sdm_rt.plan.forward import kept_arena
from sdm_rt.runtime.interop import current_stream

__all__ = ["aligned_gradient", "backward_on_gpu", "bind_backward", "gradient_bank_dtype", "new_gradients"]

LOAD_BYTES = 16
_PLANNERS = {schedule: partial(plan_backward, schedule=schedule) for schedule in (None, *SCHEDULES)}


def aligned_gradient(grad_readings: Tensor, bank: Tensor) -> Tensor:
    """Return the gradient of the readings [rows, D] as the kernels take it: dense, whole loads apart."""
    dense = grad_readings.detach().to(bank.dtype).contiguous()
    return dense if dense.data_ptr() % LOAD_BYTES == 0 else dense.clone()


def _gradient_bank(bank: Tensor, grad_final: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the bank's gradient at the call's end, dense [rows, D], to walk back in place."""
    if grad_final is None:
        return torch.zeros(bank.shape, dtype=dtype, device=bank.device)
    return grad_final.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)


def gradient_bank_dtype(bank: Tensor, call: WriteReadCall) -> torch.dtype:
    """Return the dtype of the bank's gradient while the backward runs."""
    return torch.float32 if call.grad_bank_fp32 else bank.dtype


def new_gradients(
    bank: Tensor,
    operands: dict[str, Tensor],
    call: WriteReadCall,
    streams: dict[str, Tensor],
    gradient_bank: Tensor,
) -> Gradients:
    """Return room for the gradients of a call; zeros unless the kernels write every row."""
    rows = call.shape.rows
    covered = covers_every_row(call, streams) and call.longest > 0
    W, R, gates = (operands[name].shape[-1] for name in ("k_idx", "q_idx", "g"))
    return Gradients(
        memory=gradient_bank,
        k_val=output_like(bank, rows, W, covered, bank.dtype),
        v=output_like(bank, rows, bank.shape[1], covered, bank.dtype),
        beta=output_like(bank, rows, 1, covered, torch.float32),
        g=output_like(bank, rows, gates, covered, torch.float32),
        q_val=output_like(bank, rows, R, covered, bank.dtype),
    )


def bind_backward(
    bank: Tensor,
    operands: dict[str, Tensor],
    call: WriteReadCall,
    streams: dict[str, Tensor],
    layout: BankLayout,
    saved: Tensor,
    grad_readings: Tensor,
    grads: Gradients,
    new_scratch: Callable[[Arena, torch.device], Tensor] = new_arena,
) -> BoundCall:
    """Bind the plan of a backward to a call's tensors.

    Parameters
    ----------
    bank : Tensor
        The bank [rows, D] after the call, columns side by side; the kernels restore it.
    operands, call, streams, layout, new_scratch
        As of `sdm_rt.ops.write_read_launch.bind_forward`.
    saved : Tensor
        What the forward saved, starting at a multiple of 16 bytes.
    grad_readings : Tensor
        As `aligned_gradient` returns it.
    grads : Gradients
        Where the gradients go; ``grads.memory`` holds the gradient of the final bank.
    """
    planned = planned_shape(bank, operands, call, layout.alignment, training=True)
    bound = bound_plan(_PLANNERS[call.schedule], planned, bank.get_device(), backward_constants)
    plan = bound.plan
    scratch = plan.scratch
    working = new_scratch(scratch, bank.device)
    tensors = {
        "memory": bank,
        "gradient_bank": grads.memory,
        "grad_readings": grad_readings,
        **{f"grad_{name}": grad for name, grad in grads._asdict().items() if name != "memory"},
        **operands,
        **streams,
    }
    bound.set(
        {
            **pointers_of(plan, tensors),
            **{
                name: address
                for name, address in kept_arena(planned).addresses(saved.data_ptr()).items()
                if name in bound.names
            },
            **scratch.addresses(working.data_ptr()),
            **stream_numbers(layout, call, streams),
        }
    )
    return BoundCall(bound, tensors | {"saved": saved, "scratch": working})


def backward_on_gpu(
    bank: Tensor,
    tensors: dict[str, Tensor],
    call: WriteReadCall,
    streams: dict[str, Tensor],
    saved: Tensor,
    grad_readings: Tensor,
    grad_final: Tensor | None,
) -> Gradients:
    """Take a call back: restore its bank in place, return its gradients.

    Parameters
    ----------
    bank : Tensor
        The bank [rows, D] as the call left it.
    tensors, call, streams
        As of `sdm_rt.ops.write_read_launch.training_forward_on_gpu`.
    saved : Tensor
        What that call saved.
    grad_readings : Tensor
        [rows, D].
    grad_final : Tensor, optional
        Gradient of the final bank [rows, D].

    Returns
    -------
    Gradients
        Of the bank and of ``v``, ``k_val`` and ``q_val`` in the bank's dtype, of ``beta`` and ``g`` in
        float32.
    """
    layout = BankLayout.of(bank)
    operands = operands_of(bank, tensors)
    gradient_bank = _gradient_bank(bank, grad_final, gradient_bank_dtype(bank, call))
    grads = new_gradients(bank, operands, call, streams, gradient_bank)
    if call.shape.rows == 0 or call.longest == 0:
        record_run("sdm_write_read_backward", None)
        return grads._replace(memory=gradient_bank.to(bank.dtype))
    held = bank.detach().contiguous() if layout.copied else bank.detach()
    streams = {name: tensor.contiguous() for name, tensor in streams.items()}
    kept = saved if saved.data_ptr() % LOAD_BYTES == 0 else saved.clone()
    bound = bind_backward(
        held, operands, call, streams, layout, kept, aligned_gradient(grad_readings, bank), grads
    )
    replayed = bound.plan.run(current_stream(bank.get_device()))
    finish_bank(bank, held, layout)
    record_run("sdm_write_read_backward", bound.plan.plan, replayed)
    return grads._replace(memory=gradient_bank.to(bank.dtype))
