"""The Hopper indexer on a GPU: graphs, streams, repeated runs, guarded buffers, what errors say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import flashdsa
from tests.kernels.indexer.inputs import EDGES, Inputs, expected_ids, make_inputs, select
from tests.support.hopper_gpu import HOPPER_GPU, capture

pytestmark = HOPPER_GPU


def test_a_graph_replays_with_changed_contents_of_every_input() -> None:
    first = make_inputs([9000, 64, 3000, 0, 2049, 20_000]).to("cuda")
    held = Inputs(*(x.clone() for x in first))
    ids = held.output(2048)
    graph, _ = capture(lambda: flashdsa.dsa_topk_indexer(*held, ids, backend="sm90"))
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
    graph, _ = capture(lambda: launch((*held, ids)))
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

    graph, _ = capture(lambda: choose(held, ids, among, backend="sm90"))
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

    graph, _ = capture(lambda: choose(held, backend="sm90"))
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


GUARD = 4096
"""Bytes around a guarded buffer; keeps its alignment."""


class Guarded:
    """A tensor's copy between two regions of a pattern."""

    def __init__(self, tensor: Tensor, pattern: int) -> None:
        size = tensor.numel() * tensor.element_size()
        self.pattern = pattern
        self._memory = torch.full((size + 2 * GUARD,), pattern, dtype=torch.uint8, device="cuda")
        self._inside = slice(GUARD, GUARD + size)
        self.tensor = self._memory[self._inside].view(tensor.dtype).view(tensor.shape)
        self.tensor.copy_(tensor)
        self._before = self._memory[self._inside].clone()

    def guards_hold(self) -> bool:
        """Nothing was written around the tensor."""
        outside = (self._memory[:GUARD], self._memory[self._inside.stop :])
        return all(bool((part == self.pattern).all()) for part in outside)

    def unchanged(self) -> bool:
        """Nothing was written at all."""
        return self.guards_hold() and torch.equal(self._memory[self._inside], self._before)


def bad_inputs() -> Inputs:
    """Lengths and page ids of every wrong kind."""
    inputs = make_inputs([3000, 3000, 3000, 3000, 300, 5000, 64, 9000])
    num_pages = inputs.k_index_cache_fp8.shape[0]
    inputs.block_table[0, 1], inputs.block_table[1, 40] = -1, num_pages
    inputs.block_table[2, :], inputs.block_table[3, 0] = 2**31 - 1, -(2**31)
    inputs.block_table[4, 0], inputs.block_table[7, ::2] = num_pages + 7, -5
    inputs.seq_lens[3], inputs.seq_lens[5], inputs.seq_lens[6] = -5, 2**31 - 1, -(2**31)
    return inputs


def long_bad_inputs() -> Inputs:
    """A split row, most of its pages outside the cache: fewer tokens than topk are left."""
    inputs = make_inputs([150_000, 70_000])
    inputs.block_table[0, 20:], inputs.block_table[1, 100:900] = -1, 2**31 - 1
    return inputs


@pytest.mark.parametrize("pattern", [0x7F, 0xFF], ids=["NaN keys", "-1 and NaN"])
@pytest.mark.parametrize(
    "make",
    [lambda: make_inputs(EDGES), bad_inputs, long_bad_inputs],
    ids=["good input", "bad input", "long bad rows"],
)
def test_nothing_outside_the_buffers_is_touched(make: Callable[[], Inputs], pattern: int) -> None:
    inputs = make()
    guarded = [Guarded(x, pattern) for x in inputs]
    operands = Inputs(*(g.tensor for g in guarded))
    ids = Guarded(operands.output(2048), pattern)
    launch = flashdsa.bind("dsa_topk_indexer", (*operands, ids.tensor))
    for _ in range(3):
        launch((*operands, ids.tensor))
    torch.cuda.synchronize()
    assert torch.equal(ids.tensor, expected_ids(operands, 2048))
    assert ids.guards_hold()
    assert all(g.unchanged() for g in guarded)
