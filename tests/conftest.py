"""The GPU marker, seeds, poisoned memory, the profile of hypothesis, and which kernels the emulator ran."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import astuple
from typing import Any

import pytest
import torch
from hypothesis import settings

from sdm_rt.runtime.kernel import KernelSpec
from tests.emulator.harness import coverage

# The same examples on every machine and at every run, however slow it is.
settings.register_profile("suite", deadline=None, derandomize=True, database=None)
settings.load_profile("suite")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="needs a CUDA GPU; torch.cuda.is_available() is False here")
    beside_others = pytest.mark.skip(reason="measures the GPU's free memory: run it without -n")
    for item in items:
        if item.get_closest_marker("alone") is not None and "PYTEST_XDIST_WORKER" in os.environ:
            item.add_marker(beside_others)
        if item.get_closest_marker("gpu") is not None:
            item.user_properties.append(("gpu", "yes"))  # in the JUnit report, for tests/validation.py
            if not torch.cuda.is_available():
                item.add_marker(skip)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In a process of ``pytest -n``, hand over which kernels ran here."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["executed"] = sorted(coverage.executed)
        session.config.workeroutput["specs"] = [astuple(spec) for spec in coverage.specs]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let a process of ``pytest -n`` that has no tests left take some of another's: a few last a minute."""
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a process hands over; one that crashed hands over nothing."""
    output = getattr(node, "workeroutput", {})
    coverage.executed |= set(output.get("executed", ()))
    coverage.specs |= {KernelSpec(*spec) for spec in output.get("specs", ())}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not coverage.executed:
        return
    terminalreporter.section("kernels executed by the emulator")
    for file, entry in sorted(coverage.executed):
        specs = sum(spec.file == file and entry in spec.entries for spec in coverage.specs)
        terminalreporter.write_line(f"{file}: {entry}, {specs} variants")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Start every test from the same random state, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def poisoned_memory() -> Iterator[None]:
    """Fill memory that PyTorch hands out uninitialized: NaN for floats, the largest value for ints.

    An output that nobody writes then shows. PyTorch does the filling in its deterministic mode, on every
    device and thread, for the allocations of its own operators too; operators without a deterministic variant
    only warn.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
