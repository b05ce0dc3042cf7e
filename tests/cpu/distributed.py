"""What each of two gloo processes of ``test_distributed.py`` runs; rank 0 saves the results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from sdm_rt import SparseDeltaMemory, sdm_write_read
from tests.layer_reference import make_layer
from tests.problems import GRADIENTS, Problem, make_problem

__all__ = [
    "PROCESSES",
    "STEPS",
    "column_problem",
    "run_column_parallel",
    "run_process",
    "train",
    "two_layers",
]

PROCESSES = 2
STEPS = 2
LAYERS = {"output_gate": True, "normalize_readings": True, "key_weighted_decay": True}


class TwoLayers(nn.Module):
    """Two layers with a residual connection each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([make_layer(torch.float64, **LAYERS), make_layer(torch.float64)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)[0]
        return x


def two_layers() -> nn.Module:
    torch.manual_seed(5)
    return TwoLayers()


def train(model: nn.Module, rank: int, processes: int) -> list[Tensor]:
    """Take a few steps on this process's share of the batch; return its losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(2 * PROCESSES, 7, 12, dtype=torch.float64, generator=generator)
        loss = model(x.chunk(processes)[rank]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _trained(model: nn.Module, rank: int) -> dict[str, Any]:
    losses = torch.stack(train(model, rank, PROCESSES))
    dist.all_reduce(losses)
    weights = {name: _whole(parameter.detach()).clone() for name, parameter in model.named_parameters()}
    return {"losses": losses / PROCESSES, "weights": weights}


def _data_parallel(rank: int) -> dict[str, Any]:
    model = DistributedDataParallel(two_layers())
    trained = _trained(model, rank)
    return trained | {"weights": {k.removeprefix("module."): w for k, w in trained["weights"].items()}}


def _fully_sharded(rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (PROCESSES,))
    model = two_layers()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    found = _trained(model, rank)
    layer = model.layers[0]
    assert isinstance(layer, SparseDeltaMemory)
    found["sharded rows"] = layer.memory.to_local().shape[0]
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    try:
        layer.create_kv_cache(2, 7, torch.float64)
    except RuntimeError as error:
        found["state"] = str(error)
    with torch.no_grad():
        out, state = layer(x)
        try:
            state.reset()
        except RuntimeError as error:
            found["reset"] = str(error)
        cache = layer.create_kv_cache(2, 7, torch.float64, initial_memory=layer.memory.full_tensor())
        found["continued"] = torch.equal(layer(x, cache=cache)[0], out)
        cache.reset()
        found["reset again"] = torch.equal(layer(x, cache=cache)[0], out)
    return found


def column_problem() -> Problem:
    return make_problem(2, 9, 3, 4, 6, 8, writes="repeats", gate_per_write=True).cast(torch.float32)


def run_column_parallel(rank: int, processes: int) -> dict[str, Tensor]:
    """Forward and backward on this process's columns of the bank and of v."""
    problem = column_problem()

    def columns(x: Tensor) -> Tensor:
        return x.chunk(processes, dim=-1)[rank].contiguous()

    leaves = {name: getattr(problem, name).clone() for name in GRADIENTS}
    leaves |= {name: columns(leaves[name]) for name in ("memory", "v")}
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    arguments = {name: leaves.get(name, x) for name, x in problem.inputs().items()}
    readings, bank = sdm_write_read(
        leaves["memory"], **arguments, **problem.options(), return_final_bank=True
    )
    grads = [columns(problem.grad_readings.flatten(0, 1)), columns(problem.grad_bank)]
    torch.autograd.backward([readings, bank], grads)
    outputs = {"readings": readings.detach(), "bank": bank.detach()}
    return outputs | {f"gradient of {name}": leaf.grad for name, leaf in leaves.items()}


def _column_parallel(rank: int) -> dict[str, Tensor]:
    found = run_column_parallel(rank, PROCESSES)
    for name, tensor in found.items():
        if name in ("readings", "bank", "gradient of memory", "gradient of v"):
            parts = [torch.empty_like(tensor) for _ in range(PROCESSES)]
            dist.all_gather(parts, tensor)
            found[name] = torch.cat(parts, dim=-1)
        else:
            dist.all_reduce(tensor)
    return found


def run_process(rank: int, folder: str) -> None:
    """Run everything in one of the processes."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=PROCESSES
    )
    found = {
        "data parallel": _data_parallel(rank),
        "fully sharded": _fully_sharded(rank),
        "column parallel": _column_parallel(rank),
    }
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")
    dist.barrier()
    dist.destroy_process_group()
