"""Lists in the order of their scores on ptxemu: as a stable sort has them, nothing found."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashdsa.backends.emulated.runner import emulation
from flashdsa.kernels.catalog import PREFILL_ORDER
from flashdsa.kernels.indexer.sm90.order.plan import OrderPlan

LATER = pytest.mark.slow


def make_scores(pattern: str, topk: int) -> Tensor:
    """Of three lists, (3, topk) fp32; NaN among them with "nan"."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, topk, generator=generator)
    if pattern == "plateaus":
        scores = (scores * 2).round() + 0.0
    if pattern == "close":
        # Neighbours of 1.0, which the distance from a far one to the best cannot tell apart.
        steps = torch.randint(0, 4000, (3, topk), generator=generator)
        scores = 1 + steps * torch.finfo(torch.float32).eps
        scores[:, :2] = torch.tensor([1e9, -1e9])
    if pattern == "nan":
        scores[:, ::7] = torch.nan
    return scores


@pytest.mark.parametrize(
    ("pattern", "topk"),
    [
        ("close", 300),
        ("nan", 40),
        pytest.param("plateaus", 512, marks=LATER),
        pytest.param("random", 1000, marks=LATER),
        pytest.param("random", 2048, marks=LATER),
        pytest.param("nan", 2048, marks=LATER),
        pytest.param("close", 2048, marks=LATER),
        pytest.param("random", 1, marks=LATER),
    ],
)
def test_lists_are_in_the_order_of_their_scores(pattern: str, topk: int) -> None:
    """The first is full, the second has a few entries, the third none."""
    from flashdsa.kernels.indexer.sm90.prefill.entries import INVALID, NAN  # needs CuTe DSL

    scores = make_scores(pattern, topk)
    lengths = torch.tensor([topk, topk // 3, 0])
    valid = torch.arange(topk) < lengths[:, None]
    rows = torch.arange(3 * topk, dtype=torch.int32).view(3, topk) * 5
    rows = torch.where(valid, rows, -1)
    words = torch.where(scores.isnan(), NAN, scores.view(torch.int32))
    words = torch.where(valid, words, INVALID).int()
    expected = rows.clone()
    for i, length in enumerate(lengths):
        ranked = scores[i, :length].nan_to_num(nan=-torch.inf).sort(descending=True, stable=True)
        expected[i, :length] = rows[i, ranked.indices]
    plan = OrderPlan(next(width for width in (512, 1024, 2048) if width >= topk))
    with emulation() as runner:
        order = runner.function(PREFILL_ORDER, plan)
        with runner.launching():
            order(rows, words)
    assert torch.equal(rows, expected)
    assert runner.findings == []


def test_a_width_that_no_list_has_is_refused() -> None:
    with pytest.raises(ValueError, match="width: expected one of"):
        OrderPlan(300)
