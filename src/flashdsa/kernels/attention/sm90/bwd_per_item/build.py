"""Compilation of the backward of 64 rows at a time; shapes are dynamic, not the plan's values."""

from __future__ import annotations

from typing import Any

from cutlass import BFloat16, Float32, Int32, cute
from cutlass.cute.runtime import make_fake_stream

from flashdsa.dsl.compile_options import options_for
from flashdsa.dsl.fake_tensors import fake_tensor
from flashdsa.hw import SM90
from flashdsa.kernels.attention.fake_operands import fake_lists
from flashdsa.kernels.attention.sm90.bwd_per_item.kernel import launch_backward
from flashdsa.kernels.attention.sm90.bwd_per_item.plan import CURSORS, KEY_WORDS, PAIR, PerItemPlan


def compile_per_item(plan: PerItemPlan) -> Any:
    """A TVM-FFI function on torch's current stream; needs no GPU. Its arguments:

    (q, kv, copy, do, lse, out, indices, topk_length, delta, rows, members, counts, present, named,
    dq, dkv, heads, sm_scale, spread, num_ctas). If plan.more is not 0, then (more_rows,
    more_members, more_counts, more_present, more_named, choice, ratio, most_keys). A plan with
    slots has no spread, and (num_sms, slots, words, cursors, begins, keys, unordered, again,
    row_of_key, unit_groups) follow num_ctas. A plan with tickets has them last. See
    `launch_backward`.
    """
    d_qk, d_v = plan.tile.d_qk, plan.tile.d_v
    heads, keys, queries, topk, lengths = (cute.sym_int32() for _ in range(5))
    rows = queries, heads
    slots = fake_slots(plan, keys) if plan.slots else []
    more = []
    if plan.more:
        more = [*fake_lists(plan.more), fake_tensor(Int32, (1,), 4), Float32(1.0), Int32(1)]
    tickets = [fake_tensor(Int32, (cute.sym_int32(),), 4)] if plan.tickets else []
    return cute.compile(
        launch_backward,
        plan,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        fake_tensor(BFloat16, (*rows, d_qk)),
        fake_tensor(BFloat16, (keys, d_qk)),
        fake_tensor(BFloat16, (keys, d_qk)),
        fake_tensor(BFloat16, (*rows, d_v)),
        fake_tensor(Float32, rows, 4),
        fake_tensor(BFloat16, (*rows, d_v)),
        fake_tensor(Int32, (queries, topk), 4),
        fake_tensor(Int32, (lengths,), 4),
        fake_tensor(Float32, rows, 4),
        *fake_lists(plan.queries),
        fake_tensor(BFloat16, (*rows, d_qk)),
        fake_tensor(Float32, (keys, d_qk)),
        Int32(64),
        Float32(1.0),
        # spread and num_ctas; with slots num_ctas and num_sms.
        Int32(1),
        Int32(1),
        *slots,
        *more,
        *tickets,
        options=options_for(SM90),
    )


def fake_slots(plan: PerItemPlan, keys: Any) -> list[Any]:
    """Fake tensors: slots, those of `Offsets`, and unit_groups."""
    groups, capacity, slots, words, parts, begins, room = (cute.sym_int32() for _ in range(7))
    return [
        fake_tensor(Int32, (slots, plan.slot_words)),
        fake_tensor(Int32, (keys, words, PAIR)),
        fake_tensor(Int32, (parts, CURSORS), 4),
        fake_tensor(Int32, (begins,), 4),
        fake_tensor(Int32, (keys, KEY_WORDS)),
        fake_tensor(Int32, (groups,), 4),
        fake_tensor(Int32, (room,), 4),
        fake_tensor(Int32, (groups, capacity), 4),
        Int32(1),
    ]
