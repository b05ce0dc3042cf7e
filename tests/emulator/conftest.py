"""Skips the emulator's tests where there is no C++ compiler."""

from __future__ import annotations

import pytest

from tests.emulator import build


@pytest.fixture(scope="session", autouse=True)
def emulator() -> None:
    build.require()
