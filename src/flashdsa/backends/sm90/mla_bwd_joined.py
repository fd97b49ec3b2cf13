"""One source and one list of ids for Hopper's backward, from two sources, ranges or blocks of rows.

The rows of both sources lie one after the other, in a copy, and so do their gradients: what follows
has one source. A copy of all rows takes some thousandth of the backward's time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashdsa.backends.memory import readable
from flashdsa.backends.runner import Runner
from flashdsa.backends.sparse_mla_launches import slots_of
from flashdsa.kernels.catalog import MLA_BWD_JOIN

if TYPE_CHECKING:
    from flashdsa.ops.attention_backward import MlaBwdOperands

Join = Callable[["MlaBwdOperands", Tensor, "slice | None"], tuple[Tensor, Tensor]]
"""(operands, rows of both sources, queries, None: all): ids and lengths of these queries."""


def some_of(x: Tensor, some: slice | None) -> Tensor:
    """Some queries of `x`; None: all, in less time."""
    return x if some is None else x[some]


def rows_of(operands: MlaBwdOperands) -> Tensor:
    """Rows of both sources, kv's first, as kernels read them."""
    if operands.extra_kv is None:
        return readable(operands.kv)
    return torch.cat([operands.kv, operands.extra_kv])


def of_sources(rows: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Gradients of both sources, of which the first one has `count` rows, in memory of its own."""
    return rows[:count].to(dtype), rows[count:].to(dtype, copy=True)


def bind_join(runner: Runner, operands: MlaBwdOperands, index_block: int) -> Join:
    """Bind the launch that joins the lists of queries of operands like these."""
    function, topk = (
        runner.function(MLA_BWD_JOIN, MLA_BWD_JOIN.plan),
        sum(slots_of(operands, index_block)),
    )
    every, block_log2 = runner.empty(0, dtype=torch.int32), index_block.bit_length() - 1

    def join(operands: MlaBwdOperands, rows: Tensor, some: slice | None) -> tuple[Tensor, Tensor]:
        def given(one: Tensor | None) -> Tensor:
            return every if one is None else some_of(one, some).contiguous()

        x, count = operands, operands.kv.shape[0]
        indices = given(x.indices)
        queries = indices.shape[0]
        extra = runner.empty(queries, 0, dtype=torch.int32)
        if x.extra_indices is not None:
            extra = given(x.extra_indices)
        ids = runner.empty(queries, topk, dtype=torch.int32)
        lengths = runner.empty(queries, dtype=torch.int32)
        main = rows[:count], indices, given(x.topk_length), given(x.ends)
        others = rows[count:], extra, given(x.extra_topk_length), given(x.extra_ends)
        function(*main, *others, block_log2, ids, lengths)
        return ids, lengths

    return join
