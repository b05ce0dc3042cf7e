"""``sdm-rt precompile``, ``sdm-rt cache`` and what ``sdm-rt doctor`` says of the runtime."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from sdm_rt.cli import doctor, machine, main
from sdm_rt.cli import precompile as precompile_command
from sdm_rt.cli.precompile import CallShape, kernels_of
from sdm_rt.errors import KernelCompileError
from sdm_rt.plan.backward import plan_backward
from sdm_rt.plan.decode import decode_kernel
from sdm_rt.plan.device import PRESETS, DeviceModel, preset
from sdm_rt.plan.forward import plan_forward
from sdm_rt.plan.shapes import (
    BANK_DTYPES,
    INDEX_DTYPES,
    SNAPSHOTS,
    DecodeShape,
    WriteReadShape,
    dtype_bytes,
)
from sdm_rt.runtime import cache, device, precompile
from sdm_rt.runtime.kernel import KernelSpec
from sdm_rt.runtime.sources import expand, find_kernels

SHAPE = "W=4,R=4,D=8,S=100,dtype=float32"


def one_of_each_file(shape: CallShape, target: str) -> list[KernelSpec]:
    """Return a kernel of each file, both of decode's: compiling all of a shape takes minutes."""
    specs = list(kernels_of(shape, target))
    decode = [spec for spec in specs if spec.file == "decode.cu"]
    return [*decode, *{spec.file: spec for spec in specs if spec.file != "decode.cu"}.values()]


def test_precompile_makes_what_a_run_looks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(precompile_command, "kernels_of", one_of_each_file)
    words = [
        "precompile",
        "--shape",
        SHAPE,
        "--arch",
        "sm_86",
        "--arch",
        "sm_90",
        "--output",
        str(tmp_path / "out"),
    ]
    assert main(words) == 0
    compiled = capsys.readouterr().out.count("compiled sm_")
    shape = WriteReadShape(9, 77, 64, writes=4, reads=4, head_dim=8, slots=100, bank_dtype="float32")
    token = DecodeShape(streams=7, writes=4, reads=4, head_dim=8, bank_dtype="float32")
    for target, pdl in (("sm_86", False), ("sm_90", True)):
        decode = [decode_kernel(replace(token, aligned=aligned), pdl) for aligned in (True, False)]
        for spec in (*decode, *one_of_each_file(CallShape(shape, (10, 10)), target)):
            source = expand(spec, find_kernels())
            assert precompile.find(tmp_path / "out", source, target) is not None, spec
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "compiled" not in out
    assert out.count("present") == compiled
    assert f"SDM_RT_PRECOMPILED={(tmp_path / 'out').resolve()}" in out
    entries = cache.entries(tmp_path / "out")
    assert len(entries) == compiled
    assert {entry.target for entry in entries} == {"sm_86", "sm_90"}
    files = {entry.file for entry in entries}
    assert {"decode.cu", "topk.cu", "gather.cu", "persistent_forward.cu", "phase_a.cu"} <= files


def launches_of(shape: WriteReadShape, device: DeviceModel) -> set[KernelSpec]:
    """Return the kernels of calls that differ in all but the shape that the command takes."""
    needed: set[KernelSpec] = set()
    alignments = [n for n in (2, 4, 8, 16) if n >= dtype_bytes(shape.bank_dtype)]
    for streams, index, alignment in product((1, 3, 200), INDEX_DTYPES, alignments):
        call = replace(shape, streams=streams, tokens=300, index_dtype=index, alignment=alignment)
        plans = [plan_forward(replace(call, training=False), device, one) for one in (None, "stepwise")]
        for snapshot in SNAPSHOTS:
            kept = replace(call, snapshot=snapshot)
            plans += [plan_forward(kept, device, one) for one in (None, "stepwise")]
            for gradient in (shape.bank_dtype, "float32"):
                wide = replace(kept, gradient_bank_dtype=gradient)
                plans += [plan_backward(wide, device, one) for one in (None, "stepwise")]
        needed |= {launch.kernel for plan in plans for launch in plan.kernels()}
    return needed


