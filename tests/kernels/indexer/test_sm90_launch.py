"""How many clusters of how many CTAs a launch gets, and which workspace; on a pretended GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi")

from flashdsa.backends.emulated import devices
from flashdsa.backends.emulated.runner import Emulator
from flashdsa.backends.gpu import runner, workspaces
from flashdsa.backends.gpu.runner import gpu as gpu_runner
from flashdsa.backends.indexer.clusters import NARROW_PAGES, choose_clusters, clusters_for
from flashdsa.backends.indexer.pairs_or_rows import LEAST_PAGES
from flashdsa.backends.indexer.topk_indexer import (
    UNEVEN_OF_FEW,
    UNEVEN_OF_MANY,
    UNEVEN_PAGES,
    choose_launch,
)
from flashdsa.backends.sm90 import indexer, topk
from flashdsa.kernels.catalog import INDEXER
from flashdsa.kernels.indexer.plan import By
from flashdsa.kernels.indexer.sizes import MOST_DEALT
from flashdsa.kernels.indexer.sm90.plan import IndexerPlan
from flashdsa.ops.indexer import TopkIndexerOperands, TopkOperands
from flashdsa.plan.kernel_spec import KernelSpec
from tests.kernels.indexer.exact_inputs import Inputs, make_inputs
from tests.support.subtests import CaseLoop

H200 = devices.H200.clusters
SMALL = {1: 4, 2: 2, 3: 1, 4: 1}
SPLIT_PAGES = IndexerPlan().sharing.split_pages
GPU = torch.device("cuda", 0)


CHOSEN = [
    (7, (7, 13)),
    (8, (8, 8)),  # 9 is no choice
    (15, (15, 8)),
    (17, (17, 6)),
    (22, (22, 5)),
    (30, (30, 4)),
    (39, (39, 3)),
    (40, (30, 4)),  # halved, one for every row
    (60, (30, 4)),
    (61, (61, 2)),
    (66, (66, 2)),
    (67, (66, 2)),
    (100_000, (66, 2)),
]


def test_clusters_are_the_largest_of_which_every_row_has_one_or_a_half(subtests: CaseLoop) -> None:
    for rows, chosen in CHOSEN:
        with subtests.test(f"{rows} rows"):
            assert choose_clusters(H200, rows) == (*chosen, 1)


def test_long_rows_get_as_many_clusters_as_there_are(subtests: CaseLoop) -> None:
    for rows, chosen in [(1, (7, 13, 7)), (2, (6, 13, 3)), (3, (6, 13, 2)), (4, (4, 13, 1))]:
        with subtests.test(f"{rows} rows"):
            assert choose_clusters(H200, rows) == chosen


@pytest.mark.parametrize(("most", "sizes"), [(16, (16, 8, 3)), (8, (8, 8, 3)), (1, (1, 1, 1))])
def test_clusters_are_as_large_as_the_environment_allows(
    most: int, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHDSA_MAX_CLUSTER", str(most))
    assert [clusters_for(Emulator(), IndexerPlan(), rows).size for rows in (1, 8, 32)] == [*sizes]


def test_clusters_find_room_whichever_35_sms_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """One cluster of a batch at least, so that a call need not wait for other streams to end."""
    monkeypatch.delenv("FLASHDSA_MAX_CLUSTER", raising=False)
    gpcs, free = 8, devices.H200.num_sms - 35
    sizes = [clusters_for(Emulator(), IndexerPlan(), rows).size for rows in range(1, 300)]
    assert free > gpcs * (max(sizes) - 1), "all GPCs may have fewer free SMs"


def test_what_clusters_publish_fits_the_lists_of_the_last() -> None:
    """A CTA of it takes the slots of as many CTAs as the row has clusters, next to each other."""
    plan = IndexerPlan()
    for capacity in (H200, {1: 132, 2: 66}, {1: 132, 2: 66, 3: 39}):
        for rows in range(1, 70):
            _, size, num_splits = choose_clusters(capacity, rows)
            overlapping = 1 + -(-(num_splits - 1) // size)  # clusters whose CTAs those are
            most = plan.most_at_bin[num_splits > size + 1]
            assert num_splits == 1 or min(num_splits, overlapping) * most <= plan.lists.capacity


def test_no_cluster_is_launched_that_the_device_cannot_run() -> None:
    """Sizes that do not fit have 0, as on a part of a GPU; or are not in the table."""
    for capacity in (H200, {**H200, 16: 0, 14: 0, 12: 0, 10: 0}, {1: 8, 2: 4}, {1: 2, 2: 0}):
        for rows in range(1, 300):
            count, size, num_splits = choose_clusters(capacity, rows)
            assert 1 <= count <= capacity[size] and count <= rows * num_splits
            assert count >= rows or size <= 4 or not capacity[2]
            assert count % num_splits == 0


@dataclass
class Gpu:
    """What the backend asks torch about, and the launches that it made."""

    stream: int = 7
    capturing: int = 0
    """The driver's number of what is captured; 0: nothing is."""
    device: int = 0
    launches: list[tuple[Any, ...]] = field(default_factory=list)
    plans: list[IndexerPlan] = field(default_factory=list)
    launched_on: int = -1
    capacity: dict[int, int] = field(default_factory=lambda: SMALL)
    on_allocation: Callable[[], None] = lambda: None

    def loaded(self, _: KernelSpec, plan: IndexerPlan) -> Callable[..., None]:
        """In the place of a kernel's function, which is loaded once."""
        if plan not in self.plans:
            self.plans.append(plan)
        return self.launched

    def launched(self, *arguments: Any) -> None:
        """In the kernel's place."""
        self.launches.append(arguments)
        self.launched_on = self.device

    def addresses(self) -> list[tuple[int, int]]:
        """Of the counters and the slots of every launch that splits rows."""
        return [
            (torch.from_dlpack(a[6]).data_ptr(), torch.from_dlpack(a[7]).data_ptr())
            for a in self.launches
            if len(a) == 11
        ]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    pretended = Gpu()

    class OnDevice:
        def __init__(self, index: Any) -> None:
            self.index = index

        def __enter__(self) -> None:
            self.before = pretended.device
            pretended.device = self.index if isinstance(self.index, int) else 0

        def __exit__(self, *_: object) -> None:
            pretended.device = self.before

    real_empty = torch.empty

    def empty(*shape: Any, **options: Any) -> torch.Tensor:
        pretended.on_allocation()
        return real_empty(*shape, **{**options, "device": "cpu"})

    c, cuda = torch._C, torch.cuda
    for owner, name, value in (
        (c, "_cuda_isCurrentStreamCapturing", lambda: pretended.capturing > 0),
        (c, "_cuda_getCurrentRawStream", lambda _: pretended.stream),
        (cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=4)),
        (cuda, "current_device", lambda: pretended.device),
        (cuda, "is_initialized", lambda: True),
        (cuda, "is_current_stream_capturing", lambda: pretended.capturing > 0),
        (cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None)),
        (cuda, "device", OnDevice),
        (workspaces, "capture_id", lambda _: pretended.capturing),
        (runner, "_current_device", lambda: pretended.device),
        (runner, "load", pretended.loaded),
        (runner, "_empty_strided", None),
        (runner, "clusters_at_once", lambda *_: pretended.capacity),
        (torch, "empty", empty),
    ):
        monkeypatch.setattr(owner, name, value, raising=False)
    gpu_runner.cache_clear()
    yield pretended
    gpu_runner.cache_clear()


