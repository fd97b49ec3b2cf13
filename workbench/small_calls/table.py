"""Every kernel with small calls of it, as data: what tests, sanitizers, mutation and traces read.

A call of Hopper that takes no plan of its own runs on a GPU too. Sizes are such that rings go
round, CTAs have several work items, and rows have parts without work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from flashdsa.backends.sm100 import mla_bwd as sm100_bwd
from flashdsa.errors import ArgumentValueError
from flashdsa.kernels.attention.sm100.bwd.plan import BwdPlan
from flashdsa.kernels.indexer.plan import By, Lists, Sharing
from flashdsa.verify import check_cases
from flashdsa.verify.indexer_training_cases import IndexerTrainingCase
from flashdsa.verify.sparse_mla_cases import SparseMlaCase
from workbench.small_calls import prefill as of_keys
from workbench.small_calls.attention import (
    ENTRIES,
    FEW_HEADS,
    FEW_HEADS_OF_512,
    KEYS,
    STREAM_K_FEW_HEADS,
    STREAM_K_FEW_HEADS_OF_512,
    alike,
    attention,
    decode,
    growing,
    of_formats,
    plant_all,
    shorter,
)
from workbench.small_calls.call import BLACKWELL, HOPPER, Row, SmallCall
from workbench.small_calls.direct import InTwoLaunches, Order, Ranked
from workbench.small_calls.prefill import PREFILL_IN_CLUSTERS, prefill, prefill_of_64


def backward(
    name: str, heads: int, S: int, topk: int, *plants: Callable[[Any], None], sms: int = 1,
    ordered: bool = False, keys: int = 260, settings: dict[str, Any] | None = None,
    backend: str = HOPPER, **features: Any,
) -> SmallCall:  # fmt: skip
    """A backward; what is planted comes in this order."""
    case = SparseMlaCase(name, S, keys, heads, topk, invalid=True, **features)
    options = {"deterministic": True} if ordered else {}
    plant = partial(plant_all, plants)
    return SmallCall("mla_bwd", case, sms, options, plant, settings or {}, backend)


def training(
    operation: str, name: str, S: int, topk: int, heads: int, index_heads: int = 16, *,
    sms: int = 1, keys: int = KEYS, ordered: bool = False,
    plant: Callable[[Any], None] | None = None, **features: Any,
) -> SmallCall:  # fmt: skip
    """An operation that trains the indexer."""
    case = SparseMlaCase(name, S, keys, heads, topk, invalid=True, **features)
    options = {"deterministic": True} if ordered else {}
    inputs = IndexerTrainingCase(case, index_heads=index_heads)
    return SmallCall(operation, inputs, sms, options, plant)


def checked(operation: str, *names: str) -> tuple[SmallCall, ...]:
    """Cases of `flashdsa check`, on all multiprocessors."""
    cases = {case.name: case for case in _CHECKED.get(operation, ())}
    return tuple(SmallCall(operation, cases.get(name, name), sms=0) for name in names)


_CHECKED: dict[str, Sequence[Any]] = {
    "sparse_mla_fwd": check_cases.FORWARD,
    "dsa_topk_indexer": check_cases.INDEXER,
    "indexer_logits": check_cases.INDEXER,
    "dsa_topk_prefill": check_cases.PREFILL,
    "prefill_logits": check_cases.PREFILL,
}
"""Cases whose results are judged on the CPU; the others' where they are."""

