"""Arguments of the layer."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

from sdm_rt.layer.activations import check_activation
from sdm_rt.ops.checks import check_choice, check_int, check_sequence
from sdm_rt.plan.shapes import MAX_CHUNK, MAX_HEAD_DIM, MAX_LANES, SNAPSHOTS

__all__ = ["SparseDeltaMemoryArgs"]

_DEFAULT_CHUNK_SIZE = 64
_FLAGS = (
    "normalize_readings",
    "backprop_on_memory",
    "output_gate",
    "query_batchnorm",
    "log_memory_access_stats",
    "log_memory_norms",
    "key_weighted_decay",
    "cuda_graph",
    "grad_bank_fp32",
)


@dataclass
class SparseDeltaMemoryArgs:
    """Shape and options of a :class:`~sdm_rt.layer.layer.SparseDeltaMemory`.

    Every field is checked at construction, and again when a layer is built from the arguments.

    Parameters
    ----------
    dim : int
        Width of the layer, a multiple of ``num_heads``. -1 means not set yet; a layer needs it set.
    num_writes, num_reads : int
        W and R, slots that a token writes and reads per head, 1..256.
    slots_per_head : int
        S, rows of one head's bank, at least 1.
    chunk_size : int, optional
        C of the chunked form on GPUs, 1..256; None means 64.
    read_act, write_act : str
        What turns scores into weights: "Softmax", "l2_normalize" or the name of a ``torch.nn`` activation.
    read_act_scale, write_act_scale : float
        softmax(scale * scores). The other activations take no scale.
    normalize_readings : bool
        LayerNorm over head_dim on each head's readings.
    norm_eps : float
        Epsilon of that LayerNorm.
    dt_bias_init : float
        Accepted for compatibility, without effect.
    A_init_range : tuple of float
        Range of the uniform distribution whose logarithm initializes ``A_log``, 0 <= low <= high.
    backprop_on_memory : bool
        Learn the initial bank (parameter ``memory``); otherwise it is zeros.
    output_gate : bool
        Multiply the readings by sigmoid(Wog(x)).
    query_batchnorm : bool
        BatchNorm1d on keys and queries, over all tokens.
    log_memory_access_stats, log_memory_norms : bool
        Collect ``layer.statistics`` at each forward.
    num_heads : int
        H, at least 1.
    key_weighted_decay : bool
        One gate per write, weighted by its k_val, instead of one per token.
    snapshot_quant : {"none", "bf16", "fp8", "int4"}
        How training keeps the rows it overwrites.
    cuda_graph : bool
        Replay as CUDA graphs, from a shape's second call on and with the same bits: the write-read op of
        calls that can need a backward, and whole one-token calls with a cache under ``torch.no_grad()``. A
        captured training call keeps its own memory, a copy of the bank included, until
        ``reset_cuda_graphs()``; the graph of a token goes with the bank of its cache. Without effect on CPU
        tensors and in compiled calls.
    grad_bank_fp32 : bool
        Keep the gradient of a half-precision bank in float32.
    product_key_factor_dims : sequence of int, optional
        Widths of the product-key factors, with product ``slots_per_head``; None means two of its square root.
    memory_block_size : int, optional
        The former name of ``chunk_size``.

    Raises
    ------
    ValueError, TypeError
        A field outside its range or of a wrong type; the message names it.
    """

    dim: int = -1
    num_writes: int = 64
    num_reads: int = 64
    slots_per_head: int = 10000
    chunk_size: int | None = None
    read_act: str = "Softmax"
    write_act: str = "Softmax"
    read_act_scale: float = 1.0
    write_act_scale: float = 1.0
    normalize_readings: bool = False
    norm_eps: float = 1e-6
    dt_bias_init: float = 0.0
    A_init_range: tuple[float, float] = (0.0, 16.0)
    backprop_on_memory: bool = True
    output_gate: bool = False
    query_batchnorm: bool = False
    log_memory_access_stats: bool = False
    log_memory_norms: bool = False
    num_heads: int = 1
    key_weighted_decay: bool = False
    snapshot_quant: str = "none"
    cuda_graph: bool = False
    grad_bank_fp32: bool = False
    product_key_factor_dims: tuple[int, ...] | None = None
    memory_block_size: int | None = None

    def __post_init__(self) -> None:
        if self.memory_block_size is not None:
            self._adopt_memory_block_size(self.memory_block_size)
        self.validate()

    def _adopt_memory_block_size(self, size: int) -> None:
        warnings.warn(
            "memory_block_size is the former name of chunk_size; set chunk_size instead",
            DeprecationWarning,
            stacklevel=4,
        )
        if self.chunk_size is not None and self.chunk_size != size:
            raise ValueError(
                f"memory_block_size: expected the value of chunk_size, {self.chunk_size}, or None, got {size}"
            )
        check_int("memory_block_size", size, 1, MAX_CHUNK)
        # One name from here on: dataclasses.replace(args, chunk_size=...) must not meet the old value.
        self.chunk_size, self.memory_block_size = size, None

    def validate(self) -> None:
        """Check every field; ValueError or TypeError naming the first that does not fit."""
        check_int("num_heads", self.num_heads, 1, None)
        if self.dim != -1:
            check_int("dim", self.dim, 1, None)
            if self.dim % self.num_heads:
                raise ValueError(f"dim: expected a multiple of num_heads = {self.num_heads}, got {self.dim}")
            if self.dim // self.num_heads > MAX_HEAD_DIM:
                raise ValueError(
                    f"dim: expected dim / num_heads in 1..{MAX_HEAD_DIM}, got {self.dim} / {self.num_heads}"
                )
        check_int("num_writes", self.num_writes, 1, MAX_LANES)
        check_int("num_reads", self.num_reads, 1, MAX_LANES)
        check_int("slots_per_head", self.slots_per_head, 1, None)
        if self.chunk_size is not None:
            check_int("chunk_size", self.chunk_size, 1, MAX_CHUNK)
        check_activation("read_act", self.read_act)
        check_activation("write_act", self.write_act)
        for name in ("read_act_scale", "write_act_scale", "norm_eps"):
            _check_finite(name, getattr(self, name))
        if self.norm_eps <= 0:  # readings of an empty bank are 0
            raise ValueError(f"norm_eps: expected a value above 0, got {self.norm_eps}")
        for act, scale in (("read_act", "read_act_scale"), ("write_act", "write_act_scale")):
            if getattr(self, act) != "Softmax" and getattr(self, scale) != 1.0:
                raise ValueError(
                    f"{scale}: expected 1.0 with {act}={getattr(self, act)!r}, which takes no scale, got "
                    f"{getattr(self, scale)}"
                )
        self._check_init_range()
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}: expected a bool, got {type(getattr(self, name)).__name__}")
        check_choice("snapshot_quant", self.snapshot_quant, SNAPSHOTS)
        self._check_factors()

    def _check_init_range(self) -> None:
        values = check_sequence("A_init_range", self.A_init_range)
        if len(values) != 2:
            raise ValueError(f"A_init_range: expected two numbers (low, high), got {values}")
        for value in values:
            _check_finite("A_init_range", value)
        if not 0 <= values[0] <= values[1]:
            raise ValueError(f"A_init_range: expected 0 <= low <= high, got {values}")

    def _check_factors(self) -> None:
        if self.product_key_factor_dims is None:
            if math.isqrt(self.slots_per_head) ** 2 != self.slots_per_head:
                raise ValueError(
                    f"slots_per_head: expected a square number, or product_key_factor_dims with that "
                    f"product, got {self.slots_per_head}"
                )
            return
        dims = check_sequence("product_key_factor_dims", self.product_key_factor_dims)
        for f, width in enumerate(dims):
            check_int(f"product_key_factor_dims[{f}]", width, 1, None)
        if not dims or math.prod(dims) != self.slots_per_head:
            raise ValueError(
                f"product_key_factor_dims: expected widths with the product slots_per_head = "
                f"{self.slots_per_head}, got {dims}"
            )

    @property
    def head_dim(self) -> int:
        """D, the columns of a bank row."""
        return self.dim // self.num_heads

    @property
    def factors(self) -> tuple[int, ...]:
        """Widths n_0 .. n_{F-1} of the product-key factors."""
        if self.product_key_factor_dims is None:
            return (math.isqrt(self.slots_per_head),) * 2
        return tuple(self.product_key_factor_dims)

    @property
    def tokens_per_chunk(self) -> int:
        """C: ``chunk_size``, or 64 where that is None."""
        return _DEFAULT_CHUNK_SIZE if self.chunk_size is None else self.chunk_size


def _check_finite(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"{name}: expected a finite number, got {value}")
