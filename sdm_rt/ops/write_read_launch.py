"""The write-read forward on a GPU: a plan a shape, bound once a thread, pointers on the way of a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from math import gcd

import torch
from torch import Tensor

from sdm_rt.errors import UnsupportedConfigurationError
from sdm_rt.ops.bound_plans import bound_plan
from sdm_rt.ops.counters import device_repeats, record_dispatch
from sdm_rt.ops.plan_inputs import BANK_NAMES, device_model
from sdm_rt.ops.write_read_call import WriteReadCall
from sdm_rt.plan.backward import plan_backward
from sdm_rt.plan.bound import BoundPlan
from sdm_rt.plan.buffer import Arena, Buffer
from sdm_rt.plan.column_slices import SCHEDULES
from sdm_rt.plan.forward import forward_constants, kept_arena, kept_buffers, plan_forward
from sdm_rt.plan.shapes import MAX_SLOTS, WriteReadShape
from sdm_rt.plan.step_plan import StepPlan
from sdm_rt.runtime.interop import current_stream

__all__ = [
    "BankLayout",
    "BoundCall",
    "allocate",
    "bind_forward",
    "covers_every_row",
    "finish_bank",
    "forward_on_gpu",
    "new_arena",
    "operands_of",
    "output_like",
    "planned_shape",
    "pointers_of",
    "record_run",
    "saved_bytes",
    "stream_numbers",
    "training_forward_on_gpu",
]

WORD_BYTES = 16
MAX_ROW_STRIDE = 2**32 - 1  # elements; kernels_cu/walk.cuh counts in words of a load
_PLANNERS = {schedule: partial(plan_forward, schedule=schedule) for schedule in (None, *SCHEDULES)}
BUFFER_DTYPES = {
    "uint8": torch.uint8,
    "int32": torch.int32,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class BankLayout:
    """How the kernels see a bank.

    Parameters
    ----------
    copied : bool
        Whether columns are strided, so that a contiguous copy is advanced and copied back.
    row_stride : int
        Elements from a row to the next.
    alignment : int
        Bytes, a power of two up to 16, that the start of every row is a multiple of.
    """

    copied: bool
    row_stride: int
    alignment: int

    @classmethod
    def of(cls, memory: Tensor) -> BankLayout:
        """Look at a bank [rows, D]; an UnsupportedConfigurationError where its rows lie too far apart."""
        rows, columns = memory.shape
        copied = columns > 1 and memory.stride(1) != 1
        row_stride = columns if copied or rows <= 1 else memory.stride(0)
        if row_stride > MAX_ROW_STRIDE:
            raise UnsupportedConfigurationError(
                f"memory: rows lie {row_stride:,} elements apart, the kernels count up to {MAX_ROW_STRIDE:,}"
            )
        start = 0 if copied else memory.data_ptr()
        return cls(copied, row_stride, gcd(WORD_BYTES, start, row_stride * memory.element_size()))


def planned_shape(
    memory: Tensor, operands: dict[str, Tensor], call: WriteReadCall, alignment: int, training: bool
) -> WriteReadShape:
    """Return what plans read of a call.

    Parameters
    ----------
    memory : Tensor
        The bank [rows, D].
    operands : dict of Tensor
        The token tensors as `operands_of` returns them.
    call : WriteReadCall
        The call beside its tensors.
    alignment : int
        As of `BankLayout`.
    training : bool
        Whether it saves what a backward needs.

    Raises
    ------
    UnsupportedConfigurationError
        For more slots a stream than the kernels can number.
    """
    shape = call.shape
    if shape.slots > MAX_SLOTS:
        raise UnsupportedConfigurationError(
            f"memory: {shape.slots} slots a stream are more than the kernels' {MAX_SLOTS}; use more streams "
            f"(heads)"
        )
    return _known_shape(call, *_sizes(memory, operands), alignment, training)


def _sizes(
    memory: Tensor, operands: dict[str, Tensor]
) -> tuple[torch.dtype, torch.dtype, int, int, int, bool]:
    k_idx, q_idx, gates = operands["k_idx"], operands["q_idx"], operands["g"]
    columns, writes, reads = memory.shape[1], k_idx.shape[-1], q_idx.shape[-1]
    return memory.dtype, k_idx.dtype, columns, writes, reads, gates.shape[-1] > 1


def _shape_of(
    call: WriteReadCall,
    bank: torch.dtype,
    index: torch.dtype,
    columns: int,
    writes: int,
    reads: int,
    gates_per_write: bool,
    alignment: int,
    training: bool,
) -> WriteReadShape:
    return WriteReadShape(
        streams=call.shape.streams,
        # The kernels' T is also the distance of padded streams.
        tokens=call.longest if call.shape.packed else call.shape.tokens,
        chunk=call.chunk_size,
        writes=writes,
        reads=reads,
        head_dim=columns,
        slots=max(call.shape.slots, 1),
        bank_dtype=BANK_NAMES[bank],
        gradient_bank_dtype="float32" if training and call.grad_bank_fp32 else BANK_NAMES[bank],
        index_dtype=str(index).removeprefix("torch."),
        gates_per_write=gates_per_write,
        snapshot=call.snapshot_quant if training else "none",
        training=training,
        alignment=alignment,
        shared_bank=training and call.shape.shared_bank and call.shape.streams > 1,
    )


_known_shape = lru_cache(maxsize=256)(_shape_of)


def operands_of(memory: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the token tensors as the kernels take them: contiguous, values in the bank's dtype."""
    index, other = tensors["k_idx"].dtype, tensors["q_idx"].dtype
    index = index if index == other else torch.int64
    wanted = {"k_idx": index, "q_idx": index, "beta": torch.float32, "g": torch.float32}
    operands = {}
    for name, tensor in tensors.items():
        dtype = wanted.get(name, memory.dtype)
        ready = tensor.dtype == dtype and tensor.is_contiguous()
        operands[name] = tensor if ready else tensor.detach().to(dtype).contiguous()
    return operands


