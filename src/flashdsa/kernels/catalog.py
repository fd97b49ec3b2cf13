"""Every kernel of the library as a row of data. Nothing here imports CuTe DSL.

`make kernels`, loading, the emulator, `flashdsa plan` and `flashdsa inspect` read these rows.
"""

from __future__ import annotations

from itertools import product

from flashdsa.hw import SM90, SM100
from flashdsa.kernels.indexer.plan import FUSED_KINDS, NUM_HEADS, POSITIONS, TOPK
from flashdsa.kernels.indexer.sm90.logits_plan import LogitsPlan
from flashdsa.kernels.indexer.sm90.order.plan import OrderPlan
from flashdsa.kernels.indexer.sm90.plan import IndexerPlan, pairs_plan
from flashdsa.kernels.indexer.sm90.prefill.plan import DTYPES, PrefillPlan
from flashdsa.kernels.indexer.sm90.quantize_plan import QuantizePlan
from flashdsa.kernels.indexer.sm90.topk_plan import TopkPlan
from flashdsa.kernels.indexer.sm100 import logits_plan as sm100_logits
from flashdsa.kernels.indexer.sm100 import plan as sm100
from flashdsa.kernels.indexer_training.sm90.bwd import plan as index_bwd
from flashdsa.kernels.indexer_training.sm90.head_sums import plan as head_sums
from flashdsa.kernels.indexer_training.sm90.kl.plan import KlPlan
from flashdsa.kernels.indexer_training.sm90.scores import plan as scores
from flashdsa.kernels.sparse_mla.sm90.bwd.dkv.plan import DkvPlan
from flashdsa.kernels.sparse_mla.sm90.bwd.dq.plan import DqPlan
from flashdsa.kernels.sparse_mla.sm90.bwd.fused import plan as fused
from flashdsa.kernels.sparse_mla.sm90.bwd.scores.plan import ScoresPlan
from flashdsa.kernels.sparse_mla.sm90.decode.plan import DecodePlan
from flashdsa.kernels.sparse_mla.sm90.few_heads.plan import COLUMNS, FewHeadsPlan
from flashdsa.kernels.sparse_mla.sm90.fwd.plan import GROUPS, FwdPlan
from flashdsa.kernels.sparse_mla.sm100.bwd import plan as sm100_bwd
from flashdsa.kernels.sparse_mla.sm100.fwd import plan as sm100_fwd
from flashdsa.plan.kernel_spec import KernelSpec, Variant

_LOAD_FILES = ("load.py", "load_tiles.py", "page_partition.py", "scheduled_tiles.py")
_SELECT_FILES = (
    "select_rows.py", "score.py", "score_batch.py", "list_scores.py", "read_scores.py",
    "candidate_list.py", "exchange.py", "threshold.py", "candidates.py", "ranges.py",
    "row_splits.py", "cta_splits.py", "row_counts.py", "output.py", "in_order.py", "by_bitmap.py",
    "by_score.py",
)  # fmt: skip
"""Not row_schedule.py: rows are put in order before the warps part into roles."""
_FUSED_FILES = tuple(file for file in _SELECT_FILES if file != "read_scores.py")
_OTHER_STAGES = (1, 4)
"""Pages of a stage in further variants, one of each kernel, to compare with two pages."""
_INDEXER_BUILD = "flashdsa.kernels.indexer.sm90.build"

INDEXER = KernelSpec(
    name="indexer",
    arch=SM90.name,
    operations=("dsa_topk_indexer",),
    plans=(
        *(
            IndexerPlan(num_heads, topk, **kind)
            for num_heads, topk, kind in product(reversed(NUM_HEADS), reversed(TOPK), FUSED_KINDS)
        ),
        *(IndexerPlan(**choices) for choices in POSITIONS),
        *(pairs_plan(positions=positions) for positions in (False, True)),
    ),
    build=f"{_INDEXER_BUILD}:compile_indexer",
    entry="indexer_kernel",
    sources={"load": _LOAD_FILES, "select": (*_SELECT_FILES, "teams.py", "score_pairs.py")},
)
INDEXER_LOGITS = KernelSpec(
    name="indexer_logits",
    arch=SM90.name,
    operations=("indexer_logits",),
    plans=tuple(LogitsPlan(num_heads) for num_heads in reversed(NUM_HEADS)),
    build=f"{_INDEXER_BUILD}:compile_logits",
    entry="logits_kernel",
    sources={"load": _LOAD_FILES, "select": ("score.py", "write_scores.py")},
)
_SM100_BUILD = "flashdsa.kernels.indexer.sm100.build"
_MMA_FILES = ("mma.py", "umma_issue.py")

