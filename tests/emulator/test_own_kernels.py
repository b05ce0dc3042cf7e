"""The block scan and the cluster exchange under the emulator, for many shapes and orders of threads."""

from __future__ import annotations

import pytest
import torch

from tests.emulator.own_kernels import exchange_launch, make_rows, run_rows, scan_launch


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("rows", "columns", "threads"), [(1, 1, 32), (5, 50, 64), (4, 128, 128), (3, 33, 96)]
)
def test_block_scan(rows: int, columns: int, threads: int, seed: int) -> None:
    problem = make_rows(rows, columns, seed)
    y, counts = run_rows(scan_launch(rows, threads), problem, seed=seed)
    torch.testing.assert_close(y, problem.scanned(), rtol=0, atol=0)
    assert counts.blocks == -(-rows // 2)
    assert counts.barriers == 2 * rows
    assert counts.warp_operations == 5 * rows * threads // 32
    assert counts.pdl_waits == counts.blocks * threads


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("rows", "columns", "threads", "cluster"),
    [(2, 1, 32, 1), (7, 120, 64, 2), (4, 200, 64, 4), (3, 256, 32, 8)],
)
def test_cluster_exchange(rows: int, columns: int, threads: int, cluster: int, seed: int) -> None:
    problem = make_rows(rows, columns, seed)
    y, counts = run_rows(exchange_launch(rows, threads, cluster), problem, seed=seed)
    torch.testing.assert_close(y, problem.others(), rtol=0, atol=0)
    assert counts.blocks == cluster * -(-rows // 3)
    assert counts.cluster_barriers == -(-rows // 3)


def test_a_launch_without_pdl_needs_no_wait() -> None:
    problem = make_rows(3, 40)
    y, counts = run_rows(scan_launch(3, 64, pdl=False), problem)
    torch.testing.assert_close(y, problem.scanned(), rtol=0, atol=0)
    assert counts.pdl_waits == 0
