"""Training on a GPU: op and layer against the CPU, in bits against themselves, inside PyTorch's machinery."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sdm_rt import last_dispatch, sdm_write_read
from tests.gpu.training import (
    DEVICE,
    assert_same,
    digest,
    gradients_of,
    layer_step,
    new_layer,
    on_cpu,
    op_step,
    problem,
    tokens,
)
from tests.problems import GRADIENTS, make_problem
from tests.tolerances import SNAPSHOT_GRADIENT, assert_same_bits, relative_error

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
# Every slot is selected, so that no rounding of a score can change which.
ALL_SLOTS = {"slots_per_head": 64, "num_writes": 64, "num_reads": 64}
EVERYTHING = {"output_gate": True, "normalize_readings": True, "key_weighted_decay": True}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


# ---- against the CPU ----


@pytest.mark.usefixtures("repeats_launch_kernels")
@pytest.mark.parametrize(
    "options",
    [{}, EVERYTHING, {"query_batchnorm": True}, {"backprop_on_memory": False}],
    ids=["plain", "everything", "batchnorm", "zero bank"],
)
def test_a_layer_with_all_slots_equals_the_cpu(options: dict[str, Any]) -> None:
    there = new_layer(**ALL_SLOTS, **options)
    here = on_cpu(there)
    got = layer_step(there, tokens())
    assert last_dispatch()["op"] == "product_key_topk_backward"
    assert last_dispatch("sdm_write_read_backward")["graph"] is False
    want = layer_step(here, tokens().cpu())
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        if name in ("Wk_write.bias", "Wq_read.bias") and "query_batchnorm" in options:
            continue  # the norm takes them out: no gradient but rounding's
        assert relative_error(got[name], tensor) <= 3e-5, name


@pytest.mark.parametrize("ragged", [False, True])
def test_a_layer_that_selects_slots_stays_near_the_cpu(ragged: bool) -> None:
    there = new_layer(**EVERYTHING)
    here = on_cpu(there)
    given = {"lengths": torch.tensor([100, 33])} if ragged else {}
    got = layer_step(there, tokens(), **{name: x.to(DEVICE) for name, x in given.items()})
    want = layer_step(here, tokens().cpu(), **given)
    for name, tensor in want.items():
        # A score that rounds differently may select another slot of equal standing; one such slot moves a
        # gradient by up to 1e-2, and it must stay rare.
        assert relative_error(got[name], tensor) <= 2e-2, name


def test_a_bfloat16_layer_stays_near_float32() -> None:
    there = new_layer(**ALL_SLOTS)
    want = layer_step(there, tokens())
    got = layer_step(there.to(torch.bfloat16), tokens(dtype=torch.bfloat16))
    assert got["final bank"].dtype == torch.bfloat16
    for name in ("output", "x", "Wv_write.weight", "memory", "A_log"):
        assert relative_error(got[name], want[name]) <= 0.2, name


def test_autocast() -> None:
    there = new_layer(**ALL_SLOTS, **EVERYTHING)
    want = layer_step(there, tokens())
    with torch.autocast(DEVICE.type, torch.bfloat16):
        out, state = there(tokens())
    assert (out.dtype, state[0].dtype) == (torch.bfloat16, torch.bfloat16)
    out.float().square().mean().backward()
    for name, gradient in gradients_of(there).items():
        assert gradient.dtype == torch.float32
        assert relative_error(gradient, want[name]) <= 0.2, name


@pytest.mark.parametrize("snapshot", ["bf16", "fp8", "int4"])
def test_quantized_snapshots_change_three_gradients_a_little(snapshot: str) -> None:
    case = problem(torch.float32)
    exact, got = op_step(case), op_step(case, snapshot_quant=snapshot)
    for name, tensor in exact.items():
        if name in ("k_val", "g", "q_val"):
            assert 0 < relative_error(got[name], tensor) <= SNAPSHOT_GRADIENT[snapshot].relative, name
        elif name != "restored bank":
            assert_same_bits(name, got[name], tensor)


# ---- the same bits ----


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
def test_a_training_forward_equals_one_without_gradients(options: dict[str, Any]) -> None:
    layer = new_layer(**options)
    out, state = layer(tokens())
    final = state[0].clone()
    with torch.no_grad():
        plain, plain_state = layer(tokens())
    assert_same_bits("output", out, plain)
    assert_same_bits("bank", final, plain_state[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_hundred_repetitions(dtype: torch.dtype) -> None:
    case = problem(dtype)
    want = op_step(case)
    assert_same_bits("restored bank", want["restored bank"], case.memory.to(DEVICE))
    for _ in range(100 // len(DTYPES) + 1):
        assert_same(op_step(case), want)


def test_layer_steps_repeat_and_memory_does_not_grow() -> None:
    layer = new_layer(torch.bfloat16, **EVERYTHING)
    x = tokens(dtype=torch.bfloat16)
    want = layer_step(layer, x)
    gc.collect()  # of tests before, whose memory may not be given back between two figures
    figures = []
    for _ in range(10):
        torch.cuda.reset_peak_memory_stats()
        assert_same(layer_step(layer, x), want)
        figures.append((torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()))
    assert len(set(figures[1:])) == 1, figures


def test_other_processes_and_no_pdl() -> None:
    code = """
