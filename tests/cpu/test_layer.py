"""The layer against its formulas: outputs, banks, gradients, options."""

from __future__ import annotations

import warnings

import pytest
import torch

from sdm_rt import l2_normalize, last_dispatch
from sdm_rt.layer import layer as layer_module
from tests import oracle
from tests.layer_reference import layer_reference, make_layer
from tests.tolerances import SNAPSHOT_GRADIENT, TOLERANCES, Tolerance, assert_close, assert_same_bits

pytestmark = pytest.mark.usefixtures("poisoned_memory")

OPTIONS = {
    "defaults": {},
    "zeros as initial bank": {"backprop_on_memory": False},
    "output gate": {"output_gate": True},
    "readings norm": {"normalize_readings": True, "norm_eps": 1e-3},
    "batchnorm": {"query_batchnorm": True},
    "gate per write": {"key_weighted_decay": True},
    "l2 weights": {"read_act": "l2_normalize", "write_act": "l2_normalize"},
    "scaled softmax": {"read_act_scale": 3.0, "write_act_scale": 0.5},
    "signed weights": {"read_act": "Identity", "write_act": "SiLU", "key_weighted_decay": True},
    "one factor": {"slots_per_head": 7, "product_key_factor_dims": (7,)},
    "three factors": {"slots_per_head": 24, "product_key_factor_dims": (2, 3, 4)},
    "one head": {"num_heads": 1},
    "more entries than slots": {"slots_per_head": 4, "num_writes": 9, "num_reads": 256},
    "everything": {
        "output_gate": True,
        "normalize_readings": True,
        "query_batchnorm": True,
        "key_weighted_decay": True,
        "write_act": "l2_normalize",
        "read_act": "ReLU",
    },
}


