"""Arrays at the border of an op, as far as a machine without a GPU can show; tests/gpu has the rest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sdm_rt import sdm_decode_step, sdm_write_read
from sdm_rt.errors import MissingDependencyError
from sdm_rt.runtime import interop
from sdm_rt.runtime.interop import is_cupy, producer_stream, to_tensor
from tests.problems import make_problem
from tests.tolerances import assert_same_bits


class Foreign:
    """DLPack and nothing else."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64]
)
def test_a_shared_tensor_has_the_same_memory_and_dtype(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).view(2, 3).to(dtype)
    shared = to_tensor(Foreign(tensor), "x")
    assert shared.data_ptr() == tensor.data_ptr()
    assert_same_bits("shared", shared, tensor)


@pytest.mark.parametrize("view", ["zero-size", "transposed", "strided", "offset"])
def test_layouts_survive(view: str) -> None:
    base = torch.arange(24.0).view(4, 6)
    layouts = {
        "zero-size": base[:0],
        "transposed": base.T,
        "strided": base[::2, 1::2],
        "offset": base[1:, 1:],
    }
    tensor = layouts[view]
    shared = to_tensor(Foreign(tensor), "x")
    assert shared.shape == tensor.shape
    if tensor.numel():
        assert shared.stride() == tensor.stride()
    assert_same_bits("shared", shared, tensor)


def test_a_tensor_is_taken_as_it_is() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    assert to_tensor(parameter, "x") is parameter


@pytest.mark.parametrize("array", [[1.0, 2.0], 3, None, "text"])
def test_anything_else_is_refused_by_name(array: object) -> None:
    with pytest.raises(TypeError, match=rf"k_val: expected .* got {type(array).__name__}"):
        to_tensor(array, "k_val")


def test_an_array_that_cannot_be_shared_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="v: ndarray cannot be shared through DLPack"):
        to_tensor(np.array(["text"]), "v")


def test_decode_on_numpy_and_foreign_arrays() -> None:
    problem = make_problem(2, 1, 5, 4, 6, 8).cast(torch.float32)
    token = {name: x[:, 0] for name, x in problem.inputs().items()}
    bank = problem.memory.clone()
    want = sdm_decode_step(bank, **token)
    numpy_bank = problem.memory.clone().numpy()
    got = sdm_decode_step(numpy_bank, **{name: x.numpy() for name, x in token.items()})
    assert isinstance(got, torch.Tensor)
    assert_same_bits("readings", got, want)
    assert_same_bits("bank", torch.from_numpy(numpy_bank), bank)
    foreign_bank = problem.memory.clone()
    got = sdm_decode_step(Foreign(foreign_bank), **{name: Foreign(x) for name, x in token.items()})
    assert_same_bits("readings", got, want)
    assert_same_bits("bank", foreign_bank, bank)


def test_cupy_arrays_are_recognised_without_importing_cupy() -> None:
    array = type("ndarray", (Foreign,), {"__module__": "cupy"})(torch.ones(1))
    assert is_cupy(array)
    assert not is_cupy(Foreign(torch.ones(1)))
    assert not is_cupy(torch.ones(1))


def test_cupy_beside_a_torch_without_a_gpu_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(interop, "is_cupy", lambda array: True)
    with pytest.raises(MissingDependencyError, match="CUDA build of torch"), producer_stream(object()):
        pass


class Streams:
    """Torch's and CuPy's current streams by handle, and which was made to wait for which."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, torchs: int, cupys: int, capturing: int = -1) -> None:
        self.current, self.waits = torchs, []
        log = self.waits

        @dataclass(eq=False)  # as PyTorch's: one of its pool and an external one of the same handle differ
        class Stream:
            cuda_stream: int

            def wait_stream(self, other: Stream) -> None:
                log.append((self.cuda_stream, other.cuda_stream))

        @contextlib.contextmanager
        def stream(one: Stream) -> Iterator[None]:
            before, self.current = self.current, one.cuda_stream
            try:
                yield
            finally:
                self.current = before

        cupy = SimpleNamespace(
            Device=lambda index: contextlib.nullcontext(),
            get_current_stream=lambda: SimpleNamespace(ptr=cupys),
        )
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream(0))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(self.current))
        monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: Stream(handle))
        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(interop, "load_cupy", lambda: SimpleNamespace(cuda=cupy))
        monkeypatch.setattr(interop.driver, "stream_is_capturing", lambda handle: handle == capturing)


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True

    def get_device(self) -> int:
        return 0


CUPYS = type("ndarray", (Foreign,), {"__module__": "cupy", "device": SimpleNamespace(id=0)})(torch.ones(1))
TORCHS = torch.ones(1).as_subclass(OnGpu)


@pytest.mark.parametrize(("torchs", "cupys"), [(0, 0), (0, 5), (6, 0), (6, 5)])
def test_the_streams_of_two_libraries_wait_for_each_other(
    torchs: int, cupys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch may have queued what writes an operand, and hands its memory out again when the call is over."""
    streams = Streams(monkeypatch, torchs, cupys)
    apart = torchs != cupys
    with producer_stream(CUPYS, (CUPYS, TORCHS)):
        assert streams.current == cupys
        assert streams.waits == [(cupys, torchs)] * apart
    assert streams.waits == [(cupys, torchs), (torchs, cupys)] * apart
    streams.waits.clear()
    with pytest.raises(KeyError), producer_stream(CUPYS, (TORCHS,)):
        raise KeyError
    assert streams.waits == [(cupys, torchs), (torchs, cupys)] * apart
    streams.waits.clear()
    with producer_stream(CUPYS, (CUPYS, torch.ones(1), None)):
        pass
    with producer_stream(TORCHS, (TORCHS, None)):
        assert streams.current == torchs
    assert streams.waits == []
    with producer_stream(TORCHS, (TORCHS, CUPYS)):  # at the start DLPack lets torch's stream wait
        assert streams.current == torchs
    assert streams.waits == [(cupys, torchs)] * apart


