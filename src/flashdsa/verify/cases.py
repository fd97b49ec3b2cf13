"""The cases that every backend runs: one list per operator feeds the tests and `flashdsa check`."""

from flashdsa.verify.indexer_cases import (
    INDEXER_CASES,
    IndexerCase,
    IndexerInputs,
    make_indexer_inputs,
)
from flashdsa.verify.indexer_training_cases import (
    INDEXER_TRAINING_CASES,
    IndexerTrainingCase,
    IndexerTrainingInputs,
    make_indexer_training_inputs,
)
from flashdsa.verify.prefill_cases import (
    PREFILL_CASES,
    PrefillCase,
    PrefillInputs,
    make_prefill_inputs,
)
from flashdsa.verify.sparse_mla_cases import (
    PACKED_CASES,
    SPARSE_MLA_CASES,
    SparseMlaCase,
    SparseMlaInputs,
    make_sparse_mla_inputs,
)

__all__ = [
    "INDEXER_CASES",
    "INDEXER_TRAINING_CASES",
    "PACKED_CASES",
    "PREFILL_CASES",
    "SPARSE_MLA_CASES",
    "IndexerCase",
    "IndexerInputs",
    "IndexerTrainingCase",
    "IndexerTrainingInputs",
    "PrefillCase",
    "PrefillInputs",
    "SparseMlaCase",
    "SparseMlaInputs",
    "make_indexer_inputs",
    "make_indexer_training_inputs",
    "make_prefill_inputs",
    "make_sparse_mla_inputs",
]

for _cases in (
    [*SPARSE_MLA_CASES, *PACKED_CASES],
    INDEXER_CASES,
    PREFILL_CASES,
    INDEXER_TRAINING_CASES,
):
    _names = [case.name for case in _cases]
    # Results are reported by name: two cases of one name would hide each other.
    assert len(set(_names)) == len(_names), f"case names repeat: {sorted(_names)}"
