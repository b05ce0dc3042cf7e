"""What `.ci/gpu` runs, with a Python that only writes down its calls."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from sdm_rt.cli.bench import PHASES

ROOT = Path(__file__).resolve().parents[2]
STUB = """#!/bin/sh
echo "$*" >> "$CALLS"
case "$*" in
    "-m pytest "*) for name in nvcc gcc g++ cc c++ clang; do command -v $name >> "$CALLS"; done ;;
    *fingerprint*) echo sources ;;
    *gpu_slug*) echo a100 ;;
esac
case "$*" in *"$FAILS") exit 1 ;; esac
"""


pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def gpu_run(tmp_path: Path, fails: str) -> tuple[int, list[str]]:
    """Exit status and calls of Python; a call that ends with ``fails`` fails."""
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT / ".ci", checkout / ".ci")
    stub = tmp_path / "bin" / "python3"
    stub.parent.mkdir()
    stub.write_text(STUB, encoding="utf-8")
    stub.chmod(0o755)
    calls = tmp_path / "calls"
    path = f"{stub.parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "CALLS": str(calls), "FAILS": fails}
    done = subprocess.run(["bash", checkout / ".ci/gpu", tmp_path / "out"], env=environment, check=False)
    return done.returncode, calls.read_text(encoding="utf-8").splitlines()


def test_a_test_that_fails_stops_the_run_behind_the_suite(tmp_path: Path) -> None:
    status, lines = gpu_run(tmp_path, fails="/suite.xml")
    assert status == 1
    assert [line.endswith("/alone.xml") for line in lines if line.startswith("-m pytest")] == [False, True]
    assert not any("bench" in line for line in lines)


def test_a_gpu_run_has_every_part(tmp_path: Path) -> None:
    status, lines = gpu_run(tmp_path, fails="nothing")
    assert status == 0
    tests = [line for line in lines if line.startswith("-m pytest")]
    assert [line.partition("-m gpu")[2].split(" --")[0] for line in tests] == ["", " and alone"]
    assert all("junit_suite_name=sources" in line for line in tests)
    assert not any(line.startswith("/") for line in lines), "a compiler is on the suite's PATH"
    for phase in PHASES:
        (line,) = (line for line in lines if f"bench --phase {phase} " in line)
        assert f"--json {tmp_path}/out/a100-{phase}.json" in line
    assert any("tests/sanitizer.py" in line for line in lines)
