"""The forward of sparse MLA on GPUs: results, arguments and launches of bound calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashdsa.backends.cpu.sparse_mla import write_without_keys
from flashdsa.backends.memory import aligned, lie_densely, require_writable
from flashdsa.backends.runner import Runner
from flashdsa.kernels.attention.operands import Operands

if TYPE_CHECKING:
    from flashdsa.ops.attention import SparseMlaOperands, SparseMlaOutOperands

UNION_BYTES = 5
"""Bytes of a slot in the groups' lists: a row number and the queries that name it."""
MOST_UNION_BYTES = 256 << 20
"""Most bytes of the lists of one launch; queries that need more are launched in parts."""
OF_QUERIES = ("q", "indices", "topk_length", "out", "lse")
"""Fields of `Operands` with a row for each query."""
COUNTER_KEY = 0
"""Key of the workspace from which items are drawn; those of other launches are sizes."""

Results = tuple[Tensor, Tensor, Tensor]
"""O (S, H, d_v) in q's dtype, lse and max_logits (S, H) fp32; the latter without an element if it
is not asked for."""
Write = Callable[["SparseMlaOutOperands"], None]
"""Writes the results of tensors like those that it was bound to, inside `runner.launching()`;
results have no gaps."""
Choose = Callable[[Runner, "SparseMlaOperands", float, bool], Write]
"""Choose the kernel by (runner, operands with queries and keys, sm_scale, whether max_logits are
asked for)."""


def bind(
    choose: Choose,
    runner: Runner,
    operands: SparseMlaOperands,
    *,
    d_v: int,
    sm_scale: float,
    max_logits: bool,
) -> Callable[[Sequence[Any]], Results]:
    """Results in new buffers."""
    write = _choose(choose, runner, operands, sm_scale, max_logits)
    rows = operands.q.shape[:2]
    empty_out = runner.allocator(*rows, d_v, dtype=operands.q.dtype)
    empty_lse = runner.allocator(*rows, dtype=torch.float32)
    empty_logits = runner.allocator(*(rows if max_logits else (0,)), dtype=torch.float32)
    into = operands.into

    def serve(operands: Sequence[Any]) -> Results:
        q, kv, indices, topk_length, attn_sink = operands
        out, lse, largest = empty_out(), empty_lse(), empty_logits()
        asked = largest if max_logits else None
        write(into(q, kv, indices, out, lse, asked, topk_length, attn_sink))
        return out, lse, largest

    return runner.on_device(serve)


def bind_out(
    choose: Choose, runner: Runner, operands: SparseMlaOutOperands, *, sm_scale: float
) -> Callable[[Sequence[Any]], None]:
    """out (S, H, d_v), lse and, if asked for, max_logits (S, H), written.

    The function that it returns raises ArgumentValueError if the kernels cannot write 16 bytes to
    the address of `out`.
    """
    asked = operands.max_logits is not None
    write = _choose(choose, runner, operands.inputs, sm_scale, asked)
    kind = type(operands)

    def serve(given: Sequence[Any]) -> None:
        operands = kind(*given)
        require_writable("out", operands.out)
        write(operands)

    return runner.on_device(serve)


def _choose(
    choose: Choose, runner: Runner, operands: SparseMlaOperands, sm_scale: float, max_logits: bool
) -> Write:
    if operands.q.shape[0] and operands.kv.shape[0]:
        return choose(runner, operands, sm_scale, max_logits)
    return write_without_keys


class Inputs:
    """The first arguments of every launch on operands like those that it was made for; some are
    copied for it."""

    def __init__(self, runner: Runner, operands: SparseMlaOperands, sm_scale: float) -> None:
        """Look at the operands' layouts and dtypes."""
        sink = operands.attn_sink
        self._dense = lie_densely(operands) and (sink is None or sink.dtype is torch.float32)
        self._signed, self._sm_scale = operands.kv.dtype is torch.int8, sm_scale
        self._every = runner.empty(0, dtype=torch.int32)
        self._no_sink = runner.empty(0, dtype=torch.float32)

    def __call__(self, operands: SparseMlaOutOperands) -> Operands:
        """The arguments."""
        q, kv, indices, out, lse, _, topk_length, attn_sink = operands
        lengths = self._every if topk_length is None else topk_length
        sink = self._no_sink if attn_sink is None else attn_sink
        if not self._dense:
            q, kv, indices, lengths = (x.contiguous() for x in (q, kv, indices, lengths))
            sink = sink.to(torch.float32).contiguous()
        if self._signed:
            kv = kv.view(torch.uint8)
        return Operands(aligned(q), aligned(kv), indices, lengths, sink, out, lse, self._sm_scale)


class Launches:
    """A forward's launches on operands like those that it was made for: several if the lists of
    its groups of queries have no room for all.

    Launches of a stream follow each other, so all have the same lists.
    """

    def __init__(
        self,
        runner: Runner,
        function: Callable[..., Any],
        operands: SparseMlaOperands,
        sm_scale: float,
        group: int = 1,
        last: Callable[[int], tuple[Any, ...]] = lambda _: (),
        drawn: bool = False,
    ) -> None:
        """Choose the number of launches.

        Args:
            group: queries of a group; without lists for 1.
            last: a kernel's arguments after max_logits, by the number of queries.
            drawn: items are drawn, so that the last arguments are an order, a counter, a choice.
        """
        self._function, self._group, self._last = function, group, last
        self._inputs = Inputs(runner, operands, sm_scale)
        self._no_logits = runner.empty(0, dtype=torch.float32)
        num_queries, topk = operands.indices.shape
        most = group * topk
        groups = max(1, MOST_UNION_BYTES // (UNION_BYTES * most))
        groups = min(groups, -(-num_queries // group))
        self._at_a_time = num_queries if group == 1 else group * groups
        self._last_at_once = last(num_queries)
        self._lists: tuple[Callable[[], Tensor], ...] = ()
        self._counter = partial(runner.workspace, COUNTER_KEY, lambda _: (), 1) if drawn else None
        self._every = runner.empty(0, dtype=torch.int32)
        if group > 1:
            self._lists = (
                runner.allocator(groups, most, dtype=torch.int32),
                runner.allocator(groups, most, dtype=torch.uint8),
                runner.allocator(groups, dtype=torch.int32),
            )
        if drawn:
            lists = num_queries if group == 1 else groups
            self._lists += (runner.allocator(lists, 2, dtype=torch.int32),)

    def __call__(self, operands: SparseMlaOutOperands, choice: Tensor | None = None) -> None:
        """Write the results.

        Args:
            choice: of launches whose items are drawn: whether they have work; None: they have.
        """
        x, max_logits = self._inputs(operands), operands.max_logits
        largest = self._no_logits if max_logits is None else max_logits
        lists = [allocate() for allocate in self._lists]
        draws: tuple[Any, ...] = ()
        if self._counter is not None:
            draws = (*self._counter(), self._every if choice is None else choice)
        num_queries = x.q.shape[0]
        if num_queries <= self._at_a_time:
            self._function(*x, largest.view(-1), *self._last_at_once, *lists, *draws)
            return
        for first in range(0, num_queries, self._at_a_time):
            part = slice(first, first + self._at_a_time)
            of_part = {name: getattr(x, name)[part] for name in OF_QUERIES}
            queries = of_part["q"].shape[0]
            of_groups = [each[: -(-queries // self._group)] for each in lists]
            inputs, parts = x._replace(**of_part), largest[part].view(-1)
            self._function(*inputs, parts, *self._last(queries), *of_groups, *draws)
