"""The decode plan against its kernel: signature, macros, shared memory, slices."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from sdm_rt.plan.decode import DECODE_ARGUMENTS, GROUPS, decode_shared_memory, plan_decode
from sdm_rt.plan.device import PRESETS, preset
from sdm_rt.plan.launch import Launch
from sdm_rt.plan.shapes import DecodeShape
from tests.plan.cases import DECODE_CASES

SOURCE = (Path(__file__).parents[2] / "kernels_cu" / "decode.cu").read_text(encoding="utf-8")


def only_launch(shape: DecodeShape, device: str = "h200") -> Launch:
    plan = plan_decode(shape, preset(device))
    (launch,) = plan.kernels()
    assert plan.steps == 1
    return launch


def test_arguments_are_the_kernels_parameters() -> None:
    signature = re.search(r"\bdecode\(([^)]*)\)\s*\{", SOURCE)
    assert signature is not None
    parameters = []
    for parameter in signature[1].split(","):
        kind, name = parameter.strip().rsplit(" ", 1)
        parameters.append((name, "pointer" if "*" in kind else {"long long": "int64", "int": "int32"}[kind]))
    assert parameters == [(argument.name, argument.kind) for argument in DECODE_ARGUMENTS]


def test_a_block_stays_within_the_kernels_launch_bounds() -> None:
    bound = int(re.search(r"#define MAX_THREADS (\d+)", SOURCE)[1])
    for device in PRESETS:
        for shape in DECODE_CASES.values():
            for launch in plan_decode(shape, preset(device)).kernels():
                assert launch.threads <= bound
                assert launch.block[1] == GROUPS


@pytest.mark.parametrize("device", PRESETS)
@pytest.mark.parametrize("case", [name for name, shape in DECODE_CASES.items() if shape.streams])
def test_slices_cover_the_columns_and_rows_fit_the_registers(device: str, case: str) -> None:
    shape = DECODE_CASES[case]
    launch = only_launch(shape, device)
    defines = dict(launch.kernel.defines)
    columns = launch.block[0] * int(defines["VECTOR"])
    assert (launch.grid[1] - 1) * columns < shape.head_dim <= launch.grid[1] * columns
    assert launch.grid[0] == shape.streams
    assert int(defines["K_ROWS"]) * GROUPS >= shape.writes
    assert int(defines["Q_ROWS"]) * GROUPS >= shape.reads
    assert shape.head_dim % int(defines["VECTOR"]) == 0
    assert launch.pdl == launch.triggers == preset(device).pdl


@pytest.mark.parametrize(
    ("shape", "vector", "bank"),
    [
        (DecodeShape(1, 8, 8, 1024), "8", "Bf16"),
        (DecodeShape(1, 8, 8, 1024, bank_dtype="float16"), "8", "Fp16"),
        (DecodeShape(1, 8, 8, 1020, bank_dtype="float32"), "4", "float"),
        (DecodeShape(1, 8, 8, 1020), "1", "Bf16"),
        (DecodeShape(1, 8, 8, 1024, aligned=False), "1", "Bf16"),
    ],
)
def test_threads_move_16_bytes_where_rows_are_aligned(shape: DecodeShape, vector: str, bank: str) -> None:
    defines = dict(only_launch(shape).kernel.defines)
    assert (defines["VECTOR"], defines["BANK"]) == (vector, bank)


def test_shared_memory_by_hand() -> None:
    # Per write 4 words and per read one, both counts rounded up to 4; 4 words for beta; per column v and two
    # words a warp, of which there is one for each thread across a row.
    assert decode_shared_memory(64, 64, 8, 64) == 4 * (256 + 64 + 4 + 17 * 64)
    assert decode_shared_memory(5, 1, 1, 8) == 4 * (4 * 8 + 4 + 4 + 3 * 8)
    assert only_launch(DecodeShape(16, 64, 64, 1024)).shared_memory == 5648


def test_few_streams_get_narrower_slices_until_every_sm_has_a_block() -> None:
    widths = {
        streams: only_launch(DecodeShape(streams, 64, 64, 1024), "h200").block[0]
        for streams in (1, 2, 4, 8, 9)
    }
    # 128 threads of 16 bytes cross a row: slices of 8, 4, 2 threads give 16, 32, 64 blocks a stream.
    assert widths == {1: 2, 2: 2, 4: 2, 8: 4, 9: 8}
    exactly_one_each = dataclasses.replace(preset("h200"), sm_count=128)
    (launch,) = plan_decode(DecodeShape(8, 64, 64, 1024), exactly_one_each).kernels()
    assert launch.block[0] == 8


def test_streams_change_neither_the_module_nor_the_order_of_sums() -> None:
    specs = {only_launch(DecodeShape(streams, 64, 64, 1024)).kernel for streams in (1, 2, 16, 64, 1000)}
    assert len(specs) == 1


def test_macros_of_a_variant() -> None:
    assert only_launch(DecodeShape(16, 64, 64, 1024)).kernel.defines == (
        ("BANK", "Bf16"),
        ("GROUPS", "32"),
        ("K_ROWS", "2"),
        ("Q_ROWS", "2"),
        ("SDM_PDL_TRIGGER", "1"),
        ("SDM_PDL_WAIT", "1"),
        ("VECTOR", "8"),
    )


@pytest.mark.parametrize(
    ("lanes", "rows"), [(1, 1), (32, 1), (33, 2), (64, 2), (65, 4), (96, 4), (129, 8), (256, 8)]
)
def test_rows_a_thread_holds_are_a_power_of_two(lanes: int, rows: int) -> None:
    for shape in (DecodeShape(1, lanes, 1, 64), DecodeShape(1, 1, lanes, 64)):
        defines = dict(only_launch(shape).kernel.defines)
        assert (defines["K_ROWS"], defines["Q_ROWS"]) == (str(rows), str(rows))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"streams": -1}, "streams must be in"),
        ({"writes": 0}, r"writes must be in 1\.\.256, got 0"),
        ({"reads": 257}, r"reads must be in 1\.\.256, got 257"),
        ({"head_dim": 0}, r"head_dim must be in 1\.\.16384, got 0"),
        ({"bank_dtype": "float64"}, "bank_dtype must be one of"),
        ({"index_dtype": "uint32"}, "index_dtype must be one of"),
    ],
)
def test_shapes_out_of_range_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(DecodeShape(1, 8, 8, 64), **changes)