INDEXER_SM100 = KernelSpec(
    name="indexer",
    arch=SM100.name,
    operations=("dsa_topk_indexer",),
    plans=(
        *(
            sm100.IndexerPlan(num_heads, topk, **kind)
            for num_heads, topk, kind in product(reversed(NUM_HEADS), reversed(TOPK), FUSED_KINDS)
        ),
        *(sm100.IndexerPlan(**choices) for choices in POSITIONS),
        *(sm100.IndexerPlan(pages_per_stage=pages) for pages in _OTHER_STAGES),
    ),
    build=f"{_SM100_BUILD}:compile_indexer",
    entry="indexer_kernel",
    sources={"load": _LOAD_FILES, "mma": _MMA_FILES, "select": _FUSED_FILES},
)
INDEXER_LOGITS_SM100 = KernelSpec(
    name="indexer_logits",
    arch=SM100.name,
    operations=("indexer_logits",),
    plans=(
        *(sm100_logits.LogitsPlan(num_heads) for num_heads in reversed(NUM_HEADS)),
        *(sm100_logits.LogitsPlan(pages_per_stage=pages) for pages in _OTHER_STAGES),
    ),
    build=f"{_SM100_BUILD}:compile_logits",
    entry="logits_kernel",
    sources={"load": _LOAD_FILES, "mma": _MMA_FILES, "select": ("score.py", "write_scores.py")},
)
TOPK_INDICES = KernelSpec(
    name="topk_indices",
    arch=SM90.name,
    operations=("topk_indices",),
    plans=tuple(
        TopkPlan(topk=topk, sorted=by_score)
        for topk, by_score in product(reversed(TOPK), (False, True))
    ),
    build=f"{_INDEXER_BUILD}:compile_topk",
    entry="topk_kernel",
    sources={"load": _LOAD_FILES, "select": _SELECT_FILES},
)
_PREFILL_BUILD = "flashdsa.kernels.indexer.sm90.prefill.build:compile_prefill"
_PREFILL_SCORE_FILES = ("score.py", "products.py")
_PREFILL_RANK_FILES = (
    "window.py", "select.py", "bounds.py", "exact.py", "team.py", "entries.py", "emit.py",
)  # fmt: skip

PREFILL = KernelSpec(
    name="prefill",
    arch=SM90.name,
    operations=("dsa_topk_prefill",),
    plans=tuple(
        PrefillPlan(num_heads, dtype, with_scores=with_scores)
        for with_scores, dtype, num_heads in product((False, True), DTYPES, reversed(NUM_HEADS))
    ),
    build=_PREFILL_BUILD,
    entry="prefill_kernel",
    sources={
        "load": ("load.py",),
        "score": (*_PREFILL_SCORE_FILES, *_PREFILL_RANK_FILES),
    },
)
PREFILL_ORDER = KernelSpec(
    name="prefill_order",
    arch=SM90.name,
    operations=("dsa_topk_prefill",),
    plans=tuple(OrderPlan(width) for width in reversed(TOPK)),
    build="flashdsa.kernels.indexer.sm90.order.build:compile_order",
    entry="order_kernel",
)
PREFILL_LOGITS = KernelSpec(
    name="prefill_logits",
    arch=SM90.name,
    operations=("prefill_logits",),
    plans=tuple(
        PrefillPlan(num_heads, dtype, scores_only=True)
        for dtype, num_heads in product(DTYPES, reversed(NUM_HEADS))
    ),
    build=_PREFILL_BUILD,
    entry="prefill_kernel",
    sources={"load": ("load.py",), "score": _PREFILL_SCORE_FILES},
)
QUANTIZE_INDEX = KernelSpec(
    name="quantize_index",
    arch=SM90.name,
    operations=("quantize_index_k", "quantize_index_q"),
    plans=tuple(QuantizePlan(dtype, slot_bits=0) for dtype in ("bfloat16", "float32")),
    build=f"{_INDEXER_BUILD}:compile_quantize",
    entry="quantize_kernel",
)
WRITE_INDEX_K_CACHE = KernelSpec(
    name="write_index_k_cache",
    arch=SM90.name,
    operations=("write_index_k_cache",),
    plans=tuple(
        QuantizePlan(dtype, slot_bits)
        for dtype, slot_bits in product(("bfloat16", "float32"), (64, 32))
    ),
    build=f"{_INDEXER_BUILD}:compile_quantize",
    entry="quantize_kernel",
)
MLA_BWD = KernelSpec(
    name="mla_bwd",
    arch=SM100.name,
    operations=("mla_bwd",),
    plans=(
        *(sm100_bwd.BwdPlan(group=group) for group in sm100_bwd.GROUPS),
        sm100_bwd.BwdPlan(deterministic=True),
        sm100_bwd.BwdPlan(from_registers=True),
    ),
    build="flashdsa.kernels.sparse_mla.sm100.bwd.build:compile_backward",
    entry="backward_kernel",
    sources={
        "softmax": ("softmax.py",),
        "load": ("load.py",),
        "reduce": ("reduce_dkv.py",),
        "mma": ("mma.py", "products.py", "umma_issue.py"),
    },
    timeline="flashdsa.kernels.sparse_mla.sm100.bwd.timeline:TIMELINE",
)
_SIDES = {"left": ("left.py",), "right": ("right.py",)}
SPARSE_MLA_FWD = KernelSpec(
    name="mla_fwd",
    arch=SM90.name,
    operations=("sparse_mla_fwd",),
    plans=tuple(FwdPlan(group, largest) for largest in (False, True) for group in GROUPS),
    build="flashdsa.kernels.sparse_mla.sm90.fwd.build:compile_forward",
    entry="forward_kernel",
    sources={"gather": ("gather.py", "cp_async.py"), **_SIDES},
)
SPARSE_MLA_FWD_SM100 = KernelSpec(
    name="mla_fwd",
    arch=SM100.name,
    operations=("sparse_mla_fwd",),
    plans=tuple(sm100_fwd.FwdPlan(group) for group in sm100_fwd.GROUPS),
    build="flashdsa.kernels.sparse_mla.sm100.fwd.build:compile_forward",
    entry="forward_kernel",
    sources={
        "softmax": ("softmax.py", "query.py", "epilogue.py"),
        "load": ("load.py", "gather4.py"),
        "mma": ("mma.py", "products.py", "umma_issue.py"),
    },
)
_SM90_BWD = "flashdsa.kernels.sparse_mla.sm90.bwd"

