"""Calls for which torch's dispatcher would do nothing but call the implementation."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

_INFERENCE = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
_EAGER = _INFERENCE.add(torch._C.DispatchKey.ADInplaceOrView)
_PLAIN = (_EAGER.raw_repr(), _INFERENCE.raw_repr())
"""Dispatch keys that torch includes in every call of a thread: outside and in inference mode."""


def is_plain_eager() -> bool:
    """Whether the dispatcher would do nothing but call the implementation, if all operands are
    just `torch.Tensor`: no mode (fake tensors, tracing, torch functions), transform or profiler.

    Those of torch.func wrap tensors in ones of the same type; like vmap, functionalization, jit and
    dispatch modes they are seen by the key that each includes.
    """
    return (
        torch._C._dispatch_tls_local_include_set().raw_repr() in _PLAIN
        and not torch._C._len_torch_function_stack()
        and not torch._C._autograd._profiler_enabled()
    )


def is_plain_call(operands: Iterable[Tensor | None]) -> bool:
    """Whether this holds of a call, but for gradients: also nothing is cast, and no operand has a
    tangent, is of a subclass other than `Parameter`, without data, or a view that its dispatch keys
    say how to read."""
    # Autocast is no key that torch includes: it ceases to exclude one.
    if forward_ad._current_level >= 0 or torch._C._is_any_autocast_enabled():
        return False
    if not is_plain_eager():
        return False
    return all(
        x is None
        or (
            type(x) in (Tensor, Parameter)
            and x.layout is torch.strided
            and (x.is_cuda or x.is_cpu)
            and not x.is_neg()
        )
        for x in operands
    )
