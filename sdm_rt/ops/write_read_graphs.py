"""Training calls replayed as CUDA graphs: the launches of a forward are one graph, of its backward another.

A graph addresses fixed memory, and rewriting the arguments of its nodes for every call would cost the host
about what the launches did. So a captured call owns its memory: inputs are copied in and results are copied
out, by a few device copies beside hundreds of launches. What its forward saves stays in its own memory until
the backward, and as long as any tensor shares that memory (autograd's saved tensor, or what a caller made of
it) the captured call is taken and another one of the shape serves the next call. All calls captured on a
stream share one block of working memory, since their launches run one after another.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sdm_rt import env
from sdm_rt.ops.checks import flat_tokens
from sdm_rt.ops.write_read_backward_launch import bind_backward, gradient_bank_dtype, new_gradients
from sdm_rt.ops.write_read_call import Gradients, WriteReadCall
from sdm_rt.ops.write_read_launch import (
    BankLayout,
    BoundCall,
    bind_forward,
    covers_every_row,
    new_arena,
    operands_of,
    record_run,
)
from sdm_rt.plan.buffer import Arena
from sdm_rt.plan.step_plan import StepPlan
from sdm_rt.runtime import driver
from sdm_rt.runtime.compile import kernels
from sdm_rt.runtime.graph import CapturedLaunches
from sdm_rt.runtime.interop import current_stream
from sdm_rt.runtime.kernel import KernelSpec
from sdm_rt.runtime.replays import forget_replays, suspend_replays

__all__ = [
    "replay_backward",
    "replay_forward",
    "replayed_calls",
    "reset_cuda_graphs",
    "suspend_cuda_graphs",
]

MOST_CALLS = 32
"""Captured calls of one shape: differentiable calls that can wait for their backward at once."""
MOST_SHAPES = 32
"""Shapes with captured calls; each holds the memory of a training call."""

_storage_uses = torch._C._storage_Use_Count
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # PyTorch 2.8 and later


@dataclass(frozen=True)
class _Graph:
    """A captured plan, and what tells whether its kernels are those of the present sources."""

    launches: CapturedLaunches
    specs: tuple[KernelSpec, ...]
    generation: int
    plan: StepPlan

    @classmethod
    def of(cls, bound: BoundCall) -> _Graph:
        """Capture a bound call; the graph holds what it addresses."""
        generation = kernels().generation
        return cls(bound.plan.capture(bound.tensors), bound.plan.specs, generation, bound.plan.plan)

    def is_current(self) -> bool:
        """Return whether no source was edited since."""
        return kernels().are_current(self.specs, self.generation)

    def replay(self, op: str, stream: int) -> None:
        """Launch on a stream and tell `last_dispatch`."""
        self.launches.replay(stream)
        record_run(op, self.plan, True)


class _CapturedCall:
    """One training call of a shape with its own memory.

    Parameters
    ----------
    key : hashable
        What it is found by.
    bank, flat, call, streams
        As of `sdm_rt.ops.write_read_launch.training_forward_on_gpu`; only shapes and dtypes count.
    """

    def __init__(
        self,
        key: Hashable,
        bank: Tensor,
        flat: dict[str, Tensor],
        call: WriteReadCall,
        streams: dict[str, Tensor],
    ) -> None:
        def room(tensor: Tensor) -> Tensor:
            return torch.empty_like(tensor, memory_format=torch.contiguous_format)

        self.key = key
        self.stream = current_stream(bank.get_device())
        self._call = call
        self._bank = room(bank)
        self._operands = {name: room(tensor) for name, tensor in operands_of(bank, flat).items()}
        self._streams = {name: room(tensor) for name, tensor in streams.items()}
        self._layout = BankLayout.of(self._bank)
        self._covered = covers_every_row(call, streams)
        bound = bind_forward(
            self._bank, self._operands, call, self._streams, self._layout, True, _scratch.take
        )
        self._readings, self.saved = bound.tensors["readings"], bound.tensors["saved"]
        self._forward = _Graph.of(bound)
        self._backward: _Graph | None = None
        self._grad_readings: Tensor | None = None
        self._grads: Gradients | None = None
        self.taken_back = True
        """Whether the bank of this memory is no longer what the latest forward left."""
        # Held, since PyTorch counts a Python storage once and for all; beside it, only tensors count.
        self._storage = self.saved.untyped_storage()
        self._own_uses = _storage_uses(self._storage._cdata)

    def is_free(self) -> bool:
        """Return whether nothing but this object refers to what the latest forward saved."""
        return bool(_storage_uses(self._storage._cdata) == self._own_uses)

    def is_current(self) -> bool:
        """Return whether the forward's kernels are those of the present sources."""
        return self._forward.is_current()

    def advance(self, bank: Tensor, flat: dict[str, Tensor], streams: dict[str, Tensor]) -> Tensor:
        """Run the forward: advance ``bank`` in place and return the readings."""
        self._bank.copy_(bank)
        for name, tensor in self._operands.items():
            tensor.copy_(flat[name].detach())
        for name, tensor in self._streams.items():
            tensor.copy_(streams[name])
        if not self._covered:
            self._readings.zero_()
        self._forward.replay("sdm_write_read", self.stream)
        self.taken_back = False
        # An earlier call's saved tensor must never pass for this one's.
        torch.autograd.graph.increment_version(self.saved)
        bank.copy_(self._bank)
        return self._readings.clone()

    def retreat(self, bank: Tensor, grad_readings: Tensor, grad_final: Tensor | None) -> Gradients | None:
        """Run the backward of the latest forward: restore ``bank`` in place and return the gradients.

        None, and nothing has run, where there is no memory for it.
        """
        try:
            graph, room, grads = self._captured_backward()
        except torch.OutOfMemoryError:
            self._backward = self._grad_readings = self._grads = None
            _pool.forgo(self.key)
            return None
        room.copy_(grad_readings.detach())
        if grad_final is None:
            grads.memory.zero_()
        else:
            grads.memory.copy_(grad_final.detach())
        if not self._covered:
            for grad in grads[1:]:
                grad.zero_()
        graph.replay("sdm_write_read_backward", self.stream)
        self.taken_back = True
        bank.copy_(self._bank)
        memory = grads.memory.to(bank.dtype, copy=True)
        return Gradients(memory, *(grad.clone() for grad in grads[1:]))

    def _captured_backward(self) -> tuple[_Graph, Tensor, Gradients]:
        """Return the backward's graph, where it reads the readings' gradient and where it leaves its own."""
        if self._grad_readings is None or self._grads is None:
            self._grad_readings = torch.empty_like(self._readings)
            gradient_bank = torch.empty_like(self._bank, dtype=gradient_bank_dtype(self._bank, self._call))
            self._grads = new_gradients(self._bank, self._operands, self._call, self._streams, gradient_bank)
        if self._backward is None or not self._backward.is_current():
            self._backward = _Graph.of(
                bind_backward(
                    self._bank,
                    self._operands,
                    self._call,
                    self._streams,
                    self._layout,
                    self.saved,
                    self._grad_readings,
                    self._grads,
                    _scratch.take,
                )
            )
        return self._backward, self._grad_readings, self._grads


