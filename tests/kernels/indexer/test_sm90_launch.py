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
from flashdsa.backends.indexer.launch import Kernels, Launches
from flashdsa.backends.sm90 import indexer, ranking, topk
from flashdsa.backends.sm90.indexer import bind_scored_and_ranked
from flashdsa.backends.sm90.ranking import cluster_of
from flashdsa.heuristics.h200 import Indexer
from flashdsa.kernels.catalog import INDEXER, INDEXER_ORDER
from flashdsa.kernels.indexer.order.plan import OrderPlan
from flashdsa.kernels.indexer.plan import By
from flashdsa.kernels.indexer.sm90.plan import IndexerPlan
from flashdsa.ops.indexer import TopkIndexerOperands, TopkOperands
from flashdsa.plan.kernel_spec import KernelSpec
from tests.kernels.indexer.inputs import Inputs, make_inputs

H200 = devices.H200.clusters
SMALL = {1: 4, 2: 2, 3: 1, 4: 1}
WIDE = Indexer.PAGES_ALONE * 3
"""Pages of a table from which two clusters of two share a row."""
GPU = torch.device("cuda", 0)


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
            (torch.from_dlpack(a[7]).data_ptr(), torch.from_dlpack(a[8]).data_ptr())
            for a in self.launches
            if len(a) == 12
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


@pytest.mark.parametrize(
    ("count", "pages", "who", "clusters"),
    [(1, 100, By.CLUSTER, (1, 4)), (1, 400, By.CLUSTERS, (1, 4)), (9, 100, By.CLUSTERS, (1, 4))],
)
def test_a_launch_gets_the_clusters_of_its_way(
    gpu: Gpu, count: int, pages: int, who: By, clusters: tuple[int, int]
) -> None:
    launch(rows(count, pages))
    assert [plan.rows for plan in gpu.plans] == [who]
    assert gpu.launches[0][9 if who is By.CLUSTERS else 7 :] == (1, *clusters)


@pytest.mark.parametrize("pages", [100, 400])
def test_the_same_launch_and_another_one_write_the_best_first(gpu: Gpu, pages: int) -> None:
    """Rows of at most topk tokens are scored, too."""
    launch(rows(1, pages))
    ids = launch(rows(1, pages), by_score=True)
    unsorted, fused, (of_order, words) = gpu.launches
    assert unsorted[6].shape == (0, 0) and len(unsorted) == len(fused)
    assert unsorted[-3:] == fused[-3:]
    assert of_order is ids and words is fused[6] and words.shape == ids.shape
    assert [plan.width for plan in gpu.plans if isinstance(plan, OrderPlan)] == [512]


@pytest.fixture
def splitting(gpu: Gpu) -> Gpu:
    """The same GPU with clusters enough to split rows: one row gets two."""
    gpu.capacity = {1: 4, 2: 2}
    return gpu


def test_split_rows_share_a_workspace_a_stream(splitting: Gpu) -> None:
    for stream in (7, 7, 8, 7):
        splitting.stream = stream
        launch(rows(1, WIDE))
    assert {arguments[9:] for arguments in splitting.launches} == {(1, 2, 2)}
    first, again, other, last = splitting.addresses()
    assert first == again == last
    assert not set(first) & set(other)
    assert [plan.splits for plan in splitting.plans] == [True]


def test_graphs_have_workspaces_of_their_own_which_their_launches_share(splitting: Gpu) -> None:
    """In a graph those of a stream follow each other; two graphs may run at a time."""
    for splitting.capturing, splitting.stream in (
        *((0, 7), (1, 7), (1, 7), (1, 8), (2, 8), (2, 8), (0, 7)),
    ):
        launch(rows(1, WIDE))
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
    launch(rows(1, WIDE))
    assert len(cleared) == 2  # the stream's, and for graphs
    for splitting.capturing, count in ((1, 2), (2, 3)):
        launch(rows(1, WIDE))
        assert len(cleared) == count
    assert not any(torch.from_dlpack(a[7]).any() for a in splitting.launches)


def test_launches_without_splits_need_no_workspace_nor_their_kernel(splitting: Gpu) -> None:
    """Tables in which no row can be long enough."""
    launch(rows(2, WIDE - 1))
    launch(rows(1, WIDE - 1))
    assert [arguments[7:] for arguments in splitting.launches] == [(1, 2, 2), (1, 1, 2)]
    assert not any(plan.splits for plan in splitting.plans)


