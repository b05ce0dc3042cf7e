"""Phase 1 and the solve against their own definitions, on the emulator and on the GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.backends import BACKENDS, Backend, device_model, execute, require
from tests.kernels.forward import planned_forward
from tests.kernels.phase1_definition import Phase1Reference, phase1_reference
from tests.problems import Problem, make_problem

pytestmark = pytest.mark.parametrize("backend", BACKENDS)

# Single float32 numbers; exp takes the error of its argument, whose rounding is 2^-24 of it.
CLOSE = {"rtol": 2e-6, "atol": 1.2e-38}
# Sums of products of these: as many roundings as terms.
SUMS = {"rtol": 1e-5, "atol": 1e-7}


@pytest.fixture(autouse=True)
def available(backend: Backend) -> None:
    require(backend)


def run(backend: Backend, problem: Problem, chunk: int) -> dict[str, Any]:
    """Run Phase 1 as training does, with the results that the op leaves out."""
    chunks = -(-problem.tokens // chunk) * problem.streams
    W, R = problem.k_idx.shape[2], problem.q_idx.shape[2]
    optional = {name: torch.empty(chunks, chunk, W) for name in ("log_k", "rex", "cpe")}
    optional["log_q"] = torch.empty(chunks, chunk, R)
    optional["flags"] = torch.empty(chunks, chunk, W, dtype=torch.uint8)
    planned = planned_forward(problem, chunk, device_model(backend), training=True, optional=optional)
    calls = [call for call in planned.calls if call.launch in planned.plan.prologue]
    assert [call.launch.name for call in calls] == ["phase1_sort", "phase1_scan", "phase1_gram", "solve"]
    execute(backend, calls, outputs=list(optional.values()), scratch=planned.scratch)
    return planned.values


def close(name: str, got: Tensor, want: Tensor, tolerance: dict[str, float]) -> None:
    torch.testing.assert_close(got.double(), want, **tolerance, msg=lambda text: f"{name}: {text}")


def check_chunk(got: dict[str, Any], n: int, want: Phase1Reference) -> None:
    for name in ("log_k", "log_q", "rex", "k_eff", "q_w", "cpe", "strength"):
        close(name, got[name][n], getattr(want, name), CLOSE)
    assert torch.equal(got["flags"][n], want.flags)
    for name in ("a", "qk", "x", "qx"):
        close(name, got[name][n], getattr(want, name), SUMS)
        above = torch.ones_like(got[name][n], dtype=torch.bool).triu(0 if name == "a" else 1)
        assert not got[name][n][above].any(), f"{name}: a value above the diagonal"
    check_order(got["payload"][n], want)
    check_records(got, n, want)


def check_order(payload: Tensor, want: Phase1Reference) -> None:
    """The valid entries in sorted order, then the others; each code's lane, token and bits."""
    lane, token = payload & 0xFF, payload >> 8 & 0xFF
    query, valid, head, owner = (payload >> bit & 1 for bit in (16, 17, 18, 19))
    count = len(want.entries)
    assert valid.tolist() == [1] * count + [0] * (len(payload) - count)
    for i, entry in enumerate(want.entries):
        assert (int(token[i]), int(query[i]), int(lane[i])) == (entry.token, entry.query, entry.lane)
        assert int(head[i]) == (i == 0 or want.entries[i - 1].slot != entry.slot)
        assert int(owner[i]) == (entry.gate is not None)


def records(got: dict[str, Any], name: str, n: int, count: int) -> Tensor:
    """The first ``count`` records of a chunk as int32 [count, 4]."""
    words: Tensor = got[name][n].view(torch.int32)
    return words[:count]


def check_records(got: dict[str, Any], n: int, want: Phase1Reference) -> None:
    """The records in sorted order: written slots and K entries, read slots and Q entries."""
    assert int(got["slot_count"][n]) == len(want.slots)
    found = records(got, "slots", n, len(want.slots))  # slot, first, count, bits of cpe
    assert [tuple(row) for row in found[:, :3].tolist()] == want.slots
    if want.slots:
        close("cpe of a slot", floats(found[:, 3]), torch.tensor(want.slot_decay).double(), CLOSE)
    writes = [entry for entry in want.entries if not entry.query]
    reads = [entry for entry in want.entries if entry.query]
    K = tuple(torch.tensor([(e.token, e.lane) for e in writes], dtype=torch.int64).reshape(-1, 2).T)
    Q = tuple(torch.tensor([(e.token, e.lane) for e in reads], dtype=torch.int64).reshape(-1, 2).T)
    terms = records(got, "write_terms", n, len(writes))  # bits of weight and of k_eff, code, slot
    expected = torch.tensor([weight for weight, _ in want.write_terms], dtype=torch.float64)
    close("weight of a write", floats(terms[:, 0]), expected, CLOSE)
    close("weight of a write by token", got["write_weight"][n][K], expected, CLOSE)
    close("k_eff", floats(terms[:, 1]), want.k_eff[K], CLOSE)
    assert terms[:, 2].tolist() == [entry.token << 8 | entry.lane for entry in writes]
    written = [slot for slot, _, _ in want.slots]
    assert terms[:, 3].tolist() == [written.index(entry.slot) for entry in writes]
    terms = records(got, "read_terms", n, len(reads))  # bits of q_w, code, first_write, writes
    close("q_w", floats(terms[:, 0]), want.q_w[Q], CLOSE)
    assert terms[:, 1].tolist() == [entry.token << 8 | entry.lane for entry in reads]
    for row, entry in zip(terms.tolist(), reads, strict=True):
        earlier = [k for k, e in enumerate(writes) if e.slot == entry.slot and e.token <= entry.token]
        assert list(range(row[2], row[2] + row[3])) == earlier
    for name, entries in (("write_entries", writes), ("read_entries", reads)):
        found = records(got, name, n, len(entries))  # two words of L, bits of the weight, token and counts
        weights = torch.tensor([entry.weight for entry in entries], dtype=torch.float64)
        close(name, floats(found[:, 2]), weights, CLOSE)
        assert (found[:, 3] & 0xFF).tolist() == [entry.token for entry in entries]
    slots = list(dict.fromkeys(entry.slot for entry in reads))
    spans = {
        slot: ([e.slot for e in reads].index(slot), sum(e.slot == slot for e in reads)) for slot in slots
    }
    assert int(got["read_slot_count"][n]) == len(slots)
    found = records(got, "read_slots", n, len(slots))
    assert [tuple(row) for row in found[:, :3].tolist()] == [(slot, *spans[slot]) for slot in slots]
    for row, slot in zip(got["slot_reads"][n].tolist(), written, strict=False):
        assert row[1] == spans.get(slot, (0, 0))[1]
        assert row[1] == 0 or row[0] == spans[slot][0]


