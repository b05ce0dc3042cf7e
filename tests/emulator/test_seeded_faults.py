"""Faults seeded into sources and launches: each is caught, and the same run without it passes.

docs/testing.md lists what the emulator says to each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch

from sdm_rt.plan.device import preset
from tests.emulator.build import KERNELS_CU, PARALLEL_BUILDS, TEST_KERNELS, Replacement, require
from tests.emulator.harness import EmulatorError
from tests.emulator.own_kernels import exchange_launch, make_rows, run_rows, scan_launch
from tests.kernels.decode import decode_on_emulator, decode_oracle
from tests.problems import make_problem
from tests.tolerances import assert_close

# The first test waits until the faults of all have been compiled and run.
pytestmark = pytest.mark.timeout(900)

VALUES = "values"  # the result differs from the oracle's
SYNC = "__syncthreads();"


def scan(replacements: Sequence[Replacement], missing_bytes: int) -> None:
    problem = make_rows(5, 50)
    launch = scan_launch(5, 64, shared_memory=4 * (64 + 2) - missing_bytes)
    y, _ = run_rows(launch, problem, replacements=replacements)
    assert torch.equal(y, problem.scanned()), "the prefix sums differ"


def exchange(replacements: Sequence[Replacement], missing_bytes: int) -> None:
    problem = make_rows(7, 120)
    launch = exchange_launch(7, 64, 2, shared_memory=16 - missing_bytes)
    y, _ = run_rows(launch, problem, replacements=replacements)
    assert torch.equal(y, problem.others()), "the sums differ"


def decode(replacements: Sequence[Replacement], missing_bytes: int) -> None:
    # A skipped stream, a repeated slot, reads of written rows, an index just past the last stream's rows.
    problem = make_problem(3, 1, 13, 11, 72, 9, writes="repeats", gate_per_write=True, lengths=[1, 0, 1])
    problem.k_idx[2, 0, 3] = problem.q_idx[2, 0, 5] = 27
    problem.k_idx[1, 0] = problem.q_idx[1, 0, 0] = 12
    problem = problem.cast(torch.bfloat16)
    got, _ = decode_on_emulator(
        problem, preset("h100"), replacements=replacements, extra_shared_memory=-missing_bytes
    )
    want = decode_oracle(problem)
    assert_close("readings", got.readings, want.readings, torch.bfloat16)
    assert_close("bank", got.bank, want.bank, torch.bfloat16)
    assert got.repeats == want.repeats, "the count of repeated slots differs"


KERNELS: dict[str, Callable[[Sequence[Replacement], int], None]] = {
    "block_scan.cu": scan,
    "cluster_exchange.cu": exchange,
    "decode.cu": decode,
}


@dataclass(frozen=True)
class Fault:
    """A fault of one kernel and the checks that may catch it first."""

    file: str
    name: str
    caught_by: tuple[str, ...]
    old: str = ""
    new: str = ""
    missing_bytes: int = 0
    occurrence: int | None = None

    @property
    def replacements(self) -> list[Replacement]:
        return [Replacement(self.file, self.old, self.new, self.occurrence)] if self.old else []


FAULTS = [
    Fault("block_scan.cu", "row bound off by one", ("bounds",), "min(rows, (static", "min(rows + 1, (static"),
    Fault("block_scan.cu", "wrong shuffle lane", (VALUES,), "sum, distance);", "sum, distance + 1);"),
    Fault(
        "block_scan.cu",
        "shuffle inside a branch",
        ("deadlock", "mask"),
        "            const int earlier = __shfl_up_sync(0xffffffffu, sum, distance);\n"
        "            if (lane >= distance) ",
        "            if (lane < distance) continue;\n"
        "            const int earlier = __shfl_up_sync(0xffffffffu, sum, distance);\n            ",
    ),
    Fault(
        "block_scan.cu",
        "unwritten output row",
        ("unwritten",),
        "if (column < columns) y",
        "if (column < columns && row + 1 < rows) y",
    ),
    Fault("block_scan.cu", "shared memory 4 bytes short", ("bounds",), missing_bytes=4),
    Fault("block_scan.cu", "shared memory 4 bytes long", ("shared",), missing_bytes=-4),
    Fault(
        "block_scan.cu",
        "padding mask skipped",
        ("unwritten", VALUES),
        "valid ? staged[column] : 0",
        "staged[column]",
    ),
    Fault("block_scan.cu", "padding mask of the output skipped", (VALUES,), "valid ? sum : 0", "sum"),
    Fault("block_scan.cu", "griddepcontrol.wait missing", ("pdl",), "    ptx::pdl_wait();\n", ""),
    Fault(
        "block_scan.cu",
        "wait of the asynchronous copy missing",
        ("unwritten", "copy", "race"),
        "        ptx::copy_wait<0>();\n",
        "",
    ),
    Fault("cluster_exchange.cu", "row bound off by one", ("bounds",), "if (row >= rows)", "if (row > rows)"),
    Fault("cluster_exchange.cu", "wrong shuffle lane", (VALUES,), "sum, distance);", "sum, distance / 2);"),
    Fault(
        "cluster_exchange.cu",
        "unwritten output row",
        ("unwritten",),
        "if (column < columns) y",
        "if (column < columns && row > 0) y",
    ),
    Fault("cluster_exchange.cu", "shared memory 4 bytes short", ("bounds",), missing_bytes=4),
    Fault(
        "cluster_exchange.cu",
        "padding mask skipped",
        (VALUES, "bounds"),
        "valid ? x[row * columns + column] : 0",
        "x[row * columns + column]",
    ),
    Fault("cluster_exchange.cu", "griddepcontrol.wait missing", ("pdl",), "    ptx::pdl_wait();\n", ""),
    Fault(
        "cluster_exchange.cu",
        "cluster barrier missing",
        ("cluster",),
        "    ptx::cluster_arrive();\n    ptx::cluster_wait();\n",
        "",
    ),
    Fault(
        "cluster_exchange.cu",
        "one buffer in place of two",
        ("race",),
        "warp_total[parity][warp] = sum",
        "warp_total[0][warp] = sum",
    ),
    Fault(
        "cluster_exchange.cu",
        "arrival before the write",
        ("race", "unwritten"),
        "            *ptx::map_shared(partial + parity * size + rank, threadIdx.x) = total;\n"
        "            ptx::mbarrier_arrive(&arrived, threadIdx.x);\n",
        "            ptx::mbarrier_arrive(&arrived, threadIdx.x);\n"
        "            *ptx::map_shared(partial + parity * size + rank, threadIdx.x) = total;\n",
    ),
    Fault(
        "decode.cu",
        "row bound off by one",
        ("bounds",),
        "slot < static_cast<unsigned>(S)",
        "slot <= static_cast<unsigned>(S)",
        occurrence=0,
    ),
    Fault("decode.cu", "wrong shuffle lane", (VALUES,), "given, distance);", "given, 2 * distance);"),
    Fault(
        "decode.cu",
        "wrong warp in the tree of sums",
        ("unwritten", "bounds", VALUES),
        "partial + Count / 2 * Warps",
        "partial + Count * Warps",
    ),
    Fault(
        "decode.cu",
        "unwritten output row",
        ("unwritten",),
        "                y[p * D + c] = from_float<BANK>(0.0f);\n",
        "                ;\n",
    ),
    Fault("decode.cu", "shared memory 4 bytes short", ("bounds",), missing_bytes=4),
    Fault("decode.cu", "shared memory 4 bytes long", ("shared",), missing_bytes=-4),
    Fault(
        "decode.cu",
        "padding mask skipped",
        ("bounds", "unwritten", "race", VALUES),
        "(S) && lane_of(i) < W ?",
        "(S) ?",
    ),
    Fault("decode.cu", "stream length ignored", (VALUES,), "(length, 0)) <= 0", "(length, 0)) < 0"),
    Fault("decode.cu", "griddepcontrol.wait missing", ("pdl",), "    ptx::pdl_wait();\n", ""),
    Fault(
        "decode.cu",
        "repeated slot written by all its lanes",
        (VALUES, "race"),
        "const bool first = write.first == lane_of(i);",
        "const bool first = write.first <= lane_of(i);",
    ),
    Fault(
        "decode.cu",
        "weights of a repeated slot not added",
        (VALUES,),
        "write.weight + weights[n]",
        "write.weight",
    ),
    Fault("decode.cu", "read before the write", (VALUES,), "if (q_writer[i] < W4)", "if (false)"),
]


def barriers() -> list[Fault]:
    """Each __syncthreads of each kernel, removed in turn."""
    found = []
    for file in KERNELS:
        folder = next(folder for folder in (KERNELS_CU, TEST_KERNELS) if (folder / file).exists())
        count = (folder / file).read_text().count(SYNC)
        found += [
            Fault(
                file,
                f"__syncthreads {at + 1} of {count} removed",
                ("race", "unwritten"),
                SYNC,
                "",
                occurrence=at,
            )
            for at in range(count)
        ]
    return found


@functools.cache
def caught(fault: Fault) -> tuple[str, str]:
    """Return the check that caught a fault and what it said; ("", "") where nothing did."""
    try:
        KERNELS[fault.file](fault.replacements, fault.missing_bytes)
    except EmulatorError as error:
        return error.kind, str(error)
    except AssertionError as error:
        return VALUES, str(error)
    return "", ""


@pytest.fixture(scope="module", autouse=True)
def results(request: pytest.FixtureRequest) -> None:
    """Run the faults of the selected tests two at a time: most of the time is compiling."""
    require()
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    faults = [call.params["fault"] for call in calls if call is not None and "fault" in call.params]
    with ThreadPoolExecutor(PARALLEL_BUILDS) as pool:
        list(pool.map(caught, faults))


@pytest.mark.parametrize("file", KERNELS)
def test_without_a_fault(file: str) -> None:
    KERNELS[file]([], 0)


@pytest.mark.parametrize("fault", [*FAULTS, *barriers()], ids=lambda fault: f"{fault.file}: {fault.name}")
def test_fault(fault: Fault) -> None:
    kind, report = caught(fault)
    assert kind in fault.caught_by, report or "nothing caught it"
