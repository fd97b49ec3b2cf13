"""The Hopper decode on a GPU, where it is not what every backend's tests ask for."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import flashdsa
from flashdsa import reference
from flashdsa.verify.compare import failures
from flashdsa.verify.judge_sparse_mla import check_forward
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, make_sparse_mla_inputs
from tests.support.hopper_gpu import HOPPER_GPU, by_turns_on_streams

pytestmark = HOPPER_GPU


@pytest.mark.parametrize(
    ("packed", "heads"), [("", 64), ("ue8m0", 64), ("ue8m0", 16), ("", 128), ("ue8m0", 128)]
)
@pytest.mark.parametrize("queries", [1, 8, 30, 50, 66, 132, 133, 200, 300])
def test_every_number_of_ctas_is_within_the_contract_and_repeats(
    queries: int, packed: str, heads: int
) -> None:
    case = SparseMlaCase("decode", queries, 700, heads, 600, packed=packed, invalid=True)
    inputs = make_sparse_mla_inputs(case, 0, "cuda")
    assert failures(check_forward(inputs, "sm90")) == []
    first = flashdsa.sparse_mla_fwd(inputs.q, inputs.kv, inputs.indices)
    for _ in range(5):
        again = flashdsa.sparse_mla_fwd(inputs.q, inputs.kv, inputs.indices)
        assert all(torch.equal(x, y) for x, y in zip(again, first, strict=True))


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("queries", [8, 128, 136])
def test_a_graph_replays_it_on_new_values(queries: int, heads: int) -> None:
    """Other lengths and ids, a row of -1, a length of 0, NaN in a row that no valid slot names.

    8 queries are clusters', 128 of 64 heads CTAs' alone, tiles of 136 are dealt out.
    """
    case = SparseMlaCase("graph", queries, 3000, heads, 2048, packed="ue8m0")
    inputs = make_sparse_mla_inputs(case, 0, "cuda")
    lengths = torch.full((queries,), 2048, dtype=torch.int32, device="cuda")

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        return flashdsa.sparse_mla_fwd(
            inputs.q, inputs.kv, inputs.indices, topk_length=lengths, backend="sm90"
        )

    forward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward()
    lengths.view(-1, 8).copy_(torch.tensor([1, 64, 65, 128, 0, 1000, 2047, 2048]))
    inputs.indices.copy_(inputs.indices.flip(0))
    inputs.indices[5].fill_(-1)
    inputs.indices[inputs.indices == 7] = 8
    inputs.indices[0, 1] = 7
    inputs.kv[7].fill_(0x7F)
    graph.replay()
    torch.cuda.synchronize()
    O, lse = reference.sparse_mla_fwd(inputs.q, inputs.kv, inputs.indices, topk_length=lengths)
    torch.testing.assert_close(captured[1].double(), lse, rtol=1e-5, atol=1e-4)
    assert (captured[0].double() - O).norm() <= 2.5e-3 * O.norm()
    assert all(torch.equal(x, y) for x, y in zip(captured, forward(), strict=True))


@pytest.mark.parametrize(
    "formats", [(), ("v32_no_rope",) * 2, ("v4", "v4"), ("v41_fp4", "v41")], ids=str
)
@pytest.mark.parametrize(("queries", "heads"), [(8, 64), (128, 64), (136, 64), (8, 16), (136, 16)])
def test_a_graph_replays_two_sources_on_other_lengths(
    queries: int, heads: int, formats: tuple[str, ...]
) -> None:
    """Ids and a window, both with other lengths; one list empty, the other, both; NaN in rows that
    no valid slot names any more."""
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(queries, heads, 512, generator=draw).bfloat16().cuda()
    sources = [torch.randn(count, 512, generator=draw).bfloat16() for count in (900, 400)]
    if formats:
        sources = [
            flashdsa.quantize_kv(rows, kv_format=name)
            for rows, name in zip(sources, formats, strict=True)
        ]
    kv, extra_kv = (rows.cuda() for rows in sources)
    lists = {
        "indices": torch.randint(900, (queries, 640), generator=draw).int().cuda(),
        "topk_length": torch.full((queries,), 640, dtype=torch.int32, device="cuda"),
    }
    starts = torch.randint(250, (queries,), generator=draw).int().cuda()
    ends = starts + 128

    kv_format = next((name for name in ("v41", "v32_no_rope") if name in formats), None)

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        return flashdsa.sparse_mla_fwd(
            q, kv, extra_kv=extra_kv, extra_indices=(starts, ends), **lists,
            kv_format=kv_format, backend="sm90",
        )  # fmt: skip

    forward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward()
    lengths = torch.tensor([[1, 64, 65, 0, 0, 127, 639, 640], [0, 1, 128, 64, 0, 63, 128, 9]])
    lists["topk_length"].view(-1, 8).copy_(lengths[0])
    starts.copy_(starts.flip(0) + 20)
    ends.view(-1, 8).copy_(starts.view(-1, 8) + lengths[1].cuda())
    ids = lists["indices"]
    ids.copy_(ids.flip(0))
    ids[6].fill_(-1)
    ids[ids == 7] = 8
    ids[3, 1] = 7  # past its length
    for rows, row in ((kv, 7), (extra_kv, 399)):
        rows[row].view(torch.uint8).fill_(0x7F if formats else 0xFF)
    graph.replay()
    torch.cuda.synchronize()
    values = [
        reference.unpack_kv(rows.cpu(), name) if name else rows.cpu()
        for rows, name in zip((kv, extra_kv), formats or ("", ""), strict=True)
    ]
    joined = reference.join_sources(
        values[0],
        extra_kv=values[1],
        extra_indices=(starts.cpu(), ends.cpu()),
        **{name: x.cpu() for name, x in lists.items()},
    )
    O, lse = reference.sparse_mla_fwd(q.cpu(), *joined)
    assert lse[4].isposinf().all()
    torch.testing.assert_close(captured[1].cpu().double(), lse, rtol=1e-5, atol=1e-4)
    assert (captured[0].cpu().double() - O).norm() <= 2.5e-3 * O.norm()
    assert all(torch.equal(x, y) for x, y in zip(captured, forward(), strict=True))


@pytest.mark.parametrize(("packed", "heads"), [("", 64), ("ue8m0", 64), ("ue8m0", 16)])
def test_dealt_tiles_of_two_streams_do_not_meet(packed: str, heads: int) -> None:
    """Each stream has a workspace."""
    cases = [SparseMlaCase("stream", 140, 2500, heads, 2048, packed=packed) for _ in range(2)]
    inputs = [make_sparse_mla_inputs(case, seed, "cuda") for seed, case in enumerate(cases)]

    def forward(number: int) -> tuple[torch.Tensor, ...]:
        x = inputs[number]
        return flashdsa.sparse_mla_fwd(x.q, x.kv, x.indices, backend="sm90")

    alone = [forward(number) for number in range(2)]
    together = by_turns_on_streams([partial(forward, number) for number in range(2)], 10)
    for expected, every in zip(alone, together, strict=True):
        for results in every:
            assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))
