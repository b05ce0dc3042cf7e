"""What top-k hands to the driver, on CPU tensors and a driver that reads launches from memory."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from sdm_rt.ops import topk as front
from sdm_rt.ops import topk_launch as module
from sdm_rt.ops.counters import last_dispatch
from sdm_rt.plan.device import preset
from sdm_rt.plan.topk import TopkShape
from sdm_rt.runtime import driver
from sdm_rt.runtime.launcher import PreparedLaunch
from tests.runtime.cupy_without_gpu import HOPPER
from tests.runtime.fake_driver import CONTEXT, FakeDriver

FACTORS, K = (4, 5), 6
STREAM = 0x57


@dataclass
class Machine:
    """A fake driver, what was prepared for it, and whether sources are untouched since."""

    driver: FakeDriver = field(default_factory=lambda: FakeDriver(4))
    prepared: list[str] = field(default_factory=list)
    untouched: bool = True

    def prepare(self, launch: Any, gpu: Any, stream: int) -> PreparedLaunch:
        self.prepared.append(launch.entry)
        return PreparedLaunch(launch, 0xF0, CONTEXT, True, None)

    def arguments(self, at: int = -1) -> list[int]:
        """Three pointers and the rows."""
        return [struct.unpack("<Q", raw)[0] for raw in self.driver.launches[at].parameters]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    kernels = SimpleNamespace(are_current=lambda specs, generation: machine.untouched, generation=0)
    monkeypatch.setattr(driver, "library", lambda: machine.driver)
    monkeypatch.setattr(module, "prepare", machine.prepare)
    monkeypatch.setattr(module, "kernels", lambda: kernels)
    monkeypatch.setattr(module.device, "gpu", lambda index: HOPPER)
    monkeypatch.setattr(module, "device_model", lambda index: preset("h100"))
    monkeypatch.setattr(module, "current_stream", lambda index: STREAM)
    monkeypatch.setattr(module, "_memo", module._Memo())
    return machine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_selection_passes_scores_and_results(machine: Machine, dtype: torch.dtype) -> None:
    raw = torch.randn(2, 3, 9).to(dtype)
    val, idx = module.select_on_gpu(raw, FACTORS, K)
    assert machine.arguments() == [raw.data_ptr(), val.data_ptr(), idx.data_ptr(), 6]
    assert (val.shape, val.dtype, idx.shape, idx.dtype) == ((2, 3, K), dtype, (2, 3, K), torch.int64)
    assert machine.driver.launches[0].stream == STREAM
    told = last_dispatch()
    assert (told["op"], told["path"]) == ("product_key_topk", "gpu")
    assert told["plan"].shape == TopkShape(6, FACTORS, K, str(dtype).removeprefix("torch."))


def test_a_gradient_passes_slots_and_gradients(machine: Machine) -> None:
    grad_val, idx = torch.randn(7, K), torch.randint(20, (7, K))
    grad_raw = module.select_backward_on_gpu(grad_val, idx, FACTORS, K)
    assert machine.arguments() == [idx.data_ptr(), grad_val.data_ptr(), grad_raw.data_ptr(), 7]
    assert grad_raw.shape == (7, 9)
    assert machine.prepared == ["topk_backward"]
    told = last_dispatch()
    assert (told["op"], told["path"]) == ("product_key_topk_backward", "gpu")
    assert told["plan"].shape == TopkShape(7, FACTORS, K, "float32")


def test_no_more_slots_are_selected_than_there_are(machine: Machine) -> None:
    val, idx = module.select_on_gpu(torch.randn(3, 9), FACTORS, 30)
    assert val.shape == idx.shape == (3, 20)


def test_strided_scores_go_as_a_copy(machine: Machine) -> None:
    raw = torch.randn(3, 18)[:, ::2]
    module.select_on_gpu(raw, FACTORS, K)
    assert machine.arguments()[0] != raw.data_ptr()


def test_no_rows_launch_nothing(machine: Machine) -> None:
    val, idx = module.select_on_gpu(torch.empty(2, 0, 9), FACTORS, K)
    grad_raw = module.select_backward_on_gpu(val, idx, FACTORS, K)
    assert (val.shape, idx.shape, grad_raw.shape) == ((2, 0, K), (2, 0, K), (2, 0, 9))
    assert not machine.driver.launches
    for op in ("product_key_topk", "product_key_topk_backward"):
        assert last_dispatch(op) == {"op": op, "path": "gpu", "plan": None}


def test_a_second_call_prepares_nothing(machine: Machine) -> None:
    for _ in range(2):
        module.select_on_gpu(torch.randn(3, 9), FACTORS, K)
    assert machine.prepared == ["topk"]
    assert len(machine.driver.launches) == 2


def test_an_edited_source_is_prepared_anew(machine: Machine) -> None:
    module.select_on_gpu(torch.randn(3, 9), FACTORS, K)
    machine.untouched = False
    module.select_on_gpu(torch.randn(3, 9), FACTORS, K)
    assert machine.prepared == ["topk", "topk"]


@pytest.mark.parametrize(
    ("shape", "dtype", "factors", "k"),
    [
        ((4, 9), torch.float32, FACTORS, K),
        ((3, 9), torch.bfloat16, FACTORS, K),
        ((3, 9), torch.float32, (5, 4), K),
        ((3, 9), torch.float32, (3, 3, 3), K),
        ((3, 9), torch.float32, FACTORS, K + 1),
    ],
)
def test_another_shape_is_another_preparation(
    machine: Machine, shape: tuple[int, ...], dtype: torch.dtype, factors: tuple[int, ...], k: int
) -> None:
    module.select_on_gpu(torch.randn(3, 9), FACTORS, K)
    module.select_on_gpu(torch.randn(shape).to(dtype), factors, k)
    assert len(machine.prepared) == 2


class Subclass(Tensor):
    """What another library may pass."""


def test_the_operator_is_for_those_who_must_see_it() -> None:
    raw = torch.randn(3, 9)
    assert not front._needs_operator(raw)
    assert not front._needs_operator(torch.nn.Parameter(raw, requires_grad=False))
    assert front._needs_operator(raw.as_subclass(Subclass))
    assert front._needs_operator(raw.to("meta"))
    with FlopCounterMode(display=False):
        assert front._needs_operator(raw)
    inside: list[bool] = []
    torch.func.vmap(lambda row: inside.append(front._needs_operator(row)) or row)(raw)
    assert inside == [True]
    leaf = raw.clone().requires_grad_()
    assert front._needs_operator(leaf)
    with torch.no_grad():
        assert not front._needs_operator(leaf)
