"""What `last_dispatch` tells of calls on CPU tensors: every public op under its name, and its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

import sdm_rt
from sdm_rt import last_dispatch, repeated_write_slots, reset_dispatch
from sdm_rt.ops import counters
from tests.kernels.phase1 import make_chunks
from tests.kernels.phase1_backward import make_gradients, op_arguments
from tests.kernels.solve import chunk_matrices
from tests.layer_reference import make_layer
from tests.problems import make_problem

OPS = {
    "sdm_write_read": "recurrence",
    "sdm_decode_step": "recurrence",
    "product_key_topk": "definition",
    "phase1_forward": "definition",
    "phase1_backward": "definition",
    "phase1_backward_det": "definition",
    "wy_solve": "definition",
}
WRITE_READ = {
    "path": "recurrence",
    "device": "cpu",
    "streams": 2,
    "tokens": 5,
    "writes": 3,
    "reads": 2,
    "head_dim": 5,
    "slots": 6,
    "bank_dtype": "float32",
    "snapshot_quant": "none",
}


@pytest.fixture(autouse=True)
def nothing_told() -> Iterator[None]:
    reset_dispatch()
    yield
    reset_dispatch()


def write_read(functional: bool = False) -> torch.Tensor:
    problem = make_problem(2, 4, 3, 2, 5, 6, lengths=[4, 1]).cast(torch.float32)
    inputs = problem.inputs() | {"v": problem.v.clone().requires_grad_()}
    options: dict[str, Any] = problem.options()
    if functional:
        return sdm_rt.sdm_write_read(problem.memory.clone(), **inputs, **options, return_final_bank=True)[0]
    return sdm_rt.sdm_write_read(problem.memory.clone(), **inputs, **options)


def decode() -> None:
    problem = make_problem(2, 1, 3, 2, 5, 6).cast(torch.float32)
    sdm_rt.sdm_decode_step(problem.memory.clone(), **problem.inputs())


def topk() -> torch.Tensor:
    val: torch.Tensor = sdm_rt.product_key_topk(torch.randn(3, 9, requires_grad=True), (4, 5), 6)[0]
    return val


def phase1_backward_arguments() -> dict[str, torch.Tensor]:
    return op_arguments(make_chunks(2, 5, 3, 4, 20), make_gradients(2, 5, 3, 4, 0))


CALLS: dict[str, Callable[[], object]] = {
    "sdm_write_read": write_read,
    "sdm_decode_step": decode,
    "product_key_topk": topk,
    "phase1_forward": lambda: sdm_rt.phase1_forward(
        **make_chunks(2, 5, 3, 4, 20).inputs(), num_memory_slots=20
    ),
    "phase1_backward": lambda: sdm_rt.phase1_backward(**phase1_backward_arguments()),
    "phase1_backward_det": lambda: sdm_rt.phase1_backward_det(**phase1_backward_arguments()),
    "wy_solve": lambda: sdm_rt.wy_solve(*chunk_matrices(2, 10)),
}


@pytest.mark.parametrize("op", OPS)
def test_every_op_is_told_under_its_public_name(op: str) -> None:
    assert op in sdm_rt.__all__
    assert last_dispatch() == last_dispatch(op) == {}
    CALLS[op]()
    told = last_dispatch()
    assert told.items() >= {"op": op, "path": OPS[op]}.items()
    assert "plan" not in told
    assert told == last_dispatch(op)


def test_no_op_is_left_out() -> None:
    others = {"Phase1", "SDMLayerState", "SparseDeltaMemory", "SparseDeltaMemoryArgs", "Cache"}
    others |= {"l2_normalize", "last_dispatch", "repeated_write_slots", "reset_dispatch"}
    others |= {"reset_cuda_graphs", "suspend_cuda_graphs"}
    ops = {name for name in sdm_rt.__all__ if not name.endswith(("Error", "Warning"))} - others
    assert ops == OPS.keys() == CALLS.keys()


@pytest.mark.parametrize("functional", [False, True], ids=["in place", "final bank"])
def test_a_backward_is_told_when_it_runs(functional: bool) -> None:
    readings, val = write_read(functional), topk()
    forward = {"op": "sdm_write_read", **WRITE_READ}
    assert last_dispatch("sdm_write_read") == forward
    assert last_dispatch()["op"] == "product_key_topk"
    readings.sum().backward()
    assert last_dispatch() == {"op": "sdm_write_read_backward", **WRITE_READ}
    assert last_dispatch("product_key_topk_backward") == {}
    val.sum().backward()
    assert last_dispatch() == {"op": "product_key_topk_backward", "path": "definition"}
    assert last_dispatch("sdm_write_read") == forward


def test_a_training_step_of_a_layer_tells_all_four() -> None:
    out, _ = make_layer()(torch.randn(2, 7, 12, dtype=torch.float64))
    assert last_dispatch()["op"] == "sdm_write_read"
    assert last_dispatch("product_key_topk")
    out.sum().backward()
    assert last_dispatch()["op"] == "product_key_topk_backward"
    assert last_dispatch("sdm_write_read_backward")["tokens"] == 7 * 2 * make_layer().num_heads


def test_compiled_calls_are_told_and_shapes_alone_are_not() -> None:
    torch._dynamo.reset()
    layer = make_layer()
    sdm_rt.product_key_topk(torch.empty(3, 9, device="meta"), (4, 5), 6)
    sdm_rt.wy_solve(*(x.to("meta") for x in chunk_matrices(2, 10)))
    assert last_dispatch() == {}
    out, _ = torch.compile(layer, backend="aot_eager", fullgraph=True)(
        torch.randn(2, 7, 12, dtype=torch.float64)
    )
    out.sum().backward()
    for op in ("sdm_write_read", "product_key_topk"):
        assert last_dispatch(op)["op"] == op
        assert last_dispatch(f"{op}_backward")["op"] == f"{op}_backward"


def test_telling_breaks_no_graph() -> None:
    torch._dynamo.reset()
    torch.compile(sdm_rt.wy_solve, backend="eager", fullgraph=True)(*chunk_matrices(2, 10))
    assert last_dispatch() == {"op": "wy_solve", "path": "definition"}


def test_telling_compiles_nothing_again() -> None:
    """The compiler guards on what a compiled op changes; other ops and a reset must leave that alone."""
    torch._dynamo.reset()
    counter, chunks = CompileCounter(), chunk_matrices(2, 10)
    solve = torch.compile(sdm_rt.wy_solve, backend=counter, fullgraph=True)
    solve(*chunks)
    for call in CALLS.values():
        result = call()
        if isinstance(result, torch.Tensor) and result.requires_grad:
            result.sum().backward()
        solve(*chunks)
    reset_dispatch()
    solve(*chunks)
    assert last_dispatch()["op"] == "wy_solve"
    assert counter.frame_count == 1


def test_calls_without_values_and_calls_that_fail_are_not_told() -> None:
    with FakeTensorMode():
        a = torch.zeros(2, 10, 10)
        sdm_rt.wy_solve(a, torch.zeros(2, 10), a)
    sdm_rt.wy_solve(*(tensor.to("meta") for tensor in chunk_matrices(2, 10)))
    assert last_dispatch() == {}
    arguments = phase1_backward_arguments()
    reset_dispatch()  # making the arguments ran the forward
    with pytest.raises(RuntimeError):
        sdm_rt.phase1_backward(**arguments | {"payload": torch.full_like(arguments["payload"], -1)})
    assert last_dispatch() == {}


def test_copies_are_handed_out_and_a_reset_forgets_every_op() -> None:
    topk()
    decode()
    last_dispatch()["op"] = last_dispatch("product_key_topk")["op"] = "changed"
    assert last_dispatch()["op"] == "sdm_decode_step"
    assert last_dispatch("product_key_topk")["op"] == "product_key_topk"
    reset_dispatch()
    assert last_dispatch() == last_dispatch("product_key_topk") == last_dispatch("sdm_decode_step") == {}


def test_the_first_op_of_a_gpu_may_run_in_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its counter of repeats is for all later calls; the CPU stands in for the GPU."""
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(counters, "_on_device", {})
    repeated_write_slots()
    with torch.inference_mode():
        counters.device_repeats(torch.device("cpu")).add_(3)
    assert repeated_write_slots() == 3
    assert repeated_write_slots() == 0
