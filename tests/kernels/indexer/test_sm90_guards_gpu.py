"""The Hopper indexer on a GPU: guarded buffers, checks, and what errors say.

Scores are exact in any order of additions (see exact_inputs.py), so that torch's stable sort of
them is the answer, id for id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import flashdsa
from tests.kernels.indexer.exact_ids import expected_ids, select
from tests.kernels.indexer.exact_inputs import EDGES, Inputs, make_inputs
from tests.support.hopper_gpu import HOPPER_GPU

pytestmark = HOPPER_GPU
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


@pytest.fixture
def checking(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FLASHDSA_CHECK", "1")
    yield


@pytest.mark.usefixtures("checking")
@pytest.mark.parametrize(
    ("operand", "place", "value", "message"),
    [
        ("seq_lens", (1,), -1, r"seq_lens: expected values >= 0; got seq_lens\[1\] = -1"),
        ("seq_lens", (0,), 9999, r"block_table: expected at least 157 pages for seq_lens\[0\]"),
        ("block_table", (1, 2), -3, r"block_table: expected page ids .* block_table\[1, 2\] = -3"),
        ("block_table", (0, 46), 500, r"got block_table\[0, 46\] = 500"),
    ],
)
def test_checking_names_the_first_bad_value(
    operand: str, place: tuple[int, ...], value: int, message: str
) -> None:
    inputs = make_inputs([3000, 200]).to("cuda")
    getattr(inputs, operand)[place] = value
    ids = inputs.output(2048)
    with pytest.raises(ValueError, match=message):
        flashdsa.dsa_topk_indexer(*inputs, ids)
    assert (ids == -99).all()


@pytest.mark.usefixtures("checking")
def test_checking_passes_good_input_and_padding_of_the_table() -> None:
    inputs = make_inputs([3000, 200]).to("cuda")
    assert (inputs.block_table < 0).any()
    assert torch.equal(select(inputs, 2048), expected_ids(inputs, 2048))


def test_gaps_and_unaligned_addresses_are_named() -> None:
    inputs = make_inputs([3000, 200]).to("cuda")
    cache = inputs.k_index_cache_fp8
    shifted = torch.zeros(cache.nbytes + 4, dtype=torch.uint8, device="cuda")[4:].view(cache.shape)
    strided = torch.zeros(2, 2 * 47, dtype=torch.int32, device="cuda")[:, ::2]
    for change, kind, message in (
        ({"k_index_cache_fp8": shifted}, NotImplementedError, "k_index_cache_fp8: .* of 16; got"),
        ({"block_table": strided}, ValueError, "block_table: .* contiguous"),
    ):
        with pytest.raises(kind, match=message):
            select(inputs._replace(**change), 2048)


def test_auto_takes_this_kernel_and_other_sizes_say_why_not() -> None:
    inputs = make_inputs([3000]).to("cuda")
    ids = inputs.output(2048)
    flashdsa.warm_up("dsa_topk_indexer")
    flashdsa.dsa_topk_indexer(*inputs, ids)
    assert torch.equal(ids, expected_ids(inputs, 2048))
    with pytest.raises(NotImplementedError, match="sm90: topk: takes 1 to 2048; got 2049"):
        flashdsa.dsa_topk_indexer(*inputs, inputs.output(2049))
