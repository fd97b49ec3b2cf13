"""Parts of an item that several CTAs share: slots in device memory, and tickets.

A CTA stores its part, O in f16 divided by its own sums and its statistics, in one of its two slots
of the workspace. Then it draws a ticket from the item's counter. Whoever draws the last one sees
all parts and merges them in their order, its own part too as it is in its slot, so that it does not
matter who it is. Nobody waits for another CTA.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from flashdsa.dsl.fragments import F16_KIND, pack
from flashdsa.dsl.gmem import store4
from flashdsa.hw import WARPGROUP_SIZE
from flashdsa.kernels.attention.sm90.decode.shared.context import Context
from flashdsa.kernels.attention.sm90.decode.shared.dealing import Parts
from flashdsa.kernels.attention.sm90.decode.shared.plan import CTA_SLOTS
from flashdsa.kernels.attention.sm90.decode.shared.words import from_f16

LINE_WORDS = 4
"""Words of a thread in a line of a slot: 16 bytes."""
LINE_VALUES = 2 * LINE_WORDS
CONSUMER_THREADS = 2 * WARPGROUP_SIZE


class Workspace(NamedTuple):
    """Device memory of the launches of a stream, or of those that a graph captures."""

    counters: cute.Tensor  # (CTAs,) int32: parts that are stored, by the CTA of an item's first
    slots: cute.Tensor  # (2 CTAs, slot_words) int32


@cute.jit
def slot_of_part(workspace: Workspace, parts: Parts, number: Int32) -> Any:
    """Pointer to the words of a part: the item's first one is its CTA's last stretch, each other
    one its CTA's first."""
    slot = (parts.first + number) * CTA_SLOTS
    if number == 0:
        slot += 1
    return workspace.slots.iterator + Int64(slot) * workspace.slots.shape[1]


def at_line(slot: Any, thread: Any, line: int) -> Any:
    """Pointer to a thread's words of a line; `thread`: of both consumers."""
    return slot + (line * CONSUMER_THREADS + thread) * LINE_WORDS


@cute.jit
def draw_ticket(
    ctx: Context, workspace: Workspace, parts: Parts, number: Int32, consumer: Any
) -> Boolean:
    """All threads of both consumers, which have stored a part: whether all parts are stored, so
    that they merge them.

    Args:
        number: parts that the CTA has stored before.
    """
    ticket = ctx.memory.ticket.array(Int32, 1)
    counter = workspace.counters.iterator + parts.first
    ctx.memory.part_stored.arrive()
    if consumer == 0 and ctx.thread == 0:
        # part_stored, a phase a part: all threads have stored theirs, and have read the ticket
        # before. The atomic is a release of that, and an acquire of what CTAs with smaller tickets
        # stored; ticket_full passes it on.
        ctx.memory.part_stored.wait_for(number)
        drawn = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
        if drawn == parts.count - 1:
            counter.store(Int32(0))
        ticket[0] = drawn
        ctx.memory.ticket_full.arrive()
    cute.arch.sync_warp()
    ctx.memory.ticket_full.wait_for(number)
    return Boolean(ticket[0] == parts.count - 1)


def load_values(pointer: Any) -> list[Any]:
    """Load four words of a part that another CTA may have stored."""
    return list(
        cute.arch.inline_ptx(
            "ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Int32] * 4,
            read_only_args=[pointer],
        )
    )


def store_values(slot: Any, thread: Any, count: int, value_of: Callable[[int], Any]) -> None:
    """Store a thread's values of a part, in f16.

    Args:
        thread: of both consumers. value_of: the value of a number below `count`.
    """
    for line in range(count // LINE_VALUES):
        of_line = [value_of(LINE_VALUES * line + i) for i in range(LINE_VALUES)]
        words = [pack(of_line[2 * i], of_line[2 * i + 1], F16_KIND) for i in range(LINE_WORDS)]
        store4(at_line(slot, thread, line), words)


@cute.jit
def add_values(slot: Any, thread: Any, out: cute.Tensor, weights: list[Any]) -> None:
    """Add a thread's values of a part to `out`; `weights`: of the values, one each."""
    for line in cutlass.range_constexpr(cute.size(out) // LINE_VALUES):
        words = load_values(at_line(slot, thread, line))
        for i in cutlass.range_constexpr(LINE_WORDS):
            at = LINE_VALUES * line + 2 * i
            both = from_f16(words[i])
            for odd in cutlass.range_constexpr(2):
                weight = weights[at + odd]
                # 0 times a part without a key may be NaN.
                value = both[odd] if weight != 0.0 else Float32(0.0)
                out[at + odd] = out[at + odd] + weight * value
