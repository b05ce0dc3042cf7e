"""Conversions of numeric.cuh and snapshot.cuh against PyTorch's, bit for bit, on emulator and GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sdm_rt.plan.launch import Argument, Launch, pointers
from sdm_rt.runtime.kernel import KernelSpec
from tests.emulator.harness import Call
from tests.kernels.backends import BACKENDS, Backend, execute, require
from tests.tolerances import assert_same_bits

COUNT = 1 << 16
OUTPUTS = ("bf16", "fp16", "bf16_pairs", "fp16_pairs", "wide_bf16", "wide_fp16", "decays", "fp8", "int4")


def interesting_floats() -> Tensor:
    """Every exponent with random and tie-prone mantissas, both signs, zeros, infinities, NaN."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (2 * COUNT,), generator=generator, dtype=torch.int64)
    ties = torch.randint(0, 4, (2 * COUNT,), generator=generator)
    bits = torch.where(ties == 1, (bits & ~0xFFFF) | 0x8000, bits)
    bits = torch.where(ties == 2, (bits & ~0x1FFF) | 0x1000, bits)
    bits = torch.where(ties == 3, (bits & ~0xFFFFF) | 0x80000, bits)
    # Half of them in the range of float16 and its subnormal numbers,
    # a fifth in that of e4m3fn, two fifths at int4's steps and beside them.
    exponent = torch.randint(100, 144, (2 * COUNT,), generator=generator) << 23
    bits[::2] = (bits[::2] & ~0x7F800000) | exponent[::2]
    exponent = torch.randint(115, 138, (2 * COUNT,), generator=generator) << 23
    bits[::5] = (bits[::5] & ~0x7F800000) | exponent[::5]
    x = bits.to(torch.int32).view(torch.float32)
    x[1::5] = torch.randint(-20, 21, x[1::5].shape, generator=generator) / 2
    x[2::5] = torch.nextafter(x[1::5][: x[2::5].numel()], x[2::5])
    special = [
        0.0,
        -0.0,
        torch.inf,
        -torch.inf,
        torch.nan,
        65504.0,
        65519.9,
        65520.0,
        3.4e38,
        2.0**-24,
        2.0**-25,
        448.0,
        463.9,
        464.0,
        2.0**-10,  # half of the smallest e4m3fn
    ]
    x[: len(special)] = torch.tensor(special)
    return x


def canonical(halves: Tensor, dtype: torch.dtype) -> Tensor:
    """The bits of 16-bit values, every NaN as one."""
    return torch.where(halves.view(dtype).isnan(), torch.tensor(0x7FFF, dtype=torch.int16), halves)


@pytest.fixture(params=BACKENDS)
def converted(request: pytest.FixtureRequest, kernels_of_the_tests: None) -> dict[str, Tensor]:
    backend: Backend = request.param
    require(backend)
    wide, half, word = torch.float32, torch.int16, torch.int32
    values = {
        "x": interesting_floats(),
        "halves": torch.arange(COUNT, dtype=torch.int32).to(half),
        "bf16": torch.empty(2 * COUNT, dtype=half),
        "fp16": torch.empty(2 * COUNT, dtype=half),
        "bf16_pairs": torch.empty(COUNT, dtype=word),
        "fp16_pairs": torch.empty(COUNT, dtype=word),
        "wide_bf16": torch.empty(COUNT, dtype=wide),
        "wide_fp16": torch.empty(COUNT, dtype=wide),
        "decays": torch.empty(2 * COUNT, dtype=wide),
        "fp8": torch.empty(COUNT, dtype=half),
        "int4": torch.empty(2 * COUNT, dtype=torch.uint8),
    }
    launch = Launch(
        name="conversions",
        kernel=KernelSpec("conversions.cu", ("conversions",)),
        entry="conversions",
        grid=(COUNT // 64, 1, 1),
        block=(64, 1, 1),
        arguments=(*pointers(*values), Argument("n", "int32")),
        reads=("x", "halves"),
        writes=OUTPUTS,
        bytes_moved=0,
        floor_bytes=0,
    )
    execute(backend, [Call(launch, values | {"n": COUNT})], outputs=[values[name] for name in OUTPUTS])
    return values


def test_conversions(converted: dict[str, Tensor]) -> None:
    x, halves = converted["x"], converted["halves"]
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        want = canonical(x.to(dtype).view(torch.int16), dtype)
        assert_same_bits(f"float to {name}", canonical(converted[name], dtype), want)
        pairs = converted[f"{name}_pairs"].view(torch.int16)
        assert_same_bits(f"two floats to {name}", canonical(pairs, dtype), want)
        wide, source = converted[f"wide_{name}"], halves.view(dtype)
        number = ~source.isnan()
        assert_same_bits(f"{name} to float", wide[number], source.float()[number])
        assert bool(wide[~number].isnan().all())


def test_quantized_values(converted: dict[str, Tensor]) -> None:
    x = converted["x"]
    number = (x == 0) | (x.abs() >= torch.finfo(torch.float32).tiny)  # smaller numbers are 0 to the kernels
    want = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert_same_bits("float to fp8", converted["fp8"].view(torch.uint8)[number], want[number])
    level = x.floor().clamp(-8, 7)
    assert_same_bits("float to int4", converted["int4"][number], (level + 8).to(torch.uint8)[number])


def test_decays(converted: dict[str, Tensor]) -> None:
    x, decays = converted["x"], converted["decays"]
    smallest = torch.finfo(torch.float32).tiny
    exact = x.double().exp()
    assert bool((decays[exact < 0.999 * smallest] == 0).all())
    normal = (exact > 1.001 * smallest) & (exact < 3e38)
    error = (decays.double()[normal] / exact[normal] - 1).abs()
    assert float(error.max()) < 3e-7  # two units in the last place
    assert bool(decays[x.isnan()].isnan().all())
    assert bool((decays[exact > 3.5e38] == torch.inf).all())
    assert not bool(((decays > 0) & (decays < smallest)).any())
