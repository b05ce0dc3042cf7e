"""Top-k on a real GPU: a million rows by the rule, and what only a GPU can show."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from sdm_rt import UnsupportedConfigurationError, last_dispatch, product_key_topk
from tests.kernels.test_topk import all_kinds, assert_same_selection
from tests.kernels.topk import score_rows
from tests.tolerances import assert_same_bits

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FACTORS, K = (100, 100), 64


def on_cpu(selection: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return selection[0].cpu(), selection[1].cpu()


def check(raw: Tensor, factors: tuple[int, ...], k: int) -> None:
    """Hold the GPU's selection and gradient of CPU rows to the CPU's, bit for bit."""
    here, there = raw.detach().requires_grad_(), raw.detach().cuda().requires_grad_()
    want, got = product_key_topk(here, factors, k), product_key_topk(there, factors, k)
    assert_same_selection(on_cpu((got[0].detach(), got[1])), (want[0].detach(), want[1]))
    grad_val = score_rows("normal", want[0].numel(), 1, raw.dtype, seed=1).view_as(want[0])
    (want_grad,) = torch.autograd.grad(want[0], here, grad_val)
    (got_grad,) = torch.autograd.grad(got[0], there, grad_val.cuda())
    assert_same_bits("gradient", got_grad, want_grad)


def test_a_million_bfloat16_rows_by_the_rule() -> None:
    chunk = 1 << 14
    for seed in range((1 << 20) // chunk):
        raw = score_rows("ties" if seed % 4 == 0 else "normal", chunk, 64, torch.bfloat16, seed)
        got = on_cpu(product_key_topk(raw.cuda(), (32, 32), 16))
        assert_same_selection(got, product_key_topk(raw, (32, 32), 16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("factors", "k"),
    [
        ((100, 100), 64),
        ((256, 256), 64),
        ((1024, 1024), 256),
        ((16, 16, 16, 16), 128),
        ((9, 8, 7, 6, 5), 33),
        ((65536,), 64),
        ((1000, 3), 256),
        ((1, 1), 1),
    ],
    ids=str,
)
def test_real_shapes(factors: tuple[int, ...], k: int, dtype: torch.dtype) -> None:
    check(all_kinds(40, sum(factors), dtype), factors, k)


@pytest.mark.parametrize("rows", [1, 33, 128, 70001])
def test_a_row_selects_the_same_in_any_batch(rows: int) -> None:
    raw = score_rows("ties", 70001, 200, torch.bfloat16).cuda()
    whole = product_key_topk(raw, FACTORS, K)
    part = product_key_topk(raw[:rows].clone(), FACTORS, K)
    assert_same_selection(part, (whole[0][:rows], whole[1][:rows]))


def test_repeated_calls_give_the_same_bits() -> None:
    raw = score_rows("ties", 5000, 200, torch.bfloat16).cuda().requires_grad_()
    runs = []
    for _ in range(20):
        val, idx = product_key_topk(raw, FACTORS, K)
        runs.append((val, idx, torch.autograd.grad(val, raw, val.detach())[0]))
    for run in runs[1:]:
        for name, one, first in zip(("scores", "slots", "gradient"), run, runs[0], strict=True):
            assert_same_bits(name, one.detach(), first.detach())


@pytest.mark.parametrize("shape", [(0,), (2, 0, 3), (2, 3), ()], ids=str)
def test_any_leading_shape(shape: tuple[int, ...]) -> None:
    check(torch.randn(*shape, 9), (4, 5), 6)


def test_layouts_give_the_same_bits() -> None:
    raw = score_rows("ties", 40, 24, torch.bfloat16).cuda()
    room = torch.zeros(40 * 24 + 1, dtype=raw.dtype, device="cuda")
    offset = room[1:].view(40, 24).copy_(raw)
    for view in (
        raw.repeat_interleave(2, 1)[:, ::2],
        raw.t().contiguous().t(),
        offset,
        raw[:1].expand(40, 24),
    ):
        want = product_key_topk(view.clone(memory_format=torch.contiguous_format), (12, 12), 9)
        assert_same_selection(product_key_topk(view, (12, 12), 9), want)


def test_an_expanded_gradient_equals_a_dense_one() -> None:
    raw = torch.randn(10, 24, device="cuda", requires_grad=True)
    val, _ = product_key_topk(raw, (12, 12), 9)
    (expanded,) = torch.autograd.grad(val.sum(), raw, retain_graph=True)
    (dense,) = torch.autograd.grad(val, raw, torch.ones_like(val))
    assert_same_bits("gradient", expanded, dense)


def test_scores_without_a_consumer_have_no_gradient() -> None:
    raw = torch.randn(10, 24, device="cuda", requires_grad=True)
    _, idx = product_key_topk(raw, (12, 12), 9)
    assert not idx.requires_grad
    with torch.no_grad():
        assert not product_key_topk(raw, (12, 12), 9)[0].requires_grad


def test_the_call_waits_for_nothing_and_is_captured_after_warmup() -> None:
    raw = score_rows("ties", 300, 200, torch.bfloat16).cuda().requires_grad_()
    grad_val = torch.randn(300, K, device="cuda").bfloat16()

    def step() -> tuple[Tensor, Tensor, Tensor]:
        val, idx = product_key_topk(raw, FACTORS, K)
        return val.detach(), idx, torch.autograd.grad(val, raw, grad_val)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (1, 2):
        with torch.no_grad():
            raw.copy_(score_rows("ties", 300, 200, torch.bfloat16, seed))
        graph.replay()
        for name, got, want in zip(("scores", "slots", "gradient"), captured, step(), strict=True):
            assert_same_bits(name, got, want)


def test_a_cold_kernel_in_a_capture_is_refused() -> None:
    raw = torch.randn(4, 8 + 37, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="run warmup first"), torch.cuda.graph(graph):
        product_key_topk(raw, (8, 37), 5)
    assert_same_selection(on_cpu(product_key_topk(raw, (8, 37), 5)), product_key_topk(raw.cpu(), (8, 37), 5))


def test_a_side_stream_and_a_second_thread() -> None:
    raw = score_rows("ties", 5000, 200, torch.bfloat16).cuda()
    want = product_key_topk(raw, FACTORS, K)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        late = raw + 0  # ready only after the sleep
        got = product_key_topk(late, FACTORS, K)
    side.synchronize()
    assert_same_selection(got, want)
    found: list[tuple[Tensor, Tensor]] = []
    thread = threading.Thread(target=lambda: found.append(product_key_topk(raw, FACTORS, K)))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert_same_selection(found[0], want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cupy_in_cupy_out(dtype: torch.dtype) -> None:
    cupy = pytest.importorskip("cupy")
    raw = score_rows("ties", 50, 24, dtype).cuda()
    want = product_key_topk(raw, (12, 12), 9)
    stream = cupy.cuda.Stream(non_blocking=True)
    torch.cuda.synchronize()
    with stream:
        array = cupy.from_dlpack(raw) * 1
        val, idx = product_key_topk(array, (12, 12), 9)
        assert isinstance(val, cupy.ndarray)
        assert isinstance(idx, cupy.ndarray)
        assert val.dtype == array.dtype
        strided = product_key_topk(cupy.asfortranarray(array), (12, 12), 9)
    stream.synchronize()
    for got in ((val, idx), strided):
        assert_same_selection((torch.from_dlpack(got[0]), torch.from_dlpack(got[1])), want)


def test_float64_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"raw: expected dtype float32, bfloat16 or float16 on a GPU, got float64"
    ):
        product_key_topk(torch.zeros(2, 8, device="cuda", dtype=torch.float64), (4, 4), 2)


def test_too_many_slots_are_refused() -> None:
    with pytest.raises(UnsupportedConfigurationError, match="span 4294967296 slots"):
        product_key_topk(torch.zeros(1, 2**17, device="cuda"), (2**16, 2**16), 2)


def test_dispatch_names_the_plan() -> None:
    product_key_topk(torch.zeros(3, 8, device="cuda"), (4, 4), 2)
    dispatch = last_dispatch()
    assert (dispatch["op"], dispatch["path"]) == ("product_key_topk", "gpu")
    (launch,) = dispatch["plan"].kernels()
    assert launch.kernel.file == "topk.cu"


def test_dispatch_names_the_backwards_plan() -> None:
    raw = torch.zeros(3, 8, device="cuda", requires_grad=True)
    product_key_topk(raw, (4, 4), 2)[0].sum().backward()
    dispatch = last_dispatch()
    assert (dispatch["op"], dispatch["path"]) == ("product_key_topk_backward", "gpu")
    (launch,) = dispatch["plan"].kernels()
    assert launch.entry == "topk_backward"


def test_operator_check() -> None:
    raw = torch.randn(5, 9, device="cuda", requires_grad=True)
    torch.library.opcheck(torch.ops.sdm_rt.product_key_topk.default, (raw, [4, 5], 6))


def test_compiled_whole() -> None:
    raw = torch.randn(50, 24, device="cuda", requires_grad=True)

    def loss(raw: Tensor) -> tuple[Tensor, Tensor]:
        val, idx = product_key_topk(raw * 2, (12, 12), 9)
        return val.sin(), idx

    want = loss(raw)
    got = torch.compile(loss, fullgraph=True, backend="aot_eager")(raw)
    assert torch.equal(got[1], want[1])
    torch.testing.assert_close(got[0], want[0])
    grads = [torch.autograd.grad(out.sum(), raw)[0] for out in (got[0], want[0])]
    torch.testing.assert_close(grads[0], grads[1])
