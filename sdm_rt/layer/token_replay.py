"""One-token calls of a layer as one CUDA graph: projections, selection, decode op, norm, gate and output.

Such a call keeps a GPU busy for a small part of the time that its PyTorch calls take the host. Its graph
reads the weights of the layer and advances the bank of the cache where they lie; the token is copied in and
the output copied out, so no output is ever overwritten. A graph is found by all that decides what the call
would launch; a call with anything that a graph cannot stand for runs as it is.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sdm_rt import env
from sdm_rt.layer.activations import ACTIVATIONS, L2Normalize, ScaledSoftmax
from sdm_rt.layer.hooks import HOOKS, has_global_hooks
from sdm_rt.ops.counters import last_dispatch, record_dispatch
from sdm_rt.runtime import driver
from sdm_rt.runtime.compile import kernels
from sdm_rt.runtime.graph import Recording, new_stream, record
from sdm_rt.runtime.interop import current_stream
from sdm_rt.runtime.kernel import KernelSpec
from sdm_rt.runtime.replays import GraphPool, Replays

if TYPE_CHECKING:
    from sdm_rt.layer.layer import SparseDeltaMemory

__all__ = ["IDLE_CALLS", "MOST_GRAPHS", "replay_token"]

TOKEN_OPS = ("product_key_topk", "sdm_decode_step")  # those that a one-token call runs
MOST_GRAPHS = 32
"""Graphs of one layer."""
IDLE_CALLS = 512
"""A graph that was not used in so many one-token calls of its layer makes room for another one."""
SECONDS_BETWEEN_LOOKS = 0.1
"""How long a replay may take the kernels' sources for unedited without looking at the files."""
ALIGNMENT = 256
"""Where an input must start: cuBLAS may choose a kernel by alignment, of which it sees so much."""

# What a layer is made of; RReLU draws random numbers in training.
_KINDS = frozenset(
    {nn.Linear, nn.LayerNorm, nn.BatchNorm1d, ScaledSoftmax, L2Normalize, type(None)}
    | {getattr(nn, name) for name in ACTIVATIONS - {"RReLU", "MultiheadAttention"}}
)
# The attributes that the result of such a module depends on.
_ATTRIBUTES = {
    kind: itemgetter("training", *constants)
    for kind in _KINDS - {nn.Linear}
    if (constants := ("scale",) if kind is ScaledSoftmax else getattr(kind, "__constants__", ()))
}
_TENSOR_KINDS = frozenset({Tensor, nn.Parameter})
_LAYOUT = attrgetter("dtype", "shape")
_OPTIONS = itemgetter("dim", "num_writes", "num_reads", "query_batchnorm", "key_weighted_decay")
_STATISTICS = itemgetter("log_memory_access_stats", "log_memory_norms")
_INSIDE = itemgetter(*HOOKS, "_parameters", "_buffers")
_SHAPE = itemgetter("num_heads", "head_dim", "slots_per_head", "factors")


def _known_to_torch(*names: str) -> list[Any]:
    return [getattr(torch._C, name) for name in names if hasattr(torch._C, name)]


# What chooses among the kernels of matrix products and norms. The former name of a float32 setting raises an
# error where its present name was used.
_SETTINGS = [
    torch.are_deterministic_algorithms_enabled,
    *(partial(found, "cuda", "matmul") for found in _known_to_torch("_get_fp32_precision_getter")),
    *([] if _known_to_torch("_get_fp32_precision_getter") else _known_to_torch("_get_cublas_allow_tf32")),
    *_known_to_torch(
        "_get_cublas_allow_fp16_reduced_precision_reduction",
        "_get_cublas_allow_bf16_reduced_precision_reduction",
        "_get_cublas_allow_fp16_accumulation",
        "_get_blas_preferred_backend",
        "_get_cudnn_enabled",
    ),
]


def replay_token(layer: SparseDeltaMemory, x: Tensor, bank: Tensor) -> Tensor | None:
    """Run a one-token call of a layer as one graph, if there is one for it or one is due.

    Parameters
    ----------
    layer : SparseDeltaMemory
        Its ``_token`` is what a graph is captured from.
    x : Tensor
        One token of each sequence, as ``forward`` takes it, checked and not traced.
    bank : Tensor
        The bank, advanced in place.

    Returns
    -------
    Tensor or None
        The output, in memory of its own. None: nothing has run, and the call is to be run as it is. So are
        the first call of its kind, calls in grad mode, and calls of which something is not captured: see
        ``docs/training.md``.
    """
    if torch.is_grad_enabled() or not _is_on_gpu(x):
        return None
    modes, call = _key_of_modes(), _key_of_call(x, bank)
    if modes is None or call is None:
        return None
    made = _key_of_layer(layer, x)
    if made is None:
        return None
    return _graphs_of(layer).run(layer, x, bank, made, (modes, call))


def _is_on_gpu(x: Tensor) -> bool:
    return x.is_cuda and _has_pools()