_index_backward = partial(training, "indexer_bwd", heads=8, keys=260)
_target = partial(training, "attention_target", topk_length=True)
_scores = partial(training, "indexer_scores", heads=8, topk_length=True)
_LARGE = (
    backward("two tiles and one", 128, 4, 130, alike, shorter(70)),
    backward("three tiles, two CTAs", 128, 8, 200, alike, sms=2),
)
"""A CTA with a group of two tiles and one of one, and two with four of three tiles."""
_SIZES = (
    ("two CTAs", 128, 3, 175, 2), ("three CTAs", 128, 4, 170, 3),
    ("16 heads", 16, 9, 100, 2), ("8 heads", 8, 17, 70, 2),
)  # fmt: skip
_TURNS = tuple(backward(x, H, S, k, sms=sms, empty_rows=True) for x, H, S, k, sms in _SIZES)
_TICKETS = tuple(backward(x, H, S + 2, k, sms=sms, topk_length=True) for x, H, S, k, sms in _SIZES)
_PACED = {"flashdsa.heuristics.h200:Backward.PACED_ROWS": {64: 0}}
_slots = partial(backward, ordered=True, topk_length=True, duplicates=True)
_SLOT_OFFSETS = "flashdsa.kernels.attention.sm90.bwd_per_item.slot_offsets"
_rows = partial(_slots, settings={f"{_SLOT_OFFSETS}:MOST_OF_WARP": 8})

# Lists are so small that short rows compact them, and selecting counts for so little that rows of
# this length are split.
_tight = partial(
    Ranked,
    plan={
        "num_heads": 16, "rows": By.CLUSTERS,
        "sharing": Sharing(select_pages=1, merge_pages=3),
        "lists": Lists(capacity=3072, first_fill_pages=10, fill_step_pages=2, most_topk=512),
    },
    topk=512,
)  # fmt: skip
_blackwell = partial(
    Ranked,
    plan={
        "num_heads": 16, "rows": By.CLUSTERS, "stages": 8,
        "lists": Lists(capacity=3072, first_fill_pages=8, fill_step_pages=1, most_topk=512),
    },
    topk=512,
    backend=BLACKWELL,
)  # fmt: skip
_OF_16 = {"num_heads": 16}
_two = partial(InTwoLaunches, plan=_OF_16, topk=512)
_SCORES = (
    _two(
        "CTAs with several tiles",
        (1000, 999, 5, 4, 1500, 1501, 700, 640, 1200, 1199, 64, 65, 900, 901, 1300, 1299),
    ),
    _two("bad pages", (1300, 1290, 513, 512), values="two", bad_pages=True),
    _two("four queries", (600, 700, 0, 530, 513, 2, 640, 650), next_n=4),
    _two("three queries", (1300, 513, 512), next_n=3),
)
_RANKS = (  # the first are of one kernel
    _two("a row's CTAs", (8400, 8300), sms=16),
    *(_two(f"{values} keys", (5200, 4000), values=values, sms=16) for values in ("two", "equal")),
    _two("a long row, then short ones", of_keys.UNLIKE, sms=8),
    _two("crowded", (6000, 5990), values="crowded", sms=16),
    _two("a long row", (700, 17_000, 513, 512, 600), next_n=1),
    *_SCORES[:2],
)
_SHORT_ROWS = 600, 70, 560, 513, 10, 520, 640
_shared = {"rows": By.CLUSTERS}

