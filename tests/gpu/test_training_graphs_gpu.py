"""CUDA graphs of training: a layer's own (``cuda_graph=True``), and a whole step that the caller captures."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sdm_rt import SparseDeltaMemory, last_dispatch, reset_cuda_graphs, suspend_cuda_graphs
from tests.gpu.training import assert_same, gradients_of, layer_step, new_layer, tokens
from tests.tolerances import assert_same_bits

pytestmark = pytest.mark.gpu

EVERYTHING = {"output_gate": True, "normalize_readings": True, "key_weighted_decay": True}


@pytest.fixture(autouse=True)
def no_graphs_left() -> Iterator[None]:
    reset_cuda_graphs()
    yield
    reset_cuda_graphs()


def pair(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[SparseDeltaMemory, SparseDeltaMemory]:
    """The same layer without and with graphs; the second has seen the shape of `tokens` once."""
    plain, replayed = new_layer(dtype, **options), new_layer(dtype, cuda_graph=True, **options)
    layer_step(replayed, tokens(99, dtype=dtype))
    return plain, replayed


# ---- cuda_graph=True ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, EVERYTHING, {"snapshot_quant": "int4", "grad_bank_fp32": True}],
    ids=["plain", "everything", "int4"],
)
def test_replayed_steps_equal_plain_ones(dtype: torch.dtype, options: dict[str, Any]) -> None:
    plain, replayed = pair(dtype, **options)
    for seed in range(10):
        got = layer_step(replayed, tokens(seed, dtype=dtype))
        assert last_dispatch("sdm_write_read_backward")["graph"] is True
        assert_same(got, layer_step(plain, tokens(seed, dtype=dtype)))


def test_a_hundred_replays_give_the_same_bits() -> None:
    plain, replayed = pair(torch.bfloat16)
    x = tokens(dtype=torch.bfloat16)
    want = layer_step(plain, x)
    for _ in range(100):
        assert_same(layer_step(replayed, x), want)


@pytest.mark.usefixtures("repeats_launch_kernels")
def test_lengths_change_between_replays() -> None:
    plain, replayed = new_layer(), new_layer(cuda_graph=True)
    for at, lengths in enumerate(([100, 40], [3, 100], [0, 1], [100, 100], [64, 32])):
        given = {"lengths": torch.tensor(lengths, device="cuda")}
        got = layer_step(replayed, tokens(at), **given)
        assert last_dispatch("sdm_write_read_backward")["graph"] is (at > 0)
        assert_same(got, layer_step(plain, tokens(at), **given))


def test_calls_that_wait_for_their_backward() -> None:
    plain, replayed = pair()
    inputs = [tokens(seed) for seed in range(3)]
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        found = []
        for layer in (replayed, plain):
            outputs = [layer(x)[0] for x in inputs]
            for at in order:
                outputs[at].square().sum().backward()
            found.append(gradients_of(layer))
        assert_same(*found)


def test_layers_that_share_a_shape_and_checkpointing() -> None:
    pairs = [pair(**options) for options in ({}, {"output_gate": True}, {"normalize_readings": True})]
    stacks = [nn.ModuleList(layers) for layers in zip(*pairs, strict=True)]

    def gradients(stack: nn.ModuleList, seed: int, repeat: str) -> dict[str, Tensor]:
        x = tokens(seed).requires_grad_()

        def run(x: Tensor) -> Tensor:
            for layer in stack:
                x = x + layer(x)[0]
            return x

        out = run(x) if repeat == "no" else checkpoint(run, x, use_reentrant=repeat == "reentrant")
        out.square().mean().backward()
        assert x.grad is not None
        return gradients_of(stack) | {"x": x.grad}

    for seed in range(2):
        want = gradients(stacks[0], seed, "no")
        for repeat in ("no", "reentrant", "non-reentrant"):
            assert_same(gradients(stacks[1], seed, repeat), want)


def test_saved_tensors_on_the_cpu() -> None:
    plain, replayed = pair()
    for seed in range(2):
        with torch.autograd.graph.save_on_cpu():
            got = layer_step(replayed, tokens(seed))
        assert_same(got, layer_step(plain, tokens(seed)))


@pytest.mark.usefixtures("repeats_launch_kernels")
def test_suspended_and_reset() -> None:
    plain, replayed = pair()
    layer_step(replayed, tokens())
    assert last_dispatch("sdm_write_read_backward")["graph"] is True
    with suspend_cuda_graphs():
        got = layer_step(replayed, tokens())
        assert last_dispatch("sdm_write_read_backward")["graph"] is False
    want = layer_step(plain, tokens())
    assert_same(got, want)
    out, _ = replayed(tokens())
    assert last_dispatch("sdm_write_read")["graph"] is True
    reset_cuda_graphs()
    out.square().mean().backward()
    assert last_dispatch("sdm_write_read_backward")["graph"] is False
    for name, gradient in gradients_of(replayed).items():
        assert_same_bits(name, gradient, want[name])


@pytest.mark.alone
def test_graphs_are_dropped_with_their_memory() -> None:
    _, replayed = pair()

    def rounds(count: int) -> tuple[int, int]:
        for at in range(count):
            layer_step(replayed, tokens(at))
            layer_step(replayed, tokens(at))
            reset_cuda_graphs()
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]

    allocated, free = rounds(5)
    again, left = rounds(30)
    assert again == allocated
    assert free - left < 8 * 2**20


def test_replays_wait_for_nothing() -> None:
    _, replayed = pair()
    layer_step(replayed, tokens())
    x = tokens()
    torch.cuda.set_sync_debug_mode("error")
    try:
        replayed(x)[0].square().mean().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert last_dispatch("sdm_write_read_backward")["graph"] is True


def test_two_streams_have_graphs_of_their_own() -> None:
    plain, _ = pair()
    want = [layer_step(plain, tokens(seed)) for seed in range(2)]
    replayed = [new_layer(cuda_graph=True) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    found: list[list[dict[str, Tensor]]] = [[], []]
    inputs = [tokens(seed) for seed in range(2)]
    torch.cuda.synchronize()
    for _ in range(10):
        for at, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[at].append(layer_step(replayed[at], inputs[at]))
    assert last_dispatch("sdm_write_read_backward")["graph"] is True
    torch.cuda.synchronize()
    for results, wanted in zip(found, want, strict=True):
        for got in results:
            assert_same(got, wanted)


def test_no_pdl_inside_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, replayed = pair()
    want = layer_step(plain, tokens())
    assert_same(layer_step(replayed, tokens()), want)
    monkeypatch.setenv("SDM_RT_PDL", "0")
    for _ in range(3):
        got = layer_step(replayed, tokens())
    assert last_dispatch("sdm_write_read_backward")["graph"] is True
    assert_same(got, want)


# ---- a step that the caller captures ----


class Step:
    """A whole training step of a layer, with the optimizer, on fixed inputs."""

    def __init__(self, layer: SparseDeltaMemory) -> None:
        self.layer = layer
        self.optimizer = torch.optim.SGD(layer.parameters(), lr=1e-2)
        self.x = tokens()
        self.target = tokens(1)

    def __call__(self) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.mse_loss(self.layer(self.x)[0], self.target)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


@pytest.mark.parametrize("own_graphs", [False, True], ids=["plain", "cuda_graph"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_captured_step_replayed_a_hundred_times(dtype: torch.dtype, own_graphs: bool) -> None:
    eager = new_layer(dtype, **EVERYTHING)
    start = copy.deepcopy(eager.state_dict())
    captured = new_layer(dtype, cuda_graph=own_graphs, **EVERYTHING)
    steps = [Step(layer) for layer in (eager, captured)]
    for step in steps:
        step.x, step.target = step.x.to(dtype), step.target.to(dtype)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            steps[1]()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    steps[1].optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = steps[1]()
    assert last_dispatch("sdm_write_read_backward")["graph"] is False
    captured.load_state_dict(start)
    for at in range(100):
        graph.replay()
        want = steps[0]()
        if at % 10 == 0:
            assert_same_bits("loss", loss, want)
    assert_same(
        {name: parameter.detach() for name, parameter in captured.named_parameters()},
        {name: parameter.detach() for name, parameter in eager.named_parameters()},
    )


def test_an_eager_step_waits_for_nothing() -> None:
    step = Step(new_layer(**EVERYTHING))
    for _ in range(2):
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_cold_call_inside_a_capture_says_what_to_do_and_leaves_the_stream_usable() -> None:
    x = tokens()
    layer_step(new_layer(), x)
    layer = new_layer(num_writes=13, num_reads=11, chunk_size=24)  # a shape that nothing else compiles
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="run warmup first"), torch.cuda.graph(graph):
        layer(x)
    want = layer_step(layer, x)
    assert_same(layer_step(layer, x), want)
