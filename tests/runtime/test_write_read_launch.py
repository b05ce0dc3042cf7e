"""What a write-read call on a GPU is refused for, before any work."""

from __future__ import annotations

import pytest
import torch

from sdm_rt.errors import UnsupportedConfigurationError
from sdm_rt.ops import write_read
from sdm_rt.ops.checks import flat_tokens, resolve_streams
from sdm_rt.ops.write_read_call import WriteReadCall
from sdm_rt.ops.write_read_launch import BankLayout, operands_of, planned_shape, saved_bytes
from tests.problems import make_problem


@pytest.mark.parametrize(("streams", "shared"), [(2, True), (1, True), (2, False)])
def test_a_training_call_of_several_streams_on_one_bank_says_so_in_its_shape(
    streams: int, shared: bool
) -> None:
    problem = make_problem(streams, 5, 3, 2, 8, 9).cast(torch.bfloat16)
    slots = 0 if shared else problem.slots
    shape = resolve_streams(problem.memory, problem.k_idx, slots, streams, shared, None, None)
    operands = operands_of(problem.memory, flat_tokens(problem.inputs()))
    call = WriteReadCall(shape, 5, 64, "none", False, None)
    assert not planned_shape(problem.memory, operands, call, 16, training=False).shared_bank
    several = shared and streams > 1
    assert planned_shape(problem.memory, operands, call, 16, training=True).shared_bank is several
    assert saved_bytes(problem.memory, operands, call) > 0


@pytest.mark.parametrize("packed", [False, True])
def test_a_bound_on_lengths_leaves_padded_streams_where_they_are(packed: bool) -> None:
    problem = make_problem(2, 6, 3, 2, 8, 9, lengths=[3, 2]).cast(torch.bfloat16)
    tensors, streams = problem.inputs(), {"lengths": torch.tensor([3, 2])}
    if packed:
        tensors = {name: problem.pack(x) for name, x in tensors.items()}
        streams = {"cu_seqlens": problem.cu_seqlens()}
    options = write_read._Options(4, 9, 2, "none", None, False, False, 3, None)
    call = write_read._check_call(problem.memory, tensors, streams, options)
    operands = operands_of(problem.memory, flat_tokens(tensors))
    assert planned_shape(problem.memory, operands, call, 16, training=True).tokens == (3 if packed else 6)


def test_rows_further_apart_than_the_kernels_count_are_refused() -> None:
    bank = torch.empty_strided((2, 8), (2**32, 1), dtype=torch.bfloat16, device="meta")
    with pytest.raises(UnsupportedConfigurationError, match="rows lie 4,294,967,296 elements apart"):
        BankLayout.of(bank)
