"""The fp8 indexer by torch on any device."""

from __future__ import annotations

from functools import partial

from flashdsa.backends.cpu import indexer
from flashdsa.backends.cpu.tiling import DEVICE

topk_indexer = partial(indexer.topk_indexer, mode=DEVICE)
logits = partial(indexer.logits, mode=DEVICE)
