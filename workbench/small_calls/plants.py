"""Changes of inputs before a small call: what its kernel finds hard."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


def plant_all(plants: Iterable[Callable[[Any], None]], x: Any) -> None:
    """One after the other."""
    for plant in plants:
        plant(x)


def alike(x: Any) -> None:
    """All queries name the same keys, so that large groups are chosen."""
    x.indices.copy_(x.indices[:1].expand_as(x.indices).clone())


def shorter(slots: int) -> Callable[[Any], None]:
    """The second half of the queries names so many keys fewer."""

    def plant(x: Any) -> None:
        x.indices[len(x.indices) // 2 :, -slots:] = -1

    return plant


def let_logits_grow(x: Any) -> None:
    """Slots name the keys in their order; each 64 keys are twice as large as those before."""
    sizes = 2.0 ** (torch.arange(x.case.num_keys)[:, None] // 64)
    x.indices.copy_(torch.arange(x.case.topk, dtype=torch.int32).expand_as(x.indices))
    x.indices[:, ::7] = -1
    if x.case.packed:  # the scales of a row's four tiles, and its bf16 rope
        x.kv[:, 512:528].view(torch.float32).mul_(sizes)
        x.kv[:, 528:].view(torch.bfloat16).mul_(sizes)
    else:
        x.kv.mul_(sizes)