@cache
def _has_pools() -> bool:
    """Return whether PyTorch's allocator has memory for graphs; that of cudaMallocAsync has none."""
    return torch.cuda.get_allocator_backend() == "native"


# ---- what a graph is found by; None where no graph may stand for the call ----


def _key_of_modes() -> Hashable | None:
    """Return what a call depends on beside its layer and its arguments."""
    if (
        torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or has_global_hooks()
        or env.flag("SDM_RT_CHECK")
    ):
        return None
    return (
        torch.is_inference_mode_enabled(),
        torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None,
        env.as_set("SDM_RT_PDL"),
        *[setting() for setting in _SETTINGS],
    )


def _key_of_call(x: Tensor, bank: Tensor) -> Hashable | None:
    """Return what the arguments decide."""
    if type(x) not in _TENSOR_KINDS or type(bank) not in _TENSOR_KINDS:
        return None
    if not x.is_contiguous() or x.data_ptr() % ALIGNMENT:
        return None
    return x.shape, x.dtype, bank.data_ptr(), bank.shape, bank.stride(), bank.dtype


def _key_of_layer(layer: SparseDeltaMemory, x: Tensor) -> list[Any] | None:
    """Return what the layer decides: its options, the kinds and attributes of its modules, its tensors."""
    state = layer.__dict__
    options, modules = state["args"].__dict__, state["_modules"]
    kinds = [*map(type, modules.values())]
    if any(_STATISTICS(options)) or not _KINDS.issuperset(kinds) or not _takes(modules.get("Wv_write"), x):
        return None
    if "A_log" in state or "dt_bias" in state:
        return None  # a tensor that is no parameter
    key = [_OPTIONS(options), _SHAPE(state), *kinds]
    tensors = [*state["_parameters"].values(), *state["_buffers"].values()]
    for module, kind in zip(modules.values(), kinds, strict=True):
        if module is None:
            continue
        inner = module.__dict__
        hooks, pre_hooks, backward_hooks, backward_pre_hooks, parameters, buffers = _INSIDE(inner)
        if hooks or pre_hooks or backward_hooks or backward_pre_hooks:
            return None
        if "forward" in inner or "_compiled_call_impl" in inner or "weight" in inner or "bias" in inner:
            return None  # another call than its class's, or a weight that is no parameter
        tensors += parameters.values()
        if buffers:
            tensors += buffers.values()
        if kind in _ATTRIBUTES:
            if kind is nn.BatchNorm1d and inner["training"]:
                return None
            key += _ATTRIBUTES[kind](inner)
    tensors = [tensor for tensor in tensors if tensor is not None]
    if not _TENSOR_KINDS.issuperset(map(type, tensors)):
        return None
    key += map(Tensor.data_ptr, tensors)
    key += map(_LAYOUT, tensors)
    key += map(Tensor.stride, tensors)
    return key


def _takes(projection: nn.Linear | None, x: Tensor) -> bool:
    """Whether the projection can take the input; where it cannot, the plain call says so."""
    weight = None if projection is None else projection.__dict__["_parameters"].get("weight")
    return (
        weight is not None
        and weight.get_device() == x.get_device()
        and (weight.dtype == x.dtype or torch.is_autocast_enabled("cuda"))
    )


# ---- the graphs ----


@dataclass(eq=False)
class _TokenGraph:
    """A captured call.

    Parameters
    ----------
    recording : Recording
        The graph.
    x, output : Tensor
        Where it reads the token and leaves the output, the latter in memory that other graphs of the stream
        work in.
    dispatches : tuple of dict
        What ``last_dispatch`` tells of the ops of the token, in their order.
    specs, generation
        The kernels it launches, and their generation.
    bank : weakref.ref
        Drops the graph with the bank's memory, which may then hold something else.
    """

    recording: Recording
    x: Tensor
    output: Tensor
    dispatches: tuple[dict[str, Any], ...]
    specs: frozenset[KernelSpec]
    generation: int
    bank: weakref.ref[Any] | None = None
    looked: float = field(default_factory=time.monotonic)

    def replay(self, stream: int) -> None:
        """Launch the graph."""
        self.recording.replay(stream)

    def is_current(self) -> bool:
        """Return whether its kernels are those of the present sources."""
        loaded = kernels()
        if loaded.generation != self.generation:
            return False
        now = time.monotonic()
        if now - self.looked < SECONDS_BETWEEN_LOOKS:
            return True
        self.looked = now
        return loaded.are_current(self.specs, self.generation)


