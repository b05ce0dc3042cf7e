"""Bad input to the op: every row of the specification's table that a CPU can meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sdm_rt import sdm_write_read
from tests.bad_calls import Arguments, Bad, assert_refused, bad, put
from tests.problems import make_problem

P, T, W, R, D, S = 2, 4, 3, 2, 5, 6


def good_call() -> Arguments:
    problem = make_problem(P, T, W, R, D, S)
    return {"memory": problem.memory, **problem.inputs(), "num_memory_slots": S, "num_parallel": P}


def packed(cu_seqlens: list[int], **extra: Any) -> Callable[[Arguments], Arguments]:
    def change(call: Arguments) -> Arguments:
        tensors = {
            key: x[:, :3].flatten(0, 1) for key, x in call.items() if isinstance(x, Tensor) and x.dim() == 3
        }
        return call | tensors | {"cu_seqlens": torch.tensor(cu_seqlens)} | extra

    return change


SHAPES = [
    bad("bank of rank 3", ValueError, "memory...expected...[12, 5, 1]", memory=lambda x: x[..., None]),
    bad("bank of rank 1", ValueError, "memory...expected...[60]", memory=lambda x: x.flatten()),
    bad("bank one row short", ValueError, "memory...expected...12...got 11", memory=lambda x: x[:-1]),
    bad("no columns", ValueError, "memory...expected...16384...got 0", memory=lambda x: x[:, :0]),
    bad(
        "too many columns",
        ValueError,
        "memory...expected...16384...got 16385",
        memory=torch.zeros(12, 16385),
        v=torch.zeros(P, T, 16385),
    ),
    bad("indices of rank 1", ValueError, "k_idx...expected...got [24]", k_idx=lambda x: x.flatten()),
    bad("indices of rank 4", ValueError, "k_idx...expected...[1, 2, 4, 3]", k_idx=lambda x: x[None]),
    bad(
        "a stream too many", ValueError, "k_idx...expected...2...got [3, 4, 3]", k_idx=lambda x: x[[0, 1, 1]]
    ),
    bad(
        "rows no multiple of the streams",
        ValueError,
        "k_idx...expected...2...got [7, 3]",
        **{
            key: lambda x: x.flatten(0, 1)[:7]
            for key in ("k_idx", "k_val", "v", "beta", "g", "q_idx", "q_val")
        },
    ),
    bad(
        "reads one token short",
        ValueError,
        "q_idx...expected...[2, 4,...got [2, 3, 2]",
        q_idx=lambda x: x[:, 1:],
    ),
    bad("read slots of rank 0", ValueError, "q_idx...expected...got []", q_idx=torch.tensor(1)),
    bad("read slots of rank 1", ValueError, "q_idx...expected...got [16]", q_idx=lambda x: x.flatten()),
    bad("reads of one stream", ValueError, "q_idx...expected...got [1, 4, 2]", q_idx=lambda x: x[:1]),
    bad("a weight too many", ValueError, "k_val...expected...3...got [...4]", k_val=torch.zeros(P, T, 4)),
    bad(
        "a read weight too many", ValueError, "q_val...expected...2...got [...3]", q_val=torch.zeros(P, T, 3)
    ),
    bad("narrow values", ValueError, "v...expected...5...got [...4]", v=lambda x: x[..., :4]),
    bad("values of rank 2", ValueError, "v...expected...got [2, 4]", v=lambda x: x[..., 0]),
    bad("a strength per write", ValueError, "beta...expected...1...got [...3]", beta=torch.zeros(P, T, 3)),
    bad(
        "gates neither per token nor per write",
        ValueError,
        "g...expected...1]...3]...got [...2]",
        g=torch.zeros(P, T, 2),
    ),
    bad(
        "asserted gates per write",
        ValueError,
        "g...expected...3...key_weighted_decay=True...got...1",
        key_weighted_decay=True,
    ),
    bad("num_parallel against the bank", ValueError, "memory...expected...3 * 6...got 12", num_parallel=3),
    bad(
        "num_memory_slots against the bank",
        ValueError,
        "memory...expected...2 * 7...got 12",
        num_memory_slots=7,
    ),
    bad(
        "one bank without the promise",
        ValueError,
        "num_memory_slots...expected...got 0...shared_bank=True",
        num_memory_slots=0,
    ),
    bad(
        "a shared bank with slots of a stream",
        ValueError,
        "num_memory_slots...expected...got 6",
        shared_bank=True,
    ),
]

DTYPES = [
    bad("int64 bank", TypeError, "memory...expected dtype...float32...got int64", memory=lambda x: x.long()),
    bad(
        "complex bank",
        TypeError,
        "memory...expected dtype...bfloat16...got complex64",
        memory=lambda x: x.cfloat(),
    ),
    bad(
        "float8 bank",
        TypeError,
        "memory...expected dtype...float16...got float8_e4m3fn",
        memory=lambda x: x.to(torch.float8_e4m3fn),
    ),
    bad("bank of lists", TypeError, "memory...expected...Tensor...got list", memory=lambda x: x.tolist()),
    bad(
        "float indices",
        TypeError,
        "k_idx...expected dtype int32 or int64...got float64",
        k_idx=lambda x: x.double(),
    ),
    bad(
        "bool indices",
        TypeError,
        "k_idx...expected dtype int32 or int64...got bool",
        k_idx=lambda x: x.bool(),
    ),
    bad(
        "int16 indices",
        TypeError,
        "q_idx...expected dtype int32 or int64...got int16",
        q_idx=lambda x: x.short(),
    ),
    bad(
        "uint8 indices",
        TypeError,
        "q_idx...expected dtype int32 or int64...got uint8",
        q_idx=lambda x: x.byte(),
    ),
    bad("indices of lists", TypeError, "k_idx...expected...Tensor...got list", k_idx=lambda x: x.tolist()),
    *(
        bad(
            f"integer {name}",
            TypeError,
            f"{name}...expected...floating...got int64",
            **{name: lambda x: x.long()},
        )
        for name in ("k_val", "v", "beta", "g", "q_val")
    ),
    bad("complex values", TypeError, "v...expected...floating...got complex128", v=lambda x: x.cdouble()),
    bad(
        "float lengths", TypeError, "lengths...expected...int32 or int64...got float32", lengths=torch.ones(P)
    ),
    bad("a list of lengths", TypeError, "lengths...expected...int32 or int64...got list", lengths=[4, 4]),
    bad("float chunk_size", TypeError, "chunk_size...expected an int...got float", chunk_size=64.0),
    bad("bool chunk_size", TypeError, "chunk_size...expected an int...got bool", chunk_size=True),
    bad("num_parallel None", TypeError, "num_parallel...expected an int...got NoneType", num_parallel=None),
]

DEVICES = [
    bad(
        f"{name} on another device",
        ValueError,
        f"{name}...expected...memory...cpu...got meta",
        **{name: lambda x: x.to("meta")},
    )
    for name in ("k_idx", "k_val", "v", "beta", "g", "q_idx", "q_val")
] + [
    bad(
        "lengths on another device",
        ValueError,
        "lengths...expected...cpu...got meta",
        lengths=torch.ones(P, dtype=torch.long, device="meta"),
    ),
]

RANGES = [
    bad("chunk_size 0", ValueError, "chunk_size...1..256...got 0", chunk_size=0),
    bad("chunk_size 257", ValueError, "chunk_size...1..256...got 257", chunk_size=257),
    bad(
        "unknown snapshot_quant",
        ValueError,
        "snapshot_quant...'none', 'bf16', 'fp8', 'int4'...got 'int8'",
        snapshot_quant="int8",
    ),
    bad("snapshot_quant None", ValueError, "snapshot_quant...'none'...got None", snapshot_quant=None),
    bad("unknown schedule", ValueError, "schedule...'stepwise', 'persistent'...got 'fast'", schedule="fast"),
    bad(
        "a GPU schedule on the CPU",
        ValueError,
        "schedule...expected None...CPU...got 'stepwise'",
        schedule="stepwise",
    ),
    bad(
        "negative num_memory_slots", ValueError, "num_memory_slots...at least 0...got -1", num_memory_slots=-1
    ),
    bad("negative num_parallel", ValueError, "num_parallel...at least 0...got -2", num_parallel=-2),
    bad("negative max_seqlen", ValueError, "max_seqlen...at least 0...got -1", max_seqlen=-1),
    bad("max_seqlen below T", ValueError, "max_seqlen...T = 4...got 3", max_seqlen=3),
    bad(
        "max_seqlen below a length",
        ValueError,
        "max_seqlen...longest stream, 4 tokens (stream 1)...got 3",
        max_seqlen=3,
        lengths=torch.tensor([2, 4]),
    ),
    *(
        bad(
            f"{count} entries in {name}",
            ValueError,
            f"{name}...1..256...got {count}",
            **{
                name: torch.zeros(P, T, count, dtype=torch.long),
                name.replace("idx", "val"): torch.zeros(P, T, count),
            },
        )
        for name in ("k_idx", "q_idx")
        for count in (0, 257)
    ),
]

INDICES = [
    bad(
        "a write to the next stream's row",
        ValueError,
        "k_idx...expected...0..5...stream 0...got 6",
        k_idx=put((0, 3, 2), 6),
    ),
    bad(
        "a write to the previous stream's row",
        ValueError,
        "k_idx...expected...6..11...stream 1...got 5",
        k_idx=put((1, 0, 0), 5),
    ),
    bad(
        "a write behind the bank",
        ValueError,
        "k_idx...expected...6..11...stream 1...got 12",
        k_idx=put((1, 0, 0), 12),
    ),
    bad(
        "a write behind the bank with checks off, which the CPU does not obey",
        ValueError,
        "k_idx...expected...6..11...stream 1...got 12",
        k_idx=put((1, 0, 0), 12),
        check_indices=False,
    ),
    bad(
        "a negative write index",
        ValueError,
        "k_idx...expected...0..5...stream 0...got -1",
        k_idx=put((0, 0, 0), -1),
    ),
    bad(
        "a negative read index",
        ValueError,
        "q_idx...expected...0..5...stream 0...got -7",
        q_idx=put((0, 2, 1), -7),
    ),
    bad(
        "a read far away",
        ValueError,
        f"q_idx...expected...6..11...stream 1...got {2**40}",
        q_idx=put((1, 2, 1), 2**40),
    ),
    bad(
        "a read of the other stream",
        ValueError,
        "q_idx...expected...6..11...stream 1...got 0",
        q_idx=put((1, 2, 1), 0),
    ),
    bad(
        "a write behind a shared bank",
        ValueError,
        "k_idx...expected...0..11...got 12",
        k_idx=put((0, 0, 0), 12),
        num_memory_slots=0,
        shared_bank=True,
    ),
    bad(
        "a shared row written by two streams",
        ValueError,
        "shared_bank...row 6...stream 0...stream 1",
        k_idx=lambda x: put((1, 0, 0), 6)(put((0, 0, 0), 6)(x)),
        num_memory_slots=0,
        shared_bank=True,
    ),
    bad(
        "a shared row written by one stream and read by another",
        ValueError,
        "shared_bank...expected...row 6...written by stream 1...read by stream 0",
        k_idx=put((1, 0, 0), 6),
        q_idx=put((0, 3, 1), 6),
        num_memory_slots=0,
        shared_bank=True,
    ),
]

LENGTHS = [
    bad(
        "lengths of three streams",
        ValueError,
        "lengths...expected...[2]...got [3]",
        lengths=torch.tensor([4, 4, 4]),
    ),
    bad(
        "lengths of rank 2",
        ValueError,
        "lengths...expected...[2]...got [2, 1]",
        lengths=torch.tensor([[4], [4]]),
    ),
    bad(
        "a length beyond T",
        ValueError,
        "lengths...expected...0..4...got 5...stream 1",
        lengths=torch.tensor([4, 5]),
    ),
    bad(
        "a negative length",
        ValueError,
        "lengths...expected...0..4...got -1...stream 0",
        lengths=torch.tensor([-1, 4]),
    ),
    Bad(
        "both layouts",
        ValueError,
        "lengths...cu_seqlens...both",
        packed([0, 3, 6], lengths=torch.tensor([3, 3])),
    ),
    Bad("offsets of one stream", ValueError, "cu_seqlens...expected...[3]...got [2]", packed([0, 6])),
    Bad("offsets from 1", ValueError, "cu_seqlens...start at 0...got 1", packed([1, 3, 6])),
    Bad("offsets short of the rows", ValueError, "cu_seqlens...end at 6...got...5", packed([0, 3, 5])),
    Bad("falling offsets", ValueError, "cu_seqlens...expected...7...6", packed([0, 7, 6])),
    Bad(
        "max_seqlen too small",
        ValueError,
        "max_seqlen...3...stream 0...got 2",
        packed([0, 3, 6], max_seqlen=2),
    ),
    Bad(
        "padded inputs with offsets",
        ValueError,
        "k_idx...expected...sum T...got [2, 4, 3]",
        lambda call: call | {"cu_seqlens": torch.tensor([0, 4, 8])},
    ),
    Bad(
        "packed index outside",
        ValueError,
        "k_idx...6..11...stream 1...got 0",
        lambda call: (lambda c: c | {"k_idx": put((4, 0), 0)(c["k_idx"])})(packed([0, 3, 6])(call)),
    ),
]

OVERLAPS = [
    bad(
        "one row expanded",
        ValueError,
        "memory...overlap...strides [0, 1]",
        memory=torch.zeros(1, D).expand(P * S, D),
    ),
    bad(
        "one column expanded",
        ValueError,
        "memory...overlap...strides [1, 0]",
        memory=torch.zeros(P * S, 1).expand(P * S, D),
    ),
    bad(
        "sliding window",
        ValueError,
        "memory...overlap...strides [1, 1]",
        memory=torch.zeros(99).as_strided((P * S, D), (1, 1)),
    ),
    bad(
        "interleaved overlap",
        ValueError,
        "memory...overlap...strides [3, 2]",
        memory=torch.zeros(99).as_strided((P * S, D), (3, 2)),
    ),
]

CALLS = [*SHAPES, *DTYPES, *DEVICES, *RANGES, *INDICES, *LENGTHS, *OVERLAPS]


@pytest.mark.parametrize("case", CALLS, ids=lambda case: case.label)
@pytest.mark.parametrize("form", ["in place", "functional", "training"])
def test_write_read_refuses(case: Bad, form: str) -> None:
    """Also where a call with all else alike was checked before."""
    sdm_write_read(**good_call())
    call = case.change(good_call())
    if form == "functional":
        call["return_final_bank"] = True
    if form == "training":
        for name in ("k_val", "g"):
            if call[name].is_floating_point():
                call[name] = call[name].detach().requires_grad_()
    assert_refused(sdm_write_read, call, case)


def test_the_good_call_is_good() -> None:
    assert sdm_write_read(**good_call()).shape == (P * T, D)
    assert sdm_write_read(**packed([0, 3, 6])(good_call())).shape == (6, D)


def test_case_names_are_unique() -> None:
    names = [case.label for case in CALLS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("stride", [(2, 1), (1, 12), (5, 1), (7, 1), (7, 5), (1, 13), (10, 2)])
@pytest.mark.parametrize("shape", [(12, 5), (12, 1), (1, 5), (3, 2), (2, 3)])
def test_exactly_the_overlapping_views_are_refused(stride: tuple[int, int], shape: tuple[int, int]) -> None:
    rows, columns = shape
    addresses = {i * stride[0] + j * stride[1] for i in range(rows) for j in range(columns)}
    memory = torch.zeros(200).as_strided(shape, stride)
    call = {
        "k_idx": torch.zeros(1, 1, 1, dtype=torch.long),
        "q_idx": torch.zeros(1, 1, 1, dtype=torch.long),
        "v": torch.ones(1, 1, columns),
        **{name: torch.ones(1, 1, 1) for name in ("k_val", "beta", "g", "q_val")},
    }
    if len(addresses) == rows * columns:
        assert sdm_write_read(memory, **call).shape == (1, columns)
    else:
        with pytest.raises(ValueError, match=r"^memory: .*overlap"):
            sdm_write_read(memory, **call)


@pytest.mark.parametrize("name", ["memory", "v", "k_idx"])
def test_sparse_tensors_are_refused(name: str) -> None:
    problem = make_problem(2, 3, 2, 2, 4, 6)
    given = problem.inputs() | {"memory": problem.memory}
    given[name] = given[name].to_sparse()
    with pytest.raises(TypeError, match=rf"^{name}: expected a dense tensor, got layout torch\.sparse_coo"):
        sdm_write_read(**given, **problem.options())


@pytest.mark.parametrize("options", [{}, {"num_parallel": 2, "shared_bank": True}])
def test_a_bank_without_rows_takes_no_token(options: dict[str, Any]) -> None:
    problem = make_problem(options.get("num_parallel", 1), 3, 2, 2, 4, 6)
    with pytest.raises(ValueError, match=r"^memory: expected rows .* got a bank of none"):
        sdm_write_read(problem.memory[:0], **problem.inputs(), **options)
    none = {name: x[:, :0] for name, x in problem.inputs().items()}
    assert sdm_write_read(problem.memory[:0], **none, **options).shape == (0, 4)
