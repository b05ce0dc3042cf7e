"""Phase 1 of chunks on a GPU: three launches over all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from sdm_rt.cpu.phase1 import Phase1
from sdm_rt.ops.bound_plans import bound_plan
from sdm_rt.ops.counters import device_repeats, record_dispatch
from sdm_rt.ops.plan_inputs import BANK_NAMES
from sdm_rt.ops.write_read_launch import allocate, pointers_of
from sdm_rt.plan.chunks import plan_phase1_forward
from sdm_rt.plan.forward import forward_constants
from sdm_rt.plan.shapes import WriteReadShape
from sdm_rt.runtime.interop import current_stream

__all__ = ["phase1_on_gpu", "phase1_operands", "phase1_result", "phase1_shape"]

LAST, ONLY = 1, 2  # bits of the flags (kernels_cu/phase1_scan.cu)


def phase1_shape(k_idx: Tensor, q_idx: Tensor, k_val: Tensor, g: Tensor, slots: int) -> WriteReadShape:
    """Return what plans read of a call: every chunk a stream of its own."""
    N, C, W = k_idx.shape
    return WriteReadShape(
        streams=N,
        tokens=C,
        chunk=C,
        writes=W,
        reads=q_idx.shape[2],
        head_dim=1,
        slots=slots,
        bank_dtype=BANK_NAMES[k_val.dtype],
        index_dtype="int32" if k_idx.dtype == q_idx.dtype == torch.int32 else "int64",
        gates_per_write=g.shape[2] > 1,
    )


def phase1_operands(
    k_idx: Tensor, q_idx: Tensor, k_val: Tensor, q_val: Tensor, g: Tensor, lengths: Tensor | None
) -> dict[str, Tensor]:
    """Return the tensors as the kernels take them, with strengths of 0, which Phase 1 only hands on."""
    index = k_idx.dtype if k_idx.dtype == q_idx.dtype else torch.int64
    tensors = {"k_idx": k_idx.to(index), "q_idx": q_idx.to(index), "k_val": k_val, "q_val": q_val, "g": g}
    if lengths is not None:
        tensors["lengths"] = lengths
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    return contiguous | {"beta": g.new_zeros(g.shape[:2])}


def phase1_result(buffers: dict[str, Tensor]) -> Phase1:
    """Return the results among a plan's buffers."""
    flags = buffers["flags"]
    named = {name: buffers[name] for name in Phase1._fields if name not in ("last", "only")}
    return Phase1(**named, last=(flags & LAST) != 0, only=(flags & ONLY) != 0)


def phase1_on_gpu(
    k_idx: Tensor,
    q_idx: Tensor,
    k_val: Tensor,
    q_val: Tensor,
    g: Tensor,
    slots: int,
    lengths: Tensor | None,
) -> Phase1:
    """Run Phase 1 of checked chunks; see `sdm_rt.ops.phase1.phase1_forward`."""
    index = k_idx.get_device()
    shape = phase1_shape(k_idx, q_idx, k_val, g, slots)
    bound = bound_plan(plan_phase1_forward, shape, index, forward_constants)
    buffers = allocate(bound.plan.buffers, k_idx.device)
    tensors = {
        **phase1_operands(k_idx, q_idx, k_val, q_val, g, lengths),
        **buffers,
        "repeats": device_repeats(k_idx.device),
    }
    bound.set(
        {
            **pointers_of(bound.plan, tensors),
            "shared_bank": 1,  # every chunk numbers its slots from 0
            "wide": int(lengths is not None and lengths.dtype == torch.int64),
        }
    )
    bound.run(current_stream(index))
    record_dispatch({"op": "phase1_forward", "path": "gpu", "plan": bound.plan})
    return phase1_result(buffers)
