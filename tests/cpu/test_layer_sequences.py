"""Sequences of different lengths, and sequences in pieces: padded, packed, cached, decoded."""

from __future__ import annotations

import copy

import pytest
import torch

from sdm_rt import last_dispatch
from sdm_rt.layer import slot_selection
from sdm_rt.ops.topk import select_slots
from tests.layer_reference import make_layer
from tests.tolerances import assert_close, assert_same_bits

pytestmark = pytest.mark.usefixtures("poisoned_memory")

LENGTHS = [4, 0, 7, 1]
EVERYTHING = {
    "output_gate": True,
    "normalize_readings": True,
    "key_weighted_decay": True,
    "write_act": "l2_normalize",
}


def ragged(dtype=torch.float64):
    """Padded tokens, NaN where padding is; packed tokens; the sequences."""
    sequences = [torch.randn(length, 12, dtype=dtype) for length in LENGTHS]
    padded = torch.full((4, 7, 12), torch.nan, dtype=dtype)
    for b, sequence in enumerate(sequences):
        padded[b, : len(sequence)] = sequence
    return padded, torch.cat(sequences), sequences


def gradients(layer, outputs, upstream, x):
    layer.zero_grad()
    x.grad = None
    outputs.backward(upstream)
    return {name: parameter.grad.clone() for name, parameter in layer.named_parameters()} | {"x": x.grad}


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    "options", [{}, EVERYTHING, {"num_heads": 1}], ids=["defaults", "everything", "one head"]
)
def test_padded_and_packed_equal_each_sequence_alone(options, index):
    layer = make_layer(**options)
    padded, packed, sequences = ragged()
    alone = [layer(sequence[None]) for sequence in sequences]
    expected = torch.cat([out[0] for out, _ in alone])
    expected_bank = torch.cat([state[0] for _, state in alone])
    real = torch.arange(7) < torch.tensor(LENGTHS)[:, None]
    upstream = torch.randn(12, 12, dtype=torch.float64)
    packed.requires_grad_()
    summed = torch.cat([layer(part[None])[0][0] for part in packed.split(LENGTHS)])
    wanted = gradients(layer, summed, upstream, packed)

    padded.requires_grad_()
    out, state = layer(padded, lengths=torch.tensor(LENGTHS, dtype=index))
    assert_close("padded output", out[real], expected, torch.float64)
    assert (out[~real] == 0).all()
    assert_close("padded bank", state[0], expected_bank, torch.float64)
    assert state.cache_len == 7
    spread = torch.full((4, 7, 12), torch.nan, dtype=torch.float64)
    spread[real] = upstream
    found = gradients(layer, out, spread, padded)
    assert (found["x"][~real] == 0).all()
    found["x"] = found["x"][real]
    for name, want in wanted.items():
        assert_close(f"padded {name}", found[name], want, torch.float64)

    offsets = torch.tensor([0, 4, 4, 11, 12], dtype=index)
    out, state = layer(packed, cu_seqlens=offsets, max_seqlen=9)
    assert_close("packed output", out, expected, torch.float64)
    assert_close("packed bank", state[0], expected_bank, torch.float64)
    assert state.cache_len == 7
    found = gradients(layer, out, upstream, packed)
    for name, want in wanted.items():
        assert_close(f"packed {name}", found[name], want, torch.float64)


def test_flat_padded_input_takes_lengths_too():
    layer = make_layer()
    padded, _, _ = ragged()
    lengths = torch.tensor(LENGTHS)
    out, _ = layer(padded.view(28, 12), torch.zeros(7), lengths=lengths)
    assert torch.equal(out.view(4, 7, 12), layer(padded, lengths=lengths)[0])


@pytest.mark.parametrize("learned", [True, False])
def test_sequences_of_no_tokens_keep_the_initial_bank(learned):
    layer = make_layer(backprop_on_memory=learned, query_batchnorm=True)
    nothing = torch.zeros(0, 12, dtype=torch.float64)
    out, state = layer(torch.full((2, 3, 12), torch.nan, dtype=torch.float64), lengths=torch.tensor([0, 0]))
    packed_out, packed_state = layer(nothing, cu_seqlens=torch.tensor([0, 0, 0]))
    expected = layer.memory.repeat(2, 1) if learned else torch.zeros(100, 6, dtype=torch.float64)
    assert (out == 0).all()
    assert packed_out.shape == (0, 12)
    assert torch.equal(state[0], expected)
    assert torch.equal(packed_state[0], expected)
    assert layer.key_bn.num_batches_tracked == 0


