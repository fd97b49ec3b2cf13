"""Reads in front of a wait, for controls of workbench/sanitizers/run.py: the fused indexer is compiled with
one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

NO_WORD = -12345678
"""Neither a count nor a weight."""


def early_read() -> Callable[[Any], None]:
    """A function that reads an array's first words; they are never what it compares them with, but
    who compiles it cannot know."""
    from cutlass import cute

    @cute.jit  # type: ignore[untyped-decorator]
    def read(words: Any) -> None:
        lane = cute.arch.lane_idx()
        if words[lane] == words.element_type(NO_WORD):
            words[lane] = words.element_type(0)

    return read  # type: ignore[no-any-return]


@contextmanager
def counts_read_early() -> Iterator[None]:
    """Read counts before their barrier says that the other CTAs' messages (st.async) are there."""
    from flashdsa.kernels.indexer.select import exchange, threshold

    read = early_read()

    def early(select: Any, cluster: Any, *others: Any) -> Any:
        read(cluster.coarse)
        return exchange.find_kth(select, cluster, *others)

    with patch.object(threshold, "find_kth", early):
        yield


@contextmanager
def weights_read_early() -> Iterator[None]:
    """Read weights before the barrier says that the copy engine has brought them."""
    from flashdsa.kernels.indexer.schedule import work_tile
    from flashdsa.kernels.indexer.select import select_rows

    read = early_read()

    def early(inputs: Any, *others: Any) -> Any:
        read(inputs.weights)
        return work_tile.wait_for_tile(inputs, *others)

    with patch.object(select_rows, "wait_for_tile", early):
        yield