def test_the_workspace_is_of_the_tensors_device(splitting: Gpu) -> None:
    """Launches that come back do not change the current device; streams are counted a device."""
    kernels = Kernels(INDEXER, INDEXER_ORDER, None, 16, 512, sorted=False, positions=False)
    ready = Launches(kernels, gpu_runner(GPU), 1, 1).of_width(WIDE)
    inputs = rows(1, WIDE)
    ids = inputs.output(512)
    asked: list[int] = []
    splitting.on_allocation = lambda: asked.append(splitting.device)
    splitting.device = 1
    ready(*inputs, ids)
    assert asked == [0, 0, 0] and splitting.device == 1


def test_given_scores_are_launched_alike(gpu: Gpu) -> None:
    for count, width in ((1, 40_000), (3, 40_000), (3, 600)):
        lengths = torch.full((count,), 600, dtype=torch.int32)
        operands = TopkOperands(torch.zeros(count, width), lengths)
        topk.bind(gpu_runner(GPU), operands, topk=512, sorted=False)(operands)
    clusters = [arguments[-2:] for arguments in gpu.launches]
    assert clusters == [(4, 1), (4, 0), (1, 1)], "on 4 SMs"


def test_an_int8_cache_goes_in_as_bytes_and_the_current_device_comes_back(gpu: Gpu) -> None:
    gpu.device = 1
    inputs = rows(2)
    launch(inputs._replace(k_index_cache_fp8=inputs.k_index_cache_fp8.view(torch.int8)))
    assert gpu.launches[0][1].dtype is torch.uint8
    assert (gpu.launched_on, gpu.device) == (0, 1)


def test_no_scores_are_counted_for_a_ranking_that_would_be_refused(gpu: Gpu) -> None:
    """Their counts would stay."""
    inputs = rows(2)
    bind = bind_scored_and_ranked(gpu_runner(GPU), 16, 512, False, False, 2, 1)
    for ids in (torch.zeros(2, 600, dtype=torch.int32)[:, :512], inputs.output(511)):
        with pytest.raises(ValueError, match=r"topk_indices: expected shape \[2, 512\]"):
            bind(*inputs, ids)
    assert not gpu.launches


def test_many_scores_are_ranked_a_chunk_at_a_time(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole requests, whose ids go to their rows."""
    inputs = rows(6)
    width = 64 * inputs.block_table.shape[1]
    monkeypatch.setattr(ranking, "SCORES_AT_ONCE", 5 * width)
    ids = inputs.output(512)
    table = inputs.block_table[::2].contiguous()
    bind_scored_and_ranked(gpu_runner(GPU), 16, 512, False, False, 6, 2)(
        *inputs._replace(block_table=table), ids
    )
    chunks = [arguments[5].shape[0] for arguments in gpu.launches[::2]]
    assert chunks == [4, 2]
    assert [a[8].data_ptr() for a in gpu.launches[1::2]] == [ids.data_ptr(), ids[4:].data_ptr()]


@pytest.mark.parametrize(
    ("count", "cluster"),
    [(1, (8, 1)), (8, (8, 1)), (9, (4, 1)), (33, (4, 1)), (34, (2, 1)), (66, (2, 1)), (67, (8, 0))],
)
def test_a_ranking_gives_few_rows_large_clusters(count: int, cluster: tuple[int, int]) -> None:
    """More rows than half the SMs get a CTA each, and clusters for what is long."""
    assert cluster_of(count, 132, devices.H200.clusters) == cluster
    assert cluster_of(count, 132, {1: 132}) == (1, 1)
    assert cluster_of(count, 132, devices.H200.clusters, parts=1) == (1, 1)


def test_a_ranking_has_no_more_ctas_than_a_row_has_parts() -> None:
    assert [cluster_of(8, 132, devices.H200.clusters, n) for n in (3, 8)] == [(3, 1), (8, 1)]
    assert cluster_of(67, 132, devices.H200.clusters, parts=7) == (1, 1)


@pytest.mark.parametrize("device", [devices.H200, devices.SMALL], ids=["H200", "small"])
@pytest.mark.parametrize("by_score", [False, True], ids=["by position", "sorted"])
def test_the_emulated_backend_chooses_as_the_gpu_does(
    gpu: Gpu, device: devices.Device, by_score: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of each table."""
    gpu.capacity = dict(device.clusters)
    monkeypatch.setattr(runner.Gpu, "num_sms", device.num_sms)
    kernels = Kernels(INDEXER, INDEXER_ORDER, None, 16, 512, by_score, positions=False)
    for count in (1, 40, 133):
        both = (gpu_runner(GPU), Emulator(device))
        one, same = (Launches(kernels, one, count, count) for one in both)
        assert (one.call, one.gpu) == (same.call, same.gpu)
