"""Bad calls of the ops: which error, what its message names, and that nothing was changed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor

from sdm_rt import last_dispatch, repeated_write_slots, reset_dispatch
from tests.tolerances import assert_same_bits

__all__ = ["Arguments", "Bad", "assert_refused", "bad", "put"]

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Bad:
    """One bad call: its error, the argument's name and words of the message in order, and what to change."""

    label: str
    error: type[Exception]
    message: str
    change: Callable[[Arguments], Arguments]

    @property
    def pattern(self) -> str:
        name, *words = self.message.split("...")
        return ".*".join([f"^{name}: ", *map(re.escape, words)])


def put(index: tuple[int, ...], value: int) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        x = x.clone()
        x[index] = value
        return x

    return change


def bad(label: str, error: type[Exception], message: str, **changes: Any) -> Bad:
    """A change of arguments: callables are applied to the good value, anything else replaces it."""

    def change(call: Arguments) -> Arguments:
        return call | {key: new(call[key]) if callable(new) else new for key, new in changes.items()}

    return Bad(label, error, message, change)


def assert_refused(function: Callable[..., Any], call: Arguments, case: Bad) -> None:
    memory = call.get("memory")
    watched = isinstance(memory, Tensor)
    before = memory.clone() if watched else None
    version = memory._version if watched else None
    repeated_write_slots()
    reset_dispatch()
    with pytest.raises(case.error, match=case.pattern):
        function(**call)
    assert repeated_write_slots() == 0, "a refused call must count nothing"
    assert last_dispatch() == {}, "a refused call dispatches nothing"
    if watched:
        assert_same_bits("bank", memory, before)
        assert memory._version == version
