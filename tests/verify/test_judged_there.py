"""References and judges compute where a case's tensors are: on a GPU, float64 of a model's sizes is
fast, and on its host it takes minutes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import flashdsa
from flashdsa.verify.check_list import OPERATIONS, checks_of
from flashdsa.verify.compare import Comparison, failures
from tests.support.elsewhere import DEVICE, Elsewhere, is_there

PACKAGE = Path(flashdsa.__file__).parent
FOLDERS = (PACKAGE / "verify", PACKAGE / "reference")
ON_THE_HOST = ("quant.py", "_cases.py")
"""Files that may take tensors to it: for exact bytes, and for what is drawn there."""


@pytest.mark.parametrize("operation", OPERATIONS)
def test_nothing_is_judged_on_the_host(operation: str) -> None:
    verdicts: list[Comparison] = []
    with Elsewhere(*FOLDERS) as there:
        checks = [one for one in checks_of(0, "cpu", str(DEVICE)) if one.operation == operation]
        for check in checks[: -(-len(checks) // 3)]:  # the smaller ones
            verdicts += check.judge()
    assert verdicts and not failures(verdicts)
    assert [place for place in there.found if not any(one in place for one in ON_THE_HOST)] == []


@pytest.mark.parametrize(
    ("wrong", "finding"),
    [
        (lambda x: x.cpu(), "moves to the host"),
        (lambda x: x.to("cpu", torch.float64), "moves to the host"),
        (lambda x: x.to(device="cpu"), "moves to the host"),
        (lambda x: x + torch.ones(3), "mixes devices"),
        (lambda x: torch.where(x > 0, x.double().sum(), torch.ones(3, device=x.device)), ""),
    ],
)
def test_the_host_is_noticed(wrong: Callable[[Tensor], Tensor], finding: str) -> None:
    with Elsewhere(Path(__file__)) as there:
        x = torch.ones(3).to(DEVICE)
        assert is_there(x) and x.device == DEVICE and not there.found
        wrong(x)
    assert len(there.found) == bool(finding) and all(one.endswith(finding) for one in there.found)
