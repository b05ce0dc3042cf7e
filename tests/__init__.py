"""The suite, a package so that its modules import each other by name."""

import os

# Before torch starts its threads, and for the processes that tests start: operations here are too small for
# several threads, which only wait for each other, for milliseconds where other work keeps the cores busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")
