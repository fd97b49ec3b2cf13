"""The indexer and its scores on Hopper GPUs."""

from __future__ import annotations

from functools import partial

from flashdsa.backends.indexer import logits as scores
from flashdsa.backends.indexer import topk_indexer
from flashdsa.backends.indexer.launch import Others
from flashdsa.backends.sm90.ranked import bind_ranked, bind_unscored
from flashdsa.kernels.catalog import INDEXER, INDEXER_LOGITS, INDEXER_ORDER

bind = partial(topk_indexer.bind, INDEXER, INDEXER_ORDER, Others(bind_ranked, bind_unscored))
bind_logits = partial(scores.bind, INDEXER_LOGITS)
