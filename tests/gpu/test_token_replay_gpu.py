"""One-token calls of a layer with ``cuda_graph=True``: each a CUDA graph, with the bits of plain calls."""

from __future__ import annotations

import copy
import gc
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from sdm_rt import SDMLayerState, SparseDeltaMemory, last_dispatch, reset_cuda_graphs, suspend_cuda_graphs
from sdm_rt.layer import token_replay
from sdm_rt.runtime.sources import find_kernels
from tests.gpu.training import DEVICE, new_layer
from tests.tolerances import assert_same_bits

pytestmark = pytest.mark.gpu

EVERYTHING = {"output_gate": True, "normalize_readings": True, "key_weighted_decay": True}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def no_graphs_left() -> Iterator[None]:
    reset_cuda_graphs()
    yield
    reset_cuda_graphs()


def pair(dtype: torch.dtype = torch.bfloat16, **options: Any) -> tuple[SparseDeltaMemory, SparseDeltaMemory]:
    """The same layer without and with graphs."""
    return new_layer(dtype, **options).eval(), new_layer(dtype, cuda_graph=True, **options).eval()


def token(seed: int = 0, batch: int = 2, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 1, 128, generator=draw).to(DEVICE, dtype)


def new_cache(layer: SparseDeltaMemory, batch: int = 2, dtype: torch.dtype | None = None) -> SDMLayerState:
    return layer.create_kv_cache(batch, 1, dtype or layer.Wo.weight.dtype)


@torch.no_grad()
def decode(layer: SparseDeltaMemory, cache: SDMLayerState, x: Tensor, **options: Any) -> Tensor:
    return layer(x, cache=cache, **options)[0]


def replayed() -> bool:
    """Whether the latest call ran as a graph."""
    return bool(last_dispatch().get("graph"))


def warm(layer: SparseDeltaMemory, cache: SDMLayerState, x: Tensor) -> None:
    """Two calls, after which further ones of the kind are replays of a graph that is there."""
    for _ in range(2):
        decode(layer, cache, x)
    assert replayed()


