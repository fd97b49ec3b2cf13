"""Decode of DeepSeek-V4.1's rows, which no other library serves on Hopper: bytes a second."""

from __future__ import annotations

from dataclasses import replace

import torch

from flashdsa.bench.attention import draw_ids
from flashdsa.bench.cases import Case, Operation, Task
from flashdsa.problem import PAGE_SIZE
from workbench.draws.distribution import COLUMNS, WINDOW
from workbench.draws.two_sources import Inputs, Source, forward_task, paged_rows


def make(case: Case, device: str, seed: int, backend: str) -> Task:
    """Options: rows, the format of entries; window, that of a window's rows besides."""
    g = torch.Generator(device).manual_seed(seed)
    sources = []
    for option, topk in (("window", WINDOW), ("rows", case.topk)):
        if option in case.options:
            name, ids = case.options[option], draw_ids(replace(case, topk=topk), g)
            kv = paged_rows(case.s_kv // PAGE_SIZE, name, g)
            sources.append(Source(kv, ids, row_format=name))
    q = torch.randn(case.s, case.h, COLUMNS, device=device, generator=g).bfloat16()
    sink = torch.randn(case.h, device=device, generator=g)
    return forward_task(Inputs(q, sources, sink), backend, decodes=True)


CASES = tuple(
    Case(queries, 2**22, 64, options=options, name=f"{queries}, {' + '.join(options.values())}")
    for options in ({"rows": "v41"}, {"rows": "v41_fp4"}, {"window": "v41", "rows": "v41_fp4"})
    for queries in (1, 8, 64, 128)
)
OPERATION = Operation("v41_decode", make, {"cuda": CASES})
