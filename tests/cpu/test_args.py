"""SparseDeltaMemoryArgs: fields, defaults, ranges."""

from __future__ import annotations

import dataclasses
import warnings

import pytest

from sdm_rt import SparseDeltaMemory, SparseDeltaMemoryArgs

DEFAULTS = {
    "dim": -1,
    "num_writes": 64,
    "num_reads": 64,
    "slots_per_head": 10000,
    "chunk_size": None,
    "read_act": "Softmax",
    "write_act": "Softmax",
    "read_act_scale": 1.0,
    "write_act_scale": 1.0,
    "normalize_readings": False,
    "norm_eps": 1e-6,
    "dt_bias_init": 0.0,
    "A_init_range": (0.0, 16.0),
    "backprop_on_memory": True,
    "output_gate": False,
    "query_batchnorm": False,
    "log_memory_access_stats": False,
    "log_memory_norms": False,
    "num_heads": 1,
    "key_weighted_decay": False,
    "snapshot_quant": "none",
    "cuda_graph": False,
    "grad_bank_fp32": False,
    "product_key_factor_dims": None,
    "memory_block_size": None,
}


def test_fields_and_defaults():
    assert dataclasses.asdict(SparseDeltaMemoryArgs()) == DEFAULTS


def test_derived_values():
    args = SparseDeltaMemoryArgs(dim=96, num_heads=3)
    assert (args.head_dim, args.factors, args.tokens_per_chunk) == (32, (100, 100), 64)
    args = SparseDeltaMemoryArgs(dim=8, slots_per_head=30, product_key_factor_dims=[2, 3, 5], chunk_size=16)
    assert (args.factors, args.tokens_per_chunk) == ((2, 3, 5), 16)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dim": 0}, "dim: expected a value at least 1, got 0"),
        ({"dim": -2}, "dim: expected a value at least 1, got -2"),
        ({"dim": 10, "num_heads": 3}, "dim: expected a multiple of num_heads = 3, got 10"),
        ({"dim": 32768, "num_heads": 1}, "dim: expected dim / num_heads in 1..16384, got 32768 / 1"),
        ({"num_heads": 0}, "num_heads: expected a value at least 1, got 0"),
        ({"num_writes": 0}, "num_writes: expected a value in 1..256, got 0"),
        ({"num_writes": 257}, "num_writes: expected a value in 1..256, got 257"),
        ({"num_reads": 257}, "num_reads: expected a value in 1..256, got 257"),
        ({"slots_per_head": 0}, "slots_per_head: expected a value at least 1, got 0"),
        (
            {"slots_per_head": 12},
            "slots_per_head: expected a square number, or product_key_factor_dims with that product, got 12",
        ),
        (
            {"slots_per_head": 12, "product_key_factor_dims": (3, 5)},
            "product_key_factor_dims: expected widths with the product slots_per_head = 12, got (3, 5)",
        ),
        (
            {"slots_per_head": 1, "product_key_factor_dims": ()},
            "product_key_factor_dims: expected widths with the product slots_per_head = 1, got ()",
        ),
        (
            {"slots_per_head": 12, "product_key_factor_dims": (12, 0)},
            "product_key_factor_dims[1]: expected a value at least 1, got 0",
        ),
        ({"chunk_size": 0}, "chunk_size: expected a value in 1..256, got 0"),
        ({"chunk_size": 257}, "chunk_size: expected a value in 1..256, got 257"),
        (
            {"snapshot_quant": "fp4"},
            "snapshot_quant: expected one of 'none', 'bf16', 'fp8', 'int4', got 'fp4'",
        ),
        ({"norm_eps": -1e-6}, "norm_eps: expected a value above 0, got -1e-06"),
        ({"norm_eps": 0.0}, "norm_eps: expected a value above 0, got 0.0"),
        (
            {"write_act": "l2_normalize", "write_act_scale": 2.0},
            "write_act_scale: expected 1.0 with write_act='l2_normalize', which takes no scale, got 2.0",
        ),
        ({"read_act_scale": float("nan")}, "read_act_scale: expected a finite number, got nan"),
        ({"A_init_range": (2.0, 1.0)}, "A_init_range: expected 0 <= low <= high, got (2.0, 1.0)"),
        ({"A_init_range": (-1.0, 1.0)}, "A_init_range: expected 0 <= low <= high, got (-1.0, 1.0)"),
        ({"A_init_range": (1.0,)}, "A_init_range: expected two numbers (low, high), got (1.0,)"),
    ],
)
def test_values_outside_their_range(fields, message):
    with pytest.raises(ValueError, match="expected") as error:
        SparseDeltaMemoryArgs(**fields)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_writes": 8.0}, "num_writes: expected an int, got float"),
        ({"num_reads": True}, "num_reads: expected an int, got bool"),
        ({"write_act_scale": "2"}, "write_act_scale: expected a number, got str"),
        ({"output_gate": "no"}, "output_gate: expected a bool, got str"),
        ({"A_init_range": 5.0}, "A_init_range: expected a sequence, got float"),
        ({"product_key_factor_dims": 5}, "product_key_factor_dims: expected a sequence, got int"),
    ],
)
def test_values_of_a_wrong_type(fields, message):
    with pytest.raises(TypeError) as error:
        SparseDeltaMemoryArgs(**fields)
    assert str(error.value) == message


