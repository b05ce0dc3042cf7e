"""What each phase of ``sdm-rt bench`` measures, prints and returns: small shapes on CPU tensors."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import replace

import pytest
import torch

from sdm_rt.bench import accuracy, scaling, start, timing, training
from sdm_rt.bench.cases import CASES, Case
from sdm_rt.bench.layer import LayerBench, bench_layer
from sdm_rt.bench.process import PROGRAM, wait_seconds
from sdm_rt.plan.device import preset
from sdm_rt.runtime.cores import usable_cores
from tests.bench.conftest import Graph

SMALL = Case(streams=2, tokens=24, chunk=8, lanes=4, head_dim=16, slots=64)


def finite(row: dict, *names: str) -> bool:
    return all(isinstance(row[name], float) and row[name] > 0 for name in names)


def test_training(stand_in, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(CASES, "small", SMALL)
    figures = training.bench_training(["small"], kernels=False, schedule=None)
    row = figures["training"]["small"]
    assert finite(row, "forward_ms", "backward_ms", "step_ms", "graph_ms", "floor_ms")
    assert finite(row, "forward_host_ms", "backward_host_ms")
    assert row["step_ms"] >= row["forward_ms"]
    assert row["peak_gib"] == round((2 * 2**20 + 2**30) / 2**30, 3)
    assert Graph.replays == timing.WARMUP + training.REPEATS
    assert figures["copy_tb_s"] > 0
    assert "small" in capsys.readouterr().out


def test_a_step_that_cannot_be_captured_says_why(
    stand_in, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextlib.contextmanager
    def refusing(graph: Graph, stream: object):
        raise RuntimeError("operation not permitted when stream is capturing\nmore lines")
        yield

    stand_in("graph", refusing)
    monkeypatch.setitem(CASES, "small", SMALL)
    row = training.bench_training(["small"], kernels=False, schedule=None)["training"]["small"]
    assert "graph_ms" not in row
    assert row["graph_error"] == "RuntimeError: operation not permitted when stream is capturing"
    assert "no graph: RuntimeError: operation not permitted" in capsys.readouterr().out
    assert finite(row, "step_ms")


def test_layer(stand_in, capsys: pytest.CaptureFixture[str]) -> None:
    shape = LayerBench(
        dim=32, heads=2, slots=64, lanes=4, tokens=(20, 8), batches=(1, 3), topk_rows=5, dtype=torch.bfloat16
    )
    figures = bench_layer(shape, preset("h200"))
    assert [row["T"] for row in figures["layer"]] == [20, 8]
    for row in figures["layer"]:
        assert finite(row, "step_ms", "no_grad_ms", "captured_step_ms", "captured_no_grad_ms")
        assert finite(row, "cuda_graph_step_ms", "op_step_floor_ms", "op_no_grad_floor_ms")
        assert row["op_step_floor_ms"] > row["op_no_grad_floor_ms"]
    assert [row["B"] for row in figures["layer_decode"]] == [1, 3]
    for row in figures["layer_decode"]:
        assert finite(row, "gpu_ms", "host_ms", "cuda_graph_gpu_ms", "cuda_graph_host_ms")
        assert row["cuda_graph_replayed"] is False  # of CPU tensors
    assert (figures["topk"]["rows"], figures["topk"]["k"]) == (5, 4)
    assert finite(figures["topk"], "gpu_ms")
    json.dumps(figures)
    printed = capsys.readouterr().out
    assert "top-k of 5 rows, k = 4" in printed
    assert "decode, B = 3: " in printed
    assert "decode, B = 3, cuda_graph=True: " in printed


def test_the_layer_is_that_of_the_comparison() -> None:
    args = LayerBench().args(cuda_graph=True)
    assert (args.dim, args.num_heads, args.head_dim, args.factors) == (2048, 2, 1024, (256, 256))
    assert args.output_gate
    assert args.normalize_readings
    assert args.cuda_graph
    assert LayerBench().op_case(32768) == CASES["flagship"]


def test_accuracy(stand_in, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(CASES, "small", SMALL)
    monkeypatch.setitem(CASES, "float32", replace(SMALL, dtype=torch.float32))
    monkeypatch.setitem(CASES, "flagship int4", replace(SMALL, dtype=torch.float32, snapshot="int4"))
    figures = accuracy.bench_accuracy(["small", "float32", "flagship int4"], None)["accuracy"]
    half, single, quantized = (figures[name] for name in ("small", "float32", "flagship int4"))
    names = ["readings", "final bank", *(f"grad {leaf}" for leaf in training.LEAVES)]
    assert list(half) == names
    for name in names:
        assert 1e-4 < half[name] < 1e-1
        assert 1e-9 < single[name] < 1e-6
    assert quantized["readings"] == single["readings"]
    assert quantized["grad k_val"] > 1e-3
    assert "readings" in capsys.readouterr().out


def test_scaling(stand_in, capsys: pytest.CaptureFixture[str]) -> None:
    curves = {"T": {tokens: Case(2, tokens, 8, 4, 16, 64) for tokens in (8, 16)}, "P": {1: SMALL}}
    figures = scaling.bench_scaling(curves, preset("h200"))["scaling"]
    assert [row["T"] for row in figures["T"]] == [8, 16]
    assert [row["P"] for row in figures["P"]] == [1]
    for row in (*figures["T"], *figures["P"]):
        assert finite(row, *scaling.FIGURES)
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_scaling_leaves_out_what_does_not_fit(stand_in, capsys: pytest.CaptureFixture[str]) -> None:
    model = preset("h200")
    need = scaling.needed_bytes(SMALL, model, False), scaling.needed_bytes(SMALL, model, True)
    assert need[0] < need[1]
    stand_in("mem_get_info", lambda: (int(1.2 * need[0]), 2**40))
    (row,) = scaling.bench_scaling({"P": {2: SMALL}}, model)["scaling"]["P"]
    assert finite(row, "no_grad_ms")
    assert "step_ms" not in row
    assert row["step_left_out"].startswith("needs 0.0 GiB, ")
    stand_in("mem_get_info", lambda: (0, 2**40))
    (row,) = scaling.bench_scaling({"P": {2: SMALL}}, model)["scaling"]["P"]
    assert set(row) == {"P", "no_grad_left_out", "step_left_out"}
    assert capsys.readouterr().out.count("left out: needs") == 3


def test_the_curves_are_those_of_the_comparison() -> None:
    ends = {name: (min(cases), max(cases)) for name, cases in scaling.CURVES.items()}
    assert ends == {"T": (1024, 131072), "P": (1, 64), "W": (8, 256), "S": (4096, 2**20)}
    assert scaling.CURVES["T"][8192] == Case(2, 8192, 64, 64, 1024, 65536)
    assert scaling.CURVES["P"][64].streams == 64
    assert scaling.CURVES["W"][8].lanes == 8
    assert scaling.CURVES["S"][2**20].slots == 2**20


def test_start(stand_in, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def seconds(prepare: str, call: str, cache: str, cores: object) -> float:
        compile(PROGRAM.format(prepare=prepare, call=call), "program", "exec")
        calls.append((cache, tuple(cores)))
        return float(len(calls))

    monkeypatch.setattr(start, "wait_seconds", seconds)
    monkeypatch.setattr(start, "usable_cores", lambda: [0, 1, 4, 5])
    assert start.bench_start() == {
        "start": [{"cores": 4, "cold_s": 1.0, "warm_s": 2.0}, {"cores": 2, "cold_s": 3.0, "warm_s": 4.0}]
    }
    assert [cores for _, cores in calls] == [(), (), (0, 1), (0, 1)]
    caches = [cache for cache, _ in calls]
    assert caches[0] == caches[1] != caches[2] == caches[3]
    monkeypatch.setattr(start, "usable_cores", lambda: [0, 1])
    assert [row["cores"] for row in start.bench_start()["start"]] == [2]


def test_the_first_step_trains_the_flagship_shape(stand_in, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "flagship", SMALL)
    monkeypatch.setattr(start, "TOKENS", 9)
    first = start.FirstStep()
    assert first.case.tokens == 9
    first.run()
    assert all(getattr(first.inputs, leaf).grad is not None for leaf in training.LEAVES)


def test_a_new_process_has_the_cores_and_the_cache_it_is_given(tmp_path) -> None:
    pytest.importorskip("cupy")
    core = usable_cores()[0]
    seconds = wait_seconds(
        "torch.cuda.synchronize = lambda: None",
        f"assert os.sched_getaffinity(0) == {{{core}}}; "
        f"assert os.environ['SDM_RT_CACHE_DIR'] == {str(tmp_path)!r}; time.sleep(0.1)",
        str(tmp_path),
        [core],
    )
    assert 0.1 <= seconds < 5
    assert "SDM_RT_CACHE_DIR" not in os.environ or os.environ["SDM_RT_CACHE_DIR"] != str(tmp_path)
    with pytest.raises(RuntimeError, match=r"a first call failed:\n(.*\n)*.*no such input"):
        wait_seconds("raise ValueError('no such input')", "", str(tmp_path))