MLA_BWD_SCORES = KernelSpec(
    name="mla_bwd_scores",
    arch=SM90.name,
    operations=("mla_bwd",),
    plans=tuple(ScoresPlan(queries, optional=True) for queries in (2, 4)),
    build=f"{_SM90_BWD}.scores.build:compile_scores",
    entry="scores_kernel",
    sources={"gather": ("gather.py", "cp_async.py"), "score": ("score.py", "products.py")},
)
MLA_BWD_DQ = KernelSpec(
    name="mla_bwd_dq",
    arch=SM90.name,
    operations=("mla_bwd",),
    plans=(DqPlan(),),
    build=f"{_SM90_BWD}.dq.build:compile_dq",
    entry="dq_kernel",
    sources={"load": ("load.py", "cp_async.py"), "multiply": ("multiply.py",)},
)
MLA_BWD_DKV = KernelSpec(
    name="mla_bwd_dkv",
    arch=SM90.name,
    operations=("mla_bwd",),
    plans=(DkvPlan(), DkvPlan(ordered=True)),
    build=f"{_SM90_BWD}.dkv.build:compile_dkv",
    entry="dkv_kernel",
    sources={
        "images": ("images.py",),
        "rows": ("rows.py", "cp_async.py"),
        "publish": ("publish.py",),
        "multiply": ("multiply.py", "add.py", "order.py"),
    },
)
MLA_BWD_FUSED = KernelSpec(
    name="mla_bwd_fused",
    arch=SM90.name,
    operations=("mla_bwd",),
    plans=(
        *(fused.FusedPlan(queries) for queries in fused.QUERIES),
        *(fused.FusedPlan(more=queries) for queries in (2, 4)),
        *(fused.FusedPlan(queries, slots=True) for queries in fused.QUERIES),
        *(fused.FusedPlan(more=queries, slots=True) for queries in (2, 4)),
    ),
    build=f"{_SM90_BWD}.fused.build:compile_fused",
    entry="fused_kernel",
    sources={
        "gather": ("gather.py",),
        "score": ("score.py",),
        "right": ("right.py", "rows.py"),
        "dkv": ("dkv.py", "add.py"),
    },
)
SPARSE_MLA_DECODE = KernelSpec(
    name="mla_decode",
    arch=SM90.name,
    operations=("sparse_mla_fwd",),
    plans=(DecodePlan(), DecodePlan(packed=True)),
    build="flashdsa.kernels.sparse_mla.sm90.decode.build:compile_decode",
    entry="decode_kernel",
    sources={"gather": ("gather.py", "expand.py", "cp_async.py"), **_SIDES},
)
SPARSE_MLA_DECODE_FEW_HEADS = KernelSpec(
    name="mla_decode_heads",
    arch=SM90.name,
    operations=("sparse_mla_fwd",),
    plans=tuple(map(FewHeadsPlan, COLUMNS)),
    build="flashdsa.kernels.sparse_mla.sm90.few_heads.build:compile_few_heads",
    entry="few_heads_kernel",
    sources={"gather": ("gather.py",), "math": ("consume.py", "query.py", "merge.py")},
)
_INDEXER_BWD = "flashdsa.kernels.indexer_training.sm90.bwd"

