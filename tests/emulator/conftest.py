"""Skips the emulator's tests where there is no C++ compiler, and reports which kernels ran."""

from __future__ import annotations

import pytest

from tests.emulator import build, harness


@pytest.fixture(scope="session", autouse=True)
def emulator() -> None:
    build.require()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not harness.coverage.executed:
        return
    terminalreporter.section("kernels executed by the emulator")
    for file, entry in sorted(harness.coverage.executed):
        specs = sum(spec.file == file and entry in spec.entries for spec in harness.coverage.specs)
        terminalreporter.write_line(f"{file}: {entry}, {specs} variants")
