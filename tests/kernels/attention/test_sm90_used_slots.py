"""The last slot of each list that names a row, on ptxemu."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernels")

import flashdsa
from flashdsa.backends.emulated.devices import H200
from flashdsa.backends.emulated.runner import Emulator, running_on
from flashdsa.kernels.catalog import SPARSE_MLA_USED_SLOTS
from flashdsa.verify.launch_list import Recorder
from tests.kernels.assembled import assert_it_assembles_without_spills

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


def test_it_needs_no_stack() -> None:
    assert_it_assembles_without_spills(SPARSE_MLA_USED_SLOTS, SPARSE_MLA_USED_SLOTS.plan)


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
