"""The Sparse Delta Memory layer."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sdm_rt.layer.activations import make_activation
from sdm_rt.layer.args import SparseDeltaMemoryArgs
from sdm_rt.layer.layout import OneTokenLayout, PackedLayout, TokenLayout, resolve_layout
from sdm_rt.layer.slot_selection import SlotSelection, select_writes_and_reads
from sdm_rt.layer.state import Cache, SDMLayerState
from sdm_rt.layer.statistics import access_statistics, norm_statistics
from sdm_rt.layer.token_replay import replay_token
from sdm_rt.layer.weights import check_positive, draw_decay_rate_, draw_time_step_, draw_weight_
from sdm_rt.ops.checks import BANK_DTYPES, check_int, check_one_device
from sdm_rt.ops.decode import sdm_decode_step
from sdm_rt.ops.library import is_traced
from sdm_rt.ops.write_read import sdm_write_read
from sdm_rt.ops.write_read_graphs import replayed_calls

__all__ = ["SparseDeltaMemory"]


class _Entries(NamedTuple):
    """What the op takes of every token, by stream and in the op's order."""

    k_idx: Tensor
    k_val: Tensor
    v: Tensor
    beta: Tensor
    g: Tensor
    q_idx: Tensor
    q_val: Tensor


class SparseDeltaMemory(nn.Module):
    r"""A sequence mixer with a large bank of rows per head, of which each token writes and reads a few.

    For each head (arXiv 2607.07386), with D = dim / num_heads::

        g      = -exp(A_log) softplus(a_proj(x) + dt_bias)      (times k_val per write: key_weighted_decay)
        beta   = sigmoid(b_proj(x))                 v = Wv_write(x)
        k_val, k_idx = write_act(scores), slots     of product_key_topk(Wk_write(x), num_writes)
        q_val, q_idx = read_act(scores), slots      of product_key_topk(Wq_read(x), num_reads)
        y      = sdm_write_read(bank, k_idx, k_val, v, beta, g, q_idx, q_val)
        out    = Wo(readings_norm(y) * sigmoid(Wog(x)))         (norm and gate: optional)

    Parameters
    ----------
    args : SparseDeltaMemoryArgs
        Shape and options; ``dim`` must be set.
    layer_id : int
        The layer's place in its model, for messages and repr.

    Attributes
    ----------
    statistics : dict of str to Tensor
        Detached measurements of the latest forward: see :func:`~sdm_rt.layer.statistics.access_statistics`
        (log_memory_access_stats) and :func:`~sdm_rt.layer.statistics.norm_statistics` (log_memory_norms).
        Empty without either option.

    Notes
    -----
    Linear modules: ``Wq_read``, ``Wk_write`` (dim -> H * sum of factor widths), ``Wv_write``, ``Wo``, ``Wog``
    (dim -> dim), ``a_proj``, ``b_proj`` (dim -> H). Parameters: ``A_log``, ``dt_bias`` [H], ``memory``
    [H*S, D]. Norms: ``query_bn``, ``key_bn``, ``readings_norm``. ``Wog``, ``memory`` and the norms exist
    where their options ask for them. ``A_log`` and ``dt_bias`` carry ``_no_weight_decay``, ``memory`` carries
    ``_sdm_memory_bank``, for optimizers to group by.
    """

    def __init__(self, args: SparseDeltaMemoryArgs, layer_id: int) -> None:
        super().__init__()
        if not isinstance(args, SparseDeltaMemoryArgs):
            raise TypeError(f"args: expected SparseDeltaMemoryArgs, got {type(args).__name__}")
        args.validate()
        if args.dim == -1:
            raise ValueError("dim: expected a value at least 1 to build a layer, got -1 (not set)")
        self.args = args = copy.deepcopy(args)  # another layer may be built of the same ones, changed
        self.layer_id = layer_id
        self.num_heads = args.num_heads
        self.head_dim = args.head_dim
        self.slots_per_head = args.slots_per_head
        self.factors = args.factors
        self.statistics: dict[str, Tensor] = {}

        dim, heads, key_width = args.dim, args.num_heads, args.num_heads * sum(args.factors)
        self.Wq_read = nn.Linear(dim, key_width)
        self.Wk_write = nn.Linear(dim, key_width)
        self.Wv_write = nn.Linear(dim, dim)
        self.a_proj = nn.Linear(dim, heads)
        self.b_proj = nn.Linear(dim, heads)
        self.Wo = nn.Linear(dim, dim)
        self.Wog = nn.Linear(dim, dim) if args.output_gate else None
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.memory: nn.Parameter | None
        if args.backprop_on_memory:
            self.memory = nn.Parameter(torch.empty(heads * args.slots_per_head, args.head_dim))
        else:
            self.register_parameter("memory", None)
        self.read_act = make_activation(args.read_act, args.read_act_scale)
        self.write_act = make_activation(args.write_act, args.write_act_scale)
        self.readings_norm = nn.LayerNorm(args.head_dim, args.norm_eps) if args.normalize_readings else None
        self.query_bn = nn.BatchNorm1d(key_width) if args.query_batchnorm else None
        self.key_bn = nn.BatchNorm1d(key_width) if args.query_batchnorm else None
        self._mark_parameters()
        self.init_weights()

    def _mark_parameters(self) -> None:
        for parameter in (self.A_log, self.dt_bias):
            parameter._no_weight_decay = True  # type: ignore[attr-defined]
        if self.memory is not None:
            self.memory._sdm_memory_bank = True  # type: ignore[attr-defined]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._mark_parameters()  # deepcopy makes new parameters without their attributes

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SparseDeltaMemory:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._mark_parameters()  # so does to_empty() of a layer made on the meta device
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._mark_parameters()  # and load_state_dict(assign=True)

    @torch.no_grad()
    def init_weights(
        self, init_std: float | None = None, factor: float = 1.0, width_scaling: float | None = None
    ) -> None:
        """Draw every parameter anew from torch's global generator.

        Weights and the learned bank come from a normal distribution cut at 3 standard deviations, biases are
        0, ``A_log`` is the logarithm of a uniform number of ``A_init_range``, and ``dt_bias`` makes
        softplus(dt_bias) log-uniform in [1e-3, 1e-1]. Norms, with their running statistics, and
        activations with parameters return to their initial state.

        Parameters
        ----------
        init_std : float, optional
            The standard deviation; default dim ** -0.5.
        factor : float
            Divides the standard deviation of ``Wo``.
        width_scaling : float, optional
            Multiplies the standard deviation of every projection, not that of the bank; default 1.

        Raises
        ------
        ValueError
            If one of the three is not positive and finite; nothing has been drawn then.
        TypeError
            If one of them is no number.
        """
        given = {
            "init_std": self.args.dim**-0.5 if init_std is None else init_std,
            "factor": factor,
            "width_scaling": 1.0 if width_scaling is None else width_scaling,
        }
        std, factor, scaling = (check_positive(name, value) for name, value in given.items())
        inner = (self.Wq_read, self.Wk_write, self.Wv_write, self.a_proj, self.b_proj, self.Wog)
        for projection in (*inner, self.Wo):
            if projection is not None:
                draw_weight_(projection.weight, std * scaling / (factor if projection is self.Wo else 1.0))
                nn.init.zeros_(projection.bias)
        if self.memory is not None:
            draw_weight_(self.memory, std)
        draw_decay_rate_(self.A_log, self.args.A_init_range)
        draw_time_step_(self.dt_bias)
        for module in (self.readings_norm, self.query_bn, self.key_bn, self.read_act, self.write_act):
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()

    def create_kv_cache(
        self,
        bsz: int,
        seq_len: int,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        initial_memory: Tensor | None = None,
    ) -> SDMLayerState:
        """Return a state before the first token, to pass as ``cache``.

        Parameters
        ----------
        bsz : int
            B, sequences.
        seq_len : int
            Tokens to come; accepted for compatibility, since the bank's size does not depend on it.
        dtype : torch.dtype
            The bank's dtype: float32, bfloat16, float16, on the CPU also float64.
        device : torch.device, optional
            Default: the layer's.
        initial_memory : Tensor, optional
            The bank to start from, [H*S, D] for every sequence or [B*H*S, D]; copied. Default: the learned
            initial bank, or zeros.

        Returns
        -------
        SDMLayerState
            Its bank [B*H*S, D] holds the initial bank of every sequence; its ``cache_len`` is 0.

        Raises
        ------
        TypeError
            If ``bsz`` or ``seq_len`` is no int, ``dtype`` is none of a bank, or ``initial_memory`` is not a
            tensor of real numbers.
        ValueError
            If ``bsz`` or ``seq_len`` is negative, or ``initial_memory`` has another shape.
        RuntimeError
            If the learned initial bank is a DTensor, or FSDP2 has given back its memory: pass
            ``initial_memory``.
        """
        check_int("bsz", bsz, 0, None)
        check_int("seq_len", seq_len, 0, None)
        if dtype not in BANK_DTYPES:
            raise TypeError(f"dtype: expected float64, float32, bfloat16 or float16, got {dtype}")
        rows = self.num_heads * self.slots_per_head
        if initial_memory is not None:
            _check_initial_memory(initial_memory, [(rows, self.head_dim), (bsz * rows, self.head_dim)])
        elif hasattr(self.memory, "full_tensor"):
            raise RuntimeError(
                f"create_kv_cache: the learned initial bank is a {type(self.memory).__name__}; pass "
                f"initial_memory=layer.memory.full_tensor()"
            )
        bank = torch.empty(bsz * rows, self.head_dim, dtype=dtype, device=device or self.A_log.device)
        initial = self._initial_bank(bank) if initial_memory is None else initial_memory.detach().clone()
        state = SDMLayerState(bank, initial=initial)
        state.reset()
        return state

    def forward(
        self,
        x: Tensor,
        freqs_cis: Any = None,
        mask: Any = None,
        cache: Cache | None = None,
        *,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> tuple[Tensor, Cache]:
        """Mix the tokens of each sequence.

        Parameters
        ----------
        x : Tensor
            [B, T, dim], [B*T, dim] where ``freqs_cis`` has T rows, or [sum T, dim] with ``cu_seqlens``.
        freqs_cis : Tensor, optional
            Accepted for compatibility; only its first dimension counts, and only for x of rank 2.
        mask : optional
            Accepted for compatibility, without effect: the layer is causal, and ``lengths`` says what is
            padding.
        cache : Cache, optional
            Continue from its bank, which is advanced in place. Default: start from the initial bank.
        lengths : Tensor, optional
            [B], int32 or int64: the tokens of each sequence in padded x. What lies behind changes nothing,
            gets outputs and gradients of 0, and does not enter BatchNorm statistics.
        cu_seqlens : Tensor, optional
            [B+1], int32 or int64: the first row of each sequence in packed x, then the number of rows.
        max_seqlen : int, optional
            An upper bound of the packed lengths; required on a GPU.

        Returns
        -------
        output : Tensor
            Like ``x``, in the dtype of the projections' output.
        state : SDMLayerState
            ``cache`` where one was given. A backward through the call returns its bank to what it was before
            the call: clone ``state.memory`` first to carry it on.

        Raises
        ------
        ValueError, TypeError
            An argument that does not fit; the message names it, and nothing has changed then.
        UnsupportedConfigurationError
            On a GPU, a ValueError: 2**31 slots a head and more, or more than 65,535 streams (B*H).
        MissingDependencyError, KernelCompileError, NotPrecompiledError
            On a GPU, RuntimeErrors of the ops: a part of the GPU path is missing, or a kernel cannot be
            compiled; see :func:`~sdm_rt.sdm_write_read`.
        RuntimeError
            PyTorch's own, where a projection does not take the dtype of ``x``. On a GPU: a compute capability
            below 8.0, or a first call of its kind inside a CUDA graph capture.
            Inside a transform of ``torch.func``; a ``cache`` made under ``torch.inference_mode()`` in a call
            that needs a backward. From a backward: the bank of the call was changed in
            between, or ran backward before.
        """
        if isinstance(mask, Tensor) and not torch.compiler.is_compiling():  # which cannot trace a warning
            _warn_mask_has_no_effect()
        layout = self._resolve(x, freqs_cis, cache, lengths, cu_seqlens, max_seqlen)
        if (
            self.args.cuda_graph
            and cache is not None
            and isinstance(layout, OneTokenLayout)
            and type(self) is SparseDeltaMemory  # a class made from it may do more
            and not is_traced(x)
        ):
            output = replay_token(self, x, cache.state[0])
            if output is not None:
                cache.update_(cache.state[0], layout.tokens)
                return output, cache
        return self._mix(x, cache, layout)

    def _token(self, x: Tensor, bank: Tensor) -> Tensor:
        """Return the output of one token of each sequence, given as `forward` takes it; advances the bank."""
        sequences = x.numel() // self.args.dim
        state = SDMLayerState(bank, initial=bank)
        return self._mix(x, state, OneTokenLayout(sequences, self.num_heads))[0]

    def _mix(self, x: Tensor, cache: Cache | None, layout: TokenLayout) -> tuple[Tensor, Cache]:
        """Return what `forward` returns, for checked arguments."""
        rows = _zero_padding(x.reshape(-1, self.args.dim), layout)  # [N, dim]

        modules = cast(dict[str, Any], self._modules)  # a token has no time for Module.__getattr__
        v = modules["Wv_write"](rows)
        selected = select_writes_and_reads(rows, layout, self.args, self.factors, modules)
        gate_dtype = torch.promote_types(v.dtype, torch.float32)
        beta = torch.sigmoid(modules["b_proj"](rows).to(gate_dtype))  # [N, H]
        g = layout.to_streams(self._log_decay(rows, gate_dtype))
        if self.args.key_weighted_decay:
            g = g * selected.k_val.to(gate_dtype)

        bank, state = self._bank(cache, layout, v)
        entries = _Entries(
            k_idx=selected.k_idx,
            k_val=selected.k_val,
            v=layout.to_streams(v),
            beta=layout.to_streams(beta),
            g=g,
            q_idx=selected.q_idx,
            q_val=selected.q_val,
        )
        readings = layout.from_streams(self._run_op(bank, entries, layout, decodes=cache is not None))
        state.update_(state.state[0], layout.tokens)
        if self.args.log_memory_access_stats or self.args.log_memory_norms:
            self._measure(state, selected, v, readings, layout)

        out = readings if readings.dtype == v.dtype else readings.to(v.dtype)  # [N, H, D]
        if (norm := modules.get("readings_norm")) is not None:
            out = norm(out)
        out = out.flatten(1)
        if (gate := modules.get("Wog")) is not None:
            out = out * torch.sigmoid(gate(rows))
        return _zero_padding(modules["Wo"](out), layout).view(x.shape), state

    def _resolve(
        self,
        x: Any,
        freqs_cis: Any,
        cache: Any,
        lengths: Tensor | None,
        cu_seqlens: Tensor | None,
        max_seqlen: int | None,
    ) -> TokenLayout:
        """Check the arguments of a call; return where its tokens lie."""
        if not isinstance(x, Tensor):
            raise TypeError(f"x: expected a torch.Tensor, got {type(x).__name__}")
        if not x.is_floating_point():
            raise TypeError(f"x: expected a floating-point dtype, got {x.dtype}")
        if x.dim() not in (2, 3) or x.shape[-1] != self.args.dim:
            raise ValueError(
                f"x: expected shape [B, T, dim] or [N, dim] with dim = {self.args.dim}, got {list(x.shape)}"
            )
        layout = resolve_layout(x, self.num_heads, freqs_cis, lengths, cu_seqlens, max_seqlen)
        if cache is not None:
            if not isinstance(cache, Cache):
                raise TypeError(f"cache: expected a Cache, got {type(cache).__name__}")
            bank = cache.state[0]
            expected = (layout.sequences * self.num_heads * self.slots_per_head, self.head_dim)
            if bank.shape != expected:
                raise ValueError(
                    f"cache: expected a bank [B*H*S, D] = {list(expected)} for B = {layout.sequences}, got "
                    f"{list(bank.shape)}"
                )
            if bank.device != x.device:
                check_one_device({"x": x, "cache": bank})
        return layout

    def _log_decay(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return g, [N, H], without what key_weighted_decay multiplies it by."""
        time_step = F.softplus(self.a_proj(rows).to(dtype) + self.dt_bias)
        return -self.A_log.to(dtype).exp() * time_step

    def _initial_bank(self, like: Tensor) -> Tensor:
        """Return the rows that fill a sequence's bank at its start: the learned [H*S, D], or one of zeros.

        Zeros have the dtype and the device of ``like``.
        """
        return like.new_zeros(1, self.head_dim) if self.memory is None else self.memory

    def _bank(self, cache: Cache | None, layout: TokenLayout, v: Tensor) -> tuple[Tensor, Cache]:
        """Return the bank that the call advances, and the state that holds it."""
        if cache is not None:
            return cache.state[0], cache
        rows = layout.sequences * self.num_heads * self.slots_per_head
        initial = self._initial_bank(v)
        # repeat() copies even for one sequence, and sums gradients over the batch.
        bank = initial.to(v.dtype).repeat(rows // initial.shape[0], 1)
        return bank, SDMLayerState(bank, initial=initial)

    def _run_op(self, bank: Tensor, entries: _Entries, layout: TokenLayout, decodes: bool) -> Tensor:
        """Run the op on the bank in place; a continued single token without a backward by the decode step."""
        needs_backward = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (bank, *entries))
        if decodes and not needs_backward and layout.tokens == 1 and not isinstance(layout, PackedLayout):
            readings: Tensor = sdm_decode_step(bank, *entries, lengths=layout.stream_lengths)
            return readings
        if self.args.cuda_graph and needs_backward and not is_traced(bank):
            with replayed_calls():  # which the compiler could not trace
                return self._write_read(bank, entries, layout)
        return self._write_read(bank, entries, layout)

    def _write_read(self, bank: Tensor, entries: _Entries, layout: TokenLayout) -> Tensor:
        return sdm_write_read(
            bank,
            *entries,
            chunk_size=self.args.tokens_per_chunk,
            num_memory_slots=self.slots_per_head,
            num_parallel=layout.sequences * self.num_heads,
            snapshot_quant=self.args.snapshot_quant,
            key_weighted_decay=self.args.key_weighted_decay,
            grad_bank_fp32=self.args.grad_bank_fp32,
            lengths=layout.stream_lengths,
            cu_seqlens=layout.stream_offsets,
            max_seqlen=layout.tokens,
        )

    def _measure(
        self, state: Cache, selected: SlotSelection, v: Tensor, readings: Tensor, layout: TokenLayout
    ) -> None:
        self.statistics = {}
        slots = self.slots_per_head
        if self.args.log_memory_access_stats:
            self.statistics |= access_statistics(selected.k_slots, selected.q_slots, slots, layout.is_real)
        if self.args.log_memory_norms:
            values = v.view(readings.shape)  # [N, H, D]
            self.statistics |= norm_statistics(state.state[0], values, readings, slots, layout.is_real)

    def extra_repr(self) -> str:
        """Return the layer's shape for its repr."""
        args = self.args
        return (
            f"layer_id={self.layer_id}, dim={args.dim}, num_heads={args.num_heads}, "
            f"slots_per_head={args.slots_per_head}, factors={self.factors}, num_writes={args.num_writes}, "
            f"num_reads={args.num_reads}"
        )


def _check_initial_memory(given: Any, shapes: list[tuple[int, int]]) -> None:
    if not isinstance(given, Tensor) or given.is_complex():
        got = given.dtype if isinstance(given, Tensor) else type(given).__name__
        raise TypeError(f"initial_memory: expected a torch.Tensor of real numbers, got {got}")
    if tuple(given.shape) not in shapes:
        raise ValueError(
            f"initial_memory: expected shape [H*S, D] = {list(shapes[0])} or [B*H*S, D] = "
            f"{list(shapes[1])}, got {list(given.shape)}"
        )


def _zero_padding(rows: Tensor, layout: TokenLayout) -> Tensor:
    """Return [N, *] with rows of padding replaced by zeros: no NaN there reaches a weight's gradient."""
    return rows if layout.is_real is None else rows.masked_fill(~layout.is_real.unsqueeze(-1), 0.0)


@functools.cache
def _warn_mask_has_no_effect() -> None:
    warnings.warn(
        "SparseDeltaMemory: mask has no effect, the layer is causal; pass lengths (or cu_seqlens) to leave "
        "padding out",
        UserWarning,
        stacklevel=5,  # past forward and the module's two call wrappers
    )
