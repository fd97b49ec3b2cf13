"""Two rows of a request scored together, on ptxemu: the CPU backend's ids, bit for bit, no errors.

Scores are exact in any order of additions (see exact_inputs.py), so the ids must be equal.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

from flashdsa.backends.emulated import devices
from flashdsa.backends.emulated.runner import emulation
from flashdsa.backends.indexer import launch as launches
from flashdsa.backends.indexer.choice import Kind, Way
from flashdsa.dispatch.registration import custom_op
from flashdsa.kernels.indexer.plan import By
from flashdsa.kernels.indexer.sm90.plan import IndexerPlan, LogitsPlan
from flashdsa.ops.indexer import DSA_TOPK_INDEXER
from tests.kernels.indexer.exact_inputs import make_requests

pytestmark = pytest.mark.usefixtures("lines")

LATER = pytest.mark.slow


@pytest.mark.parametrize(
    ("lengths", "next_n", "of_calls"),
    [
        ([2100, 2101, 5, 0, 6000, 5900], 2, (64, 2048, "slot")),
        pytest.param([2100, 2101, 2049, 2048], 2, (32, 2048, "position"), marks=LATER),
        pytest.param([0, 700, 5, 513, 590, 1500, 701, 90], 4, (16, 512, "slot"), marks=LATER),
        pytest.param([1100, 1025, 3000, 0], 4, (32, 1024, "slot"), marks=LATER),
        ([0, 700, 5, 530], 2, (16, 100, "sorted")),
    ],
    ids=["3 x 2", "positions", "2 x 4", "1 x 4", "sorted"],
)
@pytest.mark.parametrize(
    ("values", "bad_pages"),
    [
        ("random", False),
        ("nan", True),
        *(pytest.param(*one, marks=LATER) for one in (("two", True), ("crowded", False))),
    ],
)
def test_the_public_operation_scores_and_ranks_by_two_launches(
    lengths: list[int],
    next_n: int,
    of_calls: tuple[int, int, str],
    values: str,
    bad_pages: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fewer tokens than topk may be left where pages are bad."""
    monkeypatch.setattr(launches, "choose", lambda *_: Way(Kind.RANKED))
    heads, topk, kind = of_calls
    inputs = make_requests(lengths, num_heads=heads, next_n=next_n, values=values)
    if bad_pages:
        inputs.block_table[:, ::3] = -1
    ids = [inputs.output(topk) for _ in range(2)]
    rank = custom_op(DSA_TOPK_INDEXER)
    how = None, kind == "sorted", kind == "position", 64, 1, False
    rank(*inputs, ids[0], *how, "cpu")
    with emulation(devices.SMALL) as emulator:
        rank(*inputs, ids[1], *how, "emulate-sm90")
    assert torch.equal(*ids)
    assert not any(counts.any() for (counts,) in emulator.workspaces.values())


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (lambda: IndexerPlan(rows=By.PAIRS, stages=16), "for a launch that ranks them"),
        (lambda: LogitsPlan(rows=By.PAIRS), "pairs are scored for a launch that ranks them"),
        (lambda: LogitsPlan(rows=By.PAIRS, ranked=True, stages=12), "a power of two"),
    ],
    ids=["fused", "not ranked", "stages"],
)
def test_plans_that_cannot_work_are_refused(plan: Callable[[], IndexerPlan], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan()
