"""What Hopper kernels are launched with by calls that were bound: on a pretended GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from flashdsa.backends.reasons import Explain
from flashdsa.backends.runner import Allocate
from flashdsa.backends.sm90 import indexer, indexer_bwd, prefill, sparse_mla, sparse_mla_ways
from flashdsa.backends.sm100 import indexer as blackwell
from flashdsa.errors import ArgumentValueError, UnsupportedError
from flashdsa.kernels.attention.operands import Operands
from flashdsa.ops.attention import SparseMlaOperands, SparseMlaOutOperands
from flashdsa.ops.indexer import TopkIndexerOperands
from flashdsa.ops.indexer_training import IndexerBwdOperands
from flashdsa.ops.prefill import PrefillOperands, TopkPrefillOperands
from flashdsa.plan.kernel_spec import KernelPlan, KernelSpec


class Pretended:
    """A `Runner` of CPU tensors whose functions note what they are launched with."""

    num_sms, capability = 4, (9, 0)

    def __init__(self) -> None:
        self.asked: list[KernelPlan] = []
        """Plans of functions, in the order in which they were asked for."""
        self.launched: list[tuple[Any, tuple[Any, ...]]] = []
        self.refuses: Callable[..., Any] = lambda *_: False
        """Whether functions raise in place of a launch of such arguments."""

    def cluster_capacity(self, threads: int, smem_bytes: int) -> Mapping[int, int]:
        """Pairs."""
        return {1: 4, 2: 2}

    def function(self, spec: KernelSpec, plan: KernelPlan) -> Callable[..., Any]:
        """Launches nothing."""
        self.asked.append(plan)

        def launch(*arguments: Any) -> None:
            if self.refuses(*arguments):
                raise ValueError("Misaligned Tensor data on argument #2")
            self.launched.append((plan, arguments))

        return launch

    def launch_triton(self, kernel: Any, grid: Any, arguments: Any, **options: Any) -> None:
        """Launches nothing."""
        self.launched.append((kernel.__name__, (grid, *arguments, *options.items())))

    def explain(self, choice: Explain) -> None:
        """Nobody asks."""

    def launching(self) -> nullcontext[None]:
        """The device is there."""
        return nullcontext()

    def on_device(self, serve: Callable[..., Any]) -> Callable[..., Any]:
        """As it is."""
        return serve

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """On the CPU."""
        return torch.empty(shape, dtype=dtype)

    def allocator(self, *shape: int, dtype: torch.dtype) -> Callable[[], Tensor]:
        """On the CPU."""
        return partial(self.empty, *shape, dtype=dtype)

    def workspace(self, key: int, allocate: Allocate, counters: int = 0) -> tuple[Any, ...]:
        """New each time."""
        zeros = (torch.zeros(counters, dtype=torch.int32),) if counters else ()
        return (*zeros, *allocate(self))


def keys_and_queries(dtype: torch.dtype = torch.float8_e4m3fn) -> TopkPrefillOperands:
    """Five queries of 16 heads, 40 keys, topk 7."""
    fp8 = dtype is torch.float8_e4m3fn
    return TopkPrefillOperands(
        torch.randn(5, 16, 128).to(dtype),
        torch.randn(40, 128).to(dtype),
        torch.randn(5, 16),
        torch.randint(0, 41, (5,), dtype=torch.int32),
        torch.empty(5, 7, dtype=torch.int32),
        None,
        torch.rand(40) if fp8 else None,
    )


def same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether they are the same objects, or equal numbers."""
    return all(x is y or x == y for x, y in zip(some, others, strict=True))


def misaligned(x: Tensor) -> Tensor:
    """The same values, four bytes behind an address that a kernel can read 16 bytes from."""
    room = torch.empty(x.nbytes + 16, dtype=torch.uint8)
    return room[4:][: x.nbytes].view(x.dtype).view(x.shape).copy_(x)


def test_a_bound_prefill_asks_for_its_kernel_once_and_takes_other_tensors() -> None:
    runner = Pretended()
    serve = prefill.bind(runner, keys_and_queries(), sorted=False)
    for _ in range(2):
        x = keys_and_queries()
        serve(tuple(x))
        plan, (q, k, scale, weights, starts, ends, ids, workspace, num_sms) = runner.launched.pop()
        assert same((q, k, weights, ends, ids), x[:5]) and scale is x.k_scale
        assert starts.shape == (0,) and starts.dtype is torch.int32
        assert workspace.shape == (4, plan.workspace_words) and num_sms == 4
    assert runner.asked == [plan] and not plan.scores_only


