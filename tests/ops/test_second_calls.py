"""Nothing of an earlier call, or of what memory held before, remains in a result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.public_calls import Call, public_calls

_NEW = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
"""Operations whose result holds what its memory held before."""


class Filled(TorchDispatchMode):
    """Within it memory that is not initialised has one byte everywhere; `filled` counts."""

    def __init__(self, byte: int) -> None:
        super().__init__()
        self.byte, self.filled = byte, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func._schema.name.removeprefix("aten::") in _NEW:
            memory = torch.empty(0, dtype=torch.uint8, device=found.device)
            memory.set_(found.untyped_storage()).fill_(self.byte)
            self.filled += 1
        return found


def of_zeros(call: Call) -> Call:
    """The same call over zeros, lists of half as many slots and new buffers."""
    changed = {}
    for name, value in call.arguments.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            value = torch.zeros_like(value)
        elif isinstance(value, Tensor) and name in ("topk_length", "seq_lens"):
            value = value // 2
        changed[name] = value
    return call._replace(arguments=changed)


def bits(results: list[Tensor]) -> list[list[int]]:
    """The bytes of each result."""
    return [x.flatten().view(torch.uint8).tolist() for x in results]


@pytest.mark.parametrize("name", public_calls("cpu"))
@pytest.mark.parametrize("served_by", ["cpu", "torch"])
def test_a_second_call_on_zeros_has_nothing_of_the_first(
    name: str, served_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHDSA_BACKEND", served_by)
    call = public_calls("cpu")[name]
    found = []
    for byte in (0, 0xA5):
        with Filled(byte):
            call.results()
            found.append(bits(of_zeros(call).results()))
    assert found[0] == found[1]


@pytest.mark.gpu
@pytest.mark.parametrize("name", public_calls("cpu"))
def test_a_second_call_on_zeros_has_nothing_of_the_first_on_a_gpu(name: str) -> None:
    """Workspaces outlast calls there; a third call in memory of other bytes has the same bits."""
    call = public_calls("cuda")[name]
    call.results()
    zeros = of_zeros(call)
    found = [bits(zeros.results())]
    call.results()
    with Filled(0xA5):
        found.append(bits(zeros.results()))
    assert found[0] == found[1]


def test_what_remains_is_seen() -> None:
    """Memory that a result does not write shows the byte."""
    with Filled(0xA5) as memory:
        assert torch.empty(3, dtype=torch.uint8).tolist() == [0xA5] * 3
        assert torch.ones(2).new_empty(1).view(torch.int32).item() == -0x5A5A5A5B
    assert memory.filled == 2
