"""Random problems for the write-read op, their casts and packing, and their runs by op and oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from tests import oracle

__all__ = [
    "GATES",
    "GRADIENTS",
    "WRITES",
    "Problem",
    "Result",
    "by_token",
    "make_problem",
    "run_op",
    "run_oracle",
    "with_gaps",
]

GRADIENTS = ("memory", "k_val", "v", "beta", "g", "q_val")
GATES = ("zero", "mild", "-50", "-1e4", "-inf", "some -inf", "some positive", "all kinds")
WRITES = ("distinct", "repeats", "hot", "one slot")


@dataclass(frozen=True)
class Problem:
    """Inputs of one call; a token past its stream's length holds NaN and indices outside every bank."""

    memory: Tensor  # [P*S, D]
    k_idx: Tensor  # [P, T, W] bank rows
    k_val: Tensor  # [P, T, W]
    v: Tensor  # [P, T, D]
    beta: Tensor  # [P, T, 1]
    g: Tensor  # [P, T, 1] or [P, T, W]
    q_idx: Tensor  # [P, T, R] bank rows
    q_val: Tensor  # [P, T, R]
    grad_readings: Tensor  # [P, T, D]
    grad_bank: Tensor  # [P*S, D]
    slots: int  # of a stream; 0: all streams use one bank
    lengths: tuple[int, ...] | None = None

    @property
    def streams(self) -> int:
        return self.k_idx.shape[0]

    @property
    def tokens(self) -> int:
        return self.k_idx.shape[1]

    def inputs(self) -> dict[str, Tensor]:
        """The op's tensor arguments by name, without the bank."""
        names = ("k_idx", "k_val", "v", "beta", "g", "q_idx", "q_val")
        return {name: getattr(self, name) for name in names}

    def options(self) -> dict[str, object]:
        """The op's keyword arguments that describe the streams."""
        options: dict[str, object] = {"num_memory_slots": self.slots, "num_parallel": self.streams}
        if self.slots == 0 and self.streams > 1:
            options["shared_bank"] = True
        if self.lengths is not None:
            options["lengths"] = torch.tensor(self.lengths)
        return options

    def cast(self, dtype: torch.dtype, gates: torch.dtype | None = None) -> Problem:
        """The same problem in the dtype of a bank; beta and g in ``gates`` (at least float32)."""
        gates = gates or torch.promote_types(dtype, torch.float32)
        change = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor) and value.is_floating_point():
                change[field.name] = value.to(gates if field.name in ("beta", "g") else dtype)
        return replace(self, **change)

    def tokens_of(self, start: int, stop: int) -> Problem:
        """Tokens start..stop of every stream; without lengths."""
        assert self.lengths is None
        change = {name: x[:, start:stop] for name, x in self.inputs().items()}
        return replace(self, **change, grad_readings=self.grad_readings[:, start:stop])

    def streams_of(self, start: int, stop: int) -> Problem:
        """Streams start..stop with their own rows, indices moved to the smaller bank."""
        rows = slice(start * self.slots, stop * self.slots)
        change = {name: x[start:stop] for name, x in self.inputs().items()}
        change["k_idx"] = change["k_idx"] - start * self.slots
        change["q_idx"] = change["q_idx"] - start * self.slots
        return replace(
            self,
            **change,
            memory=self.memory[rows],
            grad_readings=self.grad_readings[start:stop],
            grad_bank=self.grad_bank[rows],
            lengths=None if self.lengths is None else self.lengths[start:stop],
        )

    def real(self) -> Tensor:
        """Which tokens are real, bool [P, T]."""
        lengths = torch.tensor(self.lengths if self.lengths is not None else [self.tokens] * self.streams)
        return torch.arange(self.tokens)[None, :] < lengths[:, None]

    def pack(self, x: Tensor) -> Tensor:
        """[P, T, *] to the real tokens alone, [sum T, *]."""
        return x[self.real()]

    def cu_seqlens(self) -> Tensor:
        """Packed offsets, int64 [P + 1]."""
        counts = self.real().sum(dim=1)
        return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


@dataclass
class Result:
    """What one forward and backward produced; readings and gradients in the padded layout."""

    readings: Tensor
    bank: Tensor
    gradients: dict[str, Tensor]


def _indices(generator: torch.Generator, writes: str, shape: tuple[int, int, int], slots: int) -> Tensor:
    P, T, W = shape
    if writes == "one slot":
        return torch.zeros(shape, dtype=torch.long)
    pool = min(slots, W + 1) if writes == "hot" else slots
    if writes == "repeats":
        return torch.randint(pool, shape, generator=generator)
    assert pool >= W, f"{W} distinct slots do not fit {pool}"
    return torch.rand(P, T, pool, generator=generator).argsort(dim=-1)[..., :W]


def _gates(generator: torch.Generator, kind: str, shape: tuple[int, int, int]) -> Tensor:
    mild = -0.5 * torch.rand(shape, generator=generator, dtype=torch.float64)
    choice = torch.randint(8, shape, generator=generator)
    if kind == "mild":
        return mild
    if kind == "some -inf":
        return mild.masked_fill(choice == 0, -torch.inf)
    if kind == "some positive":
        return torch.where(choice < 2, -0.5 * mild, mild)
    if kind == "all kinds":
        values = torch.tensor([0.0, -0.0, -0.1, 0.2, -3.0, -50.0, -1e4, -torch.inf], dtype=torch.float64)
        return values[choice]
    return torch.full(shape, 0.0 if kind == "zero" else float(kind), dtype=torch.float64)


