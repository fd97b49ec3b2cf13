"""The Hopper indexer on a GPU: graphs, streams, repeated runs, compile, the first call.

Scores are exact in any order of additions (see exact_inputs.py), so that torch's stable sort of
them is the answer, id for id.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import flashdsa
from tests.kernels.indexer.exact_ids import expected_ids, select
from tests.kernels.indexer.exact_inputs import Inputs, make_inputs
from tests.support.hopper_gpu import HOPPER_GPU

pytestmark = HOPPER_GPU


def test_a_graph_replays_with_changed_contents_of_every_input() -> None:
    first = make_inputs([9000, 64, 3000, 0, 2049, 20_000]).to("cuda")
    held = Inputs(*(x.clone() for x in first))
    ids = held.output(2048)
    flashdsa.dsa_topk_indexer(*held, ids)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flashdsa.dsa_topk_indexer(*held, ids, backend="sm90")
    for seed in range(4):
        lengths = [[20_000, 3000, 1, 9000, 64, 0], [0] * 6, [2048, 2049, 8000, 9000, 3, 5]][
            seed % 3
        ]
        changed = make_inputs(lengths, seed=seed, spare_pages=600)
        table = torch.zeros_like(held.block_table).cpu()
        table[:, : changed.block_table.shape[1]] = changed.block_table
        pages = len(held.k_index_cache_fp8)
        changed = changed._replace(
            block_table=table, k_index_cache_fp8=changed.k_index_cache_fp8[:pages]
        ).to("cuda")
        for buffer, content in zip(held, changed, strict=True):
            buffer[: len(content)].copy_(content)
        ids.fill_(-99)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(ids, expected_ids(held, 2048))


def test_a_graph_of_one_row_replays_with_and_without_splits() -> None:
    """The length decides on the device whether clusters share the row."""
    lengths = [200_000, 65_536, 6000, 3000, 0, 5900, 200_000]
    held = make_inputs([max(lengths)]).to("cuda")
    ids = held.output(2048)
    launch = flashdsa.bind("dsa_topk_indexer", (*held, ids))
    launch((*held, ids))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch((*held, ids))
    for length in lengths:
        held.seq_lens.fill_(length)
        ids.fill_(-99)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(ids, expected_ids(held, 2048))


@pytest.mark.parametrize(("block", "listed"), [(8, False), (64, False), (8, True), (1, True)])
def test_a_graph_replays_two_levels_over_pages(block: int, listed: bool) -> None:
    """Lengths and candidates change between replays; the CPU says what is right."""
    held = make_inputs([9000, 64, 3000, 0, 2049, 20_000]).to("cuda")
    ids, lengths = held.output(512), held.seq_lens.clone()
    candidates = torch.zeros(len(lengths), 300, dtype=torch.int32, device="cuda")
    among = candidates if listed else None

    def choose(x: Inputs, to: Tensor, some: Tensor | None, backend: str = "auto") -> None:
        flashdsa.dsa_topk_indexer(*x, to, block=block, candidates=some, backend=backend)

    choose(held, ids, among)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        choose(held, ids, among, backend="sm90")
    for turn in range(1, 4):
        held.seq_lens.copy_(lengths // turn)
        candidates.copy_(torch.randint(-2, 20_000 // block // turn, candidates.shape))
        ids.fill_(-99)
        graph.replay()
        right = held.to("cpu").output(512)
        choose(held.to("cpu"), right, candidates.cpu() if listed else None)
        assert torch.equal(ids.cpu(), right)


@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize("listed", [False, True])
def test_a_graph_replays_two_levels_over_shared_keys(listed: bool, starts: bool) -> None:
    """Keys, ranges and candidates change between replays; scores are exact in any order."""
    queries, keys, heads = 300, 6000, 32

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, device="cuda").float()

    def fp8(*shape: int) -> Tensor:
        return integers(-2, 2, *shape).to(torch.float8_e4m3fn)

    q, k, scale = fp8(queries, heads, 128), fp8(keys, 128), 2.0 ** integers(-3, 0, keys)
    weights, ends = integers(-3, 4, queries, heads) / 4, integers(0, keys, queries).int()
    begins = ends // 3 if starts else None
    candidates = torch.zeros(queries, 150, dtype=torch.int32, device="cuda")
    ids = torch.full((queries, 200), -99, dtype=torch.int32, device="cuda")
    held = q, k, weights, begins, ends, ids, scale, candidates if listed else None

    def choose(x: Sequence[Any], backend: str = "auto") -> None:
        *operands, k_scale, among = x
        flashdsa.dsa_topk_prefill(
            *operands, k_scale=k_scale, candidates=among, block=8, backend=backend
        )

    choose(held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        choose(held, backend="sm90")
    for _ in range(3):
        k.view(torch.uint8).copy_(fp8(keys, 128).view(torch.uint8))
        ends.copy_(integers(0, keys, queries))
        if begins is not None:
            begins.copy_(ends // 4)
        candidates.copy_(integers(-2, keys // 8 + 2, *candidates.shape))
        ids.fill_(-99)
        graph.replay()
        on_cpu: list[Any] = [one if one is None else one.cpu() for one in held]
        choose(on_cpu)
        assert torch.equal(ids.cpu(), on_cpu[5])


def test_graphs_on_two_streams_do_not_meet() -> None:
    """The launches of a graph share a workspace."""
    work = []
    for seed, lengths in enumerate(([130_000, 5000], [4000, 90_000])):
        inputs = make_inputs(lengths, seed=seed).to("cuda")
        ids = inputs.output(2048)
        graph = torch.cuda.CUDAGraph()
        first = torch.empty_like(ids)
        with torch.cuda.graph(graph):
            flashdsa.dsa_topk_indexer(*inputs, first)
            flashdsa.dsa_topk_indexer(*inputs, ids)
        # `first` stays: memory that a graph writes must not become another tensor's.
        kept = (inputs, first)
        work.append((torch.cuda.Stream(), graph, kept, ids, expected_ids(inputs, 2048)))
    torch.cuda.synchronize()
    for _ in range(50):
        for stream, graph, *_ in work:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for _, _, _, ids, expected in work:
        assert torch.equal(ids, expected)


@pytest.mark.parametrize("by_score", [False, True], ids=["by position", "sorted"])
@pytest.mark.parametrize(
    "lengths", [[100_000, 5000, 3000, 2049] * 5, [300_000]], ids=["20 rows", "one long row"]
)
def test_100_runs_are_bit_identical(lengths: list[int], by_score: bool) -> None:
    torch.manual_seed(0)
    inputs = make_inputs(lengths).to("cuda")
    inputs.weights.normal_()  # scores that are not exact: the order of additions would show
    ids = select(inputs, 2048, by_score)
    for _ in range(100):
        assert torch.equal(select(inputs, 2048, by_score), ids)


def test_several_streams_at_once() -> None:
    work = []
    for seed, lengths in enumerate(([250_000], [2500] * 40, [100_000, 70_000])):
        inputs = make_inputs(lengths, seed=seed).to("cuda")
        ids = [inputs.output(2048) for _ in range(50)]
        work.append((torch.cuda.Stream(), inputs, ids, expected_ids(inputs, 2048)))
    torch.cuda.synchronize()
    for turn in range(50):
        for stream, inputs, ids, _ in work:
            with torch.cuda.stream(stream):
                flashdsa.dsa_topk_indexer(*inputs, ids[turn])
    torch.cuda.synchronize()
    for _, _, ids, expected in work:
        assert all(torch.equal(got, expected) for got in ids)


def test_torch_compile_takes_the_operation_whole() -> None:
    inputs = make_inputs([3000, 5000]).to("cuda")
    ids = inputs.output(2048)

    def step(*operands: Tensor) -> Tensor:
        flashdsa.dsa_topk_indexer(*operands, ids)
        return ids + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*inputs) - 1, expected_ids(inputs, 2048))


FIRST_CALL = """
import sys, torch, flashdsa
from flashdsa.jit.loader import installed_object
if not installed_object("sm90").exists():
    sys.exit("skip")
from tests.kernels.indexer.exact_inputs import make_inputs
inputs = make_inputs([5000, 300]).to("cuda")
ids = inputs.output(2048)
flashdsa.dsa_topk_indexer  # importing the package is not the call
flashdsa.dsa_topk_indexer(*inputs, ids)
torch.cuda.synchronize()
print("cutlass" in sys.modules)
"""


def test_the_first_call_needs_no_compiler_where_the_object_is_installed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALL], capture_output=True, text=True, check=False
    )
    if done.stderr.strip() == "skip":
        pytest.skip("no _kernels/sm90.so: make kernels")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"
