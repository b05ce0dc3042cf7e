"""Calls that come again with the same pointers, replayed as CUDA graphs, on a GPU: the bits of launches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from sdm_rt import last_dispatch, reset_cuda_graphs, suspend_cuda_graphs
from sdm_rt.bench.cases import Case, Inputs, make_inputs
from sdm_rt.bench.forward import no_grad_call
from sdm_rt.bench.training import LEAVES, training_forward
from sdm_rt.runtime.replays import LEAST_LAUNCHES

pytestmark = pytest.mark.gpu

CASE = Case(2, 400, 16, 8, 72, 256)


@pytest.fixture(autouse=True)
def no_graphs() -> Iterator[None]:
    reset_cuda_graphs()
    yield
    reset_cuda_graphs()


class Loop:
    """Training steps on tensors that stay where they are; what changes between steps is copied into them."""

    def __init__(self) -> None:
        self.inputs = make_inputs(CASE, torch.device("cuda"))
        for name in LEAVES:
            getattr(self.inputs, name).requires_grad_()
        self.replayed: list[tuple[bool, bool]] = []

    def step(self, seed: int) -> list[Tensor]:
        new = make_inputs(CASE, torch.device("cuda"), seed)
        with torch.no_grad():
            for name in (*LEAVES, "k_idx", "q_idx"):
                getattr(self.inputs, name).copy_(getattr(new, name))
        return self.run(self.inputs, new.grad_readings)

    def run(self, inputs: Inputs, incoming: Tensor) -> list[Tensor]:
        for name in LEAVES:
            getattr(inputs, name).grad = None
        readings = training_forward(CASE, inputs, "stepwise")
        assert last_dispatch()["plan"].launch_count >= LEAST_LAUNCHES
        forward = last_dispatch()["graph"]
        final = inputs.memory.detach().clone()
        readings.backward(incoming)
        self.replayed.append((forward, last_dispatch()["graph"]))
        return [
            readings.detach(),
            final,
            inputs.memory.detach().clone(),
            *(getattr(inputs, name).grad for name in LEAVES),
        ]


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    for left, right in zip(got, want, strict=True):
        assert torch.equal(left, right)


def test_steps_replay_and_give_the_bits_of_launches() -> None:
    loop = Loop()
    with suspend_cuda_graphs():
        wanted = [[tensor.clone() for tensor in loop.step(seed)] for seed in range(3)]
    assert loop.replayed == [(False, False)] * 3
    for _ in range(5):
        for seed, want in enumerate(wanted):
            got = loop.step(seed)
            assert_same(got, want)
            del got
    assert any(forward for forward, _ in loop.replayed)
    assert any(backward for _, backward in loop.replayed)


def test_other_memory_is_never_answered_by_an_old_graph() -> None:
    loop = Loop()
    for seed in range(6):
        loop.step(seed)
    held = [loop.step(7) for _ in range(3)]  # results are kept, so later ones lie elsewhere
    with suspend_cuda_graphs():
        want = loop.step(7)
    for got in held:
        assert_same(got, want)


def test_side_streams_have_graphs_of_their_own() -> None:
    loop = Loop()
    with suspend_cuda_graphs():
        want = [tensor.clone() for tensor in loop.step(3)]
    torch.cuda.synchronize()
    for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for _ in range(4):
                got = loop.step(3)
        stream.synchronize()
        assert_same(got, want)


def test_calls_without_gradients_replay_too() -> None:
    inputs = make_inputs(CASE, torch.device("cuda"))
    start = inputs.memory.clone()

    def call() -> tuple[Tensor, Tensor, bool]:
        inputs.memory.copy_(start)
        readings = no_grad_call(CASE, inputs, "stepwise")
        return readings.cpu(), inputs.memory.cpu(), last_dispatch()["graph"]  # so that blocks come again

    first = call()
    calls = [call() for _ in range(8)]
    assert not first[2]
    assert any(replayed for *_, replayed in calls)
    for readings, bank, _ in calls:
        assert_same([readings, bank], list(first[:2]))


def test_the_variable_leaves_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDM_RT_REPLAY", "0")
    loop = Loop()
    for _ in range(5):
        loop.step(0)
    assert loop.replayed == [(False, False)] * 5
