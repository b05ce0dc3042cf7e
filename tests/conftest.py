"""Fixtures of the whole suite: the GPU marker, seeds, poisoned memory, and the profile of hypothesis."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# The same examples on every machine and at every run, however slow it is.
settings.register_profile("suite", deadline=None, derandomize=True, database=None)
settings.load_profile("suite")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="needs a CUDA GPU; torch.cuda.is_available() is False here")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.user_properties.append(("gpu", "yes"))  # in the JUnit report, for tests/validation.py
            if not torch.cuda.is_available():
                item.add_marker(skip)


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
