"""One switch for tests of kernels: the same planned launches on the emulator or on the GPU.

Tensors are on the CPU either way and are changed in place; on the GPU the launches work on copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pytest
import torch
from torch import Tensor

from sdm_rt.plan.device import DeviceModel, preset
from tests.emulator import build, harness
from tests.emulator.harness import Call

__all__ = ["BACKENDS", "Backend", "device_model", "execute", "require"]

Backend = Literal["emulator", "gpu"]
BACKENDS = ["emulator", pytest.param("gpu", marks=pytest.mark.gpu)]


def require(backend: Backend) -> None:
    """Skip the running test where the backend is missing."""
    if backend == "emulator":
        build.require()
    elif not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU; torch.cuda.is_available() is False here")


def device_model(backend: Backend) -> DeviceModel:
    """Return the GPU that plans are made for: an H100 for the emulator, the real one otherwise."""
    if backend == "emulator":
        return preset("h100")
    from sdm_rt.ops.plan_inputs import device_model as model_of

    return model_of(torch.cuda.current_device())


def execute(
    backend: Backend,
    calls: Sequence[Call],
    *,
    outputs: Sequence[Tensor] = (),
    scratch: Sequence[Tensor] = (),
    seed: int = 0,
) -> None:
    """Run launches one after another; see `harness.run` for the parameters."""
    if backend == "emulator":
        harness.run(calls, outputs=outputs, scratch=scratch, seed=seed)
    else:
        _execute_on_gpu(calls, (*outputs, *scratch))


def _execute_on_gpu(calls: Sequence[Call], unwritten: Sequence[Tensor]) -> None:
    from sdm_rt.runtime.device import gpu
    from sdm_rt.runtime.launcher import prepare

    index = torch.cuda.current_device()
    stream = torch.cuda.current_stream().cuda_stream
    garbage = {tensor.untyped_storage().data_ptr() for tensor in unwritten}
    copies: dict[int, tuple[Tensor, Tensor]] = {}  # storage -> its bytes here and on the GPU

    def address(tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        if start not in copies:
            here = torch.empty(0, dtype=torch.uint8).set_(storage)
            there = torch.full_like(here, 0xFF, device="cuda") if start in garbage else here.cuda()
            copies[start] = (here, there)
        return copies[start][1].data_ptr() + tensor.data_ptr() - start

    for call in calls:
        prepared = prepare(call.launch, gpu(index), stream)
        values = {}
        for argument in call.launch.arguments:
            value = call.values[argument.name]
            if argument.kind == "pointer":
                value = 0 if value is None else address(value)
            values[argument.name] = value
        prepared.set(values)
        prepared.run(stream)
    torch.cuda.synchronize()
    for here, there in copies.values():
        here.copy_(there)
