"""What importing the package does, and what it leaves alone."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

MODULES = ("sdm_rt", "sdm_rt.cli", "sdm_rt.cli.doctor", "sdm_rt.cli.plan", "sdm_rt.cli.demo")


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_import_loads_no_gpu_library() -> None:
    """Neither CuPy nor the CUDA bindings, beyond what torch loads, and so no driver and no context."""
    code = f"""
import sys, torch, numpy
before = set(sys.modules)
import {", ".join(MODULES)}
new = set(sys.modules) - before
print(sorted(new & {{"cupy", "cupy_backends", "cuda", "matplotlib", "triton"}}))
print(torch.cuda.is_initialized())
"""
    assert run(code).split("\n") == ["[]", "False"]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/maps is Linux's")
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch may load the driver's library itself")
def test_import_loads_no_driver() -> None:
    assert run("import sdm_rt; print('libcuda.so' in open('/proc/self/maps').read())") == "False"


def test_import_takes_no_second_beyond_torch() -> None:
    code = """
import time, torch, numpy
start = time.perf_counter()
import sdm_rt
print(time.perf_counter() - start)
"""
    assert any(float(run(code)) < 1.0 for _ in range(3))


def test_fork_after_import_works() -> None:
    code = """
import os, torch, sdm_rt
child = os.fork()
if child == 0:
    bank = torch.zeros(4, 2)
    index = torch.zeros(1, 1, 1, dtype=torch.int64)
    one = torch.ones(1, 1, 1)
    readings = sdm_rt.sdm_write_read(bank, index, one, torch.full((1, 1, 2), 3.0), one, 0 * one, index, one)
    os._exit(0 if readings.tolist() == [[3.0, 3.0]] else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run(code) == "0"


def test_every_public_name_exists_and_is_sorted() -> None:
    import sdm_rt

    assert sdm_rt.__all__ == sorted(sdm_rt.__all__)
    assert [name for name in sdm_rt.__all__ if not hasattr(sdm_rt, name)] == []
