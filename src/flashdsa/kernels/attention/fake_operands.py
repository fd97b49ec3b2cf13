"""Operands to compile kernels of sparse MLA with: tensors and lists of groups without memory."""

from __future__ import annotations

from typing import Any

from cutlass import BFloat16, Float32, Int32, Uint8, Uint16, cute

from flashdsa.dsl.fake_tensors import fake_pages, fake_tensor
from flashdsa.kernels.attention.lists import members_bits
from flashdsa.kernels.attention.operands import MoreOperands, Operands
from flashdsa.problem import D_QK, D_V
from flashdsa.row_formats import V32, RowFormat


def fake_operands(
    heads: int | None = None, *, form: RowFormat | None = None, d_qk: int = D_QK, d_v: int = D_V
) -> Operands:
    """Operands of a forward or a decode. `heads`: of a query, where the plan says how many; None:
    any number. `form`: of packed rows of kv. `d_qk`, `d_v`: columns of a key and of its value."""
    queries, keys, topk, lengths, sinks = (cute.sym_int32() for _ in range(5))
    rows = (queries, heads or cute.sym_int32())
    row = (Uint8, (keys, form.row_bytes)) if form else (BFloat16, (keys, d_qk))
    is_paged = form is not None and form != V32
    return Operands(
        q=fake_tensor(BFloat16, (*rows, d_qk)),
        kv=fake_pages(*row) if is_paged else fake_tensor(*row),
        indices=fake_tensor(Int32, (queries, topk), 4),
        topk_length=fake_tensor(Int32, (lengths,), 4),
        attn_sink=fake_tensor(Float32, (sinks,), 4),
        out=fake_tensor(BFloat16, (*rows, d_v)),
        lse=fake_tensor(Float32, rows, 4),
        sm_scale=Float32(1.0),
    )


def fake_more(operands: Operands, form: RowFormat | None = None) -> MoreOperands:
    """Operands of a second source beside those of the first one."""
    keys, slots = cute.sym_int32(), cute.sym_int32()
    ends, lengths, extra_ends = (fake_tensor(Int32, (cute.sym_int32(),), 4) for _ in range(3))
    queries, d_qk = operands.indices.shape[0], operands.q.shape[2]
    return MoreOperands(
        ends=ends,
        extra_kv=fake_pages(Uint8, (keys, form.row_bytes))
        if form
        else fake_tensor(BFloat16, (keys, d_qk)),
        extra_indices=fake_tensor(Int32, (queries, slots), 4),
        extra_topk_length=lengths,
        extra_ends=extra_ends,
        block_log2=Int32(0),
    )


def fake_packed_pages() -> Any:
    """Pages of packed rows of any format."""
    return fake_pages(Uint8, (cute.sym_int32(), cute.sym_int32()))


def fake_max_logits() -> Any:
    """Logits' maxima of a forward: for each head of a query, or without an element."""
    return fake_tensor(Float32, (cute.sym_int32(),), 4)


def fake_lists(queries: int) -> list[Any]:
    """Rows, members, counts, present and named of groups of `queries` queries."""
    groups, capacity = cute.sym_int32(), cute.sym_int32()
    member = Uint8 if members_bits(queries) == Uint8.width else Uint16
    return [
        fake_tensor(Int32, (groups, capacity), 4),
        fake_tensor(member, (groups, capacity), member.width // 8),
        *(fake_tensor(Int32, (groups,), 4) for _ in range(3)),
    ]
