"""In-place calls on a bank: each can be taken back only while the bank holds what it left."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import ClassVar

from torch import Tensor

__all__ = ["InplaceCall", "any_meets", "apart", "check_tracked", "named_apart"]


def any_meets(bank: Tensor, addresses: Iterable[int]) -> bool:
    """Whether an operand begins in the storage of the bank that the call overwrites: it may meet the bank.

    Storages of PyTorch's own do not overlap; of arrays of other libraries they may, and `apart` tells.
    ``addresses`` are those of the operands' first elements.
    """
    storage = bank.untyped_storage()
    begin = storage.data_ptr()
    end = begin + storage.nbytes()
    for address in addresses:  # noqa: SIM110 - a generator costs as much as all the rest
        if begin <= address < end:
            return True
    return False


def apart(bank: Tensor, operand: Tensor) -> Tensor:
    """Return an operand, copied where it meets the bank: a call means its values when the call begins."""
    (begin, end), (other_begin, other_end) = _span(bank), _span(operand)
    return operand.clone() if begin < other_end and other_begin < end else operand


def _span(x: Tensor) -> tuple[int, int]:
    """Return the addresses of the first element and behind the last one."""
    begin = x.data_ptr()
    if x.is_contiguous():
        return begin, begin + x.nbytes
    elements = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return begin, begin + elements * x.element_size()


def named_apart(bank: Tensor, *groups: dict[str, Tensor]) -> tuple[dict[str, Tensor], ...]:
    """Return named operands of a call that overwrites ``bank``, those that meet it copied."""
    if not any_meets(bank, [x.data_ptr() for group in groups for x in group.values()]):
        return groups
    return tuple({name: apart(bank, x) for name, x in group.items()} for group in groups)


def check_tracked(bank: Tensor, given: object) -> None:
    """RuntimeError for a bank whose changes before a backward would not be seen: PyTorch does not track them.

    Parameters
    ----------
    bank : Tensor
        The bank of an in-place call that needs a backward.
    given : object
        What the caller gave: the bank itself, or another library's array that it was made of.
    """
    if given is bank and not bank.is_inference():
        return
    what = "an inference tensor" if given is bank else f"a {type(given).__name__}"
    raise RuntimeError(
        f"memory: {what} cannot be advanced in place by a call that needs a backward, since PyTorch does not "
        f"track its changes; pass a tensor made outside of inference mode (clone() it there), or call "
        f"sdm_write_read with return_final_bank=True"
    )


class InplaceCall:
    """The place of one in-place call in the history of its bank.

    An in-place call can be taken back only while the bank holds what the call left. Taking it back makes the
    bank what the call before it had left, so that one can be taken back next.
    """

    # Keyed by address: a live record keeps its bank alive, so a live entry is never another bank's.
    _latest: ClassVar[weakref.WeakValueDictionary[int, InplaceCall]] = weakref.WeakValueDictionary()

    def __init__(self, bank: Tensor, version_before: int) -> None:
        self.bank = bank
        self.version_before = version_before
        self.version_after = bank._version
        previous = self._latest.get(self._address)
        self._previous = weakref.ref(previous) if previous is not None else None
        self.taken_back = False
        self._latest[self._address] = self

    @property
    def _address(self) -> int:
        return self.bank.untyped_storage().data_ptr()

    def check_unchanged(self) -> None:
        """RuntimeError unless the bank holds exactly what this call left in it."""
        if self.taken_back:
            raise RuntimeError(
                "sdm_write_read: a second backward through one in-place call: the first has already restored "
                "the bank. Run the forward again, or use return_final_bank=True with retain_graph=True."
            )
        if self.bank._version != self.version_after:
            raise RuntimeError(
                "sdm_write_read: the bank was changed between this in-place call and its backward. Run the "
                "backwards of in-place calls in the reverse order of the calls and change the bank only "
                "after them, or use return_final_bank=True, which leaves the caller's bank alone and is what "
                "activation checkpointing needs."
            )

    def finish(self) -> None:
        """Record that the bank has been restored to what it was before this call."""
        self.taken_back = True
        previous = self._previous() if self._previous is not None else None
        if previous is None:
            return
        if previous.version_after == self.version_before:
            previous.version_after = self.bank._version
        self._latest[self._address] = previous
