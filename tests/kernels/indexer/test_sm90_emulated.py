"""The Hopper indexer's compiled kernel on ptxemu: the CPU backend's ids, bit for bit, no findings.

Scores are exact in any order of additions (see inputs.py), so the ids must be equal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

import flashdsa
from flashdsa.backends.emulated import devices
from flashdsa.backends.emulated.runner import emulation
from flashdsa.heuristics.h200 import Indexer
from flashdsa.kernels.indexer.plan import By, Lists
from flashdsa.kernels.indexer.sizes import MAX_OWN_ROWS, MOST_WEIGHED
from flashdsa.kernels.indexer.sm90.plan import IndexerPlan
from flashdsa.ops.indexer import TopkIndexerOperands
from flashdsa.problem import PAGE_SIZE
from ptxemu import Policy
from ptxemu.engines.mbarrier import mbarriers
from ptxemu.events import Access, AccessKind, Observer, Space
from tests.kernels.indexer.emulation import (
    SPLITS,
    UNTOUCHED,
    assert_as_the_cpu,
    emulate_indexer,
    published_counts,
)
from tests.kernels.indexer.inputs import PAGE_BYTES, PAGE_KEY_BYTES, Inputs, make_inputs

pytestmark = pytest.mark.usefixtures("lines")

MODEL = IndexerPlan()
SMALL = IndexerPlan(num_heads=16)
SCHEDULED = replace(SMALL, rows=By.CLUSTERS)
TIGHT = replace(
    SMALL, lists=Lists(capacity=2048, first_fill_pages=10, fill_step_pages=2, most_topk=512)
)
LATER = pytest.mark.slow

# A bad page is not loaded, its stage is multiplied as it is, and no score of it is kept.
OF_BAD_PAGES = {("uninitialised-async-read", "score.py"), ("uninitialised-read", "score.py")}

# Lists are read four entries at a time, and what lies behind the last one is passed over.
BEHIND_THE_LIST = {("uninitialised-read", "smem.py")}

# Which of two warps appends to a list first does not matter.
ANY_ORDER = {("weak-order", "launch.py")}


class Rows(NamedTuple):
    """Rows of these lengths and values by a plan, and by so many clusters of so many CTAs."""

    plan: IndexerPlan
    lengths: list[int]
    clusters: tuple[int, int] = (2, 2)
    values: str = "random"
    more: Mapping[str, Any] = MappingProxyType({})


BITMAP = {"by_score": True, "warnings": BEHIND_THE_LIST | ANY_ORDER}
SEVERAL, MANY = [513, 2000, 3, 900, 700, 1300, 512, 640], [5, 0, 3] * 21 + [600, 2, 530]
ROWS = {
    "around a page and topk": Rows(
        MODEL, [0, 1, 63, 64, 65, 2047, 2048, 2049], more={"topk": 2048}
    ),
    "a plateau of one key": Rows(MODEL, [2500], (1, 3), "equal", {"topk": 2048}),
    "a plateau of two keys": Rows(MODEL, [2500], (1, 1), "two", {"topk": 2048}),
    # One row needs no scores, in parts of whole pages.
    **{
        f"NaN, topk {topk}": Rows(
            SMALL,
            [topk + 300, min(topk, 650)],
            (1, 2),
            "nan",
            {"topk": topk, "by_score": topk == 100},
        )
        for topk in (512, 1, 700, 100)
    },
    "a CTA alone": Rows(SMALL, [1401], (1, 1)),
    "unequal parts, the last page not full": Rows(SMALL, [1401], (1, 3)),
    "sorted, fewer pages than CTAs": Rows(SCHEDULED, [65, 700], (1, 3), "two", {"by_score": True}),
    "forwards and backwards": Rows(SMALL, SEVERAL),
    # A cluster has room for the numbers of 64 rows: more are in the order of the batch.
    "more than are ordered": Rows(SMALL, MANY, (1, 2)),
    "more than are ordered, else by length": Rows(SCHEDULED, MANY, (1, 2)),
    "both parts are compacted": Rows(TIGHT, [5000], (1, 2)),
    # Of equal scores the first ones stay.
    "compacted, then a short row": Rows(SMALL, [600, 9000], (1, 1), "equal"),
    "the best lie with one CTA": Rows(SMALL, [5000], (1, 4), "descending"),
    "only long rows are split": Rows(SPLITS, [1500, 700], (4, 1), more={"seed": 1}),
    "split parts are compacted": Rows(SPLITS, [7000], (2, 1), "ascending"),
    # Ids from a bitmap have their words, those of a list that is not in the order of positions.
    "words of a list that is cut": Rows(TIGHT, [3000, 700], (1, 1), "two", BITMAP),
    "words of a split row": Rows(SPLITS, [2500, 700], (3, 1), "nan", BITMAP),
}
FURTHER = {
    "10 pages for 16 CTAs": Rows(SMALL, [600], (1, 16)),
    "halved, sorted": Rows(SCHEDULED, [1100, 700], (1, 4), "two", {"by_score": True}),
    # Of ascending scores every page replaces others.
    "compacted at every page": Rows(SMALL, [600, 9000], (1, 1), "ascending"),
    "turns in any order": Rows(SMALL, [900, 600], (1, 3), "two", {"seed": 1}),
    "32 heads, NaN, sorted": Rows(
        replace(SCHEDULED, num_heads=32),
        [1324, 650],
        (1, 2),
        "nan",
        {"topk": 1024, "by_score": True},
    ),
    "longest first": Rows(SCHEDULED, SEVERAL),
    "more entries than threads": Rows(
        replace(SPLITS, lists=SMALL.lists), [5200], (2, 1), "descending", {"topk": 1024}
    ),
    "two windows of the bitmap": Rows(SMALL, [66_000, 700], (1, 1), more=BITMAP),
}


@pytest.mark.parametrize(
    "rows",
    [*ROWS.values(), *(pytest.param(x, marks=LATER) for x in FURTHER.values())],
    ids=[*ROWS, *FURTHER],
)
def test_ids_are_the_cpus(rows: Rows) -> None:
    assert len(MANY) > MAX_OWN_ROWS
    assert 2 * TIGHT.lists.capacity < 5000 and 2 * SPLITS.lists.capacity < 7000
    inputs = make_inputs(rows.lengths, num_heads=rows.plan.num_heads, values=rows.values)
    assert_as_the_cpu(rows.plan, inputs, *rows.clusters, **rows.more)


@pytest.mark.parametrize(
    ("plan", "by_score"),
    [(SMALL, False), (SCHEDULED, False), pytest.param(SMALL, True, marks=LATER)],
    ids=["by position", "clusters", "sorted"],
)
def test_ids_are_positions(plan: IndexerPlan, by_score: bool) -> None:
    """Of rows that need no scores, one of them with a bad page, and of a scored row."""
    bad = make_inputs([5, 130, 700], num_heads=16)
    bad.block_table[1, 0] = -1
    how = {"by_score": by_score, "positions": True}
    assert_as_the_cpu(plan, bad, 1, 2, warnings=OF_BAD_PAGES, **how)


class Writers(Observer):
    """Which CTAs write a row's ids."""

    def __init__(self) -> None:
        self._cta_of: dict[int, int] = {}

    def accessed(self, access: Access) -> None:
        if access.space is Space.GLOBAL and access.kind is AccessKind.WRITE:
            cta = re.match(r"cta \((\d+),", access.agent.label)
            assert cta
            self._cta_of.update(dict.fromkeys(access.starts.tolist(), int(cta[1])))

    def of_rows(self, rows: int, topk: int) -> list[set[int]]:
        first = min(self._cta_of)
        found: list[set[int]] = [set() for _ in range(rows)]
        for address, cta in self._cta_of.items():
            found[(address - first) // (4 * topk)].add(cta)
        return found


@pytest.mark.parametrize(
    ("lengths", "num_clusters", "cluster_size", "writers"),
    [
        pytest.param([1300] * 2, 1, 4, [{0, 1}, {2, 3}], marks=LATER),
        pytest.param([1300] * 4, 1, 4, [{0}, {1}, {2}, {3}], marks=LATER),
        ([1300] * 5, 1, 6, [{0, 1, 2}, {3, 4, 5}, {3, 4, 5}, {0, 1, 2}, {0, 1, 2}]),
        pytest.param([9000, 600], 1, 2, [{0, 1}, {0, 1}], marks=LATER),
        pytest.param([600, 700, 2000, 900, 650], 2, 1, [{0}, {1}, {0}, {1}, {0}], marks=LATER),
    ],
    ids=["halves", "quarters", "halves of three", "a long row", "longest first"],
)
def test_rows_are_given_to_groups_that_end_together(
    lengths: list[int], num_clusters: int, cluster_size: int, writers: list[set[int]]
) -> None:
    """In another order of warps and copies too, in which the ids are written again."""
    inputs = make_inputs(lengths, num_heads=16)
    launch = assert_as_the_cpu(SCHEDULED, inputs, num_clusters, cluster_size)
    seen = Writers()
    launch.setups[0].launch(observer=seen, policy=Policy(seed=1))
    assert seen.of_rows(len(lengths), 512) == writers


def test_nan_wins_behind_a_list_that_was_compacted_with_few_entries() -> None:
    """There are fewer tokens than topk: all of them are winners, wherever they are."""
    inputs = make_inputs([5000], num_heads=16, values="nan")
    kept = torch.tensor([1, 50, 70])
    pages = inputs.block_table[0, kept].clone()
    inputs.block_table[:] = -1
    inputs.block_table[0, kept] = pages
    assert_as_the_cpu(TIGHT, inputs, 1, 1, warnings=OF_BAD_PAGES)


def test_equal_scores_between_both_ends_win_by_their_positions() -> None:
    """The list is first cut when it has some of them from the row's end, and not yet the first."""
    length, plan = 3000, TIGHT
    first, capacity = plan.lists.first_fill_pages * PAGE_SIZE, plan.lists.capacity
    assert first // 2 < length // 2 < length - first // 2 and length > capacity
    inputs = make_inputs([length], num_heads=16, values="level")
    assert_as_the_cpu(plan, inputs, 1, 1, warnings=ANY_ORDER)


def test_growing_scores_are_listed_once() -> None:
    """The list has the best ones when it is cut first: as many instructions as for falling ones."""
    launches = [
        assert_as_the_cpu(TIGHT, make_inputs([6000], num_heads=16, values=values), 1, 1)
        for values in ("ascending", "descending")
    ]
    rising, falling = (launch._progress.warp_instructions for launch in launches)
    assert 0.9 < rising / falling < 1.1


def test_bad_pages_of_a_shared_row_leave_the_rest_empty() -> None:
    """Fewer tokens than topk are in the cache: all of them in order, then -1."""
    inputs = make_inputs([1200, 1200], num_heads=16)
    inputs.block_table[0, 2:14], inputs.block_table[1, :] = -1, 2**31 - 1
    launch = assert_as_the_cpu(SMALL, inputs, 2, 3, warnings=OF_BAD_PAGES)
    assert launch.setups[0].cluster[0] == 3


@pytest.mark.parametrize(
    ("values", "clusters"),
    [
        ("two", (2, 2)),
        ("nan", (2, 1)),
        pytest.param("ascending", (3, 2), marks=LATER),
        pytest.param("random", (2, 2), marks=LATER),
        pytest.param("equal", (2, 1), marks=LATER),
        pytest.param("descending", (4, 2), marks=LATER),
    ],
)
def test_clusters_share_a_long_row(values: str, clusters: tuple[int, int]) -> None:
    inputs = make_inputs([2500], num_heads=16, values=values)
    launch = assert_as_the_cpu(SPLITS, inputs, *clusters, warnings=BEHIND_THE_LIST)
    assert (published_counts(launch) != UNTOUCHED).sum() >= 2 * clusters[1]


@pytest.mark.parametrize(
    ("length", "clusters", "published"),
    [
        pytest.param(2000, (2, 2), [1024, 976], marks=LATER),
        (4224, (4, 2), [1024, 512, 1024, 512]),
        pytest.param(2112, (2, 2), [1024, 512], marks=LATER),
        pytest.param(4096, (4, 2), [1024] * 4, marks=LATER),
    ],
)
def test_a_cluster_publishes_what_its_bin_has(
    length: int, clusters: tuple[int, int], published: list[int]
) -> None:
    """All keys are in one; more than 2 topk are told apart first."""
    assert min(SPLITS.most_at_bin) == 1024
    inputs = make_inputs([length], num_heads=16, values="equal")
    launch = assert_as_the_cpu(SPLITS, inputs, *clusters)
    entries = published_counts(launch).view(clusters).sum(1)
    assert entries.tolist() == published


@pytest.mark.parametrize("by_score", [False, True], ids=["by position", "sorted"])
def test_bad_pages_of_a_split_row_leave_the_rest_empty(by_score: bool) -> None:
    """Each team publishes less than topk, one of them nothing."""
    inputs = make_inputs([2000], num_heads=16)
    inputs.block_table[0, 3:] = -1
    assert_as_the_cpu(SPLITS, inputs, 2, 1, warnings=OF_BAD_PAGES, by_score=by_score)


def test_bad_lengths_and_page_ids_are_clamped_and_never_emitted() -> None:
    """And nothing outside the tensors is touched: the emulator knows their bounds."""
    inputs = make_inputs([700, 700, 700, 700, 300, 2000], num_heads=16)
    num_pages = inputs.k_index_cache_fp8.shape[0]
    inputs.block_table[0, 1], inputs.block_table[1, 10] = -1, num_pages
    inputs.block_table[2, :], inputs.block_table[3, 0] = 2**31 - 1, -(2**31)
    inputs.block_table[4, 0] = num_pages + 7
    inputs.seq_lens[3], inputs.seq_lens[5] = -5, 2**31 - 1
    assert_as_the_cpu(SMALL, inputs, warnings=OF_BAD_PAGES)


def test_warps_share_rows_that_need_no_scores() -> None:
    """One page each; the first page, the last one and all of a row are outside the cache."""
    inputs = make_inputs([2048, 2047, 130, 0, 2049])
    inputs.block_table[0, 0] = inputs.block_table[1, 31] = -1
    inputs.block_table[2] = len(inputs.k_index_cache_fp8)
    assert_as_the_cpu(MODEL, inputs, 5, 2, topk=2048)


def test_repeated_pages_and_an_int8_cache() -> None:
    inputs = make_inputs([700, 900], num_heads=16)
    inputs.block_table[0, :11], inputs.block_table[1, 3:9] = inputs.block_table[0, 2], 1
    inputs = inputs._replace(k_index_cache_fp8=inputs.k_index_cache_fp8.view(torch.int8))
    assert_as_the_cpu(SMALL, inputs)


def test_the_public_operation_runs_it_on_cpu_tensors(small_device: None) -> None:
    inputs = make_inputs([600, 0, 64, 513], num_heads=16)
    expected, got = inputs.output(512), inputs.output(512)
    flashdsa.dsa_topk_indexer(*inputs, expected, backend="cpu")
    flashdsa.dsa_topk_indexer(*inputs, got, backend="emulate-sm90")
    assert torch.equal(got, expected)
    nothing = Inputs(*(x if x.dim() == 4 else x[:0] for x in inputs))
    flashdsa.dsa_topk_indexer(*nothing, got[:0], backend="emulate-sm90")


@pytest.mark.parametrize(
    ("lengths", "next_n"),
    [pytest.param((600, 601, 90, 700), 2, marks=LATER), ((520, 2, 530), 3)],
    ids=["2 x 2", "1 x 3"],
)
def test_requests_with_several_queries_share_a_table(
    lengths: tuple[int, ...], next_n: int, small_device: None
) -> None:
    inputs = make_inputs(list(lengths), num_heads=16)
    table = inputs.block_table[next_n - 1 :: next_n].contiguous()
    q, cache, weights, seq_lens, _ = inputs
    first = len(lengths) // next_n, next_n
    of_requests = (
        q.view(*first, 16, 128),
        cache,
        weights.view(*first, 16),
        seq_lens.view(first),
        table,
    )
    ids = [inputs.output(512).view(*first, 512) for _ in range(2)]
    for backend, out in zip(("cpu", "emulate-sm90"), ids, strict=True):
        flashdsa.dsa_topk_indexer(*of_requests, out, backend=backend)
    assert torch.equal(*ids)


def test_the_public_operation_splits_a_row_that_may_be_long() -> None:
    """As a GPU would: the kernel is chosen by the table's width, and its counters are left at 0."""
    inputs = make_inputs([600], num_heads=16)
    wide = Indexer.PAGES_ALONE * 3 - inputs.block_table.shape[1]
    inputs = inputs._replace(block_table=torch.nn.functional.pad(inputs.block_table, (0, wide)))
    expected, got = inputs.output(512), inputs.output(512)
    flashdsa.dsa_topk_indexer(*inputs, expected, backend="cpu")
    with emulation(devices.SMALL) as emulator:
        flashdsa.dsa_topk_indexer(*inputs, got, backend="emulate-sm90")
    assert torch.equal(got, expected)
    ((arrivals, _),) = emulator.workspaces.values()
    assert len(arrivals) == MOST_WEIGHED and not arrivals.any()
    assert [setup.grid[0] for setup in emulator.setups] == [4]


def test_the_launch_is_what_the_plan_says() -> None:
    launch = assert_as_the_cpu(SMALL, make_inputs([600], num_heads=16), 1, 3)
    (setup,) = launch.setups
    assert setup.smem == SMALL.smem.total
    assert (setup.grid[0], setup.cluster[0], setup.block[0]) == (3, 3, SMALL.threads)
    found: list[dict[int, int]] = []

    class Exits(Observer):
        def cta_exited(self, cta: Any) -> None:
            by_offset = mbarriers(cta).by_offset
            start = min(by_offset) - min(wanted)
            found.append({at - start: barrier.expected for at, barrier in by_offset.items()})

    counts = [barrier.arrivals for barrier in SMALL.barriers for _ in range(barrier.stages)]
    first = SMALL.smem.offset("barriers")
    wanted = {first + 8 * at: arrivals for at, arrivals in enumerate(counts)}
    setup.launch(observer=Exits())
    assert found == [wanted] * 3


def test_rows_of_the_table_may_lie_apart() -> None:
    inputs = make_inputs([3000, 100, 2100])
    wide = torch.full((3, inputs.block_table.shape[1] + 5), -7, dtype=torch.int32)
    wide[:, : inputs.block_table.shape[1]] = inputs.block_table
    table = wide[:, : inputs.block_table.shape[1]]
    assert not table.is_contiguous()
    assert_as_the_cpu(MODEL, inputs._replace(block_table=table), topk=2048)


def test_rows_of_ids_may_lie_apart() -> None:
    """Of a row with scores and one without; nothing is written between them."""
    inputs = make_inputs([700, 130], num_heads=16)
    expected, room = inputs.output(512), torch.full((2, 520), -7, dtype=torch.int32)
    flashdsa.dsa_topk_indexer(*inputs, expected, backend="cpu")
    emulate_indexer(SMALL, TopkIndexerOperands(*inputs, room[:, :512]))
    assert torch.equal(room[:, :512], expected) and (room[:, 512:] == -7).all()


def test_a_plateau_that_holds_the_first_token_ends_where_it_must() -> None:
    """The cut-off is token 0, the last place of the last step: its end is 2**32 - 1."""
    length, low = 3000, 953
    inputs = make_inputs([length], values="equal")
    inputs.q_index_fp8.copy_(torch.ones(inputs.q_index_fp8.shape))
    inputs.weights.fill_(1)
    pages = inputs.k_index_cache_fp8.view(-1, PAGE_BYTES)
    pages[:, :PAGE_KEY_BYTES] = torch.ones(PAGE_KEY_BYTES).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.ones(inputs.block_table.shape[1] * 64)
    scales[: low - 1] = 0.5
    scales[length - 2] = 0.5  # an even distance from token 0
    table = inputs.block_table[0].long()
    pages[table, PAGE_KEY_BYTES:] = scales.view(len(table), 64).view(torch.uint8)
    assert int((scales[:length] == 1).sum()) == 2048 - 1
    for cluster_size in (1, 2):
        assert_as_the_cpu(MODEL, inputs, 1, cluster_size, topk=2048)
