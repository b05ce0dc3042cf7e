"""``sdm-rt bench``: options, records, and a machine without a GPU."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sdm_rt.bench import record
from sdm_rt.cli import bench, main

VERSIONS = {"torch": "2.11"}


def parse(options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(options.split())


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[argparse.Namespace]:
    """A GPU that only has a name, and phases that only note their arguments."""
    calls: list[argparse.Namespace] = []

    def phase(arguments: argparse.Namespace) -> dict[str, object]:
        calls.append(arguments)
        return {arguments.phase: {"step_ms": 1.5}}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(bench.device, "gpu", lambda index: SimpleNamespace(name="NVIDIA H200", index=index))
    monkeypatch.setattr(record, "versions", lambda: VERSIONS)
    monkeypatch.setattr(bench, "PHASES", dict.fromkeys(bench.PHASES, phase))
    return calls


def test_options() -> None:
    arguments = parse("--phase training --case small 7B --schedule persistent --kernels --json out.json")
    assert arguments.phase == "training"
    assert arguments.case == ["small", "7B"]
    assert arguments.schedule == "persistent"
    assert arguments.kernels
    assert arguments.json == Path("out.json")
    for phase in ("accuracy", "decode", "forward", "layer", "scaling", "start", "training"):
        assert parse(f"--phase {phase}").phase == phase


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "--phase"),
        ("--phase backward", "invalid choice: 'backward'"),
        ("--phase forward --case large", "invalid choice: 'large'"),
        ("--phase forward --schedule eager", "invalid choice: 'eager'"),
    ],
)
def test_wrong_options_are_named(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(options)
    assert message in capsys.readouterr().err


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "--phase", "forward"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "sdm-rt bench: PyTorch finds no CUDA GPU; `sdm-rt doctor` says more\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--phase layer --case small", "--case is of forward, training, accuracy, not of layer"),
        ("--phase decode --schedule stepwise", "--schedule is of forward, training, accuracy, not of decode"),
        ("--phase layer --kernels", "--kernels is of forward, training, not of layer"),
        ("--phase start --no-start", "--no-start is of decode, not of start"),
    ],
)
def test_options_of_other_phases_are_refused(
    options: str, message: str, gpu: list[argparse.Namespace], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *options.split()]) == 1
    assert capsys.readouterr().err == f"sdm-rt bench: {message}\n"
    assert gpu == []


def test_a_record_says_what_ran(gpu: list[argparse.Namespace], tmp_path: Path) -> None:
    path = tmp_path / "new" / "h200-start.json"
    assert main(["bench", "--phase", "start", "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert list(written) == ["phase", "gpu", "date", "fingerprint", "versions", "start"]
    assert (written["phase"], written["gpu"], written["versions"]) == ("start", "NVIDIA H200", VERSIONS)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", written["date"])
    assert written["fingerprint"] == record.fingerprint()
    assert written["start"] == {"step_ms": 1.5}


@pytest.mark.parametrize("name", ["file/new.json", "."])
def test_a_record_that_cannot_be_written_is_told_before_measuring(
    name: str, gpu: list[argparse.Namespace], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["bench", "--phase", "start", "--json", str(tmp_path / name)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(r"sdm-rt bench: \[Errno \d+\] .*\n", printed.err)
    assert gpu == []


def test_a_failed_phase_leaves_the_file_as_it_was(
    gpu: list[argparse.Namespace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "records"

    def fail(arguments: argparse.Namespace) -> dict[str, object]:
        assert folder.is_dir()
        raise RuntimeError("out of memory")

    monkeypatch.setitem(bench.PHASES, "start", fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            main(["bench", "--phase", "start", "--json", str(folder / "new.json")])
        assert [path.read_text() for path in folder.iterdir()] in ([], ["{}"])
        (folder / "new.json").write_text("{}")


def test_a_forced_schedule_is_recorded(gpu: list[argparse.Namespace], tmp_path: Path) -> None:
    path = tmp_path / "forward.json"
    command = ["bench", "--phase", "forward", "--schedule", "stepwise", "--json", str(path)]
    assert main(command) == 0
    assert json.loads(path.read_text())["schedule"] == "stepwise"
    assert gpu[0].schedule == "stepwise"


def test_a_wheel_has_the_fingerprint_of_its_checkout(tmp_path: Path) -> None:
    checkout, installed = tmp_path / "checkout", tmp_path / "installed"
    for root, kernels in ((checkout, "kernels_cu"), (installed, "sdm_rt/kernels_cu")):
        (root / "sdm_rt").mkdir(parents=True)
        (root / kernels).mkdir()
        (root / "sdm_rt" / "a.py").write_text("a = 1\n")
        (root / kernels / "k.cu").write_text("// kernel\n")
    assert record.fingerprint(checkout) == record.fingerprint(installed)
    (installed / "sdm_rt" / "kernels_cu" / "k.cu").write_text("// edited\n")
    assert record.fingerprint(checkout) != record.fingerprint(installed)
