"""The emulator's own kernels: problems, launches and expected results of tests/emulator/kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sdm_rt.plan.launch import Argument, Launch, pointers
from sdm_rt.runtime.kernel import KernelSpec
from tests.emulator.build import Replacement
from tests.emulator.harness import Call, LaunchCounts, run

ARGUMENTS = (*pointers("x", "lengths", "y"), Argument("rows", "int32"), Argument("columns", "int32"))


@dataclass(frozen=True)
class RowProblem:
    """Integer rows of different lengths; what lies past a row's length is large."""

    x: Tensor  # [rows, columns] int32
    lengths: Tensor  # [rows] int32

    @property
    def valid(self) -> Tensor:
        return torch.arange(self.x.shape[1])[None, :] < self.lengths[:, None]

    def scanned(self) -> Tensor:
        """Inclusive prefix sums of each row, 0 past its length."""
        sums = self.x.masked_fill(~self.valid, 0).cumsum(dim=1)
        return sums.masked_fill(~self.valid, 0).int()

    def others(self) -> Tensor:
        """Each row's sum without the element itself, 0 past its length."""
        x = self.x.masked_fill(~self.valid, 0)
        return (x.sum(dim=1, keepdim=True) - x).masked_fill(~self.valid, 0).int()


def make_rows(rows: int, columns: int, seed: int = 0) -> RowProblem:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(1, 100, (rows, columns), generator=generator, dtype=torch.int32)
    lengths = torch.randint(1, columns + 1, (rows,), generator=generator, dtype=torch.int32)
    lengths[0] = columns
    if rows > 1:
        lengths[-1] = columns // 2
    problem = RowProblem(x, lengths)
    x[~problem.valid] = 1_000_000
    return problem


def scan_launch(rows: int, threads: int, *, shared_memory: int | None = None, pdl: bool = True) -> Launch:
    per_block = 2
    defines = (("ROWS", str(per_block)), ("SDM_PDL_WAIT", str(int(pdl))))
    return Launch(
        name="scan",
        kernel=KernelSpec("block_scan.cu", ("block_scan",), defines),
        entry="block_scan",
        grid=(-(-rows // per_block), 1, 1),
        block=(threads, 1, 1),
        arguments=ARGUMENTS,
        reads=("x", "lengths"),
        writes=("y",),
        bytes_moved=0,
        floor_bytes=0,
        shared_memory=4 * (threads + threads // 32) if shared_memory is None else shared_memory,
        pdl=pdl,
    )


def exchange_launch(
    rows: int, threads: int, cluster: int, *, shared_memory: int | None = None, pdl: bool = True
) -> Launch:
    per_cluster = 3
    defines = (("ROWS", str(per_cluster)), ("SDM_PDL_WAIT", str(int(pdl))))
    return Launch(
        name="exchange",
        kernel=KernelSpec("cluster_exchange.cu", ("cluster_exchange",), defines),
        entry="cluster_exchange",
        grid=(cluster * -(-rows // per_cluster), 1, 1),
        block=(threads, 1, 1),
        cluster=(cluster, 1, 1),
        arguments=ARGUMENTS,
        reads=("x", "lengths"),
        writes=("y",),
        bytes_moved=0,
        floor_bytes=0,
        shared_memory=8 * cluster if shared_memory is None else shared_memory,
        pdl=pdl,
    )


def call_of(launch: Launch, problem: RowProblem) -> tuple[Call, Tensor]:
    """Bind a problem to a launch; return the call and its output."""
    rows, columns = problem.x.shape
    y = torch.empty_like(problem.x)
    values = {"x": problem.x, "lengths": problem.lengths, "y": y, "rows": rows, "columns": columns}
    return Call(launch, values), y


def run_rows(
    launch: Launch, problem: RowProblem, *, seed: int = 0, replacements: Sequence[Replacement] = ()
) -> tuple[Tensor, LaunchCounts]:
    """Emulate one of the two kernels on a problem; return y and the counts."""
    call, y = call_of(launch, problem)
    (counts,) = run([call], outputs=[y], seed=seed, replacements=replacements)
    return y, counts