class Sides:
    """A plain and a replayed layer with a cache each, driven with the same tokens."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, batch: int = 2, **options: Any) -> None:
        self.layers = pair(dtype, **options)
        self.caches = [new_cache(layer, batch) for layer in self.layers]
        self.dtype, self.batch = dtype, batch
        self.at = 0

    def step(self, graph: bool, x: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
        """Decode one token on both sides; banks and outputs must have the same bits."""
        if x is None:
            x = token(self.at, self.batch, self.dtype)
        self.at += 1
        want = decode(self.layers[0], self.caches[0], x, **options)
        assert not replayed()
        got = decode(self.layers[1], self.caches[1], x, **options)
        assert replayed() is graph
        assert_same_bits("output", got, want)
        assert_same_bits("bank", self.caches[1].memory, self.caches[0].memory)
        assert self.caches[1].cache_len == self.caches[0].cache_len
        return got, want

    def warm(self) -> None:
        self.step(False)
        self.step(True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"output_gate": True},
        {"normalize_readings": True},
        {"key_weighted_decay": True},
        EVERYTHING,
        {"num_reads": 16},
        {"query_batchnorm": True},
    ],
    ids=["none", "gate", "norm", "weighted", "everything", "same softmax", "batch norm"],
)
def test_two_hundred_tokens(dtype: torch.dtype, batch: int, options: dict[str, Any]) -> None:
    sides = Sides(dtype, batch, **options)
    kept = [sides.step(graph=at > 0) for at in range(200)]
    for at, (got, want) in enumerate(kept):  # none was overwritten by a later token
        assert_same_bits(f"output {at}", got, want)
    assert sides.caches[1].cache_len == 200


def test_a_token_is_one_graph_launch() -> None:
    """What the profiler saw the host do: no kernel launch, one graph launch."""
    layer = pair(**EVERYTHING)[1]
    cache, x = new_cache(layer), token()
    warm(layer, cache, x)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(5):
            decode(layer, cache, x)
        torch.cuda.synchronize()
    names = [event.name for event in seen.events()]
    assert names.count("aten::copy_") <= 10  # token in, output out
    assert not [name for name in names if name in ("aten::addmm", "aten::linear", "aten::softmax")]
    assert not [name for name in names if name in ("cudaLaunchKernel", "cuLaunchKernel", "cuLaunchKernelEx")]


# ---- what a graph stands for ----


def test_weights_changed_in_place_between_tokens() -> None:
    sides = Sides(**EVERYTHING)
    sides.warm()
    for at in range(5):
        for layer in sides.layers:
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter.mul_(0.9)
            if at == 3:
                layer.load_state_dict({name: 1.1 * value for name, value in layer.state_dict().items()})
        sides.step(True)


def test_weights_replaced() -> None:
    sides = Sides(**EVERYTHING)
    sides.warm()
    for layer in sides.layers:
        state = {name: 1.1 * value for name, value in layer.state_dict().items()}
        layer.load_state_dict(state, assign=True)
    sides.warm()
    for layer in sides.layers:
        layer.Wo = copy.deepcopy(layer.Wo)
        with torch.no_grad():
            layer.Wo.weight.neg_()
    sides.warm()
    for layer in sides.layers:
        layer.Wv_write.weight.data = layer.Wv_write.weight.data.t()  # the same address
    sides.warm()
    for layer in sides.layers:
        layer.float()
    sides.step(False, token(0, dtype=torch.float32))
    sides.step(True, token(1, dtype=torch.float32))


def test_a_cache_that_is_reset_and_caches_that_alternate() -> None:
    sides = Sides(**EVERYTHING)
    sides.warm()
    others = [new_cache(layer) for layer in sides.layers]
    for at in range(12):
        sides.caches, others = others, sides.caches
        if at == 7:
            for cache in sides.caches:
                cache.reset()
        sides.step(graph=at > 0)


def test_prompts_between_tokens() -> None:
    sides = Sides(**EVERYTHING)
    sides.warm()
    for _ in range(3):
        x = torch.randn(2, 40, 128, device=DEVICE).bfloat16()
        both = zip(sides.layers, sides.caches, strict=True)
        assert_same_bits("prompt", *(decode(layer, cache, x) for layer, cache in both))
        for _ in range(3):
            sides.step(True)


def test_freed_and_reused_addresses() -> None:
    """Caches that come and go: the allocator hands out the same addresses, also for other shapes."""
    sides = Sides()
    sides.caches.clear()
    for batch in (1, 4, 2, 1, 4):
        sides.batch = batch
        sides.caches = [new_cache(layer, batch) for layer in sides.layers]
        sides.warm()
        sides.step(True)
        sides.caches.clear()
        assert len(token_replay._graphs_of(sides.layers[1])) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_on_and_off(dtype: torch.dtype) -> None:
    sides = Sides(torch.float32, **EVERYTHING)
    for at in range(4):
        sides.step(graph=at > 0)
        with torch.autocast("cuda", dtype=dtype):
            sides.step(graph=at > 0)
            sides.step(graph=True)
        for layer in sides.layers:  # no cast of the old weights is read
            with torch.no_grad():
                layer.Wo.weight.mul_(0.5)


def test_tf32_on_and_off() -> None:
    sides = Sides(torch.float32)
    before = torch.get_float32_matmul_precision()
    try:
        for precision, graph in (("high", False), ("high", True), ("highest", False), ("highest", True)):
            torch.set_float32_matmul_precision(precision)
            sides.step(graph)
    finally:
        torch.set_float32_matmul_precision(before)


def test_inference_mode() -> None:
    layers = pair()
    with torch.inference_mode():
        caches = [new_cache(layer) for layer in layers]
        for at in range(4):
            want, got = (decode(layer, cache, token(at)) for layer, cache in zip(layers, caches, strict=True))
            assert replayed() is (at > 0)
            assert_same_bits("output", got, want)
            assert got.is_inference()


def test_side_streams() -> None:
    sides = Sides(**EVERYTHING)
    sides.warm()
    streams = [torch.cuda.Stream() for _ in range(2)]
    for at in range(6):
        stream = streams[at % 2]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            sides.step(graph=at > 1)
        torch.cuda.current_stream().wait_stream(stream)
    sides.step(True)


def test_two_streams_at_once_share_nothing() -> None:
    """Two caches on two streams, without waiting for each other."""
    plain, graphed = pair(torch.float32, **EVERYTHING)
    inputs = [[token(50 * at + n, 8, torch.float32) for n in range(50)] for at in range(2)]
    wanted = [[decode(plain, cache, x) for x in xs] for xs in inputs for cache in [new_cache(plain, 8)]]
    caches = [new_cache(graphed, 8) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found: list[list[Tensor]] = [[], []]
    for n in range(50):
        for at, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[at].append(decode(graphed, caches[at], inputs[at][n]))
    assert replayed()
    torch.cuda.synchronize()
    for got, want in zip(found, wanted, strict=True):
        assert_same_bits("outputs", torch.stack(got), torch.stack(want))


def test_threads_that_share_a_layer_while_others_draw_random_numbers() -> None:
    plain, graphed = pair()
    inputs = [[token(100 * at + n) for n in range(60)] for at in range(4)]
    wanted = [[decode(plain, cache, x) for x in xs] for xs in inputs for cache in [new_cache(plain)]]
    caches = [new_cache(graphed) for _ in range(4)]
    found: list[list[Tensor]] = [[] for _ in range(4)]
    errors: list[BaseException] = []
    torch.cuda.synchronize()

    def run(at: int) -> None:
        try:
            for x in inputs[at]:
                found[at].append(decode(graphed, caches[at], x))
        except BaseException as error:
            errors.append(error)

    def work() -> None:
        try:
            for _ in range(300):
                nn.functional.dropout(torch.randn(1000, device=DEVICE)).sum().item()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(at,)) for at in range(4)] + [threading.Thread(target=work)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(token_replay._graphs_of(graphed)) == 4
    for got, want in zip(found, wanted, strict=True):
        assert_same_bits("outputs", torch.stack(got), torch.stack(want))


# ---- what runs plain ----


def test_working_memory_of_cublas_that_torch_drops() -> None:
    """Graphs go on using it; nobody else may get it."""
    sides = Sides(**EVERYTHING)
    sides.warm()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = [torch.full((2**18,), 7, dtype=torch.int32, device=DEVICE) for _ in range(256)]
    for _ in range(3):
        sides.step(True)
    assert all(bool((other == 7).all()) for other in others)
    second = Sides(output_gate=True)
    second.warm()
    for _ in range(3):
        sides.step(True)
        second.step(True)


def test_inputs_of_other_layouts() -> None:
    sides = Sides(torch.float32, batch=4, **EVERYTHING)
    sides.warm()
    apart = torch.randn(4, 7, 128, device=DEVICE)
    shifted = torch.randn(4 * 128 + 1, device=DEVICE)[1:].view(4, 1, 128)
    for x in (apart[:, 3:4], shifted, apart[:1, :1].expand(4, 1, 128)):
        sides.step(False, x)
        sides.step(False, x)
    sides.step(True)


def test_hooks_and_wrapped_modules() -> None:
    sides = Sides()
    sides.warm()
    handles = [layer.Wo.register_forward_hook(lambda *given: 2 * given[2]) for layer in sides.layers]
    sides.step(False)
    for handle in handles:
        handle.remove()
    sides.step(True)
    for layer in sides.layers:
        layer.Wo = nn.Sequential(layer.Wo, nn.Dropout())
        layer.eval()
    sides.step(False)
    sides.step(False)


def test_lengths_and_grad_mode() -> None:
    sides = Sides()
    sides.warm()
    sides.step(False, lengths=torch.tensor([1, 0], device=DEVICE))
    x = token(5).requires_grad_()
    plain, graphed = (
        layer(x, cache=cache)[0] for layer, cache in zip(sides.layers, sides.caches, strict=True)
    )
    assert_same_bits("output", graphed, plain)
    assert graphed.requires_grad
    graphed.sum().backward()
    plain.sum().backward()
    sides.step(True)


def test_inside_a_callers_capture() -> None:
    sides = Sides(**EVERYTHING)
    sides.warm()
    room = token()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # kinds of its own: the stream is another one
        decode(sides.layers[1], sides.caches[1], room)
    torch.cuda.current_stream().wait_stream(stream)
    sides.caches[1].memory.copy_(sides.caches[0].memory)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = decode(sides.layers[1], sides.caches[1], room)
    assert not replayed()
    for at in range(5):
        room.copy_(token(at))
        graph.replay()
        assert_same_bits("output", out, decode(sides.layers[0], sides.caches[0], token(at)))
        assert_same_bits("bank", sides.caches[1].memory, sides.caches[0].memory)


def test_suspended_and_reset() -> None:
    sides = Sides(**EVERYTHING)
    sides.warm()
    with suspend_cuda_graphs():
        sides.step(False)
    sides.step(True)
    reset_cuda_graphs()
    sides.warm()
    sides.step(True)


def test_checked_calls_and_no_pdl(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = Sides()
    sides.warm()
    monkeypatch.setenv("SDM_RT_CHECK", "1")
    sides.step(False)
    monkeypatch.delenv("SDM_RT_CHECK")
    monkeypatch.setenv("SDM_RT_PDL", "0")
    sides.warm()


# ---- memory, copies, time ----


def test_copies_of_a_layer_with_graphs() -> None:
    sides = Sides(**EVERYTHING)
    sides.warm()
    other = copy.deepcopy(sides.layers[1])
    assert list(other.state_dict()) == list(sides.layers[0].state_dict())
    sides.layers = (sides.layers[0], other)
    sides.warm()


@pytest.mark.alone
def test_graphs_are_dropped_with_their_memory() -> None:
    layer = pair(**EVERYTHING)[1]
    x = token()
    base = torch.cuda.memory_allocated()

    def rounds(count: int) -> tuple[int, int]:
        for at in range(count):
            cache = new_cache(layer)
            warm(layer, cache, x)
            if at % 2:
                reset_cuda_graphs()
            del cache
            assert len(token_replay._graphs_of(layer)) == 0
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]

    allocated, free = rounds(5)
    again, left = rounds(40)
    assert again == allocated
    assert free - left < 8 * 2**20
    assert allocated - base < 256 * 2**20  # cuBLAS's working memory of the stream of captures


def test_replays_wait_for_nothing() -> None:
    layer = pair(**EVERYTHING)[1]
    cache, x = new_cache(layer), token()
    warm(layer, cache, x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            decode(layer, cache, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert replayed()


def test_a_capture_that_fails_leaves_the_layer_and_the_stream_usable() -> None:
    class Failing(nn.ReLU):
        def forward(self, x: Tensor) -> Tensor:
            if torch.cuda.is_current_stream_capturing():
                torch.cuda.current_stream().synchronize()  # which no capture survives
            return super().forward(x)

    sides = Sides()
    for layer in sides.layers:
        layer.read_act = Failing()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_replay, "_KINDS", token_replay._KINDS | {Failing})
        sides.step(False)
        with pytest.warns(UserWarning, match="without a graph"):
            sides.step(False)
        sides.step(False)
    reset_cuda_graphs()
    for layer in sides.layers:
        layer.read_act = nn.ReLU()
    sides.warm()
    sides.step(True)


def test_an_edited_kernel_is_used(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir()
    for path in find_kernels().iterdir():
        if path.suffix in (".cu", ".cuh"):
            (folder / path.name).write_bytes(path.read_bytes())
            os.utime(folder / path.name, (1, 1))
    sides = Sides()
    sides.warm()
    monkeypatch.setattr(token_replay, "SECONDS_BETWEEN_LOOKS", 0)
    monkeypatch.setenv("SDM_RT_KERNELS", str(folder))
    monkeypatch.setenv("SDM_RT_CACHE_DIR", str(tmp_path / "cache"))  # empty, whatever ran here before
    with (folder / "decode.cu").open("a") as file:
        file.write("// edited\n")
    os.utime(folder / "decode.cu", (2, 2))  # a file of this moment would be read at every call
    sides.step(False)  # the plain call loads the edited kernel first
    sides.warm()
