"""The write-read forward on a GPU: a plan a shape, bound once a thread, pointers on the way of a call."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from sdm_rt.errors import UnsupportedConfigurationError
from sdm_rt.ops.bound_plans import bound_plan
from sdm_rt.ops.checks import StreamShape
from sdm_rt.ops.counters import device_repeats, record_dispatch
from sdm_rt.ops.decode_launch import BANK_NAMES
from sdm_rt.plan.buffer import Buffer
from sdm_rt.plan.forward import forward_constants, plan_forward
from sdm_rt.plan.shapes import MAX_SLOTS, WriteReadShape
from sdm_rt.plan.step_plan import StepPlan
from sdm_rt.runtime.interop import current_stream

__all__ = ["BankLayout", "allocate", "forward_on_gpu", "forward_shape", "operands_of", "pointers_of"]

WORD_BYTES = 16
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
        """Look at a bank [rows, D]."""
        rows, columns = memory.shape
        copied = columns > 1 and memory.stride(1) != 1
        row_stride = columns if copied or rows <= 1 else memory.stride(0)
        start = 0 if copied else memory.data_ptr()
        return cls(copied, row_stride, gcd(WORD_BYTES, start, row_stride * memory.element_size()))


def forward_shape(
    memory: Tensor,
    flat: dict[str, Tensor],
    shape: StreamShape,
    longest: int,
    chunk_size: int,
    alignment: int,
) -> WriteReadShape:
    """Return what plans read of a call that saves nothing.

    Parameters
    ----------
    memory : Tensor
        The bank [rows, D].
    flat : dict of Tensor
        The token tensors [rows, *].
    shape : StreamShape
        The call's layout.
    longest : int
        T, tokens of the longest stream.
    chunk_size : int
        C.
    alignment : int
        As of `BankLayout`.

    Raises
    ------
    UnsupportedConfigurationError
        For more slots a stream than the kernels can number.
    """
    if shape.slots > MAX_SLOTS:
        raise UnsupportedConfigurationError(
            f"memory: {shape.slots} slots a stream are more than the kernels' {MAX_SLOTS}; use more streams "
            f"(heads)"
        )
    return WriteReadShape(
        streams=shape.streams,
        tokens=longest,
        chunk=chunk_size,
        writes=flat["k_idx"].shape[1],
        reads=flat["q_idx"].shape[1],
        head_dim=memory.shape[1],
        slots=max(shape.slots, 1),
        bank_dtype=BANK_NAMES[memory.dtype],
        index_dtype=str(flat["k_idx"].dtype).removeprefix("torch."),
        gates_per_write=flat["g"].shape[1] > 1,
        training=False,
        alignment=alignment,
    )


def operands_of(memory: Tensor, flat: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the token tensors as the kernels take them: contiguous, values in the bank's dtype."""
    index = flat["k_idx"].dtype if flat["k_idx"].dtype == flat["q_idx"].dtype else torch.int64
    dtypes = dict.fromkeys(("k_idx", "q_idx"), index)
    dtypes |= dict.fromkeys(("beta", "g"), torch.float32)
    return {
        name: tensor.detach().to(dtypes.get(name, memory.dtype)).contiguous() for name, tensor in flat.items()
    }


def allocate(buffers: tuple[Buffer, ...], device: torch.device) -> dict[str, Tensor]:
    """Return the working memory of a plan, by name, from PyTorch's allocator."""
    return {
        buffer.name: torch.empty(buffer.shape, dtype=BUFFER_DTYPES[buffer.dtype], device=device)
        for buffer in buffers
    }


def pointers_of(plan: StepPlan, tensors: dict[str, Tensor]) -> dict[str, int]:
    """Return the address of every pointer argument of a plan; 0 for a tensor that the call does without."""
    names = {a.name for launch in plan.kernels() for a in launch.arguments if a.kind == "pointer"}
    return {name: tensors[name].data_ptr() if name in tensors else 0 for name in names}


def forward_on_gpu(
    memory: Tensor,
    flat: dict[str, Tensor],
    shape: StreamShape,
    streams: dict[str, Tensor],
    longest: int,
    chunk_size: int,
) -> Tensor:
    """Run a call that saves nothing.

    Parameters
    ----------
    memory : Tensor
        The bank [rows, D] on a GPU, advanced in place.
    flat : dict of Tensor
        The token tensors [rows, *], checked.
    shape : StreamShape
        The call's layout.
    streams : dict of Tensor
        ``lengths`` or ``cu_seqlens``, where given.
    longest : int
        T, tokens of the longest stream.
    chunk_size : int
        C.

    Returns
    -------
    Tensor
        Readings [rows, D].
    """
    layout = BankLayout.of(memory)
    operands = operands_of(memory, flat)
    readings = memory.new_zeros(shape.rows, memory.shape[1])
    if shape.rows == 0 or longest == 0:
        return readings
    planned = forward_shape(memory, operands, shape, longest, chunk_size, layout.alignment)
    bound = bound_plan(plan_forward, planned, memory.get_device(), forward_constants)
    plan = bound.plan
    bank = memory.detach().contiguous() if layout.copied else memory.detach()
    lengths = {name: tensor.contiguous() for name, tensor in streams.items()}
    tensors = {
        "memory": bank,
        "readings": readings,
        "repeats": device_repeats(memory.device),
        **operands,
        **lengths,
        **allocate(plan.buffers, memory.device),
    }
    bound.set(
        {
            **pointers_of(plan, tensors),
            "row_stride": layout.row_stride,
            "shared_bank": int(shape.shared_bank),
            "wide": int(any(tensor.dtype == torch.int64 for tensor in lengths.values())),
        }
    )
    bound.run(current_stream(memory.get_device()))
    if layout.copied:
        with torch.no_grad():
            memory.copy_(bank)
    elif not memory.is_inference():
        torch.autograd.graph.increment_version(memory)
    record_dispatch({"op": "sdm_write_read", "path": "gpu", "schedule": "stepwise", "plan": plan})
    return readings
