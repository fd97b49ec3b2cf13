"""Small calls of attention's forward and decode, and changes of inputs before a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import permutations
from typing import Any

import torch

from flashdsa.kernels.attention.sm90.decode.full.plan import JOINED_FORMATS, MIXED_FORMATS
from flashdsa.verify.sparse_mla_cases import SparseMlaCase
from workbench.small_calls.call import SmallCall


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


KEYS = 90


def attention(
    name: str, S: int, keys: int, heads: int, topk: int, *, sms: int = 1, **features: Any
) -> SmallCall:
    """A forward; features of the case."""
    given = {"duplicates": True, "invalid": True, **features}
    return SmallCall("sparse_mla_fwd", SparseMlaCase(name, S, keys, heads, topk, **given), sms)


def growing(heads: int, topk: int, packed: str = "", **how: Any) -> SmallCall:
    """A forward whose logits grow from tile to tile, so that every tile scales O."""
    case = SparseMlaCase("growing logits", 1, topk, heads, topk, packed=packed)
    return SmallCall("sparse_mla_fwd", case, plant=let_logits_grow, **how)


decode = partial(attention, keys=KEYS, logit_scale=20.0, rounded_dots=True)
ENTRIES: dict[str, Any] = {"d_qk": 512, "extra_keys": 90, "extra_topk": 300}
without_rope = partial(
    decode, keys=128, d_qk=512, packed="ue8m0", kv_format="v32_no_rope", page_size=64
)


FEW_HEADS = (
    decode("a CTA", 1, heads=16, topk=330, packed="ue8m0"),
    decode("two CTAs", 2, heads=9, topk=200, packed="ue8m0", sms=2),
    decode("any scale", 1, heads=16, topk=600, packed="fp32", sms=2),
    decode("four CTAs", 1, heads=16, topk=900, packed="ue8m0", sms=4),
    growing(16, 256, "ue8m0"),
)
"""Decodes: rings that go round, clusters, scales that are no powers of two."""


_of_v4 = partial(without_rope, kv_format="v4", extra_format="v4", extra_keys=90, extra_topk=70)
FEW_HEADS_OF_512 = (
    _of_v4("a CTA", 1, heads=16, topk=330),
    _of_v4("two CTAs", 2, heads=9, topk=200, sms=2),
    _of_v4("four CTAs", 1, heads=16, topk=700, sms=4, topk_length=True),
    without_rope("one source", 1, heads=16, topk=330, sms=2),
)
"""Decodes of 512 columns: two sources whose rows have their scales apart, and one with four
scales."""


STREAM_K_FEW_HEADS = (
    decode("four CTAs", 5, heads=16, topk=900, packed="ue8m0", sms=4),
    decode("two CTAs, lengths", 4, heads=16, topk=1500, packed="ue8m0", topk_length=True, sms=2),
)
"""Decodes of few heads whose tiles are divided by stream-K."""


STREAM_K_FEW_HEADS_OF_512 = (
    without_rope("four CTAs", 5, heads=16, topk=600, sms=4),
    _of_v4("three CTAs, lengths", 4, heads=16, topk=700, sms=3, topk_length=True),
)
"""The same with 512 columns."""


def of_formats(
    *shape: int, sms: int, joined: bool = False, mixed: bool = False, **features: Any
) -> tuple[SmallCall, ...]:
    """Decodes over pages of each format of rows without RoPE; `joined`: rows of the same format
    beside them; `mixed`: or of another one."""
    S, heads, topk = shape
    calls = []
    pairs = [(form, form) for form in JOINED_FORMATS]
    for form, extra in [*pairs, *permutations(MIXED_FORMATS)] if mixed else pairs:
        own = {**features, "kv_format": form.name}
        if joined:
            own |= {"extra_keys": 90, "extra_topk": 70, "extra_format": extra.name}
        name = form.name if extra == form else f"{form.name} and {extra.name}"
        calls.append(without_rope(name, S, heads=heads, topk=topk, sms=sms, **own))
    return tuple(calls)
