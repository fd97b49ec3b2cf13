"""The forward of sparse MLA on GPUs: common work of similar calls, results, parts of the
queries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashdsa.backends.cpu.sparse_mla import write_without_keys
from flashdsa.backends.memory import aligned, lie_densely, require_writable
from flashdsa.backends.runner import Runner
from flashdsa.kernels.attention.operands import Operands
from flashdsa.operands import SparseMlaOperands, SparseMlaOutOperands

UNION_BYTES = 5
"""Bytes of a slot in the groups' lists: a row number and the queries that name it."""
MOST_UNION_BYTES = 256 << 20
"""Most bytes of the lists of one launch; queries that need more are launched in parts."""
OF_QUERIES = ("q", "indices", "topk_length", "out", "lse")
"""Fields of `Operands` with a row for each query."""

Results = tuple[Tensor, Tensor, Tensor]
"""O (S, H, d_v) in q's dtype, lse and max_logits (S, H) fp32; the latter without an element if it
is not asked for."""
Launch = Callable[[], None]
"""Writes the results of fixed tensors, on torch's current stream."""
Write = Callable[[SparseMlaOutOperands], None]
"""Writes the results of tensors like those that it was bound to, inside `runner.launching()`."""
Arguments = Callable[[SparseMlaOutOperands], list[tuple[Any, ...]]]
"""Arguments of a function's launches, one after the other; some operands are copied for them."""


class Kernel(NamedTuple):
    """Server of similar calls: a compiled function and its arguments."""

    function: Callable[..., Any]
    arguments: Arguments


Choose = Callable[[Runner, SparseMlaOperands, float, bool], Kernel]
"""Choose the kernel by (runner, operands with queries and keys, sm_scale, whether max_logits are
asked for); it serves operands that differ from these only in their values."""


def forward(
    choose: Choose,
    runner: Runner,
    operands: SparseMlaOperands,
    *,
    d_v: int,
    sm_scale: float,
    max_logits: bool,
) -> Results:
    """Results of one call."""
    bound = bind(choose, runner, operands, d_v=d_v, sm_scale=sm_scale, max_logits=max_logits)
    return bound(operands)


def bind(
    choose: Choose,
    runner: Runner,
    operands: SparseMlaOperands,
    *,
    d_v: int,
    sm_scale: float,
    max_logits: bool,
) -> Callable[[Sequence[Any]], Results]:
    """`forward` of operands that differ from these only in their values."""
    write = _bind_write(choose, runner, operands, sm_scale, max_logits)

    def serve(operands: Sequence[Any]) -> Results:
        into, results = with_results(runner, operands, d_v, max_logits)
        write(into)
        return results

    return runner.on_device(serve)


def with_results(
    runner: Runner, operands: Sequence[Any], d_v: int, max_logits: bool
) -> tuple[SparseMlaOutOperands, Results]:
    """The operands, those of `SparseMlaOperands`, with new buffers, and these buffers."""
    q, kv, indices, topk_length, attn_sink = operands
    rows = q.shape[:2]
    out = runner.empty(*rows, d_v, dtype=q.dtype)
    lse = runner.empty(*rows, dtype=torch.float32)
    largest = runner.empty(*(rows if max_logits else (0,)), dtype=torch.float32)
    asked = largest if max_logits else None
    into = SparseMlaOutOperands(q, kv, indices, out, lse, asked, topk_length, attn_sink)
    return into, (out, lse, largest)


def forward_out(
    choose: Choose, runner: Runner, operands: SparseMlaOutOperands, *, sm_scale: float
) -> None:
    """out (S, H, d_v), lse and, if asked for, max_logits (S, H), written."""
    bind_out(choose, runner, operands, sm_scale=sm_scale)(operands)


def bind_out(
    choose: Choose, runner: Runner, operands: SparseMlaOutOperands, *, sm_scale: float
) -> Callable[[Sequence[Any]], None]:
    """`forward_out` of operands that differ from these only in their values.

    The function that it returns raises ArgumentValueError if the kernels cannot write 16 bytes to
    the address of `out`.
    """
    asked = operands.max_logits is not None
    write = _bind_write(choose, runner, operands.inputs, sm_scale, asked)

    def serve(given: Sequence[Any]) -> None:
        operands = SparseMlaOutOperands(*given)
        require_writable("out", operands.out)
        write(operands)

    return runner.on_device(serve)


def prepare(
    choose: Choose, runner: Runner, operands: SparseMlaOutOperands, *, sm_scale: float
) -> Launch:
    """`forward_out` of these tensors, to be launched any number of times on one stream.

    Raises:
        ArgumentValueError: `out` has an address that the kernels cannot write 16 bytes to.
    """
    require_writable("out", operands.out)
    inputs, asked = operands.inputs, operands.max_logits is not None
    if not _has_keys(inputs):
        return partial(write_without_keys, operands)
    return prepared(runner, choose(runner, inputs, sm_scale, asked), operands)


