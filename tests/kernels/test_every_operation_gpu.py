"""Every public operation on a GPU: as a thread's first call, without a wait, in a CUDA graph."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import flashdsa
from tests.support.hopper_gpu import HOPPER_GPU
from workbench.public_calls import CALLS, Tensors

pytestmark = HOPPER_GPU


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    """Each call was made twice with them: nothing is compiled or bound again."""
    made = Tensors()
    for call in CALLS.values():
        call(made)
        call(made)
    torch.cuda.synchronize()
    return made


def test_none_is_missing() -> None:
    assert {name.partition(",")[0] for name in CALLS} == set(flashdsa.__all__) - {"warm_up"}


@pytest.mark.parametrize("name", CALLS)
def test_a_thread_may_begin_with_it(name: str, tensors: Tensors) -> None:
    wrong: list[Exception] = []

    def begin() -> None:
        try:
            CALLS[name](tensors)
        except Exception as error:
            wrong.append(error)

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert wrong == []


@pytest.mark.parametrize("name", CALLS)
def test_the_host_waits_for_nothing(name: str, tensors: Tensors) -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        CALLS[name](tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", CALLS)
def test_a_cuda_graph_captures_it(name: str, tensors: Tensors) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        CALLS[name](tensors)
    graph.replay()
    torch.cuda.synchronize()


def tensors_of(result: Any) -> list[torch.Tensor]:
    """The tensors of what a call returned."""
    if result is None:
        return []
    return [result] if isinstance(result, torch.Tensor) else list(result)


@pytest.mark.parametrize("ambient", ["float64", "bfloat16", "autocast"])
@pytest.mark.parametrize("name", CALLS)
def test_default_dtype_and_autocast_change_nothing(
    name: str, ambient: str, tensors: Tensors
) -> None:
    """But the order of additions to dKV and dK, where no order was asked for."""
    expected = [x.clone() for x in tensors_of(CALLS[name](tensors))]
    if ambient == "autocast":
        with torch.autocast("cuda", torch.bfloat16):
            got = tensors_of(CALLS[name](tensors))
    else:
        torch.set_default_dtype(getattr(torch, ambient))
        try:
            got = tensors_of(CALLS[name](tensors))
        finally:
            torch.set_default_dtype(torch.float32)
    for one, wanted in zip(got, expected, strict=True):
        assert one.dtype == wanted.dtype
        if name in ("mla_bwd", "indexer_bwd"):
            torch.testing.assert_close(one, wanted, rtol=1e-3, atol=1e-2)
        else:
            assert torch.equal(one, wanted)