def launch(inputs: Inputs, by_score: bool = False) -> torch.Tensor:
    ids = inputs.output(512)
    operands = TopkIndexerOperands(*inputs, ids)
    options = {"sorted": by_score, "positions": False, "table_page_size": 64}
    indexer.bind(gpu_runner(GPU), operands, check=False, **options)(operands)
    return ids


def rows(count: int, pages: int = 0) -> Inputs:
    """Rows of 600 tokens, their table as wide as if they might have more."""
    inputs = make_inputs([600] * count, num_heads=16)
    more = pages - inputs.block_table.shape[1]
    return inputs._replace(
        block_table=torch.nn.functional.pad(inputs.block_table, (0, max(0, more)))
    )


@pytest.mark.parametrize("by_score", [False, True], ids=["by position", "sorted"])
def test_launches_get_the_clusters_of_their_number_of_rows(gpu: Gpu, by_score: bool) -> None:
    for count in (1, 2, 4, 9, 2, 1):
        launch(rows(count, SPLIT_PAGES), by_score)
    chosen = [(1, 4), (1, 4), (2, 2), (2, 2), (1, 4), (1, 4)]
    used = [arguments[6:] if by_score else arguments[8:10] for arguments in gpu.launches]
    assert used == chosen
    kinds = {(plan.sorted, plan.rows) for plan in gpu.plans}
    unsorted = {(False, rows) for rows in (By.CLUSTER, By.CLUSTERS, By.CTAS)}
    assert kinds == ({(True, By.CLUSTER)} if by_score else unsorted)