class _Scratch:
    """The working memory of captured calls: one block a stream, whose launches run one after another."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[torch.device, int], Tensor] = {}

    def take(self, arena: Arena, device: torch.device) -> Tensor:
        """Return the block of the current stream; a graph keeps the one it got when a longer one comes."""
        where = device, current_stream(device.index)
        block = self._blocks.get(where)
        if block is None or block.numel() < arena.bytes:
            block = self._blocks[where] = new_arena(arena, device)
        return block

    def clear(self) -> None:
        """Let go of all blocks."""
        self._blocks.clear()


class _Pool:
    """The captured calls of this process, by shape and stream."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._calls: dict[Hashable, list[_CapturedCall]] = {}
        self._by_address: dict[int, _CapturedCall] = {}
        self._too_large: set[Hashable] = set()
        self.suspensions = 0

    def take(
        self, bank: Tensor, flat: dict[str, Tensor], call: WriteReadCall, streams: dict[str, Tensor]
    ) -> tuple[_CapturedCall, Tensor] | None:
        """Return a free captured call of the shape and what its forward saves; holding that takes the call.

        None for a shape's first call, since one that never comes again is not worth a capture, where all
        captured calls of the shape are taken, and of shapes that there was no memory for.
        """
        key = _key(bank, flat, call, streams)
        with self._lock:
            if key in self._too_large:
                return None
            if key not in self._calls:
                self._calls[key] = []
                self._make_room(MOST_SHAPES)
                return None
            self._calls[key] = self._calls.pop(key)  # the latest used is the last
            for found in self._calls[key]:
                if found.is_free():
                    if found.is_current():
                        return found, found.saved.detach()
                    self._drop(key, found)
                    break
            if len(self._calls[key]) == MOST_CALLS:
                return None
            try:
                new = _CapturedCall(key, bank, flat, call, streams)
            except torch.OutOfMemoryError:
                self.forgo(key)
                return None
            self._calls[key].append(new)
            self._by_address[new.saved.data_ptr()] = new
            return new, new.saved.detach()

    def forgo(self, key: Hashable) -> None:
        """Run a shape plain from now on, since its captures do not fit; let go of what no call waits for."""
        with self._lock:
            self._too_large.add(key)
            self._make_room(0)
            _scratch.clear()

    def _make_room(self, shapes: int) -> None:
        """Drop the free calls of the shapes that were not used for longest, all but ``shapes`` shapes."""
        for key in list(self._calls)[: max(len(self._calls) - shapes, 0)]:
            for captured in [captured for captured in self._calls[key] if captured.is_free()]:
                self._drop(key, captured)
            if not self._calls[key]:
                del self._calls[key]

    def _drop(self, key: Hashable, captured: _CapturedCall) -> None:
        self._calls[key].remove(captured)
        del self._by_address[captured.saved.data_ptr()]

    def of_saved(self, saved: Tensor) -> _CapturedCall | None:
        """Return the captured call whose own memory ``saved`` is."""
        with self._lock:
            return self._by_address.get(saved.data_ptr())

    def suspend(self, change: int) -> None:
        """Enter (1) or leave (-1) a span without replays."""
        with self._lock:
            self.suspensions += change

    def clear(self) -> None:
        """Drop every captured call."""
        with self._lock:
            self._calls.clear()
            self._by_address.clear()
            self._too_large.clear()
            _scratch.clear()


