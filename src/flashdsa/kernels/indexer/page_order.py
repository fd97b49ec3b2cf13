"""The order in which a CTA scores the pages of its part.

It is the order of positions if the list has room for all of them. A longer part is scored from both
ends by turns: pages 0, n - 1, 1, n - 2 and so on. Scores often grow or fall with the position, as
the last tokens matter most. In the order of positions each page of growing scores would have
better ones than those before, so that all entries would reach the list, and it would be cut again
and again. From both ends, the list has the best ones when it is cut first, whichever end they are
at.

The number of a warpgroup's next page is `consumer_warpgroups` higher, an even number, so that a
warpgroup has pages of one end only. Its positions are a constant number of tokens apart.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, const_expr, cute

from flashdsa.problem import PAGE_SIZE


@cute.jit
def from_both_ends(num_pages: Int32, plan: cutlass.Constexpr) -> cutlass.Boolean:
    """Whether a part of so many pages is scored from both ends by turns."""
    longer = cutlass.Boolean(False)
    if const_expr(plan.pages_in_order is not None):
        longer = num_pages > plan.pages_in_order
    return longer


@cute.jit
def page_in_turn(turn: Int32, num_pages: Int32, plan: cutlass.Constexpr) -> Int32:
    """The page, among those of the part, that is scored in that turn."""
    page = turn
    if from_both_ends(num_pages, plan):
        page = turn // 2 if turn % 2 == 0 else num_pages - 1 - turn // 2
    return page


@cute.jit
def pages_from_front(turns: Int32, num_pages: Int32, plan: cutlass.Constexpr) -> Int32:
    """Pages of the part before the first one that comes after so many turns."""
    pages = turns
    if from_both_ends(num_pages, plan):
        pages = (turns + 1) // 2
    return pages


@cute.jit
def pages_between(turn: Int32, turns: Int32, num_pages: Int32, plan: cutlass.Constexpr) -> Int32:
    """Pages of the part that are before that of `turn`, and come after `turns` turns or never."""
    pages = Int32(0)
    if from_both_ends(num_pages, plan) and turn % 2 != 0:
        pages = num_pages - turns
    return pages


class Course(NamedTuple):
    """The pages of a warpgroup, which are those of every `consumer_warpgroups`-th turn."""

    first: Int32  # page of the part
    tokens_apart: Any  # from a page to the next one; fewer than 0 from the end


@cute.jit
def course_from(turn: Int32, num_pages: Int32, plan: cutlass.Constexpr) -> Course:
    """The course of a warpgroup from a turn on."""
    apart = Int32(PAGE_SIZE * plan.consumer_warpgroups)
    if from_both_ends(num_pages, plan):
        apart = apart // 2 if turn % 2 == 0 else -(apart // 2)
    return Course(page_in_turn(turn, num_pages, plan), apart)
