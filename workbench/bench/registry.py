"""The benches by name: an operation, its cases, its peers.

Cases are any iterable of data (`flashdsa.bench.cases.Case`): what draws shapes from a distribution
gives another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flashdsa.bench.cases import Case, Operation
from flashdsa.bench.runner import OPERATIONS, Peer
from workbench.bench import attention, indexer, prefill, two_levels, v41


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
    "two_levels": Bench(two_levels.OPERATION, two_levels.CASES, two_levels.PEERS),
    "v41_decode": Bench(v41.OPERATION, v41.CASES),
    "indexer_training": Bench(
        OPERATIONS["indexer_training"], OPERATIONS["indexer_training"].cases["cuda"]
    ),
}