class _Asked(threading.local):
    depth = 0


_scratch = _Scratch()
_pool = _Pool()
_asked = _Asked()


def _key(bank: Tensor, flat: dict[str, Tensor], call: WriteReadCall, streams: dict[str, Tensor]) -> Hashable:
    """Return what two calls must share to be replays of one graph; values of ``lengths`` may differ."""
    index = bank.get_device()
    return (
        index,
        current_stream(index),
        call,
        bank.dtype,
        bank.shape,
        flat["k_idx"].dtype == flat["q_idx"].dtype == torch.int32,
        *(flat[name].shape[1] for name in ("k_idx", "g", "q_idx")),
        *((name, tensor.dtype, tensor.shape) for name, tensor in streams.items()),
        env.flag("SDM_RT_PDL"),
    )


def replay_forward(
    bank: Tensor, tensors: dict[str, Tensor], call: WriteReadCall, streams: dict[str, Tensor]
) -> tuple[Tensor, Tensor] | None:
    """Run a training forward as one graph, if that was asked for (`replayed_calls`) and can be.

    Parameters and results are those of `sdm_rt.ops.write_read_launch.training_forward_on_gpu`.

    Returns
    -------
    tuple or None
        None: nothing has run, and the call is to be launched kernel by kernel. So are calls inside a caller's
        own capture, whose graph they become part of, and calls under hooks for saved tensors.
    """
    if not _asked.depth or call.shape.rows == 0 or call.longest == 0:
        return None
    if _has_saved_tensor_hooks():
        return None
    if not _may_replay(current_stream(bank.get_device())):
        return None
    flat = flat_tokens(tensors)
    taken = _pool.take(bank, flat, call, streams)
    if taken is None:
        return None
    captured, saved = taken
    return captured.advance(bank, flat, streams), saved


def replay_backward(
    bank: Tensor, saved: Tensor, grad_readings: Tensor, grad_final: Tensor | None
) -> Gradients | None:
    """Run the backward of a replayed forward as one graph.

    Parameters and results are those of `sdm_rt.ops.write_read_backward_launch.backward_on_gpu`.

    Returns
    -------
    Gradients or None
        None: nothing has run, and the backward is to be launched kernel by kernel: ``saved`` is not the
        memory of a captured call (no graph made it, or a hook handed on a copy), or no replay may run now.
    """
    captured = _pool.of_saved(saved)
    if captured is None or captured.taken_back:
        return None
    stream = current_stream(bank.get_device())
    if stream != captured.stream or not _may_replay(stream):
        return None
    return captured.retreat(bank, grad_readings, grad_final)


def _has_saved_tensor_hooks() -> bool:
    """Whether a hook may read what a call saves after it let go of it; True where PyTorch cannot tell."""
    return _top_hooks is None or _top_hooks(True) is not None


def _may_replay(stream: int) -> bool:
    if _pool.suspensions or not env.flag("SDM_RT_REPLAY"):
        return False
    return not driver.stream_is_capturing(stream)


@contextlib.contextmanager
def replayed_calls() -> Iterator[None]:
    """Replay the differentiable write-read calls of this thread as CUDA graphs, for a ``with`` block."""
    _asked.depth += 1
    try:
        yield
    finally:
        _asked.depth -= 1


@contextlib.contextmanager
def suspend_cuda_graphs() -> Iterator[None]:
    """Launch kernel by kernel in place of replaying CUDA graphs, for a ``with`` block, in every thread.

    Captured graphs are kept for later. Results have the same bits either way.
    """
    _pool.suspend(1)
    suspend_replays(1)
    try:
        yield
    finally:
        suspend_replays(-1)
        _pool.suspend(-1)


def reset_cuda_graphs() -> None:
    """Drop every CUDA graph: those of ``cuda_graph=True`` with their memory, and those of repeated calls.

    Calls that still wait for their backward keep what they saved and run it kernel by kernel. Later calls
    capture anew. The working memory of one-token graphs stays for those.
    """
    _pool.clear()
    forget_replays()
