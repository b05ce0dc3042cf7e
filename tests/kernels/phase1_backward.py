"""Phase-1 backward of chunks: its definition in dense float64 tensors, and its runs on a backend.

The definition shares nothing with the product: a chunk's sums over pairs of entries become sums over tokens
and slots, x[t, s] being the gate of the owner entry of slot s at token t.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from sdm_rt.cpu import phase1 as forward_definition
from sdm_rt.ops.phase1_backward import phase1_backward_operands, phase1_backward_shape
from sdm_rt.ops.write_read_launch import allocate
from sdm_rt.plan.launch import Launch
from sdm_rt.plan.phase1_backward import phase1_backward_constants, plan_phase1_backward
from tests.emulator.build import BUILDS, BuildKind
from tests.emulator.harness import Call, run
from tests.kernels.backends import Backend, device_model
from tests.kernels.phase1 import Chunks
from tests.tolerances import Tolerance

__all__ = [
    "GRADIENTS",
    "ROUNDED",
    "Gradients",
    "backward_definition",
    "make_gradients",
    "op_arguments",
    "phase1_backward",
    "planned_phase1_backward",
]

GRADIENTS = ("grad_k_val", "grad_q_val", "grad_g")

# Float32 results have compensated sums; what is left are roundings of factors. Halves are rounded once.
ROUNDED = {
    torch.float32: Tolerance(1e-6, 1.2e-38, "factors of a term and exp are rounded, sums are compensated"),
    torch.bfloat16: Tolerance(3e-3, 1.2e-38, "one rounding: unit roundoff 3.9e-3, rms half of it"),
    torch.float16: Tolerance(4e-4, 6e-8, "one rounding: unit roundoff 4.9e-4, rms half of it"),
}


@dataclass(frozen=True)
class Gradients:
    """Gradients of what Phase 1 makes; float32."""

    d_a: Tensor  # [N, C, C], NaN on and above the diagonal
    d_qk: Tensor  # [N, C, C], NaN above the diagonal
    d_k_eff: Tensor  # [N, C, W]
    d_k_pd: Tensor  # [N, C, W]
    d_q_w: Tensor  # [N, C, R]

    def tensors(self) -> dict[str, Tensor]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def make_gradients(N: int, C: int, W: int, R: int, seed: int = 0) -> Gradients:
    """Normal gradients; what nobody may read is NaN."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((C, C), (C, C), (C, W), (C, W), (C, R))
    d_a, d_qk, *rest = (torch.randn(N, *shape, generator=generator) for shape in shapes)
    above = torch.ones(C, C, dtype=torch.bool)
    return Gradients(
        d_a.masked_fill(above.triu(), torch.nan), d_qk.masked_fill(above.triu(1), torch.nan), *rest
    )


def _dense(idx: Tensor, values: Tensor, slots: int) -> Tensor:
    return values.new_zeros(idx.shape[0], slots).scatter_add(1, idx, values)


def _decay(log: Tensor, erasures: Tensor) -> Tensor:
    """exp of finite sums; 0 across an erasure, and below the normal float32 range by definition."""
    decay = log.exp()
    return decay.where((erasures == 0) & (decay >= torch.finfo(torch.float32).tiny), 0.0)


