"""The operators of ``torch.library``: one handle, and when a call must go through them.

An operator makes a call one node of a graph: PyTorch's compiler, fake and meta tensors and dispatch modes see
its shapes alone, and its gradient is itself an operator. A plain eager call does without, since dispatch
costs time; each op decides by :func:`is_traced`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["define", "differentiable_once", "is_traced"]

_dispatch_modes = torch._C._len_torch_dispatch_stack
_library = torch.library.Library("sdm_rt", "FRAGMENT")  # type: ignore[no-untyped-call]


def is_traced(tensor: Tensor) -> bool:
    """Whether a call on ``tensor`` is compiled, has shapes alone, or is watched by a dispatch mode."""
    return (
        torch.compiler.is_compiling()
        or tensor.is_meta
        or isinstance(tensor, FakeTensor)
        or _dispatch_modes() > 0
    )


def define(
    schema: str,
    *,
    fake: Callable[..., Any],
    cpu: Callable[..., Any] | None = None,
    cuda: Callable[..., Any] | None = None,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> None:
    """Register an operator ``sdm_rt::*``.

    Parameters
    ----------
    schema : str
        Name, arguments and results, in PyTorch's schema language.
    fake : callable
        Makes the results' shapes and dtypes from those of the arguments.
    cpu, cuda : callable, optional
        The implementations.
    backward, setup_context : callable, optional
        The autograd formula of an operator that changes no argument.
    """
    name = "sdm_rt::" + schema.partition("(")[0]
    _library.define(schema)  # type: ignore[no-untyped-call]
    for key, implementation in (("CPU", cpu), ("CUDA", cuda)):
        if implementation is not None:
            _library.impl(name, implementation, key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(name, fake, lib=_library)
    if backward is not None:
        torch.library.register_autograd(name, backward, setup_context=setup_context, lib=_library)


def differentiable_once(_ctx: Any, *_grads: Any) -> None:
    """Refuse a gradient of a gradient: the ``backward`` of operators that are backwards themselves."""
    raise RuntimeError(
        "sdm_rt: gradients of this op are not differentiable; it has first derivatives only, and "
        "create_graph=True asks for more"
    )
