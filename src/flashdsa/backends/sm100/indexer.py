"""The indexer and its scores on Blackwell GPUs."""

from __future__ import annotations

from functools import partial

from flashdsa.backends.indexer import logits as scores
from flashdsa.backends.indexer import topk_indexer as fused
from flashdsa.kernels.catalog import INDEXER_LOGITS_SM100, INDEXER_SM100

topk_indexer = partial(fused.topk_indexer, INDEXER_SM100)
bind = partial(fused.bind, INDEXER_SM100)
logits = partial(scores.logits, INDEXER_LOGITS_SM100)
