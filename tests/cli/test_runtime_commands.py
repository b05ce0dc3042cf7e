"""``sdm-rt precompile``, ``sdm-rt cache`` and what ``sdm-rt doctor`` says of the runtime."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sdm_rt.cli import doctor, machine, main
from sdm_rt.plan.decode import decode_kernel
from sdm_rt.plan.device import preset
from sdm_rt.plan.forward import plan_forward
from sdm_rt.plan.shapes import DecodeShape, WriteReadShape
from sdm_rt.runtime import cache, device, precompile
from sdm_rt.runtime.sources import expand, find_kernels

SHAPE = "W=4,R=4,D=8,S=100,dtype=float32"


def test_precompile_makes_what_a_run_looks_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    shape = DecodeShape(streams=7, writes=4, reads=4, head_dim=8, bank_dtype="float32")
    for target, pdl in (("sm_86", False), ("sm_90", True)):
        for aligned in (True, False):
            source = expand(decode_kernel(replace(shape, aligned=aligned), pdl), find_kernels())
            assert precompile.find(tmp_path / "out", source, target) is not None
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "compiled" not in out
    assert out.count("present") == compiled
    assert f"SDM_RT_PRECOMPILED={(tmp_path / 'out').resolve()}" in out
    entries = cache.entries(tmp_path / "out")
    assert len(entries) == compiled
    assert {entry.target for entry in entries} == {"sm_86", "sm_90"}
    forward = WriteReadShape(9, 77, 64, writes=4, reads=4, head_dim=8, slots=100, bank_dtype="float32")
    for training in (False, True):
        for model in (replace(preset("rtx4090"), compute_capability=(8, 6)), preset("h100")):
            for launch in plan_forward(replace(forward, training=training), model).kernels():
                source = expand(launch.kernel, find_kernels())
                assert precompile.find(tmp_path / "out", source, model.arch) is not None, launch.kernel
    files = {entry.file for entry in entries}
    assert "topk.cu" in files


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--arch", "sm_75", "--shape", SHAPE], "expected a target from sm_80 on"),
        (["--arch", "90", "--shape", SHAPE], "expected a target from sm_80 on"),
        (["--arch", "sm_90", "--shape", "W=4,R=4"], r"expected W=..,R=..,D=..[,C=..][,S=..][,dtype=..]"),
        (["--arch", "sm_90", "--shape", "W=4,R=4,D=x"], r"expected W=..,R=..,D=..[,C=..][,S=..][,dtype=..]"),
        (["--arch", "sm_90", "--shape", "W=257,R=4,D=8"], "writes must be in 1..256"),
        (["--arch", "sm_90", "--shape", "W=4,R=4,D=8,dtype=float64"], "bank_dtype must be one of"),
        (["--arch", "sm_90"], "--shape"),
    ],
)
def test_precompile_refuses(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["precompile", *words])
    assert message in capsys.readouterr().err


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
    assert main(["cache", "clear"]) == 0
    assert "KiB freed" in capsys.readouterr().out
    assert main(["cache"]) == 0
    assert "0 kernel files" in capsys.readouterr().out


def test_doctor_shows_the_cache_and_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "cache", monkeypatch)
    found = doctor.check_cache()
    assert (found.status, found.detail) == ("ok", f"{tmp_path / 'cache'}, 1 kernel files, 2 KiB")
    assert doctor.check_sources().detail == str(find_kernels())


def test_doctor_notes_a_temporary_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SDM_RT_CACHE_DIR", str(tmp_path / "file" / "cache"))
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
