"""What the decode op hands to the driver, on CPU tensors and a driver that reads launches from memory."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdm_rt.errors import UnsupportedConfigurationError
from sdm_rt.ops import decode as front
from sdm_rt.ops import decode_launch as module
from sdm_rt.ops.inplace_call import apart
from sdm_rt.plan.decode import DECODE_ARGUMENTS, decode_kernel
from sdm_rt.plan.device import preset
from sdm_rt.plan.shapes import DecodeShape
from sdm_rt.runtime import driver
from sdm_rt.runtime.launcher import PreparedLaunch
from tests.runtime.cupy_without_gpu import HOPPER
from tests.runtime.fake_driver import CONTEXT, FakeDriver

P, S, D, W, R = 3, 10, 16, 4, 5
NAMES = [argument.name for argument in DECODE_ARGUMENTS]
KINDS = {argument.name: argument.kind for argument in DECODE_ARGUMENTS}
STREAM = 0x57


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver(len(DECODE_ARGUMENTS))
    fake.prepared = 0  # type: ignore[attr-defined]
    fake.counter = torch.zeros(1, dtype=torch.int64)  # type: ignore[attr-defined]

    def prepare(launch: Any, gpu: Any, stream: int) -> PreparedLaunch:
        fake.prepared += 1  # type: ignore[attr-defined]
        return PreparedLaunch(launch, 0xF0, CONTEXT, True, None)

    monkeypatch.setattr(driver, "library", lambda: fake)
    monkeypatch.setattr(module, "prepare", prepare)
    monkeypatch.setattr(
        module, "kernels", lambda: SimpleNamespace(are_current=lambda *kept: True, generation=0)
    )
    monkeypatch.setattr(module.device, "gpu", lambda index: HOPPER)
    monkeypatch.setattr(module, "device_model", lambda index: preset("h100"))
    monkeypatch.setattr(module, "device_repeats", lambda device: fake.counter)  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "current_stream", lambda index: STREAM)
    monkeypatch.setattr(module, "_memo", module._Memo())
    return fake


def call(dtype: torch.dtype = torch.bfloat16, streams: int = P, slots: int = S) -> dict[str, Tensor]:
    torch.manual_seed(0)
    first = slots * torch.arange(streams).view(-1, 1)
    return {
        "memory": torch.randn(streams * slots, D).to(dtype),
        "k_idx": first + torch.arange(W),
        "k_val": torch.rand(streams, W).to(dtype),
        "v": torch.randn(streams, D).to(dtype),
        "beta": torch.rand(streams, 1),
        "g": -torch.rand(streams, 1),
        "q_idx": first + torch.arange(R),
        "q_val": torch.rand(streams, R).to(dtype),
    }


def run(given: dict[str, Tensor], lengths: Tensor | None = None, check: Any = None) -> Tensor:
    memory, *operands = given.values()
    arguments = (memory, tuple(operands), lengths)

    def plain_check(values: bool) -> None:
        front._check(*arguments, values)

    return module.decode_on_gpu(*arguments, check or plain_check)


def arguments(fake: FakeDriver, at: int = -1) -> dict[str, int]:
    formats = {"pointer": "<Q", "int64": "<q", "int32": "<i"}
    return {
        name: struct.unpack(formats[KINDS[name]], raw[: 4 if KINDS[name] == "int32" else 8])[0]
        for name, raw in zip(NAMES, fake.launches[at].parameters, strict=True)
    }


def test_a_plain_call_passes_the_tensors_themselves(fake: FakeDriver) -> None:
    given = call()
    lengths = torch.tensor([1, 0, 1], dtype=torch.int32)
    y = run(given, lengths)
    seen = arguments(fake)
    for name, tensor in {**given, "lengths": lengths, "y": y, "repeats": fake.counter}.items():  # type: ignore[attr-defined]
        assert seen[name] == tensor.data_ptr(), name
    assert {name: seen[name] for name in ("row_stride", "S", "D", "W", "R", "gates")} == {
        "row_stride": D,
        "S": S,
        "D": D,
        "W": W,
        "R": R,
        "gates": 1,
    }
    bfloat16_values = 1 | 1 << 2 | 1 << 8
    wide_indices = 1 << 10 | 1 << 11
    assert seen["dtypes"] == bfloat16_values | wide_indices
    assert fake.launches[0].stream == STREAM
    assert y.shape == (P, D)
    assert y.dtype == torch.bfloat16


def test_a_second_call_of_the_shape_prepares_nothing(fake: FakeDriver) -> None:
    first, second = call(), call()
    checks = []
    for given in (first, second):
        run(given, check=checks.append)
    assert fake.prepared == 1  # type: ignore[attr-defined]
    assert checks == [False]
    assert arguments(fake, 0)["memory"] == first["memory"].data_ptr()
    assert arguments(fake, 1)["memory"] == second["memory"].data_ptr()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("k_idx", lambda x: x.int()),
        ("q_val", lambda x: x.float()),
        ("g", lambda x: x.expand(P, W).contiguous()),
        ("v", lambda x: x.unsqueeze(1)),
        ("memory", lambda x: torch.cat([x, x])[: P * S]),
    ],
)
def test_a_change_of_layout_or_dtype_is_another_preparation(fake: FakeDriver, name: str, change: Any) -> None:
    given = call()
    run(given)
    run({**given, name: change(given[name])})
    expected = 1 if name == "memory" else 2
    assert fake.prepared == expected  # type: ignore[attr-defined]


def test_bad_shapes_are_refused_before_anything_runs(fake: FakeDriver) -> None:
    given = call()
    with pytest.raises(ValueError, match=r"v: expected shape"):
        run({**given, "v": given["v"][:, :3]})
    with pytest.raises(TypeError, match="float64 \\(CPU only\\)"):
        run(call(torch.float64))
    assert not fake.launches


def test_too_many_slots_are_refused(fake: FakeDriver) -> None:
    given = call(streams=1)
    given["memory"] = torch.empty(2**31, 1, dtype=torch.bfloat16, device="meta")
    given["v"] = given["v"][:, :1]
    with pytest.raises(UnsupportedConfigurationError, match="2147483648 slots a stream"):
        run(given, check=lambda values: None)


@pytest.mark.parametrize("name", ["k_idx", "k_val", "v", "beta", "g", "q_idx", "q_val", "lengths"])
def test_strided_operands_go_as_copies_of_the_same_values(fake: FakeDriver, name: str) -> None:
    given = call() | {"lengths": torch.tensor([1, 0, 1])}
    wide = torch.stack([given[name], 7 + given[name]], dim=-1)
    strided = wide[..., 0]
    assert not strided.is_contiguous() or name in ("beta", "g")
    read: dict[str, bytes] = {}
    launch = fake.cuLaunchKernelEx

    def record(*words: Any) -> int:
        result = launch(*words)
        import ctypes

        size = given[name].numel() * given[name].element_size()
        read[name] = ctypes.string_at(arguments(fake)[name], size)
        return result

    fake.cuLaunchKernelEx = record  # type: ignore[method-assign]
    given_strided = {**given, name: strided}
    lengths = given_strided.pop("lengths")
    run(given_strided, lengths)
    assert read[name] == given[name].contiguous().view(torch.uint8).numpy().tobytes()


def test_other_value_dtypes_become_those_the_kernel_takes(fake: FakeDriver) -> None:
    given = call(torch.float16)
    given |= {"v": given["v"].double(), "beta": given["beta"].double(), "k_val": given["k_val"].bfloat16()}
    run(given)
    # k_val bfloat16, v as the bank (float16), beta float32, q_val float16, wide indices
    assert arguments(fake)["dtypes"] == 1 | 2 << 2 | 0 << 4 | 2 << 8 | 1 << 10 | 1 << 11


def test_a_bank_with_strided_rows_goes_as_it_is(fake: FakeDriver) -> None:
    given = call()
    wide = torch.zeros(P * S, D + 8, dtype=torch.bfloat16)
    bank = wide[:, 8:]
    run({**given, "memory": bank})
    assert arguments(fake)["memory"] == bank.data_ptr()
    assert arguments(fake)["row_stride"] == D + 8


def test_a_bank_with_strided_columns_is_advanced_in_a_copy(fake: FakeDriver) -> None:
    given = call()
    wide = torch.zeros(P * S, 2 * D, dtype=torch.bfloat16)
    bank = wide[:, 1::2]
    launch = fake.cuLaunchKernelEx

    def write(*words: Any) -> int:
        import ctypes

        result = launch(*words)
        ctypes.memset(arguments(fake)["memory"], 0x3F, P * S * D * 2)
        return result

    fake.cuLaunchKernelEx = write  # type: ignore[method-assign]
    run({**given, "memory": bank})
    assert arguments(fake)["row_stride"] == D
    assert bool((bank.view(torch.int16) == 0x3F3F).all())
    assert bool((wide[:, ::2] == 0).all())


@pytest.mark.parametrize(("offset", "vector"), [(0, "8"), (1, "1")])
def test_the_alignment_of_the_bank_chooses_the_vector(fake: FakeDriver, offset: int, vector: str) -> None:
    given = call()
    storage = torch.zeros(P * S * D + 16, dtype=torch.bfloat16)
    start = (-storage.data_ptr() // 2) % 8 + offset
    run({**given, "memory": storage[start : start + P * S * D].view(P * S, D)})
    (ready,) = module._memo.ready.values()
    assert dict(ready.spec.defines)["VECTOR"] == vector


def test_operands_in_the_memory_of_the_bank_are_copied(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = []

    def watched(bank: Tensor, operand: Tensor) -> Tensor:
        copies.append(apart(bank, operand))
        return copies[-1]

    monkeypatch.setattr(module, "apart", watched)
    given = call()
    buffer = torch.zeros(P * S * D + 8 * P, dtype=torch.bfloat16)
    bank = buffer[: P * S * D].view(P * S, D)
    lengths = buffer[P * S * D :].view(torch.int64)[:P]  # one buffer holds them and the bank
    lengths.fill_(1)
    v = bank[1 : 1 + P]
    run({**given, "memory": bank, "v": v}, lengths)
    handed = arguments(fake)
    assert handed["memory"] == bank.data_ptr()
    assert handed["v"] == copies[2].data_ptr() != v.data_ptr()
    assert handed["lengths"] == lengths.data_ptr()
    for name in ("k_idx", "k_val", "beta", "g", "q_idx", "q_val"):
        assert handed[name] == given[name].data_ptr()
    run(given)
    assert len(copies) == 8


def test_the_bank_counts_as_changed(fake: FakeDriver) -> None:
    given = call()
    version = given["memory"]._version
    run(given)
    assert given["memory"]._version > version


def test_inference_tensors_are_taken(fake: FakeDriver) -> None:
    with torch.inference_mode():
        run(call())
    assert len(fake.launches) == 1


def test_no_streams_launch_nothing(fake: FakeDriver) -> None:
    given = {name: tensor[:0] for name, tensor in call().items()}
    assert run(given).shape == (0, D)
    assert not fake.launches


def test_indices_are_checked_where_asked_for(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    given = call()
    given["k_idx"][1, 0] = 0
    run(given)
    monkeypatch.setenv("SDM_RT_CHECK", "1")
    with pytest.raises(ValueError, match=r"k_idx: expected bank rows in 10\.\.19 for stream 1"):
        run(given)
    assert len(fake.launches) == 1


def test_new_numbers_of_streams_and_slots_compile_nothing() -> None:
    for device in ("a100", "h100"):
        specs = {
            decode_kernel(DecodeShape(streams, W, R, D), preset(device).pdl)
            for streams in (0, 1, 7, 64, 4096)
        }
        assert len(specs) == 1


def test_the_plan_of_the_call_is_shown(fake: FakeDriver) -> None:
    from sdm_rt.ops.counters import last_dispatch

    run(call())
    shown = last_dispatch()
    assert (shown["op"], shown["path"], shown["streams"]) == ("sdm_decode_step", "gpu", P)
    assert shown["plan"].launch_count == 1
