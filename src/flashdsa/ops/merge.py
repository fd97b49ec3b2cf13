"""Parts of the keys: their results merged, and conventions of lse."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from flashdsa.dispatch.autograd import refuse_tangents
from flashdsa.dispatch.checks import (
    require_device,
    require_dtype,
    require_shape,
    require_tensor,
    wants_gradient,
)
from flashdsa.dispatch.dtypes import ATTENTION_DTYPES
from flashdsa.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError

__all__ = ["lse_for_merge", "lse_from_base2", "lse_to_base2", "merge_attention"]


def merge_attention(
    outs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """O and lse over all keys from those over parts of them, as `sparse_mla_fwd` returns them.

    ``lse = log sum_p exp(lse_p)`` and ``O = sum_p exp(lse_p - lse) O_p``, added up in the order of
    the parts, in fp32 (fp64 for fp64). A part without a key (lse = +inf) weighs nothing, whatever
    its O holds; where no part has a key, O = 0 and lse = +inf. Parts are to be computed without a
    sink; it scales the merged O.

    It has no gradient: the parts' weights are functions of lse, which `sparse_mla_fwd` returns
    without one. Call it under `torch.no_grad()`, or let one `sparse_mla` attend to all keys.

    Args:
        outs: P tensors (S, H, d_v), or one (P, S, H, d_v); any floating dtype.
        lses: P tensors (S, H), or one (P, S, H); fp32, or fp64; natural logarithms.

    Returns:
        O (S, H, d_v) in the dtype of `outs`, and lse (S, H) in that of `lses`.

    Raises:
        TypeError, ValueError: a wrong argument.
        NotImplementedError: a gradient is asked for.
    """
    out_parts, lse_parts = _parts("outs", outs), _parts("lses", lses)
    if not out_parts or len(out_parts) != len(lse_parts):
        raise ArgumentValueError(
            f"lses: expected as many parts as outs has, at least 1; got {len(lse_parts)} "
            f"and {len(out_parts)}"
        )
    for out, lse in zip(out_parts, lse_parts, strict=True):
        require_dtype("lses", lse, lse_parts[0].dtype)
        require_dtype("outs", out, out_parts[0].dtype)
        require_shape("outs", out, out_parts[0].shape, "of the first part")
        require_shape("lses", lse, out.shape[:-1], "[S, H], that of outs without d_v,")
        require_device("outs", out, out_parts[0].device, "the first part")
        require_device("lses", lse, out.device, "outs")
    _refuse_gradients([*out_parts, *lse_parts])
    wide = torch.float64 if torch.float64 in (out.dtype, lse.dtype) else torch.float32
    logs = torch.stack(lse_parts).to(wide)
    logs = logs.masked_fill(logs == math.inf, -math.inf)
    top = logs.amax(0)
    top = top.masked_fill(top == -math.inf, 0)
    weights = (logs - top).exp()
    total = torch.zeros_like(top)
    merged = torch.zeros_like(out_parts[0], dtype=wide)
    for out, weight in zip(out_parts, weights, strict=True):
        total = total + weight
        # 0 times what an empty part holds may be NaN.
        part = out.to(wide) * weight[..., None]
        merged = merged + part.masked_fill((weight == 0)[..., None], 0)
    empty = total == 0
    merged = merged / total.masked_fill(empty, 1)[..., None]
    lse = (top + total.log()).masked_fill(empty, math.inf)
    return merged.to(out_parts[0].dtype), lse.to(lse_parts[0].dtype)


def lse_to_base2(lse: Tensor) -> Tensor:
    """A natural-logarithm lse in base 2 (FlashInfer's and TileLang's convention)."""
    _require_lse(lse)
    return lse / math.log(2)


def lse_from_base2(lse: Tensor) -> Tensor:
    """A base-2 lse as the natural logarithm that flashdsa takes."""
    _require_lse(lse)
    return lse * math.log(2)


def lse_for_merge(lse: Tensor) -> Tensor:
    """lse with -inf, the logarithm of 0, for queries without a valid slot, which have +inf.

    Partial attentions over disjoint rows merge by ``logaddexp`` of these: a +inf would give NaN.
    """
    _require_lse(lse)
    return torch.where(torch.isposinf(lse), -math.inf, lse)


def _require_lse(lse: Tensor) -> None:
    """A logarithm in any dtype of attention."""
    require_tensor("lse", lse)
    require_dtype("lse", lse, *ATTENTION_DTYPES)


def _refuse_gradients(parts: Sequence[Tensor]) -> None:
    """Raise UnsupportedError where autograd would record the call, or wants a tangent."""
    refuse_tangents("merge_attention", parts)
    if wants_gradient(parts):
        raise UnsupportedError(
            "merge_attention: no gradient is available, since the parts' weights are functions of "
            "lse, which has none; call it under torch.no_grad(), or attend to all keys by one "
            "sparse_mla"
        )


def _parts(name: str, values: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """One tensor a part."""
    if not isinstance(values, Iterable):
        wanted = "a tensor, or a sequence of tensors"
        raise ArgumentTypeError(f"{name}: expected {wanted}; got {type(values).__name__}")
    if isinstance(values, Tensor):
        require_tensor(name, values)
    parts = list(values)
    for part in parts:
        require_tensor(name, part)
        require_dtype(
            name, part, *((torch.float32, torch.float64) if name == "lses" else ATTENTION_DTYPES)
        )
    return parts