def allocate(buffers: tuple[Buffer, ...], device: torch.device) -> dict[str, Tensor]:
    """Return the working memory of a plan, by name, from PyTorch's allocator."""
    return {
        buffer.name: torch.empty(buffer.shape, dtype=BUFFER_DTYPES[buffer.dtype], device=device)
        for buffer in buffers
    }


def pointers_of(plan: StepPlan, tensors: dict[str, Tensor]) -> dict[str, int]:
    """Return the address of every pointer argument of a plan; 0 for a tensor that the call does without."""
    return {name: tensors[name].data_ptr() if name in tensors else 0 for name in plan.pointer_names}


def new_arena(arena: Arena, device: torch.device) -> Tensor:
    """Return memory for buffers laid out in one block, from PyTorch's allocator."""
    return torch.empty(arena.bytes, dtype=torch.uint8, device=device)


def output_like(memory: Tensor, rows: int, columns: int, covered: bool, dtype: torch.dtype) -> Tensor:
    """Return an output [rows, columns]; zeros unless the kernels write every row."""
    make = memory.new_empty if covered else memory.new_zeros
    return make(rows, columns, dtype=dtype)


def covers_every_row(call: WriteReadCall, streams: dict[str, Tensor]) -> bool:
    """Return whether the chunks of a call reach every row of its token tensors."""
    return "cu_seqlens" not in streams and call.longest == call.shape.tokens


def stream_numbers(layout: BankLayout, call: WriteReadCall, streams: dict[str, Tensor]) -> dict[str, int]:
    """Return the numbers among the arguments that follow from a call's tensors."""
    return {
        "row_stride": layout.row_stride,
        "shared_bank": int(call.shape.shared_bank),
        "wide": int(any(tensor.dtype == torch.int64 for tensor in streams.values())),
    }


def forward_on_gpu(
    memory: Tensor, tensors: dict[str, Tensor], call: WriteReadCall, streams: dict[str, Tensor]
) -> Tensor:
    """Run a call that saves nothing.

    Parameters
    ----------
    memory : Tensor
        The bank [rows, D] on a GPU, advanced in place.
    tensors : dict of Tensor
        The token tensors by name, [P, T, *] or [rows, *], checked.
    call : WriteReadCall
        The call beside its tensors.
    streams : dict of Tensor
        ``lengths`` or ``cu_seqlens``, where given.

    Returns
    -------
    Tensor
        Readings [rows, D].
    """
    return _run_forward(memory, tensors, call, streams, training=False)[0]


