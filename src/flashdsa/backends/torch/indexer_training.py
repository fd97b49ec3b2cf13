"""Training the indexer by torch on any device."""

from __future__ import annotations

from functools import partial

from flashdsa.backends.cpu import indexer_training
from flashdsa.backends.cpu.indexer_training import kl, kl_backward
from flashdsa.backends.cpu.tiling import DEVICE

__all__ = ["attention_target", "backward", "kl", "kl_backward", "scores"]

attention_target = partial(indexer_training.attention_target, mode=DEVICE)
scores = partial(indexer_training.scores, mode=DEVICE)
backward = partial(indexer_training.backward, mode=DEVICE)