@pytest.mark.parametrize("device", PRESETS)
@pytest.mark.parametrize("dtype", BANK_DTYPES)
@pytest.mark.parametrize(("chunk", "head_dim"), [(64, 1024), (64, 64), (256, 100), (7, 33)])
def test_every_kernel_of_a_call_is_precompiled(device: str, dtype: str, chunk: int, head_dim: int) -> None:
    shape = WriteReadShape(1, 1, chunk, 64, 64, head_dim, 65536, bank_dtype=dtype)
    needed = launches_of(shape, preset(device))
    made = set(kernels_of(CallShape(shape, (256, 256)), preset(device).arch))
    assert not needed - made
    files = {spec.file for spec in needed}
    assert {"keep_rows.cu", "gwr.cu", "du_update.cu", "phase_a.cu", "gds.cu", "gram_backward.cu"} < files
    assert {"phase1_backward_pairs.cu", "phase1_backward_gates.cu"} < files
    persistent = {"persistent_forward.cu", "persistent_backward.cu", "column_sum.cu"}
    persistent = persistent if preset(device).clusters else set()
    assert {spec.file for spec in made} == files | persistent | {"decode.cu", "topk.cu"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--arch", "sm_75", "--shape", SHAPE], "expected a target from sm_80 on"),
        (["--arch", "90", "--shape", SHAPE], "expected a target from sm_80 on"),
        (["--arch", "sm_90", "--shape", "W=4,R=4"], r"expected W=..,R=..,D=..[,C=..][,S=..][,dtype=..]"),
        (["--arch", "sm_90", "--shape", "W=4,R=4,D=x"], r"expected W=..,R=..,D=..[,C=..][,S=..][,dtype=..]"),
        (["--arch", "sm_90", "--shape", f"{SHAPE},C"], r"expected W=..,R=..,D=..[,C=..][,S=..][,dtype=..]"),
        (["--arch", "sm_90", "--shape", f"{SHAPE},S64"], r"expected W=..,R=..,D=..[,C=..][,S=..][,dtype=..]"),
        (["--arch", "sm_90", "--shape", f"{SHAPE},W=5"], r"expected W=..,R=..,D=..[,C=..][,S=..][,dtype=..]"),
        (
            ["--arch", "sm_90", "--shape", f"{SHAPE},dtype=float16"],
            r"expected W=..,R=..,D=..[,C=..][,S=..][,dtype=..]",
        ),
        (["--arch", "sm_90", "--shape", "W=257,R=4,D=8"], "writes must be in 1..256"),
        (
            ["--arch", "sm_90", "--shape", f"{SHAPE},factors=10x11"],
            "factors: expected widths ..x.. with the product S = 100, got '10x11'",
        ),
        (
            ["--arch", "sm_90", "--shape", f"{SHAPE},factors=ten"],
            "factors: expected widths ..x.. with the product S = 100, got 'ten'",
        ),
        (["--arch", "sm_90", "--shape", "W=4,R=4,D=8,dtype=float64"], "bank_dtype must be one of"),
        (["--arch", "sm_90"], "--shape"),
    ],
)
def test_precompile_refuses(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["precompile", *words])
    assert message in capsys.readouterr().err


def topk_factors(shape: str) -> set[str]:
    """Return the factors of the top-k kernels that a shape of the command line is given."""
    specs = kernels_of(precompile_command._shape(shape), "sm_80")
    return {dict(spec.defines)["FACTORS"] for spec in specs if spec.file == "topk.cu"}


def test_factors_of_product_keys() -> None:
    assert topk_factors("W=4,R=4,D=8,S=100") == {"10,10"}
    assert topk_factors("W=4,R=4,D=8,S=120,factors=4x5x6") == {"4,5,6"}
    assert topk_factors("W=4,R=4,D=8,S=100,factors=100") == {"100"}
    assert topk_factors("W=4,R=4,D=8,S=120") == set()


def test_a_shape_without_factors_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(precompile_command, "kernels_of", lambda shape, target: [])
    words = ["precompile", "--arch", "sm_90", "--shape", "W=4,R=4,D=8,S=120", "--output", str(tmp_path)]
    assert main(words) == 0
    assert "no top-k for S=120, which is no square" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arch", "output", "message"),
    [
        ("sm_90", "file", "File exists"),
        ("sm_999", "out", "knows no target sm_999"),
    ],
)
def test_what_stops_precompile_is_told_without_a_traceback(
    arch: str,
    output: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(precompile_command, "kernels_of", lambda *of: one_of_each_file(*of)[:1])
    (tmp_path / "file").touch()
    words = ["precompile", "--arch", arch, "--shape", SHAPE, "--output", str(tmp_path / output)]
    assert main(words) == 1
    told = capsys.readouterr().err
    assert told.startswith("sdm-rt precompile: ")
    assert message in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "variable"),
    [("cache", "SDM_RT_CACHE_DIR"), ("precompile --arch sm_80 --shape W=4,R=4,D=16,S=64", "SDM_RT_KERNELS")],
)
def test_a_folder_of_nobody_is_one_line(
    command: str,
    variable: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(variable, "~nobodyatall/x")
    words = command.split()
    assert main(words) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"sdm-rt {words[0]}: {variable}: '~nobodyatall/x' names no folder: ")
    assert told.count("\n") == 1


