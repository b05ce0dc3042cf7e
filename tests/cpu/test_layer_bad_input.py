"""Bad input of the layer: the message, and nothing changed."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.layer_reference import make_layer


@pytest.mark.parametrize(
    ("x", "options", "error", "message"),
    [
        ([1.0], {}, TypeError, "x: expected a torch.Tensor, got list"),
        (
            torch.zeros(2, 3, 12, dtype=torch.int64),
            {},
            TypeError,
            "x: expected a floating-point dtype, got torch.int64",
        ),
        (
            torch.zeros(12),
            {},
            ValueError,
            "x: expected shape [B, T, dim] or [N, dim] with dim = 12, got [12]",
        ),
        (
            torch.zeros(1, 2, 11),
            {},
            ValueError,
            "x: expected shape [B, T, dim] or [N, dim] with dim = 12, got [1, 2, 11]",
        ),
        (
            torch.zeros(6, 12),
            {},
            ValueError,
            "x: expected shape [B, T, dim], or [B*T, dim] with freqs_cis of T rows, or [sum T, dim] with "
            "cu_seqlens, got [6, 12] without either",
        ),
        (
            torch.zeros(6, 12),
            {"freqs_cis": torch.zeros(4, 2)},
            ValueError,
            "x: expected shape [B*T, dim] with T = 4, the rows of freqs_cis, got [6, 12]",
        ),
        (
            torch.zeros(6, 12),
            {"freqs_cis": 3},
            TypeError,
            "freqs_cis: expected a torch.Tensor of T rows beside x of rank 2, got int",
        ),
        (
            torch.zeros(6, 12),
            {"freqs_cis": torch.tensor(3)},
            TypeError,
            "freqs_cis: expected a torch.Tensor of T rows beside x of rank 2, got Tensor of rank 0",
        ),
        (
            torch.zeros(2, 3, 12),
            {"lengths": torch.tensor([1])},
            ValueError,
            "lengths: expected shape [B] = [2], got [1]",
        ),
        (
            torch.zeros(2, 3, 12),
            {"lengths": torch.tensor([1, 4])},
            ValueError,
            "lengths: expected values in 0..3, got 4 for stream 1",
        ),
        (
            torch.zeros(2, 3, 12),
            {"lengths": torch.tensor([1.0, 2.0])},
            TypeError,
            "lengths: expected a tensor of dtype int32 or int64, got torch.float32",
        ),
        (
            torch.zeros(2, 3, 12),
            {"lengths": [1, 2]},
            TypeError,
            "lengths: expected a tensor of dtype int32 or int64, got list",
        ),
        (
            torch.zeros(2, 3, 12),
            {"lengths": torch.zeros(2, dtype=torch.int64, device="meta")},
            ValueError,
            "lengths: expected the device of x, cpu, got meta",
        ),
        (
            torch.zeros(2, 3, 12),
            {"cu_seqlens": torch.tensor([0, 3, 6])},
            ValueError,
            "x: expected shape [sum T, dim] with cu_seqlens, got [2, 3, 12]",
        ),
        (
            torch.zeros(6, 12),
            {"cu_seqlens": torch.tensor([0, 4, 5])},
            ValueError,
            "cu_seqlens: expected to start at 0 and end at 6, got 0 and 5",
        ),
        (
            torch.zeros(6, 12),
            {"cu_seqlens": torch.tensor([0, 4, 6]), "max_seqlen": 3},
            ValueError,
            "max_seqlen: expected at least the longest stream, 4 tokens (stream 0), got 3",
        ),
        (torch.zeros(2, 3, 12), {"max_seqlen": 2}, ValueError, "max_seqlen: expected at least T = 3, got 2"),
        (
            torch.zeros(2, 3, 12),
            {"lengths": torch.tensor([1, 3]), "max_seqlen": 2},
            ValueError,
            "max_seqlen: expected at least the longest stream, 3 tokens (stream 1), got 2",
        ),
        (
            torch.zeros(6, 12),
            {"cu_seqlens": torch.tensor(6)},
            ValueError,
            "cu_seqlens: expected shape [B+1] = [1], got []",
        ),
        (
            torch.zeros(6, 12),
            {"cu_seqlens": torch.tensor([0, 6]), "lengths": torch.tensor([6])},
            ValueError,
            "lengths: expected either lengths (padded x) or cu_seqlens (packed x), got both",
        ),
        (
            torch.zeros(1, 2, 12),
            {"cache": torch.zeros(50, 6)},
            TypeError,
            "cache: expected a Cache, got Tensor",
        ),
    ],
)
def test_bad_input_changes_nothing(x, options, error, message):
    layer = make_layer(torch.float32, query_batchnorm=True)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(error) as caught:
        layer(x, **options)
    assert str(caught.value) == message
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def test_a_cache_of_another_batch_is_refused():
    layer = make_layer(torch.float32)
    cache = layer.create_kv_cache(3, 1, torch.float32)
    message = r"cache: expected a bank \[B\*H\*S, D\] = \[100, 6\] for B = 2, got \[150, 6\]"
    with pytest.raises(ValueError, match=message):
        layer(torch.zeros(2, 1, 12), cache=cache)
    assert cache.cache_len == 0


@pytest.mark.parametrize(
    ("given", "got"),
    [([1.0], "list"), (torch.zeros(50, 6, dtype=torch.complex64), "torch.complex64")],
)
def test_an_initial_memory_that_is_no_bank(given, got):
    message = f"initial_memory: expected a torch.Tensor of real numbers, got {got}"
    with pytest.raises(TypeError, match=message):
        make_layer(torch.float32).create_kv_cache(1, 1, torch.float32, initial_memory=given)


def test_a_state_takes_tensors_alone():
    cache = make_layer(torch.float32).create_kv_cache(1, 1, torch.float32)
    with pytest.raises(TypeError, match=r"new_memory: expected a torch\.Tensor, got NoneType"):
        cache.update_(None)
    assert cache.cache_len == 0
