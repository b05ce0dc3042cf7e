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
exit 0
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_a_gpu_run_has_every_part(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT / ".ci", checkout / ".ci")
    stub = tmp_path / "bin" / "python3"
    stub.parent.mkdir()
    stub.write_text(STUB, encoding="utf-8")
    stub.chmod(0o755)
    calls = tmp_path / "calls"
    environment = os.environ | {"PATH": f"{stub.parent}:{os.environ['PATH']}", "CALLS": str(calls)}
    subprocess.run(["bash", checkout / ".ci/gpu", tmp_path / "out"], env=environment, check=True)
    lines = calls.read_text(encoding="utf-8").splitlines()
    tests = [line for line in lines if line.startswith("-m pytest")]
    assert [line.partition("-m gpu")[2].split(" --")[0] for line in tests] == ["", " and alone"]
    assert all("junit_suite_name=sources" in line for line in tests)
    assert not any(line.startswith("/") for line in lines), "a compiler is on the suite's PATH"
    for phase in PHASES:
        (line,) = (line for line in lines if f"bench --phase {phase} " in line)
        assert f"--json {tmp_path}/out/a100-{phase}.json" in line
    assert any("tests/sanitizer.py" in line for line in lines)
