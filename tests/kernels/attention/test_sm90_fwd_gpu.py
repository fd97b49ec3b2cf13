"""The Hopper forward and decode on a GPU, where they are not what every backend's tests ask for."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

import flashdsa
from flashdsa import reference
from flashdsa.backends.sm90 import sparse_mla
from flashdsa.backends.sm90.sparse_mla import bind_way
from flashdsa.backends.sm90.sparse_mla_ways import Way, call_of, choose
from flashdsa.kernels.attention.sm90.fwd.plan import FwdPlan
from flashdsa.ops.attention import SparseMlaOutOperands
from flashdsa.verify import calls
from flashdsa.verify.compare import failures
from flashdsa.verify.judge_sparse_mla import check_forward, judge_forward
from flashdsa.verify.sparse_mla_cases import SparseMlaCase, make_sparse_mla_inputs
from tests.kernels.attention.test_forward import BATCH, FUZZED, batch_of
from tests.support.hopper_gpu import HOPPER_GPU, Guarded, by_turns_on_streams, capture

pytestmark = HOPPER_GPU

GROUPED = [
    # name, S, S_kv, H, topk: calls for which groups pay
    SparseMlaCase("groups of 2", 420, 900, 32, 800, invalid=True, topk_length=True),
    SparseMlaCase("groups of 4", 402, 900, 16, 512, duplicates=True, attn_sink="finite"),
    SparseMlaCase("groups of 8", 930, 300, 8, 160, invalid=True, poison=True),
]
VARIED = [
    SparseMlaCase("lengths", 700, 5000, 64, 700, topk_length=True, invalid=True),
    SparseMlaCase("lengths, two items a query", 401, 5000, 128, 300, topk_length=True),
    SparseMlaCase("lengths, groups", 1100, 5000, 16, 300, topk_length=True, max_logits=True),
    SparseMlaCase("lists with gaps", 530, 5000, 128, 2048, invalid=True, poison=True),
]


@pytest.mark.parametrize("case", VARIED, ids=lambda case: case.name)
def test_who_takes_an_item_changes_no_bit(case: SparseMlaCase) -> None:
    inputs = make_sparse_mla_inputs(case, 0, "cuda")
    assert failures(check_forward(inputs, "sm90")) == []
    first, *others = (
        flashdsa.sparse_mla_fwd(inputs.q, inputs.kv, inputs.indices, **inputs.options)
        for _ in range(20)
    )
    for again in others:
        assert all(torch.equal(x, y) for x, y in zip(again, first, strict=True))


@pytest.mark.parametrize(("queries", "heads"), [(900, 16), (2112, 32)])
def test_groups_are_taken_if_their_queries_have_much_in_common(
    queries: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are those of the form that is taken, bit for bit, call by call."""
    case = SparseMlaCase("sampled", queries, 30_000, heads, 512, max_logits=True)
    inputs = make_sparse_mla_inputs(case, 0, "cuda")
    apart = inputs.indices.clone()
    alike = apart[:1].expand_as(apart).clone()

    group, single = FwdPlan(64 // heads, drawn=True), FwdPlan(1, drawn=True)

    def forward(way: Way) -> tuple[Tensor, ...]:
        monkeypatch.setattr(sparse_mla, "choose", lambda *_: way)
        out = torch.empty(queries, heads, 512, dtype=torch.bfloat16, device="cuda")
        lse, largest = torch.empty(2, queries, heads, device="cuda")
        operands = inputs.q, inputs.kv, inputs.indices, out, lse, largest
        flashdsa.bind("sparse_mla_fwd_out", operands, backend="sm90")(operands)
        return out, lse, largest

    for indices, plan in ((apart, single), (alike, group), (apart, single)):
        inputs.indices.copy_(indices)
        chosen, expected = forward(Way(group, instead=single)), forward(Way(plan))
        assert all(torch.equal(x, y) for x, y in zip(chosen, expected, strict=True))


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("heads", [16, 128])
def test_a_graph_replays_it_on_new_values(heads: int, lengths: bool) -> None:
    case = SparseMlaCase("graph", 1002, 300, heads, 64, topk_length=lengths)
    inputs = make_sparse_mla_inputs(case, 0, "cuda")

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        return flashdsa.sparse_mla_fwd(
            inputs.q, inputs.kv, inputs.indices, backend="sm90", **inputs.options
        )

    graph, captured = capture(forward)
    inputs.q.copy_(inputs.q.flip(0))
    inputs.indices.copy_(inputs.indices.flip(0))
    if inputs.topk_length is not None:
        inputs.topk_length.copy_(inputs.topk_length.roll(1))
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(captured, forward(), strict=True))


