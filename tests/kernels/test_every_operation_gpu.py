"""Every public operation on a GPU: as a thread's first call, without a wait, in a CUDA graph."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import flashdsa
from tests.support.hopper_gpu import HOPPER_GPU
from workbench.public_calls import PREFILL, Call, public_calls

pytestmark = HOPPER_GPU
CALLS = list(public_calls("cpu"))
"""Names."""


@pytest.fixture(scope="module")
def calls() -> dict[str, Call]:
    """Each was made twice: nothing is compiled or bound again."""
    made = public_calls("cuda", PREFILL)
    for name, call in made.items():
        public, _, operation = name.partition(", ")
        if public == "bind":
            serve = flashdsa.bind(operation, tuple(call.arguments.values()))
            made[name] = call._replace(function=_of_names(serve))
    for call in made.values():
        call()
        call()
    torch.cuda.synchronize()
    return made


def _of_names(serve: Callable[[Sequence[Any]], Any]) -> Callable[..., Any]:
    """Return a bound function as one of operands by name, in their order."""
    return lambda **operands: serve(tuple(operands.values()))


@pytest.mark.parametrize("name", CALLS)
def test_a_thread_may_begin_with_it(name: str, calls: dict[str, Call]) -> None:
    wrong: list[Exception] = []

    def begin() -> None:
        try:
            calls[name]()
        except Exception as error:
            wrong.append(error)

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert wrong == []


@pytest.mark.parametrize("name", CALLS)
def test_the_host_waits_for_nothing(name: str, calls: dict[str, Call]) -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        calls[name]()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", CALLS)
def test_a_cuda_graph_captures_it(name: str, calls: dict[str, Call]) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls[name]()
    graph.replay()
    torch.cuda.synchronize()


@pytest.mark.parametrize("ambient", ["float64", "bfloat16", "autocast"])
@pytest.mark.parametrize("name", CALLS)
def test_default_dtype_and_autocast_change_nothing(
    name: str, ambient: str, calls: dict[str, Call]
) -> None:
    """But the order of additions to dKV and dK, where no order was asked for."""
    expected = [x.clone() for x in calls[name].results()]
    assert expected
    if ambient == "autocast":
        with torch.autocast("cuda", torch.bfloat16):
            got = calls[name].results()
    else:
        torch.set_default_dtype(getattr(torch, ambient))
        try:
            got = calls[name].results()
        finally:
            torch.set_default_dtype(torch.float32)
    for one, wanted in zip(got, expected, strict=True):
        assert one.dtype == wanted.dtype
        if name in ("mla_bwd", "mla_bwd, added", "mla_bwd, two sources", "indexer_bwd"):
            torch.testing.assert_close(one, wanted, rtol=1e-3, atol=1e-2)
        else:
            assert torch.equal(one, wanted)