INDEXER_BWD = KernelSpec(
    name="indexer_bwd",
    arch=SM90.name,
    operations=("indexer_bwd",),
    plans=(
        index_bwd.BwdPlan(),
        *(
            index_bwd.BwdPlan(num_heads, min(index_bwd.BLOCKS), ordered)
            for ordered, num_heads in product((False, True), index_bwd.NUM_HEADS)
        ),
    ),
    build=f"{_INDEXER_BWD}.build:compile_backward",
    entry="indexer_bwd_kernel",
    sources={
        "load": ("load.py",),
        "multiply": ("multiply.py", "products.py", "gate.py", "add.py"),
    },
)
INDEXER_BWD_SUM = KernelSpec(
    name="indexer_bwd_sum",
    arch=SM90.name,
    operations=("indexer_bwd",),
    plans=(index_bwd.SumPlan(),),
    build=f"{_INDEXER_BWD}.build:compile_sum",
    entry="ordered_sum_kernel",
)

_HEAD_SUMS_BUILD = "flashdsa.kernels.indexer_training.sm90.head_sums.build:compile_head_sums"
_HEAD_SUMS_FILES = {
    "gather": ("gather.py", "row_tiles.py", "cp_async.py"),
    "add": ("add.py", "products.py"),
}
ATTENTION_TARGET = KernelSpec(
    name="attention_target",
    arch=SM90.name,
    operations=("attention_target",),
    plans=tuple(head_sums.target_plan(heads) for heads in reversed(head_sums.TARGET_HEADS)),
    build=_HEAD_SUMS_BUILD,
    entry="head_sums_kernel",
    sources=_HEAD_SUMS_FILES,
)
INDEXER_SCORES = KernelSpec(
    name="indexer_scores",
    arch=SM90.name,
    operations=("indexer_scores",),
    plans=tuple(scores.ScoresPlan(heads) for heads in reversed(scores.NUM_HEADS)),
    build="flashdsa.kernels.indexer_training.sm90.scores.build:compile_scores",
    entry="scores_kernel",
)
INDEXER_KL = KernelSpec(
    name="indexer_kl",
    arch=SM90.name,
    operations=("indexer_kl", "indexer_kl_bwd"),
    plans=(KlPlan(), KlPlan(gradient=True)),
    build="flashdsa.kernels.indexer_training.sm90.kl.build:compile_kl",
    entry="kl_kernel",
)

KERNELS = (
    INDEXER,
    INDEXER_LOGITS,
    INDEXER_SM100,
    INDEXER_LOGITS_SM100,
    TOPK_INDICES,
    PREFILL,
    PREFILL_ORDER,
    PREFILL_LOGITS,
    QUANTIZE_INDEX,
    WRITE_INDEX_K_CACHE,
    SPARSE_MLA_FWD,
    MLA_BWD_SCORES,
    MLA_BWD_DQ,
    MLA_BWD_DKV,
    MLA_BWD_FUSED,
    SPARSE_MLA_DECODE,
    SPARSE_MLA_DECODE_FEW_HEADS,
    ATTENTION_TARGET,
    INDEXER_SCORES,
    INDEXER_BWD,
    INDEXER_BWD_SUM,
    INDEXER_KL,
    MLA_BWD,
    SPARSE_MLA_FWD_SM100,
)
"""All rows. Files that several roles of a kernel run, the forward's softmax.py and the backward's
dq.py say, are in none of them."""
BACKENDS = tuple(dict.fromkeys(spec.backend for spec in KERNELS))
"""Backends that run compiled kernels, each from a shared object of its name."""


def variants_of(backend: str) -> dict[str, Variant]:
    """Variants of the backend's shared object, by exported name."""
    rows = [spec for spec in KERNELS if spec.backend == backend]
    return {variant.name: variant for spec in rows for variant in spec.variants}
