"""Cold start: the first training step of a new process, with an empty and with a filled compile cache."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import Any

from sdm_rt.bench.cases import CASES, make_inputs
from sdm_rt.bench.process import wait_seconds
from sdm_rt.bench.timing import DEVICE
from sdm_rt.bench.training import LEAVES, training_step
from sdm_rt.runtime.cores import usable_cores

__all__ = ["FirstStep", "bench_start"]

TOKENS = 2048
FEW_CORES = 2
PREPARE = "from sdm_rt.bench.start import FirstStep; first = FirstStep()"


class FirstStep:
    """A training step of the flagship shape, cut to 2,048 tokens, with its inputs on the GPU."""

    def __init__(self) -> None:
        self.case = replace(CASES["flagship"], tokens=TOKENS)
        self.inputs = make_inputs(self.case, DEVICE)
        for leaf in LEAVES:
            getattr(self.inputs, leaf).requires_grad_()

    def run(self) -> None:
        """Run forward and backward."""
        training_step(self.case, self.inputs)


def bench_start() -> dict[str, Any]:
    """Measure the first training step on all cores and pinned to two, print a table, return the figures."""
    cores = usable_cores()
    rows = []
    print(f"first training step, flagship shape with {TOKENS} tokens")
    print("cores   empty cache   filled cache")
    for pinned in ((), cores[:FEW_CORES]) if len(cores) > FEW_CORES else ((),):
        with tempfile.TemporaryDirectory() as cache:
            cold, warm = (wait_seconds(PREPARE, "first.run()", cache, pinned) for _ in range(2))
        rows.append({"cores": len(pinned) or len(cores), "cold_s": cold, "warm_s": warm})
        print(f"{rows[-1]['cores']:5} {cold:11.2f} s {warm:12.2f} s", flush=True)
    return {"start": rows}