def test_padding_does_not_disturb_batchnorm():
    """Case 26: outputs, gradients and running statistics are those of the real tokens alone."""
    padded, packed, _ = ragged()
    results = []
    for kind in ("packed", "padded"):
        layer = make_layer(query_batchnorm=True)
        if kind == "packed":
            out, _ = layer(packed, cu_seqlens=torch.tensor([0, 4, 4, 11, 12]))
        else:
            out, _ = layer(padded, lengths=torch.tensor(LENGTHS))
            out = out[torch.arange(7) < torch.tensor(LENGTHS)[:, None]]
        out.square().sum().backward()
        results.append((layer, out))
    (expected, expected_out), (layer, out) = results
    assert_close("output", out, expected_out, torch.float64)
    for name, parameter in layer.named_parameters():
        if name not in ("Wk_write.bias", "Wq_read.bias"):  # 0 but for rounding: the norm takes them out
            assert_close(name, parameter.grad, expected.get_parameter(name).grad, torch.float64)
    keys = expected.Wk_write(packed)
    assert_close("running mean", layer.key_bn.running_mean, 0.1 * keys.mean(0), torch.float64)
    assert_close("running var", layer.key_bn.running_var, 0.9 + 0.1 * keys.var(0), torch.float64)
    assert layer.query_bn.num_batches_tracked == 1
    layer.eval()
    evaluated = layer(padded, lengths=torch.tensor(LENGTHS))[0]
    alone = layer(packed[4:11][None])[0]
    assert_close("eval", evaluated[2], alone[0], torch.float64)
    assert layer.query_bn.num_batches_tracked == 1


@pytest.mark.parametrize(
    "options", [{}, EVERYTHING, {"query_batchnorm": True}], ids=["defaults", "all", "batchnorm"]
)
def test_prefill_and_decode_equal_the_parallel_forward(options):
    layer = make_layer(**options).eval()
    x = torch.randn(3, 9, 12, dtype=torch.float64)
    with torch.no_grad():
        expected, expected_state = layer(x)
        for prefill in (0, 1, 5):
            cache = layer.create_kv_cache(3, 9, torch.float64)
            pieces = [layer(x[:, :prefill], cache=cache)[0]]
            for t in range(prefill, 9):
                out, state = layer(x[:, t : t + 1], cache=cache)
                assert state is cache
                assert last_dispatch()["op"] == "sdm_decode_step"
                assert cache.cache_len == t + 1
                pieces.append(out)
            assert_close("output", torch.cat(pieces, dim=1), expected, torch.float64)
            assert_close("bank", cache[0], expected_state[0], torch.float64)


ONE_TOKEN = {
    "as many writes as reads": {"num_reads": 5},
    "other counts": {},
    "one head": {"num_heads": 1, "num_reads": 5},
    "everything": EVERYTHING | {"num_reads": 5},
    "scales": {"num_reads": 5, "read_act_scale": 2.0},
    "batchnorm": {"num_reads": 5, "query_batchnorm": True},
    "statistics": {"num_reads": 5, "log_memory_access_stats": True, "log_memory_norms": True},
}


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("options", ONE_TOKEN.values(), ids=ONE_TOKEN)
def test_one_token_has_the_bits_of_padded_sequences_of_one(options, sequences):
    """Its selections, weights and bank rows are made together, and its streams are views."""
    layer = make_layer(torch.float32, **options).eval()
    ones = torch.ones(sequences, dtype=torch.int64)
    runs = []
    for lengths in (None, ones):
        torch.manual_seed(8)
        cache = layer.create_kv_cache(sequences, 3, torch.float32)
        tensors = {}
        with torch.no_grad():
            for t in range(3):
                out, _ = layer(torch.randn(sequences, 1, 12), cache=cache, lengths=lengths)
                tensors |= {f"output {t}": out, "bank": cache[0]}
                tensors |= {f"{name} {t}": value for name, value in layer.statistics.items()}
        x = torch.randn(sequences, 1, 12, requires_grad=True)
        out, _ = layer(x, lengths=lengths)
        runs.append(tensors | gradients(layer, out, torch.randn(sequences, 1, 12), x))
    for name, tensor in runs[0].items():
        assert_same_bits(name, tensor, runs[1][name])


