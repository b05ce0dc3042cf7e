"""A process that loads the small kernel once, with CuPy's real compiler; the tests start many of them.

    python -m tests.runtime.load_once [--die]

Prints "compiled" or "cached"; with --die it stops for good at the moment it would compile.
"""

from __future__ import annotations

import os
import sys
import time

import sdm_rt.runtime.compile as compile_module
from sdm_rt.runtime.compile import CupyBuilder, Kernels
from tests.runtime.cupy_without_gpu import HOPPER, SPEC, install


def main() -> None:
    install(setattr)
    events: list[str] = []
    watched = compile_module.watched_cache

    def on_compile() -> None:
        events.append("compiled")
        if "--die" in sys.argv:
            print("compiling", flush=True)
            time.sleep(600)

    compile_module.watched_cache = lambda spec, source, gpu, _: watched(spec, source, gpu, on_compile)
    Kernels(CupyBuilder()).load(SPEC, HOPPER)
    print(*(events or ["cached"]), os.getpid())


if __name__ == "__main__":
    main()
