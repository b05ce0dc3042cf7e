"""Shapes and dtypes that plans are made from: frozen values, no tensors, dtypes by name."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = [
    "ALIGNMENTS",
    "BANK_DTYPES",
    "INDEX_DTYPES",
    "MAX_CHUNK",
    "MAX_HEAD_DIM",
    "MAX_LANES",
    "MAX_SLOTS",
    "QUANTIZED",
    "SNAPSHOTS",
    "DecodeShape",
    "WriteReadShape",
    "dtype_bytes",
    "kernel_index",
    "kernel_type",
]

MAX_LANES = 256  # write or read slots of a token
MAX_CHUNK = 256
MAX_HEAD_DIM = 16384
MAX_SLOTS = 2**31 - 1  # of a stream
ALIGNMENTS = (2, 4, 8, 16)  # bytes, of the rows of a bank
BANK_DTYPES = ("bfloat16", "float16", "float32")
INDEX_DTYPES = ("int32", "int64")
SNAPSHOTS = ("none", "bf16", "fp8", "int4")
QUANTIZED = ("fp8", "int4")  # snapshots whose rows have one scale each

_BYTES = {"uint8": 1, "bfloat16": 2, "float16": 2, "float32": 4, "int32": 4, "int64": 8}
_KERNEL_TYPES = {"bfloat16": "Bf16", "float16": "Fp16", "float32": "float"}


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of one value of the named dtype."""
    return _BYTES[dtype]


def kernel_type(dtype: str) -> str:
    """Return the kernels' name of a bank dtype (kernels_cu/numeric.cuh)."""
    return _KERNEL_TYPES[dtype]


def kernel_index(dtype: str) -> str:
    """Return the kernels' name of an index dtype."""
    return {"int32": "int", "int64": "long long"}[dtype]