def test_what_lies_at_another_address_is_copied_when_it_does() -> None:
    """Guards do not see addresses: the call that was bound had all tensors aligned."""
    runner = Pretended()
    x = keys_and_queries()
    serve = prefill.bind(runner, x, sorted=False)
    moved = x._replace(k_scale=misaligned(x.k_scale), weights=misaligned(x.weights))
    for given in (x, moved):
        serve(given)
        _, (q, k, scale, weights, *_) = runner.launched[-1]
        assert all(each.data_ptr() % 16 == 0 for each in (q, k, scale, weights))
        assert torch.equal(scale, x.k_scale) and torch.equal(weights, x.weights)


def test_gaps_are_closed_and_ranges_passed_on() -> None:
    runner = Pretended()
    x = keys_and_queries(torch.bfloat16)
    starts = torch.zeros(5, 2, dtype=torch.int32)[:, 0]
    weights = torch.randn(5, 32)[:, ::2]
    x = x._replace(starts=starts, weights=weights)
    prefill.bind(runner, x, sorted=False)(x)
    _, (_, _, no_scale, dense, given_starts, *_) = runner.launched[-1]
    assert dense.is_contiguous() and torch.equal(dense, weights)
    assert given_starts.is_contiguous() and given_starts.shape == (5,)
    assert no_scale.shape == (0,)


def test_by_score_the_lists_are_sorted_with_the_scores_that_came_with_them() -> None:
    runner = Pretended()
    x = keys_and_queries()
    prefill.bind(runner, x, sorted=True)(x)
    (score, scored), (_, ranked), (_, (ids, words)) = runner.launched
    assert score.scores_only and scored[6] is ranked[0] and scored[6].shape == (5, 40)
    assert words.shape == ids.shape and any(each is words for each in ranked)


@pytest.mark.parametrize("empty", ["queries", "keys"])
def test_without_keys_or_queries_nothing_is_launched(empty: str) -> None:
    runner, x = Pretended(), keys_and_queries()
    if empty == "queries":
        x = x._replace(**{name: getattr(x, name)[:0] for name in ("q_index", "weights", "ends")})
        x = x._replace(topk_indices=x.topk_indices[:0])
    else:
        x = x._replace(k_index=x.k_index[:0], k_scale=x.k_scale[:0])
    prefill.bind(runner, x, sorted=False)(x)
    scores = prefill.bind_logits(runner, x.inputs)(x.inputs)
    assert (x.topk_indices == -1).all() and scores.numel() == 0
    assert runner.launched == []


def test_ids_with_gaps_are_written_without_and_copied() -> None:
    runner = Pretended()
    x = keys_and_queries()._replace(topk_indices=torch.empty(5, 9, dtype=torch.int32)[:, :7])
    prefill.bind(runner, x, sorted=False)(x)
    ids = runner.launched[0][1][6]
    assert ids.is_contiguous() and torch.equal(ids, x.topk_indices)


def test_a_call_that_is_bound_while_values_are_checked_checks_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLASHDSA_CHECK", "1")
    runner, x = Pretended(), keys_and_queries()
    calls = [
        (prefill.bind(runner, x, sorted=False), tuple(x)),
        (prefill.bind_logits(runner, x.inputs), tuple(x.inputs)),
    ]
    for number, (serve, given) in enumerate(calls, 1):
        x.ends[0] = 7
        serve(given)
        assert len(runner.launched) == number
        x.ends[0] = 41
        with pytest.raises(ArgumentValueError, match=r"ends: expected values in .*ends\[0\] = 41"):
            serve(given)
        assert len(runner.launched) == number


def test_scores_are_new_and_empty_outside_what_the_kernel_writes() -> None:
    runner, x = Pretended(), keys_and_queries()
    serve = prefill.bind_logits(runner, x.inputs)
    first, second = (serve(PrefillOperands(*x.inputs)) for _ in range(2))
    assert first is not second and (first == -torch.inf).all()
    assert same([arguments[6] for _, arguments in runner.launched], (first, second))


