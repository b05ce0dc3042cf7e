"""Planning needs no torch and no CuPy: the planner runs in a process where importing either fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "sdm_rt"

# The top package exports the ops, which need torch; a bare package of its name and path stands in for it.
CODE = """
import sys, types
package = types.ModuleType("sdm_rt")
package.__path__ = [PACKAGE]
sys.modules["sdm_rt"] = package
for name in ("torch", "cupy", "cuda", "numpy"):
    sys.modules[name] = None
from sdm_rt.cli import main
passes = "--pass forward --pass backward --pass decode"
assert main(f"plan --device h100 --streams 2 --tokens 4096 {passes}".split()) == 0
assert main("plan --device a100 --no-grad --json".split()) == 0
"""


def test_plans_without_torch_and_cupy() -> None:
    result = subprocess.run(
        [sys.executable, "-c", f"PACKAGE = {str(PACKAGE)!r}{CODE}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "decode.cu:decode" in result.stdout
    assert "gram_backward.cu:gram_backward" in result.stdout
