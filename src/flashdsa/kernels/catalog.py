"""Every kernel of the library as a row of data. Nothing here imports CuTe DSL.

`make kernels`, loading, the emulator, the workbench's `plan` and `inspect` read these rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from flashdsa.hw import SM90, SM100
from flashdsa.kernels.attention.sm90.bwd_grouped.dkv.plan import DkvPlan
from flashdsa.kernels.attention.sm90.bwd_grouped.dq.plan import DqPlan
from flashdsa.kernels.attention.sm90.bwd_grouped.scores.plan import ScoresPlan
from flashdsa.kernels.attention.sm90.bwd_per_item import plan as per_item
from flashdsa.kernels.attention.sm90.core.tile import WITHOUT_ROPE, Tile
from flashdsa.kernels.attention.sm90.decode.few_heads.plan import FewHeadsPlan
from flashdsa.kernels.attention.sm90.decode.few_heads.stream_k.plan import StreamKFewHeadsPlan
from flashdsa.kernels.attention.sm90.decode.full import plan as decode
from flashdsa.kernels.attention.sm90.decode.full.stream_k.plan import StreamKPlan
from flashdsa.kernels.attention.sm90.fwd.plan import GROUPS, FwdPlan
from flashdsa.kernels.attention.sm100.bwd import plan as sm100_bwd
from flashdsa.kernels.attention.sm100.core.tile import GROUPS as SM100_GROUPS
from flashdsa.kernels.attention.sm100.fwd import plan as sm100_fwd
from flashdsa.kernels.entries.sm90 import plan as entries
from flashdsa.kernels.indexer.order.plan import OrderPlan
from flashdsa.kernels.indexer.plan import FUSED_ROWS, NUM_HEADS, TOPK
from flashdsa.kernels.indexer.sm90.plan import LOGITS_PLANS, IndexerPlan
from flashdsa.kernels.indexer.sm90.prefill import plan as prefill
from flashdsa.kernels.indexer.sm90.quantize_plan import QuantizePlan
from flashdsa.kernels.indexer.sm90.rank.plan import RANK_PLANS
from flashdsa.kernels.indexer.sm100 import plan as sm100
from flashdsa.kernels.indexer_training.sm90.bwd import plan as index_bwd
from flashdsa.kernels.indexer_training.sm90.head_sums import plan as head_sums
from flashdsa.kernels.indexer_training.sm90.kl.plan import KlPlan
from flashdsa.kernels.indexer_training.sm90.scores import plan as scores
from flashdsa.plan import FixedPlan
from flashdsa.plan.kernel_spec import KernelSpec, Variant

_TILES = (Tile(), WITHOUT_ROPE)


def _row(
    name: str, operations: str, function: str, plans: Iterable[Any], arch: str,
    timeline: str = "", **roles: str,
) -> KernelSpec:  # fmt: skip
    """A kernel in flashdsa.kernels; names of `operations` and of a role's functions in one text.
    `function`: "module:name" of `name_kernel`, which `compile_name` compiles."""
    module, _, entry = function.partition(":")
    return KernelSpec(
        name,
        arch,
        tuple(operations.split()),
        tuple(plans),
        f"flashdsa.kernels.{module}:compile_{entry}",
        f"{entry}_kernel",
        {role: tuple(names.split()) for role, names in roles.items()},
        timeline and f"flashdsa.kernels.{timeline}",
    )


_hopper = partial(_row, arch=SM90.name)
_blackwell = partial(_row, arch=SM100.name)

# fmt: off
INDEXER = _hopper(
    "indexer", "dsa_topk_indexer", "indexer.sm90.kernel:indexer",
    (IndexerPlan(num_heads, rows)
     for num_heads, rows in product(reversed(NUM_HEADS), FUSED_ROWS)),
    load="load_scheduled PAGES", select="consume page_source")
INDEXER_UNSCORED = _hopper(
    "indexer_unscored", "dsa_topk_indexer", "indexer.sm90.unscored:unscored",
    (FixedPlan("indexer_unscored"),))
INDEXER_LOGITS = _hopper(
    "indexer_logits", "indexer_logits dsa_topk_indexer", "indexer.sm90.kernel:logits",
    LOGITS_PLANS,
    load="load_partition PAGES", select="consume_pages page_source pair_source")
INDEXER_SM100 = _blackwell(
    "indexer", "dsa_topk_indexer", "indexer.sm100.kernel:indexer",
    (*(sm100.IndexerPlan(num_heads, rows)
       for num_heads, rows in product(reversed(NUM_HEADS), FUSED_ROWS)),
     *(sm100.IndexerPlan(rows=rows, gathers=True) for rows in FUSED_ROWS)),
    load="load_scheduled loader_of", mma="run_mma", select="consume page_source")
INDEXER_LOGITS_SM100 = _blackwell(
    "indexer_logits", "indexer_logits", "indexer.sm100.kernel:logits",
    (*(sm100.LogitsPlan(num_heads) for num_heads in reversed(NUM_HEADS)),
     sm100.LogitsPlan(gathers=True)),
    load="load_partition loader_of", mma="run_mma", select="consume_pages page_source")
INDEXER_RANK = _hopper(
    "indexer_rank", "dsa_topk_indexer dsa_topk_prefill topk_indices",
    "indexer.sm90.rank.kernel:rank",
    RANK_PLANS)
PREFILL = _hopper(
    "prefill", "dsa_topk_prefill", "indexer.sm90.prefill.kernel:prefill",
    prefill.RANKING,
    load="load_all", score="score_all")
INDEXER_ORDER = _hopper(
    "indexer_order", "dsa_topk_prefill dsa_topk_indexer topk_indices", "indexer.order.kernel:order",
    map(OrderPlan, reversed(TOPK)))
INDEXER_ORDER_SM100 = _blackwell(
    "indexer_order", "dsa_topk_indexer", "indexer.order.kernel:order",
    map(sm100.BlackwellOrderPlan, reversed(TOPK)))
PREFILL_LOGITS = _hopper(
    "prefill_logits", "dsa_topk_prefill prefill_logits", "indexer.sm90.prefill.kernel:prefill",
    prefill.SCORING,
    load="load_all", score="score_all")
QUANTIZE_INDEX = _hopper(
    "quantize_index", "quantize_index_k quantize_index_q", "indexer.sm90.quantize_kernel:quantize",
    (QuantizePlan(dtype, to_cache=False) for dtype in ("bfloat16", "float32")))
WRITE_INDEX_K_CACHE = _hopper(
    "write_index_k_cache", "write_index_k_cache", "indexer.sm90.quantize_kernel:quantize",
    map(QuantizePlan, ("bfloat16", "float32")))
MLA_BWD = _blackwell(
    "mla_bwd", "mla_bwd", "attention.sm100.bwd.kernel:backward",
    (*(sm100_bwd.BwdPlan(group=group) for group in SM100_GROUPS),
     sm100_bwd.BwdPlan(deterministic=True)),
    timeline="attention.sm100.bwd.plan:TIMELINE",
    softmax="softmax_item write_dq", load="load_blocks", reduce="reduce_item finish",
    mma="issue_item")
SPARSE_MLA_FWD = _hopper(
    "mla_fwd", "sparse_mla_fwd", "attention.sm90.fwd.kernel:forward",
    (*(FwdPlan(group) for group in GROUPS),
     FwdPlan(tile=WITHOUT_ROPE),
     *(FwdPlan(group, True, joined, tile=tile)
       for tile, joined, group in product(_TILES, (False, True), GROUPS)),
     *(FwdPlan(joined=True, tile=tile) for tile in _TILES)),
    gather="gather_all", consumer0="consume0", consumer1="consume1")
SPARSE_MLA_FWD_SM100 = _blackwell(
    "mla_fwd", "sparse_mla_fwd", "attention.sm100.fwd.kernel:forward",
    (*(sm100_fwd.FwdPlan(group) for group in SM100_GROUPS),
     sm100_fwd.FwdPlan(max(SM100_GROUPS), kv_apart=True)),
    softmax="softmax_all store_query write_rows", load="load_all load_query", mma="issue_all")
MLA_BWD_SCORES = _hopper(
    "mla_bwd_scores", "mla_bwd", "attention.sm90.bwd_grouped.scores.kernel:scores",
    map(ScoresPlan, _TILES),
    gather="gather_all", score="score_all")
MLA_BWD_DQ = _hopper(
    "mla_bwd_dq", "mla_bwd", "attention.sm90.bwd_grouped.dq.kernel:dq",
    (DqPlan(), DqPlan(WITHOUT_ROPE)),
    load="load_all", multiply="multiply_all")
MLA_BWD_DKV = _hopper(
    "mla_bwd_dkv", "mla_bwd", "attention.sm90.bwd_grouped.dkv.kernel:dkv",
    map(DkvPlan, _TILES),
    matrices="load_matrices", rows="copy_all", multiply="multiply_all")
MLA_BWD_JOIN = _hopper(
    "mla_bwd_join", "mla_bwd", "attention.sm90.join:join",
    (FixedPlan("mla_bwd_join"),))
MLA_BWD_PADDED_HEADS = _hopper(
    "mla_bwd_padded_heads", "mla_bwd", "attention.sm90.padded_heads:padded_heads",
    (FixedPlan("mla_bwd_padded_heads"),))
MLA_BWD_SINK = _hopper(
    "mla_bwd_sink", "mla_bwd", "attention.sm90.sink:sink",
    (FixedPlan("mla_bwd_sink", smem_bytes=1024),))
MLA_BWD_FUSED = _hopper(
    "mla_bwd_fused", "mla_bwd", "attention.sm90.bwd_per_item.kernel:per_item",
    (*map(per_item.PerItemPlan, per_item.QUERIES),
     *(per_item.PerItemPlan(queries, slots, tickets=not slots, tile=tile)
       for tile, slots, queries in product(_TILES, (False, True), per_item.QUERIES))),
    gather="gather_all", score="score_all", high="high_all", dkv="dkv_all")
_DECODE_PLANS = (
    decode.DecodePlan(),
    decode.DecodePlan(packed=True),
    decode.DecodePlan(tile=WITHOUT_ROPE),
    *(decode.DecodePlan(packed=True, form=form, tile=WITHOUT_ROPE) for form in decode.FORMATS[1:]),
    *(decode.DecodePlan(packed=True, joined=True, form=form, extra=extra, tile=WITHOUT_ROPE)
      for form, extra in decode.JOINED_PAIRS),
    *(decode.DecodePlan(joined=True, tile=tile) for tile in _TILES))
SPARSE_MLA_DECODE = _hopper(
    "mla_decode", "sparse_mla_fwd", "attention.sm90.decode.full.kernel:decode",
    (*_DECODE_PLANS, *(replace(plan, single_cta=True) for plan in _DECODE_PLANS)),
    gather="gather", consumer0="consume0", consumer1="consume1")
SPARSE_MLA_DECODE_STREAM_K = _hopper(
    "mla_decode_stream_k", "sparse_mla_fwd", "attention.sm90.decode.full.stream_k.kernel:stream_k",
    (StreamKPlan(),
     StreamKPlan(packed=True),
     StreamKPlan(tile=WITHOUT_ROPE),
     *(StreamKPlan(packed=True, form=form, tile=WITHOUT_ROPE) for form in decode.FORMATS[1:]),
     *(StreamKPlan(packed=True, joined=True, form=form, tile=WITHOUT_ROPE)
       for form in decode.JOINED_FORMATS),
     StreamKPlan(joined=True, tile=WITHOUT_ROPE)),
    gather="gather_stretches", consumer0="consume0", consumer1="consume1")
SPARSE_MLA_DECODE_FEW_HEADS = _hopper(
    "mla_decode_heads", "sparse_mla_fwd", "attention.sm90.decode.few_heads.kernel:few_heads",
    FewHeadsPlan.every(),
    gather="gather_pieces", math="consume stage_share")
SPARSE_MLA_DECODE_STREAM_K_FEW_HEADS = _hopper(
    "mla_decode_stream_k_heads", "sparse_mla_fwd",
    "attention.sm90.decode.few_heads.stream_k.kernel:stream_k_few_heads",
    StreamKFewHeadsPlan.every(),
    gather="gather_stretches", math="take_stretches")
SPARSE_MLA_USED_SLOTS = _hopper(
    "mla_used_slots", "sparse_mla_fwd", "attention.sm90.used_slots:used_slots",
    (FixedPlan("mla_used_slots"),))
INDEXER_BWD = _hopper(
    "indexer_bwd", "indexer_bwd", "indexer_training.sm90.bwd.kernel:indexer_bwd",
    (index_bwd.BwdPlan(),
     *(index_bwd.BwdPlan(num_heads, min(index_bwd.BLOCKS))
       for num_heads in index_bwd.NUM_HEADS if num_heads < index_bwd.LARGE_HEADS),
     *(index_bwd.BwdPlan(num_heads, min(index_bwd.BLOCKS), ordered=True)
       for num_heads in index_bwd.NUM_HEADS)),
    load="load_all", multiply="multiply_all")
INDEXER_BWD_SUM = _hopper(
    "indexer_bwd_sum", "indexer_bwd", "indexer_training.sm90.bwd.kernel:ordered_sum",
    (FixedPlan("indexer_bwd_sum"),))
ATTENTION_TARGET = _hopper(
    "attention_target", "attention_target", "indexer_training.sm90.head_sums.kernel:head_sums",
    (head_sums.target_plan(heads, width)
     for width, heads in product(head_sums.TARGET_WIDTHS, reversed(head_sums.TARGET_HEADS))),
    gather="gather_all", add="add_all")
INDEXER_SCORES = _hopper(
    "indexer_scores", "indexer_scores", "indexer_training.sm90.scores.kernel:scores",
    (scores.ScoresPlan(heads) for heads in reversed(scores.NUM_HEADS)))
INDEXER_KL = _hopper(
    "indexer_kl", "indexer_kl indexer_kl_bwd", "indexer_training.sm90.kl.kernel:kl",
    (KlPlan(), KlPlan(gradient=True)))
COMPRESS_KV = _hopper(
    "compress_kv", "compress_kv compress_kv_bwd", "entries.sm90.kernel:compress",
    entries.MODELS + entries.STATES + entries.GRADIENTS)
# fmt: on

KERNELS = tuple(row for row in tuple(vars().values()) if isinstance(row, KernelSpec))
"""All rows."""
BACKENDS = tuple(dict.fromkeys(spec.backend for spec in KERNELS))
"""Backends that run compiled kernels, each from a shared object of its name."""


def variants_of(backend: str) -> dict[str, Variant]:
    """Variants of the backend's shared object, by exported name."""
    rows = [spec for spec in KERNELS if spec.backend == backend]
    return {variant.name: variant for spec in rows for variant in spec.variants}
