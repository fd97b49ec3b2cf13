"""`agree` as an operation, so that ranks compare their shapes in compiled code too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flashdsa.distributed.agree import agree
from flashdsa.distributed.group import Group, describe


@torch.library.custom_op("flashdsa::agree", mutates_args=())
def _agree(
    x: Tensor, others: Sequence[Tensor], names: str, options: str, group: str, call: str
) -> Tensor:
    """A copy of `x`, once every rank of `group` has come with tensors and options that fit."""
    name, *rest = names.split(",")
    facts = {"operation": call, "options": options, name: describe(x)}
    facts |= {
        other: describe(value, of_each_row=True) for other, value in zip(rest, others, strict=True)
    }
    agree(Group(group, 0, 0, call).processes, x, facts)
    return x.clone()


@_agree.register_fake
def _(
    x: Tensor, others: Sequence[Tensor], names: str, options: str, group: str, call: str
) -> Tensor:
    return torch.empty_like(x)


def agreed(
    x: Tensor, others: Mapping[str, Tensor], name: str, options: str, group: Group
) -> Tensor:
    """`x` as it may be sent.

    Compiled code gets it from the comparison, so that nothing is sent before that; otherwise it is
    `x` itself: `agree` was called before.

    Args:
        x: the tensor that is sent, which messages call `name`.
        others: tensors whose rows may differ in number, by name.
        options: everything else that must be the same on all ranks.
    """
    if group.size == 1 or not torch.compiler.is_compiling():
        return x
    names = ",".join([name, *others])
    checked: Tensor = _agree(x, list(others.values()), names, options, group.name, group.call)
    return checked
