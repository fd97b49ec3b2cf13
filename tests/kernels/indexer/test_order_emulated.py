"""Lists in the order of their scores on ptxemu: as a stable sort has them, nothing found."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="needs CuTe DSL, which compiles the kernel")

from flashdsa.kernels.indexer.order.plan import OrderPlan
from flashdsa.kernels.indexer.select import sort_keys as keys
from flashdsa.verify.compare import failures
from workbench.small_calls import direct
from workbench.small_calls.call import emulator_of
from workbench.small_calls.direct import Order

LATER = pytest.mark.slow


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
    call = Order(topk, pattern)
    runner = emulator_of(call)
    assert failures(call.judge(runner)) == []
    assert runner.findings == []


def test_words_are_the_kernel_s() -> None:
    assert (direct.INVALID, direct.NAN) == (keys.INVALID, keys.NAN)


def test_a_width_that_no_list_has_is_refused() -> None:
    with pytest.raises(ValueError, match="width: expected one of"):
        OrderPlan(300)
