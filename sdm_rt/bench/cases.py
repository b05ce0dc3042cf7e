"""The cases of the speed comparison, by name, and their random inputs (docs/performance.md)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sdm_rt.plan.shapes import WriteReadShape

__all__ = ["CASES", "Case", "Inputs", "make_inputs", "shape_of"]


@dataclass(frozen=True)
class Case:
    """One shape of the write-read op.

    Parameters
    ----------
    streams, tokens, chunk, lanes, head_dim, slots : int
        P, T, C, W = R, D, S.
    dtype : torch.dtype
        Of the bank.
    hot : bool
        Whether a quarter of each token's slots comes from 256 of the S.
    snapshot : str
        The snapshot mode of training.
    """

    streams: int
    tokens: int
    chunk: int
    lanes: int
    head_dim: int
    slots: int
    dtype: torch.dtype = torch.bfloat16
    hot: bool = False
    snapshot: str = "none"


_FLAGSHIP = Case(2, 32768, 64, 64, 1024, 65536)

CASES: dict[str, Case] = {
    "small": Case(1, 2048, 64, 32, 1024, 4096),
    "flagship": _FLAGSHIP,
    "flagship hot": replace(_FLAGSHIP, hot=True),
    "flagship fp8": replace(_FLAGSHIP, snapshot="fp8"),
    "flagship int4": replace(_FLAGSHIP, snapshot="int4"),
    "batch": Case(8, 4096, 256, 128, 1024, 65536),
    "7B": Case(4, 8192, 128, 128, 1024, 65536),
    "narrow": Case(16, 4096, 64, 32, 128, 16384),
    "float32": Case(2, 4096, 64, 64, 512, 65536, dtype=torch.float32),
    "many streams": Case(64, 1024, 64, 32, 64, 4096),
}


def shape_of(case: Case, training: bool) -> WriteReadShape:
    """Return what plans read of a case: of a call without gradients, or of one that a backward follows."""
    return WriteReadShape(
        streams=case.streams,
        tokens=case.tokens,
        chunk=case.chunk,
        writes=case.lanes,
        reads=case.lanes,
        head_dim=case.head_dim,
        slots=case.slots,
        bank_dtype=str(case.dtype).removeprefix("torch."),
        snapshot=case.snapshot if training else "none",
        training=training,
    )


@dataclass(frozen=True)
class Inputs:
    """Arguments of a call, on one device."""

    memory: Tensor  # [P*S, D]
    k_idx: Tensor  # [P, T, W]
    k_val: Tensor
    v: Tensor  # [P, T, D]
    beta: Tensor  # [P, T, 1]
    g: Tensor  # [P, T, 1]
    q_idx: Tensor  # [P, T, R]
    q_val: Tensor
    grad_readings: Tensor  # [P*T, D]

    def tokens(self) -> tuple[Tensor, ...]:
        """Return the token tensors in the op's order."""
        return self.k_idx, self.k_val, self.v, self.beta, self.g, self.q_idx, self.q_val


def _slots(case: Case, draw: torch.Generator) -> Tensor:
    """Return slots (a_t + i s_t) mod S with random a_t and odd random s_t: distinct within a token."""
    shape = (case.streams, case.tokens, 1)

    def run(lanes: int, first: int, slots: int) -> Tensor:
        start = torch.randint(slots, shape, generator=draw, device=draw.device)
        stride = 2 * torch.randint(max(slots // 2, 1), shape, generator=draw, device=draw.device) + 1
        return first + (start + torch.arange(lanes, device=draw.device) * stride) % slots

    if not case.hot:
        return run(case.lanes, 0, case.slots)
    hot = case.lanes // 4
    # The other slots come from the upper half, so that no token meets a hot slot twice.
    return torch.cat([run(hot, 0, 256), run(case.lanes - hot, case.slots // 2, case.slots // 2)], dim=2)


def make_inputs(case: Case, device: torch.device, seed: int = 0) -> Inputs:
    """Draw the inputs of a case; indices int64, beta and g float32, all else in the bank's dtype."""
    draw = torch.Generator(device=device).manual_seed(seed)
    P, T, W, D = case.streams, case.tokens, case.lanes, case.head_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device=device)

    rows = case.slots * torch.arange(P, device=device).view(P, 1, 1)
    return Inputs(
        memory=normal(P * case.slots, D).to(case.dtype),
        k_idx=_slots(case, draw) + rows,
        k_val=normal(P, T, W).softmax(-1).to(case.dtype),
        v=normal(P, T, D).to(case.dtype),
        beta=normal(P, T, 1).sigmoid(),
        g=-0.1 * torch.rand((P, T, 1), generator=draw, device=device),
        q_idx=_slots(case, draw) + rows,
        q_val=normal(P, T, W).softmax(-1).to(case.dtype),
        grad_readings=normal(P * T, D).to(case.dtype),
    )
