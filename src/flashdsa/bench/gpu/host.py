"""What calls cost the host: ours, and beside them the least that this host takes for any."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch

import flashdsa
from flashdsa.bench.gpu.cases import BenchCase
from flashdsa.bench.gpu.inputs import make_inputs
from flashdsa.bench.gpu.protocol import Timer
from flashdsa.bench.gpu.thresholds import LAUNCH, OPERATION
from flashdsa.ops.registration import custom_op
from flashdsa.ops.table import DSA_TOPK_INDEXER

EAGER = "eager call"
WIDE = "raw launch, wide table"
ADD, EMPTY = "x.add_(1)", "empty torch op"
WIDE_PAGES = 2048
"""Of a table in which rows may be long enough to be shared by several clusters."""


def host_us(device: str, timer: Timer) -> dict[str, float]:
    """Microseconds of a call on one row of one page: short on the GPU, so that its queue never
    fills. The operation is called as torch does, through the dispatcher, and as users do."""
    inputs = make_inputs(BenchCase("host", "host", (64,)), device)
    table = torch.zeros(1, WIDE_PAGES, dtype=torch.int32, device=device)
    wide = replace(inputs, block_table=table).operands
    settings = (False, False, True, "auto")
    return {
        LAUNCH: timer.host_us(partial(flashdsa.dsa_topk_indexer_launch, *inputs.operands)),
        WIDE: timer.host_us(partial(flashdsa.dsa_topk_indexer_launch, *wide)),
        OPERATION: timer.host_us(partial(custom_op(DSA_TOPK_INDEXER), *inputs.operands, *settings)),
        EAGER: timer.host_us(partial(flashdsa.dsa_topk_indexer, *inputs.operands)),
    }


def host_floor_us(device: str, timer: Timer) -> dict[str, float]:
    """Microseconds of torch's own smallest launch, and of an operation with the indexer's
    arguments and an empty body in Python."""
    one = torch.zeros(1, device=device)
    operands = make_inputs(BenchCase("host", "host", (64,)), device).operands
    return {
        ADD: timer.host_us(lambda: one.add_(1)),
        EMPTY: timer.host_us(partial(_empty_op(), *operands, False, False, True, "auto")),
    }


@lru_cache
def _empty_op() -> Any:
    library = torch.library.Library("flashdsa_bench", "FRAGMENT")
    arguments = str(custom_op(DSA_TOPK_INDEXER)._schema).partition("(")[2]
    library.define(f"empty({arguments}")
    for key in ("CPU", "CUDA"):
        library.impl("empty", lambda *_: None, key)
    _empty_op.library = library  # type: ignore[attr-defined] # its definitions go with it
    return torch.ops.flashdsa_bench.empty.default
