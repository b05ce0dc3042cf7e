"""``sdm-rt doctor``: the path it chooses, what makes it fail, what it tells the user to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from sdm_rt.cli import doctor, machine, main, selftest
from sdm_rt.cli.doctor import Check
from sdm_rt.errors import MissingDependencyError


def fake(status: str, **fields: str):
    return lambda: Check(status, "as the test says", **fields)


@pytest.fixture
def cuda_path(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace every look at the GPU path by one that says ok; a test changes single ones."""
    checks = {name: fake("ok") for name in doctor.CUDA_CHECKS}
    trials = {name: fake("ok") for name in doctor.CUDA_TRIALS}
    monkeypatch.setattr(doctor, "CUDA_CHECKS", checks)
    monkeypatch.setattr(doctor, "CUDA_TRIALS", trials)
    return {"checks": checks, "trials": trials}


def test_cpu_path_works_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert torch.__version__ in printed
    assert "CPU path: works" in printed
    assert printed.endswith("Chosen path: cpu; it works.\n")


def test_auto_takes_the_complete_gpu_path(cuda_path: dict[str, Any]) -> None:
    report = doctor.examine("auto")
    assert (report.device, report.works) == ("cuda", True)


@pytest.mark.parametrize("group", ["checks", "trials"])
def test_auto_takes_the_cpu_where_the_gpu_path_is_incomplete(cuda_path: dict[str, Any], group: str) -> None:
    name = next(iter(cuda_path[group]))
    cuda_path[group][name] = fake("failed")
    report = doctor.examine("auto")
    assert (report.device, report.works) == ("cpu", True)
    assert not doctor.examine("cuda").works


def test_a_note_stops_nothing(cuda_path: dict[str, Any]) -> None:
    cuda_path["checks"]["CUDA headers"] = fake("note", package="nvidia-cuda-runtime")
    report = doctor.examine("cuda")
    assert report.works
    assert "nvidia-cuda-runtime" in report.install_command


def test_exit_status_follows_the_asked_path(
    cuda_path: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    cuda_path["checks"]["driver"] = fake("missing", remedy="install the driver")
    assert main(["doctor", "--device", "cuda"]) == 1
    printed = capsys.readouterr().out
    assert "-> install the driver" in printed
    assert printed.endswith("Chosen path: cuda; it does not work here.\n")
    assert main(["doctor", "--device", "auto"]) == 0


def test_trials_wait_for_the_checks(cuda_path: dict[str, Any]) -> None:
    def trial() -> Check:
        raise AssertionError("a trial ran although the driver is missing")

    cuda_path["checks"]["driver"] = fake("missing")
    cuda_path["trials"].update(dict.fromkeys(cuda_path["trials"], trial))
    report = doctor.examine()
    assert {report.cuda[name].status for name in cuda_path["trials"]} == {"skipped"}


def test_a_check_that_raises_leaves_the_report_whole(cuda_path: dict[str, Any]) -> None:
    def broken() -> Check:
        raise OSError("libnvrtc.so.12: cannot open shared object file\nmore")

    cuda_path["checks"]["NVRTC"] = broken
    check = doctor.examine().cuda["NVRTC"]
    assert check.status == "failed"
    assert check.detail == "OSError: libnvrtc.so.12: cannot open shared object file"


def test_json(cuda_path: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    cuda_path["checks"]["CuPy"] = fake("missing", package="cupy")
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["device"], report["works"]) == ("cpu", True)
    assert report["cuda"]["CuPy"]["status"] == "missing"
    assert "cupy-cuda1" in report["install_command"]


@pytest.mark.parametrize("wrong", ["readings", "gradients", "bank after the call", "bank after the backward"])
def test_a_wrong_op_fails_the_cpu_path(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    op = selftest.sdm_write_read

    def broken(memory, *tensors):
        trains = memory.requires_grad
        if wrong == "gradients" and trains:
            tensors[2].register_hook(lambda gradient: gradient + 1e-6)
        readings = op(memory, *tensors)
        if wrong == "readings":
            return readings + 1e-6
        if wrong == "bank after the call" and not trains:
            memory += 1e-6
        if wrong == "bank after the backward" and trains:
            readings.register_hook(
                lambda gradient: tensors[3].register_hook(lambda _: memory.data.add_(1e-6))
            )
        return readings

    assert doctor.examine("cpu").works
    monkeypatch.setattr(selftest, "sdm_write_read", broken)
    report = doctor.examine("cpu")
    assert not report.works
    assert report.cpu["op on CPU"].status == "failed"


def test_a_wrong_decode_fails_the_cpu_path(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = selftest.sdm_decode_step
    monkeypatch.setattr(selftest, "sdm_decode_step", lambda *tensors: decode(*tensors) * (1 + 1e-6))
    assert not doctor.examine("cpu").works


def test_nan_is_an_error_of_infinite_size(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = selftest.sdm_decode_step
    monkeypatch.setattr(selftest, "sdm_decode_step", lambda *tensors: decode(*tensors) * float("nan"))
    assert selftest.decode_error(torch.device("cpu"), torch.float32) == float("inf")


def test_missing_packages_make_one_command(
    monkeypatch: pytest.MonkeyPatch, cuda_path: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> None:
        raise MissingDependencyError("the GPU path needs this; install it with: more than is missing")

    monkeypatch.setattr(doctor, "load_cupy", missing)
    monkeypatch.setattr(doctor, "load_nvrtc", missing)
    monkeypatch.setattr(machine, "header_folders", list)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    cuda_path["checks"].update(
        {"CuPy": doctor.check_cupy, "NVRTC": doctor.check_nvrtc, "CUDA headers": doctor.check_headers}
    )
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("pip install") == 1
    line = next(line for line in printed.splitlines() if "pip install" in line)
    for package in ("cupy-cuda12x", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-runtime-cu12"):
        assert f" '{package}" in line


def test_no_driver_and_no_gpu_are_told_apart_from_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise MissingDependencyError("the GPU path needs an NVIDIA driver; install one")

    monkeypatch.setattr(doctor.driver, "library", missing)
    assert doctor.check_driver().detail == "the GPU path needs an NVIDIA driver"
    assert (doctor.check_driver().status, doctor.check_gpus().status) == ("missing", "missing")


def test_headers_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(machine, "header_folders", lambda: [tmp_path / "absent", tmp_path])
    assert doctor.check_headers().status == "note"
    (tmp_path / "cuda_bf16.h").touch()
    assert doctor.check_headers() == Check("ok", str(tmp_path))


@pytest.mark.parametrize(
    ("devices", "status"),
    [
        ([], "missing"),
        ([("Tesla V100", (7, 0))], "failed"),
        ([("Tesla V100", (7, 0)), ("NVIDIA A100", (8, 0))], "ok"),
    ],
)
def test_gpu_needs_compute_capability_8(monkeypatch: pytest.MonkeyPatch, devices, status: str) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: devices)
    check = doctor.check_gpus()
    assert check.status == status
    assert all(f"{name} (compute capability " in check.detail for name, _ in devices)


def test_doctor_runs_with_an_unusable_home() -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    environment = {name: value for name, value in os.environ.items() if name != "CUPY_CACHE_DIR"}
    for name in ("SDM_RT_CACHE_DIR", "XDG_CACHE_HOME"):
        environment.pop(name, None)
    environment["HOME"] = os.path.join(os.devnull, "home")
    command = [sys.executable, "-m", "sdm_rt.cli", "doctor", "--device", "cpu", "--json"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    found = json.loads(result.stdout)["cuda"]
    assert (found["CuPy"]["status"], found["compile cache"]["status"]) == ("ok", "note")
