from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace

import pytest

from sdm_rt.plan.launch import Argument, Launch, pointers
from sdm_rt.runtime import driver, graph, launcher
from sdm_rt.runtime.launcher import PreparedLaunch, prepare, prepare_all, refuse_capture
from tests.runtime.cupy_without_gpu import HOPPER, SPEC
from tests.runtime.fake_driver import CONTEXT, FakeDriver

ARGUMENTS = (
    *pointers("x"),
    Argument("n", "int32"),
    Argument("stride", "int64"),
    Argument("scale", "float32"),
)
LAUNCH = Launch(
    name="small",
    kernel=replace(SPEC, defines=(*SPEC.defines, ("SDM_PDL_WAIT", "1"))),
    entry="small",
    grid=(4, 2, 6),
    block=(32, 8, 1),
    arguments=ARGUMENTS,
    reads=("x",),
    writes=("x",),
    bytes_moved=8,
    floor_bytes=0,
    cluster=(2, 1, 3),
    shared_memory=1000,
    pdl=True,
)
STREAM = 0x77


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver(len(ARGUMENTS))
    for module in (driver, graph):
        monkeypatch.setattr(module, "library", lambda: fake)
    monkeypatch.setattr(driver, "primary_context", lambda index: CONTEXT)
    return fake


def prepared(launch: Launch = LAUNCH, pdl: bool = True) -> PreparedLaunch:
    return PreparedLaunch(launch, 0xF0, CONTEXT, pdl, None)


def values(parameters: list[bytes]) -> tuple[int, int, int, float]:
    x, n, stride, scale = parameters
    return (
        *struct.unpack("<Q", x),
        *struct.unpack("<i", n[:4]),
        *struct.unpack("<q", stride),
        *struct.unpack("<f", scale[:4]),
    )


def test_what_the_driver_reads(fake: FakeDriver) -> None:
    launch = prepared()
    launch.set({"x": 2**63 + 5, "n": -7, "stride": -(2**40), "scale": 0.5})
    launch.run(STREAM)
    launch.set({"n": 8})
    launch.run(0)
    first, second = fake.launches
    assert (first.function, first.grid, first.block) == (0xF0, (4, 2, 6), (32, 8, 1))
    assert (first.shared_memory, first.stream, second.stream) == (1000, STREAM, 0)
    assert first.attributes == {
        driver.CLUSTER_DIMENSION: (2, 1, 3),
        driver.PROGRAMMATIC_STREAM_SERIALIZATION: 1,
    }
    assert values(first.parameters) == (2**63 + 5, -7, -(2**40), 0.5)
    assert values(second.parameters) == (2**63 + 5, 8, -(2**40), 0.5)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("x", -1, ValueError),
        ("x", 2**64, ValueError),
        ("n", 2**31, ValueError),
        ("n", -(2**31) - 1, ValueError),
        ("stride", 2**63, ValueError),
        ("n", 1.5, TypeError),
        ("x", "7", TypeError),
        ("stride", None, TypeError),
    ],
)
def test_what_an_argument_cannot_hold_is_refused(
    fake: FakeDriver, name: str, value: object, error: type[Exception]
) -> None:
    launch = prepared()
    good = {"x": 2**64 - 1, "n": -(2**31), "stride": 2**63 - 1, "scale": 2.0}
    launch.set(good)
    with pytest.raises(error):
        launch.set({name: value})
    launch.run(STREAM)
    assert values(fake.launches[-1].parameters) == (2**64 - 1, -(2**31), 2**63 - 1, 2.0)


@pytest.mark.parametrize(
    ("launch", "pdl", "expected"),
    [
        (LAUNCH, False, {driver.CLUSTER_DIMENSION}),
        (replace(LAUNCH, cluster=(1, 1, 1)), True, {driver.PROGRAMMATIC_STREAM_SERIALIZATION}),
        (replace(LAUNCH, cluster=(1, 1, 1), pdl=False), True, set()),
    ],
)
def test_attributes(fake: FakeDriver, launch: Launch, pdl: bool, expected: set[int]) -> None:
    prepared(launch, pdl).run(STREAM)
    assert set(fake.launches[0].attributes) == expected


@pytest.mark.parametrize("current", [0, 0xBAD])
def test_another_current_context_is_left_as_it_was(fake: FakeDriver, current: int) -> None:
    fake.current = current
    launch = prepared()
    launch.run(STREAM)
    launch.run(STREAM)
    assert [launch.context for launch in fake.launches] == [CONTEXT, CONTEXT]
    assert fake.current == current
    assert not fake.pushed


def test_a_stream_that_no_context_knows_is_refused(fake: FakeDriver) -> None:
    fake.fail_launch = driver.INVALID_HANDLE
    with pytest.raises(RuntimeError, match="launch of small"):
        prepared().run(STREAM)
    assert fake.current == CONTEXT
    assert not fake.pushed


def test_a_refused_launch_names_the_error_and_the_launch(fake: FakeDriver) -> None:
    fake.fail_launch = 700
    with pytest.raises(
        RuntimeError, match=r"small \(small\.cu, grid \(4, 2, 6\).*CUDA_ERROR_ILLEGAL_ADDRESS, the reason"
    ):
        prepared().run(STREAM)


def test_an_unknown_argument_is_refused(fake: FakeDriver) -> None:
    with pytest.raises(KeyError):
        prepared().set({"y": 0})


