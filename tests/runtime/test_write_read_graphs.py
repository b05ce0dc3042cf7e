"""Replayed training calls without a GPU: a captured plan is a closure that runs the recurrence on its memory.

What is real here: autograd, checkpointing, hooks, the layer, the pool of captured calls and their memory. So
results must have the bits of the plain CPU path, whatever waits for its backward and whatever is reused.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sdm_rt import last_dispatch, reset_cuda_graphs, sdm_write_read, suspend_cuda_graphs
from sdm_rt.ops import write_read_autograd, write_read_graphs, write_read_paths
from sdm_rt.ops.write_read_call import Gradients
from sdm_rt.ops.write_read_launch import BoundCall, covers_every_row, new_arena, output_like
from sdm_rt.plan.buffer import Arena
from tests.layer_reference import make_layer
from tests.problems import GRADIENTS, make_problem
from tests.tolerances import assert_same_bits

_RECURRENCE = write_read_paths._RECURRENCE


class FakePlan:
    """A bound plan whose launches are ``work``, on the tensors it was bound to."""

    specs = ()

    def __init__(self, machine: Machine, name: str, work: Callable[[], None]) -> None:
        self.machine, self.name, self.work = machine, name, work
        self.plan = SimpleNamespace(name=name, schedule="stepwise")

    def run(self, stream: int) -> None:
        self.machine.launched.append(self.name)
        self.work()

    def capture(self, keep: object) -> Any:
        self.machine.captured.append(self.name)

        def replay(stream: int) -> None:
            assert keep is not None
            self.machine.replayed.append(self.name)
            self.work()

        return SimpleNamespace(replay=replay)


class Machine:
    """What stands in for the GPU: its streams, and a record of what was launched, captured and replayed."""

    def __init__(self) -> None:
        self.launched: list[str] = []
        self.captured: list[str] = []
        self.replayed: list[str] = []
        self.stream = 7
        self.capturing = False
        self.current = True

    def forget(self) -> None:
        for record in (self.launched, self.captured, self.replayed):
            record.clear()


def _parts(saved: Tensor, like: tuple[Tensor, ...]) -> list[Tensor]:
    """The tensors that a block of bytes holds, one after another at multiples of 256."""
    parts, at = [], 0
    for tensor in like:
        size = tensor.numel() * tensor.element_size()
        parts.append(saved[at : at + size].view(tensor.dtype).view(tensor.shape))
        at += -(-size // 256) * 256
    return parts


def _bytes(like: tuple[Tensor, ...]) -> int:
    return sum(-(-tensor.numel() * tensor.element_size() // 256) * 256 for tensor in like)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = Machine()

    def bind_forward(
        bank: Tensor, operands: Any, call: Any, streams: Any, layout: Any, training: bool, scratch: Any
    ) -> BoundCall:
        like = _RECURRENCE.empty_saved(bank, operands, call)
        saved = new_arena(Arena({}, _bytes(like)), bank.device)
        working = scratch(Arena({}, 64), bank.device)
        covered = covers_every_row(call, streams)
        readings = output_like(bank, call.shape.rows, bank.shape[1], covered, bank.dtype)

        def work() -> None:
            working.fill_(1)
            got, kept = _RECURRENCE.training_forward(bank, operands, call, streams)
            real = got != 0 if not covered else slice(None)
            readings[real] = got[real]  # kernels leave padding alone
            for part, value in zip(_parts(saved, like), kept, strict=True):
                part.copy_(value)

        tensors = {"readings": readings, "saved": saved, "scratch": working}
        return BoundCall(FakePlan(machine, "forward", work), tensors)  # type: ignore[arg-type]

    def bind_backward(
        bank: Tensor,
        operands: Any,
        call: Any,
        streams: Any,
        layout: Any,
        saved: Tensor,
        grad_readings: Tensor,
        grads: Gradients,
        scratch: Any,
    ) -> BoundCall:
        like = _RECURRENCE.empty_saved(bank, operands, call)
        working = scratch(Arena({}, 128), bank.device)
        covered = covers_every_row(call, streams)

        def work() -> None:
            working.fill_(2)
            kept = tuple(_parts(saved, like))
            found = _RECURRENCE.backward(bank, operands, call, streams, kept, grad_readings, grads.memory)
            for at, (room, value) in enumerate(zip(grads, found, strict=True)):
                value = value if value.shape == room.shape else value.sum(1, keepdim=True)
                written = value != 0 if at and not covered else slice(None)
                room[written] = value[written].to(room.dtype)

        return BoundCall(FakePlan(machine, "backward", work), {"saved": saved})  # type: ignore[arg-type]

    def plain_forward(bank: Tensor, flat: Any, call: Any, streams: Any) -> tuple[Tensor, Tensor]:
        machine.launched.append("forward")
        readings, kept = _RECURRENCE.training_forward(bank, flat, call, streams)
        saved = new_arena(Arena({}, _bytes(kept)), bank.device)
        for part, value in zip(_parts(saved, kept), kept, strict=True):
            part.copy_(value)
        return readings, saved

    def plain_backward(
        bank: Tensor, flat: Any, call: Any, streams: Any, saved: Tensor, *grads: Any
    ) -> Gradients:
        machine.launched.append("backward")
        like = _RECURRENCE.empty_saved(bank, flat, call)
        return _RECURRENCE.backward(bank, flat, call, streams, tuple(_parts(saved, like)), *grads)

    monkeypatch.setattr(write_read_graphs, "bind_forward", bind_forward)
    monkeypatch.setattr(write_read_graphs, "bind_backward", bind_backward)
    monkeypatch.setattr(write_read_graphs, "current_stream", lambda index: machine.stream)
    monkeypatch.setattr(write_read_graphs.driver, "stream_is_capturing", lambda stream: machine.capturing)
    monkeypatch.setattr(write_read_graphs._Graph, "is_current", lambda graph: machine.current)
    monkeypatch.setattr(write_read_graphs, "_pool", write_read_graphs._Pool())
    monkeypatch.setattr(write_read_graphs, "_scratch", write_read_graphs._Scratch())
    monkeypatch.setattr(write_read_paths, "training_forward_on_gpu", plain_forward)
    monkeypatch.setattr(write_read_paths, "backward_on_gpu", plain_backward)
    monkeypatch.setattr(write_read_autograd, "path_of", lambda device: write_read_paths._KERNELS)
    yield machine
    gc.collect()


def captured_calls() -> int:
    return sum(len(calls) for calls in write_read_graphs._pool._calls.values())


def layers(**options: object) -> tuple[nn.Module, nn.Module]:
    """The same layer without and with replays."""
    return make_layer(torch.float32, **options), make_layer(torch.float32, cuda_graph=True, **options)


def gradients_of(layer: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    layer.zero_grad()
    return found


def tokens(seed: int, length: int = 7, batch: int = 2) -> Tensor:
    return torch.randn(batch, length, 12, generator=torch.Generator().manual_seed(seed))


def step(layer: nn.Module, x: Tensor, **options: Any) -> list[Tensor]:
    """Output, final bank, gradients and restored bank of one step."""
    x = x.clone().requires_grad_()
    out, state = layer(x, **options)
    final = state[0].clone()
    out.square().sum().backward()
    return [out.detach(), final, x.grad, state[0].clone(), *gradients_of(layer).values()]


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want)
    for at, (left, right) in enumerate(zip(got, want, strict=True)):
        assert_same_bits(str(at), left, right)


@pytest.mark.parametrize("options", [{}, {"key_weighted_decay": True}, {"snapshot_quant": "int4"}])
def test_steps_equal_plain_ones_and_replay_from_the_second_on(machine: Machine, options: Any) -> None:
    plain, replayed = layers(**options)
    for at in range(4):
        got = step(replayed, tokens(at))
        assert machine.launched == (["forward", "backward"] if at == 0 else [])
        assert machine.replayed == ([] if at == 0 else ["forward", "backward"])
        assert bool(last_dispatch("sdm_write_read").get("graph")) == (at > 0)
        assert bool(last_dispatch("sdm_write_read_backward").get("graph")) == (at > 0)
        machine.launched.clear()
        machine.replayed.clear()
        assert_same(got, step(plain, tokens(at)))
        machine.launched.clear()
    assert machine.captured == ["forward", "backward"]
    assert captured_calls() == 1


def test_calls_that_wait_for_their_backward_keep_what_they_saved(machine: Machine) -> None:
    plain, replayed = layers()
    step(replayed, tokens(9))
    inputs = [tokens(at) for at in range(3)]
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        outputs = [replayed(x)[0] for x in inputs]
        for at in order:
            outputs[at].square().sum().backward()
        got = list(gradients_of(replayed).values())
        outputs = [plain(x)[0] for x in inputs]
        for at in order:
            outputs[at].square().sum().backward()
        assert_same(got, list(gradients_of(plain).values()))
    assert captured_calls() == 3


def test_a_call_whose_result_is_dropped_is_free_again(machine: Machine) -> None:
    _, replayed = layers()
    for at in range(6):
        replayed(tokens(at))
        gc.collect()
    assert captured_calls() == 1


def test_past_the_bound_calls_run_plain(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_read_graphs, "MOST_CALLS", 2)
    plain, replayed = layers()
    step(replayed, tokens(9))
    machine.forget()
    inputs = [tokens(at) for at in range(4)]
    sum(replayed(x)[0].square().sum() for x in inputs).backward()
    assert machine.launched == ["forward", "forward", "backward", "backward"]
    assert machine.replayed == ["forward", "forward", "backward", "backward"]
    got = list(gradients_of(replayed).values())
    sum(plain(x)[0].square().sum() for x in inputs).backward()
    assert_same(got, list(gradients_of(plain).values()))


def test_layers_of_one_shape_share_their_captured_calls(machine: Machine) -> None:
    plain, replayed = layers()
    other_plain, other = layers(output_gate=True)
    for at in range(3):
        x = tokens(at)
        got, want = [], []
        for chain, found in (((replayed, other), got), ((plain, other_plain), want)):
            out = x
            for layer in chain:
                out = out + layer(out)[0]
            out.square().sum().backward()
            for layer in chain:
                found += gradients_of(layer).values()
        assert_same(got, want)
    assert captured_calls() == 2


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_activation_checkpointing(machine: Machine, use_reentrant: bool) -> None:
    pairs = [layers() for _ in range(3)]
    results = []
    for which in (0, 1):
        found: list[Tensor] = []
        for at in range(3):
            x = tokens(at).requires_grad_()

            def block(x: Tensor) -> Tensor:
                for pair in pairs:
                    x = x + pair[which](x)[0]  # noqa: B023
                return x

            checkpoint(block, x, use_reentrant=use_reentrant).square().sum().backward()
            found.append(x.grad)
            for pair in pairs:
                found += gradients_of(pair[which]).values()
        results.append(found)
    assert (machine.replayed.count("backward") > 0) is use_reentrant  # the other kind is made of hooks
    assert_same(results[1], results[0])


def test_hooks_that_hand_on_copies_of_saved_tensors(machine: Machine) -> None:
    plain, replayed = layers()
    step(replayed, tokens(9))
    for at in range(3):
        machine.forget()
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            first, second = replayed(tokens(at))[0], replayed(tokens(at + 10))[0]
        assert machine.launched == ["forward", "forward"]  # a hook may read on when it has returned
        (first * second).sum().backward()
        assert machine.launched[2:] == ["backward", "backward"]
        got = list(gradients_of(replayed).values())
        (plain(tokens(at))[0] * plain(tokens(at + 10))[0]).sum().backward()
        assert_same(got, list(gradients_of(plain).values()))
    assert machine.replayed == []


def test_hooks_that_copy_later(machine: Machine) -> None:
    """As on a stream of their own, with ``record_stream``: the memory must be nobody else's until then."""
    plain, replayed = layers()
    for at in range(2):
        step(replayed, tokens(at))
    queued: list[Callable[[], None]] = []

    def pack(x: Tensor) -> Tensor:
        host, address, size = torch.empty_like(x), x.data_ptr(), x.nbytes
        if x.dtype != torch.uint8:
            return host.copy_(x)
        if write_read_graphs._pool.of_saved(x) is None:
            held.append(x)  # PyTorch's allocator would keep the memory
        queued.append(lambda: ctypes.memmove(host.data_ptr(), address, size))
        return host

    found = []
    for layer in (replayed, plain):
        held: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(pack, torch.Tensor.detach):
            outputs = [layer(tokens(at))[0] for at in (5, 6)]
        for work in queued:
            work()
        queued.clear()
        sum(output.square().sum() for output in outputs).backward()
        found.append(list(gradients_of(layer).values()))
    assert_same(*found)