def _check_range(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{field} must be in {low}..{high}, got {value}")


def _check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{field} must be one of {', '.join(choices)}, got {value!r}")


@dataclass(frozen=True)
class DecodeShape:
    """One token per stream: what `plan_decode` reads.

    Parameters
    ----------
    streams : int
        P, parallel streams.
    writes, reads : int
        W and R, slots a token writes and reads, 1..256.
    head_dim : int
        D, columns of a bank row, 1..16384.
    bank_dtype : str
        ``"bfloat16"``, ``"float16"`` or ``"float32"``.
    index_dtype : str
        ``"int32"`` or ``"int64"``.
    gates_per_write : bool
        Whether the log-decay is ``[P, W]`` rather than ``[P, 1]``.
    aligned : bool
        Whether the bank, ``v`` and the readings start at a multiple of 16 bytes.

    Raises
    ------
    ValueError
        Naming the field and its range.
    """

    streams: int
    writes: int
    reads: int
    head_dim: int
    bank_dtype: str = "bfloat16"
    index_dtype: str = "int64"
    gates_per_write: bool = False
    aligned: bool = True

    def __post_init__(self) -> None:
        _check_range("streams", self.streams, 0, 2**31 - 1)
        _check_range("writes", self.writes, 1, MAX_LANES)
        _check_range("reads", self.reads, 1, MAX_LANES)
        _check_range("head_dim", self.head_dim, 1, MAX_HEAD_DIM)
        _check_choice("bank_dtype", self.bank_dtype, BANK_DTYPES)
        _check_choice("index_dtype", self.index_dtype, INDEX_DTYPES)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class WriteReadShape:
    """One call of the write-read op: what `plan_forward` and `plan_backward` read.

    Parameters
    ----------
    streams : int
        P, parallel streams.
    tokens : int
        T, tokens of a stream.
    chunk : int
        C, tokens of a chunk, 1..256.
    writes, reads : int
        W and R, slots a token writes and reads, 1..256.
    head_dim : int
        D, columns of a bank row, 1..16384.
    slots : int
        S, bank rows of a stream.
    bank_dtype : str
        ``"bfloat16"``, ``"float16"`` or ``"float32"``.
    gradient_bank_dtype : str, optional
        Dtype of the bank's gradient while the backward runs: the bank's own (default) or ``"float32"``.
    index_dtype : str
        ``"int32"`` or ``"int64"``.
    gates_per_write : bool
        Whether the log-decay is ``[P, T, W]`` rather than ``[P, T, 1]``.
    snapshot : str
        ``"none"`` (bank dtype), ``"bf16"``, ``"fp8"`` or ``"int4"``.
    training : bool
        Whether the forward saves what a backward needs.
    alignment : int
        Bytes, a power of two up to 16, that the start of every bank row is a multiple of.
    shared_bank : bool
        Whether several streams read rows of one bank, so that the backward adds their gradients in turn.

    Raises
    ------
    ValueError
        Naming the field and its range.
    """

    streams: int
    tokens: int
    chunk: int
    writes: int
    reads: int
    head_dim: int
    slots: int
    bank_dtype: str = "bfloat16"
    gradient_bank_dtype: str = ""
    index_dtype: str = "int64"
    gates_per_write: bool = False
    snapshot: str = "none"
    training: bool = True
    alignment: int = 16
    shared_bank: bool = False

    def __post_init__(self) -> None:
        _check_range("streams", self.streams, 0, 2**31 - 1)
        _check_range("tokens", self.tokens, 0, 2**31 - 1)
        _check_range("chunk", self.chunk, 1, MAX_CHUNK)
        _check_range("writes", self.writes, 1, MAX_LANES)
        _check_range("reads", self.reads, 1, MAX_LANES)
        _check_range("head_dim", self.head_dim, 1, MAX_HEAD_DIM)
        _check_range("slots", self.slots, 1, MAX_SLOTS)
        _check_choice("bank_dtype", self.bank_dtype, BANK_DTYPES)
        if not self.gradient_bank_dtype:
            object.__setattr__(self, "gradient_bank_dtype", self.bank_dtype)
        gradient_choices = tuple(dict.fromkeys((self.bank_dtype, "float32")))
        _check_choice("gradient_bank_dtype", self.gradient_bank_dtype, gradient_choices)
        _check_choice("index_dtype", self.index_dtype, INDEX_DTYPES)
        _check_choice("snapshot", self.snapshot, SNAPSHOTS)
        if self.alignment not in ALIGNMENTS:
            raise ValueError(f"alignment must be 2, 4, 8 or 16 bytes, got {self.alignment}")

    @property
    def chunks(self) -> int:
        """Nt, chunks of a stream: ceil(T / C); the steps of the loop."""
        return -(-self.tokens // self.chunk)

    @property
    def step_tokens(self) -> int:
        """Tokens of one step, over all streams (the last chunk's padding included)."""
        return self.streams * self.chunk

    @property
    def write_rows(self) -> int:
        """Bank rows that one step writes at most: min(C W, S) a stream."""
        return self.streams * min(self.chunk * self.writes, self.slots)

    @property
    def read_rows(self) -> int:
        """Bank rows that one step reads at most: min(C R, S) a stream."""
        return self.streams * min(self.chunk * self.reads, self.slots)

    @property
    def row_bytes(self) -> int:
        """Bytes of one bank row."""
        return self.head_dim * dtype_bytes(self.bank_dtype)

    @property
    def gradient_row_bytes(self) -> int:
        """Bytes of one row of the bank's gradient."""
        return self.head_dim * dtype_bytes(self.gradient_bank_dtype)

    @property
    def quantizes(self) -> bool:
        """Whether a call keeps rows that have one scale each."""
        return self.training and self.snapshot in QUANTIZED

    @property
    def snapshot_row_bytes(self) -> int:
        """Bytes of one snapshot row: payload and, where quantized, its float32 scale."""
        return {
            "none": self.row_bytes,
            "bf16": 2 * self.head_dim,
            "fp8": self.head_dim + 4,
            "int4": -(-self.head_dim // 2) + 4,
        }[self.snapshot]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)
