"""The indexer and its scores on Hopper GPUs."""

from __future__ import annotations

from functools import partial

from flashdsa.backends.indexer import logits as scores
from flashdsa.backends.indexer import topk_indexer as fused
from flashdsa.kernels.catalog import INDEXER, INDEXER_LOGITS

topk_indexer = partial(fused.topk_indexer, INDEXER)
bind = partial(fused.bind, INDEXER)
logits = partial(scores.logits, INDEXER_LOGITS)
