"""A first call in a process of its own: the wait with an empty and with a filled compile cache."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

__all__ = ["wait_seconds"]

HIDDEN_VARIABLES = ("SDM_RT_PRECOMPILED", "SDM_RT_JIT")
CACHE_VARIABLES = ("SDM_RT_CACHE_DIR", "CUPY_CACHE_DIR", "CUDA_CACHE_PATH")

# The imports of torch, CuPy and this package do not count, nor does `{prepare}`, which makes inputs on the
# GPU, nor what PyTorch imports by itself in the first backward of a process, SymPy among it.
PROGRAM = """
import os, sys
if len(sys.argv) > 1:
    os.sched_setaffinity(0, [int(core) for core in sys.argv[1:]])
import time
import torch, cupy
import torch.fx.experimental.symbolic_shapes
import sdm_rt
{prepare}
torch.cuda.synchronize()
start = time.perf_counter()
{call}
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def wait_seconds(prepare: str, call: str, cache: str, cores: Sequence[int] = ()) -> float:
    """Return the seconds of a call in a new process.

    Parameters
    ----------
    prepare, call : str
        Python statements, untimed and timed.
    cache : str
        The folder of every cache of compiled kernels.
    cores : sequence of int
        What the process is pinned to before it imports anything; none: it is not pinned.

    Raises
    ------
    RuntimeError
        With the last lines of the process that failed.
    """
    environment = {name: value for name, value in os.environ.items() if name not in HIDDEN_VARIABLES}
    environment |= dict.fromkeys(CACHE_VARIABLES, cache) | {"SDM_RT_PROGRESS": "0"}
    program = PROGRAM.format(prepare=prepare, call=call)
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, cores)],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError("a first call failed:\n" + "\n".join(done.stderr.splitlines()[-12:]))
    return round(float(done.stdout.split()[-1]), 3)
