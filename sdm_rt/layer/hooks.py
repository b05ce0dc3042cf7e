"""Whether calling a module does what its class says, or hooks take part."""

from __future__ import annotations

from torch import nn

__all__ = ["HOOKS", "has_global_hooks", "is_watched"]

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where a module keeps the hooks of its calls."""


def is_watched(module: nn.Module) -> bool:
    """Whether a call of the module does more, or other things, than its class says."""
    state = module.__dict__
    return any(map(state.__getitem__, HOOKS)) or "forward" in state or "_compiled_call_impl" in state


def has_global_hooks() -> bool:
    """Whether hooks of all modules are registered (``torch.nn.modules.module.register_module_*_hook``)."""
    hooks = nn.modules.module
    return bool(
        hooks._global_forward_hooks
        or hooks._global_forward_pre_hooks
        or hooks._global_backward_hooks
        or hooks._global_backward_pre_hooks
    )
