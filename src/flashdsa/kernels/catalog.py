"""Every kernel of the library as a row of data. Nothing here imports CuTe DSL.

`make kernels`, loading, the emulator, `flashdsa plan` and `flashdsa inspect` read these rows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

from flashdsa.hw import SM90, SM100
from flashdsa.kernels.attention.sm90.bwd_grouped.dkv.plan import DkvPlan
from flashdsa.kernels.attention.sm90.bwd_grouped.dq.plan import DqPlan
from flashdsa.kernels.attention.sm90.bwd_grouped.scores.plan import ScoresPlan
from flashdsa.kernels.attention.sm90.bwd_per_item import plan as per_item
from flashdsa.kernels.attention.sm90.core.tile import WITHOUT_ROPE, Tile
from flashdsa.kernels.attention.sm90.decode.few_heads.dealt.plan import DealtFewHeadsPlan
from flashdsa.kernels.attention.sm90.decode.few_heads.plan import FewHeadsPlan
from flashdsa.kernels.attention.sm90.decode.full import plan as decode
from flashdsa.kernels.attention.sm90.decode.full.dealt.plan import DealtPlan
from flashdsa.kernels.attention.sm90.fwd.plan import GROUPS, FwdPlan
from flashdsa.kernels.attention.sm90.join.plan import JoinPlan
from flashdsa.kernels.attention.sm90.padded_heads.plan import PaddedHeadsPlan
from flashdsa.kernels.attention.sm90.sink.plan import SinkPlan
from flashdsa.kernels.attention.sm90.used_slots.plan import UsedSlotsPlan
from flashdsa.kernels.attention.sm100.bwd import plan as sm100_bwd
from flashdsa.kernels.attention.sm100.core.tile import GROUPS as SM100_GROUPS
from flashdsa.kernels.attention.sm100.fwd import plan as sm100_fwd
from flashdsa.kernels.entries.sm90 import plan as entries
from flashdsa.kernels.indexer.plan import FUSED_KINDS, NUM_HEADS, POSITIONS, TOPK
from flashdsa.kernels.indexer.sm90.listed.plan import ListedPlan
from flashdsa.kernels.indexer.sm90.order.plan import OrderPlan
from flashdsa.kernels.indexer.sm90.plan import LOGITS_PLANS, PAIR_PLANS, IndexerPlan
from flashdsa.kernels.indexer.sm90.prefill import plan as prefill
from flashdsa.kernels.indexer.sm90.quantize_plan import QuantizePlan
from flashdsa.kernels.indexer.sm90.topk_plan import RANKING_PLANS, TOPK_PLANS
from flashdsa.kernels.indexer.sm90.two_levels.plan import LevelPlan
from flashdsa.kernels.indexer.sm90.unscored.plan import UnscoredPlan
from flashdsa.kernels.indexer.sm100 import plan as sm100
from flashdsa.kernels.indexer_training.sm90.bwd import plan as index_bwd
from flashdsa.kernels.indexer_training.sm90.head_sums import plan as head_sums
from flashdsa.kernels.indexer_training.sm90.kl.plan import KlPlan
from flashdsa.kernels.indexer_training.sm90.scores import plan as scores
from flashdsa.plan.kernel_spec import KernelSpec, Variant

_OTHER_STAGES = (1, 4)
"""Pages of a stage in further variants, one of each kernel, to compare with two pages."""
_TILES = (Tile(), WITHOUT_ROPE)
_INDEXER = "flashdsa.kernels.indexer.sm90"
_hopper = partial(KernelSpec, arch=SM90.name)
_blackwell = partial(KernelSpec, arch=SM100.name)

INDEXER = _hopper(
    name="indexer",
    operations=("dsa_topk_indexer",),
    plans=(
        *(
            IndexerPlan(num_heads, topk, **kind)
            for num_heads, topk, kind in product(reversed(NUM_HEADS), reversed(TOPK), FUSED_KINDS)
        ),
        *(IndexerPlan(**choices) for choices in POSITIONS),
        *PAIR_PLANS,
    ),
    build=f"{_INDEXER}.kernel:compile_indexer",
    entry="indexer_kernel",
    roles={"load": ("load", "PAGES"), "select": ("consume", "page_source", "pair_source")},
)
INDEXER_UNSCORED = _hopper(
    name="indexer_unscored",
    operations=("dsa_topk_indexer",),
    plans=tuple(map(UnscoredPlan, (False, True))),
    build="flashdsa.kernels.indexer.sm90.unscored.kernel:compile_unscored",
    entry="unscored_kernel",
)
INDEXER_LOGITS = _hopper(
    name="indexer_logits",
    operations=("indexer_logits", "dsa_topk_indexer"),
    plans=LOGITS_PLANS,
    build=f"{_INDEXER}.logits_kernel:compile_logits",
    entry="logits_kernel",
    roles={
        "load": ("load_partition", "PAGES"),
        "select": ("consume_pages", "page_source", "pair_source"),
    },
)
_SM100 = "flashdsa.kernels.indexer.sm100"

INDEXER_SM100 = _blackwell(
    name="indexer",
    operations=("dsa_topk_indexer",),
    plans=(
        *(
            sm100.IndexerPlan(num_heads, topk, **kind)
            for num_heads, topk, kind in product(reversed(NUM_HEADS), reversed(TOPK), FUSED_KINDS)
        ),
        *(sm100.IndexerPlan(**choices) for choices in POSITIONS),
        *(sm100.IndexerPlan(pages_per_stage=pages) for pages in _OTHER_STAGES),
        *(sm100.IndexerPlan(gathers=True, **kind) for kind in FUSED_KINDS),
    ),
    build=f"{_SM100}.kernel:compile_indexer",
    entry="indexer_kernel",
    roles={
        "load": ("load", "loader_of"),
        "mma": ("run_mma",),
        "select": ("consume", "page_source"),
    },
)
INDEXER_LOGITS_SM100 = _blackwell(
    name="indexer_logits",
    operations=("indexer_logits",),
    plans=(
        *(sm100.LogitsPlan(num_heads) for num_heads in reversed(NUM_HEADS)),
        *(sm100.LogitsPlan(pages_per_stage=pages) for pages in _OTHER_STAGES),
        sm100.LogitsPlan(gathers=True),
    ),
    build=f"{_SM100}.logits_kernel:compile_logits",
    entry="logits_kernel",
    roles={
        "load": ("load_partition", "loader_of"),
        "mma": ("run_mma",),
        "select": ("consume_pages", "page_source"),
    },
)
TOPK_INDICES = _hopper(
    name="topk_indices",
    operations=("topk_indices",),
    plans=TOPK_PLANS,
    build=f"{_INDEXER}.topk_kernel:compile_topk",
    entry="topk_kernel",
    roles={
        "load": ("load_scheduled", "DESCRIPTIONS"),
        "select": ("select_tiles", "select_by_cluster", "read_batch", "emit_unscored_rows"),
    },
)
INDEXER_RANKING = _hopper(
    name="indexer_ranking",
    operations=("dsa_topk_indexer",),
    plans=RANKING_PLANS,
    build=f"{_INDEXER}.topk_kernel:compile_topk",
    entry="cached_topk_kernel",
    roles=TOPK_INDICES.roles,
)
TWO_LEVELS = _hopper(
    name="two_levels",
    operations=("dsa_topk_indexer", "dsa_topk_prefill"),
    plans=tuple(
        LevelPlan(topk=topk, sorted=by_score, positions=positions, among=among)
        for topk in (2048, 512)
        for positions, among, by_score in product((False, True), repeat=3)
        if among or topk == 2048 or not positions
    ),
    build="flashdsa.kernels.indexer.sm90.two_levels.kernel:compile_level",
    entry="level_kernel",
    roles={
        "load": ("load_scheduled", "DESCRIPTIONS"),
        "select": ("select_tiles", "select_by_cluster", "list_entries", "emit_unscored_rows"),
    },
)
_PREFILL_BUILD = "flashdsa.kernels.indexer.sm90.prefill.build:compile_prefill"
_PREFILL_ROLES = {"load": ("load_all",), "score": ("score_all",)}

PREFILL = _hopper(
    name="prefill",
    operations=("dsa_topk_prefill",),
    plans=prefill.RANKING,
    build=_PREFILL_BUILD,
    entry="prefill_kernel",
    roles=_PREFILL_ROLES,
)
PREFILL_ORDER = _hopper(
    name="prefill_order",
    operations=("dsa_topk_prefill",),
    plans=tuple(OrderPlan(width) for width in reversed(TOPK)),
    build="flashdsa.kernels.indexer.sm90.order.kernel:compile_order",
    entry="order_kernel",
)
PREFILL_LISTED = _hopper(
    name="prefill_listed",
    operations=("dsa_topk_prefill",),
    plans=(ListedPlan(),),
    build="flashdsa.kernels.indexer.sm90.listed.kernel:compile_listed",
    entry="listed_kernel",
)
PREFILL_LOGITS = _hopper(
    name="prefill_logits",
    operations=("prefill_logits",),
    plans=prefill.SCORING,
    build=_PREFILL_BUILD,
    entry="prefill_kernel",
    roles=_PREFILL_ROLES,
)
QUANTIZE_INDEX = _hopper(
    name="quantize_index",
    operations=("quantize_index_k", "quantize_index_q"),
    plans=tuple(QuantizePlan(dtype, slot_bits=0) for dtype in ("bfloat16", "float32")),
    build=f"{_INDEXER}.quantize_kernel:compile_quantize",
    entry="quantize_kernel",
)
WRITE_INDEX_K_CACHE = _hopper(
    name="write_index_k_cache",
    operations=("write_index_k_cache",),
    plans=tuple(
        QuantizePlan(dtype, bits) for dtype, bits in product(("bfloat16", "float32"), (64, 32))
    ),
    build=f"{_INDEXER}.quantize_kernel:compile_quantize",
    entry="quantize_kernel",
)
MLA_BWD = _blackwell(
    name="mla_bwd",
    operations=("mla_bwd",),
    plans=(
        *(sm100_bwd.BwdPlan(group=group) for group in SM100_GROUPS),
        sm100_bwd.BwdPlan(deterministic=True),
        sm100_bwd.BwdPlan(from_registers=True),
    ),
    build="flashdsa.kernels.attention.sm100.bwd.kernel:compile_backward",
    entry="backward_kernel",
    roles={
        "softmax": ("softmax_item", "write_dq"),
        "load": ("load_blocks",),
        "reduce": ("reduce_item", "finish"),
        "mma": ("issue_item",),
    },
    timeline="flashdsa.kernels.attention.sm100.bwd.plan:TIMELINE",
)
_CONSUMERS = {"consumer0": ("consume0",), "consumer1": ("consume1",)}
SPARSE_MLA_FWD = _hopper(
    name="mla_fwd",
    operations=("sparse_mla_fwd",),
    plans=(
        *(
            FwdPlan(group, largest, drawn)
            for drawn, largest, group in product((False, True), (False, True), GROUPS)
        ),
        *(FwdPlan(drawn=drawn, tile=WITHOUT_ROPE) for drawn in (False, True)),
        *(FwdPlan(group, True, True, tile=WITHOUT_ROPE) for group in GROUPS),
        *(
            FwdPlan(group, max_logits=True, drawn=True, joined=True, tile=tile)
            for tile, group in product(_TILES, GROUPS)
        ),
        *(FwdPlan(max_logits=True, joined=True, tile=tile) for tile in _TILES),
    ),
    build="flashdsa.kernels.attention.sm90.fwd.kernel:compile_forward",
    entry="forward_kernel",
    roles={"gather": ("gather_all",), **_CONSUMERS},
)
SPARSE_MLA_FWD_SM100 = _blackwell(
    name="mla_fwd",
    operations=("sparse_mla_fwd",),
    plans=(
        *(sm100_fwd.FwdPlan(group) for group in SM100_GROUPS),
        sm100_fwd.FwdPlan(max(SM100_GROUPS), kv_apart=True),
    ),
    build="flashdsa.kernels.attention.sm100.fwd.kernel:compile_forward",
    entry="forward_kernel",
    roles={
        "softmax": ("softmax_all", "store_query", "write_rows"),
        "load": ("load_all", "load_query"),
        "mma": ("issue_all",),
    },
)
_GROUPED_BWD = "flashdsa.kernels.attention.sm90.bwd_grouped"
MLA_BWD_SCORES = _hopper(
    name="mla_bwd_scores",
    operations=("mla_bwd",),
    plans=tuple(ScoresPlan(n, tile) for tile, n in product(_TILES, (2, 4))),
    build=f"{_GROUPED_BWD}.scores.kernel:compile_scores",
    entry="scores_kernel",
    roles={"gather": ("gather_all",), "score": ("score_all",)},
)
MLA_BWD_DQ = _hopper(
    name="mla_bwd_dq",
    operations=("mla_bwd",),
    plans=(DqPlan(), DqPlan(WITHOUT_ROPE)),
    build=f"{_GROUPED_BWD}.dq.kernel:compile_dq",
    entry="dq_kernel",
    roles={"load": ("load_all",), "multiply": ("multiply_all",)},
)
MLA_BWD_DKV = _hopper(
    name="mla_bwd_dkv",
    operations=("mla_bwd",),
    plans=tuple(map(DkvPlan, _TILES)),
    build=f"{_GROUPED_BWD}.dkv.kernel:compile_dkv",
    entry="dkv_kernel",
    roles={"matrices": ("load_matrices",), "rows": ("copy_all",), "multiply": ("multiply_all",)},
)
MLA_BWD_JOIN = _hopper(
    name="mla_bwd_join",
    operations=("mla_bwd",),
    plans=(JoinPlan(),),
    build="flashdsa.kernels.attention.sm90.join.kernel:compile_join",
    entry="join_kernel",
)
MLA_BWD_PADDED_HEADS = _hopper(
    name="mla_bwd_padded_heads",
    operations=("mla_bwd",),
    plans=tuple(map(PaddedHeadsPlan, _TILES)),
    build="flashdsa.kernels.attention.sm90.padded_heads.kernel:compile_padded_heads",
    entry="padded_heads_kernel",
)
MLA_BWD_SINK = _hopper(
    name="mla_bwd_sink",
    operations=("mla_bwd",),
    plans=(SinkPlan(),),
    build="flashdsa.kernels.attention.sm90.sink.kernel:compile_sink",
    entry="sink_kernel",
)
MLA_BWD_FUSED = _hopper(
    name="mla_bwd_fused",
    operations=("mla_bwd",),
    plans=(
        *(
            per_item.PerItemPlan(queries, more, tickets=tickets, tile=tile)
            for tile, tickets in product(_TILES, (False, True))
            if tickets or tile.has_rope
            for queries, more in (*((queries, 0) for queries in per_item.QUERIES), (1, 2), (1, 4))
        ),
        *(
            per_item.PerItemPlan(queries, slots=True, given=given, tile=tile)
            for tile, given, queries in product(_TILES, (False, True), per_item.QUERIES)
        ),
    ),
    build="flashdsa.kernels.attention.sm90.bwd_per_item.kernel:compile_per_item",
    entry="per_item_kernel",
    roles={
        "gather": ("gather_all",),
        "score": ("score_all",),
        "high": ("high_all",),
        "dkv": ("dkv_all",),
    },
)
_DECODE_PLANS = (
    decode.DecodePlan(),
    decode.DecodePlan(packed=True),
    decode.DecodePlan(tile=WITHOUT_ROPE),
    *(decode.DecodePlan(packed=True, form=form, tile=WITHOUT_ROPE) for form in decode.FORMATS[1:]),
    *(
        decode.DecodePlan(packed=True, joined=True, form=form, extra=extra, tile=WITHOUT_ROPE)
        for form, extra in decode.JOINED_PAIRS
    ),
    *(decode.DecodePlan(joined=True, tile=tile) for tile in _TILES),
)
SPARSE_MLA_DECODE = _hopper(
    name="mla_decode",
    operations=("sparse_mla_fwd",),
    plans=(*_DECODE_PLANS, *(replace(plan, alone=True) for plan in _DECODE_PLANS)),
    build="flashdsa.kernels.attention.sm90.decode.full.kernel:compile_decode",
    entry="decode_kernel",
    roles={"gather": ("gather",), **_CONSUMERS},
)
SPARSE_MLA_DECODE_DEALT = _hopper(
    name="mla_decode_dealt",
    operations=("sparse_mla_fwd",),
    plans=(
        DealtPlan(),
        DealtPlan(packed=True),
        DealtPlan(tile=WITHOUT_ROPE),
        *(DealtPlan(packed=True, form=form, tile=WITHOUT_ROPE) for form in decode.FORMATS[1:]),
        *(
            DealtPlan(packed=True, joined=True, form=form, tile=WITHOUT_ROPE)
            for form in decode.JOINED_FORMATS
        ),
        DealtPlan(joined=True, tile=WITHOUT_ROPE),
    ),
    build="flashdsa.kernels.attention.sm90.decode.full.dealt.kernel:compile_dealt",
    entry="dealt_kernel",
    roles={"gather": ("gather_stretches",), **_CONSUMERS},
)
SPARSE_MLA_DECODE_FEW_HEADS = _hopper(
    name="mla_decode_heads",
    operations=("sparse_mla_fwd",),
    plans=FewHeadsPlan.every(),
    build="flashdsa.kernels.attention.sm90.decode.few_heads.kernel:compile_few_heads",
    entry="few_heads_kernel",
    roles={"gather": ("gather_pieces",), "math": ("consume", "stage_share")},
)
SPARSE_MLA_DECODE_DEALT_FEW_HEADS = _hopper(
    name="mla_decode_dealt_heads",
    operations=("sparse_mla_fwd",),
    plans=DealtFewHeadsPlan.every(),
    build="flashdsa.kernels.attention.sm90.decode.few_heads.dealt.kernel:compile_dealt",
    entry="dealt_few_heads_kernel",
    roles={"gather": ("gather_stretches",), "math": ("take_stretches",)},
)
SPARSE_MLA_USED_SLOTS = _hopper(
    name="mla_used_slots",
    operations=("sparse_mla_fwd",),
    plans=(UsedSlotsPlan(),),
    build="flashdsa.kernels.attention.sm90.used_slots.kernel:compile_used_slots",
    entry="used_slots_kernel",
)
_INDEXER_BWD = "flashdsa.kernels.indexer_training.sm90.bwd.kernel"

INDEXER_BWD = _hopper(
    name="indexer_bwd",
    operations=("indexer_bwd",),
    plans=(
        index_bwd.BwdPlan(),
        *(
            index_bwd.BwdPlan(num_heads, min(index_bwd.BLOCKS), ordered)
            for ordered, num_heads in product((False, True), index_bwd.NUM_HEADS)
        ),
    ),
    build=f"{_INDEXER_BWD}:compile_backward",
    entry="indexer_bwd_kernel",
    roles={"load": ("load_all",), "multiply": ("multiply_all",)},
)
INDEXER_BWD_SUM = _hopper(
    name="indexer_bwd_sum",
    operations=("indexer_bwd",),
    plans=(index_bwd.SumPlan(),),
    build=f"{_INDEXER_BWD}:compile_sum",
    entry="ordered_sum_kernel",
)

ATTENTION_TARGET = _hopper(
    name="attention_target",
    operations=("attention_target",),
    plans=tuple(
        head_sums.target_plan(heads, width)
        for width, heads in product(head_sums.TARGET_WIDTHS, reversed(head_sums.TARGET_HEADS))
    ),
    build="flashdsa.kernels.indexer_training.sm90.head_sums.kernel:compile_head_sums",
    entry="head_sums_kernel",
    roles={"gather": ("gather_all",), "add": ("add_all",)},
)
INDEXER_SCORES = _hopper(
    name="indexer_scores",
    operations=("indexer_scores",),
    plans=tuple(scores.ScoresPlan(heads) for heads in reversed(scores.NUM_HEADS)),
    build="flashdsa.kernels.indexer_training.sm90.scores.kernel:compile_scores",
    entry="scores_kernel",
)
INDEXER_KL = _hopper(
    name="indexer_kl",
    operations=("indexer_kl", "indexer_kl_bwd"),
    plans=(KlPlan(), KlPlan(gradient=True)),
    build="flashdsa.kernels.indexer_training.sm90.kl.kernel:compile_kl",
    entry="kl_kernel",
)
COMPRESS_KV = _hopper(
    name="compress_kv",
    operations=("compress_kv", "compress_kv_bwd"),
    plans=entries.MODELS + entries.STATES + entries.GRADIENTS,
    build="flashdsa.kernels.entries.sm90.kernel:compile_compress",
    entry="compress_kernel",
)

KERNELS = tuple(row for row in tuple(vars().values()) if isinstance(row, KernelSpec))
"""All rows."""
BACKENDS = tuple(dict.fromkeys(spec.backend for spec in KERNELS))
"""Backends that run compiled kernels, each from a shared object of its name."""


def variants_of(backend: str) -> dict[str, Variant]:
    """Variants of the backend's shared object, by exported name."""
    rows = [spec for spec in KERNELS if spec.backend == backend]
    return {variant.name: variant for spec in rows for variant in spec.variants}