def make_problem(
    P: int,
    T: int,
    W: int,
    R: int,
    D: int,
    S: int,
    *,
    seed: int = 0,
    gates: str = "mild",
    gate_per_write: bool = False,
    beta: str = "random",
    writes: str = "distinct",
    signed_weights: bool = False,
    lengths: Sequence[int] | None = None,
) -> Problem:
    """A float64 problem.

    Parameters
    ----------
    gates, writes : str
        One of GATES, one of WRITES: "distinct" slots within a token, "repeats" allowed, "hot": every token
        writes W of the same W + 1 slots, "one slot": every lane of every token writes slot 0.
    beta : {"random", "zero", "one"}
    signed_weights : bool
        Weights of one norm and both signs in place of softmax weights.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def weights(n: int) -> Tensor:
        raw = normal(P, T, n)
        unit = torch.nn.functional.normalize(raw, dim=-1) if signed_weights else raw.softmax(dim=-1)
        # Short of 1: a write of weight 1 with beta 1 replaces its row; its gradients are pure cancellation.
        return 0.75 * unit

    strengths = {
        "random": torch.rand(P, T, 1, generator=generator, dtype=torch.float64),
        "zero": torch.zeros(P, T, 1, dtype=torch.float64),
        "one": torch.ones(P, T, 1, dtype=torch.float64),
    }
    first_row = (torch.arange(P) * S)[:, None, None]
    problem = Problem(
        memory=normal(P * S, D),
        k_idx=first_row + _indices(generator, writes, (P, T, W), S),
        k_val=weights(W),
        v=normal(P, T, D),
        beta=strengths[beta],
        g=_gates(generator, gates, (P, T, W if gate_per_write else 1)),
        q_idx=first_row + torch.randint(S, (P, T, R), generator=generator),
        q_val=weights(R),
        grad_readings=normal(P, T, D),
        grad_bank=normal(P * S, D),
        slots=S,
        lengths=None if lengths is None else tuple(lengths),
    )
    padding = ~problem.real()
    for name, x in problem.inputs().items():
        if x.is_floating_point():
            x[padding] = torch.nan
        else:
            x[padding] = -(2**40) if name == "k_idx" else P * S + 2**40
    problem.grad_readings[padding] = torch.nan
    return problem


def _leaves(problem: Problem) -> dict[str, Tensor]:
    return {name: getattr(problem, name).detach().clone().requires_grad_() for name in GRADIENTS}


def run_oracle(
    problem: Problem, *, bank_gradient: bool, round_rows: torch.dtype | None = None, round_every: int = 1
) -> Result:
    """Forward and backward of the oracle in float64, from the problem's own (perhaps rounded) values."""
    wide = problem.cast(torch.float64)
    leaves = _leaves(wide)
    arguments = {name: leaves.get(name, x) for name, x in wide.inputs().items()}
    readings, bank = oracle.write_read(
        leaves["memory"],
        **arguments,
        slots=wide.slots,
        lengths=wide.lengths,
        round_rows=round_rows,
        round_every=round_every,
    )
    real = wide.real()
    loss = (readings[real] * wide.grad_readings[real]).sum()
    if bank_gradient:
        loss = loss + (bank * wide.grad_bank).sum()
    loss = loss + 0.0 * leaves["memory"].sum()  # Differentiable even where every stream is empty.
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    gradients = {
        name: torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), found, strict=True)
    }
    return Result(readings.detach(), bank.detach(), gradients)


def run_op(problem: Problem, *, return_final_bank: bool, packed: bool = False, **options: object) -> Result:
    """Forward and backward of ``sdm_write_read``; packed calls come back in the padded layout.

    The functional form adds the gradient ``grad_bank`` into its final bank. Checked on the way: the
    functional form leaves the caller's bank alone, and the backward of the in-place form restores it, bit for
    bit.
    """
    from sdm_rt import sdm_write_read
    from tests.tolerances import assert_same_bits

    leaves = _leaves(problem)
    arguments = {name: leaves.get(name, x) for name, x in problem.inputs().items()}
    keywords = problem.options() | options
    if packed:
        arguments = {name: problem.pack(x) for name, x in arguments.items()}
        keywords.pop("lengths", None)
        keywords["cu_seqlens"] = problem.cu_seqlens()
    out = sdm_write_read(leaves["memory"], **arguments, return_final_bank=return_final_bank, **keywords)
    grad_readings = problem.pack(problem.grad_readings) if packed else problem.grad_readings.flatten(0, 1)
    if return_final_bank:
        readings, bank = out
        assert_same_bits("the caller's bank", leaves["memory"], problem.memory)
        torch.autograd.backward([readings, bank], [grad_readings, problem.grad_bank])
    else:
        readings, bank = out, leaves["memory"].detach().clone()
        readings.backward(grad_readings)
        assert_same_bits("the restored bank", leaves["memory"], problem.memory)
    padded = readings.new_zeros(problem.grad_readings.shape)
    if packed:
        padded[problem.real()] = readings.detach()
    else:
        padded.copy_(readings.detach().view_as(padded))
    gradients = {}
    for name, leaf in leaves.items():
        assert leaf.grad is not None, f"no gradient of {name}"
        assert leaf.grad.dtype == leaf.dtype, (
            f"gradient of {name} is {leaf.grad.dtype}, its input {leaf.dtype}"
        )
        gradients[name] = leaf.grad
    return Result(padded, bank.detach(), gradients)


def with_gaps(x: Tensor) -> Tensor:
    """The same values between columns that belong to others, as a fused projection gives them."""
    wide = x.new_zeros(*x.shape[:-1], x.shape[-1] + 4)
    wide[..., 1 : 1 + x.shape[-1]] = x
    return wide[..., 1 : 1 + x.shape[-1]]


def by_token(x: Tensor) -> Tensor:
    """[P, T, *] with the streams of a token side by side, as a layer's heads are: no view is [rows, *]."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)
