"""The indexer and its scores on Blackwell GPUs."""

from __future__ import annotations

from functools import partial

from flashdsa.backends.indexer import logits, topk_indexer
from flashdsa.kernels.catalog import INDEXER_LOGITS_SM100, INDEXER_ORDER_SM100, INDEXER_SM100

bind = partial(topk_indexer.bind, INDEXER_SM100, INDEXER_ORDER_SM100, None)
bind_logits = partial(logits.bind, INDEXER_LOGITS_SM100)