def test_captures_and_streams_that_torch_cannot_work_on(monkeypatch: pytest.MonkeyPatch) -> None:
    Streams(monkeypatch, torchs=0, cupys=2)
    with pytest.raises(RuntimeError, match="per-thread default stream"), producer_stream(CUPYS):
        pass
    Streams(monkeypatch, torchs=0, cupys=5, capturing=5)
    with pytest.raises(RuntimeError, match=r"torch\.cuda\.graph"), producer_stream(CUPYS):
        pass
    streams = Streams(monkeypatch, torchs=0, cupys=5, capturing=5)
    with producer_stream(CUPYS, (TORCHS,), allocates=False):
        assert streams.current == 5
    assert streams.waits == []
    Streams(monkeypatch, torchs=5, cupys=5, capturing=5)
    with producer_stream(CUPYS, (TORCHS,)):
        pass


def test_changes_of_another_librarys_array_do_not_reach_the_backward() -> None:
    call = numpy_call()
    gradients = []
    for change in (False, True):
        given = call | {"memory": torch.from_numpy(call["memory"].copy()), "q_val": call["q_val"].copy()}
        given["k_val"] = torch.from_numpy(call["k_val"]).requires_grad_()
        given["q_idx"] = call["q_idx"].copy()
        readings = sdm_write_read(**given, num_parallel=2, num_memory_slots=6)
        if change:
            given["q_val"][:] = 7
            given["q_idx"][:] = 0
        readings.sum().backward()
        gradients.append(given["k_val"].grad.clone())
    assert_same_bits("gradient", *gradients)


def numpy_call() -> dict[str, Any]:
    problem = make_problem(2, 1, 3, 2, 4, 6).cast(torch.float32)
    return {"memory": problem.memory.numpy().copy()} | {
        name: x.numpy() for name, x in problem.inputs().items()
    }


OPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "decode": (sdm_decode_step, {}),
    "write-read": (sdm_write_read, {"num_parallel": 2, "num_memory_slots": 6}),
}


@pytest.mark.parametrize("op", OPS)
def test_a_read_only_bank_is_refused(op: str, tmp_path: Path) -> None:
    function, options = OPS[op]
    call = numpy_call()
    np.save(tmp_path / "bank.npy", call["memory"])
    for mode in ("r", "c"):  # "c": copies on write
        bank = np.load(tmp_path / "bank.npy", mmap_mode=mode)
        if mode == "c":
            function(**call | {"memory": bank}, **options)
            assert (bank != call["memory"]).any()
            continue
        with pytest.raises(TypeError, match="memory: expected a writable array, got a read-only memmap"):
            function(**call | {"memory": bank}, **options)
    call["v"].flags.writeable = False
    function(**call, **options)


def test_a_read_only_bank_that_is_left_alone_is_taken() -> None:
    function, options = OPS["write-read"]
    call = numpy_call()
    want = function(**call | {"memory": call["memory"].copy()}, **options)
    call["memory"].flags.writeable = False
    readings, _ = function(**call, **options, return_final_bank=True)
    assert_same_bits("readings", readings, want)


@pytest.mark.parametrize("op", OPS)
def test_negative_strides(op: str) -> None:
    function, options = OPS[op]
    call = numpy_call()
    want = function(**call | {"memory": call["memory"].copy()}, **options)
    mirrored = {
        name: np.ascontiguousarray(x[..., ::-1])[..., ::-1] for name, x in call.items() if name != "memory"
    }
    assert all(x.shape[-1] == 1 or x.strides[-1] < 0 for x in mirrored.values())
    got = function(**mirrored, memory=call["memory"].copy(), **options)
    assert_same_bits("readings", got, want)
    with pytest.raises(ValueError, match=r"memory: expected strides of at least 0, got \[16, -4\] bytes"):
        function(**call | {"memory": call["memory"][:, ::-1]}, **options)


def test_an_array_as_the_bank_of_a_call_that_needs_a_backward() -> None:
    """Its changes are not tracked, so a backward could not tell that another call came between."""
    call = numpy_call()
    before = call["memory"].copy()
    leaf = torch.from_numpy(call["v"]).requires_grad_()
    options = {"num_parallel": 2, "num_memory_slots": 6}
    with pytest.raises(RuntimeError, match="memory: a ndarray cannot be advanced in place"):
        sdm_write_read(**call | {"v": leaf}, **options)
    assert (call["memory"] == before).all()
    readings, _ = sdm_write_read(**call | {"v": leaf}, **options, return_final_bank=True)
    readings.sum().backward()
    assert leaf.grad is not None


@pytest.mark.parametrize("error", [TypeError, AttributeError, KeyError, OSError, AssertionError])
def test_what_a_producer_raises_names_the_argument(error: type[Exception]) -> None:
    class Producer:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

        def __dlpack__(self, **options: object) -> object:
            raise error("no")

    with pytest.raises(TypeError, match="v: Producer cannot be shared through DLPack"):
        to_tensor(Producer(), "v")
