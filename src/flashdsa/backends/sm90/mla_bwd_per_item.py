"""Launches of Hopper's backward of 64 rows of Q at a time, over one list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from flashdsa.backends.runner import Runner
from flashdsa.backends.sm90.mla_bwd_choice import Dkv, Part
from flashdsa.backends.sm90.mla_bwd_memory import lists_allocator, slots_allocator
from flashdsa.kernels.attention.sm90.bwd_per_item.plan import MORE, SLOTS_MAY_PAY, WAY, num_tickets
from flashdsa.kernels.catalog import MLA_BWD_FUSED

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""q (S, H, d_qk), rows of keys, dO (S, H, d_v), lse (S, H) with the sinks, O, indices (S, topk) and
topk_length, (0,): every slot counts; without gaps."""
Outputs = tuple[Tensor, Tensor, Tensor]
"""delta (S, H) fp32 and dq, written, and dkv (S_kv, d_qk) fp32, added to."""
Launch = Callable[[Inputs, Outputs], None]


class LaunchPerItem(Protocol):
    """Launch what writes delta of all queries, or their lists, dQ and dKV. It makes the choice of
    large groups in any case, their lists if a sample says so, and the rest only if these groups are
    not taken.
    """

    def __call__(self, inputs: Inputs, outputs: Outputs, large: tuple[Any, ...] = ()) -> None:
        """`large`: what `launch_backward` takes of large groups, `More`; none: there are none."""


def bind_per_item(runner: Runner, part: Part, sm_scale: float) -> LaunchPerItem:
    """Bind the launches of a part, but for its large groups."""
    function, *after = (runner.function(MLA_BWD_FUSED, plan) for plan in part.plans)
    first_arguments = bind_arguments(runner, part, sm_scale)
    allocate_tickets = tickets_allocator(runner, part)
    allocate_slots = tuple if part.dkv is Dkv.ADDED else slots_allocator(runner, part)
    by_slots, by_additions = part.dkv is Dkv.SLOTS, (part.spread, part.num_ctas)
    no_choice = runner.empty(0, dtype=torch.int32)
    no_large = without_large(runner) if part.plans[0].may_leave else ()

    def launch(inputs: Inputs, outputs: Outputs, large: tuple[Any, ...] = ()) -> None:
        first, tickets = first_arguments(inputs, outputs), allocate_tickets()
        how = (*allocate_slots(), no_choice) if by_slots else by_additions
        function(*first, *how, *(large or no_large), *tickets)
        for given_slots in after:
            given_slots(*first, *allocate_slots(), tickets[0][WAY : WAY + 1])

    return launch


def without_large(runner: Runner) -> tuple[Any, ...]:
    """The arguments of large groups, `More`, where there are none."""
    words, lists = runner.empty(0, dtype=torch.int32), lists_allocator(runner, 0, max(MORE), 0)
    return *lists(), words, 0.0, 0, words, words, 0


def tickets_allocator(runner: Runner, part: Part) -> Callable[[], tuple[Any, ...]]:
    """A function that allocates the tickets, if there are any: the last arguments of
    `launch_backward`, `far` one of them."""
    if not part.tickets:
        return tuple
    far = SLOTS_MAY_PAY if part.dkv is Dkv.EITHER else int(part.is_far)
    allocate = runner.allocator(num_tickets(part.num_groups), dtype=torch.int32)
    return lambda: (allocate(), far)


def bind_arguments(
    runner: Runner, part: Part, sm_scale: float
) -> Callable[[Inputs, Outputs], tuple[Any, ...]]:
    """The arguments of every launch, see `Operands` in its kernel.py."""
    num_heads, call = part.kernel_heads, part.call
    allocate_copy = runner.allocator(call.num_keys, call.tile.d_qk, dtype=torch.bfloat16)
    of_lists = part.num_groups, part.group_queries, part.capacity
    allocate_lists = lists_allocator(runner, *of_lists)

    def arguments_of(inputs: Inputs, outputs: Outputs) -> tuple[Any, ...]:
        q, kv, *rest = inputs
        delta, dq, dkv = outputs
        of_launch = delta, *allocate_lists(), dq, dkv, num_heads, sm_scale
        return (q, kv, allocate_copy(), *rest, *of_launch)

    return arguments_of