def attention(queries: int, heads: int, **changed: Any) -> SparseMlaOperands:
    """100 rows, 70 slots a query."""
    operands = SparseMlaOperands(
        torch.randn(queries, heads, 576).bfloat16(),
        torch.randn(100, 576).bfloat16(),
        torch.randint(0, 100, (queries, 70), dtype=torch.int32),
    )
    return operands._replace(**changed)


OPTIONS: dict[str, Any] = {"d_v": 512, "sm_scale": 0.5, "max_logits": False}


@pytest.fixture
def groups_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of few queries are grouped as those of many."""
    quick = replace(sparse_mla_ways.SPARSE_MLA, group_lists=0.0)
    monkeypatch.setattr(sparse_mla_ways, "SPARSE_MLA", quick)


@pytest.mark.usefixtures("groups_cost_nothing")
@pytest.mark.parametrize(("queries", "heads"), [(2, 64), (20, 64), (20, 16)])
def test_a_bound_forward_gives_new_results_of_other_tensors(queries: int, heads: int) -> None:
    """By the decode, the forward, the forward in groups."""
    runner = Pretended()
    serve = sparse_mla.bind(runner, attention(queries, heads), **OPTIONS)
    kept: list[Tensor] = []
    for _ in range(2):
        x = attention(queries, heads)
        out, lse, largest = serve(tuple(x))
        ((_, arguments),) = runner.launched
        runner.launched.clear()
        of_call = Operands(*arguments[:8])
        assert same(of_call, (*x[:3], of_call.topk_length, of_call.attn_sink, out, lse, 0.5))
        assert of_call.topk_length.shape == of_call.attn_sink.shape == largest.shape == (0,)
        assert out.shape == (queries, heads, 512) and lse.shape == (queries, heads)
        kept += [out, lse, largest]
    assert len({id(one) for one in kept}) == 6 and len(runner.asked) == 1


def test_buffers_of_the_caller_must_be_writable_each_time() -> None:
    runner, x = Pretended(), attention(2, 64)
    out, lse = torch.empty(2, 64, 512).bfloat16(), torch.empty(2, 64)
    operands = SparseMlaOutOperands(*x[:3], out, lse)
    serve = sparse_mla.bind_out(runner, operands, sm_scale=0.5)
    serve(tuple(operands))
    assert same(runner.launched[0][1][5:7], (out, lse))
    with pytest.raises(ArgumentValueError, match="out: expected an address"):
        serve(operands._replace(out=misaligned(out)))
    assert len(runner.launched) == 1


def last_numbers(keys: int) -> tuple[int, int]:
    """`spread` and `clears` of a launch of the index backward with so many keys, one group."""
    runner = Pretended()
    x = IndexerBwdOperands(
        torch.zeros(3, 16, 128).bfloat16(),
        torch.zeros(keys, 128).bfloat16(),
        torch.zeros(3, 16),
        torch.zeros(3, 70, dtype=torch.int32),
        torch.zeros(3, 70),
        None,
    )
    indexer_bwd.bind(runner, x, deterministic=False, dk_dtype=torch.float32)(x)
    ((_, (*_, spread, _, clears)),) = runner.launched
    return spread, clears


@pytest.mark.parametrize(("keys", "spread"), [(55_296, 5), (55_297, 0)])
def test_ctas_begin_apart_where_the_cache_holds_what_they_add_to(keys: int, spread: int) -> None:
    assert last_numbers(keys)[0] == spread


@pytest.mark.parametrize(("keys", "clears"), [(256, 1), (257, 0)])
def test_the_kernel_of_the_lists_clears_few_rows_of_each_group(keys: int, clears: int) -> None:
    assert last_numbers(keys)[1] == clears


@pytest.mark.parametrize(
    ("heads", "queries", "topk", "queries_of_a_group"),
    [
        (64, 664, 256, 2),
        (64, 2048, 2048, 2),
        (64, 4096, 2048, 4),
        (64, 400, 20_000, 2),
        (32, 4096, 2048, 4),
    ],
)
def test_groups_are_chosen_between_where_that_pays(
    heads: int, queries: int, topk: int, queries_of_a_group: int
) -> None:
    """Not with few slots, few queries or few heads, whose only groups have 128 rows."""
    plan = indexer_bwd.plan_for(heads, queries, topk, 132)
    assert plan.queries == queries_of_a_group
    assert plan.chosen == (heads == 64 and queries_of_a_group == 4)


def pages_and_rows(rows: int = 2, dtype: torch.dtype = torch.uint8) -> TopkIndexerOperands:
    """Rows of 64 heads over pages of their own, topk 2048."""
    return TopkIndexerOperands(
        torch.randn(rows, 64, 128).to(torch.float8_e4m3fn),
        torch.zeros(6, 64, 1, 132, dtype=dtype),
        torch.randn(rows, 64),
        torch.full((rows,), 100, dtype=torch.int32),
        torch.zeros(rows, 5, dtype=torch.int32)[:, :2],
        torch.empty(rows, 2048, dtype=torch.int32),
    )


INDEXER_OPTIONS: dict[str, Any] = {
    "sorted": True, "positions": False, "table_page_size": 64, "check": True,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8], ids=str)
def test_a_bound_indexer_takes_other_tensors_and_pages_of_either_byte(dtype: torch.dtype) -> None:
    runner = Pretended()
    serve = indexer.bind(runner, pages_and_rows(dtype=dtype), **INDEXER_OPTIONS)
    for _ in range(2):
        x = pages_and_rows(dtype=dtype)
        serve(tuple(x))
        (_, fused), (_, order) = runner.launched
        runner.launched.clear()
        q, cache, weights, *rest = fused
        assert same((q, weights, *rest[:3]), (x[0], *x[2:6])) and len(rest) == 7
        assert same(order, rest[2:4])
        assert cache.dtype is torch.uint8 and cache.data_ptr() == x[1].data_ptr()
    assert len(runner.asked) == 2


@pytest.mark.parametrize(
    ("kernels", "entry", "apart", "step"),
    [(indexer, 64, 8456, 16), (indexer, 64, 4224, 16), (blackwell, 1, 8448 + 16, 128)],
    ids=["no step of TMA", "pages overlap", "no row of another page"],
)
def test_pages_that_kernels_cannot_read_are_refused_before_one_is_asked_for(
    kernels: Any, entry: int, apart: int, step: int
) -> None:
    runner, x = Pretended(), pages_and_rows()
    cache = torch.zeros(6 * apart + 8448, dtype=torch.uint8)
    x = x._replace(k_index_cache_fp8=cache.as_strided((6, 64, 1, 132), (apart, 132, 132, 1)))
    expected = rf"k_index_cache_fp8: .* of {step} bytes .* strides \[{apart}, 132, 132, 1\]"
    with pytest.raises(UnsupportedError, match=expected):
        kernels.bind(runner, x, **{**INDEXER_OPTIONS, "table_page_size": entry})
    assert not runner.asked
    one = x._replace(k_index_cache_fp8=x.k_index_cache_fp8[:1])  # of which nobody steps
    kernels.bind(runner, one, **{**INDEXER_OPTIONS, "table_page_size": entry})(one)
    assert runner.launched[0][1][1].stride() == (8448, 132, 132, 1)


def test_a_bound_indexer_looks_at_addresses_and_values_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, x = Pretended(), pages_and_rows()
    serve = indexer.bind(runner, x, **INDEXER_OPTIONS)
    runner.refuses = lambda *given: any(one.data_ptr() % 16 for one in given[:3])
    serve(x._replace(weights=misaligned(x.weights)))
    assert torch.equal(runner.launched[-2][1][2], x.weights)
    with pytest.raises(UnsupportedError, match=r"k_index_cache_fp8: .* at a multiple of 16; got"):
        serve(x._replace(k_index_cache_fp8=misaligned(x.k_index_cache_fp8)))
    runner.refuses = lambda *_: True
    with pytest.raises(ValueError, match="argument #2"):
        serve(x)
    runner.refuses = lambda *_: False
    x.seq_lens[1] = 129
    serve(x)
    monkeypatch.setenv("FLASHDSA_CHECK", "1")
    checking = indexer.bind(runner, x, **INDEXER_OPTIONS)
    with pytest.raises(ArgumentValueError, match=r"seq_lens\[1\] = 129|block_table"):
        checking(x)
    assert len(runner.launched) == 4  # two calls, two launches each


def test_a_bound_indexer_without_pages_writes_that_there_are_none() -> None:
    runner, x = Pretended(), pages_and_rows()
    x = x._replace(k_index_cache_fp8=x.k_index_cache_fp8[:0])
    indexer.bind(runner, x, **INDEXER_OPTIONS)(x)
    assert (x.topk_indices == -1).all() and runner.launched == []