@pytest.mark.parametrize("batch", range(FUZZED // BATCH))
def test_fuzzed_shapes_are_within_the_contract_and_repeat_bit_for_bit(batch: int) -> None:
    for number, case in enumerate(batch_of(batch)):
        inputs = make_sparse_mla_inputs(case, number, "cuda")
        assert failures(check_forward(inputs, "sm90")) == [], case
        results = [calls.sparse_mla_fwd(inputs, "sm90") for _ in range(2)]
        assert all(torch.equal(x, y) for x, y in zip(*results, strict=True)), case


@pytest.mark.parametrize(
    "case",
    [*GROUPED, *VARIED, SparseMlaCase("tails", 5, 70, 100, 131, invalid=True)],
    ids=lambda c: c.name,
)
def test_nothing_outside_of_any_buffer_is_written_or_matters(case: SparseMlaCase) -> None:
    inputs = make_sparse_mla_inputs(case, 0, "cuda")
    runner = Guarded()
    lengths, sink = inputs.topk_length, inputs.attn_sink
    out = runner.empty(*inputs.q.shape[:2], case.d_v, dtype=torch.bfloat16)
    lse, largest = (runner.empty(*inputs.q.shape[:2], dtype=torch.float32) for _ in range(2))
    operands = SparseMlaOutOperands(
        runner.guarded(inputs.q),
        runner.guarded(inputs.kv.view(-1, case.d_qk)),
        runner.guarded(inputs.indices),
        out,
        lse,
        largest,
        None if lengths is None else runner.guarded(lengths),
        None if sink is None else runner.guarded(sink),
    )
    way = choose(runner, call_of(operands.inputs, max_logits=True))
    with runner.launching():
        bind_way(runner, way, operands.inputs, case.d_qk**-0.5)(operands)
    assert failures(judge_forward(inputs, out, lse, largest, backend="sm90")) == []
    assert runner.touched() == []


@pytest.mark.parametrize(
    "case",
    [
        *(SparseMlaCase("drawn", 1002, 300, heads, 64, invalid=True, topk_length=lengths)
          for heads in (16, 128) for lengths in (False, True)),
        *(SparseMlaCase("stream-K", 140, 2500, heads, 2048, packed=packed)
          for heads, packed in ((64, ""), (64, "ue8m0"), (16, "ue8m0"))),
    ],
    ids=lambda case: f"{case.name}, {case.num_heads}",
)  # fmt: skip
def test_two_streams_do_not_disturb_each_other(case: SparseMlaCase) -> None:
    """Each has counters and a workspace of its own."""
    inputs = [make_sparse_mla_inputs(case, seed, "cuda") for seed in range(2)]

    def forward(number: int) -> tuple[Tensor, Tensor]:
        x = inputs[number]
        return flashdsa.sparse_mla_fwd(x.q, x.kv, x.indices, backend="sm90", **x.options)

    alone = [forward(number) for number in range(2)]
    together = by_turns_on_streams([partial(forward, number) for number in range(2)], 10)
    for expected, every in zip(alone, together, strict=True):
        for results in every:
            assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))


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
def test_a_graph_replays_the_decode_on_new_values(queries: int, heads: int) -> None:
    """Other lengths and ids, a row of -1, a length of 0, NaN in a row that no valid slot names.

    8 queries are clusters', 128 of 64 heads CTAs' alone, tiles of 136 are divided by stream-K.
    """
    case = SparseMlaCase("graph", queries, 3000, heads, 2048, packed="ue8m0")
    inputs = make_sparse_mla_inputs(case, 0, "cuda")
    lengths = torch.full((queries,), 2048, dtype=torch.int32, device="cuda")

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        return flashdsa.sparse_mla_fwd(
            inputs.q, inputs.kv, inputs.indices, topk_length=lengths, backend="sm90"
        )

    graph, captured = capture(forward)
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

    graph, captured = capture(forward)
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