def test_all_clusters_are_launched_where_the_lengths_decide(gpu: Gpu) -> None:
    """And a row a cluster where no row can be long enough for that."""
    gpu.capacity = {1: 8, 2: 4}
    for pages in (UNEVEN_PAGES[2], UNEVEN_PAGES[2] - 1):
        launch(rows(3, pages))
    assert gpu.launches[0][8:10] == (4, 2) and gpu.launches[1][6:] == (3, 2)


SHARING = [
    (MOST_DEALT, (15, 8), By.CLUSTERS),
    (7, (15, 8), By.CLUSTERS),  # clusters of 13 would be too few to be given out
    (16, (17, 6), By.CLUSTERS),  # equal rows are one more than the clusters of eight
    (22, (15, 8), By.CLUSTERS),
    (30, (15, 8), By.CLUSTERS),
    (39, (15, 8), By.CLUSTERS),
    (40, (15, 8), By.CLUSTERS),
    (60, (15, 8), By.CLUSTERS),
    (66, (66, 2), By.CTAS),
    (67, (30, 4), By.CLUSTERS),
    (118, (30, 4), By.CLUSTERS),
    (119, (66, 2), By.CTAS),
]


@pytest.mark.parametrize(("count", "clusters", "who"), SHARING)
def test_who_shares_the_long_rows_of_a_wide_table(
    gpu: Gpu, count: int, clusters: tuple[int, int], who: By
) -> None:
    gpu.capacity = dict(H200)
    launch(rows(count, 2 * UNEVEN_PAGES[8]))
    assert gpu.launches[0][8:10] == clusters
    assert gpu.plans[-1].rows is who


@pytest.mark.parametrize(
    ("count", "least", "narrow", "clusters"),
    [
        (7, 13 * UNEVEN_OF_FEW, (7, 13), (15, 8)),
        (16, UNEVEN_PAGES[6], (16, 6), (17, 6)),
        (23, UNEVEN_PAGES[4], (23, 4), (15, 8)),
        (39, UNEVEN_PAGES[3], (39, 3), (15, 8)),
        (60, UNEVEN_PAGES[4], (30, 4), (15, 8)),
        (67, UNEVEN_OF_MANY, (66, 2), (30, 4)),
    ],
)
def test_the_width_of_the_table_decides_whether_clusters_share(
    gpu: Gpu, count: int, least: int, narrow: tuple[int, int], clusters: tuple[int, int]
) -> None:
    gpu.capacity = dict(H200)
    for pages in (least - 1, least):
        launch(rows(count, pages))
    several = count > narrow[0]  # rows of a cluster
    kinds = [(plan.rows, plan.by_lengths) for plan in gpu.plans]
    assert kinds == [(By.CTAS if several else By.CLUSTER, False), (By.CLUSTERS, True)]
    assert gpu.launches[0][8 if several else 6 :][:2] == narrow
    assert gpu.launches[1][8:10] == clusters


