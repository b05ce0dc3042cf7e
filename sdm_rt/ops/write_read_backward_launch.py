"""The write-read backward on a GPU: a plan a shape, bound once a thread, over what the forward kept."""

from __future__ import annotations

import torch
from torch import Tensor

from sdm_rt.ops.bound_plans import bound_plan
from sdm_rt.ops.counters import record_dispatch
from sdm_rt.ops.write_read_call import Gradients, WriteReadCall
from sdm_rt.ops.write_read_launch import (
    BankLayout,
    covers_every_row,
    finish_bank,
    new_arena,
    operands_of,
    output_like,
    planned_shape,
    pointers_of,
    stream_numbers,
)
from sdm_rt.plan.backward import backward_constants, plan_backward
from sdm_rt.plan.buffer import Arena
from sdm_rt.plan.forward import kept_buffers
from sdm_rt.runtime.interop import current_stream

__all__ = ["aligned_gradient", "backward_on_gpu"]

LOAD_BYTES = 16


def aligned_gradient(grad_readings: Tensor, bank: Tensor) -> Tensor:
    """Return the gradient of the readings [rows, D] as the kernels take it: dense, whole loads apart."""
    dense = grad_readings.detach().to(bank.dtype).contiguous()
    return dense if dense.data_ptr() % LOAD_BYTES == 0 else dense.clone()


def _gradient_bank(bank: Tensor, grad_final: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the bank's gradient at the call's end, dense [rows, D], to walk back in place."""
    if grad_final is None:
        return torch.zeros(bank.shape, dtype=dtype, device=bank.device)
    return grad_final.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)


def backward_on_gpu(
    bank: Tensor,
    flat: dict[str, Tensor],
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
    flat, call, streams
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
    operands = operands_of(bank, flat)
    rows, D = call.shape.rows, bank.shape[1]
    wide = torch.float32 if call.grad_bank_fp32 else bank.dtype
    gradient_bank = _gradient_bank(bank, grad_final, wide)
    covered = covers_every_row(call, streams) and call.longest > 0
    W, R, gates = (operands[name].shape[1] for name in ("k_idx", "q_idx", "g"))
    grads = Gradients(
        memory=gradient_bank,
        k_val=output_like(bank, rows, W, covered, bank.dtype),
        v=output_like(bank, rows, D, covered, bank.dtype),
        beta=output_like(bank, rows, 1, covered, torch.float32),
        g=output_like(bank, rows, gates, covered, torch.float32),
        q_val=output_like(bank, rows, R, covered, bank.dtype),
    )
    if rows == 0 or call.longest == 0:
        return grads._replace(memory=gradient_bank.to(bank.dtype))
    planned = planned_shape(bank, operands, call, layout.alignment, training=True)
    bound = bound_plan(plan_backward, planned, bank.get_device(), backward_constants)
    plan = bound.plan
    held = bank.detach().contiguous() if layout.copied else bank.detach()
    streams = {name: tensor.contiguous() for name, tensor in streams.items()}
    readings = aligned_gradient(grad_readings, bank)
    scratch = Arena.of(plan.buffers)
    working = new_arena(scratch, bank.device)
    kept = saved if saved.data_ptr() % LOAD_BYTES == 0 else saved.clone()
    tensors = {
        "memory": held,
        "gradient_bank": gradient_bank,
        "grad_readings": readings,
        **{f"grad_{name}": grad for name, grad in grads._asdict().items() if name != "memory"},
        **operands,
        **streams,
    }
    bound.set(
        {
            **pointers_of(plan, tensors),
            **{
                name: address
                for name, address in Arena.of(kept_buffers(planned)).addresses(kept.data_ptr()).items()
                if name in bound.names
            },
            **scratch.addresses(working.data_ptr()),
            **stream_numbers(layout, call, streams),
        }
    )
    bound.run(current_stream(bank.get_device()))
    finish_bank(bank, held, layout)
    record_dispatch({"op": "sdm_write_read_backward", "path": "gpu", "schedule": "stepwise", "plan": plan})
    return grads._replace(memory=gradient_bank.to(bank.dtype))
