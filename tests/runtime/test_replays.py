"""When a sequence of launches becomes a graph, which one serves a call, what drops it; without a GPU."""

from __future__ import annotations

import gc
import weakref

import pytest

from sdm_rt import reset_cuda_graphs, suspend_cuda_graphs
from sdm_rt.runtime import replays
from sdm_rt.runtime.replays import IDLE_RUNS, LEAST_LAUNCHES, MOST_NODES, MOST_SEEN, Replays

STREAM = 7


class Sequence:
    """A sequence whose recordings are numbered; ``ran`` holds the number and stream of every replay."""

    def __init__(self, launches: int = LEAST_LAUNCHES) -> None:
        self.recorded = 0
        self.ran: list[tuple[int, int]] = []
        self.replays = Replays(launches)

    def record(self) -> object:
        self.recorded += 1
        sequence, number = self, self.recorded

        class Recorded:
            def replay(self, stream: int) -> None:
                sequence.ran.append((number, stream))

        return Recorded()

    def call(self, *arguments: int, stream: int = STREAM) -> bool:
        return self.replays.replay(arguments, stream, self.record)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def capturing(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Replace the driver; return the set of streams that are being captured."""
    streams: set[int] = set()
    monkeypatch.setattr(replays.driver, "stream_is_capturing", streams.__contains__)
    monkeypatch.setattr(replays, "_pool", replays.GraphPool())
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


def test_graphs_in_use_are_never_dropped_for_others() -> None:
    """More argument lists in turn than graphs fit: those that fit replay, the others are launched."""
    sequences = [Sequence(MOST_NODES // 4) for _ in range(6)]
    for _ in range(20):
        for sequence in sequences:
            sequence.call(1)
    assert [sequence.recorded for sequence in sequences] == [1, 1, 1, 1, 0, 0]
    assert [len(sequence.ran) for sequence in sequences] == [19, 19, 19, 19, 0, 0]


def test_a_graph_that_nobody_uses_makes_room() -> None:
    old, new = Sequence(MOST_NODES), Sequence(MOST_NODES)
    assert [old.call(1), old.call(1)] == [False, True]
    runs = [new.call(1) for _ in range(IDLE_RUNS + 2)]
    assert not any(runs[: IDLE_RUNS - 1])
    assert runs[-1]
    assert not old.call(1)
    assert new.call(1)


def test_a_sequence_longer_than_all_graphs_may_be_is_launched() -> None:
    sequence = Sequence(MOST_NODES + 1)
    assert not any(sequence.call(1) for _ in range(3))


def test_the_graphs_of_a_dropped_sequence_go_at_once() -> None:
    class Graph:
        def replay(self, stream: int) -> None:
            pass

    graph = Graph()
    alive = weakref.ref(graph)
    made = [graph]
    kept = Replays(LEAST_LAUNCHES)
    for _ in range(2):
        kept.replay((1,), STREAM, made.pop)  # type: ignore[arg-type]
    del graph
    assert alive() is not None
    gc.disable()
    try:
        del kept
        assert alive() is None
    finally:
        gc.enable()


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

    sequence.record = refuse  # type: ignore[method-assign]
    sequence.call(1)
    with pytest.warns(UserWarning, match="without a graph: cuGraphInstantiate: out of memory"):
        assert not sequence.call(1)
    assert not any(sequence.call(1) for _ in range(2))
    reset_cuda_graphs()  # starts anew
    with pytest.warns(UserWarning, match="out of memory"):
        assert not any(sequence.call(2) for _ in range(2))
