"""The kernels under compute-sanitizer, on a machine with a GPU and the CUDA toolkit's tools.

    python tests/sanitizer.py memcheck racecheck initcheck synccheck --processes 8

Small shapes of every kernel and variant (`TESTS`). Tests run in process trees of their own under the tool,
several side by side: one process of the tool for all of them would be what all wait for. racecheck, the slow
one, gets a process for each case. A run of the same tests without a tool before fills the compile cache. A
process is clean where its tests pass and the tool reports nothing.

Errors that the driver returns are not reported: a launch from a thread without a context is refused, and
then made with it (`sdm_rt.runtime.launcher.PreparedLaunch.run`).
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
TESTS = (
    "tests/gpu/test_every_variant_gpu.py",
    "tests/kernels/test_decode.py",
    "tests/kernels/test_phase1.py",
    "tests/kernels/test_phase1_backward.py",
    "tests/kernels/test_solve.py",
    "tests/kernels/test_topk.py",
)
OF_THE_EMULATOR = "not seeded_faults"  # kernels that are wrong on purpose
CLEAN = {
    "memcheck": "ERROR SUMMARY: 0 errors",
    "racecheck": "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
    "initcheck": "ERROR SUMMARY: 0 errors",
    "synccheck": "ERROR SUMMARY: 0 errors",
}
BUNDLES = {"memcheck": 4, "initcheck": 4, "synccheck": 4}  # groups of whole steps in a process
PYTEST = (sys.executable, "-m", "pytest", "-m", "gpu", "-k", OF_THE_EMULATOR, "-p", "no:cacheprovider")


@dataclass(frozen=True)
class Outcome:
    """What became of a group of tests under a tool."""

    tests: int
    clean: bool
    seconds: float
    summary: str


def collect() -> list[str]:
    """Return the node ids of `TESTS` that run on a GPU."""
    listed = subprocess.run(
        [*PYTEST, "--collect-only", "-q", *TESTS], capture_output=True, text=True, check=True
    )
    return [line for line in listed.stdout.splitlines() if "::" in line]


def group_of(test: str) -> str:
    """Return the group of a test: its file, or of whole steps those of one case, which share a step."""
    path, _, name = test.partition("::")
    if "every_variant" not in path:
        return Path(path).stem
    case = re.search(r"\[torch\.[a-z0-9]+-\d+-\d+", name)
    return case.group() + "]" if case else re.sub(r"-(stepwise|persistent)(?=\])", "", name)


def groups_of(tests: Sequence[str]) -> dict[str, list[str]]:
    """Return the tests by group, the longest first; float16 last, whose accesses are those of bfloat16."""
    groups: dict[str, list[str]] = {}
    for test in tests:
        groups.setdefault(group_of(test), []).append(test)

    def place(group: str) -> tuple[bool, int]:
        columns = max((int(number) for number in re.findall(r"-(\d+)", group)), default=10**6)
        return ".float16-" in group, -columns

    return dict(sorted(groups.items(), key=lambda item: place(item[0])))


def bundles_of(groups: dict[str, list[str]], size: int) -> dict[str, list[str]]:
    """Return the groups, of whole steps ``size`` of them as one: a process takes ten seconds to begin."""
    steps = [name for name in groups if "[" in name]
    bundles = {name: tests for name, tests in groups.items() if name not in steps}
    stride = -(-len(steps) // size)  # long ones with short ones
    for first in range(stride):
        names = steps[first::stride]
        bundles[" ".join(names)] = [test for name in names for test in groups[name]]
    return bundles


def run_group(tool: str, tests: Sequence[str], log: Path, seconds: float) -> Outcome:
    """Run tests under a tool; ``log`` gets the output of both."""
    command = ["compute-sanitizer", "--tool", tool, "--target-processes", "application-only"]
    command += ["--report-api-errors", "no", "--print-limit", "4", *PYTEST, "-q", *tests]
    environment = os.environ | {"SANITIZER_STREAMS": "1" if tool == "racecheck" else "2"}
    begin = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return Outcome(len(tests), False, time.monotonic() - begin, "did not end in time")
    text = log.read_text(encoding="utf-8", errors="replace")
    found = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*|Internal Sanitizer Error.*", text)
    ran = code == 0 and re.search(r"\d+ passed", text) is not None
    summary = f"tests {'passed' if ran else 'failed or skipped'}; {'; '.join(found) or 'no summary'}"
    clean = ran and found == [CLEAN[tool]]
    return Outcome(len(tests), clean, time.monotonic() - begin, summary)


def run_tool(tool: str, tests: Sequence[str], processes: int, seconds: float, logs: Path) -> bool:
    """Run all groups under a tool, print what was not clean and a line for all; return whether all was."""
    end = time.monotonic() + seconds
    groups = bundles_of(groups_of(tests), BUNDLES.get(tool, 1))
    if not groups:
        print(f"{tool}: no tests")
        return False

    def run(item: tuple[str, list[str]]) -> tuple[str, Outcome]:
        name, members = item
        left = end - time.monotonic()
        if left <= 0:
            return name, Outcome(len(members), False, 0.0, "not begun in time")
        log = logs / f"{tool}-{re.sub(r'[^A-Za-z0-9_.-]+', '_', name)[:100]}.txt"
        return name, run_group(tool, members, log, left)

    begin = time.monotonic()
    with ThreadPoolExecutor(processes) as pool:
        outcomes = list(pool.map(run, groups.items()))
    for name, outcome in outcomes:
        if not outcome.clean:
            print(f"  {tool}: {name}: {outcome.summary} ({outcome.seconds:.0f} s)")
    clean = [outcome for _, outcome in outcomes if outcome.clean]
    print(
        f"{tool}: {sum(one.tests for one in clean)} of {sum(one.tests for _, one in outcomes)} tests clean, "
        f"{len(clean)} of {len(outcomes)} groups, {time.monotonic() - begin:.0f} s",
        flush=True,
    )
    return len(clean) == len(outcomes)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run small shapes of every kernel under compute-sanitizer.")
    parser.add_argument("tools", nargs="*", default=TOOLS, help=f"of {', '.join(TOOLS)} (default: all)")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    parser.add_argument("--seconds", type=float, default=3600.0, help="for each tool")
    parser.add_argument("--only", default="", help="a regular expression that the groups' names contain")
    parser.add_argument(
        "--logs", type=Path, default=Path(tempfile.gettempdir()), help="folder of the outputs"
    )
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.tools) - set(TOOLS):
        parser.error(f"unknown tools: {', '.join(sorted(unknown))}; known: {', '.join(TOOLS)}")
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU here")
    arguments.logs.mkdir(parents=True, exist_ok=True)
    tests = [test for test in collect() if re.search(arguments.only, group_of(test))]
    results = [
        run_tool(tool, tests, arguments.processes, arguments.seconds, arguments.logs)
        for tool in arguments.tools
    ]
    return 0 if all(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