def test_no_cluster_is_larger_than_the_environment_allows(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.capacity = dict(H200)
    monkeypatch.setenv("FLASHDSA_MAX_CLUSTER", "3")
    for count in (4, 39, 80):
        launch(rows(count, 2 * UNEVEN_PAGES[8]))
    assert [arguments[8:10] for arguments in gpu.launches] == [(39, 3), (39, 3), (66, 2)]


def test_narrow_tables_get_no_large_clusters(gpu: Gpu) -> None:
    gpu.capacity = dict(H200)
    for count, pages in ((1, NARROW_PAGES), (1, NARROW_PAGES + 1), (7, NARROW_PAGES), (30, 1)):
        launch(rows(count, pages))
    assert [arguments[6:] for arguments in gpu.launches] == [(1, 8), (1, 13), (7, 8), (30, 4)]


@pytest.fixture
def splitting(gpu: Gpu) -> Gpu:
    """The same GPU with clusters enough to split rows: one row gets two."""
    gpu.capacity = {1: 4, 2: 2}
    return gpu


def test_split_rows_share_a_workspace_a_stream(splitting: Gpu) -> None:
    for stream in (7, 7, 8, 7):
        splitting.stream = stream
        launch(rows(1, SPLIT_PAGES))
    assert {arguments[8:] for arguments in splitting.launches} == {(2, 2, 4)}
    first, again, other, last = splitting.addresses()
    assert first == again == last
    assert not set(first) & set(other)
    assert [plan.splits for plan in splitting.plans] == [False, True]


def test_graphs_have_workspaces_of_their_own_which_their_launches_share(splitting: Gpu) -> None:
    """In a graph those of a stream follow each other; two graphs may run at a time."""
    for splitting.capturing, splitting.stream in (
        *((0, 7), (1, 7), (1, 7), (1, 8), (2, 8), (2, 8), (0, 7)),
    ):
        launch(rows(1, SPLIT_PAGES))
    before, one, again, other_stream, two, two_again, after = splitting.addresses()
    assert before == after and one == again and two == two_again
    counters, slots = zip(before, one, other_stream, two, strict=True)
    assert len(set(counters)) == len(set(slots)) == 4


def test_graphs_clear_counters_only_where_no_cleared_ones_are_left(
    splitting: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspaces, "GRAPHS", 1)
    cleared: list[tuple[int, ...]] = []
    zeros = runner.Gpu._zeros

    def counted(self: runner.Gpu, *shape: int) -> torch.Tensor:
        cleared.append(shape)
        return zeros(self, *shape)

    monkeypatch.setattr(runner.Gpu, "_zeros", counted)
    launch(rows(1, SPLIT_PAGES))
    assert len(cleared) == 2  # the stream's, and for graphs
    for splitting.capturing, count in ((1, 2), (2, 3)):
        launch(rows(1, SPLIT_PAGES))
        assert len(cleared) == count
    assert not any(torch.from_dlpack(a[6]).any() for a in splitting.launches)


def test_launches_without_splits_need_no_workspace_nor_their_kernel(splitting: Gpu) -> None:
    """Sorted rows, or tables in which no row can be long enough."""
    launch(rows(2, UNEVEN_PAGES[2] - 1))
    launch(rows(1, SPLIT_PAGES), by_score=True)
    launch(rows(1, SPLIT_PAGES - 1))
    assert [arguments[6:] for arguments in splitting.launches] == [(2, 2), (1, 2), (1, 2)]
    assert not any(plan.splits for plan in splitting.plans)


def test_the_workspace_is_of_the_tensors_device(splitting: Gpu) -> None:
    """Launches that come back do not change the current device; streams are counted a device."""
    ready = choose_launch(INDEXER, gpu_runner(GPU), 16, 512, False, False, 1)
    inputs = rows(1, SPLIT_PAGES)
    ids = inputs.output(512)
    asked: list[int] = []
    splitting.on_allocation = lambda: asked.append(splitting.device)
    splitting.device = 1
    ready.function(*inputs, ids, ready.num_clusters, ready.cluster_size)
    assert asked == [0, 0, 0] and splitting.device == 1


def test_given_scores_are_launched_alike(gpu: Gpu) -> None:
    for count in (1, 3):
        lengths = torch.full((count,), 600, dtype=torch.int32)
        operands = TopkOperands(torch.zeros(count, 600), lengths)
        topk.bind(gpu_runner(GPU), operands, topk=512, sorted=False)(operands)
    assert [arguments[3:] for arguments in gpu.launches] == [(1, 4), (2, 2)]


def test_nothing_is_launched_without_rows_or_pages(gpu: Gpu) -> None:
    inputs = rows(2)
    assert launch(Inputs(*(x if x.dim() == 4 else x[:0] for x in inputs))).shape == (0, 512)
    no_pages = inputs._replace(k_index_cache_fp8=inputs.k_index_cache_fp8[:0])
    assert (launch(no_pages) == -1).all()
    launch(inputs)
    assert (launch(no_pages) == -1).all()
    assert len(gpu.launches) == 1


def test_an_int8_cache_goes_in_as_bytes_and_the_current_device_comes_back(gpu: Gpu) -> None:
    gpu.device = 1
    inputs = rows(2)
    launch(inputs._replace(k_index_cache_fp8=inputs.k_index_cache_fp8.view(torch.int8)))
    assert gpu.launches[0][1].dtype is torch.uint8
    assert (gpu.launched_on, gpu.device) == (0, 1)


def test_checked_calls_check_values_where_that_is_asked_for(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def checked(inputs: Inputs, check: bool) -> None:
        operands = TopkIndexerOperands(*inputs, inputs.output(512))
        options = {"sorted": False, "positions": False, "table_page_size": 64}
        indexer.bind(gpu_runner(GPU), operands, check=check, **options)(operands)

    inputs = rows(2)
    inputs.seq_lens[1] = -4
    checked(inputs, True)
    monkeypatch.setenv("FLASHDSA_CHECK", "1")
    checked(inputs, False)
    assert len(gpu.launches) == 2
    with pytest.raises(ValueError, match=r"seq_lens\[1\] = -4"):
        checked(inputs, True)
    gpu.capturing = True
    checked(inputs, True)
    assert len(gpu.launches) == 3


@pytest.mark.parametrize(
    ("next_n", "requests", "kind"),
    [(2, 61, By.PAIRS), (2, 60, By.CTAS), (4, 31, By.PAIRS), (4, 30, By.CTAS), (3, 62, By.CTAS)],
)
@pytest.mark.parametrize(
    "of_calls",
    [
        (64, 2048, False, False),
        (32, 1024, False, False),
        (16, 512, False, False),
        (32, 2048, False, True),
    ],
)
def test_pairs_of_queries_are_scored_together_where_they_are_many(
    gpu: Gpu,
    next_n: int,
    requests: int,
    kind: By,
    of_calls: tuple[int, int, bool, bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the heads and topk; a request of four queries has two pairs."""
    gpu.capacity = dict(devices.H200.clusters)
    monkeypatch.setattr(runner.Gpu, "num_sms", devices.H200.num_sms)
    choose_launch(INDEXER, gpu_runner(GPU), *of_calls, next_n * requests, requests)
    assert [plan.rows for plan in gpu.plans] == [kind]


@pytest.mark.parametrize(
    ("requests", "next_n", "widths"),
    [
        (1, 2, {549: None, 550: (2, 13), 4000: (2, 13)}),
        (7, 2, {549: None, 550: (14, 8)}),
        (4, 4, {279: None, 280: (16, 6), 480: (16, 6), 481: (15, 8), 4000: (15, 8)}),
        (16, 2, {279: None, 280: (32, 3), 481: (15, 8)}),
        (17, 2, {279: None, 280: None, 481: None}),
        (31, 2, {279: None, 280: None, 481: None}),
        (32, 2, {279: None, 280: (64, 2), 480: (64, 2), 481: None}),
        (92, 2, {279: None, 280: (66, 2), 480: (66, 2), 481: None}),
        (93, 2, {280: None, 879: None}),
        (16, 1, {280: None, 4000: None}),
        (6, 3, {280: None, 4000: None}),
    ],
)
def test_few_long_pairs_are_scored_and_ranked_by_two_launches(
    gpu: Gpu,
    requests: int,
    next_n: int,
    widths: dict[int, tuple[int, int] | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the width of a call's table, whatever its lengths are; clusters of the second launch."""
    gpu.capacity = dict(devices.H200.clusters)
    monkeypatch.setattr(runner.Gpu, "num_sms", devices.H200.num_sms)
    count = requests * next_n

    def launches(width: int, by_score: bool) -> list[tuple[Any, ...]]:
        sizes = 16, 512, by_score, False, count, requests
        function, *numbers = choose_launch(INDEXER, gpu_runner(GPU), *sizes)
        x, gpu.launches[:] = rows(count), []
        table = torch.zeros(requests, width, dtype=torch.int32)
        function(*x._replace(block_table=table), x.output(512), *numbers)
        return gpu.launches

    for width, clusters in widths.items():
        made = launches(width, False)
        assert len(made) == 1 + bool(clusters), width
        assert clusters is None or made[1][-2:] == clusters, width
        assert len(launches(width, True)) == 1


@pytest.mark.parametrize(
    ("requests", "next_n", "both"),
    [(20, 4, 1320), (60, 2, 880), (36, 2, 1467), (32, 2, 4001), (26, 3, 4001), (61, 2, 4001)],
)
def test_the_lengths_choose_pairs_or_rows_in_wide_tables(
    gpu: Gpu, requests: int, next_n: int, both: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows on their own are launched first; both get the pages from which pairs serve."""
    gpu.capacity = dict(devices.H200.clusters)
    monkeypatch.setattr(runner.Gpu, "num_sms", devices.H200.num_sms)
    count = requests * next_n
    sizes = 16, 512, False, False, count, requests
    function, *numbers = choose_launch(INDEXER, gpu_runner(GPU), *sizes)
    for width in (both - 1, both):
        table = torch.zeros(requests, width, dtype=torch.int32)
        x = rows(count)
        function(*x._replace(block_table=table), x.output(512), *numbers)
    pages = LEAST_PAGES * devices.H200.num_sms
    chosen = [arguments[10] for arguments in gpu.launches]
    assert chosen == ([0, 0] if both > 4000 else [0, -pages, pages])
    assert both > 4000 or gpu.launches[2][8:10] == (66, 2)


@pytest.mark.parametrize("device", [devices.H200, devices.SMALL], ids=["H200", "small"])
@pytest.mark.parametrize("by_score", [False, True], ids=["by position", "sorted"])
def test_the_emulated_backend_chooses_as_the_gpu_does(
    gpu: Gpu, device: devices.Device, by_score: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variant, clusters, and the splits of a row with a wide table or without."""
    emulated = Gpu()
    monkeypatch.setattr("flashdsa.backends.emulated.runner.compiled", emulated.loaded)
    gpu.capacity = dict(device.clusters)
    emulator = Emulator(device)
    monkeypatch.setattr(runner.Gpu, "num_sms", device.num_sms)
    for count in (1, 2, 3, 7, 16, 40, 67, 133):
        for pages in (1, SPLIT_PAGES):
            operands = TopkIndexerOperands(*rows(count, pages), torch.empty(count, 512).int())
            config = choose_launch(INDEXER, gpu_runner(GPU), 16, 512, by_score, False, count)
            same = choose_launch(INDEXER, emulator, 16, 512, by_score, False, count)
            assert config[1:] == same[1:]
            config.function(*operands[:6], *config[1:])
            same.function(*operands[:6], *same[1:])
    assert gpu.plans == emulated.plans
    assert [one[8:] for one in gpu.launches] == [one[8:] for one in emulated.launches]
    assert [len(one) for one in gpu.launches] == [len(one) for one in emulated.launches]
