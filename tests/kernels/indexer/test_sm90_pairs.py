"""Two rows of a request scored together, on ptxemu: the CPU backend's ids, bit for bit, no errors.

Scores are exact in any order of additions (see exact_inputs.py), so the ids must be equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

import flashdsa
from flashdsa.backends.emulated import devices
from flashdsa.backends.emulated.runner import emulation
from flashdsa.backends.indexer import launch as launches
from flashdsa.backends.indexer.choice import Kind, Way
from flashdsa.dispatch.registration import custom_op
from flashdsa.hw import WARP_SIZE
from flashdsa.kernels.indexer.plan import Sharing
from flashdsa.kernels.indexer.select.shared_pairs import most_chunks
from flashdsa.kernels.indexer.sizes import ROW_COUNTERS
from flashdsa.kernels.indexer.sm90.plan import PAIR_LISTS, IndexerPlan, pairs_plan
from flashdsa.ops.indexer import DSA_TOPK_INDEXER
from tests.kernels.indexer.emulation import UNTOUCHED, assert_as_the_cpu, published_counts
from tests.kernels.indexer.exact_inputs import make_requests

pytestmark = pytest.mark.usefixtures("lines")

# Selecting takes next to no time, so that small batches are split as large ones are.
PLAN = pairs_plan(
    num_heads=16,
    topk=512,
    sharing=Sharing(select_pages=1, merge_pages=3),
    lists=replace(PAIR_LISTS, capacity=2048, first_fill_pages=10, fill_step_pages=2),
)
# A bad page is not loaded, its stage is multiplied as it is, and no score of it is kept.
OF_BAD_PAGES = {("uninitialised-async-read", "launch.py"), ("uninitialised-read", "score_pairs.py")}
# Lists are read four entries at a time, and what lies behind the last one is passed over.
BEHIND_THE_LIST = {("uninitialised-read", "smem.py")}
LATER = pytest.mark.slow


@pytest.mark.parametrize(
    ("values", "cluster_size"),
    [
        ("two", 1),
        ("nan", 2),
        *(
            pytest.param(*one, marks=LATER)
            for one in (("random", 1), ("nan", 1), ("random", 2), ("two", 2))
        ),
    ],
)
def test_rows_of_a_pair_of_one_or_two_ctas(values: str, cluster_size: int) -> None:
    inputs = make_requests([1300, 1301], values=values)
    assert_as_the_cpu(PLAN, inputs, 1, cluster_size)


def test_pairs_of_all_lengths() -> None:
    """Both short, one of them, empty rows, the longer one first or second; in turns."""
    lengths = [0, 0, 5, 513, 600, 512, 900, 3, 64, 65, 511, 512, 700, 650, 0, 530]
    assert_as_the_cpu(PLAN, make_requests(lengths), 2, 2)


def test_two_pairs_of_a_request() -> None:
    """Each pair as long as its own longer row; the request's pages are those of the longest."""
    lengths = [1300, 1301, 700, 3, 0, 5, 600, 513, 900, 899, 898, 901]
    assert_as_the_cpu(PLAN, make_requests(lengths, next_n=4), 2, 2)


@pytest.mark.parametrize(
    "values",
    [
        "two",
        "ascending",
        "nan",
        *(pytest.param(values, marks=LATER) for values in ("random", "equal", "descending")),
    ],
)
def test_keys_alone_fill_the_memory_of_the_positions(values: str) -> None:
    """Up to twice the list's capacity in one CTA, the shorter row with fewer tokens than topk."""
    lengths = [4096, 3900, 2100, 300, 700, 4000]
    assert max(lengths) == PLAN.ordered_entries > PLAN.lists.capacity
    assert_as_the_cpu(PLAN, make_requests(lengths, values=values), 1, 1, seed=1)


@pytest.mark.parametrize("values", ["two", pytest.param("random", marks=LATER)])
def test_keys_alone_with_infinite_scores_and_bad_pages(values: str) -> None:
    """Tokens without a score are no candidates, wherever the threshold is."""
    inputs = make_requests([4000, 3999, 2600, 540], values=values)
    scales = inputs.k_index_cache_fp8.view(len(inputs.k_index_cache_fp8), -1)[:, -256:]
    scales.view(torch.float32)[:, ::3] = torch.inf
    inputs.block_table[:, 1::3] = -1
    assert_as_the_cpu(PLAN, inputs, 1, 2, warnings=OF_BAD_PAGES)


@pytest.mark.parametrize(
    "values",
    [
        "two",
        "descending",
        "level",
        *(pytest.param(v, marks=LATER) for v in ("random", "ascending")),
    ],
)
def test_lists_are_cut_down_together(values: str) -> None:
    """The shorter row ends before the lists are full for the second time."""
    inputs = make_requests([5000, 3900], values=values)
    assert 2 * PLAN.lists.capacity < 5000
    assert_as_the_cpu(PLAN, inputs, 1, 1, seed=1, warnings=BEHIND_THE_LIST)


