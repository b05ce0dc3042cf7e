"""Phase 1 of chunks on a backend: the emulator runs the planned launches, the GPU the public op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sdm_rt.cpu.phase1 import Phase1
from sdm_rt.ops.phase1_launch import phase1_operands, phase1_result, phase1_shape
from sdm_rt.ops.write_read_launch import allocate
from sdm_rt.plan.chunks import plan_phase1_forward
from sdm_rt.plan.forward import forward_constants
from sdm_rt.plan.launch import Launch
from tests.emulator.harness import Call, Replacement, run
from tests.kernels.backends import Backend, device_model
from tests.problems import Problem, make_problem

__all__ = ["Chunks", "make_chunks", "phase1", "phase1_oracle"]


@dataclass(frozen=True)
class Chunks:
    """Inputs of one call; indices are slots of the chunk's own stream."""

    k_idx: Tensor  # [N, C, W]
    q_idx: Tensor  # [N, C, R]
    k_val: Tensor
    q_val: Tensor
    g: Tensor  # [N, C, 1] or [N, C, W]
    slots: int
    lengths: Tensor | None = None  # [N]

    def inputs(self) -> dict[str, Tensor]:
        """The op's positional arguments by name."""
        return {name: getattr(self, name) for name in ("k_idx", "q_idx", "k_val", "q_val", "g")}

    def tensors(self) -> dict[str, Tensor]:
        """All its tensors by name."""
        return self.inputs() | ({} if self.lengths is None else {"lengths": self.lengths})


def make_chunks(
    N: int,
    C: int,
    W: int,
    R: int,
    S: int,
    dtype: torch.dtype = torch.float32,
    *,
    lengths: Sequence[int] | None = None,
    **options: object,
) -> Chunks:
    """Random chunks; ``options`` are those of `tests.problems.make_problem`."""
    problem: Problem = make_problem(N, C, W, R, 1, S, lengths=lengths, **options).cast(dtype)  # type: ignore[arg-type]
    first = (torch.arange(N) * S)[:, None, None]
    return Chunks(
        k_idx=problem.k_idx - first,
        q_idx=problem.q_idx - first,
        k_val=problem.k_val,
        q_val=problem.q_val,
        g=problem.g,
        slots=S,
        lengths=None if lengths is None else torch.tensor(lengths),
    )


def _payload(k_idx: Tensor, q_idx: Tensor, slots: int, length: int) -> list[int]:
    """The sorted entries of one chunk, by a sort of tuples."""
    C = len(k_idx)
    present, absent = [], []
    for token in range(C):
        for query, row in ((0, k_idx[token]), (1, q_idx[token])):
            for lane, slot in enumerate(row.tolist()):
                real = token < length and 0 <= slot < slots
                (present if real else absent).append((slot, token, query, lane))
    present.sort()
    codes, seen, owned = [], set(), set()
    for slot, token, query, lane in present:
        head = slot not in seen
        owner = not query and (slot, token) not in owned
        seen.add(slot)
        if not query:
            owned.add((slot, token))
        codes.append(lane | token << 8 | query << 16 | 1 << 17 | head << 18 | owner << 19)
    codes += [lane | token << 8 | query << 16 for _, token, query, lane in absent]
    return codes + [0] * (-len(codes) % 16)


def _flags(payload: list[int], C: int, W: int) -> tuple[Tensor, Tensor]:
    """Last and only writes of their slots, [C, W], read off the sorted entries."""
    last, only = torch.zeros(2, C, W, dtype=torch.bool)
    groups: list[list[tuple[int, int]]] = []
    for code in payload:
        if code >> 18 & 1:
            groups.append([])
        if code >> 17 & 1 and not code >> 16 & 1:
            groups[-1].append((code >> 8 & 255, code & 255))
    for group in groups:
        if group:
            last[group[-1]] = True
            only[group[-1]] = len(group) == 1
    return last, only


def _dense(idx: Tensor, values: Tensor, slots: int) -> Tensor:
    return values.new_zeros(idx.shape[0], slots).scatter_add(1, idx, values)


