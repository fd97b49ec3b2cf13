"""The forward of sparse MLA on GPUs: results, arguments and launches of bound calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import call
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flashdsa.backends.cpu.sparse_mla import write_without_keys
from flashdsa.backends.memory import aligned, lie_densely, require_writable
from flashdsa.backends.packed_rows import aligned_pages, num_rows
from flashdsa.backends.runner import Runner
from flashdsa.hw import BULK_ALIGNMENT
from flashdsa.kernels.attention.operands import MoreOperands, Operands
from flashdsa.row_formats import RowFormat

if TYPE_CHECKING:
    from flashdsa.ops.attention import SparseMlaOperands, SparseMlaOutOperands
    from flashdsa.ops.attention_backward import MlaBwdOperands

    Lists = SparseMlaOperands | SparseMlaOutOperands | MlaBwdOperands

UNION_BYTES = 5
"""Bytes of a slot in the groups' lists: a row number and the queries that name it."""
MOST_UNION_BYTES = 256 << 20
"""Most bytes of the lists of one launch; queries that need more are launched in parts."""
OF_QUERIES = ("q", "indices", "topk_length", "out", "lse")
"""Fields of `Operands` with a row for each query."""
LIKELY_RANGE = 128
"""Slots that a range is taken to have, of a longer source: DeepSeek-V4's window."""
COUNTERS_KEY, COUNTERS = 0, 4
"""Key of the workspace of draws and samples, as those of other launches are sizes; its words."""

Results = tuple[Tensor, Tensor, Tensor]
"""O (S, H, d_v) in q's dtype, lse and max_logits (S, H) fp32; the latter without an element if it
is not asked for."""
Write = Callable[["SparseMlaOutOperands"], None]
"""Writes the results of tensors like those that it was bound to, inside `runner.launching()`;
results have no gaps."""
Choose = Callable[..., Write]
"""Choose the kernel by (runner, operands with queries and keys, sm_scale, whether max_logits are
asked for, and by keyword what a backend has besides)."""


def bind(
    choose: Choose,
    runner: Runner,
    operands: SparseMlaOperands,
    *,
    d_v: int,
    sm_scale: float,
    max_logits: bool,
    **choices: Any,
) -> Callable[[Sequence[Any]], Results]:
    """Results in new buffers."""
    write = _choose(choose, runner, operands, sm_scale, max_logits, **choices)
    rows = operands.q.shape[:2]
    empty_out = runner.allocator(*rows, d_v, dtype=operands.q.dtype)
    empty_lse = runner.allocator(*rows, dtype=torch.float32)
    empty_logits = runner.allocator(*(rows if max_logits else (0,)), dtype=torch.float32)
    into = operands.into

    def serve(operands: Sequence[Any]) -> Results:
        q, kv, indices, *lists = operands
        out, lse, largest = empty_out(), empty_lse(), empty_logits()
        asked = largest if max_logits else None
        write(into(q, kv, indices, out, lse, asked, *lists))
        return out, lse, largest

    return runner.on_device(serve)


def bind_out(
    choose: Choose,
    runner: Runner,
    operands: SparseMlaOutOperands,
    *,
    sm_scale: float,
    **choices: Any,
) -> Callable[[Sequence[Any]], None]:
    """out (S, H, d_v), lse and, if asked for, max_logits (S, H), written.

    The function that it returns raises ArgumentValueError if the kernels cannot write 16 bytes to
    the address of `out`.
    """
    asked = operands.max_logits is not None
    write = _choose(choose, runner, operands.inputs, sm_scale, asked, **choices)
    kind = type(operands)

    def serve(given: Sequence[Any]) -> None:
        operands = kind(*given)
        require_writable("out", operands.out)
        write(operands)

    return runner.on_device(serve)


def _choose(
    choose: Choose,
    runner: Runner,
    operands: SparseMlaOperands,
    sm_scale: float,
    max_logits: bool,
    **choices: Any,
) -> Write:
    sources = operands.kv, operands.extra_kv
    if not operands.q.shape[0] or not any(kv is not None and kv.shape[0] for kv in sources):
        return write_without_keys
    return choose(runner, operands, sm_scale, max_logits, **choices)


def is_joined(operands: Lists, index_block: int) -> bool:
    """Whether a call has a second source, a range or blocks of rows."""
    return operands.extra_kv is not None or operands.ends is not None or index_block != 1