def test_the_best_tokens_have_the_same_places_in_all_pages() -> None:
    """A few warps list them all, in segments that are then too full to be added to."""
    inputs = make_requests([9000, 9001], values="pages")
    assert_as_the_cpu(PLAN, inputs, 1, 1, warnings=BEHIND_THE_LIST)


@pytest.mark.parametrize("values", ["crowded", pytest.param("level", marks=LATER)])
def test_many_ctas_publish_scores_of_one_bin(values: str) -> None:
    """Sixteen publish more than a list holds, and more chunks than it looks up at once."""
    inputs = make_requests([9000, 8999], values=values)
    launch = assert_as_the_cpu(PLAN, inputs, 8, 2, warnings=BEHIND_THE_LIST)
    counts = published_counts(launch)
    published = counts[counts != UNTOUCHED].view(2, -1)
    assert published.shape[1] == 16
    if values == "crowded":
        chunks = (published + WARP_SIZE - 1) // WARP_SIZE
        assert chunks.sum(1).min() > most_chunks(PLAN)
        assert published.sum(1).min() > PLAN.lists.capacity


@pytest.mark.parametrize(
    ("values", "first_pages"),
    [
        ("part crowded", 1000),
        *(pytest.param(*x, marks=LATER) for x in (("crowded", 1000), ("random", 1))),
    ],
)
def test_ctas_that_wait_for_all_counts_publish_little_more_than_wins(
    values: str, first_pages: int
) -> None:
    """Many entries lie in the group of the last winner, or in its bin: steps are counted, too."""
    patience = {"settling_ctas": 2, "settling_pages": first_pages, "crowded_pages": 1}
    sharing = replace(PLAN.sharing, **patience, count_polls=1_000_000)
    inputs = make_requests([6000, 5990, 513, 512], values=values)
    patient = replace(PLAN, sharing=sharing)
    launch = assert_as_the_cpu(patient, inputs, 4, 1, seed=2, warnings=BEHIND_THE_LIST)
    published = published_counts(launch)
    published = published[published != UNTOUCHED]
    most = 620 if values != "part crowded" else 1300
    assert len(published) >= 6 and 2 * PLAN.topk <= int(published.sum()) <= 2 * most


@pytest.mark.parametrize(
    ("values", "second"), [("random", 8999), pytest.param("equal", 5, marks=LATER)]
)
def test_a_long_pair_is_split_among_ctas(values: str, second: int) -> None:
    """Each team publishes and merges alone, whether its row needs scores or not."""
    inputs = make_requests([530, 529, 9000, second, 513, 514], values=values)
    launch = assert_as_the_cpu(PLAN, inputs, 3, 2, warnings=BEHIND_THE_LIST)
    published = published_counts(launch) != UNTOUCHED
    first_teams, second_teams = published.view(2, -1).sum(1).tolist()
    assert first_teams == second_teams >= 2


@pytest.mark.parametrize(
    ("lengths", "next_n", "clusters", "later", "first"),
    [
        pytest.param([3000, 3001] * 5, 2, (2, 2), [0, 1, 1, 1], [1, 1, 1, 0], marks=LATER),
        pytest.param(
            [3000, 3001, 3002, 3003] * 3, 4, (5, 1), [0, 1, 0, 1, 0], [1, 0, 1, 0, 0], marks=LATER
        ),
        (
            [5, 7, 8000, 7900, *[2] * 60, 5000, 5001, *[4] * 40, 9000, 100],
            2,
            (5, 1),
            [0, 1, 1, 1, 1],
            [1, 1, 1, 0, 0],
        ),
        pytest.param(
            [20000, 1999, 7000, 701, *[700, 701] * 6, 5000, 5001, 300, 0],
            4,
            (4, 2),
            [0, 1, 1, 1, 0, 1, 1, 0],
            [1, 0, 1, 0, 1, 0, 0, 0],
            marks=LATER,
        ),
    ],
    ids=["5 pairs, 4 CTAs", "two streams, 5 CTAs", "short rows between", "uneven, two streams"],
)
def test_spans_of_rows(
    lengths: list[int], next_n: int, clusters: tuple[int, int], later: list[int], first: list[int]
) -> None:
    """Each CTA has a span of all rows. Who publishes as a later sharer of a row, and who as its
    first one: a CTA may do both. Two streams have half of the CTAs each, one too many has none."""
    inputs = make_requests(lengths, next_n=next_n)
    launch = assert_as_the_cpu(PLAN, inputs, *clusters, warnings=BEHIND_THE_LIST)
    published = (published_counts(launch) != UNTOUCHED).int()
    assert published.view(2, 2, -1).tolist() == 2 * [[later, first]]


