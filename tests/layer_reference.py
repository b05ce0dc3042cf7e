"""The layer from its formulas, one head and one token at a time, for autograd to differentiate in float64.

The reference uses nothing of ``sdm_rt.layer``: projections, product keys and gates are written out, and the
recurrence is the oracle's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sdm_rt import SparseDeltaMemory, SparseDeltaMemoryArgs
from tests import oracle

__all__ = ["SHAPE", "layer_reference", "make_layer", "product_key_slots"]

SHAPE = {"dim": 12, "num_heads": 2, "slots_per_head": 25, "num_writes": 5, "num_reads": 4}

ACTIVATIONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "Softmax": lambda x, scale: torch.exp(scale * x) / torch.exp(scale * x).sum(-1, keepdim=True),
    "l2_normalize": lambda x, scale: x / (x * x).sum(-1, keepdim=True).sqrt(),
    "ReLU": lambda x, scale: x.clamp_min(0),
    "SiLU": lambda x, scale: x / (1 + torch.exp(-x)),
    "Identity": lambda x, scale: x,
}


def make_layer(dtype: torch.dtype = torch.float64, **options: object) -> SparseDeltaMemory:
    """Build a layer whose weights are far from their small initial values, so that every term shows."""
    torch.manual_seed(3)
    layer = SparseDeltaMemory(SparseDeltaMemoryArgs(**{**SHAPE, **options}), 0).to(dtype)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name not in ("A_log", "dt_bias"):
                parameter.add_(0.3 * torch.randn(parameter.shape, dtype=torch.float64).to(dtype))
        layer.A_log.copy_(torch.linspace(-1, 1, layer.num_heads))
        layer.dt_bias.uniform_(-1, 1)
    return layer


def product_key_slots(scores: Tensor, factors: Sequence[int], count: int) -> tuple[Tensor, Tensor]:
    """Best slots of one token and head, ascending, from the scores of all slots; no two sums may tie."""
    total = scores.new_zeros(1)
    for part in scores.split(list(factors)):
        total = (total[:, None] + part).flatten()  # [n_0 ... n_f]
    slots = total.detach().topk(min(count, total.numel())).indices.sort().values
    return total[slots], slots


def _linear(parameters: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ parameters[f"{name}.weight"].T + parameters[f"{name}.bias"]


def _batch_norm(parameters: dict[str, Tensor], name: str, rows: Tensor, training: bool) -> Tensor:
    if training:
        mean, variance = rows.mean(0), ((rows - rows.mean(0)) ** 2).mean(0)
    else:
        mean, variance = parameters[f"{name}.running_mean"], parameters[f"{name}.running_var"]
    normal = (rows - mean) / torch.sqrt(variance + 1e-5)
    return normal * parameters[f"{name}.weight"] + parameters[f"{name}.bias"]


def layer_reference(
    args: SparseDeltaMemoryArgs,
    parameters: dict[str, Tensor],
    sequences: Sequence[Tensor],
    training: bool = True,
) -> tuple[list[Tensor], Tensor]:
    """Run the layer.

    Parameters
    ----------
    args : SparseDeltaMemoryArgs
    parameters : dict
        Parameters and buffers by their names in the state dict.
    sequences : sequence of Tensor [T_b, dim]
        The tokens of each sequence.
    training : bool
        Whether BatchNorm uses the statistics of these tokens.

    Returns
    -------
    outputs : list of Tensor [T_b, dim]
    bank : Tensor [B*H*S, D]
    """
    heads, slots = args.num_heads, args.slots_per_head
    factors = args.product_key_factor_dims or (math.isqrt(slots),) * 2
    width, head_dim = sum(factors), args.dim // heads
    x = torch.cat(list(sequences))  # [N, dim]
    keys, queries = _linear(parameters, "Wk_write", x), _linear(parameters, "Wq_read", x)
    if args.query_batchnorm:
        keys = _batch_norm(parameters, "key_bn", keys, training)
        queries = _batch_norm(parameters, "query_bn", queries, training)
    values = _linear(parameters, "Wv_write", x)
    beta = 1 / (1 + torch.exp(-_linear(parameters, "b_proj", x)))  # [N, H]
    step = torch.log1p(torch.exp(_linear(parameters, "a_proj", x) + parameters["dt_bias"]))
    gates = -torch.exp(parameters["A_log"]) * step  # [N, H]
    readings, banks = [], []
    start = 0
    for sequence in sequences:
        by_head = []
        for h in range(heads):
            rows = range(start, start + len(sequence))
            chosen = [
                product_key_slots(keys[n, h * width : (h + 1) * width], factors, args.num_writes)
                for n in rows
            ]
            read = [
                product_key_slots(queries[n, h * width : (h + 1) * width], factors, args.num_reads)
                for n in rows
            ]
            k_val = ACTIVATIONS[args.write_act](
                torch.stack([score for score, _ in chosen]), args.write_act_scale
            )
            q_val = ACTIVATIONS[args.read_act](torch.stack([score for score, _ in read]), args.read_act_scale)
            g = gates[rows, h, None]
            if args.backprop_on_memory:
                bank = parameters["memory"][h * slots : (h + 1) * slots]
            else:
                bank = x.new_zeros(slots, head_dim)
            y, final = oracle.write_read(
                bank,
                torch.stack([slot for _, slot in chosen])[None],
                k_val[None],
                values[None, rows, h * head_dim : (h + 1) * head_dim],
                beta[None, rows, h, None],
                (g * k_val if args.key_weighted_decay else g)[None],
                torch.stack([slot for _, slot in read])[None],
                q_val[None],
                slots=slots,
            )
            if args.normalize_readings:
                centred = y - y.mean(-1, keepdim=True)
                y = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + args.norm_eps)
                y = y * parameters["readings_norm.weight"] + parameters["readings_norm.bias"]
            by_head.append(y[0])
            banks.append(final)
        readings.append(torch.cat(by_head, dim=-1))  # [T_b, dim]
        start += len(sequence)
    merged = torch.cat(readings)
    if args.output_gate:
        merged = merged / (1 + torch.exp(-_linear(parameters, "Wog", x)))
    out = _linear(parameters, "Wo", merged)
    return list(out.split([len(sequence) for sequence in sequences])), torch.cat(banks)
