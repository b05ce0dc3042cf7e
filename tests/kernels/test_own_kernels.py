"""The emulator's own kernels give the same integers on the GPU."""

from __future__ import annotations

import pytest
import torch

from tests.emulator.own_kernels import call_of, exchange_launch, make_rows, scan_launch
from tests.kernels.backends import BACKENDS, Backend, device_model, execute, require

pytestmark = [pytest.mark.parametrize("backend", BACKENDS), pytest.mark.usefixtures("kernels_of_the_tests")]


def test_block_scan(backend: Backend) -> None:
    require(backend)
    problem = make_rows(9, 100)
    call, y = call_of(scan_launch(9, 128, pdl=device_model(backend).pdl), problem)
    execute(backend, [call], outputs=[y])
    assert torch.equal(y, problem.scanned())


@pytest.mark.parametrize("cluster", [1, 2, 8])
def test_cluster_exchange(backend: Backend, cluster: int) -> None:
    require(backend)
    if not device_model(backend).clusters:
        pytest.skip(f"{device_model(backend).name} has no clusters")
    problem = make_rows(7, 200)
    call, y = call_of(exchange_launch(7, 256 // cluster if cluster > 1 else 224, cluster), problem)
    execute(backend, [call], outputs=[y])
    assert torch.equal(y, problem.others())