@pytest.mark.parametrize("field", ["read_act", "write_act"])
@pytest.mark.parametrize("name", ["softmax", "Linear", "GLU", "Softmax2d", "MultiheadAttention", "torch", 3])
def test_activations_that_are_none(field, name):
    with pytest.raises(ValueError, match=rf'{field}: expected "Softmax", "l2_normalize" or .*, got {name!r}'):
        SparseDeltaMemoryArgs(**{field: name})


@pytest.mark.parametrize(
    "name", ["Softmax", "l2_normalize", "ReLU", "SiLU", "Tanh", "Identity", "LogSoftmax"]
)
def test_activations_that_are(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert SparseDeltaMemoryArgs(read_act=name, write_act=name).read_act == name


def test_memory_block_size_is_the_former_chunk_size():
    with pytest.warns(
        DeprecationWarning, match="memory_block_size is the former name of chunk_size"
    ) as record:
        args = SparseDeltaMemoryArgs(memory_block_size=32)
    assert record[0].filename == __file__
    assert (args.chunk_size, args.tokens_per_chunk) == (32, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dataclasses.replace(args, chunk_size=16).chunk_size == 16
    with pytest.warns(DeprecationWarning, match="memory_block_size"):
        assert SparseDeltaMemoryArgs(memory_block_size=32, chunk_size=32).chunk_size == 32


def test_memory_block_size_must_not_contradict():
    message = "memory_block_size: expected the value of chunk_size, 64, or None, got 32"
    with (
        pytest.warns(DeprecationWarning, match="memory_block_size"),
        pytest.raises(ValueError, match=message),
    ):
        SparseDeltaMemoryArgs(memory_block_size=32, chunk_size=64)
    with (
        pytest.warns(DeprecationWarning, match="memory_block_size"),
        pytest.raises(ValueError, match=r"memory_block_size: .* 1\.\.256, got 0"),
    ):
        SparseDeltaMemoryArgs(memory_block_size=0)


def test_a_layer_checks_its_args_again():
    with pytest.raises(
        ValueError, match=r"dim: expected a value at least 1 to build a layer, got -1 \(not set\)"
    ):
        SparseDeltaMemory(SparseDeltaMemoryArgs(), 0)
    args = SparseDeltaMemoryArgs(dim=8)
    args.num_writes = 1000
    with pytest.raises(ValueError, match=r"num_writes: expected a value in 1\.\.256, got 1000"):
        SparseDeltaMemory(args, 0)
    with pytest.raises(TypeError, match="args: expected SparseDeltaMemoryArgs, got dict"):
        SparseDeltaMemory({"dim": 8}, 0)