def slots_of(operands: Lists, index_block: int) -> tuple[int, int]:
    """Most slots of a query's main list and of its extra one; a range may be as long as its
    source."""
    kv, slots = operands.extra_kv, operands.extra_indices
    main = operands.indices.shape[1] * index_block
    if operands.ends is not None:
        main = num_rows(operands.kv)
    if kv is None or slots is None:
        return main, 0
    return main, slots.shape[1] if operands.extra_ends is None else num_rows(kv)


def likely_slots(operands: Lists, index_block: int) -> tuple[int, int]:
    """Slots to estimate times by: the host does not know how long a range is, and one over a long
    source is a window far more often than all of it."""
    main, extra = slots_of(operands, index_block)
    if operands.ends is not None:
        main = min(main, LIKELY_RANGE)
    if operands.extra_ends is not None:
        extra = min(extra, LIKELY_RANGE)
    return main, extra


def _given(one: Tensor | None, none: Tensor) -> Tensor:
    """An operand without gaps, or what stands for none."""
    return none if one is None else one.contiguous()


class Inputs:
    """The first arguments of every launch on operands like those that it was made for; some are
    copied for it."""

    def __init__(
        self,
        runner: Runner,
        operands: SparseMlaOperands,
        sm_scale: float,
        index_block: int = 1,
        pages: RowFormat | None = None,
    ) -> None:
        """Look at the operands' layouts and dtypes. `pages`: the format of a kv that the kernel
        takes in pages."""
        sink = operands.attn_sink
        self._pages = pages
        self._dense = lie_densely(operands) and (sink is None or sink.dtype is torch.float32)
        self._sm_scale = sm_scale
        kv = operands.kv
        self._as_it_is = (
            self._dense and pages is None and kv.dim() == 2 and kv.dtype is not torch.int8
        )
        """Whether kernels read kv in place, where it is aligned."""
        self._every = runner.empty(0, dtype=torch.int32)
        self._no_sink = runner.empty(0, dtype=torch.float32)
        self._block_log2 = index_block.bit_length() - 1
        self._no_rows = runner.empty(0, kv.shape[-1], dtype=kv.dtype)
        self._no_slots = runner.empty(operands.q.shape[0], 0, dtype=torch.int32)

    def more(self, operands: SparseMlaOutOperands) -> MoreOperands:
        """The arguments of a second source, of ranges and of blocks."""
        extra = operands.extra_kv
        return MoreOperands(
            ends=_given(operands.ends, self._every),
            extra_kv=self._source(self._no_rows if extra is None else extra),
            extra_indices=_given(operands.extra_indices, self._no_slots),
            extra_topk_length=_given(operands.extra_topk_length, self._every),
            extra_ends=_given(operands.extra_ends, self._every),
            block_log2=self._block_log2,
        )

    def joined(self, operands: SparseMlaOutOperands) -> tuple[Any, ...]:
        """The arguments of kernels of two sources."""
        return *self(operands), *self.more(operands)

    def _source(self, kv: Tensor) -> Tensor:
        """Rows or pages as the kernel takes them."""
        kv = kv.view(torch.uint8) if kv.dtype is torch.int8 else kv
        if self._pages is not None:
            return aligned_pages(kv)
        rows = kv.flatten(0, 1) if kv.dim() == 3 else kv
        return aligned(rows if self._dense else rows.contiguous())

    def __call__(self, operands: SparseMlaOutOperands) -> tuple[Any, ...]:
        """The arguments, those of `Operands`."""
        q, kv, indices, out, lse, _, topk_length, attn_sink = operands[:8]
        lengths = self._every if topk_length is None else topk_length
        sink = self._no_sink if attn_sink is None else attn_sink
        if not self._dense:
            q, indices, lengths = (x.contiguous() for x in (q, indices, lengths))
            sink = sink.to(torch.float32).contiguous()
        if q.data_ptr() % BULK_ALIGNMENT:
            q = q.clone()
        if not self._as_it_is or kv.data_ptr() % BULK_ALIGNMENT:
            kv = self._source(kv)
        return q, kv, indices, lengths, sink, out, lse, self._sm_scale


