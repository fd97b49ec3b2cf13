"""The indexer of many queries over shared keys by torch on any device."""

from __future__ import annotations

from functools import partial

from flashdsa.backends.cpu import prefill
from flashdsa.backends.cpu.tiling import DEVICE

topk_prefill = partial(prefill.topk_prefill, mode=DEVICE)
logits = partial(prefill.logits, mode=DEVICE)
