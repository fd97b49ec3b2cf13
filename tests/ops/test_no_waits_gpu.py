"""No backward waits for the GPU, and caches are written in CUDA graphs; of calls see
tests/kernels/test_every_operation_gpu.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import flashdsa
from tests.support.hopper_gpu import HOPPER_GPU, capture
from workbench.public_calls import public_calls

pytestmark = HOPPER_GPU

DIFFERENTIABLE = ("sparse_mla", "indexer_scores", "indexer_kl_loss", "indexer_kl_loss_dense")


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """torch raises where it waits for the GPU."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_waiting_is_seen() -> None:
    x = torch.ones(3, device="cuda")
    with waiting_is_an_error(), pytest.raises(RuntimeError, match="synchroniz"):
        x[torch.zeros((), dtype=torch.int64, device="cuda")]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_a_backward_waits_for_nothing(name: str) -> None:
    function, arguments, _ = public_calls("cuda")[name]
    for argument in ("q", "kv") if name == "sparse_mla" else ("q_index", "k_index", "weights"):
        arguments[argument].requires_grad_()
    function(**arguments).sum().backward()
    with waiting_is_an_error():
        function(**arguments).sum().backward()


@pytest.mark.parametrize("packed", [False, True])
def test_a_graph_writes_a_kv_cache_where_new_slots_say(packed: bool) -> None:
    """Slots outside are skipped there: nothing reads them on the host."""
    generator = torch.Generator("cuda").manual_seed(0)
    width, dtype = (656, torch.uint8) if packed else (576, torch.bfloat16)
    cache = torch.zeros(3, 64, width, dtype=dtype, device="cuda")
    kv = torch.zeros(5, 576, device="cuda")
    slots = torch.full((5,), -1, dtype=torch.int32, device="cuda")
    graph, _ = capture(lambda: flashdsa.write_kv_cache(kv, slots, cache))
    for given in ([7, -1, 64, 191, 0], [192, 5, -9, 130, 2], [-1] * 5):
        kv.normal_(generator=generator)
        slots.copy_(torch.tensor(given))
        expected = cache.clone()
        flat = expected.view(-1, width)
        rows = flashdsa.quantize_kv(kv) if packed else kv.bfloat16()
        for row, slot in zip(rows, given, strict=True):
            if 0 <= slot < len(flat):
                flat[slot] = row
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(cache, expected)