def reference_of(layer, sequences):
    """Outputs, bank, leaves by name, and leaf sequences of the formulas."""
    leaves = {name: value.detach().double().requires_grad_() for name, value in layer.named_parameters()}
    buffers = {name: value.detach().clone().double() for name, value in layer.named_buffers()}
    sequences = [sequence.detach().double().requires_grad_() for sequence in sequences]
    outputs, bank = layer_reference(layer.args, {**leaves, **buffers}, sequences, layer.training)
    return outputs, bank, leaves, sequences


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", OPTIONS)
def test_equals_the_formulas(name, training):
    layer = make_layer(**OPTIONS[name]).train(training)
    if layer.key_bn is not None:
        layer.key_bn.running_mean.normal_()
        layer.query_bn.running_var.uniform_(0.5, 2)
    x = torch.randn(2, 7, 12, dtype=torch.float64, requires_grad=True)
    expected, expected_bank, leaves, sequences = reference_of(layer, x)
    out, state = layer(x)
    expected = torch.stack(expected)
    assert_close("output", out, expected, torch.float64)
    assert_close("bank", state[0], expected_bank, torch.float64)

    upstream = torch.randn_like(out)
    wanted = torch.autograd.grad(expected, [*leaves.values(), *sequences], upstream)
    parameters = dict(layer.named_parameters())
    found = torch.autograd.grad(out, [x, *parameters.values()], upstream)
    assert_close("x", found[0], torch.stack(wanted[len(leaves) :]), torch.float64)
    for parameter, got, want in zip(parameters, found[1:], wanted, strict=False):
        # BatchNorm takes out what a key's bias adds: that gradient is 0 and only rounding is left of it.
        bias_under_norm = (
            layer.key_bn is not None and training and parameter in ("Wk_write.bias", "Wq_read.bias")
        )
        tolerance = Tolerance(0.0, 1e-13, "rounding of a sum that cancels to 0") if bias_under_norm else None
        assert_close(parameter, got, want, torch.float64, tolerance=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes_equal_the_formulas(dtype):
    # All slots are selected, so that no rounding of a score can change the selection.
    layer = make_layer(
        dtype, slots_per_head=9, num_writes=9, num_reads=9, normalize_readings=True, output_gate=True
    )
    x = torch.randn(2, 7, 12).to(dtype).requires_grad_()
    expected, expected_bank, leaves, sequences = reference_of(layer, x)
    out, state = layer(x)
    assert (out.dtype, state[0].dtype) == (dtype, dtype)
    entry = TOLERANCES[dtype]
    tolerance = Tolerance(
        4 * entry.relative,
        4 * entry.floor,
        "four times the op's: projections and norms round before and after it",
    )
    assert_close("output", out, torch.stack(expected), dtype, tolerance=tolerance)
    assert_close("bank", state[0], expected_bank, dtype, tolerance=tolerance)
    upstream = torch.randn(out.shape).to(dtype)
    wanted = torch.autograd.grad(torch.stack(expected), [*leaves.values(), *sequences], upstream.double())
    out.backward(upstream)
    for (name, parameter), want in zip(layer.named_parameters(), wanted, strict=False):
        assert parameter.grad.dtype == dtype
        assert_close(name, parameter.grad, want, dtype, tolerance=tolerance)
    assert_close("x", x.grad, torch.stack(wanted[len(leaves) :]), dtype, tolerance=tolerance)


def test_dense_limit_is_gated_delta_net():
    """One factor, all slots, unit keys: the bank is the transposed state of arXiv 2412.06464."""
    keys = 6
    layer = make_layer(
        slots_per_head=keys,
        product_key_factor_dims=(keys,),
        num_writes=keys,
        num_reads=keys,
        write_act="l2_normalize",
        read_act="l2_normalize",
    )
    x = torch.randn(1, 9, 12, dtype=torch.float64)
    k, q = (projection(x[0]).view(9, 2, keys) for projection in (layer.Wk_write, layer.Wq_read))
    v = layer.Wv_write(x[0]).view(9, 2, 6)
    step = torch.nn.functional.softplus(layer.a_proj(x[0]) + layer.dt_bias)
    alpha, beta = torch.exp(-layer.A_log.exp() * step), torch.sigmoid(layer.b_proj(x[0]))
    heads = []
    for h in range(2):
        state = layer.memory[h * keys : (h + 1) * keys].T
        unit_k, unit_q = (z[:, h] / z[:, h].norm(dim=-1, keepdim=True) for z in (k, q))
        outputs, _ = oracle.gated_delta_net(state, unit_k, v[:, h], unit_q, alpha[:, h], beta[:, h])
        heads.append(outputs)
    assert_close("output", layer(x)[0][0], layer.Wo(torch.cat(heads, dim=-1)), torch.float64)


def test_flat_input_takes_its_length_from_freqs_cis():
    layer = make_layer()
    x = torch.randn(3, 5, 12, dtype=torch.float64)
    expected = layer(x)[0]
    out, state = layer(x.view(15, 12), torch.zeros(5, 2))
    assert out.shape == (15, 12)
    assert torch.equal(out.view(3, 5, 12), expected)
    assert state.cache_len == 5
    assert torch.equal(layer(x, torch.zeros(1, 2))[0], expected)


@pytest.mark.parametrize("view", ["transposed", "strided", "expanded", "offset"])
def test_any_strides(view):
    layer = make_layer()
    base = torch.randn(24, 5, 30, dtype=torch.float64)
    x = {
        "transposed": base[:12, :, :3].transpose(0, 2),
        "strided": base[:3, :, 1:25:2],
        "expanded": base[:1, :, :12].expand(3, 5, 12),
        "offset": base.flatten()[1:181].view(3, 5, 12),
    }[view]
    # The projections' matrix products may round by alignment, so not bit for bit.
    expected = layer(x.clone(memory_format=torch.contiguous_format))[0]
    assert_close("output", layer(x)[0], expected, torch.float64)


def test_empty_inputs():
    layer = make_layer(query_batchnorm=True)
    for shape in ((0, 5, 12), (2, 0, 12), (0, 0, 12)):
        x = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
        out, state = layer(x)
        out.sum().backward()
        assert out.shape == x.grad.shape == shape
        assert torch.equal(state[0], layer.memory.detach().repeat(shape[0], 1))


def test_train_and_eval_modes_give_the_same_bits():
    layer = make_layer(torch.float32, normalize_readings=True, output_gate=True)
    x = torch.randn(2, 7, 12)
    out, state = layer(x)
    bank = state[0].clone()
    layer.eval()
    with torch.no_grad():
        evaluated, evaluated_state = layer(x)
    assert torch.equal(out, evaluated)
    assert torch.equal(bank, evaluated_state[0])
    assert torch.equal(layer(x)[0], evaluated)


def test_a_sequence_alone_gives_the_same_values():
    layer = make_layer()
    x = torch.randn(4, 6, 12, dtype=torch.float64)
    out, state = layer(x)
    for b in range(4):
        alone, alone_state = layer(x[b : b + 1])
        assert_close("output", alone[0], out[b], torch.float64)
        assert_close("bank", alone_state[0], state[0].view(4, 50, 6)[b], torch.float64)


def test_later_tokens_change_nothing_before_them():
    layer = make_layer(torch.float32)
    x = torch.randn(2, 9, 12)
    out = layer(x)[0]
    x[:, 5:] = torch.nan
    assert torch.equal(layer(x)[0][:, :5], out[:, :5])


@pytest.mark.parametrize("mode", ["bf16", "fp8", "int4"])
def test_quantized_snapshots_keep_the_forward_and_approximate_gradients(mode):
    layer = make_layer(torch.float32, slots_per_head=16, num_writes=16, num_reads=16)
    x = torch.randn(2, 30, 12)
    exact = layer(x)[0]
    exact.square().sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
    layer.zero_grad()
    layer.args.snapshot_quant = mode
    out = layer(x)[0]
    assert torch.equal(out, exact)
    assert last_dispatch()["snapshot_quant"] == mode
    out.square().sum().backward()
    assert torch.equal(layer.Wv_write.weight.grad, gradients["Wv_write.weight"])
    # The keys' own gradient; a head of 6 columns, so twice the figure of the table's wide rows.
    table = SNAPSHOT_GRADIENT[mode]
    tolerance = Tolerance(2 * table.relative, table.floor, "twice the table's")
    assert_close(
        "Wk_write",
        layer.Wk_write.weight.grad,
        gradients["Wk_write.weight"],
        torch.float32,
        tolerance=tolerance,
    )
    assert not torch.equal(layer.Wk_write.weight.grad, gradients["Wk_write.weight"])


def test_a_mask_warns_once_and_has_no_effect():
    layer = make_layer()
    x = torch.randn(1, 4, 12, dtype=torch.float64)
    layer_module._warn_mask_has_no_effect.cache_clear()
    with pytest.warns(UserWarning, match="mask has no effect, the layer is causal; pass lengths") as record:
        out = layer(x, None, torch.ones(4, 4))[0]
    assert record[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(layer(x, mask=torch.ones(4, 4))[0], out)
        assert torch.equal(layer(x, mask="causal")[0], out)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_l2_normalize(dtype):
    x = torch.randn(3, 4, 5).to(dtype)
    x[0, 0] = 0
    for dim in (-1, 1):
        out = l2_normalize(x, dim=dim)
        assert out.dtype == dtype
        expected = torch.nn.functional.normalize(x.double(), dim=dim)
        assert_close("l2_normalize", out, expected, dtype)
    assert (l2_normalize(x)[0, 0] == 0).all()
    assert (l2_normalize(torch.full((2,), 3.0), eps=6.0) == 0.5).all()


@pytest.mark.parametrize("learned", [False, True])
def test_projections_may_be_any_modules(learned):
    """As wrappers of low rank or of quantized weights are: modules without a weight of their own."""
    layer, x = make_layer(torch.float32, backprop_on_memory=learned), torch.randn(2, 3, 12)
    want = layer(x)[0]
    for name in ("Wq_read", "Wk_write", "Wv_write", "a_proj", "b_proj", "Wo"):
        setattr(layer, name, torch.nn.Sequential(getattr(layer, name)))
    assert_same_bits("output", layer(x)[0], want)
    with torch.no_grad():
        got = layer(x, cache=layer.create_kv_cache(2, 3, torch.float32))[0]
    assert_same_bits("output with a cache", got, want)
