"""The indexer's KL and its gradient beside Triton's kernels, of torch's operations."""

from __future__ import annotations

from functools import partial

from flashdsa.backends.cpu import indexer_training
from flashdsa.backends.runner import by_torch

bind = partial(by_torch, indexer_training.kl)
bind_backward = partial(by_torch, indexer_training.kl_backward)