class _Made:
    """What a layer decides, hashed once."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts
        self._hash = hash(tuple(parts))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Made) and self.parts == other.parts


class _Graphs:
    """The graphs of one layer."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pool: GraphPool[_TokenGraph] = GraphPool(MOST_GRAPHS, IDLE_CALLS)
        self._replays = Replays(1, self._pool, least=1)
        self._made = _Made([])

    def __len__(self) -> int:
        return len(self._pool)

    def run(
        self, layer: SparseDeltaMemory, x: Tensor, bank: Tensor, made: list[Any], call: Hashable
    ) -> Tensor | None:
        """Run one call; see `replay_token`.

        Parameters
        ----------
        layer, x, bank
            As there.
        made : list
            What the layer decides.
        call : hashable
            What else decides.
        """
        stream = current_stream(x.get_device())
        with self._lock:
            if made != self._made.parts:
                self._made = _Made(made)
            key = (self._made, call)
            graph = self._replays.find(key, stream, partial(self._capture, layer, x, bank, stream))
            if graph is None:
                return None
            if not graph.is_current():
                self._pool.drop(graph)
                return None
            with _turn(x.get_device(), stream):
                graph.x.copy_(x)
                graph.replay(stream)
                output = graph.output.clone()
        if not bank.is_inference():
            torch.autograd.graph.increment_version(bank)
        for dispatch in graph.dispatches:
            record_dispatch(dispatch)
        return output

    def _capture(self, layer: SparseDeltaMemory, x: Tensor, bank: Tensor, stream: int) -> _TokenGraph:
        token = torch.empty_like(x, memory_format=torch.contiguous_format)
        generation = kernels().generation
        with kernels().noting() as specs, _autocast_without_cache():
            recording, output = _record(layer, token, bank, stream)
        told = (last_dispatch(op) for op in TOKEN_OPS)
        dispatches = tuple({**one, "graph": True} for one in told if one)
        graph = _TokenGraph(recording, token, output, dispatches, frozenset(specs), generation)
        forget = partial(_forget, weakref.ref(self._pool), weakref.ref(graph))
        graph.bank = weakref.ref(bank.untyped_storage(), forget)
        return graph


def _forget(
    pool: weakref.ref[GraphPool[_TokenGraph]], graph: weakref.ref[_TokenGraph], _bank: object
) -> None:
    held, dropped = pool(), graph()
    if held is not None and dropped is not None:
        held.drop(dropped)


_graphs: weakref.WeakKeyDictionary[nn.Module, _Graphs] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def _graphs_of(layer: nn.Module) -> _Graphs:
    """Return the graphs of a layer; not kept in it, so that copies and files of it hold none."""
    found = _graphs.get(layer)
    if found is None:
        with _making:
            found = _graphs.setdefault(layer, _Graphs())
    return found


# ---- capture ----


@contextlib.contextmanager
def _autocast_without_cache() -> Iterator[None]:
    """Cast weights inside the graph: the cache of casts is emptied at the end of the caller's autocast."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class _Room:
    """Where the graphs that run on one stream are captured, and the memory that they work in.

    A stream for them alone: cuBLAS has working memory for each stream, which graphs on two streams must not
    share, and a stream of PyTorch's may be anybody's. Memory of PyTorch's allocator for them alone, which
    stays as long as the process: PyTorch may drop cuBLAS's working memory at any time, and the graphs go on
    using it; then nobody but another graph of this room gets its place.

    Parameters
    ----------
    device : int
        The GPU.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._context = driver.primary_context(device)
        self._handle = new_stream(self._context)
        self._stream = torch.cuda.ExternalStream(self._handle, device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._exists = False

    @contextlib.contextmanager
    def _allocating(self) -> Iterator[None]:
        """Take what the current stream allocates from the room's memory."""
        torch._C._cuda_beginAllocateCurrentStreamToPool(self._device, self._pool)
        try:
            yield
        finally:
            end = getattr(torch._C, "_cuda_endAllocateToPool", None)
            if end is None:  # PyTorch 2.6
                end = torch._C._cuda_endAllocateCurrentStreamToPool  # type: ignore[attr-defined]
            end(self._device, self._pool)
            # Each use counts, and the memory stays while one does: the first is kept.
            if self._exists:
                torch._C._cuda_releasePool(self._device, self._pool)
            self._exists = True

    def record(self, call: Callable[[], Tensor]) -> tuple[Recording, Tensor]:
        """Capture a call; return the graph and what the call returned."""
        outputs = []

        def launch_all(_stream: int) -> None:
            outputs.append(call())

        with torch.cuda.stream(self._stream), self._allocating():
            # cuBLAS's handle of this thread and its working memory: not inside a capture.
            torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
            recording = record(launch_all, self._context, self._handle)
        return recording, outputs[0]


_rooms: dict[tuple[int, int], _Room] = {}
_turns: dict[tuple[int, int], threading.Lock] = {}
_capturing = threading.Lock()


def _turn(device: int, stream: int) -> threading.Lock:
    """Return what a thread holds from copying in to copying out: graphs of a stream share memory."""
    found = _turns.get((device, stream))
    return _turns.setdefault((device, stream), threading.Lock()) if found is None else found


def _record(layer: SparseDeltaMemory, x: Tensor, bank: Tensor, stream: int) -> tuple[Recording, Tensor]:
    """Capture a call for replays on a stream; return the graph and its output."""
    device = x.get_device()
    with _capturing:
        room = _rooms.get((device, stream))
        if room is None:
            room = _rooms[device, stream] = _Room(device)
        return room.record(partial(layer._token, x, bank))
