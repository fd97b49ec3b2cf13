"""Which kernels workbench/mutation/kernels.py tries, and the launches that it repeats of each.

A launch is saved as a file, as `ptxemu exec --save` does, which takes CuTe DSL. It is repeated from
there, which takes ptxemu and NumPy alone: on another machine, say, with more cores.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from workbench.mutation.calls import (
    Backward,
    BackwardWithGap,
    Call,
    Decode,
    GroupedBackward,
    GroupedForward,
    record,
)
from workbench.mutation.indexer_calls import (
    FusedIndexer,
    HeadSums,
    IndexBackward,
    PairsIndexer,
    Prefill,
    PrefillOrder,
)
from workbench.mutation.peers import PEERS
from workbench.mutation.scripts import Launches, Script, scripted

_INDEXER = "--fused --topk 512 --stages 8 --list-capacity 2048"
_SHORT_ROWS = 600, 70, 560, 513, 10, 520, 640
_LARGE = (
    Backward(queries=4, topk=130, alike=True, shorter=70),
    Backward(queries=6, topk=200, alike=True, sms=2),
)
"""A CTA with a group of two tiles and one of one, and two with three of three tiles."""
_ORDERED = (
    Backward(queries=4, topk=130, alike=True, ordered=True, shorter=70, sms=2),
    Backward(queries=4, topk=110, alike=True, ordered=True, repeated=4, sms=3),
    # Items of one tile, one behind the other: each time a warpgroup has none.
    Backward(queries=4, topk=60, alike=True, ordered=True),
    Backward(queries=4, topk=130, alike=True, ordered=True, sms=6),  # all items at the same time
    Backward(queries=4, topk=50, alike=True, ordered=True, repeated=4, sms=3),  # out of order only
    # The third of three groups adds to keys that the second passes over.
    BackwardWithGap(queries=6, topk=200, alike=True, ordered=True, sms=6),
)
_SMALL = (Backward(queries=2, topk=100), Backward(queries=2, topk=170, sms=3))
_SLOTS = (
    Backward(queries=2, topk=100, ordered=True),
    Backward(queries=2, topk=170, ordered=True, sms=3),
)


def _few_heads(num_heads: int) -> tuple[Call, ...]:
    """Decodes of few heads: rings that go round, clusters, scales that are no powers of two."""
    return (
        Decode("ue8m0", num_heads, topk=330),
        Decode("ue8m0", num_heads - 7, queries=2, topk=200, sms=2),
        Decode("fp32", num_heads, topk=600, sms=2),
        Decode("ue8m0", num_heads, topk=900, sms=4),
        Decode("ue8m0", num_heads, topk=256, growing=True),
    )


def _prefill(dtype: str) -> tuple[Call, ...]:
    """Prefills with 64 heads."""
    return (
        Prefill(queries=5, keys=400, topk=100, dtype=dtype),
        Prefill(queries=9, keys=2500, topk=300, dtype=dtype),  # three segments, a full log
        Prefill(queries=5, keys=3000, topk=100, dtype=dtype, plateaus=True),
        Prefill(queries=5, keys=60, topk=20, dtype=dtype),  # no keys for a warpgroup
        Prefill(queries=5, keys=1500, topk=300, dtype=dtype, wide=4096),  # more candidates than fit
        Prefill(queries=5, keys=1000, topk=300, dtype=dtype),  # warps read places of others
        Prefill(queries=5, keys=1000, topk=300, dtype=dtype, wide=128),  # candidates of many warps
    )


KERNELS = {
    "mla-bwd-sm_100a": Launches(
        "backward_kernel",
        scripted(
            "sm_100a",
            "workbench/launches/launch_sm100_backward.py",
            # A pair of CTAs takes all queries; the second goes round the ring of indices.
            "--index-stages 4 --topk 64 --queries 2",
            "--index-stages 4 --topk 96 --queries 3",
        ),
    ),
    "mla-bwd-groups-sm_100a": Launches(
        "backward_kernel", (GroupedBackward(queries=5), GroupedBackward(queries=2, topk=110))
    ),
    "mla-fwd-sm_90a": Launches(
        "forward_kernel",
        scripted("sm_90a", "workbench/launches/launch_sm90_forward.py", "--queries 3 --topk 128"),
    ),
    "mla-fwd-sm_100a": Launches(
        "forward_kernel",
        # Seven tiles: every ring goes round.
        scripted("sm_100a", "workbench/launches/launch_sm100_forward.py", "--topk 448"),
    ),
    "mla-fwd-groups-sm_100a": Launches("forward_kernel", (GroupedForward(),)),
    "mla-bwd-scores-sm_90a": Launches("scores_kernel", _LARGE),
    "mla-bwd-dq-sm_90a": Launches("dq_kernel", _LARGE),
    "mla-bwd-dkv-sm_90a": Launches("dkv_kernel", _LARGE),
    # Additions come in one order; a bound that is read may be old, as it only rises.
    "mla-bwd-dkv-ordered-sm_90a": Launches("dkv_kernel", _ORDERED, ignored=("stale-read",)),
    "mla-bwd-fused-sm_90a": Launches("fused_kernel", _SMALL),
    "mla-bwd-slots-sm_90a": Launches("fused_kernel", _SLOTS),
    "mla-bwd-lists-sm_90a": Launches("union_kernel", (*_SMALL, *_LARGE)),
    "mla-decode-sm_90a": Launches(
        "decode_kernel",
        (
            Decode(topk=330),
            Decode(num_heads=70, topk=200, sms=2),
            Decode(num_heads=40, topk=600, sms=2),
            Decode(topk=900, sms=4),
            Decode(topk=256, growing=True),
        ),
    ),
    "mla-decode-packed-sm_90a": Launches(
        "decode_kernel",
        (
            Decode("ue8m0", num_heads=40, topk=330),
            Decode("ue8m0", num_heads=70, topk=200, sms=2),
            Decode("fp32", num_heads=40, topk=600, sms=2),
            Decode("ue8m0", num_heads=40, topk=900, sms=4),
            Decode("ue8m0", num_heads=40, topk=256, growing=True),
        ),
    ),
    "mla-decode-heads16-sm_90a": Launches("few_heads_kernel", _few_heads(16)),
    "mla-decode-heads32-sm_90a": Launches("few_heads_kernel", _few_heads(32)),
    "prefill-sm_90a": Launches("prefill_kernel", _prefill("float8_e4m3fn")),
    "prefill-bf16-sm_90a": Launches("prefill_kernel", _prefill("bfloat16")),
    "prefill-heads16-sm_90a": Launches(
        "prefill_kernel",
        (
            Prefill(num_heads=16, queries=9, keys=400, topk=100),
            Prefill(num_heads=16, queries=9, keys=2500, topk=300),
            Prefill(num_heads=16, queries=9, keys=3000, topk=100, plateaus=True),
            Prefill(num_heads=16, queries=5, keys=60, topk=20),
            Prefill(num_heads=16, queries=5, keys=1500, topk=300, wide=4096),
            Prefill(num_heads=16, queries=33, keys=60, topk=20),  # a ring of tiles goes round
        ),
    ),
    "prefill-order-sm_90a": Launches(
        # One warp a CTA.
        "order_kernel",
        (PrefillOrder(topk=40), PrefillOrder(close=True)),
        lanes_apart=True,
    ),
    "attention-target-sm_90a": Launches(
        "head_sums_kernel",
        (
            HeadSums(128, 2, 150),
            HeadSums(70, 3, 330),
            HeadSums(128, 2, 330, sms=3),
            HeadSums(128, 7, 60),  # of each query a consumer has nothing
        ),
    ),
    "indexer-scores-sm_90a": Launches(
        "scores_kernel",
        (
            HeadSums(64, 2, 150, scores=True),
            HeadSums(40, 3, 330, scores=True),
            HeadSums(64, 2, 330, scores=True, sms=3),
            HeadSums(64, 7, 60, scores=True),
        ),
    ),
    "indexer-bwd-sm_90a": Launches(
        "indexer_bwd_kernel",
        # A CTA has two groups, each with more tiles than there are stages.
        (IndexBackward(queries=7, sms=3), IndexBackward(queries=8, topk=400, sms=3, keys=900)),
    ),
    "indexer-bwd-large-sm_90a": Launches(
        "indexer_bwd_kernel",
        (
            IndexBackward(queries=12, alike=True),
            IndexBackward(queries=8, topk=500, alike=True, keys=900),
        ),
    ),
    "indexer-bwd-ordered-sm_90a": Launches(
        "indexer_bwd_kernel",
        (
            IndexBackward(queries=5, ordered=True),
            IndexBackward(queries=4, topk=400, ordered=True, keys=900),
        ),
    ),
    "indexer-bwd-lists-sm_90a": Launches(
        "lists_kernel",
        (
            IndexBackward(queries=5, ordered=True, repeated=True),
            IndexBackward(queries=3, topk=170, ordered=True),
            IndexBackward(queries=2, topk=64, ordered=True, keys=132_000),  # two ranges of keys
            IndexBackward(queries=2, topk=14_000, ordered=True, keys=40_000),  # and of places
        ),
    ),
    "indexer-sm_90a": Launches(
        "indexer_kernel",
        (
            FusedIndexer((1300, 900)),
            FusedIndexer((1500,), (1, 2)),
            FusedIndexer(_SHORT_ROWS, (2, 1)),  # CTAs with several tiles, unevenly much work
            FusedIndexer((2700, 600)),  # compacts its list
            FusedIndexer((1500,), (1, 2), "two"),
            FusedIndexer((1300,), (1, 2), "equal"),
            FusedIndexer((2200,), values="equal"),  # nothing passes the floor any more
            FusedIndexer((900,), bad_page=True),
            FusedIndexer((2500, 513, 2600), (5, 1)),  # rows that are split
            FusedIndexer((6000, 513), (4, 1)),  # CTAs that wait for each other's counts
            FusedIndexer((9000, 513), (3, 1)),  # each compacts its part
            FusedIndexer((3200, 513), (4, 1), "equal"),
            FusedIndexer((560, 530), rows_of_one=511),  # too many to be put in order
            FusedIndexer((900,), values="two"),  # candidates of one key
            FusedIndexer((131400,), values="two"),  # two windows of the bitmap
        ),
        scratch=("argument 7",),  # slots of rows that are split
    ),
    "indexer-pairs-sm_90a": Launches(
        "indexer_kernel",
        (
            PairsIndexer((1300, 1301)),
            PairsIndexer((1500, 1400), (1, 2), "two"),
            PairsIndexer((0, 0, 5, 513, 600, 512, 900, 3, 700, 650, 0, 530), (2, 1)),
            # Compacts its lists; few pages are left for the last time, and another tile comes.
            PairsIndexer((2240, 2230, 600, 601)),
            PairsIndexer((1300, 5), (1, 2), "equal"),
            PairsIndexer((700, 690), bad_page=True),
            PairsIndexer((530, 529, 6000, 5999), (4, 1)),  # a pair that is split
            PairsIndexer((3200, 5, 513, 514), (3, 2), "equal"),  # of which one row needs no scores
            PairsIndexer((1500, 1499), (1, 2)),  # candidates of two CTAs
            PairsIndexer((513, 514), values="two"),  # of one key
            # CTAs that compact their parts, wait for each other's counts, and find the row's floor.
            PairsIndexer((9000, 8999, 513, 512), (3, 1), "two"),
            # The last CTA cuts down what the others have published.
            PairsIndexer((4400, 4399), (6, 1), "equal"),
            PairsIndexer((33000, 5), values="two"),  # two windows of the bitmap
        ),
        scratch=("argument 7",),
    ),
    "indexer-sm_100a": Launches(
        "indexer_kernel",
        scripted(
            "sm_100a",
            "workbench/launches/launch_sm100_indexer.py",
            f"{_INDEXER} --lengths 1300 900",
            f"{_INDEXER} --lengths 1500 --cluster-size 2",
            # CTAs with several tiles, unevenly much work.
            f"{_INDEXER} --lengths {' '.join(map(str, _SHORT_ROWS))} --ctas 2",
            f"{_INDEXER} --lengths 2700 600",  # compacts its list
            # Candidates of one key.
            f"{_INDEXER} --lengths 1500 --cluster-size 2 --distinct 4",
            # All scores are equal.
            f"{_INDEXER} --lengths 1300 --cluster-size 2 --distinct 1",
            f"{_INDEXER} --lengths 2200 --distinct 1",  # nothing passes the floor any more
            f"{_INDEXER} --lengths 560 530 --rows-of-one 511",  # too many to be put in order
            f"{_INDEXER} --lengths 4000",  # fills the list again without compacting it
            f"{_INDEXER} --lengths 131400 --distinct 4",  # two windows of the bitmap
        ),
    ),
}
"""Of this library, by the name that their results have."""
ALL = {**KERNELS, **PEERS}


def path_of_launch(folder: Path, name: str, number: int) -> Path:
    """Where `save` puts a launch."""
    return folder / f"{name}.{number}.launch"


def save(names: Iterable[str], folder: Path, *, first: bool = False) -> None:
    """Write the launches of these kernels, or the first of each.

    A script or call that makes several runs once.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted: dict[Script | Call, dict[str, list[Path]]] = {}
    for name in names:
        launches = ALL[name]
        for number, origin in enumerate(launches.origins[:1] if first else launches.origins):
            files = wanted.setdefault(origin, {}).setdefault(launches.entry, [])
            files.append(path_of_launch(folder, name, number))
    for origin, by_entry in wanted.items():
        print(f"{origin}: {', '.join(by_entry)}", flush=True)
        first = {entry: files[0] for entry, files in by_entry.items()}
        if isinstance(origin, Script):
            origin.save(first)
        else:
            record(origin, first)
        for written, *others in by_entry.values():
            for path in others:
                path.write_bytes(written.read_bytes())
