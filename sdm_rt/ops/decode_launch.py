"""Decode on a GPU: one prepared launch a shape, pointers on the way of a call.

The first call of a shape checks it, plans it and loads its kernel; later calls look the prepared launch up by
shapes, dtypes, layouts and devices, write eleven pointers and launch. What is read of a tensor is read once.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sdm_rt import env
from sdm_rt.errors import UnsupportedConfigurationError
from sdm_rt.ops.counters import device_repeats, record_dispatch
from sdm_rt.ops.inplace_call import any_meets, apart
from sdm_rt.ops.plan_inputs import BANK_NAMES, device_model
from sdm_rt.plan.decode import plan_decode
from sdm_rt.plan.device import DeviceModel
from sdm_rt.plan.shapes import DecodeShape
from sdm_rt.plan.step_plan import StepPlan
from sdm_rt.runtime import device
from sdm_rt.runtime.compile import kernels
from sdm_rt.runtime.device import Gpu
from sdm_rt.runtime.interop import current_stream
from sdm_rt.runtime.kernel import KernelSpec
from sdm_rt.runtime.launcher import PreparedLaunch, prepare

__all__ = ["OPERANDS", "PlannedDecode", "decode_on_gpu", "plan_call"]

# How the kernel is told the storage of an operand (kernels_cu/decode.cu, `dtypes`).
VALUE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
VALUE_BITS = {"k_val": 0, "v": 2, "beta": 4, "g": 6, "q_val": 8}
WIDE_BITS = {"k_idx": 10, "q_idx": 11, "lengths": 12}
OPERANDS = ("k_idx", "k_val", "v", "beta", "g", "q_idx", "q_val")
VECTOR_BYTES = 16

_write_pointers = struct.Struct("<11Q").pack_into


@dataclass(frozen=True)
class PlannedDecode:
    """The launch of a call and what it is handed, found without a GPU.

    Parameters
    ----------
    plan : StepPlan
        One launch.
    numbers : dict
        The launch's arguments that are no pointers, by name.
    copies : tuple
        (position in OPERANDS, dtype) of the operands that are handed over as contiguous copies; the lengths
        have the position behind them.
    copies_bank : bool
        Whether the bank's columns are strided, so that a copy is advanced and copied back.
    """

    plan: StepPlan
    numbers: dict[str, int]
    copies: tuple[tuple[int, torch.dtype], ...]
    copies_bank: bool


@dataclass(frozen=True)
class _Ready:
    """A decode of one shape, ready to launch on one GPU from one thread.

    Parameters
    ----------
    launch : PreparedLaunch
        The launch with all arguments but the pointers written.
    spec, generation : KernelSpec, int
        Its kernel and that one's generation, to ask whether the source was edited.
    copies : tuple
        (position in OPERANDS, dtype) of the operands that are handed over as contiguous copies; the lengths
        have the position behind them.
    copies_bank : bool
        Whether the bank's columns are strided, so that a copy is advanced and copied back.
    checked : bool
        Whether values of indices and lengths are checked before each call.
    repeats : Tensor
        The GPU's counter of repeated slots.
    repeats_address : int
        Its address.
    dispatch : dict
        What ``last_dispatch`` shows.
    """

    launch: PreparedLaunch
    spec: KernelSpec
    generation: int
    copies: tuple[tuple[int, torch.dtype], ...]
    copies_bank: bool
    checked: bool
    repeats: Tensor
    repeats_address: int
    dispatch: dict[str, Any]


class _Memo(threading.local):
    def __init__(self) -> None:
        self.ready: dict[Any, _Ready] = {}


_memo = _Memo()


def decode_on_gpu(
    memory: Tensor,
    operands: tuple[Tensor, ...],
    lengths: Tensor | None,
    check: Callable[[bool], object],
    y: Tensor | None = None,
) -> Tensor:
    """Launch one decode step.

    Parameters
    ----------
    memory : Tensor
        The bank [P*S, D] on a GPU, advanced in place.
    operands : tuple of Tensor
        ``k_idx, k_val, v, beta, g, q_idx, q_val``.
    lengths : Tensor, optional
        [P]; streams of length 0 are skipped.
    check : callable
        Checks all arguments; with True their values too, which waits for the GPU. Called for every new
        combination of shapes, dtypes, layouts and devices.
    y : Tensor, optional
        Where the readings [P, D] go; default: new memory.

    Returns
    -------
    Tensor
        The readings.
    """
    given = operands if lengths is None else (*operands, lengths)
    addresses = list(map(Tensor.data_ptr, given))
    if any_meets(memory, addresses):
        given = tuple(apart(memory, x) for x in given)
        addresses = list(map(Tensor.data_ptr, given))
        operands, lengths = given[: len(operands)], None if lengths is None else given[-1]
    bank = memory.data_ptr()
    key = (
        memory.shape,
        memory.dtype,
        memory.stride(),
        memory.get_device(),
        bank % VECTOR_BYTES,
        *[(x.shape, x.dtype, x.get_device(), x.is_contiguous()) for x in given],
        env.as_set("SDM_RT_PDL"),
        env.as_set("SDM_RT_CHECK"),
    )
    ready = _memo.ready.get(key)
    if ready is None or not kernels().are_current((ready.spec,), ready.generation):
        check(False)
        if memory.dtype == torch.float64:
            raise TypeError(
                "memory: expected dtype float32, bfloat16 or float16 on a GPU, got float64 (CPU only)"
            )
        if operands[0].shape[0] == 0:
            record_dispatch({"op": "sdm_decode_step", "path": "gpu", "streams": 0, "plan": None})
            return memory.new_empty(0, memory.shape[1]) if y is None else y
        ready = _memo.ready[key] = _prepare(memory, operands, lengths)
    if ready.checked:
        check(True)
    device_index = memory.get_device()
    if y is None:
        y = memory.new_empty(operands[0].shape[0], memory.shape[1])
    advanced = memory
    if ready.copies_bank:
        advanced = memory.detach().contiguous()
        bank = advanced.data_ptr()
    copies = []  # alive until the launch is queued
    for at, dtype in ready.copies:
        copies.append(given[at].detach().to(dtype).contiguous())
        addresses[at] = copies[-1].data_ptr()
    if lengths is None:
        addresses.append(0)
    launch = ready.launch
    _write_pointers(launch.arguments, 0, bank, *addresses, y.data_ptr(), ready.repeats_address)
    launch.run(current_stream(device_index))
    if ready.copies_bank:
        with torch.no_grad():
            memory.copy_(advanced)
    elif not memory.is_inference():
        torch.autograd.graph.increment_version(memory)
    record_dispatch(ready.dispatch)
    return y


def plan_call(
    memory: Tensor, operands: tuple[Tensor, ...], lengths: Tensor | None, model: DeviceModel
) -> PlannedDecode:
    """Plan a checked call of at least one stream from shapes, dtypes and layouts alone.

    Parameters
    ----------
    memory, operands, lengths
        As of `decode_on_gpu`, on any device.
    model : DeviceModel
        The GPU.
    """
    named = dict(zip(OPERANDS, operands, strict=True))
    streams, columns = named["k_idx"].shape[0], memory.shape[1]
    slots = memory.shape[0] // streams
    if slots >= 2**31:
        raise UnsupportedConfigurationError(
            f"memory: {slots} slots a stream are more than the kernel's 2147483647; use more streams (heads)"
        )
    copies_bank = columns > 1 and memory.stride(1) != 1
    row_stride = columns if copies_bank or memory.shape[0] == 1 else memory.stride(0)
    start = 0 if copies_bank else memory.data_ptr()
    gates = named["g"].shape[-1]
    shape = DecodeShape(
        streams=streams,
        writes=named["k_idx"].shape[-1],
        reads=named["q_idx"].shape[-1],
        head_dim=columns,
        bank_dtype=BANK_NAMES[memory.dtype],
        index_dtype=str(named["k_idx"].dtype).removeprefix("torch."),
        gates_per_write=gates > 1,
        aligned=start % VECTOR_BYTES == 0 and row_stride * memory.element_size() % VECTOR_BYTES == 0,
    )
    codes = 0
    copies: list[tuple[int, torch.dtype]] = []
    for at, (name, operand) in enumerate(named.items()):
        dtype = operand.dtype
        if name in VALUE_BITS and dtype not in VALUE_CODES:
            dtype = torch.float32 if name in ("beta", "g") else memory.dtype
        if dtype != operand.dtype or not operand.is_contiguous():
            copies.append((at, dtype))
        if name in VALUE_BITS:
            codes |= VALUE_CODES[dtype] << VALUE_BITS[name]
        else:
            codes |= int(dtype == torch.int64) << WIDE_BITS[name]
    if lengths is not None:
        if not lengths.is_contiguous():
            copies.append((len(OPERANDS), lengths.dtype))
        codes |= int(lengths.dtype == torch.int64) << WIDE_BITS["lengths"]

    numbers = {
        "row_stride": row_stride,
        "S": slots,
        "D": columns,
        "W": shape.writes,
        "R": shape.reads,
        "gates": gates,
        "dtypes": codes,
    }
    return PlannedDecode(plan_decode(shape, model), numbers, tuple(copies), copies_bank)


def _prepare(memory: Tensor, operands: tuple[Tensor, ...], lengths: Tensor | None) -> _Ready:
    """Plan a checked call and prepare its launch."""
    gpu: Gpu = device.gpu(memory.get_device())
    planned = plan_call(memory, operands, lengths, device_model(gpu.index))
    (description,) = planned.plan.kernels()
    generation = kernels().generation
    launch = prepare(description, gpu, current_stream(gpu.index))
    launch.set(planned.numbers)
    repeats = device_repeats(memory.device)
    dispatch = {
        "op": "sdm_decode_step",
        "path": "gpu",
        "streams": operands[0].shape[0],
        "plan": planned.plan,
    }
    return _Ready(
        launch=launch,
        spec=description.kernel,
        generation=generation,
        copies=planned.copies,
        copies_bank=planned.copies_bank,
        checked=env.flag("SDM_RT_CHECK"),
        repeats=repeats,
        repeats_address=repeats.data_ptr(),
        dispatch=dispatch,
    )
