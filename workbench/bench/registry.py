"""The benches by name: an operation, its cases, its peers.

Cases are any iterable of data (`flashdsa.bench.cases.Case`): what draws shapes from a distribution
gives another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from flashdsa.bench.attention import draw_ids
from flashdsa.bench.cases import Case, Operation, Task
from flashdsa.bench.runner import OPERATIONS, Peer
from flashdsa.problem import PAGE_SIZE
from workbench.bench import attention, indexer, prefill
from workbench.draws.distribution import COLUMNS, WINDOW
from workbench.draws.two_sources import Inputs, Source, forward_task, paged_rows


def _make_v41(case: Case, device: str, seed: int, backend: str) -> Task:
    """DeepSeek-V4.1's decode, which no other library serves on Hopper.

    Options: rows, the format of entries; window, that of a window's rows besides.
    """
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


_V41_CASES = tuple(
    Case(queries, 2**22, 64, options=options, name=f"{queries}, {' + '.join(options.values())}")
    for options in ({"rows": "v41"}, {"rows": "v41_fp4"}, {"window": "v41", "rows": "v41_fp4"})
    for queries in (1, 8, 64, 128)
)
_V41 = Operation("v41_decode", _make_v41, {"cuda": _V41_CASES})


@dataclass(frozen=True)
class Bench:
    """A benchmark that `python -m workbench bench NAME` times.

    Attributes:
        packages: of the peers, whose versions are recorded.
    """

    operation: Operation
    cases: Iterable[Case]
    peers: Mapping[str, Peer] = field(default_factory=dict)
    packages: tuple[str, ...] = ()


_FLASH_MLA = ("sgl-flash-mla",)
_INDEXER = ("sgl-deep-gemm", "nvidia-cudnn-frontend", "flashinfer-python")
BENCHES = {
    "sparse_mla_fwd": Bench(
        OPERATIONS["sparse_mla_fwd"], attention.FORWARD_CASES, attention.FORWARD_PEERS, _FLASH_MLA
    ),
    "sparse_mla_decode": Bench(
        OPERATIONS["sparse_mla_decode"], attention.DECODE_CASES, attention.DECODE_PEERS, _FLASH_MLA
    ),
    "mla_bwd": Bench(
        OPERATIONS["mla_bwd"],
        attention.BACKWARD_CASES,
        attention.BACKWARD_PEERS,
        ("nvidia-cudnn-frontend",),
    ),
    "indexer": Bench(indexer.OPERATION, indexer.CASES, indexer.PEERS, _INDEXER),
    "prefill": Bench(prefill.OPERATION, prefill.CASES, prefill.PEERS, _INDEXER),
    "v41_decode": Bench(_V41, _V41_CASES),
    "indexer_training": Bench(
        OPERATIONS["indexer_training"], OPERATIONS["indexer_training"].cases["cuda"]
    ),
}