def phase1_oracle(chunks: Chunks) -> Phase1:
    """Each output by its formula in float64, with one column a slot; gates without NaN."""
    found = []
    N, C, W = chunks.k_idx.shape
    for n in range(N):
        length = C if chunks.lengths is None else int(chunks.lengths[n])
        payload = _payload(chunks.k_idx[n], chunks.q_idx[n], chunks.slots, length)
        real = (torch.arange(C) < length)[:, None]
        k_here, q_here = (
            real & (idx[n] >= 0) & (idx[n] < chunks.slots) for idx in (chunks.k_idx, chunks.q_idx)
        )
        k_idx, q_idx = chunks.k_idx[n].where(k_here, 0).long(), chunks.q_idx[n].where(q_here, 0).long()
        k_val, q_val = (
            chunks.k_val[n].double().where(k_here, 0.0),
            chunks.q_val[n].double().where(q_here, 0.0),
        )
        owner = torch.zeros(C, W, dtype=torch.bool)
        for code in payload:
            if code >> 19 & 1:
                owner[code >> 8 & 255, code & 255] = True
        gates = chunks.g[n].double().expand(C, W)
        erase = owner & gates.isneginf()
        prefix = _dense(k_idx, gates.where(owner & ~erase, 0.0), chunks.slots).cumsum(0)
        erasures = _dense(k_idx, erase.double(), chunks.slots).cumsum(0)

        def decay(log: Tensor, erased: Tensor) -> Tensor:
            # Below the normal float32 range it is 0 by definition.
            exp = log.exp().where(log.exp() >= torch.finfo(torch.float32).tiny, 0.0)
            return exp.where(erased == 0, 0.0)

        to = decay(prefix, erasures)
        log_to = prefix.where(erasures == 0, -torch.inf)
        log_after = (prefix[-1] - prefix).where(erasures[-1] == erasures, -torch.inf)
        causal = torch.ones(C, C, dtype=torch.bool).tril()[..., None]
        between = decay(prefix[:, None] - prefix, erasures[:, None] - erasures).where(causal, 0.0)
        keys, queries = _dense(k_idx, k_val, chunks.slots), _dense(q_idx, q_val, chunks.slots)
        last, only = _flags(payload, C, W)
        found.append(
            Phase1(
                payload=torch.tensor(payload, dtype=torch.int32),
                log_k=log_to.gather(1, k_idx).where(k_here, 0.0),
                log_q=log_to.gather(1, q_idx).where(q_here, 0.0),
                rex=log_after.gather(1, k_idx).where(k_here, 0.0),
                cpe=to[-1].expand(C, -1).gather(1, k_idx).where(k_here, 0.0),
                k_eff=k_val * to.gather(1, k_idx),
                q_w=q_val * to.gather(1, q_idx),
                a=torch.einsum("is,js,ijs->ij", keys, keys, between).tril(-1),
                qk=torch.einsum("is,js,ijs->ij", queries, keys, between).tril(),
                last=last,
                only=only,
            )
        )
    return Phase1(*(torch.stack(parts) for parts in zip(*found, strict=True)))


def phase1(
    backend: Backend, chunks: Chunks, *, seed: int = 0, replacements: Sequence[Replacement] = ()
) -> tuple[Phase1, int]:
    """Run Phase 1; also the number of repeated writes. ``seed`` is the emulator's order of threads."""
    if backend == "gpu":
        from sdm_rt import phase1_forward, repeated_write_slots

        repeated_write_slots()
        lengths = None if chunks.lengths is None else chunks.lengths.cuda()
        inputs = {name: tensor.cuda() for name, tensor in chunks.inputs().items()}
        result = phase1_forward(**inputs, num_memory_slots=chunks.slots, lengths=lengths)
        return Phase1(*(tensor.cpu() for tensor in result)), repeated_write_slots()
    shape = phase1_shape(chunks.k_idx, chunks.q_idx, chunks.k_val, chunks.g, chunks.slots)
    plan = plan_phase1_forward(shape, device_model(backend))
    buffers = allocate(plan.buffers, torch.device("cpu"))
    repeats = torch.zeros(1, dtype=torch.int64)
    values = {
        **dict.fromkeys(argument.name for launch in plan.kernels() for argument in launch.arguments),
        **phase1_operands(**chunks.inputs(), lengths=chunks.lengths),
        **buffers,
        **forward_constants(plan),
        "repeats": repeats,
        "shared_bank": 1,
        "wide": 1,
        "slab_step": 0,
    }
    calls = []
    for _, launch in plan.launches():
        assert isinstance(launch, Launch)
        calls.append(Call(launch, {argument.name: values[argument.name] for argument in launch.arguments}))
    results = [buffers[name] for name in (*Phase1._fields[:-2], "flags")]
    outputs = {tensor.data_ptr() for tensor in results}
    scratch = [tensor for tensor in buffers.values() if tensor.data_ptr() not in outputs]
    run(calls, outputs=results, scratch=scratch, seed=seed, replacements=replacements)
    return phase1_result(buffers), int(repeats)
