"""The operators of torch.library: opcheck, the compiler, fake and meta tensors, counts of operations."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.flop_counter import FlopCounterMode

from sdm_rt import SparseDeltaMemory, SparseDeltaMemoryArgs, product_key_topk, sdm_decode_step, sdm_write_read
from sdm_rt.ops.library import is_traced
from tests.layer_reference import SHAPE, make_layer
from tests.problems import GRADIENTS, Problem, make_problem
from tests.tolerances import assert_close, assert_same_bits

OPERATORS = torch.ops.sdm_rt
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
PROBLEMS = {
    "plain": make_problem(2, 7, 3, 4, 5, 8),
    "repeats": make_problem(2, 7, 3, 4, 5, 8, writes="repeats", gate_per_write=True),
    "lengths": make_problem(3, 6, 2, 3, 4, 5, lengths=(6, 0, 2)),
    "one token": make_problem(1, 1, 1, 1, 1, 1),
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def flat_arguments(
    problem: Problem, requires_grad: bool, packed: bool = False, mode: str = "none"
) -> list[Any]:
    """The arguments of the write-read operators."""
    tensors = [problem.pack(x) if packed else x.flatten(0, 1) for x in problem.inputs().values()]
    tensors = [
        x.clone().requires_grad_(requires_grad and x.is_floating_point()) for x in [problem.memory, *tensors]
    ]
    lengths = torch.tensor(problem.lengths) if problem.lengths is not None and not packed else None
    offsets = problem.cu_seqlens() if packed else None
    longest = tensors[1].shape[0] if packed else problem.tokens
    numbers = [problem.streams, problem.slots, False, longest, 64, mode, False, None, False]
    return [*tensors, lengths, offsets, *numbers]


# Not "fp8": opcheck sums what an operator returns, and PyTorch sums no float8.
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    ("name", "packed", "mode"),
    [("repeats", False, "int4"), ("lengths", False, "none"), ("lengths", True, "bf16")],
)
def test_opcheck_of_write_read(name: str, packed: bool, mode: str, requires_grad: bool) -> None:
    problem = PROBLEMS[name].cast(torch.float32)
    arguments = flat_arguments(problem, requires_grad, packed, mode)
    torch.library.opcheck(OPERATORS.write_read.default, arguments)
    if not requires_grad:
        torch.library.opcheck(OPERATORS.write_read_inplace.default, arguments)
        readings, final, saved = OPERATORS.write_read(*arguments)
        for grads in ((torch.ones_like(readings), None), (None, torch.ones_like(final))):
            torch.library.opcheck(
                OPERATORS.write_read_backward.default, (final, saved, *grads, *arguments[1:])
            )


def test_opcheck_of_decode_and_topk() -> None:
    problem = make_problem(2, 1, 3, 4, 5, 8).cast(torch.float32)
    step = [x.flatten(0, 1) for x in problem.inputs().values()]
    for lengths in (None, torch.tensor([1, 0])):
        torch.library.opcheck(OPERATORS.decode_step.default, (problem.memory.clone(), *step, lengths))
    scores = torch.randn(2, 3, 8, requires_grad=True)
    torch.library.opcheck(OPERATORS.product_key_topk.default, (scores, [4, 4], 5))
    val, idx = OPERATORS.product_key_topk(scores.detach(), [4, 4], 5)
    torch.library.opcheck(OPERATORS.product_key_topk_backward.default, (val, idx, [4, 4], 5))


def test_plain_eager_calls_do_without_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("an operator in a plain call")

    monkeypatch.setattr("sdm_rt.ops.write_read.traced_write_read", refuse)
    problem = PROBLEMS["plain"]
    for return_final_bank in (False, True):
        run(sdm_write_read, problem, return_final_bank)
    assert not is_traced(problem.memory)


def run(
    op: Callable[..., Any], problem: Problem, return_final_bank: bool, packed: bool = False
) -> dict[str, Tensor]:
    """Forward and backward from a bank that is no leaf; all results by name."""
    leaves = {name: getattr(problem, name).clone().requires_grad_() for name in GRADIENTS}
    arguments = {name: leaves.get(name, x) for name, x in problem.inputs().items()}
    options = problem.options()
    grad_readings = problem.grad_readings.flatten(0, 1)
    if packed:
        arguments = {name: problem.pack(x) for name, x in arguments.items()}
        options.pop("lengths", None)
        options |= {"cu_seqlens": problem.cu_seqlens(), "max_seqlen": problem.tokens}
        grad_readings = problem.pack(problem.grad_readings)
    bank = leaves["memory"] * 1
    out = op(bank, **arguments, **options, return_final_bank=return_final_bank)
    outputs = out if return_final_bank else (out,)
    results = {
        "readings": outputs[0].detach(),
        "bank": (outputs[1] if return_final_bank else bank).detach().clone(),
    }
    torch.autograd.backward(outputs, (grad_readings, problem.grad_bank)[: len(outputs)])
    return results | {f"gradient of {name}": leaf.grad for name, leaf in leaves.items()}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert_same_bits(name, got[name], value)


# Case 24.
@pytest.mark.parametrize(
    ("name", "packed", "return_final_bank", "dynamic"),
    [
        ("repeats", False, True, False),
        ("repeats", False, False, True),
        ("lengths", False, False, False),
        ("lengths", True, True, True),
    ],
)
def test_compiled_op_has_the_bits_of_the_eager_one(
    name: str, packed: bool, return_final_bank: bool, dynamic: bool
) -> None:
    problem = PROBLEMS[name].cast(torch.float32)
    want = run(sdm_write_read, problem, return_final_bank, packed)
    compiled = torch.compile(sdm_write_read, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert_same(run(compiled, problem, return_final_bank, packed), want)


def test_a_dynamic_graph_serves_other_lengths() -> None:
    compiled = torch.compile(sdm_write_read, fullgraph=True, backend="aot_eager", dynamic=True)
    run(compiled, make_problem(2, 7, 3, 4, 5, 8), True)
    with torch.compiler.set_stance("fail_on_recompile"):
        for tokens in (9, 30):
            problem = make_problem(2, tokens, 3, 4, 5, 8)
            assert_same(run(compiled, problem, True), run(sdm_write_read, problem, True))


@pytest.mark.parametrize("return_final_bank", [False, True])
def test_compiled_op_without_gradients(return_final_bank: bool) -> None:
    problem = PROBLEMS["repeats"].cast(torch.bfloat16)
    compiled = torch.compile(sdm_write_read, fullgraph=True, backend="aot_eager")
    found = []
    for op in (sdm_write_read, compiled):
        bank = problem.memory.clone()
        with torch.no_grad():
            out = op(bank, **problem.inputs(), **problem.options(), return_final_bank=return_final_bank)
        found.append((bank, *(out if return_final_bank else (out,))))
    for want, got in zip(*found, strict=True):
        assert_same_bits("result", got, want)


def test_inductor_compiles_the_op() -> None:
    problem = PROBLEMS["lengths"].cast(torch.float32)
    want = run(sdm_write_read, problem, True)
    assert_same(run(torch.compile(sdm_write_read, fullgraph=True), problem, True), want)


def test_a_compiled_in_place_backward_does_not_restore_the_bank() -> None:
    problem = PROBLEMS["plain"]
    bank = problem.memory.clone()
    v = problem.v.clone().requires_grad_()
    compiled = torch.compile(sdm_write_read, fullgraph=True, backend="aot_eager")
    readings = compiled(bank, **(problem.inputs() | {"v": v}), **problem.options())
    after = bank.clone()
    assert not torch.equal(after, problem.memory)
    readings.sum().backward()
    assert_same_bits("bank", bank, after)


def test_compiled_calls_check_values_before_anything_changes() -> None:
    problem = PROBLEMS["plain"]
    bank = problem.memory.clone()
    compiled = torch.compile(sdm_write_read, fullgraph=True, backend="aot_eager")
    arguments = problem.inputs() | {"k_idx": problem.k_idx + 100}
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=r"^k_idx: expected bank rows in 0\.\.7 for stream 0"),
    ):
        compiled(bank, **arguments, **problem.options())
    assert_same_bits("bank", bank, problem.memory)


@pytest.mark.parametrize("gradient_of", ["readings", "bank"])
def test_one_gradient_of_two(gradient_of: str) -> None:
    problem = PROBLEMS["repeats"]

    def gradient(op: Callable[..., Any]) -> Tensor:
        k_val = problem.k_val.clone().requires_grad_()
        arguments = problem.inputs() | {"k_val": k_val}
        out = op(problem.memory, **arguments, **problem.options(), return_final_bank=True)
        out[["readings", "bank"].index(gradient_of)].square().sum().backward()
        return k_val.grad

    compiled = torch.compile(sdm_write_read, fullgraph=True, backend="aot_eager")
    assert_same_bits("gradient", gradient(compiled), gradient(sdm_write_read))


def test_operators_are_differentiable_once() -> None:
    arguments = flat_arguments(PROBLEMS["plain"], requires_grad=True)
    readings, final, saved = OPERATORS.write_read(*arguments)
    assert readings.requires_grad
    assert final.requires_grad
    assert not any(tensor.requires_grad for tensor in saved)
    (grad,) = torch.autograd.grad(readings.square().sum(), arguments[0], create_graph=True)
    with pytest.raises(RuntimeError, match="not differentiable"):
        grad.sum().backward()
    scores = torch.randn(2, 8, requires_grad=True)
    val, _ = OPERATORS.product_key_topk(scores, [4, 4], 5)
    (grad,) = torch.autograd.grad(val.square().sum(), scores, create_graph=True)
    with pytest.raises(RuntimeError, match="not differentiable"):
        grad.sum().backward()


# The layer.
LAYERS = {
    "default": {},
    "all options": {
        "output_gate": True,
        "normalize_readings": True,
        "key_weighted_decay": True,
        "log_memory_access_stats": True,
        "log_memory_norms": True,
    },
    "batch norm": {"query_batchnorm": True},
    "no learned bank": {"backprop_on_memory": False},
}


def run_layer(
    call: Callable[..., Any], layer: SparseDeltaMemory, x: Tensor, **options: Any
) -> dict[str, Tensor]:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    out, state = call(x, **options)
    bank = state.state[0].clone()
    assert state.cache_len == 7
    out.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"output": out.detach(), "bank": bank, "x": x.grad} | gradients


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("default", "plain"),
        ("all options", "packed"),
        ("batch norm", "plain"),
        ("no learned bank", "lengths"),
    ],
)
def test_compiled_layer_has_the_bits_of_the_eager_one(name: str, form: str) -> None:
    layer = make_layer(torch.float32, **LAYERS[name])
    x, options = torch.randn(2, 7, 12), {}
    if form == "lengths":
        options = {"lengths": torch.tensor([7, 3])}
    elif form == "packed":
        x = x.flatten(0, 1)[:10]
        options = {"cu_seqlens": torch.tensor([0, 7, 10]), "max_seqlen": 7}
    want = run_layer(layer, layer, x, **options)
    statistics = dict(layer.statistics)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_same(run_layer(compiled, layer, x, **options), want)
    assert_same(layer.statistics, statistics)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ here")
def test_inductor_compiles_layer_decode_and_in_place_calls(request: pytest.FixtureRequest) -> None:
    if "slow" not in request.config.getoption("markexpr"):
        pytest.skip("compiles for up to a minute; run with -m slow")
    layer = make_layer(torch.float32)
    compiled = torch.compile(layer, fullgraph=True)
    x = torch.randn(2, 7, 12)
    want = run_layer(layer, layer, x)
    for name, got in run_layer(compiled, layer, x).items():
        assert_close(name, got, want[name], torch.float32)
    want = decode(layer, layer, x)
    for name, got in decode(compiled, layer, x).items():
        assert_close(name, got, want[name], torch.float32)
    problem = PROBLEMS["repeats"].cast(torch.float32)
    compiled = torch.compile(sdm_write_read, fullgraph=True)
    assert_same(run(compiled, problem, False), run(sdm_write_read, problem, False))


def decode(call: Callable[..., Any], layer: SparseDeltaMemory, x: Tensor) -> dict[str, Tensor]:
    """Outputs and bank of a prefill of 4 tokens and three single ones."""
    state = layer.create_kv_cache(2, 7, torch.float32)
    with torch.no_grad():
        pieces = [call(piece, cache=state)[0] for piece in x.split([4, 1, 1, 1], dim=1)]
    assert state.cache_len == 7
    return {"output": torch.cat(pieces, 1), "bank": state.memory}


@pytest.mark.parametrize("num_reads", [4, 5])  # 5: as many as writes, which one selection serves
def test_compiled_decode_has_the_bits_of_the_eager_one(num_reads: int) -> None:
    layer = make_layer(torch.float32, num_reads=num_reads)
    x = torch.randn(2, 7, 12)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_same(decode(compiled, layer, x), decode(layer, layer, x))


def test_a_compiled_layer_takes_a_mask() -> None:
    layer, x = make_layer(torch.float32), torch.randn(2, 3, 12)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_same_bits("output", compiled(x, None, torch.ones(3, 3))[0], layer(x)[0])


class Outputs(torch.nn.Module):
    """A layer whose result is a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = make_layer(torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_layer_has_the_bits_of_the_eager_one(strict: bool) -> None:
    model, x = Outputs(), torch.randn(2, 7, 12)
    with torch.no_grad():
        exported = torch.export.export(model, (torch.randn(2, 7, 12),), strict=strict)
        assert_same_bits("output", exported.module()(x), model(x))


@pytest.mark.parametrize("dynamic", [{0: torch.export.Dim.AUTO}, {1: torch.export.Dim.AUTO}], ids=["B", "T"])
def test_an_exported_layer_takes_other_sizes(dynamic: dict[int, Any]) -> None:
    model, sizes = Outputs(), [2, 7]
    with torch.no_grad():
        exported = torch.export.export(model, (torch.randn(2, 7, 12),), dynamic_shapes={"x": dynamic})
        for at in dynamic:
            sizes[at] += 4
        x = torch.randn(*sizes, 12)
        assert_same_bits("output", exported.module()(x), model(x))


# Shapes without values, on a machine without a GPU.
def on(device: str, x: Tensor, requires_grad: bool) -> Tensor:
    return torch.empty(
        x.shape, dtype=x.dtype, device=device, requires_grad=requires_grad and x.is_floating_point()
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fake", [False, True])
def test_op_of_shapes_alone(fake: bool, dtype: torch.dtype) -> None:
    problem = make_problem(2, 7, 3, 4, 5, 8).cast(dtype)
    mode = FakeTensorMode() if fake else torch.device("meta")
    with mode:
        memory = on("cpu" if fake else "meta", problem.memory, True)
        inputs = {name: on(str(memory.device), x, True) for name, x in problem.inputs().items()}
        options = {"num_parallel": 2, "num_memory_slots": 8, "snapshot_quant": "int4"}
        readings, final = sdm_write_read(memory, **inputs, **options, return_final_bank=True)
        torch.autograd.backward([readings, final], [torch.ones_like(readings), torch.ones_like(final)])
        in_place = sdm_write_read(memory.detach().clone(), **inputs, **options)
        step = {name: x.detach()[:, :1] for name, x in inputs.items()}
        decoded = sdm_decode_step(memory.detach(), **step)
        val, idx = product_key_topk(inputs["v"][..., :4], (2, 2), 3)
    for x, shape in ((readings, (14, 5)), (final, (16, 5)), (in_place, (14, 5)), (decoded, (2, 5))):
        assert (x.shape, x.dtype, x.device) == (shape, dtype, memory.device)
    assert (val.shape, val.dtype, idx.shape, idx.dtype) == ((2, 7, 3), dtype, (2, 7, 3), torch.int64)
    for x in (memory, *inputs.values()):
        if x.is_floating_point():
            assert (x.grad.shape, x.grad.dtype) == (x.shape, x.dtype)


def test_layer_of_shapes_alone() -> None:
    with torch.device("meta"):
        layer = SparseDeltaMemory(SparseDeltaMemoryArgs(**SHAPE), 0)
        x = torch.empty(2, 7, 12)
    out, state = layer(x, lengths=torch.empty(2, dtype=torch.int64, device="meta"))
    out.sum().backward()
    assert (out.shape, out.device.type, state.memory.shape) == (x.shape, "meta", (100, 6))
    assert all(parameter.grad.shape == parameter.shape for parameter in layer.parameters())
    out, _ = layer(x.flatten(0, 1), cu_seqlens=torch.empty(4, dtype=torch.int32, device="meta"), max_seqlen=9)
    assert out.shape == (14, 12)


def test_fake_cuda_layer_without_a_gpu() -> None:
    layer = make_layer(torch.bfloat16)
    with FakeTensorMode(), torch.no_grad():
        weights = {name: on("cuda", x, False) for name, x in layer.named_parameters()}
        x = torch.empty(2, 7, 12, dtype=torch.bfloat16, device="cuda")
        token = torch.empty(2, 1, 12, dtype=torch.bfloat16, device="cuda")
        out, state = torch.func.functional_call(layer, weights, (x,))
        step, _ = torch.func.functional_call(layer, weights, (token,), {"cache": state})
    for got, shape in ((out, (2, 7, 12)), (step, (2, 1, 12)), (state.memory, (100, 6))):
        assert (got.shape, got.dtype, got.device.type) == (shape, torch.bfloat16, "cuda")


# Operations.
def chunk_flops(c: int, W: int, R: int, D: int) -> tuple[int, int]:
    """Multiply-adds of a chunk, forward and backward, matrix by matrix."""
    lower = c * (c + 1) // 2
    triples = sum(1 for i in range(c) for j in range(i + 1) for _ in range(j, i + 1))
    inverse = sum(1 for i in range(c) for j in range(i) for _ in range(j, i))
    forward = (c * W + c * R + c * W) * D + 2 * lower * D + triples + inverse
    backward = (5 * c * W + 2 * c * R + c) * D + 2 * lower * D + (lower - c + lower) * D
    return forward, backward


@pytest.mark.parametrize("return_final_bank", [False, True])
def test_flop_counter(return_final_bank: bool) -> None:
    W, R, D, T, P = 3, 4, 5, 7, 2
    problem = make_problem(P, T, W, R, D, 8)
    memory = problem.memory.clone().requires_grad_()
    options = problem.options() | {"chunk_size": 4, "return_final_bank": return_final_bank}
    with FlopCounterMode(display=False) as counter:
        out = sdm_write_read(memory, **problem.inputs(), **options)
        forward = counter.get_total_flops()
        (out[0] if return_final_bank else out).sum().backward()
    whole, rest = chunk_flops(4, W, R, D), chunk_flops(3, W, R, D)
    assert forward == 2 * P * (whole[0] + rest[0])
    assert counter.get_total_flops() - forward == 2 * P * (whole[1] + rest[1])
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        sdm_write_read(problem.memory.clone(), **problem.inputs(), **options)
    assert counter.get_total_flops() == forward


def test_flop_counter_of_packed_rows_and_of_the_layer() -> None:
    problem = make_problem(2, 6, 3, 4, 5, 8, lengths=(6, 3))
    packed = {name: problem.pack(x) for name, x in problem.inputs().items()}
    options = {"num_parallel": 2, "num_memory_slots": 8, "cu_seqlens": problem.cu_seqlens(), "chunk_size": 4}
    with FlopCounterMode(display=False) as counter:
        sdm_write_read(problem.memory.clone(), **packed, **options)
    assert counter.get_total_flops() == 2 * (2 * chunk_flops(4, 3, 4, 5)[0] + chunk_flops(1, 3, 4, 5)[0])
    layer = make_layer(torch.float32)
    with FlopCounterMode(display=False) as counter:
        layer(torch.randn(2, 7, 12))[0].sum().backward()
    counted = counter.get_flop_counts()["Global"]
    assert counted[OPERATORS.write_read] > 0
    assert counted[OPERATORS.write_read_backward] > 0


def test_fake_cuda_training_of_symbolic_sizes() -> None:
    """What ``torch.compile(dynamic=True)`` asks the operators."""
    problem = PROBLEMS["repeats"].cast(torch.bfloat16)
    arguments = flat_arguments(problem, False)
    real = torch.empty(problem.tokens)
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        tokens = mode.from_tensor(real, source=ConstantSource("tokens")).shape[0]
        assert isinstance(tokens, torch.SymInt)
        rows = problem.streams * tokens
        given = list(arguments)
        for at, x in enumerate(arguments):
            if isinstance(x, Tensor):
                shape = x.shape if at == 0 else (rows, x.shape[1])
                given[at] = torch.empty(shape, dtype=x.dtype, device="cuda")
        given[13] = tokens  # `longest`
        readings, final, saved = OPERATORS.write_read(*given)
        grads = OPERATORS.write_read_backward(final, saved, readings, final, *given[1:])
    assert arguments[13] == problem.tokens
    assert readings.shape[0] == rows
    assert saved[0].dim() == 1
    assert [grad.shape for grad in grads] == [given[at].shape for at in (0, 2, 3, 4, 5, 7)]


@pytest.mark.parametrize("mode", ["none", "fp8"])
def test_fake_cuda_training_without_a_gpu(mode: str) -> None:
    problem = PROBLEMS["repeats"].cast(torch.bfloat16)
    arguments = flat_arguments(problem, False, mode=mode)
    with FakeTensorMode():
        arguments = [on("cuda", x, False) if isinstance(x, Tensor) else x for x in arguments]
        readings, final, saved = OPERATORS.write_read(*arguments)
        grads = OPERATORS.write_read_backward(final, saved, readings, final, *arguments[1:])
    (kept,) = saved
    assert (kept.dtype, kept.device.type, kept.dim()) == (torch.uint8, "cuda", 1)
    assert kept.numel() > 0
    inputs = [arguments[at] for at in (0, 2, 3, 4, 5, 7)]
    for grad, like in zip((readings, final, *grads), (arguments[3], arguments[0], *inputs), strict=True):
        assert (grad.shape, grad.dtype, grad.device) == (like.shape, like.dtype, like.device)
