"""Modules of a model whose forward is replaced, and modules that others have changed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

_OURS, _BEFORE = "_flashdsa_forward", "_flashdsa_forward_before"
HOOKED = "_old_forward"
"""Attribute that accelerate's hooks call between their own steps, which move weights."""


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Have `forward` called in place of the module's own; accelerate's hooks stay around it."""
    name = HOOKED if HOOKED in module.__dict__ else "forward"
    module.__dict__[_BEFORE] = module.__dict__.get(name)
    module.__dict__[name] = module.__dict__[_OURS] = forward


def restore_forward(module: nn.Module) -> None:
    """Undo `replace_forward`, also where hooks were added or removed since."""
    ours, before = module.__dict__.pop(_OURS, None), module.__dict__.pop(_BEFORE, None)
    if ours is None:
        return
    if module.__dict__.get(HOOKED) is ours:
        module.__dict__[HOOKED] = before or partial(type(module).forward, module)
    elif module.__dict__.get("forward") is ours:
        del module.__dict__["forward"]
        if before is not None:
            module.__dict__["forward"] = before


def is_plain(module: nn.Module, kind: type[nn.Module] | None = None) -> bool:
    """Return whether calling the module does what its class says, with its own weights.

    Adapters, quantised weights, hooks and weights that lie elsewhere until the call do more.

    Args:
        kind: class whose forward it must be; default: the module's own class.
    """
    return (
        "forward" not in module.__dict__
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and (kind is None or type(module).forward is kind.forward)
    )
