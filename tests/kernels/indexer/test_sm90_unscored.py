"""Rows that need no scores, on ptxemu: every token of every row, id for id, nothing found."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

import flashdsa
from flashdsa.backends.emulated import devices
from flashdsa.backends.emulated.runner import Emulator, emulation
from flashdsa.kernels.catalog import INDEXER_UNSCORED
from flashdsa.kernels.indexer.plan import MOST_PAGES, most_pages
from tests.kernels.indexer.exact_inputs import Inputs, make_inputs

LENGTHS = [0, 1, 63, 64, 65, 127, 128, 447, 448, 512]
TOO_FEW, TOO_MANY = -5, 2**31 - 1


def write_all(inputs: Inputs, topk: int, *, positions: bool = False) -> torch.Tensor:
    """One checked launch of the kernel."""
    runner, ids = Emulator(), inputs.output(topk)
    function = runner.function(INDEXER_UNSCORED, INDEXER_UNSCORED.plan)
    with runner.launching():
        pages = len(inputs.k_index_cache_fp8)
        function(inputs.seq_lens, inputs.block_table, ids, pages, int(not positions))
    assert runner.findings == []
    return ids


def every_token(inputs: Inputs, topk: int, *, positions: bool = False) -> torch.Tensor:
    """The contract, row by row."""
    ids, (requests, width) = inputs.output(topk, fill=-1), inputs.block_table.shape
    next_n = len(ids) // requests
    for row, length in enumerate(inputs.seq_lens.tolist()):
        tokens = torch.arange(min(max(length, 0), 64 * width))
        page = inputs.block_table[row // next_n, tokens // 64]
        slots = tokens if positions else page * 64 + tokens % 64
        cached = slots[(page >= 0) & (page < len(inputs.k_index_cache_fp8))]
        ids[row, : len(cached)] = cached.int()
    return ids


@pytest.mark.parametrize("positions", [False, True], ids=["slots", "positions"])
@pytest.mark.parametrize("topk", [512, 600])
def test_rows_of_all_lengths(topk: int, positions: bool) -> None:
    """Also of fewer tokens than none and of more than the table has room for."""
    inputs = make_inputs(LENGTHS, num_heads=16)
    inputs.seq_lens[1], inputs.seq_lens[-1] = TOO_FEW, TOO_MANY
    got = write_all(inputs, topk, positions=positions)
    assert torch.equal(got, every_token(inputs, topk, positions=positions))


@pytest.mark.parametrize("positions", [False, True], ids=["slots", "positions"])
def test_tokens_of_bad_pages_are_passed_over(positions: bool) -> None:
    """The first page, one in the middle, the last, which is not full, all of a row."""
    inputs = make_inputs([300, 300, 300, 130, 0, 256], num_heads=16)
    inputs.block_table[0, 0] = inputs.block_table[1, 2] = -1
    inputs.block_table[2, 4] = len(inputs.k_index_cache_fp8)
    inputs.block_table[3] = 1 << 30
    got = write_all(inputs, 512, positions=positions)
    assert torch.equal(got, every_token(inputs, 512, positions=positions))
    assert (got[3] == -1).all()


@pytest.mark.parametrize("next_n", [2, 3])
def test_queries_of_a_request_have_its_pages(next_n: int) -> None:
    rows = make_inputs([400] * 3 * next_n, num_heads=16)
    rows.seq_lens[:: next_n + 1] = 130
    rows = rows._replace(block_table=rows.block_table[::next_n].contiguous())
    assert torch.equal(write_all(rows, 512), every_token(rows, 512))


def test_the_widest_table_with_rows_apart() -> None:
    """2,048 tokens, a page a lane."""
    inputs = make_inputs([2048, 2047, 1985], num_heads=16)
    wide = torch.nn.functional.pad(inputs.block_table, (0, 5), value=1 << 30)
    inputs = inputs._replace(block_table=wide[:, :MOST_PAGES])
    assert inputs.block_table.stride(0) == MOST_PAGES + 5
    assert torch.equal(write_all(inputs, 2048), every_token(inputs, 2048))


def test_no_wider_table_is_served() -> None:
    assert [most_pages(topk) for topk in (63, 64, 600, 2048, 4096)] == [0, 1, 9, 32, 32]


@pytest.mark.parametrize(
    ("topk", "pages", "by_score", "narrow"),
    [
        (512, 8, False, True),
        (512, 9, False, False),
        (600, 9, False, True),
        (600, 10, False, False),
        (512, 8, True, False),
    ],
)
def test_the_operation_takes_it_for_narrow_tables(
    topk: int, pages: int, by_score: bool, narrow: bool
) -> None:
    """Not where scores decide on the order."""
    inputs = make_inputs([70, 500, 0], num_heads=16)
    more = pages - inputs.block_table.shape[1]
    table = torch.nn.functional.pad(inputs.block_table, (0, more))
    expected, got = inputs.output(topk), inputs.output(topk)
    operands = inputs._replace(block_table=table)
    flashdsa.dsa_topk_indexer(*operands, expected, sorted=by_score, backend="cpu")
    with emulation(devices.SMALL) as emulator:
        flashdsa.dsa_topk_indexer(*operands, got, sorted=by_score, backend="emulate-sm90")
    assert torch.equal(got.sort().values, expected.sort().values)
    assert ("unscored_kernel" in emulator.setups[0].kernel) == narrow