@pytest.mark.parametrize(("options", "selections"), [({"num_reads": 5}, 1), ({}, 2)], ids=["one", "two"])
def test_one_token_selects_once_where_counts_agree(monkeypatch, options, selections):
    layer = make_layer(torch.float32, **options)
    rows = []

    def select(raw, *arguments):
        rows.append(raw.shape[0])
        return select_slots(raw, *arguments)

    monkeypatch.setattr(slot_selection, "select_slots", select)
    with torch.no_grad():
        layer(torch.randn(3, 1, 12), cache=layer.create_kv_cache(3, 1, torch.float32))
        assert rows == [6 // selections] * selections
        rows.clear()
        layer(torch.randn(3, 2, 12))
    assert rows == [6, 6]


@pytest.mark.parametrize("name", ["write_act", "read_act"])
def test_hooks_of_an_activation_see_its_own_scores(name):
    layer = make_layer(torch.float32, num_reads=5)
    seen = []
    getattr(layer, name).register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    with torch.no_grad():
        layer(torch.randn(3, 1, 12), cache=layer.create_kv_cache(3, 1, torch.float32))
    assert seen == [(3, 2, 5)]


@pytest.mark.parametrize("name", ["write_act", "read_act"])
def test_a_replaced_forward_of_an_activation_runs_at_one_token_too(name):
    layer = make_layer(torch.float32)
    plain = copy.deepcopy(layer)
    getattr(layer, name).forward = lambda x: 0.5 * torch.softmax(x, dim=-1)
    x = torch.randn(3, 2, 12)
    with torch.no_grad():
        whole, _ = layer(x, cache=layer.create_kv_cache(3, 2, torch.float32))
        cache = layer.create_kv_cache(3, 2, torch.float32)
        steps = [layer(x[:, t : t + 1], cache=cache)[0] for t in range(2)]
        other, _ = plain(x, cache=plain.create_kv_cache(3, 2, torch.float32))
    assert_close("output", torch.cat(steps, 1), whole, torch.float32)
    assert not torch.allclose(whole, other)


def test_global_hooks_see_both_activations_at_one_token():
    layer = make_layer(torch.float32)
    seen = []

    def watch(module, inputs, output):
        if module in (layer.write_act, layer.read_act):
            seen.append(module)

    handle = torch.nn.modules.module.register_module_forward_hook(watch)
    try:
        with torch.no_grad():
            layer(torch.randn(3, 1, 12), cache=layer.create_kv_cache(3, 1, torch.float32))
    finally:
        handle.remove()
    assert seen == [layer.write_act, layer.read_act]


def test_decode_under_grad_mode_goes_through_the_differentiable_op():
    layer = make_layer()
    cache = layer.create_kv_cache(3, 1, torch.float64)
    x = torch.randn(3, 1, 12, dtype=torch.float64)
    out, _ = layer(x, cache=cache)
    assert last_dispatch()["op"] == "sdm_write_read"
    out.sum().backward()
    assert layer.Wv_write.weight.grad.abs().sum() > 0
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    layer(x, cache=cache)
    assert last_dispatch()["op"] == "sdm_decode_step"


def test_a_state_of_a_forward_continues():
    layer = make_layer()
    x = torch.randn(2, 8, 12, dtype=torch.float64)
    with torch.no_grad():
        expected = layer(x)[0]
        first, state = layer(x[:, :3])
        second, _ = layer(x[:, 3:], cache=state)
    assert state.cache_len == 8
    assert_close("output", torch.cat([first, second], dim=1), expected, torch.float64)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_ragged_prefill_and_decode(packed):
    layer = make_layer()
    _, tokens, sequences = ragged()
    padded = torch.zeros(4, 7, 12, dtype=torch.float64)
    for b, sequence in enumerate(sequences):
        padded[b, : len(sequence)] = sequence
    step = torch.randn(4, 1, 12, dtype=torch.float64)
    runs = torch.tensor([1, 1, 0, 1])
    with torch.no_grad():
        cache = layer.create_kv_cache(4, 8, torch.float64)
        if packed:
            layer(tokens, cache=cache, cu_seqlens=torch.tensor([0, 4, 4, 11, 12]))
        else:
            layer(padded, cache=cache, lengths=torch.tensor(LENGTHS))
        before = cache[0].clone().view(4, 50, 6)
        out, _ = layer(step, cache=cache, lengths=runs)
        assert last_dispatch()["op"] == "sdm_decode_step"
        for b, sequence in enumerate(sequences):
            if runs[b]:
                alone = layer(torch.cat([sequence, step[b]])[None])
                assert_close("output", out[b, 0], alone[0][0, -1], torch.float64)
                assert_close("bank", cache[0].view(4, 50, 6)[b], alone[1][0], torch.float64)
            else:
                assert (out[b] == 0).all()
                assert torch.equal(cache[0].view(4, 50, 6)[b], before[b])


@pytest.mark.parametrize("bank", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_bank_of_another_dtype_keeps_it(bank):
    layer = make_layer(torch.float32, slots_per_head=9, num_writes=9, num_reads=9)
    x = torch.randn(2, 4, 12)
    with torch.no_grad():
        expected = layer(x)[0]
        cache = layer.create_kv_cache(2, 5, bank)
        pieces = [layer(x[:, :3], cache=cache)[0], layer(x[:, 3:], cache=cache)[0]]
    assert cache[0].dtype == bank
    assert all(piece.dtype == torch.float32 for piece in pieces)
    assert_close("output", torch.cat(pieces, dim=1), expected, bank if bank.itemsize == 2 else torch.float32)


def test_inference_mode():
    layer = make_layer()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    with torch.inference_mode():
        expected = layer(x)[0]
        cache = layer.create_kv_cache(2, 5, torch.float64)
        pieces = [layer(x[:, t : t + 1], cache=cache)[0] for t in range(5)]
        assert_close("output", torch.cat(pieces, dim=1), expected, torch.float64)
        cache.reset()
        assert torch.equal(cache[0], layer.memory.repeat(2, 1))