def test_a_kernel_that_does_not_compile_is_told_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*of: object) -> None:
        raise KernelCompileError("decode.cu does not compile for sm_90:\nthe log")

    monkeypatch.setattr(precompile_command, "precompile", refuse)
    words = ["precompile", "--arch", "sm_90", "--shape", SHAPE, "--output", str(tmp_path)]
    assert main(words) == 1
    assert capsys.readouterr().err == "sdm-rt precompile: decode.cu does not compile for sm_90:\nthe log\n"


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT to another process")
def test_ctrl_c_stops_at_once_and_keeps_what_was_built(tmp_path: Path) -> None:
    words = ["--arch", "sm_90", "--shape", SHAPE, "--output", str(tmp_path)]
    with subprocess.Popen(
        [sys.executable, "-m", "sdm_rt.cli", "precompile", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout is not None
        name = process.stdout.readline().split()[-1]
        process.send_signal(signal.SIGINT)
        told = process.communicate(timeout=120)[1]
    assert (process.returncode, told) == (130, "\nsdm-rt precompile: stopped; what was built is kept\n")
    assert name in {entry.cubin for entry in cache.entries(tmp_path)}


def test_the_page_counts_the_kernel_files_of_its_command() -> None:
    page = (Path(__file__).parents[2] / "docs" / "runtime.md").read_text(encoding="utf-8")
    shape = re.search(r"sdm-rt precompile .*--shape (\S+)", page)
    assert shape is not None
    for target in ("sm_80", "sm_90"):
        files = set(kernels_of(precompile_command._shape(shape[1]), target))
        assert re.search(rf"\b{len(files)}\b[\w ]* for {target}\b", page)


def fill(folder: Path, monkeypatch: pytest.MonkeyPatch) -> cache.Entry:
    monkeypatch.setenv("SDM_RT_CACHE_DIR", str(folder))
    entry = cache.Entry(
        file="decode.cu",
        entries=("decode",),
        defines="BANK=float VECTOR=4",
        target="sm_90",
        options="-std=c++17",
        digest="0" * 64,
        compiler="NVRTC 12.9",
        seconds=0.25,
        size=2048,
        sha256="1" * 64,
        built="2026-01-02T03:04:05+00:00",
        cubin="abc.cubin",
    )
    entry.write(cache.cache_folder() / cache.MANIFEST)
    (folder / cache.CUBINS / "abc.cubin").write_bytes(b"x" * 2048)
    return entry


def test_cache_lists_and_clears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path / "cache", monkeypatch)
    parts = [cache.cache_folder() / part for part in (cache.CUBINS, cache.MANIFEST)]
    freed = sum(path.stat().st_size for part in parts for path in part.iterdir())
    assert main(["cache"]) == 0
    out = capsys.readouterr().out
    for word in (
        str(tmp_path / "cache"),
        "sm_90",
        "0.25 s",
        "decode.cu BANK=float VECTOR=4",
        "1 kernel files, 2 KiB",
    ):
        assert word in out
    assert main(["cache", "list", "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    assert (shown["cubin"], shown["entries"]) == ("abc.cubin", ["decode"])
    assert main(["cache", "clear", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"folder": str(tmp_path / "cache"), "freed_bytes": freed}
    assert main(["cache", "clear"]) == 0
    assert "KiB freed" in capsys.readouterr().out
    assert main(["cache"]) == 0
    assert "0 kernel files" in capsys.readouterr().out


def test_a_cache_that_cannot_be_cleared_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path / "cache", monkeypatch)

    def read_only(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", read_only)
    assert main(["cache", "clear"]) == 1
    told = capsys.readouterr()
    named = tmp_path / "cache" / cache.CUBINS / "abc.cubin"
    assert (told.out, told.err) == ("", f"sdm-rt cache: [Errno 13] Permission denied: '{named}'\n")


def test_doctor_shows_the_cache_and_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "cache", monkeypatch)
    found = doctor.check_cache()
    assert (found.status, found.detail) == ("ok", f"{tmp_path / 'cache'}, 1 kernel files, 2 KiB")
    assert doctor.check_sources().detail == str(find_kernels())


def test_doctor_notes_a_temporary_cache_whoever_asked_for_it_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SDM_RT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(RuntimeWarning, match="the compile cache cannot be made"):
        cache.cache_folder()
    found = doctor.check_cache()
    assert found.status == "note"
    assert "SDM_RT_CACHE_DIR" in found.remedy


def test_doctor_shows_what_plans_use_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: [("A", (8, 0)), ("H", (9, 0))])
    monkeypatch.setattr(device, "attributes", lambda index: {"MaxSharedMemoryPerBlockOptin": 100 + index})
    monkeypatch.setenv("SDM_RT_PDL", "0")
    detail = doctor.check_launch_features().detail
    assert detail == (
        "GPU 0: 100 bytes of shared memory a block, no PDL (compute capability 9.0 has it); "
        "GPU 1: 101 bytes of shared memory a block, PDL; SDM_RT_PDL=0 switches PDL off"
    )
