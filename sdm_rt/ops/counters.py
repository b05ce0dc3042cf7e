"""What a user can read about past calls: repeated write slots, and how the latest calls ran."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "count_repeats",
    "device_repeats",
    "last_dispatch",
    "record_definition",
    "record_dispatch",
    "repeated_write_slots",
    "reset_dispatch",
]

_lock = threading.Lock()
_repeats = 0
_on_device: dict[torch.device, Tensor] = {}
_OPS = (
    "sdm_write_read",
    "sdm_write_read_backward",
    "sdm_decode_step",
    "product_key_topk",
    "product_key_topk_backward",
    "phase1_forward",
    "phase1_backward",
    "phase1_backward_det",
    "wy_solve",
)
# The latest call of each op, under None that of any. The keys stay: the compiler guards on them.
_latest: dict[str | None, dict[str, Any]] = {op: {} for op in (None, *_OPS)}


def count_repeats(count: int) -> None:
    """Add ``count`` write entries that repeat a slot of their token."""
    global _repeats
    with _lock:
        _repeats += count


def device_repeats(device: torch.device) -> Tensor:
    """Return the counter of a GPU, int64 [1], that its kernels add to.

    Raises
    ------
    RuntimeError
        For the first op of a GPU inside a CUDA graph capture.
    """
    with _lock:
        counter = _on_device.get(device)
        if counter is None:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "the first op on a GPU cannot stand inside a CUDA graph capture; run warmup first: one "
                    "call with the same shapes and dtypes before the capture"
                )
            with torch.inference_mode(False):  # later calls change it outside inference mode
                counter = torch.zeros(1, dtype=torch.int64, device=device)
            torch.cuda.current_stream(device).synchronize()  # before any other stream adds to it
            _on_device[device] = counter
        return counter


def repeated_write_slots(reset: bool = True) -> int:
    """Return how many write entries repeated a slot of their own token since the last reset.

    A repeated slot is legal: it decays once, by the gate of its first lane, and its weights add. Many
    repeats usually mean a fault in the indices. Waits for the GPUs that have run ops.

    Parameters
    ----------
    reset : bool
        Whether to set the count back to 0.

    Returns
    -------
    int
        The count over all ops, threads, CPU tensors and GPUs.
    """
    global _repeats
    with _lock:
        count = _repeats
        if reset:
            _repeats = 0
        for device, counter in _on_device.items():
            torch.cuda.synchronize(device)
            count += int(counter)
            if reset:
                counter.zero_()
                torch.cuda.synchronize(device)
    return count


def record_dispatch(description: dict[str, Any]) -> None:
    """Keep ``description`` as the latest call's; its keys are those that `last_dispatch` describes."""
    _latest[None] = _latest[description["op"]] = description


def record_definition(op: str) -> None:
    """Tell `last_dispatch` of a call that the definition in torch computed."""
    record_dispatch({"op": op, "path": "definition"})


def last_dispatch(op: str | None = None) -> dict[str, Any]:
    """Return how the latest op call of this process ran.

    Every op that computes is told, on CPU tensors and on a GPU, also where a layer, the compiler or autograd
    calls it: a training step of a layer ends with ``"product_key_topk_backward"``. Refused calls are not
    told, nor calls that make shapes alone (meta and fake tensors), nor replays of a graph that the caller
    captured.

    Parameters
    ----------
    op : str, optional
        Tell the latest call of this op, for example ``"sdm_write_read_backward"``. Default: that of any.

    Returns
    -------
    dict of str to Any
        A copy; empty before the first call and after `reset_dispatch`. Its keys:

        - ``op``: the public name of the op; of the backward of a call, that name with ``"_backward"``.
        - ``path``: ``"gpu"`` for planned kernels. On CPU tensors ``"recurrence"`` (``sdm_write_read``, its
          backward and ``sdm_decode_step``) or ``"definition"`` (the others).
        - ``plan``: on a GPU the launches, a ``sdm_rt.plan.step_plan.StepPlan``; None where there was nothing
          to launch.
        - ``schedule``: of ``sdm_write_read`` and its backward on a GPU, ``"stepwise"`` or ``"persistent"``;
          None where there was nothing to launch.
        - ``graph``: of ``sdm_write_read`` and its backward on a GPU, whether the launches ran as a CUDA
          graph. Of ``sdm_decode_step`` and the ``product_key_topk`` before it, True where a layer replayed
          the whole token; else there is no key.
        - ``streams``: of ``sdm_decode_step``, and of ``sdm_write_read`` and its backward on CPU tensors, P.
        - ``device``, ``tokens`` (of all streams), ``writes``, ``reads``, ``head_dim``, ``slots``,
          ``bank_dtype``, ``snapshot_quant``: of ``sdm_write_read`` and its backward on CPU tensors. On a GPU
          ``plan.shape`` tells them.
    """
    return dict(_latest.get(op, {}))


def reset_dispatch() -> None:
    """Forget the latest calls."""
    for op in _latest:
        _latest[op] = {}