class Form(NamedTuple):
    """A compiled forward.

    Attributes:
        function: its arguments: `Operands`, max_logits, `last`, joined `MoreOperands`, lists of
            groups of several queries, and if items are drawn counters and a choice.
        group: queries of a group.
        last: arguments by the number of queries.
        drawn: items are drawn.
        joined: `MoreOperands` follow `last`.
    """

    function: Callable[..., Any]
    group: int = 1
    last: Callable[[int], tuple[Any, ...]] = lambda _: ()
    drawn: bool = False
    joined: bool = False

    def lists(
        self, runner: Runner, num_queries: int, topk: int, main_slots: int = 0
    ) -> list[Callable[[], Any]]:
        """Functions that allocate the lists of the groups of `num_queries` queries.

        Args:
            topk: slots of all lists of a query. main_slots: those of the main list, if joined.
        """
        groups, most = -(-num_queries // self.group), self.group * topk
        of_groups = [
            runner.allocator(groups, most, dtype=torch.int32),
            runner.allocator(groups, most, dtype=torch.uint8),
            runner.allocator(groups, dtype=torch.int32),
        ]
        of_both = [
            runner.allocator(num_queries, topk, dtype=torch.int32),
            runner.allocator(num_queries, dtype=torch.int32),
            lambda: main_slots,
        ]
        return (of_groups + of_both * self.joined) * (self.group > 1)


def counters_of(runner: Runner) -> Callable[[], tuple[Any, ...]]:
    """A function that gives the counters of draws and samples, one tensor."""
    return partial(runner.workspace, COUNTERS_KEY, lambda _: (), COUNTERS)


def queries_at_a_time(group: int, topk: int) -> int:
    """Queries whose groups' lists have room in one launch."""
    return max(1, MOST_UNION_BYTES // (UNION_BYTES * group * topk)) * group


class Launches:
    """A forward's launches on operands like those that it was made for: several if the lists of
    its groups of queries have no room for all.

    Launches of a stream follow each other, so all have the same lists. Of several forms the first
    one chooses which of them writes the results; the others do nothing.
    """

    def __init__(
        self,
        runner: Runner,
        operands: SparseMlaOperands,
        sm_scale: float,
        *forms: Form,
        index_block: int = 1,
    ) -> None:
        """Choose the number of launches."""
        self._inputs = Inputs(runner, operands, sm_scale, index_block)
        self._no_logits = runner.empty(0, dtype=torch.float32)
        num_queries, topk = operands.indices.shape
        group, main_slots = max(form.group for form in forms), 0
        if any(form.joined for form in forms):
            main_slots, extra_slots = slots_of(operands, index_block)
            topk = main_slots + extra_slots
        at_a_time = queries_at_a_time(group, topk)
        self._at_a_time = min(at_a_time, num_queries) if group > 1 else num_queries
        self._forms = [
            (form, form.last(num_queries), form.lists(runner, self._at_a_time, topk, main_slots))
            for form in forms
        ]
        self._counters: Callable[[], tuple[Any, ...]] | None = None
        if any(form.drawn for form in forms):
            self._counters = counters_of(runner)
            self._choice = runner.allocator(int(len(forms) > 1), dtype=torch.int32)

    def __call__(self, operands: SparseMlaOutOperands) -> None:
        """Write the results."""
        x = self._inputs(operands)
        largest = self._no_logits if operands.max_logits is None else operands.max_logits
        draws = () if self._counters is None else (*self._counters(), self._choice())
        num_queries = x[0].shape[0]
        if num_queries <= self._at_a_time:
            logits = largest.view(-1) if largest.dim() == 2 else largest
            for form, last, lists in self._forms:
                more = self._inputs.more(operands) if form.joined else ()
                of_draws = draws if form.drawn else ()
                form.function(*x, logits, *last, *more, *map(call, lists), *of_draws)
            return
        memory = [[allocate() for allocate in lists] for _, _, lists in self._forms]
        for first in range(0, num_queries, self._at_a_time):
            part = slice(first, first + self._at_a_time)
            of_part = {name: getattr(Operands(*x), name)[part] for name in OF_QUERIES}
            queries = of_part["q"].shape[0]
            inputs, parts = Operands(*x)._replace(**of_part), largest[part].view(-1)
            for (form, _, _), every in zip(self._forms, memory, strict=True):
                groups = -(-queries // form.group)
                of_form = (*form.last(queries), *(each[:groups] for each in every))
                form.function(*inputs, parts, *of_form, *(draws * form.drawn))
