"""What captured training calls address, with the real planner and argument binding: memory that they own."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdm_rt.ops import write_read_graphs
from sdm_rt.ops.checks import StreamShape
from sdm_rt.ops.write_read_call import WriteReadCall
from sdm_rt.plan import bound
from sdm_rt.plan.launch import Launch
from tests.runtime.plans_without_gpu import STREAM, bind_without_gpu

P, T, W, R, D, S, C = 2, 40, 4, 3, 24, 30, 16
Captured = list[tuple[Launch, dict[str, Any]]]


class Prepared:
    """Stands in for a prepared launch: its argument slots hold Python values."""

    def __init__(self, launch: Launch) -> None:
        self.launch_description = launch
        self.arguments: list[Any] = [None] * len(launch.arguments)

    def set(self, values: Mapping[str, Any]) -> None:
        names = [argument.name for argument in self.launch_description.arguments]
        for name, value in values.items():
            self.arguments[names.index(name)] = value


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Captured, dict[str, Tensor]]]:
    """Each capture: its launches with their arguments, and what the graph keeps."""
    found: list[tuple[Captured, dict[str, Tensor]]] = []

    def capture(sequence: Any, context: int, keep: Any) -> Any:
        launches = []
        for launch, values in sequence:
            launch.set(values)
            names = [argument.name for argument in launch.launch_description.arguments]
            arguments = dict(zip(names, launch.arguments, strict=True))
            launches.append((launch.launch_description, arguments))
        found.append((launches, keep))
        return SimpleNamespace(replay=lambda stream: None)

    bind_without_gpu(monkeypatch, Prepared)
    monkeypatch.setattr(bound.graph, "capture", capture)
    monkeypatch.setattr(write_read_graphs, "current_stream", lambda index: STREAM)
    monkeypatch.setattr(write_read_graphs, "_scratch", write_read_graphs._Scratch())
    return found


def made(streams: dict[str, Tensor], **options: Any) -> write_read_graphs._CapturedCall:
    rows = P * T
    shape = StreamShape(P, rows if "cu_seqlens" in streams else T, S, rows, "cu_seqlens" in streams, False)
    settings = {"snapshot_quant": "none", "grad_bank_fp32": False, "schedule": None, **options}
    call = WriteReadCall(shape, T, C, **settings)
    flat = {
        "k_idx": torch.zeros(rows, W, dtype=torch.int64),
        "k_val": torch.zeros(rows, W),
        "v": torch.zeros(rows, D),
        "beta": torch.zeros(rows, 1),
        "g": torch.zeros(rows, 1),
        "q_idx": torch.zeros(rows, R, dtype=torch.int32),
        "q_val": torch.zeros(rows, R),
    }
    return write_read_graphs._CapturedCall(None, torch.zeros(P * S, D).bfloat16(), flat, call, streams)


def is_inside(address: int, tensors: Mapping[str, Tensor]) -> bool:
    return any(x.data_ptr() <= address < x.data_ptr() + max(x.nbytes, 1) for x in tensors.values())


@pytest.mark.parametrize("streams", ["padded", "lengths", "cu_seqlens"])
@pytest.mark.parametrize(
    "options", [{}, {"grad_bank_fp32": True}, {"snapshot_quant": "int4"}], ids=["", "wide", "int4"]
)
def test_every_pointer_of_a_graph_lies_in_memory_that_it_keeps(
    captured: list[tuple[Captured, dict[str, Tensor]]], streams: str, options: dict[str, Any]
) -> None:
    given = {
        "padded": {},
        "lengths": {"lengths": torch.zeros(P, dtype=torch.int32)},
        "cu_seqlens": {"cu_seqlens": torch.zeros(P + 1, dtype=torch.int64)},
    }[streams]
    call = made(given, **options)
    call._captured_backward()
    assert [len(launches) for launches, _ in captured] == [
        graph.plan.launch_count for graph in (call._forward, call._backward) if graph is not None
    ]
    assert call._backward is not None
    plans = [call._forward.plan, call._backward.plan]
    saved = {buffer.name for buffer in plans[0].buffers if buffer.kept}
    for (launches, kept), plan in zip(captured, plans, strict=True):
        needed = kept.keys() | saved | {buffer.name for buffer in plan.buffers}
        for launch, arguments in launches:
            for argument in launch.arguments:
                value = arguments[argument.name]
                assert value is not None, f"{launch.name}: {argument.name} never set"
                if argument.kind != "pointer":
                    continue
                if argument.name in needed:
                    assert is_inside(value, kept), f"{launch.name}: {argument.name}"
                else:
                    assert value == 0, f"{launch.name}: {argument.name}"  # an output that nobody wants


def test_forward_and_backward_share_what_the_forward_saves_and_the_bank(
    captured: list[tuple[Captured, dict[str, Tensor]]],
) -> None:
    call = made({})
    call._captured_backward()
    (forward, _), (backward, _) = captured
    seen: list[dict[str, int]] = []
    for launches in (forward, backward):
        addresses: dict[str, int] = {}
        for launch, arguments in launches:
            for argument in launch.arguments:
                if argument.kind == "pointer":
                    addresses.setdefault(argument.name, arguments[argument.name])
                    assert addresses[argument.name] == arguments[argument.name]
        seen.append(addresses)
    assert seen[0]["memory"] == seen[1]["memory"] == call._bank.data_ptr()
    kept = [name for name in seen[0].keys() & seen[1].keys() if is_inside(seen[0][name], {"": call.saved})]
    assert kept
    for name in kept:
        assert seen[0][name] == seen[1][name], name


def test_captured_calls_of_a_stream_share_their_working_memory(
    captured: list[tuple[Captured, dict[str, Tensor]]],
) -> None:
    first, second = made({}), made({})
    second._captured_backward()
    first._captured_backward()
    scratch = [kept["scratch"].data_ptr() for _, kept in captured]
    assert scratch[0] == scratch[1]
    assert scratch[2] == scratch[3]
    assert first.saved.data_ptr() != second.saved.data_ptr()
    assert first.is_free()
    holder = first.saved.detach()
    assert not first.is_free()
    view = holder[:8]
    del holder
    assert not first.is_free()
    del view
    assert first.is_free()