@LATER
def test_spans_with_more_ties_than_the_list_holds() -> None:
    """Of a row's five sharers four publish counts of bins, and the first one, with the least, does
    not."""
    inputs = make_requests([3839, 3840, 28_159, 28_160], values="equal")
    launch = assert_as_the_cpu(PLAN, inputs, 5, 1, warnings=BEHIND_THE_LIST)
    published = published_counts(launch)
    assert int((published != UNTOUCHED).sum()) == 10


def test_bad_pages_are_passed_over() -> None:
    inputs = make_requests([1300, 1290, 700, 701])
    inputs.block_table[0, 3] = inputs.block_table[1, 0] = -1
    inputs.block_table[1, 5] = 1 << 30
    assert_as_the_cpu(PLAN, inputs, 2, 1, warnings=OF_BAD_PAGES)


@pytest.mark.slow
def test_ids_are_positions() -> None:
    plan = replace(PLAN, positions=True)
    assert_as_the_cpu(plan, make_requests([700, 701, 90, 600]), 1, 2)


@pytest.mark.parametrize(
    ("lengths", "next_n", "of_calls"),
    [
        ([2100, 2101, 5, 0, 6000, 5900], 2, (64, 2048, "slot")),
        pytest.param([2100, 2101, 2049, 2048], 2, (32, 2048, "position"), marks=LATER),
        pytest.param([0, 700, 5, 513, 590, 1500, 701, 90], 4, (16, 512, "slot"), marks=LATER),
        pytest.param([1100, 1025, 3000, 0], 4, (32, 1024, "slot"), marks=LATER),
    ],
    ids=["3 x 2", "positions", "2 x 4", "1 x 4"],
)
@pytest.mark.parametrize(
    ("values", "bad_pages"),
    [("random", False), ("nan", True), pytest.param("two", True, marks=LATER)],
)
def test_the_public_operation_scores_and_ranks_by_two_launches(
    lengths: list[int],
    next_n: int,
    of_calls: tuple[int, int, str],
    values: str,
    bad_pages: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fewer tokens than topk may be left where pages are bad."""
    two = Way(Kind.TWO_LAUNCHES, 2, 2)
    monkeypatch.setattr(launches, "choose", lambda *_: two)
    heads, topk, kind = of_calls
    inputs = make_requests(lengths, num_heads=heads, next_n=next_n, values=values)
    if bad_pages:
        inputs.block_table[:, ::3] = -1
    ids = [inputs.output(topk) for _ in range(2)]
    rank, how = custom_op(DSA_TOPK_INDEXER), (None, False, kind == "position", 64, 1, False)
    rank(*inputs, ids[0], *how, "cpu")
    with emulation(devices.SMALL) as emulator:
        rank(*inputs, ids[1], *how, "emulate-sm90")
    assert torch.equal(*ids)
    assert not emulator.workspaces


@pytest.mark.parametrize(
    ("lengths", "next_n"),
    [([2100, 2101, 5, 0, 6000, 5900], 2), ([0, 2100, 5, 2101, 5900, 6000, 2102, 90], 4)],
    ids=["3 x 2", "2 x 4"],
)
@LATER
def test_the_public_operation_scores_pairs_of_full_sizes(lengths: list[int], next_n: int) -> None:
    """One of them with keys in the memory of the positions."""
    assert pairs_plan().lists.capacity < 5900
    inputs = make_requests(lengths, num_heads=64, next_n=next_n)
    q, cache, weights, seq_lens, table = inputs
    q, weights, seq_lens = (x.unflatten(0, (-1, next_n)) for x in (q, weights, seq_lens))
    of_requests = q, cache, weights, seq_lens, table
    ids = [inputs.output(2048).unflatten(0, (-1, next_n)) for _ in range(2)]
    flashdsa.dsa_topk_indexer(*of_requests, ids[0], backend="cpu")
    with emulation(devices.SMALL) as emulator:
        flashdsa.dsa_topk_indexer(*of_requests, ids[1], backend="emulate-sm90")
    assert torch.equal(*ids)
    ((arrivals, slots),) = emulator.workspaces.values()
    assert len(slots) == 4 * devices.SMALL.num_sms
    assert len(arrivals) == 2 * devices.SMALL.num_sms * ROW_COUNTERS and not arrivals.any()


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (lambda: pairs_plan(sorted=True), "a kernel that sorts splits no rows"),
        (
            lambda: pairs_plan(lists=replace(PAIR_LISTS, capacity=4096)),
            "no room for what a CTA publishes",
        ),
        (
            lambda: pairs_plan(lists=replace(PAIR_LISTS, capacity=5560)),
            "as many entries for each warp",
        ),
        (lambda: pairs_plan(stages=12), "a power of two"),
    ],
    ids=["alone", "short list", "uneven list", "stages"],
)
def test_plans_that_cannot_work_are_refused(plan: Callable[[], IndexerPlan], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan()


def test_the_lists_of_a_pair_lie_in_different_banks() -> None:
    """A warp stores 16 neighbouring words to each of the two lists at once."""
    smem = pairs_plan().smem
    assert (smem.offset("other_team") - smem.offset("keys")) % 128 == 64
