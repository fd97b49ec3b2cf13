"""The indexer and its scores on Hopper GPUs."""

from __future__ import annotations

from functools import partial

from flashdsa.backends.indexer import logits as scores
from flashdsa.backends.indexer import topk_indexer as fused
from flashdsa.kernels.catalog import INDEXER, INDEXER_LOGITS, INDEXER_UNSCORED

bind = partial(fused.bind, INDEXER, INDEXER_UNSCORED)
bind_logits = partial(scores.bind, INDEXER_LOGITS)