# fmt: off
TABLE: dict[str, Row] = {
    "mla-bwd-sm_100a": Row("mla_bwd", tuple(
        # A pair of CTAs takes all queries; the second call goes round the ring of indices.
        backward(f"{S} queries of {topk}", 128, S, topk, sms=2, keys=40, duplicates=True,
                 backend=BLACKWELL, settings={"flashdsa.backends.sm100.mla_bwd:PLANS": {
                     **sm100_bwd.PLANS, (128, False): BwdPlan(index_stages=4)}})
        for S, topk in ((2, 64), (3, 96))
    )),
    "mla-bwd-groups-sm_100a": Row("mla_bwd", tuple(
        backward(f"{S} queries of {topk}", 64, S, topk, sms=4, keys=KEYS, duplicates=True,
                 backend=BLACKWELL)
        for S, topk in ((5, 40), (2, 110))
    )),
    "mla-fwd-sm_90a": Row("mla_fwd", (
        attention("four items, one empty", 4, KEYS, 64, 200, max_logits=True, empty_rows=True),
        attention("two CTAs", 7, KEYS, 64, 300, sms=2),
        *checked("sparse_mla_fwd", "530 queries", "264 queries in groups of 2",
                 "265 queries in groups of 4", "926 queries in groups of 8"),
        *(attention(f"groups of {group}, maxima", 4 * group + 3, KEYS, 64 // group, 140, sms=2,
                    max_logits=True) for group in (2, 4, 8)),
    ), mutated=1),
    "mla-fwd-drawn-sm_90a": Row("mla_fwd", (
        attention("lists of any length, one CTA", 5, KEYS, 64, 180, topk_length=True),
        attention("lists of any length, two CTAs", 5, KEYS, 70, 400, sms=2, topk_length=True),
        attention("groups of any length", 11, KEYS, 16, 140, sms=2, topk_length=True),
        *checked("sparse_mla_fwd", "530 queries, lengths", "420 queries in groups of 2, lengths"),
    ), mutated=1),
    "mla-fwd-joined-sm_90a": Row("mla_fwd", (
        attention("pools of 4 and a tail", 5, 203, 64, 40, d_qk=512, max_logits=True, index_block=4,
                  extra_keys=203, extra_topk=13, ranges="extra_kv", topk_length=True),
        attention("groups over two sources", 11, KEYS, 16, 140, sms=2, extra_keys=90,
                  extra_topk=70),
        *checked("sparse_mla_fwd", "530 queries of two sources",
                 "265 queries of two sources in groups of 4"),
    ), mutated=1),
    # Seven tiles: every ring goes round.
    "mla-fwd-sm_100a": Row("mla_fwd", (growing(128, 448, backend=BLACKWELL, sms=2),)),
    "mla-fwd-groups-sm_100a": Row(
        "mla_fwd",
        (SmallCall("sparse_mla_fwd", SparseMlaCase(
            "two queries", 2, 448, 64, 300, invalid=True, logit_scale=20.0, rounded_dots=True,
        ), 4, backend=BLACKWELL),),
    ),
    "mla-bwd-scores-sm_90a": Row("mla_bwd_scores", _LARGE),
    "mla-bwd-dq-sm_90a": Row("mla_bwd_dq", _LARGE),
    "mla-bwd-dkv-sm_90a": Row("mla_bwd_dkv", _LARGE),
    "mla-bwd-fused-sm_90a": Row("mla_bwd_fused", _TURNS, mutated=2),
    "mla-bwd-tickets-sm_90a": Row("mla_bwd_fused", (
        *_TICKETS, backward("in step", 64, 7, 400, sms=3, settings=_PACED),
    ), mutated=2),
    "mla-bwd-slots-sm_90a": Row("mla_bwd_fused", (
        _slots("a CTA", 128, 2, 100),
        _slots("three CTAs", 128, 2, 170, sms=3),
        _slots("16 heads", 16, 41, 20, sms=2),
        _slots("five queries", 128, 5, 100, sms=2),
    ), mutated=2),
    "mla-bwd-slot-rows-sm_90a": Row("mla_bwd_fused", (
        _rows("keys go round", 16, 41, 40, keys=80),
        _rows("several warps", 16, 220, 10, keys=12, duplicates=False),
    ), helper="order_kernel", lanes_apart=True),
    "mla-bwd-slot-sums-sm_90a": Row("mla_bwd_fused", (
        _slots("chunks", 16, 150, 6, sms=2, keys=10), _slots("keys of few rows", 16, 41, 20, sms=2),
    ), helper="sum_kernel"),
    "mla-bwd-512-sm_90a": Row("mla_bwd_fused", (
        backward("drawn", 64, 5, 170, sms=2, d_qk=512, topk_length=True),
        _slots("slots", 16, 41, 20, sms=2, d_qk=512),
        backward("groups", 128, 4, 130, alike, shorter(70), d_qk=512),
    ), mutated=0),
    "mla-bwd-join-sm_90a": Row("mla_bwd_join", (
        backward("a window and ids", 16, 5, 70, keys=90, sms=2, d_qk=512, extra_keys=300,
                 extra_topk=40, ranges="extra_kv", topk_length=True),
        _slots("pools of 4 and a tail", 64, 4, 20, keys=203, d_qk=512, index_block=4,
               extra_keys=203, extra_topk=3, ranges="extra_kv"),
    ), mutated=0),
    "mla-bwd-padded-heads-sm_90a": Row("mla_bwd_padded_heads", (
        backward("a head more than kernels take", 17, 3, 70, sms=2),
    ), mutated=0),
    "mla-bwd-sink-sm_90a": Row("mla_bwd_sink", (
        backward("sinks", 16, 5, 70, sms=2, attn_sink="finite"),
    ), mutated=0),
    "mla-bwd-lists-sm_90a": Row("mla_bwd_fused", _LARGE, "union_kernel"),
    "mla-bwd-sample-sm_90a": Row("mla_bwd_fused", _LARGE, "sample_kernel"),
    "mla-decode-sm_90a": Row("mla_decode", (
        decode("two CTAs", 1, heads=40, topk=600, sms=2),
        decode("four CTAs", 1, heads=20, topk=900, sms=4),
        growing(20, 256, sms=2),
    )),
    "mla-decode-single-cta-sm_90a": Row("mla_decode", (
        decode("a CTA", 1, heads=20, topk=330),
        decode("two tiles of heads", 1, heads=70, topk=130, sms=2),
        growing(20, 256),
    )),
    "mla-decode-packed-sm_90a": Row("mla_decode", (
        decode("any scale", 1, heads=40, topk=600, packed="fp32", sms=2),
        decode("four CTAs", 1, heads=40, topk=900, packed="ue8m0", sms=4),
        growing(40, 256, "ue8m0", sms=2),
    )),
    "mla-decode-packed-single-cta-sm_90a": Row("mla_decode", (
        decode("a CTA", 1, heads=40, topk=330, packed="ue8m0"),
        decode("two tiles of heads", 1, heads=70, topk=130, packed="ue8m0", sms=2),
        decode("any scale", 1, heads=40, topk=330, packed="fp32"),
        growing(40, 256, "ue8m0"),
    )),
    "mla-decode-joined-sm_90a": Row("mla_decode", (
        attention("a window and ids", 2, 300, 20, 129, sms=4, extra_keys=90, extra_topk=70,
                  ranges="kv"),
        decode("tiles go round", 1, heads=20, topk=600, extra_keys=90, extra_topk=200, sms=2),
    )),
    "mla-decode-stream-k-sm_90a": Row("mla_decode_stream_k", (
        decode("three CTAs", 4, heads=20, topk=1900, sms=3),
        decode("four CTAs", 5, heads=20, topk=1600, sms=4),
    )),
    "mla-decode-stream-k-packed-sm_90a": Row("mla_decode_stream_k", (
        decode("three CTAs", 4, heads=40, topk=500, packed="ue8m0", sms=3),
        decode("with lengths", 5, heads=20, topk=600, packed="ue8m0", topk_length=True, sms=4),
    )),
    "mla-decode-stream-k-joined-sm_90a": Row("mla_decode_stream_k", (
        decode("three CTAs", 4, heads=20, topk=1850, sms=3, **ENTRIES),
        decode("four CTAs", 5, heads=40, topk=1600, sms=4, **ENTRIES),
    )),
    "mla-decode-stream-k-heads16-sm_90a": Row("mla_decode_stream_k_heads", STREAM_K_FEW_HEADS),
    "mla-used-slots-sm_90a": Row("mla_used_slots", (
        decode("lists of any length", 5, heads=40, topk=330, packed="ue8m0", topk_length=True,
               batch_invariant=True),
        attention("two sources", 5, KEYS, 16, 70, d_qk=512, extra_keys=90, extra_topk=40,
                  topk_length=True, batch_invariant=True),
    ), mutated=0),
    # Synchronised as the rows above are.
    "mla-decode-formats-sm_90a": Row("mla_decode", of_formats(1, 40, 330, sms=2), mutated=0),
    "mla-decode-formats-joined-sm_90a": Row("mla_decode", of_formats(
        2, 50, 150, sms=4, joined=True, mixed=True), mutated=0),
    "mla-decode-stream-k-formats-sm_90a": Row(
        "mla_decode_stream_k", of_formats(4, 40, 330, sms=3), mutated=0),
    "mla-decode-stream-k-formats-joined-sm_90a": Row("mla_decode_stream_k", of_formats(
        4, 20, 250, sms=3, joined=True), mutated=0),
    "mla-decode-stream-k-heads-formats-sm_90a": Row(
        "mla_decode_stream_k_heads", STREAM_K_FEW_HEADS_OF_512, mutated=0),
    "mla-decode-heads16-sm_90a": Row("mla_decode_heads", FEW_HEADS),
    "mla-decode-heads16-v4-sm_90a": Row("mla_decode_heads", FEW_HEADS_OF_512, mutated=3),
    "prefill-sm_90a": Row("prefill", prefill_of_64("float8_e4m3fn"), mutated=7),
    "prefill-bf16-sm_90a": Row("prefill", prefill_of_64("bfloat16"), mutated=7),
    "prefill-heads16-sm_90a": Row("prefill", (
        prefill("one segment", 9, 400, 100, 16),
        prefill("three segments, a full log", 9, 2500, 300, 16),
        prefill("plateaus", 9, 3000, 100, 16, plateaus=True),
        prefill("no keys for a warpgroup", 5, 60, 20, 16),
        prefill("more candidates than fit", 5, 1500, 300, 16, wide=4096),
        prefill("a ring of tiles goes round", 33, 60, 20, 16),
        prefill("segments", 20, 12400, 300, 16, short=False, sms=3),
    ), mutated=6),
    "prefill-shared-sm_90a": Row("prefill", (
        *PREFILL_IN_CLUSTERS, prefill("a cluster of three", 4, 1600, 100, short=False, sms=3)
    ), mutated=6),
    "indexer-order-sm_90a": Row("indexer_order", (  # a warp a CTA
        Order(40), Order(300, "close"), Order(300),
    ), mutated=2, lanes_apart=True),
    "compress-kv-state-sm_90a": Row(
        "compress_kv", checked("compress_kv", "HCA", "CSA, 5 sequences"), mutated=0
    ),
    "compress-kv-sm_90a": Row(
        "compress_kv", checked("compress_kv_bwd", "CSA, 5 sequences", "V4.1, ratio 2"), mutated=1
    ),
    "compress-kv-groups-sm_90a": Row("compress_kv", checked("compress_kv_bwd", "HCA")),
    "compress-kv-entries-sm_90a": Row("compress_kv", checked(  # four in a CTA
        "compress_kv_bwd", "CSA index keys", "pools of 4 without norm and rotation"
    ), mutated=1),
    "attention-target-sm_90a": Row("attention_target", (
        _target("a CTA", 2, 150, 128),
        _target("70 heads", 3, 330, 70),
        _target("three CTAs", 2, 330, 128, sms=3),
        _target("a consumer has nothing", 7, 60, 128),
    )),
    "indexer-scores-sm_90a": Row("indexer_scores", (
        _scores("a CTA", 2, 150, index_heads=64),
        _scores("40 heads", 3, 330, index_heads=40),
        _scores("three CTAs", 2, 330, index_heads=64, sms=3),
        _scores("seven queries", 7, 60, index_heads=64),
    )),
    # A CTA has two groups, each with more tiles than there are stages.
    "indexer-bwd-sm_90a": Row("indexer_bwd", (
        _index_backward("seven queries", 7, 100, index_heads=64, sms=3),
        _index_backward("900 keys", 8, 400, index_heads=64, sms=3, keys=900),
        _index_backward("16 heads", 33, 60, index_heads=16, sms=3),
    ), mutated=2),
    "indexer-bwd-large-sm_90a": Row("indexer_bwd", (
        _index_backward("alike", 12, 100, index_heads=64, plant=alike),
        _index_backward("900 keys", 8, 500, index_heads=64, keys=900, plant=alike),
    )),
    "indexer-bwd-ordered-sm_90a": Row("indexer_bwd", (
        _index_backward("in order", 5, 100, index_heads=64, ordered=True),
        _index_backward("900 keys", 4, 400, index_heads=64, ordered=True, keys=900),
        _index_backward("32 heads", 7, 60, index_heads=32, ordered=True, sms=3),
    ), mutated=2),
    "indexer-bwd-lists-sm_90a": Row("indexer_bwd", tuple(
        _index_backward(
            name, S, topk, index_heads=64, ordered=True, keys=keys, duplicates=keys == 260
        )
        for name, S, topk, keys in (
            ("repeated keys", 5, 100, 260),
            ("three queries", 3, 170, 261),
            ("two ranges of keys", 2, 64, 132_000),
            ("two ranges of places", 2, 14_000, 40_000),
        )
    ), "lists_kernel"),
    "indexer-bwd-sum-sm_90a": Row("indexer_bwd_sum", (
        _index_backward("in order", 5, 100, index_heads=64, ordered=True),
    ), mutated=0),
    "indexer-sm_90a": Row("indexer", (
        _tight("two rows", (1300, 900), (1, 1)), _tight("two CTAs of a row", (1500,), (1, 2)),
        _tight("CTAs with several tiles", _SHORT_ROWS, (2, 1)),
        _tight("compacts its list", (3700, 600), (1, 1)),
        *(_tight(f"{x} keys", (1500,), (1, 2), values=x) for x in ("two", "equal")),
        _tight("nothing passes the floor", (3300,), (1, 1), values="equal"),
        _tight("bad pages", (900,), (1, 1), bad_pages=True),
        _tight("rows that are split", (2500, 513, 2600), (5, 1)),
        _tight("clusters of two share a row", (530, 6000, 513, 600), (3, 2)),
        _tight("each compacts its part", (9000, 513), (3, 1)),
        _tight("one key, split", (3200, 513), (4, 1), values="equal"),
        _tight("too many to be put in order", (560, 530, *(1,) * 511), (1, 1)),
        _tight("put in order by several warps", (2500, 513, *(1,) * 62), (3, 1)),
        _tight("growing, split", (6400, 513), (5, 2), values="ascending"),
        _tight("candidates of one key", (900,), (1, 1), values="two"),
        _tight("two windows of the bitmap", (131400,), (1, 1), values="two"),
        Ranked("compaction", (9000,), (1, 1)), Ranked("clusters of 16", (9000,), (1, 16)),
        Ranked("clusters of 2", (2100, 9000, 3000), (2, 2), _shared),
        Ranked("clusters of 1", (2100, 4000), (2, 1)),
        Ranked("halved clusters", (1300,) * 5, (1, 4), {**_OF_16, **_shared}, topk=512),
        Ranked("row splits", (66_000,), (7, 16), _shared),
        Ranked("ragged", (66_000, 2049, 2100, 3000, 2600), (4, 2), _shared),
        Ranked("requests", (2100, 2101, 9000, 9001), (2, 2), _shared, next_n=2),
        Ranked("sorted", (3000, 100), (1, 2), sorted=True),
        _tight("sorted, cut", (3700, 600), (1, 1), sorted=True, values="two"),
        Ranked("16 heads", (1400, 600), (1, 2), {**_OF_16, **_shared}, topk=512),
        Ranked("plateau", (2500,), (1, 3), values="two"),
        Ranked("pages outside", (4000, 300), (1, 2), _shared, bad_pages=True),
        Ranked("shared row", (700,), (1, 2), _OF_16, topk=512),
        Ranked("compacted, 16 heads", (8300,), (1, 1), _OF_16, topk=512),
        *checked("dsa_topk_indexer", "page edges", "3 queries a request, sorted"),
    ), mutated=17, scratch=("argument 8",)),
    "two-levels-sm_90a": Row("indexer_rank", of_keys.LEVELS_OF_TOKENS),
    "two-levels-blocks-sm_90a": Row("indexer_rank", of_keys.LEVELS_OF_BLOCKS),
    "two-levels-shared-sm_90a": Row("indexer_rank", of_keys.SHARED_LEVELS_OF_TOKENS),
    "two-levels-shared-blocks-sm_90a": Row("indexer_rank", of_keys.SHARED_LEVELS_OF_BLOCKS),
    "indexer-sm_100a": Row("indexer", (
        _blackwell("two rows", (1300, 900), (1, 1)),
        _blackwell("two CTAs of a row", (1500,), (1, 2)),
        _blackwell("CTAs with several tiles", _SHORT_ROWS, (2, 1)),
        _blackwell("compacts its list", (3700, 600), (1, 1)),
        *(_blackwell(f"{x} keys", (1500,), (1, 2), values=x) for x in ("two", "equal")),
        _blackwell("nothing passes the floor", (3300,), (1, 1), values="equal"),
        _blackwell("too many to be put in order", (560, 530, *(1,) * 511), (1, 1)),
        _blackwell("fills the list again", (6000,), (1, 1)),
        _blackwell("two windows of the bitmap", (131400,), (1, 1), values="two"),
    )),
    "indexer-unscored-sm_90a": Row("indexer_unscored", checked(
        "dsa_topk_indexer", "all of at most 450 tokens"), mutated=0),
    "indexer-logits-sm_90a": Row(
        "indexer_logits", checked("indexer_logits", "page edges", "keys of 68 bytes"), mutated=0),
    "topk-indices-sm_90a": Row("indexer_rank", (
        *checked("topk_indices", "512 of 6000", "ties and NaN", "ties and NaN, sorted"),
    ), mutated=0),
    "indexer-ranked-scores-sm_90a": Row("indexer_logits", _SCORES, mutated=3),
    "indexer-rank-sm_90a": Row("indexer_rank", _RANKS, mutated=4),
    "prefill-logits-sm_90a": Row(
        "prefill_logits", checked("prefill_logits", "16 heads, 512 of 600 keys"), mutated=0),
    "prefill-two-levels-sm_90a": Row("prefill_logits", of_keys.LEVELS[:2], mutated=2),
    "prefill-two-levels-blocks-sm_90a": Row("prefill_logits", of_keys.LEVELS[2:], mutated=2),
    "quantize-index-sm_90a": Row("quantize_index", (
        *checked("quantize_index_k", "1000 keys", "1000 keys, fp32"),
        *checked("quantize_index_q", "8 x 64 heads"),
    ), mutated=0),
    "write-index-k-cache-sm_90a": Row("write_index_k_cache", checked(
        "write_index_k_cache", "1000 slots, some padding", "1000 slots, some padding, fp32"
    ), mutated=0),
    "indexer-kl-sm_90a": Row("indexer_kl", (
        *checked("indexer_kl", "invalid slots over NaN keys"),
        *checked("indexer_kl_bwd", "128 heads"),
    ), mutated=0),
}
# fmt: on
"""Rows by the name that results and `equivalent/` have."""


def rows_of(names: Iterable[str]) -> dict[str, Row]:
    """The rows of these names, of a kernel's name in the catalog all; none: the whole table.

    Raises:
        ArgumentValueError: there is none of a name.
    """
    names = tuple(names)
    found = {n: row for n, row in TABLE.items() if not names or n in names or row.kernel in names}
    for name in names:
        if name not in found and all(row.kernel != name for row in found.values()):
            raise ArgumentValueError(f"{name}: no such kernel; there are {', '.join(TABLE)}")
    return found
