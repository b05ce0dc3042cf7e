"""The whole layer on this GPU: training steps, calls without gradients, decode tokens; top-k by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sdm_rt.bench.bounds import floor_bytes
from sdm_rt.bench.cases import Case
from sdm_rt.bench.timing import DEVICE, copy_bandwidth, floor_ms, graph_figures, measure, peak_bytes
from sdm_rt.layer.args import SparseDeltaMemoryArgs
from sdm_rt.layer.layer import SparseDeltaMemory
from sdm_rt.layer.state import Cache
from sdm_rt.ops.counters import last_dispatch
from sdm_rt.ops.topk import product_key_topk
from sdm_rt.ops.write_read_graphs import reset_cuda_graphs
from sdm_rt.plan.device import DeviceModel

__all__ = ["LayerBench", "bench_layer"]

REPEATS = 5
DECODE_REPEATS = 50
GRAPH_WARMUP = 4  # a layer that replays graphs may capture at its second call of a shape


@dataclass(frozen=True)
class LayerBench:
    """What the layer's benchmark runs.

    Parameters
    ----------
    dim, heads, slots, lanes : int
        Of the layer: dim, H, S of a head, W = R.
    tokens : sequence of int
        The T to measure, one sequence each.
    batches : sequence of int
        Sequences that decode one token at once.
    topk_rows : int
        Rows of factor scores for top-k by itself.
    dtype : torch.dtype
        Of everything.
    """

    dim: int = 2048
    heads: int = 2
    slots: int = 65536
    lanes: int = 64
    tokens: Sequence[int] = (32768, 2048)
    batches: Sequence[int] = (1, 8)
    topk_rows: int = 65536
    dtype: torch.dtype = torch.bfloat16

    def args(self, cuda_graph: bool) -> SparseDeltaMemoryArgs:
        """Return the arguments of the layer."""
        return SparseDeltaMemoryArgs(
            dim=self.dim,
            num_heads=self.heads,
            slots_per_head=self.slots,
            num_writes=self.lanes,
            num_reads=self.lanes,
            output_gate=True,
            normalize_readings=True,
            cuda_graph=cuda_graph,
        )

    def layer(self, cuda_graph: bool = False) -> SparseDeltaMemory:
        """Return the layer, drawn on the GPU."""
        torch.manual_seed(0)
        with DEVICE:
            return SparseDeltaMemory(self.args(cuda_graph), layer_id=0).to(self.dtype)

    def op_case(self, tokens: int) -> Case:
        """Return the op's call within the layer's, for the floor."""
        args = self.args(False)
        return Case(
            self.heads, tokens, args.tokens_per_chunk, self.lanes, args.head_dim, self.slots, self.dtype
        )


def training_step(layer: SparseDeltaMemory, x: Tensor, gradient: Tensor) -> None:
    """Run forward and backward; the gradients of the step before are dropped first."""
    layer.zero_grad(set_to_none=True)
    x.grad = None
    output, _ = layer(x)
    output.backward(gradient)


def no_grad_call(layer: SparseDeltaMemory, x: Tensor, cache: Cache | None = None) -> Tensor:
    """Run the layer without gradients; with ``cache``, continue from its bank."""
    with torch.no_grad():
        output: Tensor = layer(x, cache=cache)[0]
    return output


def graph_layer_figures(shape: LayerBench, x: Tensor, gradient: Tensor) -> dict[str, float | str]:
    """Time a training step of the layer with cuda_graph=True."""
    try:
        layer = shape.layer(cuda_graph=True)
        step, host = measure(partial(training_step, layer, x, gradient), REPEATS, GRAPH_WARMUP)
    except (RuntimeError, ValueError) as error:
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        print(f"  no cuda_graph=True: {reason}", flush=True)
        return {"cuda_graph_step_error": reason}
    finally:
        reset_cuda_graphs()
    return {"cuda_graph_step_ms": step, "cuda_graph_step_host_ms": host}


def sequence_figures(shape: LayerBench, tokens: int, model: DeviceModel, bandwidth: float) -> dict[str, Any]:
    """Time one sequence: plain calls, cuda_graph=True, and the whole call captured by the caller."""
    layer = shape.layer()
    x = torch.randn(1, tokens, shape.dim, device=DEVICE).to(shape.dtype).requires_grad_()
    gradient = torch.randn(1, tokens, shape.dim, device=DEVICE).to(shape.dtype)
    step = partial(training_step, layer, x, gradient)
    call = partial(no_grad_call, layer, x)
    row: dict[str, Any] = {"T": tokens}
    row["step_ms"], row["step_host_ms"] = measure(step, REPEATS)
    row["no_grad_ms"], row["no_grad_host_ms"] = measure(call, REPEATS)
    layer.zero_grad(set_to_none=True)
    x.grad = None
    row["peak_gib"] = round(peak_bytes(step) / 2**30, 3)
    row["no_grad_peak_gib"] = round(peak_bytes(call) / 2**30, 3)
    row |= graph_figures("captured_step", step, REPEATS) | graph_figures("captured_no_grad", call, REPEATS)
    case = shape.op_case(tokens)
    row["op_step_floor_ms"] = floor_ms(floor_bytes(case, model, training=True), bandwidth)
    row["op_no_grad_floor_ms"] = floor_ms(floor_bytes(case, model, training=False), bandwidth)
    del layer, step, call
    x.grad = None
    torch.cuda.empty_cache()
    return row | graph_layer_figures(shape, x, gradient)


def decode_figures(shape: LayerBench, batch: int) -> dict[str, Any]:
    """Time one token of each of ``batch`` sequences, continued from a cache: plain, and cuda_graph=True."""
    row: dict[str, Any] = {"B": batch}
    for cuda_graph, prefix in ((False, ""), (True, "cuda_graph_")):
        layer = shape.layer(cuda_graph).eval()
        cache = layer.create_kv_cache(batch, 1, shape.dtype, DEVICE)
        x = torch.randn(batch, 1, shape.dim, device=DEVICE).to(shape.dtype)
        gpu, host = measure(partial(no_grad_call, layer, x, cache), DECODE_REPEATS, warmup=10)
        row |= {f"{prefix}gpu_ms": gpu, f"{prefix}host_ms": host}
        if cuda_graph:
            row["cuda_graph_replayed"] = bool(last_dispatch().get("graph"))
    return row


def topk_figures(shape: LayerBench) -> dict[str, Any]:
    """Time product_key_topk of many rows."""
    factors = shape.args(False).factors
    raw = torch.randn(shape.topk_rows, sum(factors), device=DEVICE).to(shape.dtype)
    gpu, host = measure(partial(product_key_topk, raw, factors, shape.lanes), DECODE_REPEATS)
    return {"rows": shape.topk_rows, "k": shape.lanes, "gpu_ms": gpu, "host_ms": host}


def bench_layer(shape: LayerBench, model: DeviceModel) -> dict[str, Any]:
    """Measure the layer, print tables and return the figures.

    Parameters
    ----------
    shape : LayerBench
        What is run.
    model : DeviceModel
        The GPU, for the floor.
    """
    bandwidth = copy_bandwidth()
    figures: dict[str, Any] = {
        "copy_tb_s": round(bandwidth / 1e12, 3),
        "layer": [],
        "layer_decode": [],
        "topk": {},
    }
    print(
        f"layer: dim {shape.dim}, H = {shape.heads}, S = {shape.slots}, W = R = {shape.lanes}, {shape.dtype}"
    )
    print("     T   step ms (host)   cuda_graph   captured   no-grad ms (host)   captured   peak GiB")
    for tokens in shape.tokens:
        row = sequence_figures(shape, tokens, model, bandwidth)
        figures["layer"].append(row)
        missing = float("nan")
        print(
            f"{tokens:6} {row['step_ms']:9.3f} ({row['step_host_ms']:7.3f}) "
            f"{row.get('cuda_graph_step_ms', missing):8.3f} {row.get('captured_step_ms', missing):10.3f} "
            f"{row['no_grad_ms']:9.3f} ({row['no_grad_host_ms']:7.3f}) "
            f"{row.get('captured_no_grad_ms', missing):10.3f} {row['peak_gib']:10.3f}",
            flush=True,
        )
        torch.cuda.empty_cache()
    for batch in shape.batches:
        row = decode_figures(shape, batch)
        figures["layer_decode"].append(row)
        for name, key in (("", ""), (", cuda_graph=True", "cuda_graph_")):
            gpu, host = row[f"{key}gpu_ms"], row[f"{key}host_ms"]
            print(f"decode, B = {batch}{name}: {gpu:.3f} ms, host {host:.3f} ms", flush=True)
        torch.cuda.empty_cache()
    figures["topk"] = topk_figures(shape)
    print(f"top-k of {shape.topk_rows} rows, k = {shape.lanes}: {figures['topk']['gpu_ms']:.3f} ms")
    return figures