from tests.gpu.training import *
print(digest(op_step(problem()) | layer_step(new_layer(), tokens())))
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for variables in ({}, {"SDM_RT_PDL": "0"})
    ]
    want = digest(op_step(problem()) | layer_step(new_layer(), tokens()))
    for process in processes:
        printed, complaint = process.communicate()
        assert process.returncode == 0, complaint
        assert printed.split()[-1] == want


def test_pdl_off_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    case = problem()
    want = op_step(case)
    monkeypatch.setenv("SDM_RT_PDL", "0")
    for _ in range(20):
        assert_same(op_step(case), want)


def test_streams_beside_change_no_bit() -> None:
    case = problem(lengths=[100, 70, 1])
    whole, one = op_step(case), op_step(case.streams_of(1, 2))
    rows, tokens_of = slice(96, 192), slice(1, 2)
    for name in ("final bank", "restored bank", "memory"):
        assert_same_bits(name, one[name], whole[name][rows])
    for name in ("k_val", "v", "beta", "g", "q_val"):
        assert_same_bits(name, one[name], whole[name][tokens_of])


def test_two_streams_at_once() -> None:
    cases = [problem(seed=seed) for seed in (1, 2)]
    wants = [op_step(case) for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    found: list[list[dict[str, Tensor]]] = [[], []]
    for _ in range(10):
        for case, stream, results in zip(cases, streams, found, strict=True):
            with torch.cuda.stream(stream):
                results.append(op_step(case))
    torch.cuda.synchronize()
    for want, results in zip(wants, found, strict=True):
        for got in results:
            assert_same(got, want)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Memory that PyTorch hands out uninitialised holds NaN (bytes of 255)."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("lengths", [None, [100, 0, 33]], ids=["whole", "ragged"])
@pytest.mark.parametrize("snapshot", ["none", "int4"])
def test_poisoned_memory(lengths: list[int] | None, snapshot: str) -> None:
    case = problem(lengths=lengths)
    want = op_step(case, snapshot_quant=snapshot)
    with poisoned():
        got = op_step(case, snapshot_quant=snapshot)
    assert_same(got, want)
    padding = ~case.real().to(DEVICE)
    for name in ("k_val", "v", "beta", "g", "q_val"):
        assert not got[name][padding].any(), name


# ---- layouts and dtypes ----


def test_expanded_gradients() -> None:
    case = problem()
    ones = torch.ones(300, 64, dtype=torch.bfloat16, device=DEVICE)
    want = op_step(case, grad=ones)
    assert_same(op_step(case, grad=ones[:1, :1].expand(300, 64)), want)
    assert_same(op_step(case, grad=ones.mT.contiguous().mT), want)
    shifted = torch.ones(300 * 64 + 1, dtype=torch.bfloat16, device=DEVICE)[1:].view(300, 64)
    assert_same(op_step(case, grad=shifted), want)


@pytest.mark.parametrize("layout", ["strided columns", "offset", "row stride"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layouts_of_the_bank(dtype: torch.dtype, layout: str) -> None:
    case = problem(dtype)
    rows, columns = case.memory.shape
    if layout == "strided columns":
        bank = torch.empty(rows, 2 * columns, dtype=dtype, device=DEVICE)[:, 1::2]
    elif layout == "offset":
        bank = torch.empty(rows * columns + 1, dtype=dtype, device=DEVICE)[1:].view(rows, columns)
    else:
        bank = torch.empty(rows, columns + 4, dtype=dtype, device=DEVICE)[:, :columns]
    assert_same(op_step(case, bank=bank), op_step(case))


def test_a_bank_whose_rows_overlap_is_refused() -> None:
    case = problem()
    bank = case.memory[:1].to(DEVICE).expand(case.memory.shape)
    with pytest.raises(ValueError, match="memory"):
        sdm_write_read(bank, **{n: x.to(DEVICE) for n, x in case.inputs().items()}, **case.options())


def test_layouts_and_dtypes_of_the_tokens() -> None:
    case = problem()
    want = op_step(case)
    given = {name: x.to(DEVICE) for name, x in case.inputs().items()}
    turned = {name: x.transpose(0, 2).contiguous().transpose(0, 2) for name, x in given.items()}
    assert_same(op_step(case, changes=turned), want)
    narrow = {name: given[name].int() for name in ("k_idx", "q_idx")}
    assert_same(op_step(case, changes=narrow), want)
    assert_same(op_step(case, changes={"k_idx": narrow["k_idx"]}), want)
    wide = {name: given[name].float() for name in ("k_val", "v", "q_val")}
    got = op_step(case, changes=wide)
    for name, tensor in want.items():
        assert got[name].dtype == (torch.float32 if name in wide else tensor.dtype)
        assert_same_bits(name, got[name].to(tensor.dtype), tensor)


# ---- the rules of in-place calls ----


def test_the_bank_between_call_and_backward() -> None:
    layer = new_layer()
    out, state = layer(tokens())
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        out.sum().backward()
    out, state = layer(tokens())
    state.memory.mul_(2)
    with pytest.raises(RuntimeError, match="the bank was changed"):
        out.sum().backward()


def test_calls_that_wait_for_their_backward() -> None:
    layer = new_layer()
    inputs = [tokens(seed) for seed in range(3)]
    for at in (2, 0, 1):
        layer(inputs[at])[0].square().sum().backward()
    want = gradients_of(layer)
    outputs = [layer(x)[0] for x in inputs]
    for at in (2, 0, 1):
        outputs[at].square().sum().backward()
    assert_same(gradients_of(layer), want)


def test_training_through_a_cache() -> None:
    layer = new_layer()
    x = tokens()
    whole, _ = layer(x)
    cache = layer.create_kv_cache(2, 100, torch.float32)
    first, _ = layer(x[:, :40], cache=cache)
    middle = cache[0].clone()
    second, _ = layer(x[:, 40:], cache=cache)
    assert relative_error(torch.cat([first, second], 1), whole) <= 1e-5
    second.sum().backward()
    assert_same_bits("bank", cache[0], middle)
    first.sum().backward()
    assert layer.memory is not None
    assert_same_bits("bank", cache[0], layer.memory.detach().repeat(2, 1))


# ---- inside PyTorch's machinery ----


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpointed_layers(use_reentrant: bool) -> None:
    layers = torch.nn.ModuleList([new_layer(**EVERYTHING), new_layer()])

    def gradients(repeat: bool) -> dict[str, Tensor]:
        x = tokens().requires_grad_()
        out: Tensor = x
        for layer in layers:
            run = lambda y, layer=layer: layer(y)[0]  # noqa: E731
            out = out + (checkpoint(run, out, use_reentrant=use_reentrant) if repeat else run(out))
        out.square().mean().backward()
        assert x.grad is not None
        return gradients_of(layers) | {"x": x.grad}

    assert_same(gradients(True), gradients(False))


def test_checkpointed_op() -> None:
    case = problem(torch.float32)
    given = {name: x.to(DEVICE) for name, x in case.inputs().items()}

    def segment(bank: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return sdm_write_read(bank, **(given | {"v": v}), **case.options(), return_final_bank=True)

    found = []
    for repeat in ("no", "reentrant", "non-reentrant"):
        bank = case.memory.to(DEVICE).requires_grad_()
        v = given["v"].clone().requires_grad_()
        if repeat == "no":
            readings, final = segment(bank, v)
        else:
            readings, final = checkpoint(segment, bank, v, use_reentrant=repeat == "reentrant")
        (readings.square().sum() + final.square().sum()).backward()
        assert bank.grad is not None
        assert v.grad is not None
        found.append({"readings": readings, "final": final, "bank": bank.grad, "v": v.grad})
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])

    bank, v = case.memory.to(DEVICE), given["v"].clone().requires_grad_()
    readings = checkpoint(
        lambda v: sdm_write_read(bank, **(given | {"v": v}), **case.options()), v, use_reentrant=False
    )
    with pytest.raises(RuntimeError, match="activation checkpointing"):
        readings.sum().backward()


def test_saved_tensors_on_the_cpu() -> None:
    layer = new_layer(**EVERYTHING)
    want = layer_step(layer, tokens())
    with torch.autograd.graph.save_on_cpu():
        got = layer_step(layer, tokens())
    assert_same(got, want)


def test_segments_chain_with_gradients() -> None:
    case = problem(torch.float32, writes="distinct")
    leaves = {name: getattr(case, name).to(DEVICE).requires_grad_() for name in GRADIENTS}
    given = {name: leaves.get(name, x.to(DEVICE)) for name, x in case.inputs().items()}

    def run(*ends: int) -> dict[str, Tensor]:
        bank, parts = leaves["memory"], []
        for start, stop in zip((0, *ends), (*ends, 100), strict=True):
            part = {name: x[:, start:stop] for name, x in given.items()}
            readings, bank = sdm_write_read(
                bank, **part, **case.options(), chunk_size=32, return_final_bank=True
            )
            parts.append(readings.view(3, stop - start, 64))
        loss = (torch.cat(parts, 1) * case.grad_readings.to(DEVICE)).sum()
        loss = loss + (bank * case.grad_bank.to(DEVICE)).sum()
        return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))

    whole = run()
    for name, tensor in run(64).items():
        assert_same_bits(name, tensor, whole[name])  # cut where chunks end
    for name, tensor in run(10, 50).items():
        assert relative_error(tensor, whole[name]) <= 1e-5, name