def floats(words: Tensor) -> Tensor:
    return words.contiguous().view(torch.float32)


def check(backend: Backend, problem: Problem, chunk: int) -> None:
    got = run(backend, problem, chunk)
    for n in range(-(-problem.tokens // chunk) * problem.streams):
        step, stream = divmod(n, problem.streams)
        check_chunk(got, n, phase1_reference(problem, stream, step * chunk, chunk))
    rows = problem.k_idx[problem.real()]
    assert int(got["repeats"]) == sum(len(row) - len(row.unique()) for row in rows)


@pytest.mark.parametrize("gate_per_write", [False, True])
@pytest.mark.parametrize("gates", ["mild", "-1e4", "-inf", "some positive", "all kinds"])
def test_gates(backend: Backend, gates: str, gate_per_write: bool) -> None:
    problem = make_problem(2, 21, 4, 3, 8, 10, gates=gates, gate_per_write=gate_per_write, writes="repeats")
    check(backend, problem.cast(torch.float32), 16)


@pytest.mark.parametrize("writes", ["distinct", "hot", "one slot"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_collisions(backend: Backend, dtype: torch.dtype, writes: str) -> None:
    problem = make_problem(1, 40, 5, 2, 8, 12, writes=writes, gates="all kinds", gate_per_write=True, seed=1)
    check(backend, problem.cast(dtype), 20)


@pytest.mark.parametrize(("chunk", "W", "R"), [(1, 1, 1), (7, 3, 40), (65, 9, 2), (130, 2, 2), (130, 80, 48)])
def test_sizes(backend: Backend, chunk: int, W: int, R: int) -> None:
    """The last one has more entries than the scan stages and than the narrower sort takes."""
    problem = make_problem(1, chunk + 3, W, R, 8, 4000, seed=chunk, writes="repeats")
    check(backend, problem.cast(torch.float32), chunk)


def test_streams_of_different_lengths(backend: Backend) -> None:
    problem = make_problem(4, 37, 3, 4, 8, 20, lengths=[37, 0, 16, 17], gates="some -inf", writes="repeats")
    check(backend, problem.cast(torch.bfloat16), 16)


def test_slots_beyond_one_digit_of_the_sort(backend: Backend) -> None:
    problem = make_problem(1, 30, 6, 5, 1, 70_000, seed=5).cast(torch.float32)
    near = problem.k_idx[0, :, :2] % 3 * 256 + 7  # slots that share their lowest digits
    problem.k_idx[0, :, :2] = near.sort(dim=-1).values + torch.tensor([0, 65_536])
    problem.q_idx[0, :, 0] = problem.k_idx[0, :, 0]
    check(backend, replace(problem, k_idx=problem.k_idx.int(), q_idx=problem.q_idx.int()), 30)


def test_an_index_outside_the_stream_is_absent(backend: Backend) -> None:
    problem = make_problem(3, 20, 5, 6, 8, 9, seed=2, gates="mild").cast(torch.float32)
    for row, lane, place in ((3, 2, 8), (3, 4, 18), (11, 0, 2**40), (12, 1, -1)):
        problem.k_idx[1, row, lane] = place
    problem.q_idx[1, 5, 1] = 20
    got = run(backend, problem, 8)
    for n in range(9):
        step, stream = divmod(n, 3)
        check_chunk(got, n, phase1_reference(problem, stream, step * 8, 8))
    assert int(got["repeats"]) == 0


def test_log_decays_of_many_gates_cancel_exactly(backend: Backend) -> None:
    """Every token writes the same slots: their L is a sum of many gates, A holds its differences."""
    problem = make_problem(1, 128, 2, 1, 1, 2, writes="distinct", gate_per_write=True, seed=3)
    problem = replace(problem, g=300.0 * problem.g).cast(torch.float32)
    check(backend, problem, 128)
