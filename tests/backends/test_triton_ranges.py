"""Ranges by Triton: what they cost follows their lengths, whatever their values, not the rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashdsa
from flashdsa.backends.emulated.devices import small_device
from flashdsa.backends.emulated.runner import emulation, running_on
from flashdsa.backends.triton import attention, attention_bwd
from flashdsa.problem import INT32_MAX
from flashdsa.verify.launch_list import Recorder
from tests.backends.test_triton import BACKEND, kept_kernels

__all__ = ["kept_kernels"]

AMPERE, INT32_MIN = (8, 0), -INT32_MAX - 1
POISONED = 0x7F7F7F7F


class Counter(Recorder):
    """A GPU that runs nothing, counts launches and the bytes of workspaces."""

    def __init__(self) -> None:
        super().__init__(small_device(AMPERE))
        self.launches: list[str] = []
        self.bytes = 0

    def launch_triton(self, kernel: Any, grid: Any, arguments: Any, **options: Any) -> None:
        self.launches.append(kernel.__name__)

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        made = super().empty(*shape, dtype=dtype)
        self.bytes += made.nbytes
        return made


@pytest.mark.parametrize("ordered", [False, True])
def test_launches_of_a_window_do_not_go_with_the_rows(ordered: bool) -> None:
    q, lse = torch.zeros(64, 64, 512).bfloat16(), torch.zeros(64, 64)
    starts = torch.arange(64).int()
    found = []
    for rows in (4096, 65536):
        kv, counter = torch.zeros(1, 512).bfloat16().expand(rows, -1), Counter()
        with running_on(counter):
            flashdsa.mla_bwd(
                *(q, kv, q, lse, q, (starts, starts + 128)),
                backend=BACKEND, deterministic=ordered,
            )  # fmt: skip
        found.append((counter.launches, counter.bytes))
    (few, small), (many, large) = found
    assert small == large
    assert few[:3] == ["row_products", "of_queries", "of_ranges"] == many[:3]
    assert (few[3:], many[3:]) == ((["sum_rows"], []) if ordered else ([], []))


def hostile(queries: int, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Ranges in no order, some outside the rows, some that end before they start."""
    starts = torch.randint(-20, rows + 10, (queries,), generator=generator)
    ends = starts + torch.randint(-20, 60, (queries,), generator=generator)
    starts[:5] = torch.tensor([INT32_MIN, INT32_MIN, INT32_MAX, 30, 40])
    ends[:5] = torch.tensor([INT32_MIN + 5, INT32_MAX, INT32_MIN, 31, 50])
    return starts.int(), ends.int()


@pytest.mark.parametrize("ordered", [False, True])
def test_ranges_of_any_values(ordered: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of two queries or, in order, of four, which are looked at by two; tiles by turns."""
    few = {"GROUP_PAIRS": 18, "LEAST_GROUPS": 1, "SPAN": 2, "LEAST_TURNS": 1, "PROGRAMS": 6}
    for name, value in few.items():
        monkeypatch.setattr(attention_bwd, name, value)
    g = torch.Generator().manual_seed(seed)
    shapes = (7, 9, 512), (90, 512), (7, 9, 512)
    q, kv, do = (torch.randn(*shape, generator=g).bfloat16() for shape in shapes)
    ranges = hostile(7, 90, g)
    out, lse = flashdsa.sparse_mla_fwd(q, kv, ranges, backend="cpu")[:2]
    do[4, 1, 7] = float("nan")  # which rows that its query does not see never show
    given = q, kv, do, lse, out, ranges
    with emulation(small_device(AMPERE)) as emulator:
        found = flashdsa.mla_bwd(*given, backend=BACKEND, deterministic=ordered)
    noted = {finding.code for finding in emulator.findings} - {"same-value-race"}
    assert noted == (set() if ordered else {"unordered-float-additions"})
    doubles = [x.double() if isinstance(x, Tensor) else x for x in given]
    wanted = flashdsa.mla_bwd(*doubles, backend="cpu")
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one.isfinite(), other.isfinite())
        right, error = (x.nan_to_num(0) for x in (other, one.double() - other))
        assert error.norm() <= 5e-3 * right.norm()
    assert not found[1][wanted[1] == 0].any()


def test_splits_follow_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other splits have slots of a short range than of a short list; the rest write two numbers."""
    g, kept = torch.Generator().manual_seed(0), []
    launch = attention.launch

    def noted(
        runner: Any, kernel: Any, grid: Any, arguments: Any, *rest: Any, **named: Any
    ) -> None:
        launch(runner, kernel, grid, arguments, *rest, **named)
        kept.append((kernel.__name__, grid, arguments))

    monkeypatch.setattr(attention, "launch", noted)
    q, kv = (torch.randn(*shape, generator=g).bfloat16() for shape in ((1, 8, 512), (600, 512)))
    ends = torch.tensor([[37], [77]]).int()
    lists: dict[str, Any] = {
        "extra_kv": kv, "extra_indices": torch.randint(600, (1, 40), generator=g).int(),
    }  # fmt: skip
    with emulation(replace(small_device(AMPERE), num_sms=7)):
        found = flashdsa.sparse_mla_fwd(q, kv, tuple(ends), backend=BACKEND, **lists)
    wanted = flashdsa.sparse_mla_fwd(q, kv, tuple(ends), backend="cpu", **lists)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-2, rtol=1e-2)
    (name, grid, arguments), _ = kept
    parts = arguments[-3].view(grid[1], 8, 514)
    worked = (parts[..., :512].contiguous().view(torch.int32) != POISONED).any(2).any(1)
    blocks = 2 + 2  # of 32 slots
    assert (name, int(worked.sum())) == ("forward", blocks)
    assert grid[1] > blocks
