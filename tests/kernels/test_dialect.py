"""CUDA warp operations, votes, atomics and intrinsics against their definitions, on emulator and GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sdm_rt.plan.launch import Launch, pointers
from sdm_rt.runtime.kernel import KernelSpec
from tests.emulator.harness import Call
from tests.kernels.backends import BACKENDS, Backend, execute, require

THREADS = 64
LANES = torch.arange(THREADS) % 32
WARP_START = torch.arange(THREADS) - LANES


def signed(value: int) -> int:
    """The 32 bits of a value as int32."""
    return (value + 2**31) % 2**32 - 2**31


def unsigned(x: Tensor) -> Tensor:
    return x.long() % 2**32


def gathered(x: Tensor, source: Tensor, valid: Tensor) -> Tensor:
    """x of lane `source` of the own warp where valid, else the own one."""
    return torch.where(valid, x[WARP_START + source.clamp(0, 31)], x)


def expected(x: Tensor) -> list[Tensor]:
    warps = x.view(2, 32)

    def of_warp(values: list[int]) -> Tensor:
        return torch.tensor([signed(value) for value in values]).repeat_interleave(32)

    def bits(flags: Tensor) -> list[int]:
        return [sum(1 << lane for lane in range(32) if warp[lane]) for warp in flags.view(2, 32)]

    def ored(warp: Tensor) -> int:
        result = 0
        for value in warp.tolist():
            result |= value
        return result

    def everywhere(value: int) -> Tensor:
        return torch.full((THREADS,), value)

    segment8, segment16, always = LANES // 8 * 8, LANES // 16 * 16, torch.ones(THREADS, dtype=torch.bool)
    pair = gathered(x, LANES ^ 1, always) + (torch.arange(THREADS) ^ 1)
    equal = [[bits((x & 3) == (x[t] & 3))[t // 32] for t in range(THREADS)]]
    half = torch.where(LANES >= 16, gathered(x, LANES + 2, LANES + 2 <= 31), 0)
    words = [value % 2**32 for value in x.tolist()]
    counts = [
        word.bit_count() + 100 * (32 - word.bit_length()) + 10000 * ((word & -word).bit_length())
        for word in words
    ]
    return [
        gathered(x, everywhere(5), always),
        gathered(x, segment8 + (LANES + 3) % 8, always),
        gathered(x, LANES ^ 9, always),
        gathered(x, LANES ^ 12, segment8 + 7 >= (LANES ^ 12)),
        gathered(x, LANES - 3, LANES >= 3),
        gathered(x, LANES - 3, segment8 <= LANES - 3),
        gathered(x, LANES + 5, LANES + 5 <= 31),
        gathered(x, LANES + 5, segment16 + 15 >= LANES + 5),
        pair,
        of_warp(bits(x > 0)),
        of_warp([int((warp == x[3]).any()) for warp in warps]),
        of_warp([int((warp == x[3]).all()) for warp in warps]),
        torch.tensor([signed(value) for value in equal[0]]),
        of_warp([int(warp.sum()) for warp in warps]),
        of_warp([int(warp.min()) for warp in warps]),
        of_warp([int(warp.max()) for warp in warps]),
        of_warp([int(unsigned(warp).max()) for warp in warps]),
        of_warp([ored(warp) for warp in warps]),
        half,
        everywhere(int((x > 0).sum())),
        everywhere(int((x == x[40]).any())),
        everywhere(int((x == x[40]).all())),
        torch.tensor([signed(count) for count in counts]),
        x & 0x3FFFFFFF,
        x.clamp(max=3) + x.clamp(min=3),
    ]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.usefixtures("kernels_of_the_tests")
def test_dialect(backend: Backend) -> None:
    require(backend)
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-1000, 1000, (THREADS,), generator=generator).int()
    x[7] = 0
    want = expected(x.long())
    out = torch.empty(len(want) + 1, THREADS, dtype=torch.int32)
    counters = torch.tensor([0, 0, 1000, 0, -1, 7], dtype=torch.int32)
    launch = Launch(
        name="dialect",
        kernel=KernelSpec("dialect.cu", ("dialect",)),
        entry="dialect",
        grid=(1, 1, 1),
        block=(THREADS, 1, 1),
        arguments=pointers("x", "out", "counters"),
        reads=("x", "counters"),
        writes=("out", "counters"),
        bytes_moved=0,
        floor_bytes=0,
    )
    execute(backend, [Call(launch, {"x": x, "out": out, "counters": counters})], scratch=[out])
    for operation, (got, right) in enumerate(zip(out, want, strict=False)):
        assert torch.equal(got.long(), right), f"operation {operation}"
    assert int(out[-1, 9]) == 7 + 70
    low = [int(x.sum()), int(x.max()), int(x.min()), -1, 0, 71]
    assert counters.tolist() == low