def backward_definition(
    chunks: Chunks, gradients: Gradients, d_tot: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """grad_k_val [N, C, W], grad_q_val [N, C, R] and grad_x [N, C, W] in float64; ``d_tot`` is [N, S]."""
    N, C, _ = chunks.k_idx.shape
    lengths = [C] * N if chunks.lengths is None else chunks.lengths.tolist()
    found = []
    for n in range(N):
        inputs = {name: x[n] for name, x in chunks.inputs().items()}
        given = {name: x[n].double() for name, x in gradients.tensors().items()}
        total = torch.zeros(chunks.slots, dtype=torch.float64) if d_tot is None else d_tot[n].double()
        found.append(_of_chunk(**inputs, **given, d_tot=total, slots=chunks.slots, length=lengths[n]))
    grad_k, grad_q, grad_x = (torch.stack(parts) for parts in zip(*found, strict=True))
    return grad_k, grad_q, grad_x


def _of_chunk(
    k_idx: Tensor,
    q_idx: Tensor,
    k_val: Tensor,
    q_val: Tensor,
    g: Tensor,
    d_a: Tensor,
    d_qk: Tensor,
    d_k_eff: Tensor,
    d_k_pd: Tensor,
    d_q_w: Tensor,
    d_tot: Tensor,
    slots: int,
    length: int,
) -> tuple[Tensor, Tensor, Tensor]:
    C = k_idx.shape[0]
    real = (torch.arange(C) < length)[:, None]
    k_here, q_here = (real & (idx >= 0) & (idx < slots) for idx in (k_idx, q_idx))
    k_idx, q_idx = k_idx.where(k_here, 0).long(), q_idx.where(q_here, 0).long()
    k_val, q_val = k_val.double().where(k_here, 0.0), q_val.double().where(q_here, 0.0)
    same = (k_idx[:, :, None] == k_idx[:, None, :]) & k_here[:, None, :]
    owner = k_here & ~same.tril(-1).any(2)
    gates = g.double().expand_as(k_val)
    erase = owner & gates.isneginf()
    prefix = _dense(k_idx, gates.where(owner & ~erase, 0.0), slots).cumsum(0)
    erasures = _dense(k_idx, erase.double(), slots).cumsum(0)
    owners = _dense(k_idx, owner.double(), slots).cumsum(0)
    causal = torch.ones(C, C, dtype=torch.bool).tril()
    # Above the diagonal a sum of gates runs backwards and may overflow.
    log_between = (prefix[:, None] - prefix).where(causal[..., None], 0.0)
    between = _decay(log_between, erasures[:, None] - erasures).where(causal[..., None], 0.0)
    owned = between.where(owners[:, None] != owners, 0.0)
    to, after = _decay(prefix, erasures), _decay(prefix[-1] - prefix, erasures[-1] - erasures)
    keys, queries = _dense(k_idx, k_val, slots), _dense(q_idx, q_val, slots)
    d_a, d_qk = d_a.where(causal.tril(-1), 0.0), d_qk.where(causal, 0.0)

    def sums(decay: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return (
            torch.einsum("ij,js,ijs->is", d_a, keys, decay),
            torch.einsum("ij,is,ijs->js", d_a, keys, decay),
            torch.einsum("ij,is,ijs->js", d_qk, queries, decay),
            torch.einsum("ij,js,ijs->is", d_qk, keys, decay),
        )

    row, col, kvqk, qv = sums(between)
    of_start = d_k_eff * to.gather(1, k_idx)
    of_end = d_k_pd * after.gather(1, k_idx)
    of_read = d_q_w * to.gather(1, q_idx)
    grad_k = (row + col + kvqk).gather(1, k_idx) + of_start + of_end
    grad_q = qv.gather(1, q_idx) + of_read
    row, col, kvqk, qv = sums(owned)
    dl = keys * (row - col - kvqk) + queries * qv
    dl = dl + _dense(k_idx, k_val * of_start, slots) + _dense(q_idx, q_val * of_read, slots)
    dr = _dense(k_idx, k_val * of_end, slots)
    here_on = dl.flip(0).cumsum(0).flip(0)
    before = torch.cat([torch.zeros_like(dr[:1]), dr[:-1].cumsum(0)])
    grad_x = (here_on + before + d_tot).gather(1, k_idx)
    return grad_k.where(k_here, 0.0), grad_q.where(q_here, 0.0), grad_x.where(owner & ~erase, 0.0)


def op_arguments(chunks: Chunks, gradients: Gradients) -> dict[str, Tensor]:
    """The op's arguments by name."""
    made, _ = forward_definition.phase1(**chunks.inputs(), slots=chunks.slots, lengths=chunks.lengths)
    forward = {name: getattr(made, name) for name in ("payload", "log_k", "log_q", "rex")}
    inputs = {name: getattr(chunks, name).contiguous() for name in ("k_val", "q_val", "g")}
    return forward | inputs | gradients.tensors()


def planned_phase1_backward(
    chunks: Chunks, gradients: Gradients, backend: Backend = "emulator", *, det: bool = False
) -> tuple[list[Call], dict[str, Any], list[Tensor]]:
    """The planned launches of the op, every argument by name, and the scratch."""
    arguments = op_arguments(chunks, gradients)
    shape = phase1_backward_shape(**{name: arguments[name] for name in ("k_val", "q_val", "g")})
    plan = plan_phase1_backward(shape, device_model(backend), det)
    buffers = allocate(plan.buffers, torch.device("cpu"))
    values: dict[str, Any] = {
        **dict.fromkeys(argument.name for launch in plan.kernels() for argument in launch.arguments),
        **phase1_backward_operands(arguments),
        **buffers,
        **phase1_backward_constants(plan),
        "shared_bank": 1,
        "wide": 0,
        "slab_step": 0,
    }
    calls = []
    for _, launch in plan.launches():
        assert isinstance(launch, Launch)
        calls.append(Call(launch, {argument.name: values[argument.name] for argument in launch.arguments}))
    return calls, values, [buffer for name, buffer in buffers.items() if name not in GRADIENTS]


def phase1_backward(
    backend: Backend,
    chunks: Chunks,
    gradients: Gradients,
    *,
    det: bool = False,
    seed: int = 0,
    builds: Sequence[BuildKind] = BUILDS,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the op: its launches on the emulator, in the order of threads of ``seed``, or the op on the GPU."""
    if backend == "gpu":
        import sdm_rt

        op = sdm_rt.phase1_backward_det if det else sdm_rt.phase1_backward
        made = op(**{name: x.cuda() for name, x in op_arguments(chunks, gradients).items()})
        return made[0].cpu(), made[1].cpu(), made[2].cpu()
    calls, values, scratch = planned_phase1_backward(chunks, gradients, det=det)
    outputs = [values[name] for name in GRADIENTS]
    run(calls, outputs=outputs, scratch=scratch, seed=seed, builds=builds)
    return outputs[0], outputs[1], outputs[2]