def test_shapes_that_come_no_more_make_room(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_read_graphs, "MOST_SHAPES", 3)
    plain, replayed = layers()
    step(replayed, tokens(0, 9))
    waiting = replayed(tokens(1, 9))[0]  # waits for its backward
    for length in range(1, 8):
        for _ in range(2):
            step(replayed, tokens(0, length))
        assert captured_calls() <= 4
    assert captured_calls() == 4
    machine.forget()
    step(replayed, tokens(0, 7))
    waiting.square().sum().backward()
    assert machine.replayed == ["forward", "backward", "backward"]
    plain(tokens(1, 9))[0].square().sum().backward()
    assert_same(list(gradients_of(replayed).values()), list(gradients_of(plain).values()))


def test_a_capture_without_memory_leaves_the_call_plain(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, replayed = layers()
    for _ in range(2):
        step(replayed, tokens(0, 5))
    assert captured_calls() == 1
    tries: list[object] = []

    def full(*given: object) -> None:
        tries.append(given)
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(write_read_graphs, "_CapturedCall", full)
    for at in range(4):
        assert_same(step(replayed, tokens(at)), step(plain, tokens(at)))
    assert len(tries) == 1
    assert captured_calls() == 0


def test_a_backward_without_memory_runs_plain(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, replayed = layers()
    for _ in range(2):
        step(replayed, tokens(0, 5))
    step(replayed, tokens(0))

    def full(*given: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(write_read_graphs, "bind_backward", full)
        machine.forget()
        got = step(replayed, tokens(1))
        assert (machine.replayed, machine.launched) == (["forward"], ["backward"])
    assert_same(got, step(plain, tokens(1)))
    assert captured_calls() == 1  # that waited; others made room
    for at in range(3):
        machine.forget()
        assert_same(step(replayed, tokens(at)), step(plain, tokens(at)))
        assert machine.replayed == []


def test_a_torch_that_does_not_tell_of_hooks_runs_plain(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_read_graphs, "_top_hooks", None)
    plain, replayed = layers()
    for at in range(3):
        assert_same(step(replayed, tokens(at)), step(plain, tokens(at)))
    assert machine.captured == []


def test_lengths_may_change_between_replays(machine: Machine) -> None:
    plain, replayed = layers()
    for at, lengths in enumerate(([7, 3], [2, 7], [0, 1], [7, 7])):
        given = {"lengths": torch.tensor(lengths)}
        assert_same(step(replayed, tokens(at), **given), step(plain, tokens(at), **given))
    assert captured_calls() == 1
    assert machine.replayed == ["forward", "backward"] * 3


def test_other_shapes_have_other_graphs_and_calls_without_gradients_none(machine: Machine) -> None:
    plain, replayed = layers()
    for _ in range(2):
        for length in (5, 7):
            assert_same(step(replayed, tokens(0, length)), step(plain, tokens(0, length)))
    assert captured_calls() == 2
    machine.forget()
    with torch.no_grad():
        replayed(tokens(0))
    assert machine.replayed == []


def test_a_callers_capture_takes_the_launches_themselves(machine: Machine) -> None:
    plain, replayed = layers()
    for at in range(2):
        step(replayed, tokens(at))
    out = replayed(tokens(3))[0]
    machine.forget()
    machine.capturing = True
    out.square().sum().backward()
    got = list(gradients_of(replayed).values())
    plain(tokens(3))[0].square().sum().backward()
    assert_same(got, list(gradients_of(plain).values()))
    assert_same(step(replayed, tokens(4)), step(plain, tokens(4)))
    assert (machine.replayed, machine.captured) == ([], [])


@pytest.mark.parametrize("interruption", ["suspend", "flag", "reset"])
def test_suspended_or_reset_between_call_and_backward(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, interruption: str
) -> None:
    plain, replayed = layers()
    for at in range(2):
        step(replayed, tokens(at))
    out = replayed(tokens(3))[0]
    machine.forget()
    if interruption == "suspend":
        with suspend_cuda_graphs():
            out.square().sum().backward()
            got = list(gradients_of(replayed).values())
            assert_same(step(replayed, tokens(4)), step(plain, tokens(4)))
    elif interruption == "flag":
        monkeypatch.setenv("SDM_RT_REPLAY", "0")
        out.square().sum().backward()
        got = list(gradients_of(replayed).values())
        assert_same(step(replayed, tokens(4)), step(plain, tokens(4)))
        monkeypatch.delenv("SDM_RT_REPLAY")
    else:
        reset_cuda_graphs()
        assert captured_calls() == 0
        assert write_read_graphs._scratch._blocks == {}
        out.square().sum().backward()
        got = list(gradients_of(replayed).values())
    assert machine.replayed == []
    plain(tokens(3))[0].square().sum().backward()
    assert_same(got, list(gradients_of(plain).values()))
    machine.forget()
    for at in range(3):
        assert_same(step(replayed, tokens(at)), step(plain, tokens(at)))
    assert machine.replayed
    assert machine.captured == (["forward", "backward"] if interruption == "reset" else [])


def test_without_replays_nothing_is_captured(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDM_RT_REPLAY", "0")
    plain, replayed = layers()
    for at in range(3):
        assert_same(step(replayed, tokens(at)), step(plain, tokens(at)))
    assert (machine.captured, machine.replayed, captured_calls()) == ([], [], 0)
    monkeypatch.setenv("SDM_RT_REPLAY", "yes")
    with pytest.raises(ValueError, match="SDM_RT_REPLAY must be 0 or 1"):
        replayed(tokens(0))


def test_another_stream_has_its_own_and_a_backward_there_runs_plain(machine: Machine) -> None:
    _, replayed = layers()
    for stream in (7, 8, 7, 8):
        machine.stream = stream
        step(replayed, tokens(0))
    assert captured_calls() == 2
    out = replayed(tokens(1))[0]
    machine.forget()
    machine.stream = 9
    out.square().sum().backward()
    assert (machine.replayed, machine.launched) == ([], ["backward"])


def test_edited_kernels_are_captured_anew(machine: Machine) -> None:
    _, replayed = layers()
    for at in range(3):
        step(replayed, tokens(at))
    assert machine.captured == ["forward", "backward"]
    machine.current = False
    step(replayed, tokens(3))
    assert machine.captured == ["forward", "backward"] * 2
    assert captured_calls() == 1


def test_a_second_backward_and_a_changed_bank_are_refused(machine: Machine) -> None:
    _, replayed = layers()
    for at in range(2):
        step(replayed, tokens(at))
    out, state = replayed(tokens(2))
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        out.sum().backward()
    out, state = replayed(tokens(3))
    state.memory.mul_(2)
    with pytest.raises(RuntimeError, match="the bank was changed"):
        out.sum().backward()


def test_a_captured_call_used_behind_autograds_back_is_noticed(machine: Machine) -> None:
    """The last line of defence: were a taken call's memory ever overwritten, its backward would refuse."""
    _, replayed = layers()
    for at in range(2):
        step(replayed, tokens(at))
    out = replayed(tokens(2))[0]
    ((captured,),) = write_read_graphs._pool._calls.values()
    captured._own_uses += 1  # the pool now takes the waiting call for a free one
    replayed(tokens(3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_the_op_itself_with_every_layout(machine: Machine) -> None:
    problem = make_problem(2, 9, 3, 4, 6, 8, gate_per_write=True).cast(torch.float32)

    def run(replay: bool, layout: str) -> list[Tensor]:
        leaves = {name: getattr(problem, name).clone().requires_grad_() for name in GRADIENTS}
        arguments = {name: leaves.get(name, x) for name, x in problem.inputs().items()}
        bank = leaves["memory"] * 1
        if layout == "strided":
            bank = torch.stack([bank, bank], dim=2)[..., 0]
            arguments["v"] = arguments["v"].mT.contiguous().mT
            arguments["k_idx"] = arguments["k_idx"].int()
        if layout == "double":
            arguments |= {name: arguments[name].double() for name in ("k_val", "v", "beta", "g")}
        inside = write_read_graphs.replayed_calls() if replay else suspend_cuda_graphs()
        with inside:
            readings = sdm_write_read(bank, **arguments, **problem.options())
        final = bank.detach().clone()
        readings.sum().backward()  # an expanded gradient
        return [readings.detach(), final, bank.detach(), *(leaf.grad for leaf in leaves.values())]

    for layout in ("plain", "strided", "double"):
        for _ in range(2):
            assert_same(run(True, layout), run(False, layout))
    assert machine.replayed.count("forward") == 5  # int32 beside int64 is the shape of int64


def test_results_are_nobodys_memory_but_the_callers(machine: Machine) -> None:
    problem = make_problem(2, 9, 3, 4, 6, 8, gate_per_write=True).cast(torch.float32)
    leaves = {name: getattr(problem, name).clone().requires_grad_() for name in GRADIENTS}

    def run(scale: float) -> list[Tensor]:
        arguments = {name: leaves.get(name, x) for name, x in problem.inputs().items()}
        arguments["v"] = scale * arguments["v"]
        with write_read_graphs.replayed_calls():
            readings = sdm_write_read(leaves["memory"].clone(), **arguments, **problem.options())
        return [readings.detach(), *torch.autograd.grad(readings.square().sum(), list(leaves.values()))]

    run(1.0)
    first = run(1.0)
    kept = [tensor.clone() for tensor in first]
    run(2.0)
    assert machine.replayed == ["forward", "backward"] * 2
    assert_same(first, kept)


def test_narrow_and_wide_indices_have_graphs_of_their_own(machine: Machine) -> None:
    """Wide ones that do not fit must never be copied into narrow memory."""
    problem = make_problem(2, 9, 3, 4, 6, 8).cast(torch.float32)
    v = problem.v.clone().requires_grad_()
    for dtype in (torch.int32, torch.int64) * 2:
        arguments = problem.inputs() | {"v": v}
        arguments |= {name: arguments[name].to(dtype) for name in ("k_idx", "q_idx")}
        with write_read_graphs.replayed_calls():
            sdm_write_read(problem.memory.clone(), **arguments, **problem.options()).sum().backward()
    kinds = {calls[0]._operands["k_idx"].dtype for calls in write_read_graphs._pool._calls.values()}
    assert kinds == {torch.int32, torch.int64}


def test_rows_of_no_stream_are_zeros_whatever_ran_before(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU does not look at offsets, so packed streams may end before the rows do."""

    def spans(call: Any, flat: Any, streams: dict[str, Tensor]) -> tuple[list[int], list[int]]:
        offsets = streams["cu_seqlens"]
        return offsets[:-1].tolist(), offsets.diff().tolist()

    monkeypatch.setattr(write_read_paths, "check_values", spans)
    monkeypatch.setattr(write_read_paths, "stream_spans", lambda call, streams: spans(call, None, streams))
    problem = make_problem(2, 5, 3, 4, 6, 8).cast(torch.float32)
    for ends in ([0, 4, 10], [0, 5, 10], [0, 3, 6]):
        flat = {name: x.flatten(0, 1).clone() for name, x in problem.inputs().items()}
        flat["k_idx"], flat["q_idx"] = flat["k_idx"] % 8, flat["q_idx"] % 8
        for name in ("k_idx", "q_idx"):
            flat[name][ends[1] :] += 8
        leaves = {name: x.requires_grad_() for name, x in flat.items() if x.is_floating_point()}
        with write_read_graphs.replayed_calls():
            readings = sdm_write_read(
                problem.memory.clone(),
                **flat,
                num_memory_slots=8,
                num_parallel=2,
                cu_seqlens=torch.tensor(ends),
                max_seqlen=6,
            )
        readings.sum().backward()
        for name, rows in {"readings": readings, **{n: x.grad for n, x in leaves.items()}}.items():
            assert rows is not None
            assert bool(rows[: ends[-1]].any()), name
            assert not rows[ends[-1] :].any(), name
    assert machine.replayed == ["forward", "backward"] * 2


@pytest.mark.usefixtures("machine")
def test_a_compiled_layer_is_not_replayed() -> None:
    plain, replayed = layers()
    torch._dynamo.reset()
    compiled = torch.compile(replayed, backend="aot_eager", fullgraph=True)
    for at in range(2):
        x, y = (tokens(at).requires_grad_() for _ in range(2))
        out = compiled(x)[0]
        out.square().sum().backward()
        want = plain(y)[0]
        want.square().sum().backward()
        assert_same([out.detach(), x.grad], [want.detach(), y.grad])
        assert_same(list(gradients_of(replayed).values()), list(gradients_of(plain).values()))
    assert captured_calls() == 0


def test_asking_is_of_the_thread(machine: Machine) -> None:
    seen: list[int] = []
    with write_read_graphs.replayed_calls():
        thread = threading.Thread(target=lambda: seen.append(write_read_graphs._asked.depth))
        thread.start()
        thread.join()
        assert write_read_graphs._asked.depth == 1
    assert seen == [0]
