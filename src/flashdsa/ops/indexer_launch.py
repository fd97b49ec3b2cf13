"""The indexer's short ways: a call like one that was served goes straight to the compiled function.

torch's dispatcher takes 5 us of host time, the checks 15, where a launch takes 6.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashdsa.backends.catalog import registry
from flashdsa.backends.gpu.context import THREAD
from flashdsa.backends.registry import Implementation
from flashdsa.operands import TopkIndexerOperands
from flashdsa.ops.again import Serve
from flashdsa.ops.spec import OpSpec
from flashdsa.ops.transforms import without_autocast
from flashdsa.problem import PAGE_BYTES, PAGE_SIZE
from flashdsa.settings import raw_settings

REFUSALS = (TypeError, ValueError, BufferError)
"""Errors of a compiled function before it launches, for tensors that it was not compiled for. Its
RuntimeError is the driver's: the caller gets it."""


Launch = tuple[Callable[..., Any], int, int]
"""A function of the operation's tensors and two numbers, and the numbers; a plain tuple, since a
NamedTuple takes 20 ns more to unpack."""


class LaunchCache:
    """Launches by key: the numbers of elements of the queries and of the ids, and the GPU; for
    checked calls also the order, the kind of the ids and what chose the backend.

    Two calls with one key may differ in their rows (2 rows of 32 heads and 1024 ids, one of 64 and
    2048): if both come, the kept launch looks at the rows. Rows in the key would cost every call
    45 ns.
    """

    def __init__(self, most: int = 4096) -> None:
        """Holds at most so many keys: the next one empties it."""
        self._most = most
        self._by_rows: dict[tuple[Any, ...], dict[int, Launch]] = {}
        self._launches: dict[tuple[Any, ...], Launch] = {}
        self.find = self._launches.get

    def keep(self, key: tuple[Any, ...], rows: int, launch: Launch) -> None:
        """`launch` serves calls with this key and so many rows."""
        if key not in self._launches and len(self._launches) >= self._most:
            self.clear()
        by_rows = self._by_rows.setdefault(key, {})
        by_rows[rows] = launch
        self._launches[key] = launch if len(by_rows) == 1 else (_of_rows(by_rows), 0, 0)

    def clear(self) -> None:
        """Every call is new again."""
        self._by_rows.clear()
        self._launches.clear()


def _of_rows(by_rows: Mapping[int, Launch]) -> Callable[..., Any]:
    """A launch's function that launches as its number of rows says."""

    def function(*arguments: Any) -> Any:
        operands = TopkIndexerOperands(*arguments[: len(TopkIndexerOperands._fields)])
        launch = by_rows.get(operands.seq_lens.numel())
        if launch is None:
            raise ValueError("no kernel was launched for so many rows yet")
        known, first, second = launch
        return known(*operands, first, second)

    return function


LAUNCHES = LaunchCache()
"""This process's."""
find_launch = LAUNCHES.find
"""The launch of a key, or None; without a look at `LAUNCHES`, which costs as much again."""


def keep(chosen: Implementation, operands: TopkIndexerOperands, choice: tuple[Any, ...]) -> None:
    """Launch calls like this one, which `chosen` served, directly from now on.

    Args:
        choice: the order, the kind of the ids and the backend that was asked for; empty for
            unchecked calls.
    """
    queries, ids = operands.q_index_fp8, operands.topk_indices
    rows, topk = ids.shape
    if not rows or operands.block_table.shape[0] != rows:  # a kernel takes a table of rows
        return
    sorted, positions = choice[:2] if choice else (False, False)
    launch_config = chosen.load_launch_config(queries.device)
    config = launch_config(queries.shape[1], topk, sorted, positions, rows)
    if choice:
        choice += (raw_settings()[0],)
    key = (queries.numel(), ids.numel(), ids.get_device(), *choice)
    LAUNCHES.keep(key, rows, tuple(config))


def keeping(serve: Serve, chosen: Implementation, choice: tuple[Any, ...]) -> Serve:
    """`serve`, behind which calls alike are launched directly; arguments as for `keep`."""

    def run(given: Sequence[Any]) -> Any:
        results = serve(given)
        keep(chosen, TopkIndexerOperands(*given), choice)
        return results

    return run


def launch_again(
    q_index_fp8: Tensor,
    k_index_cache_fp8: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    topk_indices: Tensor,
    sorted: bool,
    positions: bool,
    backend: str,
) -> bool:
    """Launch a call like one that was checked and served; False: not served, nothing was written.

    A kernel's function refuses by itself what it was not compiled for. CuTe DSL's (4.8.1, in
    base_dsl/tvm_ffi_builder/tvm_ffi_builder.py; tests/kernels/indexer/test_sm90_refusals.py) holds
    every tensor to: its number of dimensions; its fixed sizes; one B; sizes that fit int32; no
    gaps, or stride 1 in the table's rows; its alignment; the type cuda and one device index; its
    dtype, but not the sign of integers. Left to check here are those that must be int32, and the
    numbers of pages and of the table's rows. A refused call goes to the checks, which say what is
    wrong with it.

    Ids that lie in the table or among the lengths are looked for, in some 0.4 us. That they share
    no memory with the queries, the cache and the weights is checked in the first such call only.
    """
    raw_backend, raw_check = raw_settings()
    num_ids = topk_indices.numel()
    launch = find_launch(
        (
            q_index_fp8.numel(),
            num_ids,
            topk_indices.get_device(),
            sorted,
            positions,
            backend,
            raw_backend,
        )
    )
    try:
        if (
            launch is None
            or raw_check is not None
            or not THREAD.has_context
            or not 0 < k_index_cache_fp8.numel() <= 2**31 // PAGE_SIZE * PAGE_BYTES
            or not (seq_lens.dtype is block_table.dtype is topk_indices.dtype is torch.int32)
            or block_table.shape[0] != (rows := seq_lens.shape[0])
        ):
            return False
        ids = topk_indices.data_ptr()
        if (
            -4 * num_ids
            < ids - block_table.data_ptr()
            < 4 * max(rows * block_table.stride(0), block_table.numel())
            or -4 * num_ids < ids - seq_lens.data_ptr() < 4 * rows
        ):
            return False
        function, first, second = launch
        function(
            q_index_fp8,
            k_index_cache_fp8,
            weights,
            seq_lens,
            block_table,
            topk_indices,
            first,
            second,
        )
    except REFUSALS:
        return False
    except RuntimeError:
        # Nested and sparse tensors have no sizes, strides or address; else it is the driver's.
        operands = q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table, topk_indices
        if all(x.layout is torch.strided and not x.is_nested for x in operands):
            raise
        return False
    torch._C._increment_version((topk_indices,))
    return True


def serve_unchecked(spec: OpSpec, operands: Any) -> None:
    """An unchecked call of sizes that were not there before, or that no kernel is launched for."""
    queries, ids = operands.q_index_fp8, operands.topk_indices
    sizes = {"H": queries.shape[1], "topk": ids.shape[1], "next_n": 1}
    problem = spec.problem(operands, {"sorted": False, "positions": False}, sizes)
    chosen = registry.select(problem)
    serve = partial(chosen.load(), sorted=False, positions=False, check=False)
    without_autocast(serve, operands)
    if chosen.launch_config:
        keep(chosen, operands, ())
