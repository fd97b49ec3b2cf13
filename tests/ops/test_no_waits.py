"""No operation that torch's own operations compute makes the host wait for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flashdsa
import flashdsa.distributed
from flashdsa.ops.indexer_loss_dense import loss_and_gradients
from flashdsa.row_formats import ROW_FORMATS
from workbench.public_calls import public_calls

_READING = (
    "_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "unique", "_unique",
    "_unique2", "unique_dim", "unique_consecutive",
)  # fmt: skip
"""What gives a number to Python, or a tensor as long as values say."""


class HostReads(TorchDispatchMode):
    """Within it, `found` has the name of each operation that would wait, one a call.

    Copies to the host (`cpu`, `tolist`, `numpy`) are none on the CPU, and are not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        masks = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in args[1]
        )
        counted = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        if name in _READING or masks or counted:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def _kv_cache(packed: bool) -> torch.Tensor:
    if packed:
        return torch.zeros(3, 4, 656, dtype=torch.uint8)
    return torch.zeros(3, 4, 576, dtype=torch.bfloat16)


def _write_kv_cache(packed: bool) -> None:
    slots = torch.tensor([2, -1, 7], dtype=torch.int32)
    flashdsa.write_kv_cache(torch.randn(3, 576), slots, _kv_cache(packed))


def _dense_loss() -> None:
    q_index, k_index = torch.randn(3, 2, 128), torch.randn(5, 128)
    weights, key_end = torch.randn(3, 2), torch.tensor([1, 3, 5], dtype=torch.int32)
    attention = torch.randn(3, 4, 16), torch.randn(5, 16), torch.randn(3, 4)
    trained = q_index, k_index, weights
    loss_and_gradients(*trained, *attention, key_end, None, None, 0.3, 2**20, True)


def _merge_attention() -> None:
    flashdsa.merge_attention(torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4))


def _local_slots() -> None:
    positions = torch.tensor([[65, 3, -1]], dtype=torch.int32)
    table = torch.tensor([[1, 0]], dtype=torch.int32)
    mesh: Any = object()
    flashdsa.distributed.local_slots(positions, table, mesh)


def _pages_of(kv_format: str) -> None:
    form = ROW_FORMATS[kv_format]
    pages = torch.zeros(3, 9000, dtype=torch.uint8)[:, : 4 * form.row_bytes]
    cache = pages.unflatten(1, (4, form.row_bytes))
    kv, slots = torch.randn(3, 512), torch.tensor([2, -1, 7])
    flashdsa.write_kv_cache(kv, slots, cache, kv_format=kv_format)
    flashdsa.read_kv_cache(cache, slots, kv_format=kv_format)


COMPOSED: dict[str, Callable[[], Any]] = {
    "write_kv_cache": lambda: _write_kv_cache(packed=False),
    "write_kv_cache, packed": lambda: _write_kv_cache(packed=True),
    "read_kv_cache": lambda: flashdsa.read_kv_cache(_kv_cache(False), torch.tensor([2, -1, 99])),
    "read_kv_cache, packed": lambda: flashdsa.read_kv_cache(_kv_cache(True), torch.tensor([2, 9])),
    "pages of v4": lambda: _pages_of("v4"),
    "pages of v41_fp4": lambda: _pages_of("v41_fp4"),
    "quantize_kv": lambda: flashdsa.quantize_kv(torch.randn(3, 576)),
    "fake_quantize_index": lambda: flashdsa.fake_quantize_index(torch.randn(3, 128)),
    "merge_attention": _merge_attention,
    "lse_for_merge": lambda: flashdsa.lse_for_merge(torch.tensor([1.0, torch.inf])),
    "causal_ranges": lambda: flashdsa.causal_ranges(
        torch.tensor([0, 2, 5]), torch.tensor([0, 4, 9]), num_queries=5
    ),
    "indexer_kl_loss_dense": _dense_loss,
    "expand_blocks": public_calls("cpu")["expand_blocks"],
    **{name: public_calls("cpu")[name] for name in ("compress_kv", "compress_kv_bwd")},
    "compress_kv, state": public_calls("cpu")["compress_kv, state"],
    "compress_kv, cache": lambda: flashdsa.compress_kv(
        *torch.zeros(2, 8, 4), ratio=4, out=torch.zeros(16, 4).bfloat16(), slots=torch.arange(8)
    ),
    "rotate_tail": public_calls("cpu")["rotate_tail"],
    "local_slots": _local_slots,
}


@pytest.mark.parametrize("name", COMPOSED)
def test_nothing_is_read_by_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashdsa.dispatch.checks.are_values_read", lambda tensor: False)
    monkeypatch.setattr("flashdsa.distributed.decode._are_checked", lambda tensor: False)
    group = SimpleNamespace(name="", size=2, rank=1)
    monkeypatch.setattr("flashdsa.distributed.decode.group_of", lambda mesh: group)
    with HostReads() as reads:
        COMPOSED[name]()
    assert reads.found == []


WAITING: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "an index without dimensions": lambda x: x[torch.tensor(1)],
    "bool": lambda x: bool((x > 0).any()),
    "a mask": lambda x: x[x > 0],
    "a mask that is written": lambda x: x.__setitem__(x > 0, torch.ones(3)),
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: x.unique(),
    "repeats": lambda x: x.repeat_interleave(torch.tensor([1, 2, 3])),
}


@pytest.mark.parametrize("name", WAITING)
def test_what_waits_is_seen(name: str) -> None:
    x = torch.tensor([1.0, 2.0, 3.0])
    with HostReads() as reads:
        WAITING[name](x)
    assert reads.found


def test_the_gpus_test_calls_every_public_operation() -> None:
    called = {name.partition(",")[0] for name in public_calls("cpu")}
    # A warm-up, which waits: it is there to be waited for. An explanation computes nothing.
    assert called == set(flashdsa.__all__) - {"explain", "warm_up"}