def training_forward_on_gpu(
    memory: Tensor, tensors: dict[str, Tensor], call: WriteReadCall, streams: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Run a call that saves what its backward needs, in one block of bytes.

    Parameters are those of `forward_on_gpu`.

    Returns
    -------
    readings : Tensor
        [rows, D].
    saved : Tensor
        uint8 [bytes]: the buffers of `sdm_rt.plan.forward.kept_buffers`, laid out by `kept_arena`.
    """
    return _run_forward(memory, tensors, call, streams, training=True)


def saved_bytes(memory: Tensor, tensors: dict[str, Tensor], call: WriteReadCall) -> int:
    """Return the bytes that `training_forward_on_gpu` saves, from shapes and dtypes alone."""
    if call.shape.rows == 0 or call.longest == 0 or call.shape.streams == 0:
        return 0
    # Sizes may be symbolic here, which no cache takes.
    return Arena.of(kept_buffers(_shape_of(call, *_sizes(memory, tensors), WORD_BYTES, True))).bytes


@dataclass(frozen=True)
class BoundCall:
    """A bound plan with the arguments of one call.

    Parameters
    ----------
    plan : BoundPlan
        Ready to run or to capture.
    tensors : dict of Tensor
        What its arguments address, by name; ``saved`` and ``scratch`` are blocks of its buffers.
    """

    plan: BoundPlan
    tensors: dict[str, Tensor]


def bind_forward(
    bank: Tensor,
    operands: dict[str, Tensor],
    call: WriteReadCall,
    streams: dict[str, Tensor],
    layout: BankLayout,
    training: bool,
    new_scratch: Callable[[Arena, torch.device], Tensor] = new_arena,
) -> BoundCall:
    """Bind the plan of a forward to a call's tensors; ``readings`` and ``saved`` are made here.

    Parameters
    ----------
    bank : Tensor
        The bank [rows, D] that the kernels advance: columns side by side.
    operands, streams : dict of Tensor
        Token tensors as `operands_of` returns them; contiguous ``lengths`` or ``cu_seqlens``, where given.
    call : WriteReadCall
        The call beside its tensors; it has tokens.
    layout : BankLayout
        Of the caller's bank.
    training : bool
        Whether it saves what a backward needs.
    new_scratch : callable
        Where working memory comes from.
    """
    device = bank.device
    covered = covers_every_row(call, streams)
    planned = planned_shape(bank, operands, call, layout.alignment, training)
    if training and call.schedule is not None:
        _check_backward(planned, bank.get_device(), call.schedule)
    bound = bound_plan(_PLANNERS[call.schedule], planned, bank.get_device(), forward_constants)
    plan = bound.plan
    kept, scratch = kept_arena(planned), plan.scratch
    saved, working = new_arena(kept, device), new_scratch(scratch, device)
    tensors = {
        "memory": bank,
        "readings": output_like(bank, call.shape.rows, bank.shape[1], covered, bank.dtype),
        "repeats": device_repeats(device),
        **operands,
        **streams,
    }
    bound.set(
        {
            **pointers_of(plan, tensors),
            **kept.addresses(saved.data_ptr()),
            **scratch.addresses(working.data_ptr()),
            **stream_numbers(layout, call, streams),
        }
    )
    return BoundCall(bound, tensors | {"saved": saved, "scratch": working})


@lru_cache(maxsize=64)
def _check_backward(shape: WriteReadShape, index: int, schedule: str) -> None:
    """Refuse a forced schedule that the backward cannot run, before the forward does any work."""
    plan_backward(shape, device_model(index), schedule)


def _run_forward(
    memory: Tensor,
    tensors: dict[str, Tensor],
    call: WriteReadCall,
    streams: dict[str, Tensor],
    training: bool,
) -> tuple[Tensor, Tensor]:
    if call.shape.rows == 0 or call.longest == 0:
        record_run("sdm_write_read", None)
        readings = output_like(memory, call.shape.rows, memory.shape[1], False, memory.dtype)
        return readings, torch.empty(0, dtype=torch.uint8, device=memory.device)
    layout = BankLayout.of(memory)
    bank = memory.detach().contiguous() if layout.copied else memory.detach()
    streams = {name: tensor.contiguous() for name, tensor in streams.items()}
    bound = bind_forward(bank, operands_of(memory, tensors), call, streams, layout, training)
    replayed = bound.plan.run(current_stream(memory.get_device()))
    finish_bank(memory, bank, layout)
    record_run("sdm_write_read", bound.plan.plan, replayed)
    return bound.tensors["readings"], bound.tensors["saved"]


def record_run(op: str, plan: StepPlan | None, graph: bool = False) -> None:
    """Tell `last_dispatch` of a call that ran; without a plan, of one that had nothing to launch."""
    schedule = None if plan is None else plan.schedule
    record_dispatch({"op": op, "path": "gpu", "schedule": schedule, "graph": graph, "plan": plan})


def finish_bank(memory: Tensor, bank: Tensor, layout: BankLayout) -> None:
    """Bring what the kernels did to ``bank`` into ``memory``, and tell autograd."""
    if layout.copied:
        with torch.no_grad():
            memory.copy_(bank)
    elif not memory.is_inference():
        torch.autograd.graph.increment_version(memory)
