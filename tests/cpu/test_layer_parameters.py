"""Names, marks and initial values of the layer's parameters; its repr."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from sdm_rt import SparseDeltaMemory, SparseDeltaMemoryArgs
from sdm_rt.layer import weights
from tests.layer_reference import SHAPE, make_layer


def test_names_in_the_state_dict():
    linear = ("Wq_read", "Wk_write", "Wv_write", "a_proj", "b_proj", "Wo")
    plain = {f"{name}.{kind}" for name in linear for kind in ("weight", "bias")} | {
        "A_log",
        "dt_bias",
        "memory",
    }
    assert set(make_layer().state_dict()) == plain
    norm = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    extra = {f"{name}.{kind}" for name in ("query_bn", "key_bn") for kind in norm}
    extra |= {"readings_norm.weight", "readings_norm.bias", "Wog.weight", "Wog.bias"}
    every = {
        "query_batchnorm": True,
        "normalize_readings": True,
        "output_gate": True,
        "backprop_on_memory": False,
    }
    assert set(make_layer(**every).state_dict()) == (plain | extra) - {"memory"}


def test_shapes_and_marks_of_parameters():
    layer = make_layer(output_gate=True, query_batchnorm=True, normalize_readings=True)
    shapes = {name: tuple(value.shape) for name, value in layer.state_dict().items()}
    expected = {
        "Wq_read.weight": (20, 12),
        "Wk_write.bias": (20,),
        "Wv_write.weight": (12, 12),
        "Wo.weight": (12, 12),
        "Wog.weight": (12, 12),
        "a_proj.weight": (2, 12),
        "b_proj.bias": (2,),
        "A_log": (2,),
        "dt_bias": (2,),
        "memory": (50, 6),
        "readings_norm.weight": (6,),
        "query_bn.weight": (20,),
        "key_bn.running_var": (20,),
    }
    assert expected.items() <= shapes.items()
    marks = {name: vars(value).keys() for name, value in layer.named_parameters() if vars(value)}
    assert marks == {
        "A_log": {"_no_weight_decay"},
        "dt_bias": {"_no_weight_decay"},
        "memory": {"_sdm_memory_bank"},
    }


@pytest.mark.parametrize("path", ["to_empty", "assign", "half"])
def test_marks_stay_on_parameters_made_anew(path):
    args = SparseDeltaMemoryArgs(**SHAPE)
    layer = SparseDeltaMemory(args, 0)
    if path == "to_empty":
        with torch.device("meta"):
            layer = SparseDeltaMemory(args, 0)
        layer = layer.to_empty(device="cpu")
        layer.init_weights()
    elif path == "assign":
        layer.load_state_dict(SparseDeltaMemory(args, 1).state_dict(), assign=True)
    else:
        layer.bfloat16()
    assert layer.A_log._no_weight_decay
    assert layer.dt_bias._no_weight_decay
    assert layer.memory._sdm_memory_bank


def test_initial_values():
    layer = SparseDeltaMemory(
        SparseDeltaMemoryArgs(dim=256, num_heads=64, slots_per_head=1024, A_init_range=(0.0, 4.0)), 0
    )
    for weight in (
        layer.Wq_read.weight,
        layer.Wv_write.weight,
        layer.Wo.weight,
        layer.a_proj.weight,
        layer.memory,
    ):
        assert weight.abs().max() <= 3 / 16
        assert weight.std().item() == pytest.approx(
            1 / 16, rel=0.03
        )  # a normal cut at 3 std keeps 0.987 of its std
    assert not any(bias.any() for name, bias in layer.named_parameters() if name.endswith(".bias"))
    rate, step = layer.A_log.exp(), torch.nn.functional.softplus(layer.dt_bias)
    assert rate.min() >= 0.99e-4
    assert rate.max() <= 4
    assert rate.max() > 3
    assert step.min() >= 0.99e-3
    assert step.max() <= 1.01e-1
    assert step.log().std().item() == pytest.approx(math.log(100) / math.sqrt(12), rel=0.25)


@pytest.mark.parametrize(("drawn", "step"), [(1.0, 1.0), (0.05, 0.05), (1e-6, 1e-4)])
def test_dt_bias_is_the_inverse_softplus_of_the_drawn_step(monkeypatch, drawn, step):
    monkeypatch.setattr(weights, "TIME_STEP_RANGE", (drawn, drawn))
    layer = SparseDeltaMemory(SparseDeltaMemoryArgs(**SHAPE, A_init_range=(0.0, 0.0)), 0)
    torch.testing.assert_close(torch.nn.functional.softplus(layer.dt_bias), torch.full((2,), step))
    torch.testing.assert_close(layer.A_log, torch.full((2,), math.log(1e-4)))


def test_init_weights_scales():
    layer = SparseDeltaMemory(SparseDeltaMemoryArgs(dim=256, slots_per_head=1024, query_batchnorm=True), 0)
    with torch.no_grad():
        for value in layer.state_dict().values():
            value.fill_(7)
    layer.init_weights(init_std=0.02, factor=4.0, width_scaling=0.5)
    assert layer.Wo.weight.std().item() == pytest.approx(0.0025, rel=0.03)
    assert layer.Wk_write.weight.std().item() == pytest.approx(0.01, rel=0.03)
    assert layer.memory.std().item() == pytest.approx(0.02, rel=0.03)
    assert layer.key_bn.running_mean.abs().max() == 0
    assert layer.query_bn.weight.min() == 1
    for arguments, name in (
        ({"init_std": 0.0}, "init_std"),
        ({"factor": -1.0}, "factor"),
        ({"width_scaling": 0.0}, "width_scaling"),
    ):
        with pytest.raises(ValueError, match=f"{name}: expected a positive number, got"):
            layer.init_weights(**arguments)
    with pytest.raises(TypeError, match="factor: expected a number, got str"):
        layer.init_weights(factor="4")
    layer.init_weights(np.float32(0.02), Fraction(4), torch.tensor(0.5))
    assert layer.Wo.weight.std().item() == pytest.approx(0.0025, rel=0.03)


def test_init_weights_fills_every_parameter_and_buffer():
    args = SparseDeltaMemoryArgs(**SHAPE, query_batchnorm=True, normalize_readings=True, read_act="PReLU")
    with torch.device("meta"):
        layer = SparseDeltaMemory(args, 0)
    layer.to_empty(device="cpu")
    with torch.no_grad():
        for value in layer.state_dict().values():
            value.fill_(float("nan") if value.is_floating_point() else 7)
    layer.init_weights()
    assert layer.read_act.weight.tolist() == [0.25]
    for name, value in layer.state_dict().items():
        assert torch.isfinite(value).all(), name
        assert not (name.endswith("num_batches_tracked") and value), name


def test_a_layer_keeps_arguments_of_its_own():
    widths = [5, 5]
    args = SparseDeltaMemoryArgs(**SHAPE, product_key_factor_dims=widths)
    layer = SparseDeltaMemory(args, 0)
    args.dim, args.key_weighted_decay = 24, True
    widths.append(2)
    assert layer(torch.zeros(1, 3, 12))[0].shape == (1, 3, 12)
    assert layer.args == SparseDeltaMemoryArgs(**SHAPE, product_key_factor_dims=[5, 5])


def test_the_same_seed_gives_the_same_layer():
    states = []
    for _ in range(2):
        torch.manual_seed(5)
        states.append(SparseDeltaMemory(SparseDeltaMemoryArgs(**SHAPE), 0).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_repr_tells_the_shape():
    text = repr(SparseDeltaMemory(SparseDeltaMemoryArgs(**SHAPE, read_act_scale=2.0), 7))
    assert (
        "layer_id=7, dim=12, num_heads=2, slots_per_head=25, factors=(5, 5), num_writes=5, num_reads=4"
        in text
    )
    assert "(read_act): ScaledSoftmax(scale=2.0)" in text
