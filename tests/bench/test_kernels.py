"""What the profiler's events of a call are summed up to, without a GPU."""

from __future__ import annotations

import pytest

from sdm_rt.bench.kernels import print_kernels, summarize

EVENTS = [
    ("gwr", 4_000, 7_000),
    ("gather", 1_000, 3_000),
    ("gather", 2_000, 4_000),  # launched early: beside the one before it
    ("gather", 9_000, 10_500),
]


def test_busy_time_counts_overlapping_kernels_once() -> None:
    figures = summarize(EVENTS)
    assert figures["span_ms"] == pytest.approx(9.5e-3)
    assert figures["busy_ms"] == pytest.approx(7.5e-3)
    assert figures["kernels"] == {
        "gather": {"launches": 3, "us": 1.83},
        "gwr": {"launches": 1, "us": 3.0},
    }
    assert list(figures["kernels"]) == ["gather", "gwr"]


def test_a_kernel_inside_another_adds_nothing() -> None:
    figures = summarize([("long", 0, 10_000), ("short", 2_000, 3_000), ("last", 12_000, 13_000)])
    assert figures["busy_ms"] == pytest.approx(11e-3)
    assert figures["span_ms"] == pytest.approx(13e-3)


def test_no_kernel_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="the profiler saw no kernel"):
        summarize([])


def test_one_line_a_call(capsys: pytest.CaptureFixture[str]) -> None:
    print_kernels(summarize(EVENTS))
    assert capsys.readouterr().out == (
        "  span 0.009 ms, busy 0.007 ms; launches x us: gather 3 x 1.83  gwr 1 x 3.0\n"
    )
