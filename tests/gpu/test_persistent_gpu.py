"""The persistent forward on a GPU at real shapes: the bits of the stepwise one, its repeats, its graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sdm_rt import last_dispatch
from sdm_rt.bench.cases import Case, make_inputs
from sdm_rt.bench.forward import no_grad_call
from sdm_rt.ops.plan_inputs import device_model

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("clusters")]

CASE = Case(2, 600, 64, 64, 1024, 4096)
CASES = {
    "wide": CASE,
    "hot": replace(CASE, hot=True),
    "large chunks": Case(2, 700, 256, 128, 1024, 8192),
    "odd columns": Case(3, 200, 64, 33, 1001, 2048),
    "narrow": Case(16, 300, 64, 32, 128, 4096),
    "many streams": Case(64, 200, 64, 32, 64, 1024),
    "float32": Case(2, 300, 64, 64, 512, 4096, dtype=torch.float32),
}


def call(case: Case, schedule: str) -> tuple[Tensor, Tensor]:
    """Readings and the bank after a call without gradients."""
    inputs = make_inputs(case, torch.device("cuda"))
    readings = no_grad_call(case, inputs, schedule)
    assert last_dispatch()["schedule"] == schedule
    return readings, inputs.memory


@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_the_stepwise_schedule(name: str) -> None:
    if name == "large chunks" and device_model(torch.cuda.current_device()).shared_memory_per_block < 153_600:
        pytest.skip("needs 153,600 bytes of shared memory a block")
    for got, want in zip(call(CASES[name], "persistent"), call(CASES[name], "stepwise"), strict=True):
        assert torch.equal(got, want)


def test_a_hundred_calls_give_the_same_bits() -> None:
    want = call(CASE, "persistent")
    for _ in range(100):
        for got, one in zip(call(CASE, "persistent"), want, strict=True):
            assert torch.equal(got, one)


def test_a_graph_of_a_call_replays_it() -> None:
    want = call(CASE, "persistent")
    inputs = make_inputs(CASE, torch.device("cuda"))
    start = inputs.memory.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        readings = no_grad_call(CASE, inputs, "persistent")
    for _ in range(2):
        inputs.memory.copy_(start)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(readings, want[0])
        assert torch.equal(inputs.memory, want[1])