class _Kernels:
    def __init__(self, loaded: bool) -> None:
        self.loaded = loaded
        self.loads = 0

    def is_loaded(self, spec: object, gpu: object) -> bool:
        return self.loaded

    def load_all(self, specs: Sequence[object], gpu: object) -> list[_Kernels]:
        self.loads += 1
        return [self] * len(specs)

    def function(self, entry: str) -> int:
        assert entry == "small"
        return 0xF0


@pytest.mark.parametrize(("need", "limit"), [(1000, 49152), (200_000, 200_000)])
def test_opt_in_shared_memory_is_asked_for_where_needed(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, need: int, limit: int
) -> None:
    monkeypatch.setattr(launcher, "kernels", lambda: _Kernels(loaded=True))
    prepare(replace(LAUNCH, shared_memory=need), HOPPER, STREAM)
    assert fake.function_attributes[8] == limit


def test_pdl_can_be_switched_off(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "kernels", lambda: _Kernels(loaded=True))
    monkeypatch.setenv("SDM_RT_PDL", "0")
    prepare(LAUNCH, HOPPER, STREAM).run(STREAM)
    assert driver.PROGRAMMATIC_STREAM_SERIALIZATION not in fake.launches[0].attributes


def test_a_cold_kernel_is_refused_inside_a_capture(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    cold, warm = _Kernels(loaded=False), _Kernels(loaded=True)
    fake.capturing.add(STREAM)
    monkeypatch.setattr(launcher, "kernels", lambda: cold)
    with pytest.raises(RuntimeError, match="run warmup first"):
        prepare(LAUNCH, HOPPER, STREAM)
    assert cold.loads == 0
    monkeypatch.setattr(launcher, "kernels", lambda: warm)
    prepare(LAUNCH, HOPPER, STREAM)
    fake.capturing.clear()
    refuse_capture(STREAM)
    monkeypatch.setattr(launcher, "kernels", lambda: cold)
    prepare(LAUNCH, HOPPER, STREAM)
    assert cold.loads == 1


def test_launches_that_share_a_kernel_are_prepared_together(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = _Kernels(loaded=True)
    monkeypatch.setattr(launcher, "kernels", lambda: known)
    launches = [
        LAUNCH,
        replace(LAUNCH, shared_memory=200_000),
        replace(LAUNCH, cluster=(1, 1, 1), grid=(9, 1, 1)),
    ]
    for ready in prepare_all(launches, HOPPER, STREAM):
        ready.run(STREAM)
    assert known.loads == 1
    assert fake.function_attributes[8] == 200_000
    assert [launch.grid for launch in fake.launches] == [LAUNCH.grid, LAUNCH.grid, (9, 1, 1)]


def captured(fake: FakeDriver, count: int, keep: object = None) -> graph.CapturedLaunches:
    launch = prepared()
    steps = [(launch, {"x": 100 + step, "n": step, "stride": 1, "scale": 2.0}) for step in range(count)]
    return graph.capture(steps, CONTEXT, keep)


def test_a_graph_replays_each_step_with_its_own_arguments(fake: FakeDriver) -> None:
    steps = captured(fake, 5)
    fake.launches.clear()
    steps.replay(STREAM)
    assert [values(launch.parameters)[:2] for launch in fake.launches] == [(100 + n, n) for n in range(5)]
    assert len(steps) == 5


def test_a_graph_takes_other_pointers_without_a_new_capture(fake: FakeDriver) -> None:
    steps = captured(fake, 3)
    fake.launches.clear()
    changed = steps.update([{"x": 100}, {"x": 500}, {"x": 600, "scale": 4.0}], keep=None)
    assert changed == 2
    steps.replay(STREAM)
    assert [values(launch.parameters) for launch in fake.launches] == [
        (100, 0, 1, 2.0),
        (500, 1, 1, 2.0),
        (600, 2, 1, 4.0),
    ]
    with pytest.raises(ValueError, match="each of 3 launches, got 1"):
        steps.update([{}], keep=None)


def test_a_graph_keeps_what_it_addresses_and_is_destroyed(fake: FakeDriver) -> None:
    class Tensor:
        pass

    import weakref

    tensor = Tensor()
    alive = weakref.ref(tensor)
    steps = captured(fake, 1, keep=tensor)
    del tensor
    assert alive() is not None
    steps.update([{"x": 1}], keep=None)
    assert alive() is None
    assert len(fake.graphs) == 1
    del steps
    assert fake.graphs == {}


def test_a_capture_that_fails_leaves_the_next_call_working(fake: FakeDriver) -> None:
    fake.fail_launch, fake.fail_launch_number = 700, 1
    with pytest.raises(RuntimeError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        captured(fake, 3)
    assert not fake.capturing
    assert fake.graphs == {}
    fake.fail_launch = 0
    assert len(captured(fake, 2)) == 2


def test_a_recording_on_a_given_stream_leaves_the_stream(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    destroyed = []
    monkeypatch.setattr(fake, "cuStreamDestroy_v2", lambda stream: destroyed.append(stream.value))
    stream = graph.new_stream(CONTEXT)
    seen = []
    recording = graph.record(seen.append, CONTEXT, stream)
    assert (seen, destroyed, fake.capture_mode) == ([stream], [], 0)
    assert not fake.capturing
    recording.replay(STREAM)
    graph.record(seen.append, CONTEXT)
    assert destroyed == [0x51]
