"""Compressed entries on Blackwell GPUs, of torch's operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from flashdsa.backends.cpu import entries as by_torch
from flashdsa.backends.runner import Runner

if TYPE_CHECKING:
    from flashdsa.ops.entries import CompressKvBwdOperands, CompressKvOperands


def bind(
    runner: Runner, operands: CompressKvOperands, **parameters: Any
) -> Callable[[Sequence[Any]], Tensor]:
    """Entries (num_entries, d)."""
    kind = type(operands)
    return runner.on_device(lambda given: by_torch.forward(kind(*given), **parameters))


def bind_backward(
    runner: Runner, operands: CompressKvBwdOperands, **parameters: Any
) -> Callable[[Sequence[Any]], tuple[Tensor, ...]]:
    """d_kv, d_gate, d_ape and d_norm_weight."""
    kind = type(operands)
    return runner.on_device(lambda given: by_torch.backward(kind(*given), **parameters))
