"""The cases of `flashdsa check`: which inputs each operation is judged on.

INVARIANT: every kernel that a backend may choose is reached by one of them, and every value of each
choice of its plan: `tests/verify/test_reach.py` holds it against `launch_list`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from flashdsa.row_formats import ROW_FORMATS
from flashdsa.verify.indexer_cases import IndexerCase
from flashdsa.verify.indexer_training_cases import IndexerTrainingCase
from flashdsa.verify.prefill_cases import PrefillCase, causal
from flashdsa.verify.sparse_mla_cases import SparseMlaCase

_BF16, _FP16, _FP32, _FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

# fmt: off
ATTENTION = [
    # name, S, S_kv, H, topk: forward, backward and both by autograd
    SparseMlaCase("one query, 64 of 200 keys", 1, 200, 128, 64, invalid=True, poison=True),
    SparseMlaCase("model sizes: 4 x 128 heads, 2048 of 8192 keys", 4, 8192, 128, 2048),
    SparseMlaCase("half the heads, sink, lengths", 4, 4096, 64, 1024, attn_sink="finite",
                  topk_length=True),
    SparseMlaCase("invalid slots over NaN rows, duplicates", 6, 500, 16, 96, duplicates=True,
                  invalid=True, empty_rows=True, topk_length=True, poison=True,
                  attn_sink="infinite"),
    SparseMlaCase("3000 slots: several key blocks", 3, 4000, 16, 3000, topk_length=True),
    SparseMlaCase("logits to 60", 6, 500, 32, 128, logit_scale=60.0, rounded_dots=True,
                  from_exact_o=True),
    SparseMlaCase("logits to 1e4", 6, 500, 32, 128, logit_scale=1e4),
    SparseMlaCase("logits near -1e4", 6, 500, 32, 128, logit_shift=-1e4),
    SparseMlaCase("a NaN row that one query names", 7, 60, 16, 24, nan_row=True),
    SparseMlaCase("fp16", 4, 300, 16, 96, dtype=_FP16, attn_sink="finite", invalid=True),
    SparseMlaCase("fp32", 4, 1000, 32, 256, dtype=_FP32),
    SparseMlaCase("fp64", 4, 1000, 32, 256, dtype=_FP64),
    SparseMlaCase("other dims: 24/16", 8, 100, 5, 33, d_qk=24, d_v=16),
    SparseMlaCase("512 columns", 5, 300, 64, 128, d_qk=512, invalid=True, poison=True),
    SparseMlaCase("two sources", 10, 130, 16, 70, d_qk=512, extra_keys=90, extra_topk=40,
                  duplicates=True, invalid=True, empty_rows=True, topk_length=True, poison=True,
                  attn_sink="infinite"),
    SparseMlaCase("40 rows and a window", 18, 150, 64, 40, d_qk=512, extra_keys=400,
                  extra_topk=128, ranges="extra_kv", invalid=True, topk_length=True, poison=True,
                  attn_sink="finite"),
    SparseMlaCase("two ranges", 18, 300, 16, 129, extra_keys=70, extra_topk=5,
                  ranges="kv and extra_kv", empty_rows=True, poison=True),
    SparseMlaCase("pools of 4 and a tail", 18, 130, 64, 20, d_qk=512, index_block=4,
                  extra_keys=130, extra_topk=3, ranges="extra_kv", invalid=True, topk_length=True,
                  poison=True),
    # A source without rows beside one with: a short prompt has no compressed entry yet.
    SparseMlaCase("kv without rows beside a window", 6, 0, 16, 24, d_qk=512,
                  extra_keys=70, extra_topk=20, ranges="extra_kv", invalid=True, empty_rows=True),
    SparseMlaCase("extra_kv without rows", 5, 90, 16, 24, d_qk=512, extra_topk=10, invalid=True,
                  topk_length=True, attn_sink="finite"),
    # Sizes of 1, of which compilers make constants.
    SparseMlaCase("one id, one row", 1, 1, 64, 1, cancels=True),
    SparseMlaCase("one id of each of two sources", 1, 40, 64, 1, d_qk=512, extra_keys=30,
                  extra_topk=1),
]
FORWARD = [
    SparseMlaCase("largest logits", 6, 130, 16, 70, max_logits=True, invalid=True,
                  empty_rows=True, topk_length=True, poison=True, attn_sink="infinite"),
    SparseMlaCase("pages of bf16 rows", 4, 256, 64, 96, page_size=64, duplicates=True,
                  invalid=True),
    *(
        SparseMlaCase(f"one id of one page of {form.name}", 1, 64, 64, 1, d_qk=form.d_qk,
                      packed="ue8m0", kv_format=form.name, page_size=64)
        for form in ROW_FORMATS.values()
    ),
    SparseMlaCase("packed rows", 5, 300, 64, 128, packed="ue8m0", topk_length=True),
    SparseMlaCase("packed rows, batch invariant", 5, 300, 64, 128, packed="ue8m0", invalid=True,
                  topk_length=True, batch_invariant=True),
    SparseMlaCase("packed rows, 8 heads, any scale", 4, 200, 8, 130, packed="fp32", invalid=True,
                  poison=True, attn_sink="finite"),
    SparseMlaCase("packed pages, 32 heads", 4, 256, 32, 96, packed="ue8m0", page_size=64,
                  duplicates=True, empty_rows=True, attn_sink="infinite"),
    SparseMlaCase("packed rows of two sources", 9, 128, 16, 64, packed="ue8m0", page_size=64,
                  extra_keys=90, extra_topk=40, invalid=True, poison=True, attn_sink="finite"),
    SparseMlaCase("v32_no_rope, any scale", 5, 300, 64, 128, d_qk=512, packed="fp32",
                  kv_format="v32_no_rope", invalid=True, poison=True),
    SparseMlaCase("pages of v4", 9, 256, 16, 96, d_qk=512, packed="ue8m0", kv_format="v4",
                  page_size=64, invalid=True, topk_length=True, poison=True, attn_sink="infinite"),
    SparseMlaCase("pages of v4, 40 queries", 40, 256, 64, 96, d_qk=512, packed="ue8m0",
                  kv_format="v4", page_size=64, invalid=True, poison=True, attn_sink="finite"),
    SparseMlaCase("pages of v41, 40 queries of 2048 slots", 40, 320, 64, 2048, d_qk=512,
                  packed="ue8m0", kv_format="v41", page_size=64, invalid=True, topk_length=True),
    SparseMlaCase("pages of v41_fp4", 3, 256, 128, 300, d_qk=512, packed="ue8m0", poison=True,
                  kv_format="v41_fp4", page_size=64, invalid=True),
    SparseMlaCase("pages of v4 beside a range of v4", 9, 128, 64, 64, d_qk=512, packed="ue8m0",
                  kv_format="v4", extra_format="v4", page_size=64, extra_keys=300, extra_topk=128,
                  ranges="extra_kv", invalid=True, poison=True, attn_sink="finite"),
    SparseMlaCase("pages of v41 beside v41_fp4", 9, 128, 16, 64, d_qk=512, packed="ue8m0",
                  kv_format="v41", page_size=64, extra_keys=90, extra_topk=40, invalid=True,
                  extra_format="v41_fp4", poison=True, attn_sink="finite"),
    SparseMlaCase("v41_fp4 beside a range of v41", 5, 192, 64, 300, d_qk=512, packed="ue8m0",
                  kv_format="v41_fp4", page_size=64, extra_keys=128, extra_topk=100,
                  extra_format="v41", ranges="extra_kv", invalid=True, topk_length=True),
    SparseMlaCase("largest logits of two sources", 10, 130, 16, 70, max_logits=True,
                  extra_keys=90, extra_topk=40, invalid=True, empty_rows=True, poison=True),
    # More than four work items an SM: not the decode's.
    SparseMlaCase("530 queries, lengths", 530, 500, 64, 130, invalid=True, topk_length=True,
                  poison=True, attn_sink="finite"),
    SparseMlaCase("530 queries", 530, 500, 64, 130, invalid=True, empty_rows=True, poison=True,
                  attn_sink="finite"),
    SparseMlaCase("420 queries in groups of 2, lengths", 420, 900, 32, 800, invalid=True,
                  topk_length=True, poison=True, attn_sink="finite"),
    SparseMlaCase("264 queries in groups of 2", 264, 1100, 32, 1100, invalid=True, poison=True,
                  attn_sink="finite"),
    SparseMlaCase("a NaN row that one of 265 queries names", 265, 900, 16, 800, nan_row=True),
    SparseMlaCase("265 queries in groups of 4", 265, 900, 16, 800, invalid=True, poison=True,
                  attn_sink="finite"),
    SparseMlaCase("926 queries in groups of 8", 926, 200, 8, 160, invalid=True, topk_length=True,
                  poison=True, attn_sink="finite"),
    # Rows that are K and V alike: the decode, the forward, and groups.
    SparseMlaCase("512 columns, 200 slots", 3, 300, 64, 200, d_qk=512, duplicates=True,
                  invalid=True, poison=True, attn_sink="infinite"),
    SparseMlaCase("512 columns, 530 queries", 530, 500, 64, 130, d_qk=512, invalid=True,
                  topk_length=True, poison=True),
    SparseMlaCase("512 columns, 265 queries in groups of 4", 265, 900, 16, 800, d_qk=512,
                  invalid=True, attn_sink="finite"),
    # Two sources in the forward, and in groups.
    SparseMlaCase("530 queries of two sources", 530, 400, 64, 100, d_qk=512, extra_keys=90,
                  extra_topk=20, ranges="extra_kv", invalid=True, topk_length=True, poison=True),
    SparseMlaCase("265 queries of two sources in groups of 4", 265, 800, 16, 720, d_qk=512,
                  extra_keys=90, extra_topk=80, invalid=True, nan_row=True),
    # Long lists of few keys: tiles are divided by the lists, and most of them have no key.
    SparseMlaCase("140 queries of 2048 slots", 140, 100, 64, 2048, invalid=True, poison=True,
                  attn_sink="finite"),
    SparseMlaCase("packed rows, 40 queries of 2048 slots", 40, 300, 64, 2048, packed="ue8m0",
                  invalid=True, topk_length=True, poison=True, attn_sink="infinite"),
    SparseMlaCase("140 queries of two sources, 2048 slots", 140, 100, 64, 1958, d_qk=512,
                  extra_keys=90, extra_topk=100, ranges="extra_kv", invalid=True, topk_length=True,
                  poison=True, attn_sink="finite"),
    *(
        SparseMlaCase(f"{name} beside {name}, 40 queries of 2048 slots", 40, 192, 64, 1900,
                      d_qk=512, packed="ue8m0", kv_format=name, extra_format=name, page_size=64,
                      extra_keys=90, extra_topk=148, invalid=True, topk_length=True)
        for name in ("v4", "v41", "v41_fp4", "v32_no_rope")
    ),
    SparseMlaCase("packed rows, 16 heads, 80 queries of 2048 slots", 80, 200, 16, 2048,
                  packed="fp32", invalid=True, topk_length=True, attn_sink="finite"),
    SparseMlaCase("v32_no_rope, 16 heads, 80 queries of 2048 slots", 80, 200, 16, 2048, d_qk=512,
                  packed="fp32", kv_format="v32_no_rope", invalid=True, topk_length=True),
    SparseMlaCase("packed rows of any size, 128 heads, 24 queries", 24, 3000, 128, 700,
                  packed="fp32", row_sizes=1.0, topk_length=True),
    SparseMlaCase("packed rows, 70 queries", 70, 100, 64, 24, packed="ue8m0", invalid=True,
                  topk_length=True, poison=True),
    SparseMlaCase("v32_no_rope, 70 queries", 70, 100, 64, 24, d_qk=512, packed="ue8m0",
                  kv_format="v32_no_rope", invalid=True, poison=True, attn_sink="finite"),
    SparseMlaCase("v4 beside v4, 16 heads, 80 queries of 2048 slots", 80, 192, 16, 1900, d_qk=512,
                  packed="ue8m0", kv_format="v4", extra_format="v4", page_size=64, extra_keys=90,
                  extra_topk=148, invalid=True, topk_length=True),
]
INTO_BUFFERS = [
    SparseMlaCase("buffers of the caller", 4, 200, 16, 64, invalid=True, topk_length=True),
    SparseMlaCase("packed rows", 4, 200, 16, 64, packed="ue8m0", attn_sink="finite"),
    SparseMlaCase("pages of v4", 4, 192, 16, 64, d_qk=512, packed="ue8m0", kv_format="v4",
                  page_size=64, attn_sink="finite"),
    SparseMlaCase("largest logits", 4, 200, 16, 64, max_logits=True, empty_rows=True),
    SparseMlaCase("blocks and a range", 9, 130, 16, 20, index_block=4, extra_keys=90, extra_topk=40,
                  ranges="extra_kv"),
]


@dataclass(frozen=True)
class Backward:
    """A case of the backward alone."""

    attention: SparseMlaCase
    deterministic: bool = False
    dkv_dtype: torch.dtype | None = None


_FEW_KEYS = SparseMlaCase("174 queries of the same 35 keys, 64 heads", 174, 35, 64, 32)
_FEW_KEYS_128 = SparseMlaCase("87 queries of the same 35 keys, 128 heads", 87, 35, 128, 32)
_FEW_NAMED = SparseMlaCase("174 queries that name few of 5568 rows", 174, 5568, 64, 32)
_FEW_NAMED_128 = SparseMlaCase("87 queries that name few of 2784 rows", 87, 2784, 128, 32)
BACKWARD = [
    Backward(SparseMlaCase("8 heads, lengths, sink", 9, 128, 8, 40, topk_length=True,
                           attn_sink="finite")),
    Backward(SparseMlaCase("dKV in bf16", 4, 200, 16, 64), dkv_dtype=_BF16),
    *map(Backward, (_FEW_KEYS, _FEW_KEYS_128, _FEW_NAMED, _FEW_NAMED_128)),
    Backward(SparseMlaCase("in order, 8 heads", 9, 128, 8, 40, invalid=True, duplicates=True),
             deterministic=True),
    Backward(SparseMlaCase("in order, 16 heads", 9, 200, 16, 64, topk_length=True,
                           attn_sink="finite"), deterministic=True),
    Backward(SparseMlaCase("in order, 32 heads", 6, 200, 32, 64, empty_rows=True, poison=True),
             deterministic=True),
    Backward(SparseMlaCase("in order, 128 heads", 3, 300, 128, 96, invalid=True, duplicates=True),
             deterministic=True),
    Backward(SparseMlaCase("in order, " + _FEW_KEYS.name, 174, 35, 64, 32), deterministic=True),
    Backward(SparseMlaCase("in order, ids and a window", 9, 130, 16, 70, d_qk=512, extra_keys=300,
                           extra_topk=128, ranges="extra_kv", topk_length=True, poison=True,
                           attn_sink="infinite"), deterministic=True),
    # Rows that are K and V alike.
    *(
        Backward(SparseMlaCase(f"512 columns, {heads} heads" + ", in order" * in_order, 9, 150,
                               heads, 70, d_qk=512, topk_length=True, poison=True,
                               duplicates=in_order, attn_sink="finite"), deterministic=in_order)
        for in_order in (False, True) for heads in (8, 16, 32, 64, 128)
    ),
    *(
        Backward(replace(case, name="512 columns, " + case.name, d_qk=512))
        for case in (_FEW_KEYS, _FEW_KEYS_128, _FEW_NAMED, _FEW_NAMED_128)
    ),
]

_MORE_ROWS_THAN_CLUSTERS = tuple(64 + (37 * row) % 190 for row in range(71))
INDEXER = [
    IndexerCase("one row, 512 of 600 tokens", (600,), 512),
    IndexerCase("one token", (1,), 512),
    IndexerCase("model sizes: 2048 of 8192 tokens", (8192, 2049, 5000, 100), 2048),
    IndexerCase("sorted", (3000, 700), 2048, sorted=True),
    IndexerCase("page edges", (0, 1, 63, 64, 65, 127), 32),
    IndexerCase("ties, NaN keys, negative weights", (500, 900), 200, plateaus=True,
                nan_keys=True, negative_weights=True, repeated_pages=True),
    IndexerCase("ties, NaN keys, negative weights, 512", (900, 700, 40), 512, num_heads=16,
                plateaus=True, nan_keys=True, negative_weights=True, repeated_pages=True),
    IndexerCase("32 heads, 1024, int8 cache", (1500, 1024, 300), 1024, num_heads=32,
                int8_cache=True, sorted=True),
    IndexerCase("positions", (2500, 300, 64, 0), 2048, num_heads=32, positions=True,
                repeated_pages=True),
    IndexerCase("2 queries a request", (600, 601, 99, 100, 2501, 2502, 0, 1), 512, next_n=2),
    IndexerCase("3 queries a request, sorted", (70, 300, 65, 128, 129, 700), 512, next_n=3,
                sorted=True, plateaus=True),
    IndexerCase("4 queries a request, positions", (130, 64, 700, 0, 2190, 2191, 2192, 2193), 2048,
                next_n=4, positions=True),
    IndexerCase("71 rows of a wide batch", (*_MORE_ROWS_THAN_CLUSTERS, 900), 512, num_heads=16),
    IndexerCase("2 queries of each of 70 requests", (*range(64, 202), 2100, 2101), 2048,
                next_n=2),
    *(
        IndexerCase(f"4 queries of each of 8 requests, {topk} of 16,000 tokens",
                    (*range(700, 728), *range(15_997, 16_001)), topk, next_n=4, **kind)
        for topk, kind in ((512, {"num_heads": 16}), (1024, {"num_heads": 32}),
                           (2048, {"positions": True}))
    ),
    IndexerCase("65,700 tokens", (65_700,), 512, num_heads=16),
    IndexerCase("a slot a token", (2500, 2049, 300, 64), 2048, table_page_size=1,
                negative_weights=True),
    IndexerCase("4 tokens a page of the table, sorted", (2101, 70), 2048, table_page_size=4,
                sorted=True, plateaus=True),
    IndexerCase("blocks of 8, ties, NaN keys", (1500, 700, 40, 0), 100, num_heads=16, block=8,
                plateaus=True, nan_keys=True),
    IndexerCase("keys of 68 bytes", (900, 700, 40), 512, num_heads=32, mxfp4=True, nan_keys=True),
    IndexerCase("keys of 68 bytes, blocks of 8, sorted", (900, 641), 100, mxfp4=True, block=8,
                sorted=True),
    IndexerCase("candidates of 8, sorted, 2 queries a request", (1500, 1501, 64, 65), 512,
                num_heads=32, next_n=2, block=8, num_candidates=90, sorted=True, plateaus=True),
    IndexerCase("all of at most 450 tokens", (450, 449, 0, 1, 64, 65, 300, 127), 650, next_n=2),
    IndexerCase("all of at most 450 tokens, positions", (450, 0, 65), 650, positions=True),
]
PREFILL = [
    PrefillCase("16 heads, 512 of 600 keys", causal(8, 600), 512, num_heads=16),
    PrefillCase("one query, one key", causal(1, 1), 512, num_heads=16),
    PrefillCase("model sizes: 2048 of 4096 keys", causal(4, 4096), 2048),
    PrefillCase("model sizes, bf16, sorted", causal(4, 4096), 2048, num_heads=32, dtype=_BF16,
                sorted=True),
    PrefillCase("packed sequences, sorted", (*causal(6, 700), *causal(5, 40, 700)), 512,
                sorted=True),
    PrefillCase("packed sequences, 1000, sorted, bf16", (*causal(6, 1300), *causal(5, 40, 1300)),
                1000, num_heads=16, dtype=_BF16, sorted=True),
    PrefillCase("ties, NaN keys, negative weights", causal(6, 900), 512, num_heads=32,
                plateaus=True, nan_keys=True, negative_weights=True),
    PrefillCase("64 heads, bf16", causal(6, 900), 500, dtype=_BF16),
    PrefillCase("blocks of 8", (*causal(6, 700), *causal(5, 43, 700)), 60, num_heads=32, block=8,
                plateaus=True),
    PrefillCase("blocks of 8, all from row 0", causal(11, 700), 60, num_heads=32, block=8,
                no_starts=True, plateaus=True, nan_keys=True),
    PrefillCase("candidates of 8, bf16", (*causal(6, 700), *causal(5, 43, 700)), 512, block=8,
                num_heads=16, dtype=_BF16, num_candidates=70, nan_keys=True),
    PrefillCase("fp32", causal(6, 300), 50, num_heads=4, dtype=_FP32),
    PrefillCase("fp16", causal(6, 300), 50, num_heads=4, dtype=_FP16),
]
TRAINING = [
    IndexerTrainingCase(SparseMlaCase("64 index heads, 256 of 1024 keys", 4, 1024, 64, 256),
                        index_heads=64),
    IndexerTrainingCase(
        SparseMlaCase("invalid slots over NaN keys", 6, 300, 16, 96, duplicates=True, invalid=True,
                      empty_rows=True, topk_length=True, poison=True), index_heads=32
    ),
    IndexerTrainingCase(SparseMlaCase("sink, 8 heads", 5, 200, 8, 64, attn_sink="finite"),
                        index_heads=16),
    IndexerTrainingCase(
        SparseMlaCase("infinite sinks, 32 heads", 5, 200, 32, 64, attn_sink="infinite",
                      invalid=True), index_heads=16
    ),
    IndexerTrainingCase(SparseMlaCase("128 heads", 3, 200, 128, 96), index_heads=64),
    IndexerTrainingCase(SparseMlaCase("one slot", 1, 1, 64, 1), index_heads=64),
    IndexerTrainingCase(SparseMlaCase("3000 slots: several key blocks", 2, 4000, 8, 3000),
                        index_heads=16),
    *(
        IndexerTrainingCase(
            SparseMlaCase(f"entries of 512 columns, {heads} heads", 3, 150, heads, 70, d_qk=512,
                          invalid=True, topk_length=True, attn_sink="finite"), index_heads=16
        )
        for heads in (128, 64, 32, 16, 8)
    ),
    IndexerTrainingCase(SparseMlaCase("index fp32", 4, 200, 16, 64, dtype=_FP32), index_heads=16),
    IndexerTrainingCase(SparseMlaCase("index fp16", 4, 200, 16, 64, dtype=_FP16), index_heads=16),
]


@dataclass(frozen=True)
class IndexBackward:
    """A case of `indexer_bwd` alone."""

    training: IndexerTrainingCase
    deterministic: bool = False


INDEX_BACKWARD = [
    IndexBackward(IndexerTrainingCase(
        SparseMlaCase("weights of one value", 6, 100, 2, 48, d_qk=24, d_v=16), index_heads=32,
        shared_weights=True
    )),
    IndexBackward(IndexerTrainingCase(
        SparseMlaCase("527 queries of the same 12 keys", 527, 12, 2, 8, d_qk=24, d_v=16,
                      topk_length=True), index_heads=64
    )),
    *(
        IndexBackward(IndexerTrainingCase(
            SparseMlaCase(f"in order, {heads} index heads", 6, 100, 2, 48, d_qk=24, d_v=16,
                          duplicates=True, invalid=True, empty_rows=True), index_heads=heads
        ), deterministic=True)
        for heads in (64, 32, 16)
    ),
]
# fmt: on
