"""Small kernels beside Hopper's attention on ptxemu: sinks, padding, packed sums, ends of lists."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")

import cutlass
from cutlass import Float32, cute
from cutlass.cute.runtime import from_dlpack

import flashdsa
from flashdsa.backends.cpu.sparse_mla import sink_backward
from flashdsa.backends.emulated.devices import H200
from flashdsa.backends.emulated.runner import Emulator, running_on
from flashdsa.backends.recorder import Recorder
from flashdsa.kernels.attention.sm90.bwd_per_item.slot_sums import (
    NOTHING,
    NUMBERS,
    WORDS,
    add_packed,
    pack_eight,
)
from flashdsa.kernels.catalog import MLA_BWD_PADDED_HEADS, MLA_BWD_SINK, SPARSE_MLA_USED_SLOTS
from ptxemu.cutedsl import emulate

INFINITE = float("inf")


def gradient(lse: torch.Tensor, sink: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """What the kernel writes; the check finds nothing."""
    emulator = Emulator()
    found = torch.full_like(sink, float("nan"))
    with emulator.launching():
        emulator.function(MLA_BWD_SINK, MLA_BWD_SINK.plan)(lse, sink, delta, found)
    return found


@pytest.mark.parametrize(("queries", "heads"), [(1100, 10), (129, 16), (1, 3)])
def test_every_query_counts_once(queries: int, heads: int) -> None:
    """Turns of a thread, rows of a turn, heads of a CTA: whole ones, and one of each in part."""
    generator = torch.Generator().manual_seed(0)
    lse, delta = (torch.randn(queries, heads, generator=generator) for _ in range(2))
    lse, sink = lse * 9, torch.randn(heads, generator=generator) * 9
    lse[queries // 2] = INFINITE
    delta[queries // 2] = 0.0
    _, expected = sink_backward(*(x.double() for x in (lse, sink, delta)))
    near = 2e-7 * delta.abs().sum(0) + 1e-6 * expected.abs()
    assert ((gradient(lse, sink, delta).double() - expected).abs() <= near).all()


def test_what_is_not_finite_stays_in_its_head_and_infinite_sinks_have_no_gradient() -> None:
    lse, delta = torch.zeros(5, 6), torch.ones(5, 6)
    sink = torch.tensor([INFINITE, -INFINITE, float("nan"), 0.0, 0.0, 0.0])
    delta[2, :2] = float("nan")  # a query's O that is not finite
    lse[1, 3], delta[3, 4] = float("nan"), INFINITE
    found = gradient(lse, sink, delta)
    assert (found[:2] == 0.0).all() and found[2:4].isnan().all()
    assert found[4] == -INFINITE and found[5] == -2.5


@pytest.mark.parametrize(
    ("queries", "heads", "first", "count", "padded", "d_qk"),
    [
        (3, 8, 0, 8, 16, 576),
        (5, 24, 0, 24, 32, 512),
        (2, 136, 128, 8, 8, 576),
        (1, 3, 0, 3, 8, 512),
    ],
)
def test_heads_are_copied_and_padding_adds_nothing(
    queries: int, heads: int, first: int, count: int, padded: int, d_qk: int
) -> None:
    generator = torch.Generator().manual_seed(heads)
    rows = queries, heads
    given = [torch.randn(*rows, d, generator=generator).bfloat16() for d in (d_qk, 512, 512)]
    given.append(torch.randn(*rows, generator=generator))
    given[0][0, first, 0] = float("nan")
    found = [torch.full_like(x[:, :1], -7.0).repeat_interleave(padded, 1) for x in given]
    emulator = Emulator()
    with emulator.launching():
        pad = emulator.function(MLA_BWD_PADDED_HEADS, MLA_BWD_PADDED_HEADS.plan)
        pad(*given, *found, first, count)
    for x, empty, to in zip(given, (0.0, 0.0, 0.0, float("inf")), found, strict=True):
        own = x[:, first : first + count]
        assert torch.equal(to[:, :count].nan_to_num(9.0), own.nan_to_num(9.0))
        assert (to[:, count:] == empty).all()


THREADS = 64
NAN, INF = float("nan"), float("inf")
TINY = 2.0**-126


@cute.kernel
def round_trip_kernel(source: cute.Tensor, total: cute.Tensor, packed: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    words = pack_eight([source[thread, i] for i in range(NUMBERS)])
    for i in cutlass.range_constexpr(WORDS):
        packed[thread, i] = words[i]
    sums = add_packed([Float32(total[thread, i]) for i in range(NUMBERS)], words)
    for i in cutlass.range_constexpr(NUMBERS):
        total[thread, i] = sums[i]


@cute.jit
def round_trip(source: cute.Tensor, total: cute.Tensor, packed: cute.Tensor):
    """total += source, by way of packed."""
    round_trip_kernel(source, total, packed).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))


def inputs() -> torch.Tensor:
    """Rows of eight: of all sizes, near a power of two, zeros, the smallest, and not finite."""
    torch.manual_seed(0)
    x = torch.randn(THREADS, NUMBERS) * 2.0 ** torch.randint(-90, 90, (THREADS, 1))
    x[1] *= 2.0 ** torch.arange(0, -NUMBERS, -1)
    x[2] = 2.0 - 2.0 ** -torch.arange(1.0, 1 + 3 * NUMBERS, 3)
    x[3] = -x[2]
    x[4] = 0.0
    x[5] = 2.0**-118 * torch.arange(NUMBERS)
    x[6] = TINY
    x[7, 3], x[8, 0], x[9, 7] = NAN, INF, -INF
    return x


def test_it_is_off_by_a_2_to_the_10th_of_the_largest_at_most() -> None:
    x = inputs()
    total, packed = torch.zeros(THREADS, NUMBERS), torch.zeros(THREADS, WORDS, dtype=torch.int32)
    with emulate():
        round_trip(*(from_dlpack(t) for t in (x, total, packed)))
    bad = ~x.isfinite().all(1)
    assert bad.sum() == 3 and total[bad].isnan().all()
    kept, got = x[~bad].double(), total[~bad].double()
    largest = kept.abs().amax(1, keepdim=True)
    # A row of the smallest numbers has steps of its own.
    assert bool(((got - kept).abs() <= (largest * 2.0**-10).clamp_min(2.0**-127)).all())
    assert packed[4].tolist() == list(NOTHING)


def test_it_is_added_and_rounded_once() -> None:
    torch.manual_seed(1)
    x, first = torch.randn(THREADS, NUMBERS), torch.randn(THREADS, NUMBERS)
    packed = torch.zeros(THREADS, WORDS, dtype=torch.int32)
    alone, total = torch.zeros_like(x), first.clone()
    with emulate():
        round_trip(*(from_dlpack(t) for t in (x, alone, packed)))
        round_trip(*(from_dlpack(t) for t in (x, total, packed)))
    assert torch.equal(total, first + alone)


EVERY = torch.empty(0, dtype=torch.int32)


def found(
    ids: Tensor, lengths: Tensor, rows: int, extra: tuple[Tensor, Tensor, int] | None = None
) -> tuple[list[int], list[int]]:
    """What the kernel writes of both sources; the check finds nothing."""
    emulator = Emulator()
    used = ids.new_full((len(ids),), -9)
    of_extra = EVERY if extra is None else used.clone()
    more = extra or (ids[:, :0].contiguous(), EVERY, 0)
    with emulator.launching():
        function = emulator.function(SPARSE_MLA_USED_SLOTS, SPARSE_MLA_USED_SLOTS.plan)
        function(ids, lengths, rows, used, *more, of_extra)
    return used.tolist(), of_extra.tolist()


def expected(ids: Tensor, lengths: Tensor, rows: int) -> list[int]:
    """Likewise, a list at a time."""
    every = []
    for query, line in enumerate(ids.tolist()):
        length = min(max(int(lengths[query]), 0), len(line)) if len(lengths) else len(line)
        used = [slot for slot, row in enumerate(line[:length], 1) if 0 <= row < rows]
        every.append(max(used, default=0))
    return every


@pytest.mark.parametrize("width", [1, 256, 257, 700])
def test_any_end(width: int) -> None:
    """Lists that end at any slot; ids below 0 and past the rows, lengths below 0 and past the
    list."""
    generator = torch.Generator().manual_seed(width)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    queries, rows = 9, 40
    ids = draw(-2, 50, queries, width)
    slots, ends = torch.arange(width), draw(0, width + 1, queries)
    ends[0], ends[1] = 0, width
    ids.masked_fill_(slots >= ends[:, None], rows if width % 2 else -1)
    lengths = draw(-3, width + 3, queries)
    of_extra = draw(-20, 8, queries, 70)
    main, extra = found(ids, EVERY, rows, (of_extra, lengths, 8))
    assert main == expected(ids, EVERY, rows)
    assert extra == expected(of_extra, lengths, 8)
    assert found(ids, lengths, rows) == (expected(ids, lengths, rows), [])


@pytest.mark.parametrize(
    ("queries", "heads", "topk", "options", "found"),
    [
        (300, 128, 2048, {}, True),
        (1000, 16, 2048, {}, True),
        (300, 128, 2048, {"topk_length": True}, False),
        (8, 128, 2048, {}, False),  # full lists take 22 us
        (8192, 128, 128, {}, False),  # no list has a step to spare
        (300, 128, 2048, {"kv_format": "v32"}, True),
        (300, 128, 512, {"extra": True}, True),
        (300, 128, 512, {"extra": True, "extra_topk_length": True, "topk_length": True}, False),
    ],
)
def test_long_calls_without_lengths_find_ends_first(
    queries: int, heads: int, topk: int, options: dict[str, Any], found: bool
) -> None:
    given, recorder = dict(options), Recorder(H200)
    q, kv = (
        torch.zeros(*shape, 576, dtype=torch.bfloat16) for shape in ((queries, heads), (3000,))
    )
    slots = torch.zeros(queries, topk, dtype=torch.int32)
    if given.pop("extra", False):
        given |= {"extra_kv": kv, "extra_indices": slots}
    if "kv_format" in given:
        kv = flashdsa.quantize_kv(kv)
    for name in [name for name in given if name.endswith("length")]:
        given[name] = slots[:, 0].contiguous()
    with running_on(recorder):
        flashdsa.sparse_mla_fwd(q, kv, slots, backend="emulate-sm90", **given)
    assert ("mla_used_slots" in recorder.launched) is found
    assert len(recorder.launched) > 1 or not found
