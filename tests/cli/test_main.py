"""``sdm-rt``: what all its subcommands share."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["plan --device h100", "doctor --device cpu", "cache list"])
def test_a_reader_that_has_left_is_no_traceback(words: str, unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer) as left:
        done = subprocess.run(
            [sys.executable, "-m", "sdm_rt.cli", *words.split()],
            stdout=left,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered, "OMP_NUM_THREADS": "1"},
            timeout=240,
        )
    assert (done.returncode, done.stderr) == (1, "")