def test_statistics() -> None:
    there = new_layer(log_memory_access_stats=True, log_memory_norms=True, **ALL_SLOTS)
    here = on_cpu(there)
    plain = layer_step(new_layer(**ALL_SLOTS), tokens())
    assert_same(layer_step(there, tokens()), plain)
    layer_step(here, tokens().cpu())
    assert there.statistics.keys() == here.statistics.keys()
    for name, value in here.statistics.items():
        assert there.statistics[name].device.type == DEVICE.type
        assert not there.statistics[name].requires_grad
        assert relative_error(there.statistics[name].double(), value.double()) <= 1e-5, name


def test_compiled_layer() -> None:
    torch._dynamo.reset()
    layer = new_layer(**EVERYTHING)
    want = layer_step(layer, tokens())
    got = layer_step(torch.compile(layer, backend="aot_eager", fullgraph=True), tokens())
    del want["restored bank"], got["restored bank"]  # a compiled backward does not restore it
    assert_same({name.removeprefix("_orig_mod."): x for name, x in got.items()}, want)


def test_opcheck() -> None:
    case = make_problem(3, 40, 4, 5, 8, 20, lengths=(40, 0, 7)).cast(torch.float32)
    inputs = [case.memory, *(x.flatten(0, 1) for x in case.inputs().values())]
    arguments = [x.nan_to_num().to(DEVICE).requires_grad_(x.is_floating_point()) for x in inputs]
    lengths = torch.tensor(case.lengths, device=DEVICE)
    numbers = (3, 20, False, 40, 16, "none", False, None, False)
    # What a call saves has gaps that nobody writes, so the tests that compare all outputs do not apply.
    torch.library.opcheck(
        torch.ops.sdm_rt.write_read.default,
        (*arguments, lengths, None, *numbers),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_index_out_of_range_and_absent() -> None:
    case = problem(torch.float32)
    outside = replace(case, k_idx=case.k_idx.clone())
    outside.k_idx[1, 5, 2] = 2**40
    got = op_step(outside)
    assert got["k_val"][1, 5, 2] == 0
    assert all(bool(x.isfinite().all()) for x in got.values())
    with pytest.raises(ValueError, match=r"k_idx: expected bank rows in 96\.\.191 for stream 1"):
        op_step(outside, check_indices=True)
