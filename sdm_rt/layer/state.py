"""Decode state: the bank that a layer carries from one call to the next."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from sdm_rt.ops.checks import check_bank, check_int

__all__ = ["Cache", "SDMLayerState"]


class Cache(ABC):
    """What a layer keeps of the tokens it has seen."""

    @property
    @abstractmethod
    def cache_len(self) -> int:
        """Token positions seen so far."""

    @property
    @abstractmethod
    def state(self) -> tuple[Tensor, ...]:
        """The tensors of the cache; the first is the one a layer reads and advances."""

    @abstractmethod
    def reset(self) -> None:
        """Go back to the state before the first token."""

    @abstractmethod
    def update_(self, new_memory: Tensor, seq_len: int = 1) -> None:
        """Take over ``new_memory`` after ``seq_len`` more positions."""


class SDMLayerState(Cache):
    """The bank of an SDM layer, and how many token positions it has seen.

    Layers advance the bank in place. The state carries no gradients between calls.

    Parameters
    ----------
    memory : Tensor
        The bank [B*H*S, D]; kept by reference.
    seq_len : int
        Token positions that the bank has seen.
    initial : Tensor, optional
        What :meth:`reset` goes back to: [rows, D], repeated to the rows of ``memory``. Kept by reference: a
        layer passes its learned initial bank, one sequence long. Default: a copy of ``memory``.

    Raises
    ------
    TypeError, ValueError
        If ``memory`` is no bank, or ``initial`` does not divide it.
    """

    def __init__(self, memory: Tensor, seq_len: int = 0, *, initial: Tensor | None = None) -> None:
        check_bank(memory)
        check_int("seq_len", seq_len, 0, None)
        self.memory = memory.detach()
        self._seq_len = seq_len
        self._initial = self.memory.clone() if initial is None else initial.detach()
        if self._initial.dim() != 2 or self._initial.shape[1] != memory.shape[1]:
            raise ValueError(
                f"initial: expected shape [rows, {memory.shape[1]}], got {list(self._initial.shape)}"
            )
        rows = self._initial.shape[0]
        if memory.shape[0] and (rows == 0 or memory.shape[0] % rows):
            raise ValueError(
                f"initial: expected a number of rows that divides the {memory.shape[0]} rows of memory, got "
                f"{rows}"
            )

    @property
    def cache_len(self) -> int:
        """Token positions seen so far.

        A padded call counts T, whatever its ``lengths``; a packed one its longest sequence where the host
        knows it (CPU tensors, not traced), else ``max_seqlen``.
        """
        return self._seq_len

    @property
    def state(self) -> tuple[Tensor, ...]:
        """The bank, as a tuple of one tensor."""
        return (self.memory,)

    def __getitem__(self, index: int) -> Tensor:
        return self.state[index]

    @torch.no_grad()
    def reset(self) -> None:
        """Return the bank, in place, to the one the state was created from, and ``cache_len`` to 0.

        Raises
        ------
        RuntimeError
            If that bank is a learned one that FSDP2 has given back its memory since.
        """
        if self._initial.numel() and self._initial.untyped_storage().nbytes() == 0:
            raise RuntimeError(
                "reset: the learned initial bank is no longer in memory, since FSDP2 has resharded its "
                "layer; create the state by create_kv_cache(..., initial_memory=layer.memory.full_tensor())"
            )
        rows = self._initial.shape[0]
        if rows:
            banks = self.memory.unflatten(0, (self.memory.shape[0] // rows, rows))  # type: ignore[no-untyped-call]
            banks.copy_(self._initial)
        self._seq_len = 0

    def update_(self, new_memory: Tensor, seq_len: int = 1) -> None:
        """Make ``new_memory`` the bank's content, in place, and count ``seq_len`` more positions.

        Parameters
        ----------
        new_memory : Tensor
            [B*H*S, D]. The bank itself, after an in-place call, is not copied.
        seq_len : int
            Positions that it has seen beyond the present ``cache_len``.

        Raises
        ------
        TypeError
            If ``seq_len`` is no int, or ``new_memory`` no tensor of real numbers.
        ValueError
            If ``seq_len`` is negative, or ``new_memory`` has another shape than the bank. Nothing has changed
            then.
        """
        check_int("seq_len", seq_len, 0, None)
        if not isinstance(new_memory, Tensor):
            raise TypeError(f"new_memory: expected a torch.Tensor, got {type(new_memory).__name__}")
        if new_memory.is_complex():
            raise TypeError(f"new_memory: expected real numbers, got dtype {new_memory.dtype}")
        if new_memory.shape != self.memory.shape:
            raise ValueError(
                f"new_memory: expected shape {list(self.memory.shape)}, got {list(new_memory.shape)}"
            )
        if new_memory is not self.memory:
            with torch.no_grad():  # not around the method: the compiler cannot trace a decorated one
                self.memory.copy_(new_memory)
        self._seq_len += seq_len

    def __repr__(self) -> str:
        return (
            f"SDMLayerState(memory={list(self.memory.shape)}, dtype={self.memory.dtype}, "
            f"device={self.memory.device}, cache_len={self._seq_len})"
        )


# torch.load unpickles only registered classes by default; this one holds two tensors and an int.
torch.serialization.add_safe_globals([SDMLayerState])
