"""When a sequence of launches becomes a graph, which one serves a call, what drops it; without a GPU."""

from __future__ import annotations

import pytest

from sdm_rt import reset_cuda_graphs, suspend_cuda_graphs
from sdm_rt.runtime import replays
from sdm_rt.runtime.replays import LEAST_LAUNCHES, MOST_NODES, MOST_SEEN, Replays

STREAM = 7


class Sequence:
    """A sequence whose recordings are numbered; ``ran`` holds the number and stream of every replay."""

    def __init__(self, launches: int = LEAST_LAUNCHES) -> None:
        self.recorded = 0
        self.ran: list[tuple[int, int]] = []
        self.replays = Replays(launches, self.record)  # type: ignore[arg-type]

    def record(self) -> object:
        self.recorded += 1
        sequence, number = self, self.recorded

        class Recorded:
            def replay(self, stream: int) -> None:
                sequence.ran.append((number, stream))

        return Recorded()

    def call(self, *arguments: int, stream: int = STREAM) -> bool:
        return self.replays.replay(arguments, stream)


@pytest.fixture(autouse=True)
def capturing(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Replace the driver; return the set of streams that are being captured."""
    streams: set[int] = set()
    monkeypatch.setattr(replays.driver, "stream_is_capturing", streams.__contains__)
    return streams


def test_the_second_call_with_the_same_arguments_is_captured_and_later_ones_replay_it() -> None:
    sequence = Sequence()
    assert [sequence.call(1, 2) for _ in range(4)] == [False, True, True, True]
    assert sequence.recorded == 1
    assert sequence.ran == [(1, STREAM)] * 3


def test_other_arguments_and_other_streams_have_graphs_of_their_own() -> None:
    sequence = Sequence()
    for _ in range(3):
        sequence.call(1, 2)
        sequence.call(1, 3)
        sequence.call(1, 2, stream=8)
    assert sequence.recorded == 3
    assert sequence.ran == [(1, STREAM), (2, STREAM), (3, 8)] * 2


def test_arguments_that_never_come_again_are_never_captured() -> None:
    sequence = Sequence()
    assert not any(sequence.call(at) for at in range(3 * MOST_SEEN))
    assert sequence.recorded == 0
    assert not sequence.call(0)  # forgotten long ago


def test_a_short_sequence_is_launched() -> None:
    sequence = Sequence(LEAST_LAUNCHES - 1)
    assert not any(sequence.call(1) for _ in range(4))


def test_a_call_inside_a_capture_is_launched_into_it(capturing: set[int]) -> None:
    sequence = Sequence()
    sequence.call(1)
    sequence.call(1)
    capturing.add(STREAM)
    assert not sequence.call(1)
    capturing.clear()
    assert sequence.call(1)


def test_the_graph_used_longest_ago_goes_first() -> None:
    sequence = Sequence(MOST_NODES // 2)
    for argument in (1, 2):
        sequence.call(argument)
        sequence.call(argument)
    sequence.call(1)  # 2 is now the older one
    sequence.call(3)
    sequence.call(3)
    sequence.ran.clear()
    assert sequence.call(1)
    assert sequence.call(3)
    assert not sequence.call(2)
    assert sequence.ran == [(1, STREAM), (3, STREAM)]


def test_suspended_calls_are_launched_and_graphs_stay() -> None:
    sequence = Sequence()
    sequence.call(1)
    sequence.call(1)
    with suspend_cuda_graphs():
        assert not sequence.call(1)
    assert sequence.call(1)
    assert sequence.recorded == 1


def test_reset_drops_the_graphs() -> None:
    sequence = Sequence()
    sequence.call(1)
    sequence.call(1)
    reset_cuda_graphs()
    assert not sequence.call(1)
    assert sequence.call(1)
    assert sequence.recorded == 2


def test_the_variable_switches_them_off(monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = Sequence()
    monkeypatch.setenv("SDM_RT_REPLAY", "0")
    assert not any(sequence.call(1) for _ in range(3))
    monkeypatch.setenv("SDM_RT_REPLAY", "yes")
    with pytest.raises(ValueError, match="SDM_RT_REPLAY must be 0 or 1"):
        sequence.call(1)


def test_a_capture_that_fails_warns_once_and_leaves_launches() -> None:
    sequence = Sequence()

    def refuse() -> object:
        raise RuntimeError("cuGraphInstantiate: out of memory")

    sequence.replays = Replays(LEAST_LAUNCHES, refuse)  # type: ignore[arg-type]
    sequence.call(1)
    with pytest.warns(UserWarning, match="without a graph: cuGraphInstantiate: out of memory"):
        assert not sequence.call(1)
    assert not any(sequence.call(1) for _ in range(2))