def prepare_plan(
    arguments_for: Callable[[Runner, Any, SparseMlaOperands, float], Arguments],
    runner: Runner,
    function: Callable[..., Any],
    plan: Any,
    operands: SparseMlaOutOperands,
    sm_scale: float,
) -> Launch:
    """`prepare` with the compiled function of any plan.

    Args:
        arguments_for: an architecture's function that gives those of a plan's function.
    """
    arguments = arguments_for(runner, plan, operands.inputs, sm_scale)
    return prepared(runner, Kernel(function, arguments), operands)


def prepared(runner: Runner, kernel: Kernel, operands: SparseMlaOutOperands) -> Launch:
    """The kernel's launches of these tensors."""
    calls = kernel.arguments(operands)

    def launch() -> None:
        with runner.launching():
            for arguments in calls:
                kernel.function(*arguments)

    return launch


def _bind_write(
    choose: Choose, runner: Runner, operands: SparseMlaOperands, sm_scale: float, max_logits: bool
) -> Write:
    if not _has_keys(operands):
        return write_without_keys
    function, arguments_of = choose(runner, operands, sm_scale, max_logits)

    def write(operands: SparseMlaOutOperands) -> None:
        for arguments in arguments_of(operands):
            function(*arguments)

    return write


def _has_keys(operands: SparseMlaOperands) -> bool:
    return bool(operands.q.shape[0] and operands.kv.shape[0])


def bind_operands(
    runner: Runner, operands: SparseMlaOperands, sm_scale: float
) -> Callable[[SparseMlaOutOperands], Operands]:
    """First arguments of every launch, of operands that differ from these only in their values;
    some are copied for it. Results have no gaps."""
    every = runner.empty(0, dtype=torch.int32)
    no_sink = runner.empty(0, dtype=torch.float32)
    given_sink = operands.attn_sink
    dense = lie_densely(operands) and (given_sink is None or given_sink.dtype is torch.float32)
    signed = operands.kv.dtype is torch.int8

    def launch_operands(operands: SparseMlaOutOperands) -> Operands:
        q, kv, indices, out, lse, _, topk_length, attn_sink = operands
        lengths = every if topk_length is None else topk_length
        sink = no_sink if attn_sink is None else attn_sink
        if not dense:
            q, kv, indices, lengths = (x.contiguous() for x in (q, kv, indices, lengths))
            sink = sink.to(torch.float32).contiguous()
        if signed:
            kv = kv.view(torch.uint8)
        return Operands(aligned(q), aligned(kv), indices, lengths, sink, out, lse, sm_scale)

    return launch_operands


def bind_arguments(
    runner: Runner,
    group: int,
    operands: SparseMlaOperands,
    sm_scale: float,
    last: Callable[[int], tuple[Any, ...]],
) -> Arguments:
    """Arguments of a forward's launches on operands that differ from these only in their values.

    Launches of a stream follow each other, so all have the same groups' lists.

    Args:
        group: queries of a group; without lists for 1.
        last: a kernel's arguments after max_logits, by the number of queries.
    """
    num_queries, topk = operands.indices.shape
    launch_operands = bind_operands(runner, operands, sm_scale)
    no_logits = runner.empty(0, dtype=torch.float32)
    most = group * topk
    groups_at_a_time = max(1, MOST_UNION_BYTES // (UNION_BYTES * most))
    groups_at_a_time = min(groups_at_a_time, -(-num_queries // group))
    at_once = group == 1 or num_queries <= group * groups_at_a_time
    last_at_once = last(num_queries)

    def arguments(operands: SparseMlaOutOperands) -> list[tuple[Any, ...]]:
        x, max_logits = launch_operands(operands), operands.max_logits
        largest = no_logits if max_logits is None else max_logits
        lists: tuple[Tensor, ...] = ()
        if group > 1:
            lists = (
                runner.empty(groups_at_a_time, most, dtype=torch.int32),
                runner.empty(groups_at_a_time, most, dtype=torch.uint8),
                runner.empty(groups_at_a_time, dtype=torch.int32),
            )
        if at_once:
            return [(*x, largest.view(-1), *last_at_once, *lists)]
        calls: list[tuple[Any, ...]] = []
        for first in range(0, num_queries, group * groups_at_a_time):
            part = slice(first, first + group * groups_at_a_time)
            of_part = {name: getattr(x, name)[part] for name in OF_QUERIES}
            queries = of_part["q"].shape[0]
            of_groups = tuple(each[: -(-queries // group)] for each in lists)
            parts = largest[part].view(-1)
            calls.append((*x._replace(**of_part), parts, *last(queries), *of_groups))
        return calls

    return arguments
